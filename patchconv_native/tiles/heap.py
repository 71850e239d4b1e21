"""The C library's heap between sweeps."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from .plan import TilePlan


@functools.cache
def _trim() -> Callable[[int], Any]:
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # only glibc has it


def give_back(plan: TilePlan) -> None:
    """Has the C library give the memory that tensors have freed back to the system, where a call keeps a budget: glibc
    keeps much of it, and the process would grow by more than the budget.
    """
    if plan.budget is not None and plan.graph.device.type == "cpu":
        _trim()(0)
