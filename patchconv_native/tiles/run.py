"""Runs a recorded module, sweep by sweep and strip by strip."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..spatial import Range
from ..spatial.layout import cut_out, in_layout_of, joined, layout
from ..spatial.norms import TRACKING
from .arrays import Sink, Source
from .chains import run_chain
from .graph import Graph
from .journal import Journal, State, resumed, rows_in_files
from .kinds import (
    Kinds,
    Region,
    Time,
    axes_at,
    box_shape,
    calls_between,
    on_whole,
    part_of,
    whole_region,
)  # fmt: skip
from .outside import Outside, largest_read, largest_write
from .rows import Rows, Take
from .stores import Kept, Store
from .strips import Asked, Links, NeedsWhole, local_of, part_cuts, run_part, run_whole
from .sweeps import Step, Sweep
from .transfers import Part, Readings, Transfers


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
    stored: dict[int, list[Kept]] = field(default_factory=dict)
    """Of each stored value, its rows in each band."""
    own: dict[int, list[Region]] = field(default_factory=dict)
    """Of each stored value, the bands."""
    answers: dict[int, list[Tensor]] = field(default_factory=dict)
    inputs: dict[int, Source] = field(default_factory=dict)
    outside: Outside = field(default_factory=lambda: Outside("device"))
    transfers: Transfers | None = None
    """What copies while strips are computed, as `outside` says."""

    def again(
        self, images: dict[int, Any], stored: dict[int, list[Kept]], whole: dict[int, Tensor],
        answers: dict[int, list[Tensor]],
    ) -> Run:  # fmt: skip
        """The same, with what was taken out of it."""
        device = self.graph.fakes[self.graph.inputs[0]].device
        inputs = {v: Source("tile", image, device) for v, image in images.items()}
        return replace(self, inputs=inputs, stored=stored, whole=whole, answers=answers, transfers=None)

    def where(self, v: int, region: Region) -> dict[int, Range]:
        return {one.dims[v]: part for one, part in zip(self.kinds.axes, region, strict=True)}

    def copies(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The block in which sweeps run."""
        if not self.outside.ahead:
            return contextlib.nullcontext()
        self.transfers = Transfers(device, self.fill, self.empty)
        return self.transfers

    def read(self, v: int, region: Region) -> Tensor:
        if self.transfers is not None and self.transfers.reads(v):
            return self.transfers.take(v, region)
        fake = self.graph.fakes[v]
        if v in self.inputs:
            rows = self.inputs[v].read(self.where(v, region))
            return rows if self.inputs[v].strides == fake.stride() else in_layout_of(fake, rows)
        if len(self.own[v]) == 1:
            return self.stored[v][0].read(*region[0], self._take(v, region[1:], self.own[v][0]))
        made = self.empty(v, region)
        self._join(v, region, made, lambda kept, take: kept.read(*region[0], take))
        return made

    def _take(self, v: int, across: Region, own: Region) -> Take | None:
        """What takes this part along the other dimensions of rows that are `own` there."""
        if across == own:
            return None

        def take(rows: Tensor) -> Tensor:
            for one, (low, high), (begin, _) in zip(self.kinds.others, across, own, strict=True):
                rows = cut_out(rows, one.dims[v], low - begin, high - low)
            return rows

        return take

    def fill(self, v: int, region: Region, made: Tensor) -> None:
        """Reads into memory of the host's what is in the host's memory or in files."""
        if v in self.inputs:
            self.inputs[v].fill(self.where(v, region), made)
        else:
            self._join(v, region, made, lambda kept, take: kept.host(*region[0], take))

    def _join(self, v: int, region: Region, made: Tensor, read: Callable[[Any, Take | None], Tensor]) -> None:
        """Of the parts of a stored value that the bands have, read from each."""
        for own, kept in zip(self.own[v], self.stored[v], strict=True):
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region[1:], own, strict=True))
            if all(a < b for a, b in common):
                there = read(kept, self._take(v, common, own))
                part_of(self.kinds, v, made, (region[0], *common), region).copy_(there)

    def add(self, v: int, band: int, rows: Tensor) -> None:
        """The rows that follow, of a value that is stored."""
        kept: Any = self.stored[v][band]
        if self.transfers is None or not self.transfers.writes(("stored", v)):
            kept.add(rows)
            return
        begin, kept.end = kept.end, kept.end + rows.size(self.kinds.dims[v])
        self.transfers.write(("stored", v), rows, functools.partial(kept.put, begin))

    def write(self, v: int, region: Region, rows: Tensor) -> None:
        """A part of a result."""
        if self.transfers is None or not self.transfers.writes(("result", v)):
            self.results[v].write(self.where(v, region), rows)
            return
        self.transfers.write(("result", v), rows, functools.partial(self.results[v].put, self.where(v, region)))

    def empty(self, v: int, region: Region) -> Tensor:
        fake = self.graph.fakes[v]
        shape = box_shape(self.graph, self.kinds, v, region)
        return torch.empty(shape, dtype=fake.dtype, device=fake.device, memory_format=layout(fake))

    def keep(self, v: int, bands: list[Region], end: int = 0) -> None:
        """Of a value that is stored from here on, or from row `end` on, the next one of these bands."""
        self.own[v] = bands
        there = self.stored.setdefault(v, [])
        fake, dim = self.graph.fakes[v], self.kinds.dims[v]
        meta = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        like = part_of(self.kinds, v, meta, ((0, fake.size(dim)), *bands[len(there)]))
        there.append(self.store.rows(f"{v}-{len(there)}", dim, like, fake.device, end))

    def free(self, v: int) -> None:
        for rows in self.stored.pop(v, []):
            rows.close()


