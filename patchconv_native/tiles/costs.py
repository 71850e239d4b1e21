"""Predicts the memory of a sweep: of each step by running its rule on values without data, of what lies between steps
by counting the rows that are there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .._library import load
from ..memory.fake import Storages
from ..memory.sizes import tensors
from ..spatial import NotServed
from ..spatial.layout import layout
from .chains import run_chain
from .graph import Graph
from .kinds import Kinds, Region, box_shape, part_of, rows_lie_together, whole_region
from .outside import Outside, largest_write
from .rows import alone
from .run import Run, from_answers
from .shared import along
from .stores import Store, extra
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

    def times(self, part: float, asks: int) -> Cost:
        """About that of so many times larger a part. A share of a number of the whole image is as large for each."""
        return Cost(math.ceil(self.peak * part), self.result if asks else math.ceil(self.result * part), self.flops)


BLOCKS = {"cuda": 512}
"""A device's allocator gives out multiples of so many bytes."""


class PeakOf:
    """Counts the storages that are made on a device, as its allocator does."""

    def __init__(self, device: str = "cpu") -> None:
        self._block = BLOCKS.get(device, 1)
        self.now = self.most = 0

    def memory(self, block: int, size: int) -> None:
        self.now += self.taken(size) if size > 0 else -self.taken(-size)
        self.most = max(self.most, self.now)

    def taken(self, size: int) -> int:
        return -(-size // self._block) * self._block


def row_bytes(graph: Graph, kinds: Kinds, v: int, across: Region | None = None) -> int:
    """Of one row, or of what a band has of it."""
    box = whole_region(graph, kinds, v)[1:] if across is None else across
    return part_bytes(graph, kinds, v, ((0, 1), *box))


def part_bytes(graph: Graph, kinds: Kinds, v: int, region: Region) -> int:
    return math.prod(box_shape(graph, kinds, v, region)) * graph.fakes[v].dtype.itemsize


EXACT = 4
"""Of strips of so many rows it is found what each number of rows takes, also where it is asked for roughly."""
Known = dict[tuple[Any, ...], tuple[int, Cost]]
"""How many rows were looked at, and what they take."""
Boxes = dict[int, list[Region]]


def widest_band(sweep: Sweep) -> int:
    """About: the one that has the most of the first step's result."""
    across = sweep.steps[0].across
    return max(range(sweep.bands), key=lambda band: places(across[band])) if sweep.bands > 1 else 0


def rough_cost(graph: Graph, kinds: Kinds, step: Step, known: Known, band: int) -> Cost:
    """About what `cost_of` finds, from what the strip of the most rows takes in a band as wide as the image. band: of
    `widest_band`.
    """
    wholes = {v: whole_region(graph, kinds, v) for v in step.reads}
    outputs = [v for v in graph.calls[step.call].outputs if v in kinds.dims]
    whole = whole_region(graph, kinds, outputs[0])[1:] if outputs else next(iter(wholes.values()))[1:]
    there = {v: [region[1:]] for v, region in wholes.items()}
    cost = cost_of(graph, kinds, dataclasses.replace(step, across=[whole], reads_across=there), known, {}, rough=True)
    share = places(step.across[band]) / places(whole)
    for v, boxes in step.reads_across.items():
        share = max(share, places(boxes[band]) / places(wholes[v][1:]))
    return cost.times(share, step.asks)


def places(box: Region) -> int:
    return math.prod(_lengths(box))


def cost_of(graph: Graph, kinds: Kinds, step: Step, known: Known, made: Boxes, rough: bool = False) -> Cost:
    """known: what was found before, for steps like this one of as many rows. made: as of the step's sweep. rough: only
    one of the strips with the most rows is looked at.
    """
    lengths = [high - low for low, high in step.rows]
    there = [lengths.index(max(lengths))] if rough else [k for k, length in enumerate(lengths) if length] or [0]
    fetches = kinds.fetches[step.call]
    first = next((k for k, length in enumerate(lengths) if length), 0)
    last = next((k for k in reversed(range(len(lengths))) if lengths[k]), 0)
    strips: dict[Any, int] = {}
    for strip in there:  # more rows may need less: a convolution of few goes to another library
        reads = tuple([ranges[strip][1] - ranges[strip][0] for ranges in step.reads.values()])
        border = fetches and (strip == first, strip == last)  # padding is joined to the rows
        strips.setdefault((lengths[strip], reads, border), strip)
    costs = []
    for (one, strip), (other, band) in _pairs(strips, _telling_bands(graph, kinds, step, made)):
        rows = lengths[strip]
        size = ("about", round(2 * math.log2(rows)), one[2]) if rough and rows > EXACT else one
        key = *(kinds.alike[place] for place in step.calls), step.asks, size, other
        if key not in known:
            known[key] = rows, _measured(graph, kinds, step, strip, band, made)
        of, cost = known[key]
        costs.append(cost if rows == of else cost.times(rows / of, step.asks))
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
    peak, counted = _counted(graph)
    counted.there_before([*cut.values()])
    results: Any = None
    with graph.mode, torch.no_grad(), counted:
        try:
            results = run_chain(
                graph, kinds, step, step.region(strip, band), cut, reads, graph.fakes.__getitem__, lambda place: (),
                lambda place: not step.asks or place != step.last, max(step.asks - 1, 0),
            )  # fmt: skip
        except NeedsWhole as needs:
            results = [needs.share]
        kept = [alone(t) for t in tensors([getattr(one, "_local", one) for one in results])]
    result = sum(peak.taken(t.nbytes) for t in kept)
    return Cost(peak.most, result, counted.work["flops"])


def _counted(graph: Graph) -> tuple[PeakOf, Storages]:
    device = graph.device
    peak = PeakOf(device.type)
    return peak, Storages(peak, device, graph.casts, graph.storages)


def whole_cost(graph: Graph, kinds: Kinds, place: int, outside: Outside) -> int:
    """The most bytes that a call takes on whole arguments, its result included."""
    call, gathers = graph.calls[place], 0
    peak, counted = _counted(graph)
    for v in call.inputs:
        if v in graph.inputs:
            gathers += (outside.inputs.get(v, 0) + 2 * (outside.ranks > 1)) * bytes_of(graph, v)
        elif v in kinds.dims:  # joined
            copies = 2 if kinds.others else 1  # of several bands, one is read at a time
            copies += outside.ranks > 1  # what is sent and received
            gathers += copies * bytes_of(graph, v) + extra(outside.store, row_bytes(graph, kinds, v))
    written = call.inputs[0] if call.writes else None
    try:
        with graph.mode, torch.no_grad(), counted:
            run_whole(call, lambda v: graph.fakes[v].clone() if v == written else graph.fakes[v])
    except NotServed:
        raise
    except NotImplementedError as error:  # oneDNN's LSTM
        raise NotServed(
            f"tile: {call.where} is not served: what memory it takes is known only without oneDNN, under "
            "torch.backends.mkldnn.flags(enabled=False)"
        ) from error
    return peak.most + gathers


def answer_cost(graph: Graph, kinds: Kinds, place: int) -> int:
    """The same of a call whose result follows from numbers of the whole image."""
    peak, counted = _counted(graph)
    run = Run(graph, kinds, set(), {}, Store("device"), whole=dict(enumerate(graph.fakes)))
    with graph.mode, torch.no_grad(), counted:
        from_answers(run, place, probing=True)
    return peak.most


_TAKE_VIEWS = {"add", "add_", "sub", "mul", "__add__", "__iadd__", "__radd__", "__sub__", "__mul__", "__rmul__", "cat"}


_strips = load().strips
_NONE = -1
Stored = dict[int, Any]
"""Of each value its `CountedRows` (core/strips.h): rows that are there, with lengths in place of tensors."""


def whole_rows(graph: Graph, kinds: Kinds, v: int, outside: Outside) -> Any:
    """The `CountedRows` of a value that is kept, all of them; of an image that is shared, a rank's."""
    found = _strips.CountedRows(row_bytes(graph, kinds, v, outside.largest_part(graph, kinds, v)))
    found.add(graph.fakes[v].size(kinds.dims[v]))
    return found


def sweep_peak(
    graph: Graph, kinds: Kinds, sweep: Sweep, costs: list[Cost], stored: Stored, outside: Outside, rough: bool = False
) -> int:
    """The most bytes during a sweep, above what is there whole before it (inputs and results).

    costs: of each step. stored: what is there from earlier sweeps; changed to what is there afterwards. rough: as of
    `_about_bands`, where there are several.
    """
    before = sum(rows.bytes for rows in stored.values()) if outside.counted else 0
    each = sweep.bands // outside.ranks
    of_bands = _about_bands if rough and each > 1 else _of_bands
    most, after = of_bands(graph, kinds, sweep, costs, stored, outside)
    if each == 1:
        stored.update(after)
    else:  # rows are there until the end
        for v in sweep.stores:
            stored[v] = whole_rows(graph, kinds, v, outside)
            stored[v].widest = max(row_bytes(graph, kinds, v, box) for box in sweep.own[v])
    for v in sweep.frees:
        stored.pop(v, None)
    return before + most + outside.beside(graph, kinds, sweep)


def _of_bands(
    graph: Graph, kinds: Kinds, sweep: Sweep, costs: list[Cost], stored: Stored, outside: Outside
) -> tuple[int, Stored]:
    """The most bytes during any band, above what is there before the sweep, and what is stored after the last one."""
    most, there, after, each = 0, 0, stored, sweep.bands // outside.ranks
    alike: dict[Any, tuple[int, int]] = {}
    for band in range(sweep.bands):
        if band % each == 0:
            there = 0  # of another rank
        key = tuple(_band_key(graph, kinds, step, band, sweep.made) for step in sweep.steps)
        key += tuple(_lengths(boxes[band]) for boxes in sweep.own.values())
        if key not in alike:
            after = stored if outside.ranks == 1 else {v: type(rows)(rows) for v, rows in stored.items()}
            alike[key] = _band_peak(graph, kinds, sweep, band, costs, after, outside)
        peak, more = alike[key]
        most, there = max(most, there + peak), there + more
    return most, after


def _about_bands(
    graph: Graph, kinds: Kinds, sweep: Sweep, costs: list[Cost], stored: Stored, outside: Outside
) -> tuple[int, Stored]:
    """About the same, from the last band and, as the one before it, the widest."""
    made = sum(whole_rows(graph, kinds, v, outside).bytes for v in sweep.stores) if outside.counted else 0
    made += 2 * sum(answers_bytes(sweep, costs)) // outside.ranks  # joined at the end
    each, most = sweep.bands // outside.ranks, 0
    for place, band in enumerate((sweep.bands - 1, widest_band(sweep)), 1):
        peak, _ = _band_peak(graph, kinds, sweep, band, costs, stored, outside)
        most = max(most, made * (each - place) // each + peak)
    return most, stored


def _band_peak(
    graph: Graph, kinds: Kinds, sweep: Sweep, band: int, costs: list[Cost], stored: Stored, outside: Outside
) -> tuple[int, int]:
    """The most bytes during a band above what is there before it, and by how many more are there after it. stored is
    changed where there is one band, or one for each rank.
    """
    alone = sweep.bands == outside.ranks

    def counted(v: int, boxes: Boxes) -> Any:
        return _strips.CountedRows(row_bytes(graph, kinds, v, boxes[v][band]), rows_lie_together(graph, kinds, v))

    buffers = {v: counted(v, sweep.made) for v in sweep.ready if v in sweep.last_read}
    stores = {v: counted(v, sweep.own) for v in sweep.stores}
    if outside.ranks > 1 and alone:
        stores = {
            v: _strips.CountedRows(row_bytes(graph, kinds, v, outside.largest_part(graph, kinds, v))) for v in stores
        }
    held, drops = dict(buffers), dict(buffers)
    if alone:
        stored.update(stores)
        if outside.counted:
            held = stored | buffers
            drops |= {v: stored[v] for v in sweep.frees}
    everything = [*buffers.values(), *stores.values(), *stored.values()]
    numbers = {id(rows): number for number, rows in enumerate(everything)}

    def number(some: Stored, v: int) -> int:
        return numbers[id(some[v])] if v in some else _NONE

    steps = []
    for place, (step, cost) in enumerate(zip(sweep.steps, costs, strict=True)):
        copies, made = _copies(graph, kinds, sweep, step, band, held, stored, outside), graph.calls[step.last].outputs
        reads = [
            _strips.Read(
                ranges=ranges, copies=copies[v], rows=number(held, v),
                drops=number(drops, v) if sweep.last_read[v] == place else _NONE, keep=sweep.keep[v],
            )
            for v, ranges in step.reads.items()
        ]  # fmt: skip
        keeps = [(number(buffers, v), True) for v in made] + [(number(stores, v), outside.counted) for v in made]
        steps.append(
            _strips.Step(
                rows=step.rows, peak=cost.peak, result=cost.result, aside=_aside(graph, kinds, sweep, step, outside),
                asks=step.asks, views=_takes_views(graph, step), reads=reads,
                room=number(buffers, made[0]) if made[0] in sweep.rooms else _NONE,
                keeps=[(place, counts) for place, counts in keeps if place != _NONE],
            )
        )  # fmt: skip
    most, there = _strips.peak(steps, everything, sweep.strips)
    return most, there


def _copies(
    graph: Graph, kinds: Kinds, sweep: Sweep, step: Step, band: int, held: Stored, stored: Stored, outside: Outside
) -> dict[int, int]:
    """Of each value that a step reads, how many bytes are copied for each row of it, besides what `held` copies."""
    found = {}
    views = _takes_views(graph, step) or kinds.fetches[step.call]
    each = sweep.bands // outside.ranks
    for v, boxes in step.reads_across.items():
        row = row_bytes(graph, kinds, v, boxes[band])
        if v not in held:
            found[v] = row * (1 if v in stored else outside.inputs.get(v, 0))
            if v in stored and each > 1:  # band by band
                found[v] += stored[v].widest
        else:
            part = v in sweep.made and boxes[band] != sweep.made[v][band]
            found[v] = row if part and not views else 0
        if outside.shared is not None and v in sweep.sources:
            column = row_bytes(graph, kinds, v, ((0, 1), *boxes[band][1:]))
            ranges = [along(((0, 1), *boxes[one])) for one in outside.shared.peers(sweep.bands, band)]
            received, sent = outside.messages(graph, kinds, v, ranges, band // each)
            if received or sent:
                found[v] += column * (received + sent) + row * (received > 0)
            else:
                found[v] += row * (boxes[band] != outside.own_part(graph, kinds, v, band // each))
            if v in stored and each > 1:  # all of the rank's rows, of which a part is read
                found[v] += row_bytes(graph, kinds, v, outside.largest_part(graph, kinds, v))
    return found


def _takes_views(graph: Graph, step: Step) -> bool:
    """Whether a step takes some rows of a tensor as they are."""
    call = graph.calls[step.call]
    return call.by_place or call.name in _TAKE_VIEWS


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
