"""Runs a recorded module, sweep by sweep and strip by strip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..spatial.layout import in_layout_of
from .arrays import Sink, Source
from .chains import run_chain
from .journal import Journal, State, resumed, rows_in_files
from .kinds import Kinds, Time, calls_between, on_whole
from .record import Graph
from .rows import Rows
from .stores import Kept, Store
from .strips import Asked, NeedsWhole, local_of, rows_of, run_part, run_whole
from .sweeps import Step, Sweep


@dataclass
class Run:
    """What is there during a call."""

    graph: Graph
    kinds: Kinds
    read_later: set[int]
    """Stored values that a sweep reads after a call has got them whole."""
    results: dict[int, Sink]
    """Cut values that are results, each as large as the whole, to be written into."""
    store: Store
    whole: dict[int, Tensor] = field(default_factory=dict)
    stored: dict[int, Kept] = field(default_factory=dict)
    answers: dict[int, list[Tensor]] = field(default_factory=dict)
    inputs: dict[int, Source] = field(default_factory=dict)

    def read(self, v: int, low: int, high: int) -> Tensor:
        dim = self.kinds.dims[v]
        if v in self.inputs:
            rows, fake = self.inputs[v].read(dim, low, high), self.graph.fakes[v]
            return rows if self.inputs[v].strides == fake.stride() else in_layout_of(fake, rows)
        return self.stored[v].read(low, high)

    def keep(self, v: int, end: int = 0) -> None:
        """Of a value that is stored from here on, or from row `end` on."""
        self.stored[v] = self.store.rows(v, self.kinds.dims[v], self.graph.fakes[v], end)

    def free(self, v: int) -> None:
        if v in self.stored:
            self.stored.pop(v).close()


def run_sweep(run: Run, sweep: Sweep, advance: Callable[[], None], journal: Journal | None = None) -> None:
    begins: dict[int, int] = {}
    shares: dict[int, list[Tensor]] = {step.last: [] for step in sweep.steps if step.asks}
    state, done = None if journal is None else journal.state, 0
    if state is not None and state.sweep == sweep.number:
        shares, done = state.shares, state.strip
        sweep, begins = resumed(run.graph, run.kinds, sweep, done)
    else:
        for v in sweep.stores:
            run.keep(v)
    buffers = {v: Rows(run.kinds.dims[v], begins.get(v, 0)) for v in sweep.ready if v in sweep.last_read}
    for strip in range(sweep.strips):
        for place, step in enumerate(sweep.steps):
            if step.rows[strip][0] < step.rows[strip][1]:
                _run_step(run, sweep, step, strip, buffers, shares)
            for v in step.reads:
                if sweep.last_read[v] == place:
                    rows: Kept | None = buffers.get(v) or (run.stored[v] if v in sweep.frees else None)
                    if rows is not None:
                        rows.drop(sweep.keep[v][strip])
        if strip >= done:
            advance()
            if journal is not None and (strip + 1 == sweep.strips or journal.due()):
                _enter(journal, run, sweep.number, strip + 1, shares)
    for v in sweep.frees:
        run.free(v)
    for call, found in shares.items():
        run.answers.setdefault(call, []).append(torch.cat(found))


def _enter(journal: Journal, run: Run, number: int, strips: int, shares: dict[int, list[Tensor]]) -> None:
    """Writes down how far the run has come, unless it would be lost with this process's memory."""
    ends = rows_in_files(run.stored)
    if ends is None:
        return
    for sink in run.results.values():
        sink.flush()
    whole = {v: value.clone() for v, value in run.whole.items()}
    journal.save(State(number, strips, shares, run.answers, whole, ends))
    run.store.purge()


def take_up(run: Run, state: State) -> None:
    """Makes the run as it was when this was written down."""
    device = run.graph.fakes[run.graph.inputs[0]].device
    state.shares = {call: [share.to(device) for share in found] for call, found in state.shares.items()}
    run.answers = {call: [answer.to(device) for answer in found] for call, found in state.answers.items()}
    run.whole = {v: value.to(device) for v, value in state.whole.items()}
    for v, end in state.stored.items():
        run.keep(v, end)


