"""Bands: where the strips of a whole width need too much, the image is cut along its other spatial dimensions as well.

Strips go down one band after the other. What a band reads of its neighbours is computed again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from ..spatial import Range
from .graph import Graph
from .kinds import Kinds, Region
from .reach import Reach
from .sweeps import Step, Sweep

Ranges = list[Range]
"""Of one axis: a range for each part of it."""


def cut_across(
    graph: Graph, kinds: Kinds, sweep: Sweep, widths: Sequence[Fraction], reaches: Sequence[Callable[[int], Reach]]
) -> None:
    """Cuts a sweep, whose steps are not yet joined, into bands. widths: along each of `kinds.others`, which share of
    the image a band has. reaches: of each call, along these axes.
    """
    axes = [
        AxisTiles(graph, axis, sweep, width, reach)
        for axis, width, reach in zip(kinds.others, widths, reaches, strict=True)
    ]

    def boxes(ranges: Iterable[Ranges]) -> list[Region]:
        return list(itertools.product(*ranges))

    for place, step in enumerate(sweep.steps):
        step.across = boxes(axis.made[place] for axis in axes)
        step.reads_across = {v: boxes(axis.reads[place][v] for axis in axes) for v in step.reads}
        sweep.made.update(dict.fromkeys(graph.calls[step.call].outputs, step.across))
    sweep.bands = math.prod(axis.count for axis in axes)
    for v in sweep.results | sweep.stores:
        sweep.own[v] = boxes(axis.shares(axis.size(v)) for axis in axes)


class AxisTiles:
    """One axis of a sweep, cut."""

    def __init__(
        self, graph: Graph, kinds: Kinds, sweep: Sweep, width: Fraction, reach: Callable[[int], Reach]
    ) -> None:
        self._graph, self._kinds, self._width = graph, kinds, width
        self.count = math.ceil(1 / width)
        self.made: list[Ranges] = [[] for _ in sweep.steps]
        """Of each step, what is computed of its result."""
        self.reads: list[dict[int, Ranges]] = [{v: [] for v in step.reads} for step in sweep.steps]
        tables = [reach(step.call) for step in sweep.steps]
        self.sizes = [table.size for table in tables]
        """Of each step's result."""
        for part in range(self.count):
            self._find(sweep, tables, part)

    def size(self, v: int) -> int:
        return self._graph.fakes[v].size(self._kinds.dims[v])

    def shares(self, size: int, cell: int = 1) -> Ranges:
        """The parts of `size`: disjoint, of whole cells, and at the same places of the image for all sizes."""
        cuts = [math.floor(size * part * self._width) // cell * cell for part in range(self.count)]
        return list(itertools.pairwise([*cuts, size]))

    def _find(self, sweep: Sweep, tables: list[Reach], part: int) -> None:
        """What each step computes and reads for one part, from the last step to the first."""
        needed: dict[int, Range] = {}
        for place in reversed(range(len(sweep.steps))):
            step, table = sweep.steps[place], tables[place]
            made = self._result(sweep, step, table, part, needed)
            self.made[place].append(made)
            for v in step.reads:
                reads = table.reads(v, made) if made[0] < made[1] else (0, 0)
                self.reads[place][v].append(reads)
                needed[v] = _hull([needed.get(v, (0, 0)), reads])

    def _result(self, sweep: Sweep, step: Step, table: Reach, part: int, needed: dict[int, Range]) -> Range:
        if step.asks:
            return _hull([self.shares(table.size, table.cell)[part]])
        outputs = [v for v in self._graph.calls[step.call].outputs if v in self._kinds.dims]
        own = [self.shares(self.size(v))[part] for v in outputs if v in sweep.results | sweep.stores]
        low, high = _hull([*own, *(needed[v] for v in outputs if v in needed)])
        return low // table.cell * table.cell, min(-(-high // table.cell) * table.cell, table.size)


def _hull(ranges: Sequence[Range]) -> Range:
    some = [(a, b) for a, b in ranges if a < b]
    return (min(a for a, _ in some), max(b for _, b in some)) if some else (0, 0)
