"""A sweep over the image: which rows of which value each strip computes, reads and leaves for the next.

Strips go down the image: each reads some rows more of what the sweep reads, and computes of every value the rows that
can then be computed. Rows are computed once: of each value, those that a later strip will read are kept.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from ..spatial import NotServed, Range
from .graph import Graph
from .kinds import Kinds, Region
from .reach import Reach

SMALL = 8
"""A step is small whose values have this many times fewer bytes than the sweep's largest one."""
MOST_WAITING = 8
"""The most strips whose rows a small step waits for."""

Reads = dict[int, list[Range]]
"""Of each value, the rows that each strip reads."""


@dataclass
class Step:
    """A call in a sweep, and calls that follow it row by row."""

    call: int
    rows: list[Range]
    """Of the result, those that each strip computes. Of a call that only asks: its share of the image."""
    asks: int
    """0, or which number of the whole image it gives its share of, in place of a result: 1 for the first one."""
    reads: Reads = field(default_factory=dict)
    across: list[Region] = field(default_factory=lambda: [()])
    """Of the result, what each band computes along `Kinds.others`."""
    reads_across: dict[int, list[Region]] = field(default_factory=dict)
    """Of each value, what each band reads there."""
    then: list[int] = field(default_factory=list)

    @property
    def calls(self) -> list[int]:
        return [self.call, *self.then]

    @property
    def last(self) -> int:
        return self.then[-1] if self.then else self.call

    def region(self, strip: int, band: int) -> Region:
        """Of the result, what is computed."""
        return self.rows[strip], *self.across[band]

    def read(self, v: int, strip: int, band: int) -> Region:
        """What is read of a value."""
        return self.reads[v][strip], *self.reads_across[v][band]


Number = tuple[int, int]
"""A number of the whole image: the call that asks for it, and which of its questions."""


@dataclass
class Sweep:
    number: int
    strips: int
    """Of each band."""
    steps: list[Step] = field(default_factory=list)
    bands: int = 1
    made: dict[int, list[Region]] = field(default_factory=dict)
    """Of each value that the sweep computes, what each band has of it along `Kinds.others`."""
    own: dict[int, list[Region]] = field(default_factory=dict)
    """Of each value that is a result or stored, the part along `Kinds.others` that each band gives."""
    sources: set[int] = field(default_factory=set)
    """Values that are there whole before the sweep: the graph's inputs, and what earlier sweeps have stored."""
    results: set[int] = field(default_factory=set)
    stores: set[int] = field(default_factory=set)
    frees: set[int] = field(default_factory=set)
    """Stored values that no later sweep reads."""
    ready: dict[int, list[int]] = field(default_factory=dict)
    """Of each value that the sweep computes, how many rows are there after each strip."""
    keep: dict[int, list[int]] = field(default_factory=dict)
    """Of each value that the sweep reads, the first row that is still read after each strip."""
    last_read: dict[int, int] = field(default_factory=dict)
    """The last step within a strip that reads a value."""
    rooms: set[int] = field(default_factory=set)
    """Values whose rows are written behind those that are still read, so that they are read as one."""

    def reads(self, values: Iterable[int]) -> bool:
        """Whether a step reads one of these."""
        return not self.last_read.keys().isdisjoint(values)

    def find_last_reads(self) -> None:
        self.last_read = {v: place for place, step in enumerate(self.steps) for v in step.reads}


def sweep_count(graph: Graph, kinds: Kinds) -> int:
    """Those of calls with questions and of cut results; the level of a whole value is the sweep after which it is
    there.
    """
    last = [kinds.level[v] + (v in kinds.dims) for v in kinds.level]
    return max(last, default=0)


