"""Chooses how the sweeps of a recorded module are cut, and predicts what they take."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from .bands import cut_across
from .chains import find_rooms, join_steps
from .costs import (
    Cost,
    Known,
    Stored,
    answer_cost,
    answers_bytes,
    cost_of,
    places,
    rough_cost,
    row_bytes,
    sweep_peak,
    whole_cost,
    whole_rows,
    widest_band,
)
from .graph import Graph
from .kinds import Kinds, Region, Time, calls_between, last_uses, on_whole, whole_region
from .outside import Outside
from .reach import Reaches
from .strip_sizes import STEP_OF_CALL, step_work, strip_bytes, strip_step_work
from .sweeps import Step, Sweep, bytes_of, cut_into, leading_to, sweep_count, values_needed

MOST_CUT = 2**16
"""Steps times strips that a planner remembers while it looks for a choice, so that it takes little memory itself."""
MOST_STRIPS = 4096
"""Strips of a sweep, at most: a taller image is rather cut into bands than into thinner strips."""
BISECTED = 2
"""So often the number of strips is bisected between one that fits and its half, where strips cost something."""
VAIN, GAIN = 2, 0.99
"""Strips are doubled no more after so many doublings in turn that left more than this share of the bytes."""
THINNEST = 8
"""Rows of the tallest value that a strip has at least, as long as the budget allows it: thinner ones cost time."""


def largest_value(graph: Graph, kinds: Kinds, sweep: Sweep) -> tuple[int, int]:
    """The value of the most bytes that a sweep reads or computes, and the rows of the tallest one."""
    values = set(sweep.sources) | sweep.results | sweep.stores
    for step in sweep.steps:
        values.update(v for place in step.calls for v in graph.calls[place].outputs if v in kinds.dims)
        values.update(step.reads)
    return max(values, key=lambda v: bytes_of(graph, v)), max(graph.fakes[v].size(kinds.dims[v]) for v in values)


def result_sizes(graph: Graph, kinds: Kinds) -> list[int]:
    """Of the results, or of the images where no result is cut, the most coordinates along each axis."""
    values = [v for v in graph.results if v in kinds.dims] or graph.inputs[:1]
    return [max(graph.fakes[v].size(one.dims[v]) for v in values) for one in kinds.axes]


Cut = tuple[int, int, bool]
"""The number of a sweep, its strips, and whether small steps wait for several of them."""
_Found = tuple[int, Stored, list[int]]
"""Of a sweep: its peak, what is stored after it, and the bytes of its shares of numbers of the whole image."""


@dataclass
class Choice:
    """How sweeps are cut, and what follows from it."""

    cuts: list[Cut]
    peaks: list[int]
    """Of each number of a sweep, what is computed before it included."""
    stored_most: int
    last: dict[int, Time]
    before: list[Stored]
    """Of each number of a sweep, what is stored before it."""
    answers: int = 0
    """Bytes of the shares of numbers of the whole image, of all strips."""


@dataclass
class Learned:
    """What planners of one graph and the same kinds find once for all of them."""

    costs: Known = field(default_factory=dict)
    needed: dict[tuple[int, frozenset[int]], Sweep] = field(default_factory=dict)
    flops: dict[int, float] = field(default_factory=dict)
    whole_costs: dict[int, int] = field(default_factory=dict)
    reaches: list[Reaches] = field(default_factory=list)
    """Of each axis."""


@dataclass
class _Whole:
    """Of a stored value, all rows."""

    bytes: int


def _key(base: Sweep) -> tuple[Any, ...]:
    """What tells a sweep that is not yet cut from others."""
    calls = tuple((step.call, step.asks) for step in base.steps)
    return base.number, calls, frozenset(base.sources), frozenset(base.stores)


class Planner:
    """Finds the sweeps of one graph under several choices. What a step costs is measured once.

    kinds: its first axis is cut into strips, the others into bands of these widths, as of `cut_across`.
    learned: shared with other planners of the same kinds. rough: in bands, by `rough_cost`. kept: with gradients, the
    stored values that are there until the backward pass; all, if None.
    """

    def __init__(
        self,
        graph: Graph,
        kinds: Kinds,
        outside: Outside,
        widths: Sequence[Fraction],
        learned: Learned,
        rough: bool = False,
        kept: set[int] | None = None,
    ) -> None:
        self.graph, self.kinds, self.outside, self.widths, self.rough = graph, kinds, outside, widths, rough
        self.kept = kept if graph.needs else set()
        self.results = set(graph.results)
        self.count = sweep_count(graph, self.kinds)
        self.gathered = {
            v: when for v, when in self._last_uses([]).items() if v in self.kinds.dims and v not in graph.inputs
        }
        self._learned, self._known, self._flops = learned, learned.costs, learned.flops
        self._cut: dict[tuple[Any, ...], Sweep] = {}
        self._found: dict[tuple[Any, ...], _Found] = {}
        self._made = {v: place for place, call in enumerate(graph.calls) for v in call.outputs}
        self._between = [calls_between(graph, kinds, number) for number in range(self.count + 1)]
        self.reaches = learned.reaches or [Reaches(graph, axis) for axis in kinds.axes]
        learned.reaches = self.reaches

    def _last_uses(self, bases: list[Sweep]) -> dict[int, Time]:
        whole = {v for v in self.results if v not in self.kinds.dims}
        steps = ((base.number, place) for base in bases for step in base.steps for place in step.calls)
        last = last_uses(self.graph, self.kinds, whole, steps)
        if self.graph.needs:  # backward reads them again
            last.update({v: (2**31, 0) for v in last if v not in self.kinds.dims})
        return last

    def everything_stored(self) -> set[int]:
        """What must be stored so that nothing is computed twice."""
        level, stored = self.kinds.level, set(self.gathered)
        for number in reversed(range(self.count)):  # what a sweep reads of sweeps before it concerns these alone
            steps = [(step.asks, self.graph.calls[step.call]) for step in self.needed(stored, number).steps]
            made = {v for asks, call in steps if not asks for v in call.outputs}
            first = (call for asks, call in steps if asks or any(level[v] == number for v in call.outputs))
            read = {v for call in first for v in call.inputs}
            stored |= {v for v in made & read if v in self.kinds.dims and level[v] < number}
        return stored

    def needed(self, stored: set[int], number: int) -> Sweep:
        key = number, frozenset(v for v in stored if self.kinds.level[v] <= number)
        if key not in self._learned.needed:
            self._learned.needed[key] = values_needed(self.graph, self.kinds, stored, number, self.results)
        return dataclasses.replace(self._learned.needed[key])

    def bases(self, stored: set[int]) -> list[Sweep]:
        """The sweeps, not yet cut, with what each is the last to read."""
        sweeps = [self.needed(stored, number) for number in range(self.count)]
        last = {v: sweep.number for sweep in sweeps for v in sweep.sources}
        freed = set() if self.kept is None else stored - self.kept
        for sweep in sweeps:
            sweep.frees = {
                v for v in freed & sweep.sources
                if last[v] == sweep.number and (v not in self.gathered or self.gathered[v][0] <= sweep.number)
            }  # fmt: skip
        return [sweep for sweep in sweeps if sweep.steps]

    def cut(self, base: Sweep, strips: int, patient: bool) -> tuple[Sweep, list[Cost]]:
        key = *_key(base), strips, patient
        sweep = self._cut.pop(key, None)
        if sweep is None:
            sweep = cut_into(self.graph, self.kinds, base, strips, self.reaches[0], patient)
            cut_across(self.graph, self.kinds, sweep, self.widths, self.reaches[1:])
            join_steps(self.graph, sweep, self.reaches)
            sweep.find_last_reads()
            find_rooms(self.graph, self.kinds, sweep)
        self._cut[key] = sweep  # the newest one is the last
        while len(self._cut) > 1 and sum(one.strips * len(one.steps) for one in self._cut.values()) > MOST_CUT:
            del self._cut[next(iter(self._cut))]
        sweep = dataclasses.replace(sweep, frees=base.frees)
        if self.rough:
            band = widest_band(sweep)
            return sweep, [rough_cost(self.graph, self.kinds, step, self._known, band) for step in sweep.steps]
        return sweep, [cost_of(self.graph, self.kinds, step, self._known, sweep.made) for step in sweep.steps]

    def choose(
        self, stored: set[int], budget: int | None, strips: int | None = None, cuts: Sequence[Cut] = (),
        below: float = math.inf,
    ) -> Choice:  # fmt: skip
        """Strips for each sweep: as many as the caches want, more where the budget wants them.

        strips: this many, in every sweep. cuts: as another choice has them. below: a sweep that takes this much or
        more is the last one that is looked at.
        """
        fixed = {number: cut for number, *cut in cuts}
        there: Stored = {}
        answers = merged = 0  # shares of all strips, and the copies that are made where they are put together
        bases = {base.number: base for base in self.bases(stored)}
        found = Choice([], [], 0, self._last_uses(list(bases.values())), [])
        read_later = self.read_later(list(bases.values()))
        for number in range(self.count + 1):
            if max(found.peaks, default=0) >= below:
                break
            found.before.append(dict(there))
            between = answers + merged + self._between_peak(number, there, read_later, found.last)[0]
            if number not in bases:
                found.peaks.append(between)
                continue
            whole = answers + merged + self._whole_bytes((number, 2**31), found.last)
            # A sweep need not take less than another one that takes more than the budget anyway.
            room = None if budget is None else max([budget, *found.peaks]) - whole
            cut, (peak, there, shares) = self._cut_for(bases[number], there, room, strips, fixed.get(number))
            there = dict(there)
            found.cuts.append(cut)
            found.peaks.append(max(between, peak + whole))
            answers, merged = answers + sum(shares), max([merged, *(5 * share for share in shares)])
            found.answers = answers
            found.stored_most = max(found.stored_most, sum(one.bytes for one in there.values()))
        return found

    def _cut_for(
        self, base: Sweep, there: Stored, budget: int | None, strips: int | None, fixed: list[Any] | None
    ) -> tuple[Cut, _Found]:
        """The cut of a sweep, and what is found of it. fixed: strips and patience, if they are known."""
        largest, rows = largest_value(self.graph, self.kinds, base)
        share = bytes_of(self.graph, largest) * math.prod(self.widths)
        number = strips or max(1, min(math.ceil(share / strip_bytes(self.graph)), rows // THINNEST))
        most = min(max(self.graph.fakes[v].size(self.kinds.dims[v]) for v in base.sources), MOST_STRIPS)
        number = min(number, rows if strips else most)
        best: tuple[Cut, _Found] | None = None
        patient = not strips
        if fixed is not None:
            number, patient = fixed
        stored = tuple((v, one.state()) for v, one in sorted(there.items()))
        which = *_key(base), frozenset(base.frees), stored

        def look(number: int, patient: bool) -> tuple[Cut, _Found]:
            key = *which, number, patient
            if key not in self._found:
                sweep, costs = self.cut(base, number, patient)
                after = {v: type(one)(one) for v, one in there.items()}
                peak = sweep_peak(self.graph, self.kinds, sweep, costs, after, self.outside, self.rough)
                self._found[key] = peak, after, answers_bytes(sweep, costs)
            return (base.number, number, patient), self._found[key]

        too_few, vain, goal = number, 0, math.inf
        while True:
            now = look(number, patient)
            if best is None or now[1][0] < best[1][0]:
                best = now
            if strips or fixed is not None or budget is None:
                return best
            if now[1][0] <= budget:
                return self._fewer(look, now, too_few, budget)
            vain = 0 if now[1][0] < goal else vain + (number > too_few)
            if vain == 0:
                goal = now[1][0] * GAIN
            if vain == VAIN or (number >= most and not patient):
                return best
            too_few = number
            number, patient = number if patient else min(number * 2, most), False

    def _fewer(
        self, look: Callable[[int, bool], tuple[Cut, _Found]], best: tuple[Cut, _Found], too_few: int, budget: int
    ) -> tuple[Cut, _Found]:
        """A cut into fewer strips that fits as well, where strips cost something. too_few: as many do not fit."""
        for _ in range(BISECTED if step_work(self.graph) else 0):
            middle = (too_few + best[0][1]) // 2
            if middle <= too_few:
                break
            now = look(middle, False)
            if now[1][0] <= budget:
                best = now
            else:
                too_few = middle
        return best

    def sweeps(self, stored: set[int], choice: Choice) -> list[Sweep]:
        bases = {base.number: base for base in self.bases(stored)}
        return [self.cut(bases[number], strips, patient)[0] for number, strips, patient in choice.cuts]

    def again(self, stored: set[int], number: int, wanted: set[int], room: int) -> tuple[Sweep, int]:
        """The sweep that computes these stored values again, and the bytes that it takes above stored values: at most
        `room`, where that is possible.
        """
        base = leading_to(self.graph, self.kinds, stored, number, wanted, set())
        base.results = set()
        there: Stored = {v: whole_rows(self.graph, self.kinds, v, self.outside) for v in base.sources & stored}
        before = sum(rows.bytes for rows in there.values()) + sum(map(self.kept_bytes, wanted))
        room += before if self.outside.counted else 0
        cut, (peak, after, _) = self._cut_for(base, there, room, None, None)
        more = sum(rows.bytes for rows in after.values()) if self.outside.counted else 0
        return self.cut(base, *cut[1:])[0], max(0, peak - more)

    def read_later(self, bases: list[Sweep]) -> set[int]:
        """Values that a sweep, or backward, reads after a call has got them whole."""
        last = {v: base.number for base in bases for v in base.sources}
        if self.graph.needs:
            return set(self.gathered)
        return {v for v, when in self.gathered.items() if last.get(v, -1) >= when[0]}

    def _whole_bytes(self, when: Time, last: dict[int, Time]) -> int:
        """Of the whole values that are there at a time, and of constants. Views share their memory."""
        there: dict[int, int] = {}
        for v, end in last.items():
            if v not in self.kinds.dims and (self.kinds.level[v], self._made[v]) < when <= end:
                memory = self.graph.fakes[v].untyped_storage()
                there[memory._cdata] = memory.nbytes()
        return sum(there.values()) + self.graph.made

    def where(self, stored: set[int], choice: Choice) -> str:
        """The call during which the most is needed."""
        number = max(range(len(choice.peaks)), key=choice.peaks.__getitem__)
        base = next((base for base in self.bases(stored) if base.number == number), None)
        _, strips, patient = next((cut for cut in choice.cuts if cut[0] == number), (number, 0, False))
        bases = self.bases(stored)
        most, place = self._between_peak(number, dict(choice.before[number]), self.read_later(bases), choice.last)

        def peak(steps: int) -> int:
            """As if the steps from this number on took nothing besides their results."""
            some = [cost if k < steps else dataclasses.replace(cost, peak=0) for k, cost in enumerate(costs)]
            there = {v: type(one)(one) for v, one in choice.before[number].items()}
            return sweep_peak(self.graph, self.kinds, sweep, some, there, self.outside)

        if base is not None:
            sweep, costs = self.cut(base, strips, patient)
            whole = self._whole_bytes((number, 2**31), choice.last)
            if peak(len(costs)) + whole > most:
                step = bisect.bisect_left(range(len(costs)), peak(len(costs)), key=lambda k: peak(k + 1))
                place = sweep.steps[step].call
        return self.graph.calls[place].where

    def _between_peak(self, number: int, there: Stored, read_later: set[int], last: dict[int, Time]) -> tuple[int, int]:
        """The most bytes while whole values are computed before a sweep, and the call that takes them."""
        most, at, stored = 0, 0, sum(rows.bytes for rows in there.values()) if self.outside.counted else 0
        for place in self._between[number]:
            costs = self._learned.whole_costs
            if place not in costs:
                whole = on_whole(self.graph, self.kinds, place)
                costs[place] = (
                    whole_cost(self.graph, self.kinds, place, self.outside)
                    if whole
                    else answer_cost(self.graph, self.kinds, place)
                )
            most, at = max((most, at), (stored + self._whole_bytes((number, place), last) + costs[place], place))
            for v in self.graph.calls[place].inputs:
                if v in there and self.gathered.get(v) == (number, place) and v not in read_later:
                    freed = there.pop(v).bytes
                    stored -= freed if self.outside.counted else 0
        return most, at

    def stored_during(self, stored: set[int]) -> list[set[int]]:
        """Of each sweep, the stored values that are there before it or after it."""
        last = {v: sweep.number for sweep in self.bases(stored) for v in sweep.sources & stored}
        level = self.kinds.level
        return [{v for v, end in last.items() if level[v] <= n <= end} for n in range(self.count + 1)]

    def at_least(self, stored: set[int]) -> list[int]:
        """Before each sweep, the bytes of stored values and of calls on whole values: no strips take less."""
        bases, level = self.bases(stored), self.kinds.level
        later, last = self.read_later(bases), self._last_uses(bases)
        found, there = [], dict[int, Any]()
        ends = {v: base.number for base in bases for v in base.sources}
        for number in range(self.count + 1):
            bytes_ = sum(one.bytes for one in there.values()) if self.outside.counted else 0
            found.append(max(bytes_, self._between_peak(number, there, later, last)[0]))
            there = {v: one for v, one in there.items() if ends.get(v, -1) > number or self._gathered_after(v, number)}
            there |= {v: _Whole(self.kept_bytes(v)) for v in stored if level[v] == number}
        return found

    def kept_bytes(self, v: int) -> int:
        """Of a value that is kept, or its gradient; of one that is shared between ranks, of the largest part."""
        if self.outside.shared is None or v not in self.kinds.dims:
            return bytes_of(self.graph, v)
        rows = self.graph.fakes[v].size(self.kinds.dims[v])
        return rows * row_bytes(self.graph, self.kinds, v, self.outside.largest_part(self.graph, self.kinds, v))

    def _gathered_after(self, v: int, number: int) -> bool:
        return v in self.gathered and self.gathered[v][0] > number

    def whole_flops(self, stored: set[int]) -> float:
        """The arithmetic of all sweeps, halos left out; one that has none counts as its bytes."""
        return sum(self.call_flops(step.call) for sweep in self.bases(stored) for step in sweep.steps)

    def work(self, stored: set[int], choice: Choice) -> float:
        """The same, with what each strip of a step costs."""
        steps = self._steps(self.sweeps(stored, choice))
        return self.whole_flops(stored) + steps * step_work(self.graph)

    def _steps(self, sweeps: list[Sweep]) -> int:
        """Of all strips, those that compute rows."""
        count = (sweep.bands * sum(low < high for low, high in step.rows) for sweep in sweeps for step in sweep.steps)
        return sum(count) // self.outside.ranks

    def overhead(self, sweeps: list[Sweep]) -> float:
        """About what the steps of strips cost besides their arithmetic, in units of one call."""
        return self._steps(sweeps) * strip_step_work(self.graph) / self.call_work()

    def call_work(self) -> float:
        """The arithmetic of one call of the module, with what its functions cost besides."""
        return self.whole_flops(self.everything_stored()) + STEP_OF_CALL * max(len(self.graph.calls), 1)

    def call_flops(self, place: int) -> float:
        if place not in self._flops:
            call, whole = self.graph.calls[place], self._whole(place)
            reads = {v: whole_region(self.graph, self.kinds, v) for v in call.inputs if v in self.kinds.dims}
            step = Step(
                place, [whole[0]], not any(v in self.kinds.dims for v in call.outputs),
                {v: [region[0]] for v, region in reads.items()}, [whole[1:]],
                {v: [region[1:]] for v, region in reads.items()},
            )  # fmt: skip
            found = cost_of(self.graph, self.kinds, step, self._known, {})
            self._flops[place] = found.flops + 4 * sum(bytes_of(self.graph, v) for v in call.outputs)
        return self._flops[place]

    def _whole(self, place: int) -> Region:
        """All of a call's result; of a call that has no cut result, of its first cut argument."""
        call = self.graph.calls[place]
        v = next(v for v in (*call.outputs, *call.inputs) if v in self.kinds.dims)
        return whole_region(self.graph, self.kinds, v)

    def arithmetic(self, sweeps: list[Sweep]) -> float:
        """In units of one call."""
        total, calls = 0.0, set()
        for step in (step for sweep in sweeps for step in sweep.steps):
            for place in step.calls:
                total += self.call_flops(place) * sum(map(places, step.across)) / places(self._whole(place)[1:])
            calls.update(step.calls)
        return total / max(sum(map(self.call_flops, calls)), 1)
