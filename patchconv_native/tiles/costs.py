"""Predicts the memory of a sweep: of each step by running its rule on values without data, of what lies between steps
by counting the rows that are there.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..memory.fake import Storages
from ..memory.sizes import tensors
from ..spatial.layout import layout
from .chains import run_chain
from .kinds import Kinds, Region, box_shape, part_of, rows_lie_together, whole_region
from .outside import Outside, largest_write
from .record import Graph
from .rows import copies_rest, makes_room
from .stores import extra
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


def row_bytes(graph: Graph, kinds: Kinds, v: int, across: Region | None = None) -> int:
    """Of one row, or of what a band has of it."""
    box = whole_region(graph, kinds, v)[1:] if across is None else across
    return _part_bytes(graph, kinds, v, ((0, 1), *box))


def _part_bytes(graph: Graph, kinds: Kinds, v: int, region: Region) -> int:
    return math.prod(box_shape(graph, kinds, v, region)) * graph.fakes[v].dtype.itemsize


Known = dict[tuple[Any, ...], Cost]
Boxes = dict[int, list[Region]]


def rough_cost(graph: Graph, kinds: Kinds, step: Step, known: Known) -> Cost:
    """About what `cost_of` finds, from what a band as wide as the image takes."""
    wholes = {v: whole_region(graph, kinds, v) for v in step.reads}
    outputs = [v for v in graph.calls[step.call].outputs if v in kinds.dims]
    whole = whole_region(graph, kinds, outputs[0])[1:] if outputs else next(iter(wholes.values()))[1:]
    there = {v: [region[1:]] for v, region in wholes.items()}
    cost = cost_of(graph, kinds, dataclasses.replace(step, across=[whole], reads_across=there), known, {})
    share = max(places(box) for box in step.across) / places(whole)
    for v, boxes in step.reads_across.items():
        share = max(share, max(places(box) for box in boxes) / places(wholes[v][1:]))
    return Cost(math.ceil(cost.peak * share), cost.result if step.asks else math.ceil(cost.result * share), cost.flops)


def places(box: Region) -> int:
    return math.prod(_lengths(box))


def cost_of(graph: Graph, kinds: Kinds, step: Step, known: Known, made: Boxes) -> Cost:
    """known: what was found before, for steps like this one of as many rows. made: as of the step's sweep."""
    there = [k for k, (low, high) in enumerate(step.rows) if low < high] or [0]
    strips: dict[Any, int] = {}
    for strip in there:  # more rows may need less: a convolution of few goes to another library
        low, high = step.rows[strip]
        reads = tuple(b - a for a, b in (ranges[strip] for ranges in step.reads.values()))
        border = kinds.fetches[step.call] and (strip == there[0], strip == there[-1])  # padding is joined to the rows
        strips.setdefault((high - low, reads, border), strip)
    costs = []
    for (one, strip), (other, band) in _pairs(strips, _telling_bands(graph, kinds, step, made)):
        key = *(kinds.alike[place] for place in step.calls), step.asks, one, other
        if key not in known:
            known[key] = _measured(graph, kinds, step, strip, band, made)
        costs.append(known[key])
    return Cost(max(one.peak for one in costs), max(one.result for one in costs), max(one.flops for one in costs))


def _telling_bands(graph: Graph, kinds: Kinds, step: Step, made: Boxes) -> dict[Any, int]:
    """Those at the border and, as the last one, the widest band, with what tells them apart."""
    some = [band for band, box in enumerate(step.across) if places(box)] or [0]

    def width(band: int) -> tuple[int, int]:
        return places(step.across[band]), sum(places(boxes[band]) for boxes in step.reads_across.values())

    bands = (some[0], some[-1], max(some, key=width))
    found = {_band_key(graph, kinds, step, band, made): band for band in bands}
    widest = _band_key(graph, kinds, step, bands[-1], made)
    return {key: band for key, band in found.items() if key != widest} | {widest: bands[-1]}


def _pairs(strips: dict[Any, int], bands: dict[Any, int]) -> Iterator[tuple[tuple[Any, int], tuple[Any, int]]]:
    """All strips of the last band, and of the others the strips of the most rows."""
    widest, most = [*bands][-1], max(rows for rows, *_ in strips)
    for one, other in itertools.product(strips.items(), bands.items()):
        if other[0] == widest or one[0][0] == most:
            yield one, other