def values_needed(
    graph: Graph, kinds: Kinds, stored: set[int], number: int, results: set[int], own: bool = False
) -> Sweep:
    """The calls of sweep `number`, without their rows. stored: values that are kept from the sweep that first computes
    them; all others are computed again in each sweep that reads them. own: those that this sweep stores are there too.
    """
    sweep = Sweep(number, 1)
    there = {v for v in stored if kinds.level[v] < number + own} | set(graph.inputs)
    sweep.results = {v for v in results if v in kinds.dims and kinds.level[v] == number and v not in graph.inputs}
    sweep.stores = {v for v in stored if kinds.level[v] == number and v not in graph.inputs}
    needed = sweep.results | sweep.stores
    for place in reversed(range(len(graph.calls))):
        call = graph.calls[place]
        if kinds.gathers[place]:
            continue
        asks = number - kinds.start[place] + 1 if kinds.start[place] <= number < kinds.done(place) else 0
        made = any(v in needed and v in kinds.dims for v in call.outputs)
        if not asks and not made:
            continue
        sweep.steps.append(Step(place, [], 0 if made else asks))
        for v in call.inputs:
            if v in kinds.dims:
                (sweep.sources if v in there else needed).add(v)
    sweep.steps.reverse()
    return sweep


def of_stored(graph: Graph, kinds: Kinds, stored: Container[int], numbers: Iterable[Number]) -> set[Number]:
    """Those of these numbers of the whole image that are of stored values alone."""

    def there(place: int) -> bool:
        return all(v in stored or v in graph.inputs for v in graph.calls[place].inputs if v in kinds.dims)

    return {(place, question) for place, question in numbers if there(place)}


def leading_to(
    graph: Graph, kinds: Kinds, stored: set[int], number: int, given: set[int], numbers: set[Number], own: bool = False
) -> Sweep:
    """The calls of sweep `number`, without their rows, that lead to those of its results and stored values that are
    given, and to those numbers of the whole image. own: as of `values_needed`.
    """
    sweep = values_needed(graph, kinds, stored, number, set(graph.results), own)
    sweep.results, sweep.stores = sweep.results & given, sweep.stores & given
    needed, steps = sweep.results | sweep.stores, []
    for step in reversed(sweep.steps):
        call = graph.calls[step.call]
        asked = (step.call, number - kinds.start[step.call]) in numbers
        if asked if step.asks else any(v in needed and v not in sweep.sources for v in call.outputs):
            steps.append(step)
            step.reads = {v: [] for v in call.inputs if v in kinds.dims}
            needed.update(call.inputs)
    sweep.steps = steps[::-1]
    sweep.sources = sweep.sources & needed
    sweep.find_last_reads()
    return sweep


def bytes_of(graph: Graph, v: int) -> int:
    return math.prod(graph.fakes[v].shape) * graph.fakes[v].dtype.itemsize


def _periods(graph: Graph, base: Sweep) -> list[int]:
    """Of each step, every how many strips it runs: several small strips at once, as deep layers have them, go faster.
    What a step makes for larger ones must not wait, since they would then have several strips at once as well.
    """
    calls = [graph.calls[step.call] for step in base.steps]
    values = [call.inputs if step.asks else call.outputs for step, call in zip(base.steps, calls, strict=True)]
    sizes = [max(bytes_of(graph, v) for v in some) for some in values]
    largest, periods = max(sizes), []
    soonest: dict[int, int] = {}
    for call, size in zip(reversed(calls), reversed(sizes), strict=True):
        period = 1
        while period < MOST_WAITING and period * size * SMALL <= largest:
            period *= 2
        period = min([period, *(soonest.get(v, period) for v in call.outputs)])
        soonest.update({v: min(period, soonest.get(v, period)) for v in call.inputs})
        periods.append(period)
    return periods[::-1]


