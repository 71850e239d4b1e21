"""Runs the sweeps of a recorded module, strip by strip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ..spatial.layout import joined
from .chains import run_chain
from .journal import Journal, State, resumed, rows_in_files
from .kinds import is_empty, part_of
from .outside import largest_read, largest_write
from .rows import Rows
from .run import Run
from .stores import Kept
from .strips import NeedsWhole, local_of
from .sweeps import Step, Sweep
from .transfers import Part, Readings, Transfers


def run_sweep(run: Run, sweep: Sweep, advance: Callable[[], None], journal: Journal | None = None) -> None:
    shares: dict[int, list[Tensor]] = {step.last: [] for step in sweep.steps if step.asks}
    bands = run.bands(sweep)
    state, done = None if journal is None else journal.state, 0
    if state is not None and state.sweep == sweep.number:
        shares, done = state.shares, state.strip
    if run.transfers is not None:
        _begin_transfers(run, sweep, done, run.transfers)
    for band in range(bands.start + done // sweep.strips, bands.stop):
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
        run.answers.setdefault(call, []).append(_of_all(run, sweep, call, joined(found)))


def _of_all(run: Run, sweep: Sweep, call: int, found: Tensor) -> Tensor:
    """The shares of all ranks, where an image is shared."""
    shared = run.outside.shared
    if shared is None:
        return found
    step = next(step for step in sweep.steps if step.asks and step.last == call)
    counts = []
    for rank in range(shared.count):
        regions = (
            step.region(strip, band) for band in shared.bands(sweep.bands, rank) for strip in range(sweep.strips)
        )
        counts.append(sum(not is_empty(region) for region in regions))
    return shared.stack(found, counts)


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
                if v in step.reads and not is_empty(step.region(strip, band)):
                    region = step.read(v, strip, band)
                    if not is_empty(region):
                        yield Part(band * sweep.strips + strip, region)


def _run_band(
    run: Run, sweep: Sweep, band: int, done: int, shares: dict[int, list[Tensor]], end: Callable[[int], None]
) -> None:
    """end: called after each strip."""
    begins: dict[int, int] = {}
    if done:
        sweep, begins = resumed(run.graph, run.kinds, sweep, done)
    bands, peers = run.bands(sweep), run.peers(sweep, band)
    for v in sweep.stores:
        if len(run.stored.get(v, ())) == band - bands.start:
            run.keep(v, sweep.own[v][bands.start : bands.stop])
    buffers = {v: Rows(run.kinds.dims[v], begins.get(v, 0)) for v in sweep.ready if v in sweep.last_read}
    for strip in range(sweep.strips):
        for place, step in enumerate(sweep.steps):
            if not all(is_empty(step.region(strip, one)) for one in peers):
                _run_step(run, sweep, step, strip, band, buffers, shares)
            for v in step.reads:
                if sweep.last_read[v] == place:
                    rows: Kept | None = buffers.get(v)
                    if v in sweep.frees and len(bands) == 1:
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
    device = run.graph.device
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
        if v not in buffers:
            of_ranks = [step.read(v, strip, one) for one in run.peers(sweep, band)]
            cut[v] = run.read(v, there, () if run.outside.shared is None else of_ranks)
        elif is_empty(there):
            cut[v] = run.empty(v, there)
        else:
            rows = buffers[v].read(*there[0])
            cut[v] = part_of(kinds, v, rows, there, (there[0], *sweep.made[v][band])) if kinds.others else rows
    if is_empty(region):
        return  # another rank computes something
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
        kept = band - run.bands(sweep).start
        if v in sweep.stores and run.stored[v][kept].end < high:
            begin = run.stored[v][kept].end  # more than the region's where a call goes on that was broken off
            own = (begin, high), *box
            run.add(v, kept, part_of(kinds, v, rows, own, region) if own != region else rows)
        if v in sweep.results:
            own = region[0], *box
            run.write(v, own, part_of(kinds, v, rows, own, region))
