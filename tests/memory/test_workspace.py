"""The workspace of operators on the CPU, as predicted, against what torch allocates."""

from __future__ import annotations

import pytest
import torch
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
