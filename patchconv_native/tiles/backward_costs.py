"""Predicts the memory of a backward pass: it runs on values without data, for the tiles that take the most."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..memory.fake import Storages
from ..spatial.parts import precise
from .backward import Backward, Tiles, is_empty
from .chains import run_chain
from .costs import PeakOf
from .kinds import Region, box_shape, part_of
from .plan import TilePlan
from .run import Run
from .stores import Store, extra
from .strips import NeedsWhole
from .sweeps import Step, bytes_of


@dataclasses.dataclass
class _Shapes(Run):
    """A run that has shapes and no data."""

    def read(self, v: int, region: Region) -> Tensor:
        copies = self.outside.inputs.get(v, 0) if v in self.inputs else 1
        if not copies:
            return part_of(self.kinds, v, self.graph.fakes[v], region)
        made = [self.empty(v, region) for _ in range(copies)]
        if v not in self.inputs:
            row = math.prod(box_shape(self.graph, self.kinds, v, ((0, 1), *region[1:])))
            made.append(made[0].new_empty(extra(self.outside.store, row), dtype=torch.uint8))
        return made[0]


class _Predicted(Backward):
    """Of each sweep it runs the tiles that tell what all of them take. rough: one alone."""

    def __init__(self, plan: TilePlan, run: Run, swaps: dict[int, Tensor], rough: bool) -> None:
        super().__init__(plan, run, swaps)
        self._rough = rough
        for v in self._needs & set(self._graph.inputs):  # what was asked for does not count
            self.grads[v] = torch.empty_like(self._run.inputs[v].x)
        self._of_constants = {
            key: torch.empty_like(one, dtype=precise(one.dtype)) for key, one in self._constants.items()
        }
        self.asked = [*self.grads.values(), *self._of_constants.values()]

    def _some(self, tiles: Tiles) -> Sequence[tuple[int, ...]]:
        every = tiles.all()
        parts = [sorted({tile[axis] for tile in every}) for axis in range(len(every[0]))]
        most = tuple(max(some, key=lambda part: tiles.rows(axis, part)) for axis, some in enumerate(parts))
        if self._rough:
            return [most]
        at_border = [
            (*most[:axis], part, *most[axis + 1 :]) for axis, some in enumerate(parts) for part in (some[0], some[-1])
        ]
        return list(dict.fromkeys([most, *at_border]))  # there padding is joined to what is read


def backward_peak(plan: TilePlan, rough: bool = False) -> int:
    """The most bytes in the backward pass above images, parameters, results, and the gradients of these. rough: of each
    sweep one of the largest tiles is looked at.
    """
    graph, kinds = plan.graph, plan.kinds
    device = graph.fakes[graph.inputs[0]].device
    constants = {id(one): one for call in graph.calls for one in call.constants}
    with graph.mode, torch.no_grad():
        swaps = {key: _like(graph.mode, one) for key, one in constants.items()}
        images: dict[int, Any] = {
            v: SimpleNamespace(x=graph.fakes[v].detach().requires_grad_(v in graph.needs)) for v in graph.inputs
        }
        run = _Shapes(graph, kinds, plan.read_later, {}, Store("device"), inputs=images, outside=plan.outside)
        run.whole = {v: fake for v, fake in enumerate(graph.fakes) if v not in kinds.dims}
        run.answers = _answers(plan, run)
        predicted = _Predicted(plan, run, swaps, rough)
        grads = {v: torch.empty_like(graph.fakes[v]) for v in dict.fromkeys(graph.results) if v in graph.needs}
    peak = PeakOf()
    counted = Storages(peak, device)
    counted.there_before([graph.fakes, list(swaps.values()), list(grads.values()), run.answers, predicted.asked])
    with graph.mode, counted:
        predicted.run(grads)
    sums = sum(_sum_of_gradient(one) for one in constants.values() if one.requires_grad)
    return _saved(plan, run) + graph.made + sums + peak.most


def _sum_of_gradient(constant: Tensor) -> int:
    """Bytes that the sum of a constant's gradients takes above that gradient, where it is asked for: not of a weight
    that the module has computed.
    """
    return constant.numel() * precise(constant.dtype).itemsize - (constant.nbytes if constant.is_leaf else 0)


def _like(mode: Any, constant: Tensor) -> Tensor:
    made: Tensor = mode.from_tensor(constant.detach())
    return made.requires_grad_(constant.requires_grad)


def _answers(plan: TilePlan, run: Run) -> dict[int, list[Tensor]]:
    """Of each call that asks, the shares of all strips, as the forward pass has them."""
    found: dict[int, list[Tensor]] = {}
    for sweep in plan.sweeps:
        for step in sweep.steps:
            if step.asks:
                share = _share(plan, run, step, found)
                strips = sum(low < high for low, high in step.rows) * sum(not is_empty(box) for box in step.across)
                found.setdefault(step.last, []).append(share.new_empty((strips, *share.shape[1:])))
    return found


def _share(plan: TilePlan, run: Run, step: Step, answers: dict[int, list[Tensor]]) -> Tensor:
    strip = next(number for number, (low, high) in enumerate(step.rows) if low < high)
    band = next(number for number, box in enumerate(step.across) if not is_empty(box))
    reads = {v: step.read(v, strip, band) for v in step.reads}
    cut = {v: run.empty(v, region) for v, region in reads.items()}
    try:
        run_chain(
            plan.graph, plan.kinds, step, step.region(strip, band), cut, reads, run.whole.__getitem__,
            lambda place: answers.get(place, ()),
        )  # fmt: skip
    except NeedsWhole as needs:
        return needs.share
    raise AssertionError("a step that asks has an answer")


def _saved(plan: TilePlan, run: Run) -> int:
    """Bytes of what the node keeps."""
    graph = plan.graph
    stored = sum(bytes_of(graph, v) for v in plan.stored) if plan.outside.counted else 0
    read = {v for call in graph.calls for v in call.inputs if v not in plan.kinds.dims and v not in graph.inputs}
    whole = {graph.fakes[v].untyped_storage()._cdata: graph.fakes[v].untyped_storage().nbytes() for v in read}
    return stored + sum(whole.values()) + sum(one.nbytes for some in run.answers.values() for one in some)
