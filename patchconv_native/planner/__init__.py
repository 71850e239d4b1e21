"""What to turn on so that a step fits a budget, and what still fits: predicted, without computing anything."""

from .._budget import BudgetError
from .limits import max_batch, max_size
from .plans import Frontier, Plan, plan
from .strategy import Strategy

__all__ = ["BudgetError", "Frontier", "Plan", "Strategy", "max_batch", "max_size", "plan"]
