"""Plans in which nothing is cut: the recorded calls on whole values, one after the other, as the module makes them.
With gradients autograd keeps what it keeps of these calls, or of this package's in their place, or of some parts alone.
So no budget is refused that one call of the module keeps.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

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
SURE = 0.6
"""Smaller parts of a network take at least this much of what follows from larger ones, by the bytes that both make."""


class AtOnce:
    """Of a call without gradients: each value is freed when it is read last."""

    def __init__(self, graph: Graph, wishes: Wishes) -> None:
        self._graph, self._wishes = graph, wishes
        self._found: dict[int, Least] = {}

    def least(self) -> Least:
        return min(self._all(), key=lambda one: one[0].needs)

    def fitting(self) -> TilePlan | None:
        """The fastest that fits."""
        return next((plan for plan, _ in self._all(self._wishes.budget) if fits(plan)), None)

    def _all(self, most: int | None = None) -> Iterator[Least]:
        """The fastest ones first. Each is looked at once. most: those that take far more may be passed over."""
        if 0 not in self._found:
            self._found[0] = self._plan(*self._peak())
        yield self._found[0]

    def _plan(
        self, peak: int, where: str, begins: Sequence[int] = (), in_lean: bool = False, backward: float | None = None
    ) -> Least:
        """peak: results included. backward: as of `TilePlan`."""
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
            parts=list(begins), in_lean=in_lean, backward=backward,
        )  # fmt: skip
        return plan, lambda: where

    def _peak(self) -> tuple[int, str]:
        """The most bytes, and the call during which they are there: of a run without data."""
        graph, device = self._graph, self._graph.device
        peak, most = PeakOf(device.type), (0, 0)
        counted = Storages(peak, device, graph.casts)
        counted.there_before([graph.fakes[v] for v in graph.inputs])
        run = Run(graph, uncut(graph), set(), {}, Store("device"))
        run.whole = {v: graph.fakes[v] for v in graph.inputs}

        def done(place: int) -> None:
            nonlocal most
            if peak.most > most[0]:
                most = peak.most, place

        with graph.mode, torch.no_grad(), counted:
            run_between(run, 0, last_uses(graph, run.kinds, set(graph.results), []), done)
        return most[0], graph.calls[most[1]].where


class StepAtOnce(AtOnce):
    """Of a call with gradients."""

    def _all(self, most: int | None = None) -> Iterator[Least]:
        enabled: Any = torch._C._autograd
        checkpoints = self._parts() if enabled._saved_tensors_hooks_is_enabled() else ()  # they are such hooks
        ways = [([0], False), ([0], True), *((begins, True) for begins in checkpoints)]
        least, worse, before = math.inf, 0, 0.0
        for number, (begins, in_lean) in enumerate(ways):
            largest = self._largest(begins)
            if number not in self._found:
                if number > 1 and most is not None and SURE * before * largest > most:
                    continue
                self._found[number] = self._of_parts(begins, in_lean)
            yield self._found[number]
            peak = self._found[number][0].peak
            least, worse = (peak, 0) if peak < least else (least, worse + 1)
            before = peak / largest
            if worse == WORSE:
                return

    def _largest(self, begins: Sequence[int]) -> int:
        """Bytes that the part with the most makes."""
        calls, made = self._graph.calls, []
        for begin, end in itertools.pairwise([*begins, len(calls)]):
            made.append(sum(bytes_of(self._graph, v) for call in calls[begin:end] for v in call.outputs))
        return max(*made, 1)

    def _parts(self) -> Iterator[list[int]]:
        """Where parts begin that make about as many bytes each, with little that is read after their ends."""
        graph, made, last = self._graph, {}, {}
        for place, call in enumerate(graph.calls):
            made.update(dict.fromkeys(call.outputs, place))
            last.update(dict.fromkeys(call.inputs, place))
        live, before = [0] * len(graph.calls), [0] * (len(graph.calls) + 1)
        for v, begin in made.items():
            for place in range(begin + 1, last.get(v, begin) + 1):
                live[place] += bytes_of(graph, v)
        for place, call in enumerate(graph.calls):
            before[place + 1] = before[place] + sum(bytes_of(graph, v) for v in call.outputs)
        known: list[list[int]] = []
        for count in PARTS:
            begins = [0, *balanced(before, live, count)]
            if begins not in known and len(begins) > 1:
                known.append(begins)
                yield begins

    def _of_parts(self, begins: Sequence[int], in_lean: bool) -> Least:
        """Both passes on values without data. Parameters have gradients before, to which new ones are added."""
        graph, device = self._graph, self._graph.device
        peak = PeakOf(device.type)
        constants = {id(one): one for call in graph.calls for one in call.constants}
        with graph.mode, torch.no_grad():
            swaps = {key: like(graph.mode, one) for key, one in constants.items()}
            for one in swaps.values():
                one.grad = torch.empty_like(one) if one.requires_grad else None
            images = {v: graph.fakes[v].detach().requires_grad_(v in graph.needs) for v in graph.inputs}
            grads = {v: torch.empty_like(graph.fakes[v]) for v in set(graph.results) & graph.needs}
        casts = {(id(swaps[key]), dtype): size for (key, dtype), size in graph.casts.items() if key in swaps}
        counted = Storages(peak, device, casts)
        counted.there_before([images, grads, swaps, [one.grad for one in swaps.values()]])
        with graph.mode, counted, torch.enable_grad():
            results = computed_whole(swapped(graph, swaps), images, begins, in_lean)
            forward, flops = peak.most, counted.work["flops"]
            some = [v for v in grads if results[v].requires_grad]
            if some:
                torch.autograd.backward([results[v] for v in some], [grads[v] for v in some])
        where = f"its {'backward' if peak.most > forward else 'forward'} pass"
        backward = (counted.work["flops"] - flops) / flops if flops else None
        return self._plan(peak.most, where, begins, in_lean, backward)
