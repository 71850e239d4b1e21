"""A plan in which nothing is cut: the recorded calls on whole values, one after the other, as the module makes them.
With gradients autograd keeps what it keeps of these calls, or of this package's in their place, which is less. So no
budget is refused that one call of the module keeps.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import Tensor

from .._budget import MARGIN, MARGIN_OF_BACKWARD
from ..lean import lean
from ..memory.fake import Storages
from .arrays import Source
from .backward import swapped
from .backward_costs import like
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
        self._known: dict[bool, Least] = {}

    @staticmethod
    def ways(graph: Graph) -> tuple[bool, ...]:
        """Whether in `lean`, which takes less for gradients."""
        return (False, True) if graph.needs else (False,)

    def least(self) -> Least:
        return min(map(self._found, self.ways(self._graph)), key=lambda found: found[0].needs)

    def fitting(self) -> TilePlan | None:
        return next((plan for plan, _ in map(self._found, self.ways(self._graph)) if fits(plan)), None)

    def _found(self, in_lean: bool) -> Least:
        if in_lean not in self._known:
            self._known[in_lean] = self._looked_at(in_lean)
        return self._known[in_lean]

    def _looked_at(self, in_lean: bool) -> Least:
        graph, wishes = self._graph, self._wishes
        last = last_uses(graph, self.kinds, set(graph.results), [])
        peak, where = self._peak(last, in_lean)
        made = set(graph.results) - set(graph.inputs)
        sizes = {graph.fakes[v].untyped_storage()._cdata: bytes_of(graph, v) for v in made}
        result = 0 if wishes.out else sum(sizes.values())
        margin = MARGIN_OF_BACKWARD if graph.needs else MARGIN[wishes.device]
        plan = TilePlan(
            graph, self.kinds, [], set(), last, set(), wishes.budget, max(peak - result, 0), margin, 1.0, 0,
            os.fspath(wishes.outside.store), result * wishes.outside.result, wishes.name, wishes.outside,
            in_lean=in_lean,
        )  # fmt: skip
        return plan, lambda: where

    def _peak(self, last: dict[int, tuple[int, int]], in_lean: bool) -> tuple[int, str]:
        """The most bytes, results included, and where they are there: of a run without data. With gradients, of both
        passes, without the gradients that were asked for.
        """
        graph, device = self._graph, self._graph.device
        peak, most, where = PeakOf(device.type), 0, ""
        constants = {id(one): one for call in graph.calls for one in call.constants} if graph.needs else {}
        with graph.mode, torch.no_grad():
            swaps = {key: like(graph.mode, one) for key, one in constants.items()}
            images = {v: graph.fakes[v].detach().requires_grad_(v in graph.needs) for v in graph.inputs}
            grads = {v: torch.empty_like(graph.fakes[v]) for v in set(graph.results) & graph.needs}
        casts = {(id(swaps.get(key, key)), dtype): size for (key, dtype), size in graph.casts.items()}
        counted = Storages(peak, device, casts if graph.needs else graph.casts)
        counted.there_before([*images.values(), *swaps.values(), *grads.values()])
        run = Run(swapped(graph, swaps), self.kinds, set(), {}, Store("device"))
        run.whole = dict(images)

        def done(place: int) -> None:
            nonlocal most, where
            if peak.most > most:
                most, where = peak.most, graph.calls[place].where

        with graph.mode, torch.set_grad_enabled(bool(graph.needs)), counted:
            with lean() if in_lean else contextlib.nullcontext():
                run_between(run, 0, last, done)
            differentiated = [v for v in grads if run.whole[v].requires_grad]
            if differentiated:
                torch.autograd.backward([run.whole[v] for v in differentiated], [grads[v] for v in differentiated])
        if peak.most > most:
            where = "the backward pass"
        asked = [*images.values(), *(swaps[key] for key, one in constants.items() if one.is_leaf)]
        gradients = sum(one.grad.nbytes for one in asked if one.grad is not None)
        copies = sum(count * bytes_of(graph, v) for v, count in self._wishes.outside.inputs.items())
        return peak.most - gradients + copies + graph.made, where


def computed_at_once(plan: TilePlan, images: dict[int, Any]) -> dict[int, Tensor]:
    """The module's results, by their numbers, with the history that autograd makes of its calls."""
    device = plan.graph.device
    run = Run(plan.graph, plan.kinds, set(), {}, Store("device"))
    for v, image in images.items():
        run.whole[v] = image.to(device) if isinstance(image, Tensor) else Source("tile", image, device).all()
    with lean() if plan.in_lean else contextlib.nullcontext():
        run_between(run, 0, plan.last)
    return run.whole
