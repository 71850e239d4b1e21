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
        self._shares: dict[tuple[int, int], Ranges] = {}
        self.count = math.ceil(1 / width)
        self.made: list[Ranges] = [[] for _ in sweep.steps]
        """Of each step, what is computed of its result."""
        self.reads: list[dict[int, Ranges]] = [{} for _ in sweep.steps]
        tables = [reach(step.call) for step in sweep.steps]
        self.sizes = [table.size for table in tables]
        """Of each step's result."""
        self._find(sweep, tables)

    def size(self, v: int) -> int:
        return self._graph.fakes[v].size(self._kinds.dims[v])

    def shares(self, size: int, cell: int = 1) -> Ranges:
        """The parts of `size`: disjoint, of whole cells, and at the same places of the image for all sizes."""
        if (size, cell) not in self._shares:
            of_all, parts = size * self._width.numerator, self._width.denominator
            cuts = [of_all * part // parts // cell * cell for part in range(self.count)]
            self._shares[size, cell] = list(itertools.pairwise([*cuts, size]))
        return self._shares[size, cell]

    def _find(self, sweep: Sweep, tables: list[Reach]) -> None:
        """What each step computes and reads, from the last step to the first."""
        needed: dict[int, Ranges] = {}
        for place in reversed(range(len(sweep.steps))):
            step, table = sweep.steps[place], tables[place]
            made = self.made[place] = self._results(sweep, step, table, needed)
            for v in step.reads:
                reads = self.reads[place][v] = table.reads_of_strips(v, made)
                needed[v] = list(map(_hull, needed[v], reads)) if v in needed else reads

    def _results(self, sweep: Sweep, step: Step, table: Reach, needed: dict[int, Ranges]) -> Ranges:
        nothing = [(0, 0)] * self.count
        if step.asks:
            return list(map(_hull, nothing, self.shares(table.size, table.cell)))
        outputs = [v for v in self._graph.calls[step.call].outputs if v in self._kinds.dims]
        own = [self.shares(self.size(v)) for v in outputs if v in sweep.results | sweep.stores]
        found = nothing
        for ranges in (*own, *(needed[v] for v in outputs if v in needed)):
            found = list(map(_hull, found, ranges))
        cell, size = table.cell, table.size
        return [(low // cell * cell, min(-(-high // cell) * cell, size)) for low, high in found]


def _hull(a: Range, b: Range) -> Range:
    if a[0] >= a[1]:
        return b if b[0] < b[1] else (0, 0)
    return (min(a[0], b[0]), max(a[1], b[1])) if b[0] < b[1] else a
