"""Plans that are kept, without their graphs: another call of the same form gets the same plan."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from .._budget import BudgetError
from .arguments import Arguments
from .fold import in_channels_last
from .forms import emptied, filled, form_of
from .graph import Graph
from .plan import TilePlan
from .shared import strides_of

MOST = 4
"""Of a module."""
_forms: weakref.WeakKeyDictionary[Any, dict[Any, tuple[TilePlan, bool]]] = weakref.WeakKeyDictionary()
"""By the budget and the form of the call: plans without their graphs, and whether these are those of
`in_channels_last`. They stay when a module is no longer tiled: with the same form a plan is the same.
"""


def plan_of_form(
    module: Any, graph: Graph, arguments: Arguments, budget: int | None, plan: Callable[[], TilePlan]
) -> TilePlan:
    """plan(), which plans the graph, where no call of this form was planned before. module: or a function."""
    try:
        known = _forms.setdefault(module, {})
    except TypeError:  # of an object that cannot be referred to weakly
        return plan()
    images = tuple((image.device, strides_of(image)) for image in arguments.images)  # they may be in the host's memory
    form = tuple(arguments.dims), arguments.shared, images, form_of(graph)
    if (budget, *form) in known:
        kept, last = known[(budget, *form)] = known.pop((budget, *form))
        turned = in_channels_last(graph) if last else graph
        assert turned is not None, "graphs of the same form can be turned alike"
        return filled(kept, turned)

    def remember(room: int | None, found: TilePlan) -> None:
        last = found.graph is not graph
        if not (last and found.at_once):
            while len(known) >= MOST:
                del known[next(iter(known))]
            known[(room, *form)] = emptied(found), last

    try:
        found = plan()
    except BudgetError as error:
        remember(error.least, dataclasses.replace(error.plan, budget=error.least))
        raise
    remember(budget, found)
    return found


def plans_of(module: Any, budget: int) -> list[TilePlan]:
    """Those of calls with this budget, without their graphs, and the last call's last."""
    return [plan for (room, *_), (plan, _) in _forms.get(module, {}).items() if room == budget]
