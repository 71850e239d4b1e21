"""Predicts the memory of a sweep: of each step by running its rule on values without data, of what lies between steps
by counting the rows that are there.
"""

from __future__ import annotations

import bisect
import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from ..memory.fake import Storages
from ..memory.sizes import tensors
from ..spatial.layout import empty, layout
from .chains import run_chain
from .kinds import Kinds, rows_lie_together
from .record import Graph
from .rows import copies_rest, makes_room
from .stores import Where, extra
from .strips import NeedsWhole, run_whole
from .sweeps import Step, Sweep, bytes_of


@dataclass
class Cost:
    """Of a step, for the strips that make the most rows, and those at the border."""

    peak: int
    """Bytes above what it is given: its result counts."""
    result: int
    """Bytes of its result, or of its share of a number of the whole image."""
    flops: int


class _Peak:
    """Counts the storages that a step makes."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def memory(self, block: int, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def row_bytes(graph: Graph, kinds: Kinds, v: int) -> int:
    return bytes_of(graph, v) // max(graph.fakes[v].size(kinds.dims[v]), 1)


Known = dict[tuple[Any, ...], Cost]


def cost_of(graph: Graph, kinds: Kinds, step: Step, known: Known) -> Cost:
    """known: what was found before, for steps of as many rows."""
    there = [k for k, (low, high) in enumerate(step.rows) if low < high] or [0]
    found: dict[tuple[Any, ...], Cost] = {}
    for strip in there:  # more rows may need less: a convolution of few goes to another library
        low, high = step.rows[strip]
        reads = tuple(b - a for a, b in (ranges[strip] for ranges in step.reads.values()))
        border = kinds.fetches[step.call] and (strip == there[0], strip == there[-1])  # padding is joined to the rows
        key = *step.calls, step.asks, high - low, reads, border
        if key in found:
            continue
        if key not in known:
            known[key] = _measured(graph, kinds, step, strip)
        found[key] = known[key]
    costs = found.values()
    return Cost(max(one.peak for one in costs), max(one.result for one in costs), max(one.flops for one in costs))


def _measured(graph: Graph, kinds: Kinds, step: Step, strip: int) -> Cost:
    cut = {}
    with graph.mode:
        for v, ranges in step.reads.items():
            fake, dim, (a, b) = graph.fakes[v], kinds.dims[v], ranges[strip]
            apart = v in graph.inputs and b - a < fake.size(dim) and not rows_lie_together(graph, kinds, v)  # a view
            made = empty(fake, dim, b - a + apart, layout(fake))
            cut[v] = made.narrow(dim, 0, b - a)
    peak = _Peak()
    counted = Storages(peak, graph.fakes[graph.inputs[0]].device)
    counted.there_before([graph.fakes, *cut.values()])
    reads = {v: ranges[strip] for v, ranges in step.reads.items()}
    results: Any = None
    with graph.mode, torch.no_grad(), counted:
        try:
            results = run_chain(
                graph, kinds, step, step.rows[strip], cut, reads, graph.fakes.__getitem__, lambda place: (),
                lambda place: False, lambda place: not step.asks or place != step.last,
            )  # fmt: skip
        except NeedsWhole as needs:
            results = [needs.share]
    result = sum(t.nbytes for t in tensors([getattr(one, "_local", one) for one in results]))
    return Cost(peak.most, result, counted.work["flops"])


@dataclass
class Outside:
    """What is not in the memory that the budget counts: reading it makes a copy."""

    store: Where
    """Where stored values are kept."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Of each input that is copied a strip at a time, how many copies there are at once."""
    result: bool = False
    """Whether the result counts."""

    @property
    def counted(self) -> bool:
        """Whether stored values count."""
        return self.store == "device"


def whole_cost(graph: Graph, kinds: Kinds, place: int, outside: Outside) -> int:
    """The most bytes that a call takes on whole arguments, its result included."""
    call, peak = graph.calls[place], _Peak()
    counted = Storages(peak, graph.fakes[graph.inputs[0]].device)
    counted.there_before(graph.fakes)
    gathers = 0
    for v in call.inputs:
        if v in graph.inputs:
            gathers += outside.inputs.get(v, 0) * bytes_of(graph, v)
        elif v in kinds.dims:  # joined
            gathers += bytes_of(graph, v) + extra(outside.store, row_bytes(graph, kinds, v))
    written = call.inputs[0] if call.writes else None
    with graph.mode, torch.no_grad(), counted:
        run_whole(call, lambda v: graph.fakes[v].clone() if v == written else graph.fakes[v])
    return peak.most + gathers


_TAKE_VIEWS = {"add", "add_", "sub", "mul", "__add__", "__iadd__", "__radd__", "__sub__", "__mul__", "__rmul__", "cat"}


