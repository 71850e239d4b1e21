"""Chooses how a recorded module is computed within a budget: what is stored between sweeps, and how thin strips are."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._bytes import MIB, format_bytes
from ..planner.margin import MARGIN, largest_peak, least_budget
from ..planner.plans import BudgetError
from .chains import find_rooms, join_steps
from .costs import Cost, Known, Outside, Stored, answers_bytes, cost_of, sweep_peak, whole_cost
from .kinds import Kinds, Time, calls_between, kinds_of, last_uses, on_whole
from .reach import reach_of
from .record import Graph
from .sweeps import Step, Sweep, bytes_of, cut_into, sweep_count, values_needed

STRIP = 16 * MIB
"""Of the largest value of a sweep, what one strip should hold, so that strips stay in a CPU's caches."""
MOST_CUT = 2**18
"""Steps times strips that a planner remembers while it looks for a choice, so that it takes little memory itself."""
THINNEST = 8
"""Rows of the tallest value that a strip has at least, as long as the budget allows it: thinner ones cost time."""


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
        for place, why in self.kinds.why.items():
            lines.append(f"whole       {self.graph.calls[place].where}: {why}")
        lines.append("sweep  strips  calls  rows of a strip  strip's largest  rows kept, most")
        for sweep in self.sweeps:
            lines.append(self._line(sweep))
        return "\n".join(lines)

    def _line(self, sweep: Sweep) -> str:
        largest, rows = _largest(self.graph, self.kinds, sweep)
        strip = math.ceil(bytes_of(self.graph, largest) / sweep.strips)
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


def _largest(graph: Graph, kinds: Kinds, sweep: Sweep) -> tuple[int, int]:
    """The value of the most bytes that a sweep reads or computes, and the rows of the tallest one."""
    values = set(sweep.sources) | sweep.results | sweep.stores
    for step in sweep.steps:
        values.update(v for place in step.calls for v in graph.calls[place].outputs if v in kinds.dims)
        values.update(step.reads)
    return max(values, key=lambda v: bytes_of(graph, v)), max(graph.fakes[v].size(kinds.dims[v]) for v in values)


_Cut = tuple[int, int, bool]
"""The number of a sweep, its strips, and whether small steps wait for several of them."""
_Found = tuple[int, Stored, list[int]]
"""Of a sweep: its peak, what is stored after it, and the bytes of its shares of numbers of the whole image."""


@dataclass
class _Choice:
    """How sweeps are cut, and what follows from it."""

    cuts: list[_Cut]
    peaks: list[int]
    """Of each number of a sweep, what is computed before it included."""
    stored_most: int
    last: dict[int, Time]


def _key(base: Sweep) -> tuple[Any, ...]:
    """What tells a sweep that is not yet cut from others."""
    calls = tuple((step.call, step.asks) for step in base.steps)
    return base.number, calls, frozenset(base.sources), frozenset(base.stores)