def _band_key(graph: Graph, kinds: Kinds, step: Step, band: int, made: Boxes) -> tuple[Any, ...]:
    """What tells a band from others: its size, and where there is padding."""
    found: list[Any] = [_lengths(step.across[band])]
    for v, boxes in step.reads_across.items():
        sizes = whole_region(graph, kinds, v)[1:]
        for one, part, whole, (_, size) in zip(
            kinds.others, boxes[band], _at_hand(graph, kinds, v, band, made, step), sizes, strict=True
        ):
            border = one.fetches[step.call] and (part[0] == 0, part[1] == size)
            found.append((part[1] - part[0], whole == part, border))
    return tuple(found)


def _lengths(box: Region) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def _at_hand(graph: Graph, kinds: Kinds, v: int, band: int, made: Boxes, step: Step) -> Region:
    """What there is of a value along `kinds.others`, of which a step reads a part."""
    if v in graph.inputs:
        return whole_region(graph, kinds, v)[1:]
    return made[v][band] if v in made else step.reads_across[v][band]  # stored values are copied


def _measured(graph: Graph, kinds: Kinds, step: Step, strip: int, band: int, made: Boxes) -> Cost:
    cut = {}
    reads = {v: step.read(v, strip, band) for v in step.reads}
    with graph.mode:
        for v, there in reads.items():
            fake, rows = graph.fakes[v], there[0]
            apart = v in graph.inputs and rows[1] - rows[0] < fake.size(kinds.dims[v])
            shape = box_shape(graph, kinds, v, there)
            shape[kinds.dims[v]] += apart and not rows_lie_together(graph, kinds, v)  # a view
            for one, part, whole in zip(
                kinds.others, there[1:], _at_hand(graph, kinds, v, band, made, step), strict=True
            ):
                shape[one.dims[v]] += whole != part
            larger = torch.empty(shape, dtype=fake.dtype, device=fake.device, memory_format=layout(fake))
            cut[v] = part_of(kinds, v, larger, tuple((0, n) for n in _lengths(there)))
    peak = _Peak()
    counted = Storages(peak, graph.fakes[graph.inputs[0]].device)
    counted.there_before([graph.fakes, *cut.values()])
    results: Any = None
    with graph.mode, torch.no_grad(), counted:
        try:
            results = run_chain(
                graph, kinds, step, step.region(strip, band), cut, reads, graph.fakes.__getitem__, lambda place: (),
                lambda place: False, lambda place: not step.asks or place != step.last,
            )  # fmt: skip
        except NeedsWhole as needs:
            results = [needs.share]
    result = sum(t.nbytes for t in tensors([getattr(one, "_local", one) for one in results]))
    return Cost(peak.most, result, counted.work["flops"])


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
            copies = 2 if kinds.others else 1  # of several bands, one is read at a time
            gathers += copies * bytes_of(graph, v) + extra(outside.store, row_bytes(graph, kinds, v))
    written = call.inputs[0] if call.writes else None
    with graph.mode, torch.no_grad(), counted:
        run_whole(call, lambda v: graph.fakes[v].clone() if v == written else graph.fakes[v])
    return peak.most + gathers


_TAKE_VIEWS = {"add", "add_", "sub", "mul", "__add__", "__iadd__", "__radd__", "__sub__", "__mul__", "__rmul__", "cat"}


class _CountedRows:
    """As `Rows`, with lengths in place of tensors. `add` returns by how much the bytes grow.

    widest: of one row, the bytes in the widest band.
    """

    def __init__(self, row: int, together: bool = True) -> None:
        self.row, self._together = row, together
        self.widest = row
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
    most, there = 0, sum(rows.bytes for rows in stored.values()) if outside.counted else 0
    alike: dict[Any, tuple[int, int]] = {}
    for band in range(sweep.bands):
        key = tuple(_band_key(graph, kinds, step, band, sweep.made) for step in sweep.steps)
        key += tuple(_lengths(boxes[band]) for boxes in sweep.own.values())
        if key not in alike:
            alike[key] = _band_peak(graph, kinds, sweep, band, costs, stored, outside)
        peak, more = alike[key]
        most, there = max(most, there + peak), there + more
    if sweep.bands > 1:  # rows are there until the end
        for v in sweep.stores:
            stored[v] = _CountedRows(row_bytes(graph, kinds, v))
            stored[v].add(graph.fakes[v].size(kinds.dims[v]))
            stored[v].widest = max(row_bytes(graph, kinds, v, box) for box in sweep.own[v])
    for v in sweep.frees:
        stored.pop(v, None)
    return most + outside.beside(graph, kinds, sweep)


