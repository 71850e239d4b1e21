"""Attention over the image: keys and values are there whole, queries are computed strip by strip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak


class Attention(nn.Module):
    """As in the middle of a decoder. fused: keys and values are parts of one tensor."""

    def __init__(self, fused: bool, causal: bool = False, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.norm, self.out = nn.GroupNorm(2, width), nn.Linear(width, width)
        self.project = nn.ModuleList([nn.Linear(width, 3 * width)] if fused else [nn.Linear(width, width)] * 3)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        n, c, h, w = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        found = torch.cat([one(y) for one in self.project], -1).chunk(3, -1) if len(self.project) > 1 else (
            self.project[0](y).chunk(3, -1)
        )  # fmt: skip
        q, k, v = (one.reshape(n, h * w, 2, c // 2).transpose(1, 2) for one in found)
        y = F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=self.causal)
        y = self.out(y.transpose(1, 2).reshape(n, h * w, c)).transpose(1, 2).reshape(n, c, h, w)
        return self.last(x + y)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("given", [{"tile": 3}, {"tile": (5, 7)}, {"tile": 3, "dim": 3}])
@torch.no_grad()
def test_it_is_that_of_one_call(fused: bool, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, x = Attention(fused).double(), structured((2, 3, 37, 29))
    want = net(x)
    assert (pc.tile(net, x, **given) - want).abs().max() < 1e-9 * want.abs().max()


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_only_keys_and_values_are_whole(causal: bool) -> None:
    """Where each query reads all of them: causal attention is computed at once."""
    net = Attention(False, causal).double()
    x = structured((1, 3, 40, 16))
    plan = pc.tile_plan(net, x, tile=4)
    attention = next(n for n, call in enumerate(plan.graph.calls) if call.name == "scaled_dot_product_attention")
    steps = [step for sweep in plan.sweeps for step in sweep.steps if attention in step.calls]
    assert [len(step.rows) for step in steps] == ([] if causal else [10])
    assert "every query reads all" in str(plan)
    assert (pc.tile(net, x, tile=4) - net(x)).abs().max() < 1e-9


@torch.no_grad()
def test_budgets_are_kept() -> None:
    torch.manual_seed(0)
    net, x = Attention(False), structured((1, 3, 160, 96)).float()
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1000)
    want, values = net(x), 8 * 160 * 96 * 4
    assert refused.value.least < 3.5 * values  # keys, values, what is normalized, and strips
    for budget in (refused.value.least, 2 * refused.value.least):
        results: list[Tensor] = []
        peak = allocated_peak(lambda budget=budget, to=results: to.append(pc.tile(net, x, budget)))
        assert peak - want.nbytes <= budget
        torch.testing.assert_close(results[0], want, rtol=1e-5, atol=1e-5)


class TokensOfAll(nn.Module):
    """Attention over all places of a volume, in an order that no cut keeps, and convolutions after it."""

    def __init__(self, dims: int, twice: bool = False) -> None:
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.dims, self.twice = dims, twice
        self.first, self.tokens, self.last = conv(3, 4, 3, padding=1), nn.Linear(4, 12), conv(4, 16, 3, padding=1)
        self.norm, self.result = nn.GroupNorm(2, 16), conv(16, 2, 3, padding=1)

    def attend(self, x: Tensor) -> Tensor:
        flat = x.movedim(1, -1).transpose(1, -2).flatten(1, -2)  # columns first
        query, key, value = self.tokens(flat).chunk(3, -1)
        mixed = flat + (query @ key.mT).softmax(-1) @ value
        return mixed.unflatten(1, x.shape[2:][::-1] if self.dims == 2 else (x.size(-1), x.size(3), x.size(2)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(self.first(x)).transpose(1, -2).movedim(-1, 1)
        y = F.relu_(y) if not self.twice else self.attend(y.tanh()).transpose(1, -2).movedim(-1, 1)
        return self.result(F.silu(self.norm(self.last(y))))


@pytest.mark.parametrize(("dims", "batch", "twice"), [(2, 1, False), (2, 3, True), (3, 3, False), (3, 1, True)])
def test_what_was_whole_is_cut_again(dims: int, batch: int, twice: bool) -> None:
    torch.manual_seed(0)
    module = TokensOfAll(dims, twice).double()
    x = torch.randn(batch, 3, *((16, 13) if dims == 2 else (3, 9, 10)), dtype=torch.float64)
    dim = dims  # of a volume the second of three
    with torch.no_grad():
        expected = module(x)
        plan = pc.tile_plan(module, x, tile=3, dim=dim)
        assert [call.name for call in plan.graph.calls].count("cut_again") == 1 + twice
        assert set(plan.graph.results) <= plan.kinds.dims.keys() and any(s.strips > 2 for s in plan.sweeps)
        boxes = (3, 4) if dims == 2 else (3, 2, 4)
        for tile in (3, boxes):
            torch.testing.assert_close(pc.tile(module, x, tile=tile, dim=dim), expected, rtol=1e-9, atol=1e-12)
    given = [x.clone().requires_grad_() for _ in range(2)]
    grads = [
        torch.autograd.grad(call(one).square().sum(), [one, *module.parameters()])
        for call, one in zip((module, lambda x: pc.tile(module, x, tile=boxes, dim=dim)), given, strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)
