"""What is not in the memory of the device that computes: reading it makes a copy, of one part at a time; where copies
go on while strips are computed, of one part more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .graph import Graph
from .kinds import Kinds, Region, box_shape
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
