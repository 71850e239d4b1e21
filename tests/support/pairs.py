"""Cases that cover every pair of values, in place of every combination; all combinations under `make check`.

Most faults of an operator show with one value of one parameter, or with two together. A set of cases in which each
value of a parameter meets each value of every other one is far smaller than the full product of the parameters.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from .seeds import SWEEP_SEED

FULL = os.environ.get("PATCHCONV_FULL_TESTS", "") == "1"
only_full = pytest.mark.skipif(not FULL, reason="part of `make check`: set PATCHCONV_FULL_TESTS=1")


def covering(values: Mapping[str, Sequence[Any]], allowed: Callable[..., bool] = lambda **case: True) -> list[dict]:
    """Cases, a dict each, in which every pair of values of two parameters occurs that occurs in an allowed case.

    Greedy: the next case is the allowed one that covers most of the pairs that are left. The same cases every time.
    """
    names = list(values)
    indices = list(itertools.product(*(range(len(values[name])) for name in names)))
    made = [dict(zip(names, (values[n][i] for n, i in zip(names, case, strict=True)), strict=True)) for case in indices]
    kept = [(case, one) for case, one in zip(indices, made, strict=True) if allowed(**one)]
    if FULL or len(names) < 2:
        return [one for _, one in kept]
    random.Random(0).shuffle(kept)  # neighbours in a product share nearly all of their values
    columns = list(itertools.combinations(range(len(names)), 2))
    pairs = [({(a, b, case[a], case[b]) for a, b in columns}, one) for case, one in kept]
    left = set().union(*(covered for covered, _ in pairs)) if pairs else set()
    chosen = []
    while left:
        covered, one = max(pairs, key=lambda entry: len(entry[0] & left))
        left -= covered
        chosen.append(one)
    return chosen


def todays(cases: Iterable[Any], of: int = 2) -> list[Any]:
    """One in `of` cases; which ones follows from the seed of the day. All of them under `make check`."""
    return list(cases) if FULL else list(cases)[SWEEP_SEED % of :: of]


def name_of(value: Any) -> str | None:
    """A value's name in a test's name; None leaves it to pytest."""
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, (tuple, list)):
        return "x".join(map(str, value))
    return None


def pairwise(allowed: Callable[..., bool] = lambda **case: True, ids: Any = name_of, **values: Sequence[Any]) -> Any:
    """`pytest.mark.parametrize` over `covering` cases: pairwise(dtype=[...], layout=[...], mode=[...])."""
    cases = covering(values, allowed)
    return pytest.mark.parametrize(list(values), [tuple(case.values()) for case in cases], ids=ids)
