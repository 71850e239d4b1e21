"""The workspace of operators on the CPU, as predicted, against what torch allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.peaks import peaks


@torch.no_grad()
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize(
    ("one", "other"), [((100, 8), (60, 8)), ((20, 8), (9, 8)), ((2, 100, 8), (60, 8)), ((1, 9, 3), (4, 70, 3))]
)
def test_distances(one: tuple[int, ...], other: tuple[int, ...], p: float, turned: bool) -> None:
    given = [torch.randn(shape) for shape in (one, other)]
    if turned:
        given = [x.mT.contiguous().mT for x in given]
    predicted, measured = peaks(lambda x, y: torch.cdist(x, y, p=p), *given)
    assert predicted == measured
    (x, _) = given
    predicted, measured = peaks(lambda x: torch.cdist(x, x, p=p), x)
    assert predicted == measured


MASK, PLACES, IMAGE = torch.rand(40, 50) > 0.5, torch.arange(2000).view(40, 50) + 1, torch.rand(40, 50)


@torch.no_grad()
@pytest.mark.parametrize(("call", "one", "other"), [
    (torch.mul, IMAGE, MASK), (torch.add, IMAGE.bfloat16(), IMAGE), (torch.div, PLACES, IMAGE.double()),
    (torch.eq, PLACES, IMAGE), (torch.div, PLACES, PLACES), (torch.floor_divide, PLACES, IMAGE),
    (torch.pow, IMAGE.double(), PLACES), (torch.add, IMAGE[:1], MASK), (torch.add, IMAGE, MASK[:, :1]),
    (torch.mul, IMAGE, torch.tensor(2.0).double()), (lambda x, y: x * 2.5 + y.sqrt(), MASK, PLACES),
    (lambda x, y: torch.where(MASK, x, y), IMAGE, PLACES), (lambda x, y: x.masked_fill(y, 0), IMAGE, MASK),
])  # fmt: skip
def test_operands_of_other_dtypes(call: Any, one: torch.Tensor, other: torch.Tensor) -> None:
    predicted, measured = peaks(call, one, other)
    assert 0 <= measured - predicted <= 16  # numbers


@pytest.mark.parametrize("dims", [1, (0, 1), (2, 3)], ids=str)
def test_the_gradient_of_an_extreme(dims: Any) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        y = F.pad(x, (0, 0, 0, 0, 1, 2, 1, 1)).amax(dims)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    predicted, measured = peaks(call, torch.rand(2, 5, 9, 11).double().requires_grad_())
    assert predicted == measured