def _band_peak(
    graph: Graph, kinds: Kinds, sweep: Sweep, band: int, costs: list[Cost], stored: Stored, outside: Outside
) -> tuple[int, int]:
    """The most bytes during a band above what is there before it, and by how many more are there after it. stored is
    changed where there is one band.
    """

    def counted(v: int, boxes: Boxes) -> _CountedRows:
        return _CountedRows(row_bytes(graph, kinds, v, boxes[v][band]), rows_lie_together(graph, kinds, v))

    buffers = {v: counted(v, sweep.made) for v in sweep.ready if v in sweep.last_read}
    stores = {v: counted(v, sweep.own) for v in sweep.stores}
    held, drops = dict(buffers), dict(buffers)
    if sweep.bands == 1:
        stored.update(stores)
        if outside.counted:
            held = stored | buffers
            drops |= {v: stored[v] for v in sweep.frees}
    copies = [_copies(graph, kinds, sweep, step, band, held, stored, outside) for step in sweep.steps]
    views = [graph.calls[step.call].by_place or graph.calls[step.call].name in _TAKE_VIEWS for step in sweep.steps]
    most = there = 0
    asides = [_aside(graph, kinds, sweep, step, outside) for step in sweep.steps]
    for strip in range(sweep.strips):
        for place, step in enumerate(sweep.steps):
            low, high = step.rows[strip]
            if low < high:
                copied, aside = 0, asides[place]
                for v, ranges in step.reads.items():
                    begin, end = ranges[strip]
                    copied += (end - begin) * copies[place][v]
                    if v in held:
                        copied += held[v].copied(begin, end, views[place])
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
                        if v in stores:
                            there += stores[v].add(high - low) * outside.counted
            for v in step.reads:
                if sweep.last_read[v] == place and v in drops:
                    gone, beside = drops[v].drop(sweep.keep[v][strip])
                    there -= gone
                    most = max(most, there + beside)
    return most, there


def _copies(
    graph: Graph, kinds: Kinds, sweep: Sweep, step: Step, band: int, held: Stored, stored: Stored, outside: Outside
) -> dict[int, int]:
    """Of each value that a step reads, how many bytes are copied for each row of it, besides what `held` copies."""
    found = {}
    views = graph.calls[step.call].by_place or graph.calls[step.call].name in _TAKE_VIEWS or kinds.fetches[step.call]
    for v, boxes in step.reads_across.items():
        row = row_bytes(graph, kinds, v, boxes[band])
        if v not in held:
            found[v] = row * (1 if v in stored else outside.inputs.get(v, 0))
            if v in stored and sweep.bands > 1:  # band by band
                found[v] += stored[v].widest
        else:
            part = v in sweep.made and boxes[band] != sweep.made[v][band]
            found[v] = row if part and not views else 0
    return found


def answers_bytes(sweep: Sweep, costs: list[Cost]) -> list[int]:
    """Of what a sweep finds of the whole image, a share for each strip: it is there from then on. A number a step."""
    found = ((step, cost.result) for step, cost in zip(sweep.steps, costs, strict=True) if step.asks)
    return [size * sum(low < high for low, high in step.rows) * sweep.bands for step, size in found]


def _aside(graph: Graph, kinds: Kinds, sweep: Sweep, step: Step, outside: Outside) -> int:
    """What reading and writing a step's stored values takes besides their rows."""
    read = (v for v in step.reads if v in sweep.sources and v not in graph.inputs)
    made = (v for v in graph.calls[step.last].outputs if v in sweep.stores)
    most = max((extra(outside.store, row_bytes(graph, kinds, v)) for v in (*read, *made)), default=0)
    if outside.ahead is False:  # rows with gaps are copied before they are copied to the host
        written = [v for _, v in outside.writes(sweep) if v in graph.calls[step.last].outputs]
        most = max([most, *(largest_write(graph, kinds, sweep, v) for v in written)])
    return most
