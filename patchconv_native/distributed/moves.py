"""Which rank sends what to whom: arithmetic on integers. All ranks know all cuts, so no sizes are exchanged."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..spatial.axis import Range, Wanted


@dataclass(frozen=True)
class Moves:
    """What one rank does so that every rank gets what it wants. Ranges count from the rank's own first coordinate."""

    sends: tuple[tuple[int, tuple[Range, ...]], ...]
    """(rank, the ranges of this rank's part that it gets)."""
    receives: tuple[tuple[int, int], ...]
    """(rank, how many coordinates come from it)."""
    pieces: tuple[tuple[int, int, int], ...]
    """Of the result, in order: (rank, where in what came from it, or in this rank's part; length)."""
    anyone: bool
    """Whether any rank gets anything from another."""


@functools.lru_cache(maxsize=4096)
def moves_for(cuts: tuple[int, ...], wanted: Wanted, index: int) -> Moves:
    """For the rank of number `index`, whose part is cuts[index] to cuts[index + 1]."""
    ranks = len(cuts) - 1

    def shares(reader: int) -> list[tuple[int, Range]]:
        """(owner, range) of what a rank wants, in order."""
        found = []
        for begin, end in wanted[reader]:
            for owner in range(ranks):
                low, high = max(begin, cuts[owner]), min(end, cuts[owner + 1])
                if low < high:
                    found.append((owner, (low, high)))
        return found

    sends, received = [], dict.fromkeys(range(ranks), 0)
    for reader in range(ranks):
        ranges = tuple((a - cuts[index], b - cuts[index]) for owner, (a, b) in shares(reader) if owner == index)
        if reader != index and ranges:
            sends.append((reader, ranges))
    pieces = []
    for owner, (a, b) in shares(index):
        if owner == index:
            pieces.append((owner, a - cuts[index], b - a))
        else:
            pieces.append((owner, received[owner], b - a))
            received[owner] += b - a
    anyone = any(owner != reader for reader in range(ranks) for owner, _ in shares(reader))
    receives = tuple((owner, count) for owner, count in received.items() if count)
    return Moves(tuple(sends), receives, tuple(pieces), anyone)