def _run_step(
    run: Run, sweep: Sweep, step: Step, strip: int, buffers: dict[int, Rows], shares: dict[int, list[Tensor]]
) -> None:
    kinds = run.kinds
    low, high = step.rows[strip]
    cut, reads = {}, {}
    for v, ranges in step.reads.items():
        a, b = reads[v] = ranges[strip]
        cut[v] = _no_rows(run, v) if a == b else buffers[v].read(a, b) if v in buffers else run.read(v, a, b)
    made = run.graph.calls[step.last].outputs
    room = buffers[made[0]].room if made[0] in sweep.rooms else None
    try:
        results = run_chain(
            run.graph, kinds, step, (low, high), cut, reads, run.whole.__getitem__,
            lambda place: run.answers.get(place, ()), lambda place: strip == 0 and sweep.number == kinds.done(place),
            room=room,
        )  # fmt: skip
    except NeedsWhole as needs:
        if not step.asks:
            raise
        shares[step.last].append(needs.share)
        return
    cut.clear()
    for v, result in zip(made, results, strict=True):
        if v not in kinds.dims:
            continue
        rows = local_of(result)
        if v in buffers:
            buffers[v].add(rows)
        if v in sweep.stores and run.stored[v].end < high:
            there = run.stored[v].end - low  # more than none where a call goes on that was broken off
            run.stored[v].add(rows.narrow(kinds.dims[v], there, high - low - there) if there else rows)
        if v in sweep.results:
            run.results[v].write(kinds.dims[v], low, high, rows)


def _no_rows(run: Run, v: int) -> Tensor:
    """For what reads nothing but padding."""
    fake, dim = run.graph.fakes[v], run.kinds.dims[v]
    return torch.empty((*fake.shape[:dim], 0, *fake.shape[dim + 1 :]), dtype=fake.dtype, device=fake.device)


def run_between(run: Run, number: int, last: dict[int, Time]) -> None:
    """What is computed on whole values before sweep `number`. last: as of `last_uses`."""
    graph, kinds = run.graph, run.kinds
    for v in [v for v in run.whole if last[v] < (number, 0)]:
        del run.whole[v]  # read last in a sweep
    for place in calls_between(graph, kinds, number):
        call = graph.calls[place]
        if on_whole(graph, kinds, place):
            written = call.inputs[0] if call.writes else None
            whole = {v: _whole(run, v, v == written) for v in call.inputs}
            found = run_whole(call, whole.__getitem__)
            del whole
        else:
            given = {v: _dummy(run, v) if v in kinds.dims else run.whole[v] for v in call.inputs}
            found = run_part(call, Asked((0, 0, 1, 1), 1, run.answers.get(place, ())), given)
        for v, value in zip(call.outputs, found, strict=True):
            if v not in kinds.dims and v in last:
                run.whole[v] = local_of(value)
        del found, value
        for v in call.inputs:
            if last.get(v) == (number, place):
                run.whole.pop(v, None)
                if v not in run.read_later:
                    run.free(v)


def _whole(run: Run, v: int, copy: bool) -> Tensor:
    if v not in run.kinds.dims:
        return run.whole[v].clone() if copy else run.whole[v]
    found = run.read(v, 0, run.graph.fakes[v].size(run.kinds.dims[v]))
    return found.clone() if copy else found


def _dummy(run: Run, v: int) -> Any:
    """One row in place of a value's, for a call whose result follows from numbers of the whole image alone."""
    fake, dim = run.graph.fakes[v], run.kinds.dims[v]
    shape = [*fake.shape[:dim], 1, *fake.shape[dim + 1 :]]
    local = torch.zeros(shape, dtype=fake.dtype, device=fake.device)
    return local, dim, rows_of(0, 1, fake.size(dim))