def run_sweep(run: Run, sweep: Sweep, advance: Callable[[], None], journal: Journal | None = None) -> None:
    shares: dict[int, list[Tensor]] = {step.last: [] for step in sweep.steps if step.asks}
    state, done = None if journal is None else journal.state, 0
    if state is not None and state.sweep == sweep.number:
        shares, done = state.shares, state.strip
    if run.transfers is not None:
        _begin_transfers(run, sweep, done, run.transfers)
    for band in range(done // sweep.strips, sweep.bands):
        begin = max(done - band * sweep.strips, 0)  # strips of this band that an earlier process has computed

        def end(strip: int, number: int = band * sweep.strips, begin: int = begin) -> None:
            if run.transfers is not None:
                run.transfers.ahead()
            if strip >= begin:
                advance()
                if journal is not None and (strip + 1 == sweep.strips or journal.due()):
                    _enter(journal, run, sweep.number, number + strip + 1, shares)

        _run_band(run, sweep, band, begin, shares, end)
    if run.transfers is not None:
        run.transfers.end()
    for v in sweep.frees:
        run.free(v)
    for call, found in shares.items():
        run.answers.setdefault(call, []).append(joined(found))


def _begin_transfers(run: Run, sweep: Sweep, done: int, transfers: Transfers) -> None:
    """done: strips that an earlier process has computed."""
    graph, kinds = run.graph, run.kinds
    reads = {
        v: Readings(_parts(run, sweep, v, done), largest_read(graph, kinds, sweep, v))
        for v in run.outside.reads(graph, sweep)
    }
    writes = {(what, v): largest_write(graph, kinds, sweep, v) for what, v in run.outside.writes(sweep)}
    transfers.begin(reads, writes)


def _parts(run: Run, sweep: Sweep, v: int, done: int) -> Iterator[Part]:
    """What the sweep reads of a value, in order."""
    first, begin = divmod(done, sweep.strips)
    for band in range(first, sweep.bands):
        one = resumed(run.graph, run.kinds, sweep, begin)[0] if band == first and begin else sweep
        for strip in range(sweep.strips):
            for step in one.steps:
                if v in step.reads and all(low < high for low, high in step.region(strip, band)):
                    region = step.read(v, strip, band)
                    if all(low < high for low, high in region):
                        yield Part(band * sweep.strips + strip, region)


def _run_band(
    run: Run, sweep: Sweep, band: int, done: int, shares: dict[int, list[Tensor]], end: Callable[[int], None]
) -> None:
    """end: called after each strip."""
    begins: dict[int, int] = {}
    if done:
        sweep, begins = resumed(run.graph, run.kinds, sweep, done)
    for v in sweep.stores:
        if len(run.stored.get(v, ())) == band:
            run.keep(v, sweep.own[v])
    buffers = {v: Rows(run.kinds.dims[v], begins.get(v, 0)) for v in sweep.ready if v in sweep.last_read}
    for strip in range(sweep.strips):
        for place, step in enumerate(sweep.steps):
            if all(low < high for low, high in step.region(strip, band)):
                _run_step(run, sweep, step, strip, band, buffers, shares)
            for v in step.reads:
                if sweep.last_read[v] == place:
                    rows: Kept | None = buffers.get(v)
                    if v in sweep.frees and sweep.bands == 1:
                        rows = run.stored[v][0]
                    if rows is not None:
                        rows.drop(sweep.keep[v][strip])
        end(strip)


def _enter(journal: Journal, run: Run, number: int, strips: int, shares: dict[int, list[Tensor]]) -> None:
    """Writes down how far the run has come, unless it would be lost with this process's memory."""
    if run.transfers is not None:
        run.transfers.settle()
    ends = rows_in_files(run.stored)
    if ends is None:
        return
    for sink in run.results.values():
        sink.flush()
    whole = {v: value.clone() for v, value in run.whole.items()}
    journal.save(State(number, strips, shares, run.answers, whole, ends))
    run.store.purge()


def take_up(run: Run, sweeps: Iterable[Sweep], state: State) -> None:
    """Makes the run as it was when this was written down."""
    device = run.graph.fakes[run.graph.inputs[0]].device
    state.shares = {call: [share.to(device) for share in found] for call, found in state.shares.items()}
    run.answers = {call: [answer.to(device) for answer in found] for call, found in state.answers.items()}
    run.whole = {v: value.to(device) for v, value in state.whole.items()}
    bands = {v: sweep.own[v] for sweep in sweeps for v in sweep.stores}
    for v, ends in state.stored.items():
        for end in ends:
            run.keep(v, bands[v], end)


def _run_step(
    run: Run, sweep: Sweep, step: Step, strip: int, band: int, buffers: dict[int, Rows],
    shares: dict[int, list[Tensor]],
) -> None:  # fmt: skip
    kinds, region = run.kinds, step.region(strip, band)
    cut, reads = {}, {}
    for v in step.reads:
        reads[v] = there = step.read(v, strip, band)
        if any(low == high for low, high in there):
            cut[v] = run.empty(v, there)  # for what reads nothing but padding
        elif v not in buffers:
            cut[v] = run.read(v, there)
        else:
            rows = buffers[v].read(*there[0])
            cut[v] = part_of(kinds, v, rows, there, (there[0], *sweep.made[v][band])) if kinds.others else rows
    made = run.graph.calls[step.last].outputs
    room = buffers[made[0]].room if made[0] in sweep.rooms else None
    try:
        results = run_chain(
            run.graph, kinds, step, region, cut, reads, run.whole.__getitem__,
            lambda place: run.answers.get(place, ()), room=room,
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
        if v not in sweep.own:
            continue
        box, high = sweep.own[v][band], region[0][1]
        if any(a == b for a, b in box):
            continue
        if v in sweep.stores and run.stored[v][band].end < high:
            begin = run.stored[v][band].end  # more than the region's where a call goes on that was broken off
            own = (begin, high), *box
            run.add(v, band, part_of(kinds, v, rows, own, region) if own != region else rows)
        if v in sweep.results:
            own = region[0], *box
            run.write(v, own, part_of(kinds, v, rows, own, region))


def run_between(run: Run, number: int, last: dict[int, Time], done: Callable[[int], None] = lambda place: None) -> None:
    """What is computed on whole values before sweep `number`. last: as of `last_uses`. done: called after each call."""
    graph, kinds = run.graph, run.kinds
    for v in [v for v in run.whole if last[v] < (number, 0)]:
        del run.whole[v]  # read last in a sweep
    for place in calls_between(graph, kinds, number):
        call = graph.calls[place]
        if on_whole(graph, kinds, place):
            written = call.inputs[0] if call.writes else None
            whole = {v: _whole(run, v, v == written and not _may_write(run, v)) for v in call.inputs}
            found = run_whole(call, whole.__getitem__)
            del whole
        else:
            found = from_answers(run, place)
        for v, value in zip(call.outputs, found, strict=True):
            if v not in kinds.dims and v in last:
                run.whole[v] = local_of(value)
        del found, value
        for v in call.inputs:
            if last.get(v) == (number, place):
                run.whole.pop(v, None)
                if v not in run.read_later:
                    run.free(v)
        done(place)


def _may_write(run: Run, v: int) -> bool:
    """Whether a call that writes into a value may do so. Where nothing is cut, calls run in the module's order, and
    nothing reads what was there before; images and parameters stay as they are.
    """
    if run.kinds.dims:
        return False
    graph, memory = run.graph, run.whole[v].untyped_storage()._cdata
    others = [*(run.whole[i] for i in graph.inputs if i in run.whole), *(t for c in graph.calls for t in c.constants)]
    return all(memory != other.untyped_storage()._cdata for other in others)


def _whole(run: Run, v: int, copy: bool) -> Tensor:
    if v not in run.kinds.dims:
        return run.whole[v].clone() if copy else run.whole[v]
    found = run.read(v, whole_region(run.graph, run.kinds, v))
    return found.clone() if copy else found


def from_answers(
    run: Run, place: int, moves: bool = False, links: Links | None = None, probing: bool = False
) -> list[Any]:
    """The results of a call that follow from numbers of the whole image alone. moves: it moves running statistics."""
    call, kinds = run.graph.calls[place], run.kinds
    given = {v: _dummy(run, v) if v in kinds.dims else run.whole[v] for v in call.inputs}
    cuts = dict.fromkeys((one.axis for one in kinds.axes), part_cuts(0, 1, 1))
    return run_part(call, Asked(cuts, 1, run.answers.get(place, ()), probing, first=moves, links=links), given)


def move_statistics(run: Run) -> None:
    """Of norms over the image, in the order in which the module calls them; also where nobody reads the result."""
    for place, call in enumerate(run.graph.calls):
        if call.function in TRACKING and run.kinds.questions[place]:
            from_answers(run, place, moves=True)


def _dummy(run: Run, v: int) -> Any:
    """One place in a value, for a call whose result follows from numbers of the whole image alone."""
    region = ((0, 1),) * len(run.kinds.axes)
    return run.empty(v, region).zero_(), axes_at(run.graph, run.kinds, v, region)