def cut_into(
    graph: Graph, kinds: Kinds, base: Sweep, strips: int, reach: Callable[[int], Reach], patient: bool = False
) -> Sweep:
    """A sweep of `values_needed`, cut into this many strips. reach: of each call.

    In each strip that many rows more of the sources are read, and of everything else as many rows are computed as can
    be. patient: steps with small results wait for the rows of several strips.
    """
    periods = _periods(graph, base) if patient else [1] * len(base.steps)
    sizes = {v: graph.fakes[v].size(kinds.dims[v]) for v in base.sources}
    ready = {v: [-(-size * k // strips) for k in range(1, strips + 1)] for v, size in sizes.items()}
    ends: list[list[int]] = []
    for step, period in zip(base.steps, periods, strict=True):
        call, table = graph.calls[step.call], reach(step.call)
        can = table.ready({v: ready[v][: strips - 1] for v in call.inputs if v in kinds.dims})
        if period > 1:
            after = [(k + 1) // period * period - 1 for k in range(strips - 1)]  # the last strip in which it ran
            can = [can[k] if k >= 0 else 0 for k in after]
        ends.append(can)
        if not step.asks:
            ready.update((v, can) for v in call.outputs if v in kinds.dims)
    _finish(graph, kinds, base, strips, reach, ready, ends)
    count = max((len(some) for some in ends), default=strips)
    for v, size in sizes.items():
        ready[v] += [size] * (count - strips)
    sweep = Sweep(base.number, count, sources=base.sources, results=base.results, stores=base.stores, frees=base.frees)
    for old, rows in zip(base.steps, ends, strict=True):
        call, table = graph.calls[old.call], reach(old.call)
        step = Step(old.call, list(itertools.pairwise([0, *rows])), old.asks)
        for v in (v for v in call.inputs if v in kinds.dims):
            step.reads[v] = table.reads_of_strips(v, step.rows)
            keep, before = table.read_after(v, rows), sweep.keep.get(v)
            sweep.keep[v] = keep if before is None else list(map(min, keep, before))
        if not old.asks:
            sweep.ready.update((v, rows) for v in call.outputs if v in kinds.dims)
        sweep.steps.append(step)
    return sweep


def _finish(
    graph: Graph, kinds: Kinds, base: Sweep, strips: int, reach: Callable[[int], Reach], ready: dict[int, list[int]],
    ends: list[list[int]],
) -> None:  # fmt: skip
    """Adds the last strips to `ends`, of each step the rows that are there after each strip, and to `ready`, which
    shares its lists with it. All rows of the sources are there in the first of them, and so all that waited for rows
    below could be computed at once. No step computes many more rows at a time than in the strips before.
    """
    tables = [reach(step.call) for step in base.steps]
    most = [
        max([-(-table.size // strips), *map(operator.sub, some, [0, *some[:-1]])])
        for table, some in zip(tables, ends, strict=True)
    ]
    sizes = [table.size for table in tables]
    done = [some[-1] if some else 0 for some in ends]
    while True:
        before = list(done)
        for place, (step, table) in enumerate(zip(base.steps, tables, strict=True)):
            there = {v: ready[v][-1:] for v in graph.calls[step.call].inputs if v in kinds.dims}
            limit = -(-(done[place] + most[place] * 5 // 4) // table.cell) * table.cell
            done[place] = min(*table.ready(there), limit)
            ends[place].append(done[place])
        if done == sizes:
            return
        if done == before:
            where = next(graph.calls[s.call].where for s, a, b in zip(base.steps, done, sizes, strict=True) if a != b)
            raise NotServed(f"tile: {where} is not served: it reads rows that its argument does not have")


def balanced(before: Sequence[float], live: Sequence[float], count: int) -> list[int]:
    """The places, besides the first, at which `count` parts of about the same size begin: where there is little that
    lives on. before: of each place, and of the end, the size of all that comes before.
    """
    total, found = before[-1], set()
    for part in range(1, count):
        goal = total * part / count
        near = [place for place in range(1, len(live)) if abs(before[place] - goal) <= total / (2 * count)]
        if near:
            found.add(min(near, key=lambda place: (live[place], abs(before[place] - goal))))
    return sorted(found)
