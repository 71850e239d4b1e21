"""`tile` on a GPU: results and gradients of random chains of layers, in the numbers of one call, and its budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.spatial_chains import chain, differences, step, structured
from torch import Tensor, nn

import patchconv_native as pc

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("tile", [3, (4, 5)])
@pytest.mark.parametrize("seed", range(20))
def test_chains(seed: int, tile: Any) -> None:
    model, image = chain(seed, 2, "HW")
    model.cuda()

    def of(forward: Any) -> dict[str, Any]:
        return step(copy.deepcopy(model), image, lambda m, x: forward(m, x.cuda()).cpu(), seed)

    want = of(lambda m, x: m(x))
    assert not differences(of(lambda m, x: pc.tile(m, x, tile=tile)), want)
    assert not differences(of(lambda m, x: pc.tile(m, x, store="cpu")), want)


def unet() -> nn.Module:
    def block(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    down = nn.Sequential(block(3, 16), nn.MaxPool2d(2), block(16, 32))
    return nn.Sequential(down, nn.ConvTranspose2d(32, 16, 2, 2), block(16, 16), nn.Conv2d(16, 2, 1))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("share", [3, 6])
@pytest.mark.parametrize("converted", [False, True])
def test_the_budget_is_kept(train: bool, share: int, converted: bool) -> None:
    """Counted by the allocator of the device, with what its libraries take for convolutions."""
    model = unet().cuda().train(train)
    if converted:
        pc.convert(model)
    x = structured((1, 3, 1024, 1000)).float().cuda().requires_grad_(train)

    def used(call: Any) -> tuple[int, Tensor]:
        for _ in range(2):  # what libraries set up once
            model.zero_grad(set_to_none=True)
            x.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.set_grad_enabled(train):
                y = call()
                if train:
                    y.square().mean().backward()
                    x.grad = None
            peak = torch.cuda.max_memory_allocated() - before
        return peak, y.detach()

    stock, want = used(lambda: copy.deepcopy(model)(x))
    budget = stock // share
    try:
        plan = pc.tile_plan(model, x, budget=budget)
    except pc.BudgetError as refused:
        budget = refused.least
        plan = pc.tile_plan(model, x, budget=budget)
    peak, got = used(lambda: pc.tile(model, x, budget=budget))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    # Besides the budget: the result, its gradient and x's own, and those of the parameters.
    own = 3 * got.nbytes + (x.nbytes if train else 0) + 2 * sum(p.nbytes for p in model.parameters())
    assert peak <= budget + own, f"{peak >> 20} MiB, budget {budget >> 20}, stock {stock >> 20}\n{plan}"
