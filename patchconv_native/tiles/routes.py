"""The ways that a call with gradients can go: what is stored between sweeps, and the stretches of the backward pass."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from ..spatial.convs import CONVS
from .backward_costs import BackwardCosts
from .choices import Planner
from .graph import Graph
from .kinds import Kinds
from .plan import Stretch
from .sweeps import Step, Sweep, balanced, bytes_of, leading_to

STRETCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Numbers of stretches that are looked at."""
LEFT_OUT = 0.15
"""Of the bytes of stored values, the share that the next routes store no more."""


@dataclass
class Route:
    """What is stored between sweeps, and the stretches of the backward pass."""

    stored: set[int]
    kept: set[int]
    """Of these, what the forward pass keeps."""
    stretches: list[Stretch]
    held: list[int]
    """Of each number of a sweep, the bytes of stored values and gradients that are there in the backward pass."""
    work: float
    """The arithmetic of both passes, without what tiles read of each other."""
    apart: frozenset[int]
    """As of `TilePlan`."""


class Routes:
    """Those of one graph. counted: whether stored values are in the budget."""

    def __init__(self, graph: Graph, kinds: Kinds, planner: Planner, costs: BackwardCosts, counted: bool) -> None:
        self._graph, self._kinds, self._planner, self._costs, self._counted = graph, kinds, planner, costs, counted
        self._flops: dict[tuple[int, bool, frozenset[int]], float] = {}

    @functools.cached_property
    def all(self) -> list[Route]:
        found, stored = [], self._planner.everything_stored()
        while True:
            counts = [n for n in STRETCHES if n == 1 or n <= len({self._kinds.level[v] for v in stored})]
            found += [self._of(stored, count) for count in counts]
            dropped = self._cheapest(stored)
            if not dropped:
                return sorted(found, key=lambda route: route.work)
            stored = stored - dropped

    def _cheapest(self, stored: set[int]) -> set[int]:
        """Of the stored values, those that cost the least arithmetic a byte when they are computed again."""
        planner, graph = self._planner, self._graph
        readers = {v: [base.number for base in planner.bases(stored) if v in base.sources] for v in stored}

        def flops(some: set[int], v: int) -> float:
            needed = (planner.needed(some, number) for number in readers[v])
            return sum(planner.call_flops(step.call) for sweep in needed for step in sweep.steps)

        price = {
            v: (flops(stored - {v}, v) - flops(stored, v)) / bytes_of(graph, v) for v in stored - self._always(stored)
        }
        enough = LEFT_OUT * sum(bytes_of(graph, v) for v in price)
        found: set[int] = set()
        for v in sorted(price, key=lambda v: price[v]):
            if found and sum(bytes_of(graph, one) for one in found) >= enough:
                break
            found.add(v)
        return found

    def _always(self, stored: set[int]) -> set[int]:
        return stored & self._planner.gathered.keys()

    def _of(self, stored: set[int], count: int) -> Route:
        planner, graph, level = self._planner, self._graph, self._kinds.level
        last = {v: planner.gathered[v][0] for v in self._always(stored)}
        for base in planner.bases(stored):
            last.update({v: max(base.number, last.get(v, 0)) for v in base.sources & stored})
        begins = self._begins(stored, last, count)
        kept = self._always(stored) | {v for v in stored if level[v] >= begins[-1]}
        kept |= {v for v in stored for begin in begins if level[v] < begin <= last[v]}
        stretches = [Stretch(a, b) for a, b in itertools.pairwise([*begins, planner.count + 1])]
        again = [leading_to(graph, self._kinds, stored, *one, set()) for one in self.again(stored, kept)]
        work = planner.whole_flops(stored)
        work += sum(planner.call_flops(step.call) for sweep in again for step in sweep.steps)
        apart = frozenset(range(planner.count + 1))
        work += self.backward_flops(stored, apart)
        return Route(stored, kept, stretches, self._held(stored, kept, stretches, last), work, apart)

    def backward_flops(self, stored: set[int], apart: frozenset[int]) -> float:
        """The arithmetic of the sweeps of the backward pass, without what tiles read of each other."""
        total, level = 0.0, self._kinds.level
        for number in range(self._planner.count + 1):
            key = number, number in apart, frozenset(v for v in stored if level[v] <= number)
            if key not in self._flops:
                sweeps = [self._costs.sweep_of(stored, *key[:2], asks) for asks in (False, True)]
                self._flops[key] = sum(self.step_flops(sweep, step) for sweep in sweeps for step in sweep.steps)
            total += self._flops[key]
        return total

    def step_flops(self, sweep: Sweep, step: Step) -> float:
        """There and back."""
        call = self._graph.calls[step.call]
        back_alone = call.function in CONVS and not step.asks and not sweep.reads(call.outputs)
        return (2 if back_alone else 3) * self._planner.call_flops(step.call)

    def again(self, stored: set[int], kept: set[int]) -> list[tuple[int, set[int]]]:
        """Numbers of sweeps, and what they compute again."""
        found: dict[int, set[int]] = {}
        for v in stored - kept:
            found.setdefault(self._kinds.level[v], set()).add(v)
        return sorted(found.items())

    def _begins(self, stored: set[int], last: dict[int, int], count: int) -> list[int]:
        """Of so many stretches, with about as many bytes of stored values in each, and little to keep between them."""
        level, numbers = self._kinds.level, range(self._planner.count + 2)
        bytes_ = {v: bytes_of(self._graph, v) for v in stored}
        before = [sum(bytes_[v] for v in stored if level[v] < n) for n in numbers]
        live = [sum(bytes_[v] for v in stored if level[v] < n <= last[v]) for n in numbers[:-1]]
        return [0, *balanced(before, live, count)]

    def _held(self, stored: set[int], kept: set[int], stretches: list[Stretch], last: dict[int, int]) -> list[int]:
        graph, level, planner = self._graph, self._kinds.level, self._planner
        grads = {v: last[v] for v in stored & graph.needs}
        # That of a whole value waits where a strip reads the value, or a call after a later sweep. Others come and go
        # between two sweeps.
        for call in graph.calls:
            end, cut = max(level[out] for out in call.outputs), not self._kinds.dims.keys().isdisjoint(call.outputs)
            for v in call.inputs:
                if v in graph.needs and v not in self._kinds.dims and (cut or end > level[v]):
                    grads[v] = max(grads.get(v, 0), end, level[v])
        found = []
        for stretch in stretches:
            for number in range(stretch.begin, stretch.end):
                there = [v for v in stored if level[v] < number and (v in kept or level[v] >= stretch.begin)]
                found.append(sum(map(planner.kept_bytes, there)) if self._counted else 0)
                found[-1] += sum(planner.kept_bytes(v) for v, end in grads.items() if level[v] <= number <= end)
        return found

    def of_nothing_stored(self) -> Route:
        """But for what must be there as a whole."""
        return self._of(self._always(self._planner.everything_stored()), 1)
