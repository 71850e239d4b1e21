"""About what a tile of a backward pass takes: put together of what each of its steps takes alone, there and back.

A planner compares many tiles this way. Those that it chooses it runs on values without data (backward_costs.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..memory.fake import references
from .backward import Differentiated
from .backward_costs import BackwardCosts, Predicted
from .backward_tiles import Tiles
from .costs import PeakOf, part_bytes
from .graph import Graph
from .kinds import Kinds, Region, is_empty
from .sweeps import Step, Sweep


@dataclass
class StepCost:
    """Bytes that a step takes alone. Arguments and results are named by their places among `values_of`."""

    forward: float
    """The most, above its arguments."""
    keeps: float
    """For the way back, besides arguments and results."""
    kept: list[int]
    """The arguments and results that it keeps."""
    views: dict[int, int]
    """Of results that are views: of which argument."""
    back: float
    """The most on the way back, above what is there before."""
    sums: int
    """Of that, what does not depend on a tile's size: gradients of constants."""
    given: int
    """Gradients of whole values and of numbers of the image. They are there until the tile is done."""

    def times(self, part: float) -> StepCost:
        """That of a part so many times larger."""
        back = self.sums + part * (self.back - self.sums)
        return StepCost(self.forward * part, self.keeps * part, self.kept, self.views, back, self.sums, self.given)


def values_of(graph: Graph, kinds: Kinds, step: Step, there: dict[int, Region]) -> list[int]:
    """The cut arguments and results of a step."""
    made = [] if step.asks else [v for v in graph.calls[step.call].outputs if v in kinds.dims]
    return [*(v for v in step.reads if v in there), *made]


