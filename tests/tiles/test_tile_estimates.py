"""What tiles of a backward pass are estimated to take, beside what they take when they run on values without data."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from test_tile_training import NETS, conv
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.tiles import kept
from patchconv_native.tiles.backward_costs import BackwardCosts
from patchconv_native.tiles.estimates import Estimates
from patchconv_native.tiles.graded import SAFE


class Mixed(nn.Module):
    """Attention over all places, excitation, a depthwise convolution, norms of channels, views and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.qkv = conv(3, 16), nn.GroupNorm(4, 16), nn.Conv2d(16, 24, 1)
        self.deep, self.channels, self.out = nn.Conv2d(16, 16, 5, padding=2, groups=16), nn.LayerNorm(16), conv(24, 8)
        self.squeeze = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = self.qkv(F.silu(self.norm(F.max_pool2d(x, 4)))).flatten(2).transpose(1, 2).chunk(3, -1)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).unflatten(2, (x.size(2) // 4, -1))
        y = F.gelu(self.channels(self.deep(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        y = x + y * torch.sigmoid(self.squeeze(y.mean((2, 3), keepdim=True)))
        return self.out(torch.cat([F.interpolate(seen, scale_factor=4.0), y], 1))


def volume() -> nn.Module:
    layers = [nn.Conv3d(2, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.LeakyReLU(), nn.Conv3d(8, 8, 3, 2, 1)]
    return nn.Sequential(*layers, nn.BatchNorm3d(8), nn.ReLU(), nn.ConvTranspose3d(8, 2, 2, 2))


BUDGETS = {"in training": "3MiB", "converted": "3MiB", "group norms": "2MiB", "to its loss": "3MiB", "a head": "2MiB"}
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    name: (NETS[name], (2, 3, 96, 80), budget) for name, budget in BUDGETS.items()
}
CASES |= {"mixed": (Mixed, (1, 3, 64, 64), "2MiB"), "volume": (volume, (1, 2, 24, 24, 24), "3MiB")}


@pytest.mark.parametrize("name", CASES)
def test_estimates_are_near_what_tiles_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape, budget = CASES[name]
    looked_at, estimates, exact = [], dict[int, Estimates](), BackwardCosts.sweep

    def sweep(self: BackwardCosts, stored: set[int], number: int, shares: list[Fraction], *asked: bool) -> int:
        taken = exact(self, stored, number, shares, *asked)
        if id(self) not in estimates:
            estimates[id(self)] = Estimates(self)
        looked_at.append((estimates[id(self)].sweep(stored, number, shares, *asked), taken))
        return taken

    monkeypatch.setattr(BackwardCosts, "sweep", sweep)
    kept._forms.clear()
    plan = pc.tile_plan(make(), torch.randn(shape, requires_grad=True), budget=budget)
    assert plan.tiles
    most = max(taken for _, taken in looked_at)
    assert all(taken <= SAFE * about for about, taken in looked_at)
    large = [about / taken for about, taken in looked_at if taken > most / 4]
    assert min(large) > 0.8 and max(large) < 1.4, (min(large), max(large))
