"""What the planner of `tile` stores so that nothing is computed twice, against the slow and obvious way to find it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.tiles import choices
from patchconv_native.tiles.choices import Planner


def one_at_a_time(planner: Planner) -> set[int]:
    """The last value that a sweep computes again, until there is none."""
    graph, kinds, stored = planner.graph, planner.kinds, set(planner.gathered)
    while True:
        again: set[int] = set()
        for number in range(planner.count):
            steps = planner.needed(stored, number).steps
            made = {v for step in steps if not step.asks for v in graph.calls[step.call].outputs}
            read = {v for step in steps for v in graph.calls[step.call].inputs}
            again.update(v for v in made & read if v in kinds.dims and kinds.level[v] < number)
        again -= stored  # of a call with several results, one may be stored, and another not
        if not again:
            return stored
        stored |= {max(again)}


def normed(y: Tensor) -> Tensor:
    return nn.functional.group_norm(y, 2)


def residual(x: Tensor) -> Tensor:
    for _ in range(4):
        x = x + normed((x * 2).sin())
    return x


def squeezed(x: Tensor) -> Tensor:
    y = x.exp()
    for _ in range(3):
        y, z = (y * y.mean((2, 3), keepdim=True)).chunk(2, 1)
        y = torch.cat([y, normed(z) + y], 1)
    return y


def of_one_value(x: Tensor) -> tuple[Tensor, ...]:
    """Read in each sweep, beside what follows from it."""
    y, found = x.cos(), []
    for _ in range(3):
        x = normed(x + y)
        found.append(x * y.amax())
    return tuple(found)


def attends(x: Tensor) -> Tensor:
    y = normed(x).flatten(2).transpose(1, 2)
    z = nn.functional.scaled_dot_product_attention(y, y * 2, y + 1)
    return x + normed(z.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("function", [residual, squeezed, of_one_value, attends])
def test_as_one_at_a_time(function: Callable[[Tensor], Tensor], graded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Planner.everything_stored
    more = []

    def both(planner: Planner) -> set[int]:
        stored = found(planner)
        assert stored == one_at_a_time(planner)
        more.append(len(stored - planner.gathered.keys()))
        return stored

    monkeypatch.setattr(Planner, "everything_stored", both)
    pc.tile_plan(function, structured((2, 4, 24, 18)).requires_grad_(graded), tile=3)
    assert more and (min(more) > 0 or function is attends)


@torch.no_grad()
def test_each_sweep_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more with all that is stored: the time does not grow with the square of the number of calls."""
    looked, of_one = [], choices.values_needed
    monkeypatch.setattr(choices, "values_needed", lambda *args: looked.append(args[3]) or of_one(*args))
    plan = pc.tile_plan(residual, structured((2, 4, 24, 18)), tile=3)
    assert len(plan.sweeps) > 4
    assert all(looked.count(number) <= 2 for number in looked)