class _Made(torch.autograd.Function):
    """What another step has made."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, made: Callable[[], Tensor]) -> Tensor:
        return made()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("gradients are asked for up to here")


class _Alone(Predicted):
    """Runs single steps of tiles."""

    def step(self, tiles: Tiles, tile: tuple[int, ...], place: int, there: dict[int, Region], peak: PeakOf) -> StepCost:
        """there: what there is of values. peak: counts from here on."""
        step, found = tiles.sweep.steps[place], Differentiated()
        names = values_of(self._graph, self._kinds, step, there)
        with torch.enable_grad():
            values = {v: (self._argument(v, there[v]), there[v]) for v in step.reads if v in there}
            wanted: list[Any] = [get_gradient_edge(x) for x, _ in values.values() if x.requires_grad]
            before = peak.most = peak.now
            self._step(tiles, tile, place, values, {}, found)
        forward, given = peak.most - before, sum(leaf.nbytes for leaf, _ in found.leaves)
        self._add_constants(found, [step])
        wanted += [leaf for leaf, _ in found.leaves]
        memory = [next(iter(references([values[v][0]]).items())) for v in names]
        sizes = [values[v][0].untyped_storage().nbytes() for v in names]
        first = {one: n for n, (one, _) in reversed([*enumerate(memory)])}
        made = [values[v][0] for v in names if v not in step.reads and values[v][0].requires_grad]
        ends: list[Any] = [(get_gradient_edge(x), torch.empty_like(x)) for x in made]
        ends += found.outputs if step.asks else []
        for one in (values, made, found.outputs):
            one.clear()
        outputs, grads = [end for end, _ in ends], [grad for _, grad in ends]
        base = peak.most = peak.now
        kept = [n for n in first.values() if memory[n][1]() is not None]
        keeps = base - sum(grad.nbytes for grad in grads) - sum(sizes[n] for n in kept)
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
        views = {n: first[one] for n, (one, _) in enumerate(memory) if first[one] < n}
        sums = sum(leaf.nbytes for leaf, _ in found.leaves) - given
        return StepCost(forward, keeps, kept, views, peak.most - base, sums, given)

    def _argument(self, v: int, region: Region) -> Tensor:
        made = functools.partial(self._run.empty, v, region)
        return _Made.apply(torch.empty((), requires_grad=True), made) if v in self._needs else made()


class _Memory:
    """What there is while a tile is computed and differentiated. Values that are views share their memory."""

    def __init__(self, graph: Graph, kinds: Kinds, sweep: Sweep) -> None:
        self._graph, self._kinds, self._sweep = graph, kinds, sweep
        self.now = self.most = 0.0
        self.there: dict[int, Region] = {}
        self._owner: dict[int, int] = {}
        """Of each value, the one whose memory it has."""
        self._sizes: dict[int, float] = {}
        """Of these memories."""
        self._holders: Counter[int] = Counter()
        self._kept: dict[int, list[int]] = {}
        """Of each step, the memories that it keeps."""
        self._grads: dict[int, float] = {}

    def make(self, v: int, region: Region, size: float | None = None, of: int | None = None) -> None:
        """size: of what is copied where it is read. of: the value of which it is a view."""
        self.there[v], self._owner[v] = region, v if of is None else self._owner[of]
        if of is None:
            self._sizes[v] = self._bytes(v) if size is None else size
            self.now += self._sizes[v]
        self._holders[self._owner[v]] += 1

    def _bytes(self, v: int) -> int:
        return part_bytes(self._graph, self._kinds, v, self.there[v])

    def drop(self, v: int) -> None:
        owner = self._owner[v]
        self._holders[owner] -= 1
        if not self._holders[owner]:
            self.now -= self._sizes[owner]

    def forward(self, place: int, made: Region, cost: StepCost) -> None:
        step = self._sweep.steps[place]
        self.most = max(self.most, self.now + cost.forward)
        names = values_of(self._graph, self._kinds, step, self.there)
        for n, v in enumerate(names):
            if v not in step.reads:
                self.make(v, made, of=names[cost.views[n]] if n in cost.views else None)
        self._kept[place] = [self._owner[names[n]] for n in cost.kept]
        self._holders.update(self._kept[place])
        self.now += cost.keeps
        self._done_with(place, step, names)

    def _done_with(self, place: int, step: Step, names: list[int]) -> None:
        """Drops what no later step reads. Results that the sweep gives are there until the end."""
        sweep = self._sweep
        for v in names:
            given = v in sweep.results | sweep.stores
            if sweep.last_read.get(v, place) == place and not (given and v not in sweep.sources):
                self.drop(v)

    def back(self, place: int, cost: StepCost, needs: set[int]) -> None:
        step, graph = self._sweep.steps[place], self._graph
        given = self._sweep.results | self._sweep.stores
        made = [] if step.asks else graph.calls[step.call].outputs
        if step.asks or any(v in self._grads or v in given for v in made):
            self.most = max(self.most, self.now + cost.back)
            for v in (v for v in step.reads if v in needs and v in self.there):
                size = self._bytes(v)
                if v in self._grads:
                    self.most = max(self.most, self.now + size)  # both are there while they are added
                else:
                    self._grads[v] = size
                    self.now += size
            self.now += cost.given - sum(self._grads.pop(v, 0) for v in made)
        self.now -= cost.keeps
        for v in self._kept[place]:
            self.drop(v)


_Known = dict[tuple[Any, ...], tuple[int, StepCost]]


class Estimates:
    """Of the sweeps of one graph."""

    def __init__(self, costs: BackwardCosts, known: _Known | None = None) -> None:
        """known: of other sweeps of the same graph."""
        self._costs, self._graph, self._kinds = costs, costs.graph, costs.kinds
        self._alone = costs.predicted(_Alone, costs.forward)
        self._known: _Known = {} if known is None else known
        self._sweeps: dict[tuple[Any, ...], int] = {}

    def of_costs(self, costs: BackwardCosts) -> Estimates:
        """Of the same graph with other sweeps. What is known of steps is shared."""
        return Estimates(costs, self._known)

    def sweep(self, stored: set[int], number: int, shares: list[Fraction], apart: bool, asks: bool) -> int:
        """About what `BackwardCosts.sweep` finds."""
        sweep = self._costs.sweep_of(stored, number, apart, asks)
        if not sweep.steps:
            return 0
        key = self._costs.form(sweep), *shares
        if key not in self._sweeps:
            plan = dataclasses.replace(self._costs.forward, stored=stored, tiles={number: shares})
            self._sweeps[key] = self._tile(Tiles(plan, sweep))
        return self._sweeps[key]

    def _tile(self, tiles: Tiles) -> int:
        """One of the largest, in the middle of the image."""
        sweep = tiles.sweep
        memory = _Memory(self._graph, self._kinds, sweep)
        (tile,) = self._alone.some(tiles)
        for v in sorted(sweep.sources):
            region = tiles.source(v, tile)
            if region is not None:
                memory.make(v, region, self._read(v, region))
        costs = {}
        for place in range(len(sweep.steps)):
            made = tiles.made(place, tile)
            if not is_empty(made):
                costs[place] = self._cost(tiles, tile, place, memory.there)
                memory.forward(place, made, costs[place])
        for place in reversed(costs):
            memory.back(place, costs[place], self._graph.needs)
        return math.ceil(memory.most)

    def _read(self, v: int, region: Region) -> int:
        graph, kinds, outside = self._graph, self._kinds, self._costs.forward.outside
        found = part_bytes(graph, kinds, v, region) * (outside.inputs.get(v, 0) if v in graph.inputs else 1)
        if outside.shared is not None:  # a rank's part, and what it gets and sends
            found += 2 * part_bytes(graph, kinds, v, (region[0], *outside.largest_part(graph, kinds, v)))
        return found

    def _cost(self, tiles: Tiles, tile: tuple[int, ...], place: int, there: dict[int, Region]) -> StepCost:
        """Known of parts of about this size."""
        step, region, kinds = tiles.sweep.steps[place], tiles.made(place, tile), self._kinds
        call = self._graph.calls[step.call]
        places = math.prod(b - a for a, b in region)
        key: list[Any] = [kinds.alike[step.call], call.history, round(math.log2(places))]
        key.append(tiles.sweep.number - kinds.start[step.call] if step.asks else tiles.sweep.reads(call.outputs))
        key += [v in self._graph.needs for v in call.inputs]
        key += [tiles.reads(place, v, tile) == there.get(v) for v in step.reads]
        key += [one.requires_grad for one in call.constants]
        ends = zip(kinds.axes, region, tiles.sizes(place), strict=True)
        key += [one.fetches[step.call] and (a == 0 or b == size) for one, (a, b), size in ends]
        which = tuple(key)
        if which not in self._known:
            with self._costs.counting() as peak:
                self._known[which] = places, self._alone.step(tiles, tile, place, there, peak)
        of, cost = self._known[which]
        return cost.times(places / of)
