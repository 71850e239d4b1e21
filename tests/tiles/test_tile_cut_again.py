"""Functions that may read any place for each: computed whole, and what follows is cut again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak


class ShiftedWindows(nn.Module):
    """Attention in windows of 4 x 4 places, every second time shifted and masked, as in Swin transformers."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))

    def mask(self, x: Tensor) -> Tensor:
        numbers = x.new_zeros(1, x.size(1), x.size(2), 1)
        number = 0
        for rows in (slice(0, -4), slice(-4, -2), slice(-2, None)):
            for columns in (slice(0, -4), slice(-4, -2), slice(-2, None)):
                numbers[:, rows, columns] = number
                number += 1
        windows = self.windows(numbers).squeeze(-1)
        differ = windows.unsqueeze(1) - windows.unsqueeze(2)
        return differ.masked_fill(differ != 0, -100.0).masked_fill(differ == 0, 0.0)

    def windows(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        return x.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        for place, (norm, qkv) in enumerate(zip(self.norms, self.qkv, strict=True)):
            y = norm(x)
            if place % 2:
                y = torch.roll(y, shifts=(-2, -2), dims=(1, 2))
            q, k, v = qkv(self.windows(y)).chunk(3, -1)
            scores = q @ k.transpose(1, 2)
            if place % 2:
                mask = self.mask(x)
                scores = (scores.view(n, mask.size(0), 16, 16) + mask).view(-1, 16, 16)
            y = (scores.softmax(-1) @ v).view(n, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
            x = x + (torch.roll(y, shifts=(2, 2), dims=(1, 2)) if place % 2 else y)
        return self.last(x.permute(0, 3, 1, 2))


class Fourier(nn.Module):
    """A convolution of the spectrum beside one of places, as in LaMa."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.last = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(6, 6, 1),
            nn.Conv2d(7, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfftn(x, dim=(-2, -1), norm="ortho")
        real, imaginary = F.relu(self.far(torch.cat([spectrum.real, spectrum.imag], 1))).chunk(2, 1)
        far = torch.fft.irfftn(torch.complex(real, imaginary), s=x.shape[-2:], dim=(-2, -1), norm="ortho")
        return self.last(torch.cat([self.near(x), far], 1))


class Warp(nn.Module):
    """Features that are sampled along a flow, summed along rows and turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.flow, self.last = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 2), (4, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        y = F.grid_sample(x, self.flow(x).tanh().permute(0, 2, 3, 1), align_corners=True, padding_mode="border")
        return self.last(y.flip(2) - y.cumsum(2) / y.size(2))


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "windows": (ShiftedWindows, 2), "fourier": (Fourier, 1), "warp": (Warp, 3),
}  # fmt: skip


@pytest.mark.parametrize(("name", "batch"), [("windows", 1), ("windows", 3), ("fourier", 3), ("warp", 1)])
def test_it_is_that_of_one_call(name: str, batch: int) -> None:
    torch.manual_seed(0)
    make, times = MODULES[name]
    module, x = make().double(), structured((batch, 3, 36, 28))
    with torch.no_grad():
        expected = module(x)
        plan = pc.tile_plan(module, x, tile=8)
        assert [call.name for call in plan.graph.calls].count("cut_again") == times
        assert set(plan.graph.results) <= plan.kinds.dims.keys() and plan.sweeps[-1].strips > 3
        for tile in (8, (12, 8)):
            torch.testing.assert_close(pc.tile(module, x, tile=tile), expected, rtol=1e-9, atol=1e-12)
    given = [x.clone().requires_grad_() for _ in range(2)]
    grads = [
        torch.autograd.grad(call(one).square().sum(), [one, *module.parameters()])
        for call, one in zip((module, lambda x: pc.tile(module, x, tile=(12, 8))), given, strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_shifted_windows_keep_small_budgets() -> None:
    """Without all that follows the first shift being whole."""
    torch.manual_seed(0)
    module, x = ShiftedWindows(16, 4), structured((1, 3, 160, 128)).float()
    want = module(x)
    stock = allocated_peak(lambda: module(x))
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(module, x, budget=1000)
    assert refused.value.least < 0.6 * stock
    results: list[Tensor] = []
    peak = allocated_peak(lambda: results.append(pc.tile(module, x, refused.value.least)))
    assert peak - want.nbytes <= refused.value.least
    torch.testing.assert_close(results[0], want, rtol=1e-5, atol=1e-5)
