"""Dropout in training under `tile`: the mask follows from a seed and the place alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc

X = structured((3, 4, 61, 47))


def drawn(net: Callable[..., object], x: Tensor = X, seed: int = 0, **how: object) -> Tensor:
    torch.manual_seed(seed)
    with torch.no_grad():
        return pc.tile(net, x, **how)  # type: ignore[no-any-return,arg-type]


NETS: dict[str, Callable[[], nn.Module]] = {
    "elements": lambda: nn.Dropout(0.3),
    "in place": lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.3, inplace=True), nn.ReLU()),
    "channels": lambda: nn.Sequential(nn.Dropout2d(0.3), nn.Dropout2d(0.4, inplace=True)),
    "pools between": lambda: nn.Sequential(nn.Dropout(0.5), nn.MaxPool2d(3, 2), nn.Dropout2d(0.2), nn.Dropout(0.1)),
}


@pytest.mark.parametrize("name", NETS)
def test_masks_depend_on_the_seed_and_the_place_alone(name: str) -> None:
    net = NETS[name]().double()
    want = drawn(net, tile=61)
    for rows in (1, 2, 7):
        assert torch.equal(drawn(net, tile=rows), want)
    assert torch.equal(drawn(net, X.contiguous(memory_format=torch.channels_last), tile=5), want)
    assert torch.equal(drawn(pc.convert(net), tile=3), want)
    assert not torch.equal(drawn(net, seed=1), want)


@pytest.mark.parametrize("p", [0.0, 0.25, 0.9, 1.0])
def test_the_share_that_is_dropped_and_the_scale(p: float) -> None:
    ones = torch.ones(3, 8, 61, 47)
    found = drawn(lambda x: F.dropout(x, p), ones, tile=4)
    assert set(found.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - p) if p < 1 else 1.0).item()}
    assert abs(found.eq(0).double().mean() - p) < 0.01
    channels = drawn(lambda x: F.dropout2d(x, p), torch.ones(40, 50, 4, 3), tile=1)
    assert (channels == channels[:, :, :1, :1]).all() and abs(channels.eq(0).double().mean() - p) < 0.05


def test_no_two_masks_are_alike() -> None:
    ones = torch.ones(3, 8, 64, 64)
    net = nn.Dropout(0.5)
    a, b = drawn(lambda x: torch.cat([net(x), net(x)], 1), ones, tile=5).ne(0).double().split(8, 1)
    for other in (b, a.flip(2), a.roll(1, 0), a.roll(1, 1), a.roll(1, 2), a.roll(1, 3), a.transpose(2, 3)):
        assert abs((a * other).mean() - 0.25) < 0.02


@torch.no_grad()
def test_norms_and_pools_see_the_mask_that_the_result_has() -> None:
    """Also where a budget has the masked image computed again for each of them."""
    norm, conv = nn.GroupNorm(2, 4).double(), nn.Conv2d(4, 4, 3, padding=1).double()

    def net(x: Tensor) -> tuple[Tensor, ...]:
        y = F.dropout(conv(x), 0.5)
        z = F.dropout2d(norm(y), 0.5)
        return y, z, norm(z), F.dropout(F.adaptive_avg_pool2d(z, 1), 0.5)

    with pytest.raises(pc.BudgetError) as refused:
        pc.tile(net, X, budget=1)
    firsts = drawn(net, tile=61)
    for how in ({"tile": 2}, {"tile": 7}, {"budget": refused.value.least}):
        y, z, normed, pooled = drawn(net, **how)  # type: ignore[arg-type]
        kept = y != 0
        torch.testing.assert_close(y[kept], 2 * conv(X)[kept], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(z[z != 0], 2 * norm(y)[z != 0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(normed, norm(z), rtol=1e-9, atol=1e-12)
        average = F.adaptive_avg_pool2d(z, 1)
        assert ((pooled == 0) | ((pooled - 2 * average).abs() < 1e-9)).all()
        for got, first in zip((y, z, normed, pooled), firsts, strict=True):
            torch.testing.assert_close(got, first, rtol=1e-9, atol=1e-12)
            assert torch.equal(got == 0, first == 0)


@torch.no_grad()
def test_kept_plans_draw_a_mask_each_call() -> None:
    net = pc.tile_modules(nn.Sequential(nn.Dropout(0.5)), "", budget="1MiB")
    torch.manual_seed(0)
    first, second = net(X), net(X)
    torch.manual_seed(0)
    assert torch.equal(net(X), first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    pc.tile_plan(net, X)
    assert torch.equal(torch.get_rng_state(), state)
