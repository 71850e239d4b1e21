"""Chooses how a recorded module is computed within a budget: what is stored between sweeps, and how thin strips are."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from .._bytes import format_bytes
from ..planner.margin import MARGIN, largest_peak, least_budget
from ..planner.plans import BudgetError
from .choices import Choice, Planner, largest_value
from .costs import Known
from .kinds import Kinds, Region, Time, kinds_of
from .outside import Outside
from .record import Graph
from .sweeps import Sweep, bytes_of

NARROWEST = 32
"""Bands of this many columns of the widest value, or fewer, are not cut further."""
STILL_LESS = 0.98
"""Narrower bands are looked at as long as they need less than this much of what wider ones need."""


@dataclass
class TilePlan:
    """How `tile` computes a module on inputs of these shapes. print() it."""

    graph: Graph
    kinds: Kinds
    sweeps: list[Sweep]
    stored: set[int]
    last: dict[int, Time]
    """When whole values, and those that a call gets whole, are read last."""
    read_later: set[int]
    """Values that a sweep reads after a call has got them whole."""
    budget: int | None
    peak: int
    """Predicted, in bytes: above the inputs, the parameters and the result."""
    margin: float
    """The share of `peak` by which the real one may be higher."""
    arithmetic: float
    """In units of one call of the module."""
    stored_most: int
    """The most bytes of stored values at any time."""
    store: str
    result: int = 0
    """Bytes of the result, where the budget counts them."""
    name: str = ""
    outside: Outside = field(default_factory=lambda: Outside("device"))

    @property
    def needs(self) -> int:
        """Bytes of budget that this plan fits."""
        return least_budget(self.peak, self.margin) + self.result

    def __str__(self) -> str:
        sizes = ", ".join(str(list(self.graph.fakes[v].shape)) for v in self.graph.inputs)
        lines = [
            f"{self.name} on {sizes}: {_count(len(self.graph.calls), 'call')}, "
            f"{_count(len(self.sweeps), 'sweep')} over the image",
            f"peak        {format_bytes(self.peak)} predicted, {format_bytes(self.needs)} with a margin of "
            f"{self.margin:.0%}, above inputs, parameters and results"
            + (f", of which {format_bytes(self.result)} count here" if self.result else ""),
        ]
        if self.budget is not None:
            lines.append(f"budget      {format_bytes(self.budget)}")
        lines.append(f"arithmetic  {self.arithmetic:.2f} of one call's")
        if self.stored:
            lines.append(
                f"stored      {_count(len(self.stored), 'value')} between sweeps, {format_bytes(self.stored_most)} at "
                f"most ({self.store})"
            )
        if self.outside.ahead is not None:
            lines.append(
                "copies      from and to the host while strips are computed"
                if self.outside.ahead
                else "copies      from and to the host in order: the budget has no room to read a strip ahead"
            )
        if self.sweeps and self.sweeps[0].bands > 1:
            across = [max(b - a for a, b in one) for one in zip(*self._bands(), strict=True)]
            lines.append(
                f"bands       {self.sweeps[0].bands}, one after the other, of at most "
                f"{' x '.join(map(str, across))} columns of the result; what they share is computed again"
            )
        whole = (f"whole       {self.graph.calls[place].where}: {why}" for place, why in self.kinds.why.items())
        lines += dict.fromkeys(whole)
        lines.append("sweep  strips  calls  rows of a strip  strip's largest  rows kept, most")
        for sweep in self.sweeps:
            lines.append(self._line(sweep))
        return "\n".join(lines)

    def _bands(self) -> list[Region]:
        """Of the result that the last sweep gives, the bands."""
        sweep = self.sweeps[-1]
        return sweep.own[max(sweep.own, key=lambda v: bytes_of(self.graph, v))]

    def _line(self, sweep: Sweep) -> str:
        largest, rows = largest_value(self.graph, self.kinds, sweep)
        strip = math.ceil(bytes_of(self.graph, largest) / sweep.strips / sweep.bands)
        kept = [
            max(sweep.ready[v][k] - min(keep, sweep.ready[v][k]) for k, keep in enumerate(sweep.keep[v]))
            for v in sweep.ready
            if v in sweep.keep
        ]
        return (
            f"{sweep.number:>5}  {sweep.strips:>6}  {len(sweep.steps):>5}  {math.ceil(rows / sweep.strips):>15}  "
            f"{format_bytes(strip):>15}  {max(kept, default=0):>15}"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


@dataclass
class Wishes:
    """What is asked of a plan."""

    budget: int | None
    tile: tuple[int, ...]
    """The coordinates of the result that a strip has: rows, and along every other dimension. Nothing: any."""
    outside: Outside
    device: str
    name: str


def strips_of(graph: Graph, dims: Sequence[int], wishes: Wishes) -> TilePlan:
    """A plan of strips that are as wide as the image, unless `tile` asks for others. dims: along which dimensions
    images may be cut, rows first. BudgetError, with the least budget that would do, where none fits.

    For a budget, strips are chosen by what about they take, and then it is found what they do take.
    """
    kinds = kinds_of(graph, dims[: max(len(wishes.tile), 1)])
    widths = [Fraction(min(n, size), size) for n, size in zip(wishes.tile, _result_sizes(graph, kinds), strict=False)]
    known: Known = {}
    planner = Planner(graph, kinds, wishes.outside, widths[1:], known)
    room = _room(planner, wishes)
    if widths or room is None:
        strips = math.ceil(1 / widths[0]) if widths else None
        return _checked(_plan(planner, wishes, *_found(planner, room, strips)))
    rough = Planner(graph, kinds, wishes.outside, [], known, rough=True)
    stored, choice = _found(rough, room, None)
    plan = _plan(planner, wishes, stored, planner.choose(stored, None, cuts=choice.cuts))
    if max(choice.peaks) <= room and not fits(plan):  # what it does take is more
        plan = _plan(planner, wishes, *_found(planner, room, None))
    if not fits(plan):
        stored, choice = _found(rough, 1, None)
        least = _plan(planner, wishes, stored, planner.choose(stored, None, cuts=choice.cuts))
        plan = min(plan, least, key=lambda one: one.needs)
    return _checked(plan)


def bands_of(graph: Graph, dims: Sequence[int], wishes: Wishes) -> TilePlan:
    """A plan of bands that keep the budget, the widest ones first. BudgetError as of `strips_of`.

    The bands and their strips are chosen by what about they take, and then it is found what they do take.
    """
    kinds = kinds_of(graph, dims)
    known: Known = {}
    ways = [
        (Planner(graph, kinds, wishes.outside, widths, known, rough=True), widths) for widths in _narrower(graph, kinds)
    ]

    def measured(place: int, stored: set[int], choice: Choice) -> TilePlan:
        planner = Planner(graph, kinds, wishes.outside, ways[place][1], known)
        return _plan(planner, wishes, stored, planner.choose(stored, None, cuts=choice.cuts))

    def search(room: int | None) -> Iterator[tuple[int, set[int], Choice]]:
        before = math.inf
        for place, (planner, _) in enumerate(ways):
            stored, choice = _found(planner, room, None)
            yield place, stored, choice
            if max(choice.peaks) > before * STILL_LESS:
                return
            before = max(choice.peaks)

    room = _room(ways[0][0], wishes)
    for place, stored, choice in search(room):
        if room is None or max(choice.peaks) <= room:
            plan = measured(place, stored, choice)
            if fits(plan):
                return plan
    least = min(search(1), key=lambda found: max(found[2].peaks))
    return _checked(measured(*least))


def _narrower(graph: Graph, kinds: Kinds) -> Iterator[list[Fraction]]:
    """Bands of half the image and less: the axis is halved along which they are longest."""
    sizes = [max(graph.fakes[v].size(dim) for v, dim in one.dims.items()) for one in kinds.others]
    lengths = list(sizes)
    while lengths == sizes or max(lengths) > NARROWEST:
        longest = lengths.index(max(lengths))
        half = -(-lengths[longest] // 2)
        lengths[longest] = -(-half // 32) * 32 if half > 64 else half  # of deeper layers, whole columns
        yield [Fraction(length, size) for length, size in zip(lengths, sizes, strict=True)]
        if max(sizes) == 1:
            return


def _result_sizes(graph: Graph, kinds: Kinds) -> list[int]:
    """Of the results, or of the images where no result is cut, the most coordinates along each axis."""
    values = [v for v in graph.results if v in kinds.dims] or graph.inputs[:1]
    return [max(graph.fakes[v].size(one.dims[v]) for v in values) for one in kinds.axes]


def fits(plan: TilePlan) -> bool:
    return plan.budget is None or plan.needs <= plan.budget


def _checked(plan: TilePlan) -> TilePlan:
    if not fits(plan):
        raise BudgetError(
            f"tile: a budget of {format_bytes(plan.budget or 0)} is too small for {plan.name} here: the least that was "
            f"found is {format_bytes(plan.needs)} ({plan.needs} bytes)"
            + (f", with store={plan.store!r}" if plan.stored else ""),
            plan.needs, plan,
        )  # fmt: skip
    return plan


def _room(planner: Planner, wishes: Wishes) -> int | None:
    """What the budget leaves for the peak."""
    if wishes.budget is None:
        return None
    return largest_peak(max(wishes.budget - _result_bytes(planner, wishes), 0), MARGIN[wishes.device])


def _result_bytes(planner: Planner, wishes: Wishes) -> int:
    """Of the result, where the budget counts it."""
    return sum(bytes_of(planner.graph, v) for v in planner.results if v in planner.kinds.dims) * wishes.outside.result


def _plan(planner: Planner, wishes: Wishes, stored: set[int], choice: Choice) -> TilePlan:
    sweeps = planner.sweeps(stored, choice)
    return TilePlan(
        planner.graph, planner.kinds, sweeps, stored, choice.last, planner.read_later(sweeps), wishes.budget,
        max(choice.peaks, default=0), MARGIN[wishes.device], planner.arithmetic(sweeps), choice.stored_most,
        os.fspath(wishes.outside.store), _result_bytes(planner, wishes), wishes.name, wishes.outside,
    )  # fmt: skip


def _found(planner: Planner, room: int | None, strips: int | None) -> tuple[set[int], Choice]:
    """As `_chosen`; the least peak is that of a second search."""
    stored, choice = _chosen(planner, room, strips)
    while room is not None and max(choice.peaks) > room:  # thinner strips leave more shares: is there less than this?
        lower = _chosen(planner, max(choice.peaks) - 1, strips)
        if max(lower[1].peaks) >= max(choice.peaks):
            break
        stored, choice = lower
    return stored, choice


def _chosen(planner: Planner, room: int | None, strips: int | None) -> tuple[set[int], Choice]:
    """What is stored, and the sweeps: the first choice whose peak keeps to `room` bytes, or that of the least peak.

    First everything is stored that is needed twice. While that is too much, the one value is left out, and computed
    again, that costs the least arithmetic a byte, of those that are there at the peak.
    """
    stored = planner.everything_stored()
    best: tuple[set[int], Choice] | None = None
    while True:
        during = planner.stored_during(stored)
        peaks = planner.stored_at_least(during)
        if room is None or max(peaks) <= room:
            now = planner.choose(stored, room, strips)
            peaks = now.peaks
            if room is None or max(peaks) <= room:
                return stored, now
            if best is None or max(peaks) < max(best[1].peaks):
                best = stored, now
        fullest = max(range(len(peaks)), key=peaks.__getitem__)
        there = during[fullest] - planner.gathered.keys() if planner.outside.counted else set()
        if not there:
            return best or (stored, planner.choose(stored, 0, strips))
        stored = min(
            (stored - {v} for v in sorted(there)),
            key=lambda rest: planner.whole_flops(rest) / bytes_of(planner.graph, next(iter(stored - rest))),
        )