class _CountedRows:
    """As `Rows`, with lengths in place of tensors. `add` returns by how much the bytes grow."""

    def __init__(self, row: int, together: bool = True) -> None:
        self.row, self._together = row, together
        self.end = self.bytes = self._below = 0
        self._begins: list[int] = []

    def add(self, length: int) -> int:
        self._begins.append(self.end)
        self.end += length
        self.bytes += length * self.row
        return length * self.row

    def room(self, length: int) -> int:
        """Bytes of the memory in which these rows are written behind the ones that are still needed; 0: there is none.
        All is one piece then.
        """
        begin = max(self._below, self._begins[0]) if self._begins else self.end
        if not makes_room(self.end - begin, length):
            return 0
        self._begins = [begin]
        self.end += length
        self.bytes = (self.end - begin) * self.row
        return self.bytes

    def copied(self, low: int, high: int, views: bool) -> int:
        """Bytes of the copy that reading these rows makes. views: whether the function that reads them takes some rows
        of a tensor as they are; others make a copy where these do not lie together.
        """
        piece = bisect.bisect_right(self._begins, low)
        end = self._begins[piece] if piece < len(self._begins) else self.end
        begin = self._begins[piece - 1] if piece else low
        at_once = high <= end and (views or self._together or (low, high) == (begin, end))
        return 0 if at_once else (high - low) * self.row

    def copy(self) -> _CountedRows:
        made = copy.copy(self)
        made._begins = list(self._begins)
        return made

    def state(self) -> tuple[int, ...]:
        """All that what follows depends on."""
        return self.end, self.bytes, self._below, hash(tuple(self._begins))

    def drop(self, below: int) -> tuple[int, int]:
        """How many bytes are let go of, and how many of them are still there while the rows that stay are copied."""
        before, self._below, held = self.bytes, below, 0
        gone = max(bisect.bisect_right(self._begins, below) - 1, 0)  # whole pieces before the one that holds `below`
        if self.end <= below:
            gone = len(self._begins)
        elif self._begins and self._begins[gone] < below:
            begin, end = self._begins[gone], [*self._begins[gone + 1 : gone + 2], self.end][0]
            if copies_rest(end - below, end - begin):
                self._begins[gone], held = below, (end - begin) * self.row
        del self._begins[:gone]
        self.bytes = (self.end - self._begins[0]) * self.row if self._begins else 0
        return before - self.bytes, held


Stored = dict[int, _CountedRows]


def sweep_peak(graph: Graph, kinds: Kinds, sweep: Sweep, costs: list[Cost], stored: Stored, outside: Outside) -> int:
    """The most bytes during a sweep, above what is there whole before it (inputs and results).

    costs: of each step. stored: what is there from earlier sweeps; changed to what is there afterwards.
    """
    buffers = {
        v: _CountedRows(row_bytes(graph, kinds, v), rows_lie_together(graph, kinds, v))
        for v in sweep.ready if v in sweep.last_read
    }  # fmt: skip
    for v in sweep.stores:
        stored[v] = _CountedRows(row_bytes(graph, kinds, v), rows_lie_together(graph, kinds, v))
    views = [graph.calls[step.call].by_place or graph.calls[step.call].name in _TAKE_VIEWS for step in sweep.steps]
    most, there = 0, sum(rows.bytes for rows in stored.values()) if outside.counted else 0
    asides = [_aside(graph, kinds, sweep, step, outside) for step in sweep.steps]
    row = {v: row_bytes(graph, kinds, v) for step in sweep.steps for v in step.reads}
    for strip in range(sweep.strips):
        for place, step in enumerate(sweep.steps):
            low, high = step.rows[strip]
            if low < high:
                copied, aside = 0, asides[place]
                for v, reads in step.reads.items():
                    if v in buffers or (v in stored and outside.counted):
                        copied += (buffers.get(v) or stored[v]).copied(*reads[strip], views[place])
                    else:
                        copies = 1 if v in stored else outside.inputs.get(v, 0)
                        copied += copies * (reads[strip][1] - reads[strip][0]) * row[v]
                most = max(most, there + copied + max(costs[place].peak, costs[place].result + aside))
                made = graph.calls[step.last].outputs
                rows = buffers[made[0]] if made[0] in sweep.rooms else None
                before = 0 if rows is None else rows.bytes
                if step.asks:
                    there += 2 * costs[place].result  # joined at the end
                elif rows is not None and (room := rows.room(high - low)):
                    most = max(most, there + copied + costs[place].result + room)
                    there += room - before
                else:
                    for v in made:
                        there += buffers[v].add(high - low) if v in buffers else 0
                        if v in sweep.stores:
                            there += stored[v].add(high - low) * outside.counted
            for v in step.reads:
                read = buffers.get(v) or (stored[v] if v in sweep.frees and outside.counted else None)
                if sweep.last_read[v] == place and read is not None:
                    gone, held = read.drop(sweep.keep[v][strip])
                    there -= gone
                    most = max(most, there + held)
    for v in sweep.frees:
        stored.pop(v, None)
    return most


def answers_bytes(sweep: Sweep, costs: list[Cost]) -> list[int]:
    """Of what a sweep finds of the whole image, a share for each strip: it is there from then on. A number a step."""
    found = ((step, cost.result) for step, cost in zip(sweep.steps, costs, strict=True) if step.asks)
    return [size * sum(low < high for low, high in step.rows) for step, size in found]


def _aside(graph: Graph, kinds: Kinds, sweep: Sweep, step: Step, outside: Outside) -> int:
    """What reading and writing a step's stored values takes besides their rows."""
    read = (v for v in step.reads if v in sweep.sources and v not in graph.inputs)
    made = (v for v in graph.calls[step.last].outputs if v in sweep.stores)
    return max((extra(outside.store, row_bytes(graph, kinds, v)) for v in (*read, *made)), default=0)
