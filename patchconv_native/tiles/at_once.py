"""Plans in which nothing is cut: the recorded calls on whole values, one after the other, as the module makes them.
With gradients autograd keeps what it keeps of these calls, or of this package's in their place, or of some parts alone.
So no budget is refused that one call of the module keeps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import torch

from .._budget import MARGIN, MARGIN_OF_BACKWARD
from ..memory.fake import Storages
from .backward import swapped
from .backward_costs import like
from .costs import PeakOf
from .graph import Graph
from .kinds import last_uses
from .plan import Least, TilePlan, Wishes, fits
from .run import Run, run_between
from .stores import Store
from .sweeps import balanced, bytes_of
from .whole import computed_whole, uncut

PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of parts that are looked at, of calls that are computed again in the backward pass."""
WORSE = 3
"""So many in turn that take no less end the search."""


class AtOnce:
    """Of a call without gradients: each value is freed when it is read last."""

    def __init__(self, graph: Graph, wishes: Wishes) -> None:
        self._graph, self._wishes = graph, wishes
        self._found: list[Least] = []

    def least(self) -> Least:
        return min(self._all(), key=lambda one: one[0].needs)

    def fitting(self) -> TilePlan | None:
        """The fastest that fits."""
        return next((plan for plan, _ in self._all() if fits(plan)), None)

    def _all(self) -> Iterator[Least]:
        """The fastest ones first. Each is looked at once."""
        if not self._found:
            self._found.append(self._plan(*self._peak()))
        yield from self._found

    def _plan(self, peak: int, where: str, begins: Sequence[int] = (), in_lean: bool = False) -> Least:
        """peak: results included."""
        graph, wishes, kinds = self._graph, self._wishes, uncut(self._graph)
        made = set(graph.results) - set(graph.inputs)
        sizes = {graph.fakes[v].untyped_storage()._cdata: bytes_of(graph, v) for v in made}
        result = 0 if wishes.out else sum(sizes.values())
        copies = sum(count * bytes_of(graph, v) for v, count in wishes.outside.inputs.items())
        last = last_uses(graph, kinds, set(graph.results), [])
        margin = MARGIN_OF_BACKWARD if graph.needs else MARGIN[wishes.device]
        plan = TilePlan(
            graph, kinds, [], set(), last, set(), wishes.budget, max(peak + copies + graph.made - result, 0), margin,
            1.0, 0, os.fspath(wishes.outside.store), result * wishes.outside.result, wishes.name, wishes.outside,
            parts=list(begins), in_lean=in_lean,
        )  # fmt: skip
        return plan, lambda: where

    def _peak(self) -> tuple[int, str]:
        """The most bytes, and the call during which they are there: of a run without data."""
        graph, device = self._graph, self._graph.device
        peak, most = PeakOf(device.type), (0, 0)
        counted = Storages(peak, device, graph.casts)
        counted.there_before([images, grads, swaps, [one.grad for one in swaps.values()]])
        with graph.mode, counted, torch.enable_grad():
            results = computed_whole(swapped(graph, swaps), images, begins, in_lean)
            forward = peak.most
            some = [v for v in grads if results[v].requires_grad]
            if some:
                torch.autograd.backward([results[v] for v in some], [grads[v] for v in some])
        where = f"its {'backward' if peak.most > forward else 'forward'} pass"
        return self._plan(peak.most, where, begins, in_lean)
