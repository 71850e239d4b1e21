"""Which rows of its arguments a call reads for which rows of its result: by the function's rule, for every row once."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from ..spatial import NotServed, Range
from .graph import Graph
from .kinds import Kinds
from .strips import Asked, axis_of, run_part

CELLS = 4096
"""The most ranges of rows that a result is looked at in. A taller one is looked at in ranges of several rows."""


@dataclass
class Reach:
    """Of one call. Rows of the result are counted in cells of `cell` rows, but for the last one."""

    size: int
    """Rows of the result; of a call that has no cut result, of its first cut argument."""
    cell: int
    factor: int
    """Rows of the result for each row of an argument that the rule says nothing of."""
    low: dict[int, list[int]]
    """Of each argument, the first row that the cells from each one on read."""
    high: dict[int, list[int]]
    """Of each argument, the row after the last one that the cells up to each one read."""

    @property
    def by_row(self) -> bool:
        """Whether each row of the result reads the same row of the arguments."""
        return not self.high and self.factor == 1

    def ready(self, arguments: dict[int, list[int]]) -> list[int]:
        """How many rows of the result can be computed when these many rows of the arguments are there: for each number
        of the lists.
        """
        found: list[int] | None = None
        for v, there in arguments.items():
            if v in self.high:
                high, cell, size = self.high[v], self.cell, self.size
                can = [min(bisect.bisect_right(high, rows) * cell, size) for rows in there]
            else:
                can = list(there) if self.factor == 1 else [rows * self.factor for rows in there]
            found = can if found is None else list(map(min, found, can))
        assert found is not None
        return found

    def reads_of_strips(self, v: int, rows: list[Range]) -> list[Range]:
        """What these rows of the result read of an argument, strip by strip; strips without rows read none."""
        if v not in self.high:
            return rows if self.factor == 1 else [self.reads(v, one) for one in rows]
        if self.cell > 1:
            return [self.reads(v, one) if one[0] < one[1] else (0, 0) for one in rows]
        low, high = self.low[v], self.high[v]
        found = [(low[a], high[b - 1]) if a < b else (0, 0) for a, b in rows]
        return [(a, b) if a < b else (0, 0) for a, b in found]

    def read_after(self, v: int, ends: list[int]) -> list[int]:
        """The first row of an argument that the result's rows from each of `ends` on read."""
        if self.by_row:
            return ends
        if self.cell > 1 or v not in self.low:
            return [self.reads_from(v, end) for end in ends]
        low, size = self.low[v], self.size
        return [low[end] if end < size else 2**62 for end in ends]

    def reads(self, v: int, rows: Range) -> Range:
        """What rows of the result read of an argument."""
        if v not in self.high:
            return rows[0] // self.factor, -(-rows[1] // self.factor)
        first, last = rows[0] // self.cell, -(-rows[1] // self.cell) - 1
        a, b = self.low[v][first], self.high[v][last]
        return (a, b) if a < b else (0, 0)

    def reads_from(self, v: int, row: int) -> int:
        """The first row of an argument that the result's rows from `row` on read."""
        if row >= self.size:
            return 2**62
        return row // self.factor if v not in self.low else self.low[v][row // self.cell]


@dataclass
class Reaches:
    """That of each call along one axis. It is looked for when it is asked for first."""

    graph: Graph
    kinds: Kinds
    """Of this axis."""
    known: dict[int, Reach] = field(default_factory=dict)
    """Also those of other graphs of the same form."""

    def __call__(self, place: int) -> Reach:
        if place not in self.known:
            self.known[place] = reach_of(self.graph, self.kinds, place)
        return self.known[place]


def reach_of(graph: Graph, kinds: Kinds, place: int) -> Reach:
    """kinds: of one axis."""
    call = graph.calls[place]
    cut = [v for v in call.inputs if v in kinds.dims]
    sizes = {v: graph.fakes[v].size(kinds.dims[v]) for v in cut}
    made = [v for v in call.outputs if v in kinds.dims]
    size = graph.fakes[made[0]].size(kinds.dims[made[0]]) if made else sizes[cut[0]]
    if not kinds.scaled[place] and not kinds.fetches[place] and set(sizes.values()) == {size}:
        return Reach(size, 1, 1, {}, {})  # each row reads itself
    factor = 1
    if kinds.scaled[place]:
        factor, rest = divmod(size, sizes[cut[0]])
        if rest or factor < 1:
            raise NotServed(f"tile: {call.where} is not served: its rows follow from no whole factor")
        if not kinds.fetches[place]:
            return Reach(size, factor, factor, {}, {})
    cell = -(-size // CELLS)
    cell = -(-cell // factor) * factor
    cuts = (*range(0, size, cell), size)
    asked = _probed(graph, kinds, place, cuts, factor)
    reach = Reach(size, cell, factor, {}, {})
    for v in cut:
        found = asked.reads.get(v)
        if found is None:
            if sizes[v] * factor != size:
                if len(cuts) > 2:
                    raise NotServed(f"tile: {call.where} is not served: which rows it reads is not known")
                found = [(0, sizes[v])]
            else:
                found = [(a // factor, b // factor) for a, b in itertools.pairwise(cuts)]
        never = 2**62
        from_edge = call.name.startswith(
            ("conv", "unfold")
        )  # rows that read padding alone count as if they read from the edge
        lows = [a if from_edge or (a, b) != (0, 0) else never for a, b in found]
        reach.low[v] = [*itertools.accumulate(reversed(lows), min)][::-1]
        reach.high[v] = list(itertools.accumulate((b for _, b in found), max))
    return reach


def _probed(graph: Graph, kinds: Kinds, place: int, cuts: tuple[int, ...], factor: int) -> Asked:
    """What the rule asks for where its result is cut so. Only the first part's shapes are computed."""
    call = graph.calls[place]
    asked = Asked({kinds.axis: cuts}, 0, probing=True)
    given: dict[int, Any] = {}
    for v in call.inputs:
        fake = graph.fakes[v]
        if v not in kinds.dims:
            given[v] = fake
            continue
        rows = fake.size(kinds.dims[v])
        if rows * factor == cuts[-1]:
            own = tuple(cut // factor for cut in cuts)
        else:  # all of it, as the first part
            own = (0, *[rows] * (len(cuts) - 1))
        with graph.mode:
            local = fake.narrow(kinds.dims[v], 0, own[1])
        given[v] = local, {kinds.dims[v]: axis_of(kinds.axis, own, 0)}
    with graph.mode, torch.no_grad():
        run_part(call, asked, given)
    return asked
