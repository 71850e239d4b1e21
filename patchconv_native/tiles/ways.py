"""Chooses how a recorded module is computed within a budget: what is stored between sweeps, how thin strips are, and
how wide bands of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction

from .._budget import MARGIN, BudgetError, largest_peak
from .._bytes import format_bytes
from .at_once import AtOnce
from .choices import Choice, Learned, Planner, result_sizes
from .graph import Graph
from .kinds import Kinds, kinds_of
from .plan import Least, Stretch, TilePlan, Wishes, fits
from .strip_sizes import step_work, tile_bytes
from .sweeps import bytes_of

NARROWEST = 32
"""Bands of this many columns of the widest value, or fewer, are not cut further."""
MUCH_LESS, LESS = 0.8, 0.99
"""A search for the least asks for these shares of what it has found so far."""
STILL_LESS = 0.98
"""Narrower bands are looked at as long as they need less than this much of what wider ones need."""
TRIED = 3
"""So many choices in turn that are no faster end the search for a faster one."""

Found = tuple[set[int], Choice]
"""What is stored between sweeps, and how these are cut."""


class Strips:
    """Plans of one graph. dims: along which dimensions images may be cut, rows first.

    Strips are chosen by what about they take, and then it is found what they do take.
    """

    def __init__(self, graph: Graph, dims: Sequence[int], wishes: Wishes) -> None:
        self._graph, self._wishes, self._shared = graph, wishes, wishes.outside.shared
        self.kinds = self._kinds(graph, dims)
        self._widest = [Fraction(1)] * len(self.kinds.others)
        """Of bands: those of the image's width, or of a rank's part of it."""
        if self._shared is not None:
            self._widest[0] = self._shared.width()
        self._learned = Learned()
        self._result = sum(bytes_of(graph, v) for v in set(graph.results) if v in self.kinds.dims)
        self._result *= wishes.outside.result
        self._room: int | None = None
        if wishes.budget is not None:
            self._room = largest_peak(max(wishes.budget - self._result, 0), MARGIN[wishes.device])

    def _kinds(self, graph: Graph, dims: Sequence[int]) -> Kinds:
        return kinds_of(graph, dims[: max(len(self._wishes.tile), 1 if self._shared is None else 2)])

    @property
    def cuts_results(self) -> bool:
        return all(v in self.kinds.dims for v in self._graph.results)

    def is_in(self, ways: Sequence[Strips]) -> bool:
        """Whether one of these looks at all that this one does, in bands as wide as the image."""
        return any(
            isinstance(way, Bands) and way._graph is self._graph and way._wishes.outside == self._wishes.outside
            and way.kinds.dims == self.kinds.dims and way.kinds.gathers == self.kinds.gathers for way in ways
        )  # fmt: skip

    def fitting(self) -> TilePlan | None:
        """A plan of strips that are as wide as the image, unless `tile` asks for others, that fits the budget."""
        if self._wishes.tile:
            plan, _ = self._of_tiles()
            return plan if fits(plan) else None
        exact = self._planner(self._widest)
        if self._room is None:
            return self._plan(exact, *chosen(exact, None))
        stored, choice = chosen(self._planner(self._widest, rough=True), self._room)
        if max(choice.peaks) > self._room:
            return None
        plan = self._measured(self._widest, stored, choice)[0]
        if not fits(plan):  # what it does take is more
            plan = self._plan(exact, *chosen(exact, self._room, stored=stored))
        return plan if fits(plan) else None

    def least(self, below: float) -> Least | None:
        """The plan of the least peak that is found, if that is less than `below` bytes."""
        if self._wishes.tile:
            return self._of_tiles()
        found = least(self._planner(self._widest, rough=True), below)
        return None if found is None else self._measured(self._widest, *found)

    def _of_tiles(self) -> Least:
        rows, *widths = self._of_wish()
        planner = self._planner(widths)
        found = chosen(planner, self._room, math.ceil(1 / rows))
        return self._plan(planner, *found), lambda: planner.where(*found)

    def _planner(self, widths: Sequence[Fraction], rough: bool = False, kept: set[int] | None = None) -> Planner:
        return Planner(self._graph, self.kinds, self._wishes.outside, widths, self._learned, rough, kept)

    def _measured(self, widths: Sequence[Fraction], stored: set[int], choice: Choice) -> Least:
        planner = self._planner(widths)
        exact = planner.choose(stored, None, cuts=choice.cuts)
        return self._plan(planner, stored, exact), lambda: planner.where(stored, exact)

    def _plan(self, planner: Planner, stored: set[int], choice: Choice) -> TilePlan:
        wishes, sweeps = self._wishes, planner.sweeps(stored, choice)
        return TilePlan(
            planner.graph, planner.kinds, sweeps, stored, choice.last, planner.read_later(sweeps), wishes.budget,
            max(choice.peaks, default=0), MARGIN[wishes.device], planner.arithmetic(sweeps), choice.stored_most,
            os.fspath(wishes.outside.store), self._result, wishes.name, wishes.outside,
            dict.fromkeys(range(planner.count + 1), self._tiles()) if planner.graph.needs else {},
            [Stretch(0, planner.count + 1)], frozenset(range(planner.count + 1)), planner.reaches,
            overhead=planner.overhead(sweeps),
        )  # fmt: skip

    def _of_wish(self) -> list[Fraction]:
        """The shares of the image that `tile` asks for, rows first."""
        sizes = result_sizes(self._graph, self.kinds)
        found = [Fraction(min(n, size), size) for n, size in zip(self._wishes.tile, sizes, strict=False)]
        found += self._widest[len(found) - 1 :]
        if self._shared is not None:
            found[1] = self._shared.width(found[1])
        return found

    def _tiles(self) -> list[Fraction]:
        """Of the backward pass, as shares of the result."""
        if self._wishes.tile:
            return self._of_wish()
        largest = max(bytes_of(self._graph, v) for v in self.kinds.dims) * math.prod(self._widest)
        number = math.ceil(largest / tile_bytes(self._graph))
        return [Fraction(1, max(1, min(number, result_sizes(self._graph, self.kinds)[0]))), *self._widest]


class Bands(Strips):
    """Plans of strips in bands, and for the least budget in one band as well."""

    def __init__(self, graph: Graph, dims: Sequence[int], wishes: Wishes) -> None:
        super().__init__(graph, dims, wishes)
        narrow = narrower(graph, self.kinds.others, self._widest)
        self._ways = [(self._planner(widths, rough=True), widths) for widths in (self._widest, *narrow)]

    def _kinds(self, graph: Graph, dims: Sequence[int]) -> Kinds:
        return kinds_of(graph, dims)

    def fitting(self) -> TilePlan | None:
        """A plan of the widest bands that fit the budget."""
        low, high, plan = 1, len(self._ways), None
        while low < high:  # narrower ones need less
            middle = (low + high) // 2
            planner, widths = self._ways[middle]
            stored, choice = chosen(planner, self._room)
            found = None
            if self._room is None or max(choice.peaks) <= self._room:
                found = self._measured(widths, stored, choice)[0]
            if found is not None and fits(found):
                plan, high = found, middle
            else:
                low = middle + 1
        return plan

    def least(self, below: float) -> Least | None:
        best: Found | None = None
        at, step = 1, 1
        before = 0
        while before < len(self._ways) - 1:  # narrower ones, in growing steps, as long as they need less
            found = least(self._ways[at][0], below)
            if found is None:
                break
            still = max(found[1].peaks) <= below * STILL_LESS
            best, below, before = found, max(found[1].peaks), at
            if not still:
                break
            at, step = min(at + step, len(self._ways) - 1), 2 * step
        for place in {(before + at) // 2} - {before, at}:
            found = least(self._ways[place][0], below)
            best, before = (best, before) if found is None else (found, place)
        return None if best is None else self._measured(self._ways[before][1], *best)


def narrower(graph: Graph, axes: Sequence[Kinds], widest: Sequence[Fraction]) -> Iterator[list[Fraction]]:
    """Bands of half of the widest ones and less: the axis is halved along which they are longest. None without axes. A
    batch comes first: its samples read nothing of each other. Those of ranks remain of whole parts of `widest`.
    """
    sizes = [max(graph.fakes[v].size(dim) for v, dim in one.dims.items()) for one in axes]
    lengths = [math.ceil(size * width) for size, width in zip(sizes, widest, strict=True)]

    def shares() -> list[Fraction]:
        return [
            Fraction(length, size) if most == 1 else most / max(1, math.ceil(most * size / length))
            for length, size, most in zip(lengths, sizes, widest, strict=True)
        ]

    batch = [place for place, one in enumerate(axes) if one.dims[graph.inputs[0]] == 0]
    for place in batch:
        while lengths[place] > 1:
            lengths[place] = -(-lengths[place] // 2)
            yield shares()
    others = [place for place in range(len(axes)) if place not in batch]
    halved = False
    while others and (not halved or max(lengths[place] for place in others) > NARROWEST):
        longest = max(others, key=lambda place: lengths[place])
        half = -(-lengths[longest] // 2)
        halved = half < lengths[longest]
        lengths[longest] = -(-half // 32) * 32 if half > 64 else half  # of deeper layers, whole columns
        yield shares()
        if not halved:
            return


def least(planner: Planner, below: float) -> Found | None:
    """The choice of the least peak that is found, if that is less than `below` bytes."""
    best = None
    for share in (MUCH_LESS, LESS) if below > 0 else ():
        while True:
            found = chosen(planner, 0 if below == math.inf else int(below * share), below=below)
            if max(found[1].peaks) >= below:
                break
            best, below = found, max(found[1].peaks)
    return best


def chosen(
    planner: Planner, room: int | None, strips: int | None = None, below: float = math.inf,
    stored: set[int] | None = None,
) -> Found:  # fmt: skip
    """What is stored, and the sweeps: the choice of the least work whose peak keeps to `room` bytes, or that of the
    least peak.

    First everything is stored that is needed twice. While that is too much, the one value is left out, and computed
    again, that costs the least arithmetic a byte, of those that are there at the peak. So the first choice that fits
    has the least arithmetic. Where strips cost something besides, later ones may have so many fewer that they are
    faster. below: choices that take as much or more are not looked at to the end.
    """
    stored = planner.everything_stored() if stored is None else stored
    best: Found | None = None
    fastest: Found | None = None
    least_work, tried = math.inf, 0
    while planner.whole_flops(stored) < least_work and tried < TRIED:
        peaks = planner.at_least(stored)
        if room is None or max(peaks) <= room or (best is None and fastest is None):
            now = planner.choose(stored, room, strips, below=below)
            peaks = now.peaks
            if room is None or (max(peaks) <= room and not step_work(planner.graph)):
                return stored, now
            if max(peaks) <= room:
                below, tried, work = room + 1, tried + 1, planner.work(stored, now)
                if work < least_work:
                    fastest, least_work, tried = (stored, now), work, 0
            elif best is None or max(peaks) < max(best[1].peaks):
                best = stored, now
                below = min(below, max(peaks))
        fullest = max(range(len(peaks)), key=peaks.__getitem__)
        during = planner.stored_during(stored)[fullest]
        there = during - planner.gathered.keys() if planner.outside.counted else set()
        if not there:
            break
        stored = min(
            (stored - {v} for v in sorted(there)),
            key=lambda rest: planner.whole_flops(rest) / bytes_of(planner.graph, next(iter(stored - rest))),
        )
    found = fastest or best
    assert found is not None
    return found


def least_of(owner: str, ways: Sequence[Strips], at_once: AtOnce | None) -> TilePlan:
    """The plan of the least budget that is found: BudgetError where that is above the budget."""
    found = [] if at_once is None else [at_once.least()]
    for way in reversed(ways):  # the last ones copy no weights
        if isinstance(way, Bands) or not way.is_in(ways):
            one = way.least(min((plan.peak for plan, _ in found), default=math.inf))
            found += [] if one is None else [one]
    best, where = min(found, key=lambda one: one[0].needs)
    if fits(best):
        return best
    made = best.graph.made
    raise BudgetError(
        f"{owner}: a budget of {format_bytes(best.budget or 0)} is too small for {best.name} here: the least that was "
        f"found is {format_bytes(best.needs)} ({best.needs} bytes), and the most is needed at {where()}"
        + (f", with store={best.store!r}" if best.stored else "")
        + f"; {format_bytes(made)} of these bytes are tensors that it makes of no image" * (20 * made > best.needs),
        best.needs, best,
    )  # fmt: skip