class Planner:
    """Finds the sweeps of one graph under several choices. What a step costs is measured once."""

    def __init__(self, graph: Graph, dims: Sequence[int], outside: Outside) -> None:
        self.graph, self.kinds, self.outside = graph, kinds_of(graph, dims), outside
        self.results = set(graph.results)
        self.count = sweep_count(graph, self.kinds)
        self.gathered = {
            v: when for v, when in self._last_uses([]).items() if v in self.kinds.dims and v not in graph.inputs
        }
        self._known: Known = {}
        self._cut: dict[tuple[Any, ...], Sweep] = {}
        self._found: dict[tuple[Any, ...], _Found] = {}
        self._made = {v: place for place, call in enumerate(graph.calls) for v in call.outputs}
        self._flops: dict[int, float] = {}
        self._whole_costs: dict[int, int] = {}
        self._reach = functools.cache(lambda place: reach_of(graph, self.kinds, place))

    def _last_uses(self, bases: list[Sweep]) -> dict[int, Time]:
        whole = {v for v in self.results if v not in self.kinds.dims}
        steps = ((base.number, place) for base in bases for step in base.steps for place in step.calls)
        return last_uses(self.graph, self.kinds, whole, steps)

    def everything_stored(self) -> set[int]:
        """What must be stored so that nothing is computed twice."""
        stored = set(self.gathered)
        while True:
            again: set[int] = set()
            for number in range(self.count):
                steps = self._needed(stored, number).steps
                made = {v for step in steps if not step.asks for v in self.graph.calls[step.call].outputs}
                read = {v for step in steps for v in self.graph.calls[step.call].inputs}
                again.update(v for v in made & read if v in self.kinds.dims and self.kinds.level[v] < number)
            again -= stored  # of a call with several results, one may be stored, and another not
            if not again:
                return stored
            stored |= {max(again)}

    def _needed(self, stored: set[int], number: int) -> Sweep:
        return values_needed(self.graph, self.kinds, stored, number, self.results)

    def bases(self, stored: set[int]) -> list[Sweep]:
        """The sweeps, not yet cut, with what each is the last to read."""
        sweeps = [self._needed(stored, number) for number in range(self.count)]
        last = {v: sweep.number for sweep in sweeps for v in sweep.sources}
        for sweep in sweeps:
            sweep.frees = {
                v for v in stored & sweep.sources
                if last[v] == sweep.number and (v not in self.gathered or self.gathered[v][0] <= sweep.number)
            }  # fmt: skip
        return [sweep for sweep in sweeps if sweep.steps]

    def cut(self, base: Sweep, strips: int, patient: bool) -> tuple[Sweep, list[Cost]]:
        key = *_key(base), strips, patient
        sweep = self._cut.pop(key, None)
        if sweep is None:
            sweep = cut_into(self.graph, self.kinds, base, strips, self._reach, patient)
            join_steps(self.graph, self.kinds, sweep, self._reach)
            sweep.find_last_reads()
            find_rooms(self.graph, self.kinds, sweep)
        self._cut[key] = sweep  # the newest one is the last
        while len(self._cut) > 1 and sum(one.strips * len(one.steps) for one in self._cut.values()) > MOST_CUT:
            del self._cut[next(iter(self._cut))]
        sweep = dataclasses.replace(sweep, frees=base.frees)
        return sweep, [cost_of(self.graph, self.kinds, step, self._known) for step in sweep.steps]

    def choose(self, stored: set[int], budget: int | None, strips: int | None = None) -> _Choice:
        """Strips for each sweep: as many as the caches want, more where the budget wants them.

        strips: this many, in every sweep.
        """
        there: Stored = {}
        answers = merged = 0  # shares of all strips, and the copies that are made where they are put together
        bases = {base.number: base for base in self.bases(stored)}
        found = _Choice([], [], 0, self._last_uses(list(bases.values())))
        read_later = self.read_later(list(bases.values()))
        for number in range(self.count + 1):
            between = answers + merged + self._between_peak(number, there, read_later, found.last)
            if number not in bases:
                found.peaks.append(between)
                continue
            whole = answers + merged + self._whole_bytes((number, 2**31), found.last)
            room = None if budget is None else budget - whole
            cut, (peak, there, shares) = self._cut_for(bases[number], there, room, strips)
            there = dict(there)
            found.cuts.append(cut)
            found.peaks.append(max(between, peak + whole))
            answers, merged = answers + sum(shares), max([merged, *(5 * share for share in shares)])
            found.stored_most = max(found.stored_most, sum(one.bytes for one in there.values()))
        return found

    def _cut_for(self, base: Sweep, there: Stored, budget: int | None, strips: int | None) -> tuple[_Cut, _Found]:
        """The cut of a sweep, and what is found of it."""
        largest, rows = _largest(self.graph, self.kinds, base)
        number = strips or max(1, min(math.ceil(bytes_of(self.graph, largest) / STRIP), rows // THINNEST))
        number = min(number, rows)
        best: tuple[_Cut, _Found] | None = None
        patient = not strips and budget != 0
        stored = tuple((v, one.state()) for v, one in sorted(there.items()))
        which = *_key(base), frozenset(base.frees), stored
        while True:
            cut = base.number, number, patient
            key = *which, number, patient
            if key not in self._found:
                sweep, costs = self.cut(base, number, patient)
                after = {v: one.copy() for v, one in there.items()}
                peak = sweep_peak(self.graph, self.kinds, sweep, costs, after, self.outside)
                self._found[key] = peak, after, answers_bytes(sweep, costs)
            found = self._found[key]
            if best is None or found[0] < best[1][0]:
                best = cut, found
            if strips or budget is None or found[0] <= budget or (number >= rows and not patient):
                return best
            number, patient = number if patient else min(number * 2, rows), False

    def sweeps(self, stored: set[int], choice: _Choice) -> list[Sweep]:
        bases = {base.number: base for base in self.bases(stored)}
        return [self.cut(bases[number], strips, patient)[0] for number, strips, patient in choice.cuts]

    def read_later(self, bases: list[Sweep]) -> set[int]:
        """Values that a sweep reads after a call has got them whole."""
        last = {v: base.number for base in bases for v in base.sources}
        return {v for v, when in self.gathered.items() if last.get(v, -1) >= when[0]}

    def _whole_bytes(self, when: Time, last: dict[int, Time]) -> int:
        """Of the whole values that are there at a time. Views share their memory."""
        there: dict[int, int] = {}
        for v, end in last.items():
            if v not in self.kinds.dims and (self.kinds.level[v], self._made[v]) < when <= end:
                memory = self.graph.fakes[v].untyped_storage()
                there[memory._cdata] = memory.nbytes()
        return sum(there.values())

    def _between_peak(self, number: int, there: Stored, read_later: set[int], last: dict[int, Time]) -> int:
        """The most bytes while whole values are computed before a sweep."""
        most, stored = 0, sum(rows.bytes for rows in there.values()) if self.outside.counted else 0
        for place in calls_between(self.graph, self.kinds, number):
            if on_whole(self.graph, self.kinds, place):
                if place not in self._whole_costs:
                    self._whole_costs[place] = whole_cost(self.graph, self.kinds, place, self.outside)
                most = max(most, stored + self._whole_bytes((number, place), last) + self._whole_costs[place])
            for v in self.graph.calls[place].inputs:
                if v in there and self.gathered.get(v) == (number, place) and v not in read_later:
                    freed = there.pop(v).bytes
                    stored -= freed if self.outside.counted else 0
        return most

    def stored_during(self, stored: set[int]) -> list[set[int]]:
        """Of each sweep, the stored values that are there before it or after it."""
        last = {v: sweep.number for sweep in self.bases(stored) for v in sweep.sources & stored}
        level = self.kinds.level
        return [{v for v, end in last.items() if level[v] <= n <= end} for n in range(self.count + 1)]

    def stored_at_least(self, during: list[set[int]]) -> list[int]:
        """The bytes of stored values before each sweep, which no choice of strips makes less."""
        if not self.outside.counted:
            return [0] * len(during)
        level = self.kinds.level
        return [sum(bytes_of(self.graph, v) for v in some if level[v] < n) for n, some in enumerate(during)]

    def whole_flops(self, stored: set[int]) -> float:
        """The arithmetic of all sweeps, halos left out; one that has none counts as its bytes."""
        return sum(self._call_flops(step.call) for sweep in self.bases(stored) for step in sweep.steps)

    def _call_flops(self, place: int) -> float:
        if place not in self._flops:
            call, fakes = self.graph.calls[place], self.graph.fakes
            rows = {v: [(0, fakes[v].size(self.kinds.dims[v]))] for v in call.inputs if v in self.kinds.dims}
            made = [v for v in call.outputs if v in self.kinds.dims]
            size = fakes[made[0]].size(self.kinds.dims[made[0]]) if made else next(iter(rows.values()))[0][1]
            found = cost_of(self.graph, self.kinds, Step(place, [(0, size)], not made, rows), self._known)
            self._flops[place] = found.flops + 4 * sum(bytes_of(self.graph, v) for v in call.outputs)
        return self._flops[place]

    def arithmetic(self, sweeps: list[Sweep]) -> float:
        """In units of one call."""
        calls = [place for sweep in sweeps for step in sweep.steps for place in step.calls]
        return sum(map(self._call_flops, calls)) / max(sum(map(self._call_flops, set(calls))), 1)


def plan_of(
    graph: Graph, dims: Sequence[int], budget: int | None, strips: int | None, outside: Outside, device: str, name: str
) -> TilePlan:
    """BudgetError, with the least budget that would do, where none fits."""
    planner = Planner(graph, dims, outside)
    margin, store = MARGIN[device], os.fspath(outside.store)
    cut = {v for v in graph.results if v in planner.kinds.dims}
    result = sum(bytes_of(graph, v) for v in cut) if outside.result else 0
    room = None if budget is None else largest_peak(max(budget - result, 0), margin)
    stored, choice = _chosen(planner, room, strips)
    while room is not None and max(choice.peaks) > room:  # thinner strips leave more shares: is there less than this?
        lower = _chosen(planner, max(choice.peaks) - 1, strips)
        if max(lower[1].peaks) >= max(choice.peaks):
            break
        stored, choice = lower
    sweeps = planner.sweeps(stored, choice)
    peak, later = max(choice.peaks, default=0), planner.read_later(sweeps)
    plan = TilePlan(
        graph, planner.kinds, sweeps, stored, choice.last, later, budget, peak, margin,
        planner.arithmetic(sweeps), choice.stored_most, store, result, name,
    )  # fmt: skip
    if budget is not None and plan.needs > budget:
        raise BudgetError(
            f"tile: a budget of {format_bytes(budget)} is too small: {name} needs {format_bytes(plan.needs)} "
            f"({plan.needs} bytes) at least here" + (f", with store={store!r}" if stored else ""),
            plan.needs, plan,
        )  # fmt: skip
    return plan


def _chosen(planner: Planner, room: int | None, strips: int | None) -> tuple[set[int], _Choice]:
    """What is stored, and the sweeps: the first choice whose peak keeps to `room` bytes, or that of the least peak.

    First everything is stored that is needed twice. While that is too much, the one value is left out, and computed
    again, that costs the least arithmetic a byte, of those that are there at the peak.
    """
    stored = planner.everything_stored()
    best: tuple[set[int], _Choice] | None = None
    while True:
        during = planner.stored_during(stored)
        peaks = planner.stored_at_least(during)
        if room is None or max(peaks) <= room:
            now = planner.choose(stored, room, strips)
            if room is None or max(now.peaks) <= room:
                return stored, now
            now = planner.choose(stored, 0, strips)  # the thinnest strips that help
            peaks = now.peaks
            if best is None or max(peaks) < max(best[1].peaks):
                best = stored, now
            if max(peaks) <= room:
                return best
        fullest = max(range(len(peaks)), key=peaks.__getitem__)
        there = during[fullest] - planner.gathered.keys() if planner.outside.counted else set()
        if not there:
            return best or (stored, planner.choose(stored, 0, strips))
        stored = min(
            (stored - {v} for v in sorted(there)),
            key=lambda rest: planner.whole_flops(rest) / bytes_of(planner.graph, next(iter(stored - rest))),
        )
