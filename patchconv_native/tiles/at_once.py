"""A plan in which nothing is cut: the recorded calls on whole values, one after the other, as the module makes them.
So no budget is refused that one call of the module keeps.
"""

from __future__ import annotations

import functools
import os

import torch

from .._budget import MARGIN
from ..memory.fake import Storages
from .costs import PeakOf
from .graph import Graph
from .kinds import Kinds, last_uses
from .plan import Least, TilePlan, Wishes, fits
from .run import Run, run_between
from .stores import Store
from .sweeps import bytes_of


class AtOnce:
    def __init__(self, graph: Graph, wishes: Wishes) -> None:
        self._graph, self._wishes = graph, wishes
        count = len(graph.calls)
        self.kinds = Kinds(
            level=dict.fromkeys(range(len(graph.fakes)), 0), start=[0] * count, questions=[0] * count,
            gathers=[True] * count,
        )  # fmt: skip

    def least(self) -> Least:
        return self._found

    def fitting(self) -> TilePlan | None:
        plan, _ = self._found
        return plan if fits(plan) else None

    @functools.cached_property
    def _found(self) -> Least:
        graph, wishes = self._graph, self._wishes
        last = last_uses(graph, self.kinds, set(graph.results), [])
        peak, place = self._peak(last)
        made = set(graph.results) - set(graph.inputs)
        sizes = {graph.fakes[v].untyped_storage()._cdata: bytes_of(graph, v) for v in made}
        result = 0 if wishes.out else sum(sizes.values())
        plan = TilePlan(
            graph, self.kinds, [], set(), last, set(), wishes.budget, max(peak - result, 0), MARGIN[wishes.device], 1.0,
            0, os.fspath(wishes.outside.store), result * wishes.outside.result, wishes.name, wishes.outside,
        )  # fmt: skip
        return plan, lambda: graph.calls[place].where

    def _peak(self, last: dict[int, tuple[int, int]]) -> tuple[int, int]:
        """The most bytes, results included, and the call during which they are there: of a run without data."""
        graph, device = self._graph, self._graph.device
        peak, most = PeakOf(device.type), (0, 0)
        counted = Storages(peak, device, graph.casts)
        counted.there_before([graph.fakes[v] for v in graph.inputs])
        run = Run(graph, self.kinds, set(), {}, Store("device"))
        run.whole = {v: graph.fakes[v] for v in graph.inputs}

        def done(place: int) -> None:
            nonlocal most
            if peak.most > most[0]:
                most = peak.most, place

        with graph.mode, torch.no_grad(), counted:
            run_between(run, 0, last, done)
        copies = sum(count * bytes_of(graph, v) for v, count in self._wishes.outside.inputs.items())
        return most[0] + copies + graph.made, most[1]
