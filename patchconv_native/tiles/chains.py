"""Calls that follow each other row by row, as a norm and an activation follow a convolution, run as one step: what lies
between them is not kept, and is written over where a function can.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spatial import SpatialTensor
from ..spatial.layout import layout
from .graph import Call, Graph
from .kinds import Kinds, Region, axes_at, rows_lie_together
from .reach import Reach
from .strips import Asked, Links, local_of, part_cuts, run_part, run_whole, with_values
from .sweeps import Step, Sweep

_WITH_INPLACE = {
    F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.elu, F.selu, F.celu, F.silu, F.mish, F.hardswish, F.hardsigmoid,
    F.threshold,
}  # fmt: skip

_nn: Any = torch._C._nn
_WITH_OUT: dict[Any, Callable[..., Tensor]] = {
    F.relu: functools.partial(torch.clamp_min, min=0), F.relu6: functools.partial(_nn.hardtanh, min_val=0, max_val=6),
    F.hardtanh: _nn.hardtanh, F.leaky_relu: _nn.leaky_relu, F.elu: _nn.elu, F.silu: _nn.silu,
    F.hardswish: _nn.hardswish,
}  # fmt: skip
"""Functions by place, and what computes the same into memory that is given. Not gelu: by way of oneDNN, torch's does
not write into memory whose strides differ from its argument's.
"""


def join_steps(graph: Graph, sweep: Sweep, reaches: Sequence[Callable[[int], Reach]]) -> None:
    """Joins a step to the one before it that gives its only cut argument, row by row and to nobody else. reaches: of
    each call, along every axis.
    """
    readers = Counter(v for step in sweep.steps for v in step.reads)
    by_result: dict[int, Step] = {}
    steps = []
    for step in sweep.steps:
        (v, *more) = step.reads
        by_row = not more and readers[v] == 1 and all(reach(step.call).by_row for reach in reaches)
        before = by_result.pop(v, None) if by_row else None
        if before is not None and (before.rows, before.across) != (step.rows, step.across):
            before = None  # it waits for more strips
        if before is not None:
            before.then.append(step.call)
            before.asks = step.asks
            del sweep.ready[v], sweep.keep[v]
        else:
            steps.append(step)
        made = graph.calls[step.call].outputs
        if not step.asks and len(made) == 1 and made[0] not in sweep.stores | sweep.results:
            by_result[made[0]] = before or step
    sweep.steps = steps


def _in_place(call: Call) -> Call:
    """The call, with a result in place of its argument where its function can."""
    if call.function not in _WITH_INPLACE or call.kwargs.get("inplace"):
        return call
    if call.in_place is None:
        call.in_place = dataclasses.replace(call, kwargs={**call.kwargs, "inplace": True})
    return call.in_place


def find_rooms(graph: Graph, kinds: Kinds, sweep: Sweep) -> None:
    """Finds `sweep.rooms`."""
    readers = Counter(v for step in sweep.steps for v in step.reads)
    for step in sweep.steps:
        call = graph.calls[step.last]
        (v, *more) = call.outputs
        if step.asks or more or v not in sweep.ready or v in sweep.stores:
            continue
        at_once = readers[v] == 1 or (readers[v] > 1 and rows_lie_together(graph, kinds, v))
        if at_once and call.by_place and call.function in _WITH_OUT:
            sweep.rooms.add(v)


def _into(call: Call, local: Tensor, out: Tensor) -> Tensor:
    args, kwargs = with_values((call.args, call.kwargs), lambda v: local)
    kwargs.pop("inplace", None)
    found: Tensor = _WITH_OUT[call.function](*args, **kwargs, out=out)
    return found


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _cuts(graph: Graph, kinds: Kinds, call: Call, region: Region) -> dict[str, tuple[int, ...]]:
    """So that this is the part of number 1 of the call's results."""
    made = next((v for v in call.outputs if v in kinds.dims), None)
    return {
        one.axis: part_cuts(low, high, high if made is None else graph.fakes[made].size(one.dims[made]))
        for one, (low, high) in zip(kinds.axes, region, strict=True)
    }


def _laid_out(made: Any, fake: Tensor) -> Any:
    """A result in NCHW where the whole call's is. Of one image in channels_last whose strides step to the next one by
    less than an image, torch makes NCHW; of a strip, whose strides are the usual ones, channels_last.
    """
    if not isinstance(made, SpatialTensor) or not fake.is_contiguous() or layout(made._local) == layout(fake):
        return made
    return SpatialTensor(made._local.contiguous(), made.axes)


def run_chain(
    graph: Graph, kinds: Kinds, step: Step, region: Region, cut: dict[int, Tensor], reads: dict[int, Region],
    whole: Callable[[int], Tensor], answers: Callable[[int], Sequence[Tensor]],
    probing: Callable[[int], bool] = lambda place: False, made_up: int = 0,
    room: Callable[[Tensor], Tensor | None] | None = None, links: Links | None = None,
) -> list[Any]:  # fmt: skip
    """The results of a step's last call, for a part of them. cut: of the cut arguments of the first call, the parts
    `reads`. room: where a result like this one is to be written, for values of `sweep.rooms`. links: of a step
    of one call, in backward. NeedsWhole as of `run_part`. probing, made_up: as of `Asked`, where only memory counts.
    """
    results: list[Any] = []
    not_ours = set(map(_memory, cut.values()))  # a result can be a view of an argument
    for place in step.calls:
        call = graph.calls[place]
        not_ours.update(map(_memory, call.constants))
        if call.by_place:
            local = local_of(results[0]) if results else cut[call.inputs[0]]
            results.clear()
            out = room(local) if room is not None and place == step.last else None
            if out is not None:
                results = [_into(call, local, out)]
                continue
            if _memory(local) not in not_ours:
                call = _in_place(call)
            elif call.writes:
                local = local.clone()
            results = run_whole(call, {call.inputs[0]: local}.__getitem__)
            continue
        given: dict[int, Any] = {v: whole(v) for v in call.inputs if v not in kinds.dims}
        not_ours.update(map(_memory, given.values()))
        for v in call.inputs:
            if v in kinds.dims:
                local, there = (local_of(results[0]), region) if results else (cut[v], reads[v])
                if call.writes and v == call.inputs[0]:
                    local = local.clone()
                given[v] = local, axes_at(graph, kinds, v, there)
        results.clear()
        asked = Asked(_cuts(graph, kinds, call, region), 1, answers(place), probing(place), made_up, links=links)
        del local
        results = run_part(call, asked, given)
        given.clear()
        for at, v in enumerate(call.outputs):
            results[at] = _laid_out(results[at], graph.fakes[v])
    return results
