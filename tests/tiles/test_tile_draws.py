"""Random numbers that calls on whole values draw: the backward pass, which computes such calls again, draws the same
ones, and leaves the generators as they were.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc

GENERATOR = torch.Generator()
DRAW: dict[str, Callable[[Tensor], Tensor]] = {
    "gumbel_softmax": lambda v: F.gumbel_softmax(v, tau=0.7),
    "rrelu": lambda v: F.rrelu(v, training=True),
    "bernoulli_": lambda v: v * v.new_empty(v.shape[0], 1).bernoulli_(0.5),
    "a generator of its own": lambda v: v * torch.empty_like(v).bernoulli_(0.4, generator=GENERATOR),
    "bernoulli": lambda v: v * torch.bernoulli(v.sigmoid()),
    "nothing": lambda v: v,
}


class Gated(nn.Module):
    """Channels are weighted by what follows from their means and random numbers."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu()
        gates: Tensor = self.draw(self.linear(y.mean((2, 3))))
        return self.last(y * gates[:, :, None, None])  # type: ignore[no-any-return]


def step(module: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The result, the gradients, and what generators give after the step."""
    torch.manual_seed(1)
    GENERATOR.manual_seed(2)
    x = structured((3, 3, 37, 29)).requires_grad_()
    module.zero_grad()
    y = run(x)
    between = torch.rand(3)  # backward goes by the numbers that forward drew
    y.square().sum().backward()
    grads = [one.grad for one in (x, *module.parameters()) if one.grad is not None]
    return [y.detach(), between, torch.rand(3), torch.rand(3, generator=GENERATOR), *grads]


@pytest.mark.parametrize("name", DRAW)
@pytest.mark.parametrize("how", [{"tile": 7}, {"tile": (5, 11)}, {}], ids=str)
def test_steps_equal_stock(name: str, how: dict[str, tuple[int, ...]]) -> None:
    module = Gated(DRAW[name]).double()
    want = step(module, module)
    found = step(module, lambda x: pc.tile(module, x, **how))  # type: ignore[arg-type]
    assert len(found) == len(want) == 13
    for one, other in zip(found, want, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9 * float(want[0].abs().max()))


def test_every_backward_pass_through_one_graph_draws_the_same() -> None:
    module = Gated(DRAW["gumbel_softmax"]).double()
    x = structured((2, 3, 37, 29)).requires_grad_()
    y = pc.tile(module, x, tile=9).square().sum()
    before = torch.get_rng_state()
    one, other = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_that_cannot_be_cut_leaves_its_images_to_be_cut() -> None:
    """gumbel_softmax has no rule where the batch is cut."""
    module, x = Gated(DRAW["gumbel_softmax"]).eval(), structured((2, 3, 64, 48)).float()
    with torch.no_grad():
        with pytest.raises(pc.BudgetError) as refused:
            pc.tile_plan(module, x, budget=1)
        assert not pc.tile_plan(module, x, budget=refused.value.least).at_once
