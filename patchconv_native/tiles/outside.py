"""What is not in the memory of the device that computes, but on the host, in files or on other ranks: reading it makes
a copy, of one part at a time; where copies go on while strips are computed, of one part more.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from ..spatial import Range
from .graph import Graph
from .kinds import Kinds, Region, box_shape, whole_region
from .shared import Shared
from .stores import Where
from .sweeps import Sweep

Write = tuple[str, int]
"""A value that is written to the host, as a "result" or as "stored"."""


@dataclass
class Outside:
    """What is not in the memory that the budget counts: reading it makes a copy."""

    store: Where
    """Where stored values are kept."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Of each input that is copied a strip at a time, how many copies there are at once."""
    result: bool = False
    """Whether the result counts."""
    ahead: bool | None = None
    """Whether copies between the host and the device go on while strips are computed; None: there are none."""
    host: set[int] = field(default_factory=set)
    """Inputs in the host's memory."""
    written: bool = False
    """Whether the result is written into the host's memory."""
    shared: Shared | None = None
    """Of images of which each rank has a part."""

    @property
    def ranks(self) -> int:
        return 1 if self.shared is None else self.shared.count

    @property
    def counted(self) -> bool:
        """Whether stored values count."""
        return self.store == "device"

    def reads(self, graph: Graph, sweep: Sweep) -> set[int]:
        """What is copied to the device during a sweep."""
        found = {v for step in sweep.steps for v in step.reads if v in sweep.sources}
        return found & (self.host if self.counted else self.host | (found - set(graph.inputs)))

    def writes(self, sweep: Sweep) -> set[Write]:
        """What is copied from the device."""
        stored = set() if self.counted else {("stored", v) for v in sweep.stores}
        return stored | {("result", v) for v in sweep.results if self.written}

    def beside(self, graph: Graph, kinds: Kinds, sweep: Sweep) -> int:
        """Bytes on the device of parts that are copied while others are computed."""
        if not self.ahead:
            return 0
        read = sum(largest_read(graph, kinds, sweep, v) for v in self.reads(graph, sweep))
        return read + sum(largest_write(graph, kinds, sweep, v) for _, v in self.writes(sweep))

    def largest_part(self, graph: Graph, kinds: Kinds, v: int) -> Region:
        """Along `Kinds.others`, of a value that is kept: what the rank has that has the most."""
        across = whole_region(graph, kinds, v)[1:]
        if self.shared is None:
            return across
        cuts = self.shared.cuts(across[0][1])
        return (0, max(b - a for a, b in itertools.pairwise(cuts))), *across[1:]

    def own_part(self, graph: Graph, kinds: Kinds, v: int, rank: int) -> Region:
        """Along `Kinds.others`, of an image or a value that is kept, what a rank has."""
        across = whole_region(graph, kinds, v)[1:]
        if self.shared is None:
            return across
        given = self.shared.given[graph.inputs.index(v)] if v in graph.inputs else None
        cuts = given or self.shared.cuts(across[0][1])
        return (cuts[rank], cuts[rank + 1]), *across[1:]

    def messages(self, graph: Graph, kinds: Kinds, v: int, ranges: list[Range], rank: int) -> tuple[int, int]:
        """How many coordinates along the axis between ranks this one gets of others and sends to them, of an image or a
        stored value. ranges: what each rank reads at this time.
        """
        parts = [self.own_part(graph, kinds, v, one)[0] for one in range(self.ranks)]

        def common(a: Range, b: Range) -> int:
            return max(0, min(a[1], b[1]) - max(a[0], b[0]))

        others = [one for one in range(self.ranks) if one != rank]
        received = sum(common(ranges[rank], parts[owner]) for owner in others)
        return received, sum(common(ranges[reader], parts[rank]) for reader in others)


def largest_read(graph: Graph, kinds: Kinds, sweep: Sweep, v: int) -> int:
    """Bytes of the largest part that is read of a value at once."""
    return max(
        max(high - low for low, high in step.reads[v]) * _row(graph, kinds, v, step.reads_across[v])
        for step in sweep.steps if v in step.reads
    )  # fmt: skip


def largest_write(graph: Graph, kinds: Kinds, sweep: Sweep, v: int) -> int:
    """Bytes of the largest part of a stored value, or of a result, that a strip gives."""
    step = next(step for step in sweep.steps if v in graph.calls[step.last].outputs)
    return max(high - low for low, high in step.rows) * _row(graph, kinds, v, sweep.own[v])


def _row(graph: Graph, kinds: Kinds, v: int, boxes: list[Region]) -> int:
    shapes = (box_shape(graph, kinds, v, ((0, 1), *box)) for box in boxes)
    return max(map(math.prod, shapes)) * graph.fakes[v].dtype.itemsize
