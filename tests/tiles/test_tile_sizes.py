"""`tile=` with a budget in training, and plans without a budget: what is said, and what is not more than stock's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.spatial_chains import structured
from test_tile_gradients import assert_alike
from test_tile_training import NETS, block, stepped
from torch import nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak


@pytest.mark.parametrize(
    ("name", "tile"), [("in training", 16), ("in training", (48, 24)), ("group norms", 12), ("folded norms", 96)]
)
def test_tiles_of_a_size_keep_a_budget_in_training(name: str, tile: Any) -> None:
    torch.manual_seed(0)
    net, x = NETS[name](), structured((2, 3, 96, 80)).float().requires_grad_()
    stock = copy.deepcopy(net)
    _, want = stepped(stock, x, stock)
    with pytest.raises(pc.BudgetError, match=r"^tile_plan: a budget of 1 B is too small") as refused:
        pc.tile_plan(net, x, budget=1, tile=tile)
    least = refused.value.least
    for budget in (least, 2 * least):
        model = copy.deepcopy(net)
        plan = pc.tile_plan(model, x, budget=budget, tile=tile)
        rows, columns = tile if isinstance(tile, tuple) else (tile, 80)
        of_result = rows / want.shape[2], columns / want.shape[3]
        assert all(
            float(share) <= most
            for shares in plan.tiles.values()
            for share, most in zip(shares, of_result, strict=True)
        )
        assert plan.backward is not None and "in the backward pass" in str(plan)
        peak, got = stepped(model, x, lambda x, m=model, b=budget: pc.tile(m, x, budget=b, tile=tile))
        assert peak <= budget
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert_alike(*([p.grad for p in one.parameters()] for one in (model, stock)), within=1e-3)


def test_what_is_stored_for_tiles_of_a_size_follows_from_the_budget() -> None:
    """All of the image as one tile: what is kept for it differs."""
    net, x = NETS["in training"](), structured((2, 3, 96, 80)).float().requires_grad_()
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1, tile=16)
    little = pc.tile_plan(net, x, budget=refused.value.least, tile=16)
    much = pc.tile_plan(net, x, budget="1GiB", tile=16)
    assert little.arithmetic + (little.backward or 0) > much.arithmetic + (much.backward or 0) > 3


@pytest.mark.parametrize("how", [{}, {"tile": 16}])
def test_without_a_budget_a_plan_says_that_the_backward_pass_is_not_predicted(how: dict[str, Any]) -> None:
    net, x = NETS["in training"](), structured((2, 3, 96, 80)).float().requires_grad_()
    plan = pc.tile_plan(net, x, **how)
    assert plan.backward is None
    assert "without a budget not predicted" in str(plan) and "in the backward pass" not in str(plan)


@pytest.mark.parametrize("size", [56, 224])
def test_without_a_budget_nothing_is_cut_where_strips_take_much_more(size: int) -> None:
    """A transposed convolution and a resizing, whose workspace strips need as well (torchvision's keypoint head)."""
    torch.manual_seed(0)
    up = nn.Upsample(scale_factor=2.0, mode="bilinear")
    net = nn.Sequential(block(8, 16), block(16, 16), nn.ConvTranspose2d(16, 5, 4, 2, 1), up).eval()
    x, found = structured((3, 8, size, size)).float(), []
    with torch.no_grad():
        stock = allocated_peak(lambda: found.append(net(x)))
        peak = allocated_peak(lambda: found.append(pc.tile(net, x)))
    torch.testing.assert_close(found[1], found[0])
    assert peak <= stock
    with torch.no_grad():
        large = pc.tile_plan(net, torch.empty(1, 8, 2048, 2048, device="meta"))
    assert not large.at_once
