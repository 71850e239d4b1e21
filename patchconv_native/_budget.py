"""How far below its budget a predicted peak must stay, and the error where none does: of plans and of tiles."""

from __future__ import annotations

import math
from typing import Any

MARGIN = {"cpu": 0.03, "cuda": 0.10}
"""By device, the share of a predicted peak by which the real one may be higher (CUDA: tried with a small U-Net)."""
MARGIN_OF_BACKWARD = 0.10
"""In place of MARGIN's, of a tiled call with gradients: what libraries take in a backward pass is known less well."""


def least_budget(peak: int, margin: float) -> int:
    """The smallest budget, in bytes, that a predicted peak fits: the peak and its margin."""
    return math.ceil(peak * (1 + margin))


def fits(peak: int, budget: int, margin: float) -> bool:
    """Whether a predicted peak fits a budget, both in bytes."""
    return least_budget(peak, margin) <= budget


def largest_peak(budget: int, margin: float) -> int:
    """The largest predicted peak, in bytes, that fits a budget."""
    peak = int(budget / (1 + margin)) + 1
    while peak > 0 and not fits(peak, budget, margin):
        peak -= 1
    return peak


class BudgetError(ValueError):
    """No plan fits the budget. `least` is the smallest budget, in bytes, that one fits; `plan` is that plan: a `Plan`,
    or a `TilePlan`.
    """

    def __init__(self, text: str, least: int, plan: Any) -> None:
        super().__init__(text)
        self.least, self.plan = least, plan
