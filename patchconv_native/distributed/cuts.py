"""Who holds which part of an image, and which part a rank needs: arithmetic on integers, nothing is sent here.

A dimension is cut at the same places for every rank to know, so no sizes are exchanged at run time. What an output
range reads of its input is `core/geometry`'s to say; this file turns that into ranges for all ranks.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

from .. import _library

_geometry = _library.load().geometry

Range = tuple[int, int]
Wanted = tuple[tuple[Range, ...], ...]
"""For each rank, the ranges that it wants, in the order in which it wants them."""


@dataclass(frozen=True)
class Axis:
    """A dimension that is cut between the ranks of a process group."""

    name: str
    """"H" or "W", for messages."""
    cuts: tuple[int, ...]
    """Rank r of the group holds coordinates cuts[r] to cuts[r + 1]."""
    group: Any
    index: int
    """This rank's number in the group."""

    @property
    def size(self) -> int:
        return self.cuts[-1]

    @property
    def ranks(self) -> int:
        return len(self.cuts) - 1

    @property
    def own(self) -> Range:
        return self.part(self.index)

    @property
    def length(self) -> int:
        return self.own[1] - self.own[0]

    def part(self, rank: int) -> Range:
        return self.cuts[rank], self.cuts[rank + 1]

    def parts(self) -> list[Range]:
        return [self.part(rank) for rank in range(self.ranks)]

    def cut_at(self, cuts: tuple[int, ...]) -> Axis:
        return self if cuts == self.cuts else replace(self, cuts=cuts)


def even(operator: str, name: str, size: int, ranks: int) -> tuple[int, ...]:
    """Parts that differ by one at most. ValueError, on every rank alike, where a rank would get nothing."""
    if size < ranks:
        raise ValueError(
            f"{operator}: expected {name} to have at least {ranks} rows or columns, one for each of {ranks} ranks, "
            f"got {size}; run this part gathered, or on fewer ranks"
        )
    return (*(_geometry.piece_of(size, ranks, rank)[0] for rank in range(ranks)), size)


def _settled(operator: str, axis: Axis, inner: list[int], size: int) -> tuple[int, ...]:
    """The cuts wished for, or even ones where that would leave a rank with nothing."""
    cuts = (0, *(min(max(cut, 0), size) for cut in inner), size)
    if all(a < b for a, b in itertools.pairwise(cuts)):
        return cuts
    return even(operator, axis.name, size, axis.ranks)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Window:
    """One dimension of a convolution or a pool: small coordinate p reads big ones from p * stride - before on."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0

    @property
    def reach(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    def small_cuts(self, operator: str, axis: Axis, size: int) -> tuple[int, ...]:
        """Of an output of `size`: each coordinate goes where the middle of what it reads is."""
        middle = (self.reach - 1) // 2 - self.before
        return _settled(operator, axis, [_ceil(cut - middle, self.stride) for cut in axis.cuts[1:-1]], size)

    def big_cuts(self, operator: str, axis: Axis, size: int) -> tuple[int, ...]:
        """Of a transposed convolution's output: what an input coordinate gives stays where that is."""
        middle = (self.reach - 1) // 2 - self.before
        return _settled(operator, axis, [cut * self.stride + middle for cut in axis.cuts[1:-1]], size)

    def reads(self, small: Range) -> Range:
        """What small coordinates read of the big grid and of the padding around it."""
        return _geometry.big_range(
            small, kernel=self.kernel, stride=self.stride, dilation=self.dilation, pad_before=self.before
        )

    def small_inside(self, big: Range) -> Range:
        """Small coordinates that read nothing but `big`."""
        return _ceil(big[0] + self.before, self.stride), (big[1] + self.before - self.reach) // self.stride + 1

    def touches(self, big: Range, size: int) -> Range:
        """Small coordinates, of `size`, that touch big ones."""
        return _geometry.small_range(
            big, size=size, kernel=self.kernel, stride=self.stride, dilation=self.dilation, pad_before=self.before
        )


def scaled_cuts(operator: str, axis: Axis, size: int) -> tuple[int, ...]:
    """Of a grid of another resolution over the same image."""
    return _settled(operator, axis, [_ceil(cut * size, axis.size) for cut in axis.cuts[1:-1]], size)


def inside(wanted: Range, size: int) -> Range:
    begin = min(max(wanted[0], 0), size)
    return begin, max(min(wanted[1], size), begin)


def source_indices(padding_mode: str, wanted: Range, size: int) -> list[int]:
    """For every coordinate of a range that may reach into the padding, the one whose value stands there."""
    return list(_geometry.source_indices(padding_mode, wanted, size))


def hulls(indices: list[int]) -> tuple[Range, ...]:
    """The ranges that these coordinates make up, in ascending order."""
    ranges: list[list[int]] = []
    for i in sorted(set(indices)):
        if ranges and ranges[-1][1] == i:
            ranges[-1][1] = i + 1
        else:
            ranges.append([i, i + 1])
    return tuple((a, b) for a, b in ranges)


@dataclass(frozen=True)
class Moves:
    """What one rank does so that every rank gets what it wants. Ranges count from the rank's own first coordinate."""

    sends: tuple[tuple[int, tuple[Range, ...]], ...]
    """(rank, what of mine it gets)."""
    receives: tuple[tuple[int, int], ...]
    """(rank, how many coordinates come from it)."""
    pieces: tuple[tuple[int, int, int], ...]
    """Of the result, in order: (rank, where in what came from it (of mine: in my part), length)."""
    anyone: bool
    """Whether any rank gets anything from another."""


@functools.lru_cache(maxsize=4096)
def moves(cuts: tuple[int, ...], wanted: Wanted, index: int) -> Moves:
    """For the rank of number `index`, whose part is cuts[index] to cuts[index + 1]."""
    ranks = len(cuts) - 1

    def shares(reader: int) -> list[tuple[int, Range]]:
        found = []
        for begin, end in wanted[reader]:
            for owner in range(ranks):
                low, high = max(begin, cuts[owner]), min(end, cuts[owner + 1])
                if low < high:
                    found.append((owner, (low, high)))
        return found

    sends, came = [], dict.fromkeys(range(ranks), 0)
    for reader in range(ranks):
        mine = tuple((a - cuts[index], b - cuts[index]) for owner, (a, b) in shares(reader) if owner == index)
        if reader != index and mine:
            sends.append((reader, mine))
    pieces = []
    for owner, (a, b) in shares(index):
        if owner == index:
            pieces.append((owner, a - cuts[index], b - a))
        else:
            pieces.append((owner, came[owner], b - a))
            came[owner] += b - a
    anyone = any(owner != reader for reader in range(ranks) for owner, _ in shares(reader))
    receives = tuple((owner, count) for owner, count in came.items() if count)
    return Moves(tuple(sends), receives, tuple(pieces), anyone)
