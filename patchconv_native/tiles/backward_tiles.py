"""The tiles of a sweep in the backward pass: parts of what it gives, which do not overlap."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from ..spatial import Range
from .bands import AxisTiles
from .kinds import Region, is_empty
from .plan import TilePlan
from .shared import Shared
from .sweeps import Sweep


class Tiles:
    """A sweep's tiles: along each axis, what each step makes and reads."""

    def __init__(self, plan: TilePlan, sweep: Sweep) -> None:
        self.sweep = sweep
        self._axes = [
            AxisTiles(plan.graph, kinds, sweep, width, reach)
            for kinds, width, reach in zip(plan.kinds.axes, plan.tiles[sweep.number], plan.reaches, strict=True)
        ]

    def all(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(axis.count) for axis in self._axes)))

    def made(self, place: int, tile: Sequence[int]) -> Region:
        return tuple(axis.made[place][part] for axis, part in zip(self._axes, tile, strict=True))

    def sizes(self, place: int) -> list[int]:
        """Of a step's result, along each axis."""
        return [axis.sizes[place] for axis in self._axes]

    def rows(self, axis: int, part: int) -> int:
        """What all steps make in a part of an axis."""
        return sum(high - low for low, high in (made[part] for made in self._axes[axis].made))

    def share_made(self, place: int) -> float:
        """What all tiles make of a step's result, in units of it."""
        made = (sum(high - low for low, high in axis.made[place]) / axis.sizes[place] for axis in self._axes)
        return math.prod(made)

    def reads(self, place: int, v: int, tile: Sequence[int]) -> Region:
        return tuple(axis.reads[place][v][part] for axis, part in zip(self._axes, tile, strict=True))

    def own(self, v: int, tile: Sequence[int]) -> Region:
        """Of what the sweep gives: those of all tiles do not overlap."""
        return tuple(axis.shares(axis.size(v))[part] for axis, part in zip(self._axes, tile, strict=True))

    def of_rank(self, shared: Shared) -> list[tuple[int, ...]]:
        """Those of this rank, in the order in which every rank has its own."""
        own = shared.bands(self._axes[1].count)
        return [tile for tile in self.all() if tile[1] in own]

    def rank_of(self, tile: tuple[int, ...], shared: Shared) -> int:
        """The rank that computes a tile."""
        return tile[1] // (self._axes[1].count // shared.count)

    def of_ranks(self, v: int, tile: tuple[int, ...], shared: Shared) -> list[Region]:
        """What is read of a source by the tiles that all ranks compute at the time of this one: but for where it is cut
        between ranks, the same.
        """
        found = [self.source(v, (tile[0], part, *tile[2:])) for part in shared.peers(self._axes[1].count, tile[1])]
        some = [one for one in found if one is not None]
        if not some:
            return []
        rows, _, *across = functools.reduce(lambda a, b: tuple(map(_hull, a, b)), some)
        return [(rows, (0, 0) if one is None else one[1], *across) for one in found]

    def source(self, v: int, tile: Sequence[int]) -> Region | None:
        """What all steps together read of a source; None where they read nothing."""
        found: Region | None = None
        for place, step in enumerate(self.sweep.steps):
            if v in step.reads and not is_empty(self.made(place, tile)):
                reads = self.reads(place, v, tile)
                if not is_empty(reads):
                    found = reads if found is None else tuple(map(_hull, found, reads))
        return found


def _hull(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])
