"""The backward pass of a call of `tile`: its sweeps in reverse order.

Stored values that the forward pass did not keep are computed again, for one stretch of sweeps after the other. Each
sweep is cut into tiles: parts of what it gives (results, stored values, shares of numbers of the whole image), which do
not overlap. For one tile after the other, what it gives is computed again from what is stored, with history,
and differentiated. Gradients of stored values and of images are added up at their places, always in the same order;
those of a number of the whole image become those of each tile's share of it, in the sweep that asked for it.

Of an image that ranks share, each goes through tiles of its own, in step with the others. What a tile reads of other
ranks' parts is fetched, and its gradient goes back. Gradients of what is the same on every rank are summed after a
sweep, those of parameters in the end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..spatial.parts import precise
from .backward_tiles import Tiles
from .chains import run_chain
from .draws import as_noted
from .graph import Call, Graph
from .heap import give_back
from .kinds import Region, calls_between, is_empty, on_whole, part_of
from .plan import TilePlan
from .run import Run, from_answers
from .run_sweep import run_sweep
from .shared import Shared
from .strips import Links, NeedsWhole, local_of, run_whole
from .sweeps import Number, Step, Sweep, leading_to, of_stored


class Differentiated:
    """What is differentiated at once: outputs with their gradients, and leaves with what takes theirs."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Tensor, Tensor]] = []
        self.leaves: list[tuple[Tensor, Callable[[Tensor], None] | None]] = []

    def output(self, value: Tensor, grad: Tensor) -> None:
        if value.requires_grad:
            self.outputs.append((value, grad.to(value.dtype)))

    def leaf(self, value: Tensor, add: Callable[[Tensor], None] | None = None) -> None:
        """add: what takes its gradient. None: it is added up in `value.grad`."""
        self.leaves.append((value, add))

    def differentiate(self) -> None:
        if not self.outputs or not self.leaves:
            return
        outputs, grads = zip(*self.outputs, strict=True)
        self.outputs.clear()
        added = [leaf for leaf, add in self.leaves if add is None and leaf.grad is None]
        # Not autograd.grad: all gradients of weights would be there at once beside their sums.
        torch.autograd.backward(outputs, grads, inputs=[leaf for leaf, _ in self.leaves])
        del outputs, grads
        for leaf, add in self.leaves:
            if add is not None and leaf.grad is not None:
                grad, leaf.grad = leaf.grad, None
                add(grad)
        for leaf in added:  # torch keeps views as they are, also of what another one's gradient is a view of
            if leaf.grad is not None:
                leaf.grad = leaf.grad.clone()


class Backward:
    """run: as it was after the forward pass; images whose gradients are asked for require one. swaps: for a constant of
    the graph, by its id, what is in its place. once: whether there is no other backward pass.
    """

    def __init__(self, plan: TilePlan, run: Run, swaps: dict[int, Tensor], once: bool = True) -> None:
        self.grads: dict[int, Tensor] = {}
        """Of images, of stored values and of results that are cut."""
        self._plan, self._kinds = plan, plan.kinds
        self._graph = swapped(plan.graph, swaps)
        self._run = dataclasses.replace(run, graph=self._graph)
        asked = {v for v in run.inputs if getattr(run.inputs[v].x, "requires_grad", False)}
        self._needs = (plan.graph.needs - set(plan.graph.inputs)) | asked
        self._whole: dict[int, Tensor] = {}
        self._numbers: dict[Number, Tensor] = {}
        self._asked: dict[Number, Tensor] = {}
        """Of numbers of the whole image that this sweep gives its shares of: their gradients."""
        self._shared = plan.outside.shared
        self._constants = {id(one): one for one in swaps.values() if one.requires_grad}
        self._fetched: dict[int, Tensor] = {}
        """Of what a tile has fetched of other ranks, the gradients."""
        self._of_constants: dict[int, Tensor] = {}
        """The sums of gradients of half precision; the others are those constants' `grad`."""
        self._kept = set() if once else set(run.stored)

    def of_constant(self, constant: Tensor) -> Tensor | None:
        found = self._of_constants.get(id(constant), constant.grad)
        return None if found is None else found.to(constant.dtype)

    @torch.no_grad()
    def run(self, grads: dict[int, Tensor]) -> None:
        """grads: of the results, by their numbers."""
        for v, grad in grads.items():
            if v in self._kinds.dims:
                self.grads[v] = grad
            else:
                _accumulate(self._whole, v, grad)
        results = set(grads)
        for stretch in reversed(self._plan.stretches):
            for sweep in stretch.again:
                run_sweep(self._run, sweep, lambda: None)
                give_back(self._plan)
            for number in reversed(range(stretch.begin, stretch.end)):
                if number in self._plan.apart:
                    self._ask_stored(number)
                for v in [v for v in self._run.stored if self._kinds.level[v] >= number and v not in self._kept]:
                    self._run.free(v)  # no sweep up to this one reads it
                self._sweep(number, results)
                give_back(self._plan)
                for place in reversed(calls_between(self._graph, self._kinds, number)):
                    self._between(place)
        if self._shared is not None:
            self._sum_of_constants(self._shared)

    def _asked_of(self, number: int) -> set[Number]:
        """The numbers of the whole image of this sweep whose gradients are there."""
        return {(place, n) for place, n in self._numbers if self._kinds.start[place] + n == number}

    def _ask_stored(self, number: int) -> None:
        """Differentiates a sweep's shares of numbers that are of stored values alone. Nothing is computed again."""
        asked = of_stored(self._graph, self._kinds, self._run.stored, self._asked_of(number))
        if asked:
            self._asked = {one: self._numbers.pop(one) for one in asked}
            self._run_sweep(leading_to(self._graph, self._kinds, self._plan.stored, number, set(), asked, own=True))

    def _sweep(self, number: int, results: set[int]) -> None:
        graph, kinds = self._graph, self._kinds
        stores = {v for v in self._plan.stored if kinds.level[v] == number and v in self.grads}
        asked = self._asked_of(number)
        self._asked = {one: self._numbers.pop(one) for one in asked}
        sweep = leading_to(graph, kinds, self._plan.stored, number, results | stores, asked)
        self._run_sweep(sweep)
        for v in stores | (results & set(sweep.results)):
            self.grads.pop(v, None)

    def _run_sweep(self, sweep: Sweep) -> None:
        if sweep.steps and self._shared is None:
            self._run_tiles(Tiles(self._plan, sweep))
        elif sweep.steps:
            whole, numbers, self._whole, self._numbers = self._whole, self._numbers, {}, {}
            self._run_tiles(Tiles(self._plan, sweep))
            self._sum_of_ranks(sweep)
            for old, new in ((whole, self._whole), (numbers, self._numbers)):
                for key, grad in new.items():
                    _accumulate(old, key, grad)
            self._whole, self._numbers = whole, numbers
        self._asked = {}

    def _run_tiles(self, tiles: Tiles) -> None:
        for tile in self.some(tiles):
            self._tile(tiles, tile)

    def some(self, tiles: Tiles) -> Sequence[tuple[int, ...]]:
        """Those that are run."""
        return tiles.all() if self._shared is None else tiles.of_rank(self._shared)

    def _tile(self, tiles: Tiles, tile: tuple[int, ...]) -> None:
        """One tile, forward with history and back."""
        sweep, found = tiles.sweep, Differentiated()
        there: dict[int, tuple[Tensor, Region]] = {}
        fetched: dict[int, list[Region]] = {}
        with torch.enable_grad():
            for v in sorted(sweep.sources):
                own, of_ranks = tiles.source(v, tile), []
                if self._shared is not None:
                    of_ranks = tiles.of_ranks(v, tile, self._shared)
                    own = of_ranks[tiles.rank_of(tile, self._shared)] if of_ranks else None
                if own is None:
                    continue
                there[v] = self._source(found, v, own, of_ranks), own
                if of_ranks and v in self._needs:
                    fetched[v] = of_ranks
            wholes: dict[int, Tensor] = {}
            for place, step in enumerate(sweep.steps):
                if not is_empty(tiles.made(place, tile)):
                    self._step(tiles, tile, place, there, wholes, found)
                for v in [v for v in step.reads if sweep.last_read[v] == place]:
                    there.pop(v, None)
            there.clear()
            self._add_constants(found, sweep.steps)
        found.differentiate()
        for v, regions in fetched.items():
            self._give_back(v, regions)

    def _step(
        self, tiles: Tiles, tile: tuple[int, ...], place: int, there: dict[int, tuple[Tensor, Region]],
        wholes: dict[int, Tensor], found: Differentiated,
    ) -> None:  # fmt: skip
        graph, kinds, step = self._graph, self._kinds, tiles.sweep.steps[place]
        call, region = graph.calls[step.call], tiles.made(place, tile)
        cut, reads = {}, {}
        for v in step.reads:
            reads[v] = one = tiles.reads(place, v, tile)
            cut[v] = self._run.empty(v, one) if is_empty(one) else part_of(kinds, v, there[v][0], one, there[v][1])

        def whole(v: int) -> Tensor:
            if v not in wholes:
                wholes[v] = self._whole_leaf(found, v)
            return wholes[v]

        number = step.call, tiles.sweep.number - kinds.start[step.call]
        unread = not step.asks and not tiles.sweep.reads(call.outputs)
        links = Links(number[1] if step.asks else None, self._is_asked(step.call), unread)
        try:
            results = run_chain(
                graph, kinds, step, region, cut, reads, whole, lambda place: self._run.answers.get(place, ()),
                links=links,
            )  # fmt: skip
        except NeedsWhole as needs:
            if not step.asks:
                raise
            found.output(needs.share, self._grad_of_number(number, needs.share))
            results = []
        self._add_links(found, step.call, links)
        for v, result in zip(call.outputs, results if not step.asks else (), strict=not step.asks):
            if v not in kinds.dims:
                continue
            local = local_of(result)
            there[v] = local, region
            if v in tiles.sweep.results | tiles.sweep.stores:
                own = tiles.own(v, tile)
                if not is_empty(own):
                    found.output(part_of(kinds, v, local, own, region), self._grad_at(v, own))

    def _between(self, place: int) -> None:
        """A call that was computed on whole values, or from numbers of the whole image."""
        call, kinds, found = self._graph.calls[place], self._kinds, Differentiated()
        grads = {v: self._whole.pop(v) for v in call.outputs if v in self._whole}
        if not grads:
            return
        with torch.enable_grad():
            wholes = {v: self._whole_leaf(found, v) for v in call.inputs if v not in kinds.dims}
            if on_whole(self._graph, kinds, place):
                for v in [v for v in call.inputs if v in kinds.dims]:
                    wholes[v] = self._whole_source(found, v)
                if call.writes:
                    wholes[call.inputs[0]] = wholes[call.inputs[0]].clone()
                with as_noted(self._run.drawn.get(place, ())):
                    results = run_whole(_moving_nothing(call), wholes.__getitem__)
            else:
                links = Links(wanted=self._is_asked(place))
                results = from_answers(dataclasses.replace(self._run, whole=wholes), place, links=links)
                self._add_links(found, place, links)
            for v, result in zip(call.outputs, results, strict=True):
                if v in grads:
                    found.output(local_of(result), grads[v])
            del results, result, wholes
            if self._shared is None or self._shared.index == 0:  # every rank computes the same
                self._add_constants(found, [Step(place, [], False)])
        found.differentiate()

    # Leaves.

    def _source(self, found: Differentiated, v: int, own: Region, of_ranks: Sequence[Region]) -> Tensor:
        """A part of an image or of a stored value. of_ranks: as of `Run.read`."""
        part = self._run.read(v, own, of_ranks).detach()
        if v in self._needs and self._shared is None:
            found.leaf(part.requires_grad_(), lambda grad: self._add(v, own, grad))
        elif v in self._needs:
            found.leaf(part.requires_grad_(), functools.partial(self._fetched.__setitem__, v))
        return part

    def _whole_source(self, found: Differentiated, v: int) -> Tensor:
        """All of an image or of a stored value, on every rank."""
        value = self._run.read_whole(v).detach()
        if v in self._needs:  # the gradient is the same on every rank
            own = self._own(v)
            found.leaf(value.requires_grad_(), lambda grad: self._add(v, own, part_of(self._kinds, v, grad, own)))
        return value

    def _whole_leaf(self, found: Differentiated, v: int) -> Tensor:
        value = self._run.whole[v].detach()
        if v in self._needs:
            found.leaf(value.requires_grad_(), lambda grad: _accumulate(self._whole, v, grad))
        return value

    def _add_links(self, found: Differentiated, place: int, links: Links) -> None:
        for question, leaf in links.leaves.items():
            found.leaf(leaf, functools.partial(_accumulate, self._numbers, (place, question)))

    def _add_constants(self, found: Differentiated, steps: Iterable[Step]) -> None:
        some = {id(one): one for step in steps for one in self._graph.calls[step.call].constants}
        for key, one in some.items():
            if key in self._constants:
                half = precise(one.dtype) != one.dtype
                found.leaf(one, functools.partial(_accumulate, self._of_constants, key) if half else None)

    def _grad_of_number(self, number: Number, share: Tensor) -> Tensor:
        """Of a tile's share of it."""
        return self._asked[number]

    def _is_asked(self, place: int) -> bool:
        """Whether the gradients of a call's arguments are needed, and with them those of its numbers."""
        return not self._needs.isdisjoint(self._graph.calls[place].inputs)

    def _add(self, v: int, region: Region, grad: Tensor) -> None:
        """To the gradient of a part of an image or of a stored value."""
        into = self._grad_at(v, region)
        into.add_(grad.to(into.device))

    def _grad_at(self, v: int, region: Region) -> Tensor:
        """The gradient of a part of a value; zeros, where nothing was added yet."""
        if v not in self.grads:
            image = self._run.inputs.get(v)
            self.grads[v] = (self._run.empty(v, self._own(v)) if image is None else torch.empty_like(image.x)).zero_()
        return part_of(self._kinds, v, self.grads[v], region, self._own(v))

    # Ranks.

    def _own(self, v: int) -> Region:
        """What there is of a value's gradient: all, or of an image that ranks share this one's part."""
        return self._run.own_region(v)

    def _give_back(self, v: int, regions: list[Region]) -> None:
        """Adds gradients of what a tile has fetched where it came from. regions: what each rank's tile has fetched."""
        assert self._shared is not None
        rows, _, *across = regions[0]
        into = self._grad_at(v, (rows, self._own(v)[1], *across))
        mine = regions[self._shared.index]
        grad = self._fetched.pop(v, None)
        if grad is None:
            grad = self._run.empty(v, mine).zero_()
        self._run.give_back(v, grad, regions, into)

    def _sum_of_ranks(self, sweep: Sweep) -> None:
        """Adds up what the ranks' tiles have found of values and numbers of the whole image."""
        assert self._shared is not None
        calls = [step.call for step in sweep.steps]
        whole = sorted({v for place in calls for v in self._graph.calls[place].inputs} - self._kinds.dims.keys())
        numbers = [(place, question) for place in calls for question in range(self._kinds.questions[place])]
        device = self._graph.device
        self._shared.sum(self._whole, whole, device)
        self._shared.sum(self._numbers, numbers, device)

    def _sum_of_constants(self, shared: Shared) -> None:
        found = {}
        for key, one in self._constants.items():
            grad = self._of_constants.get(key, one.grad)
            if grad is not None:
                found[key] = grad
        shared.sum(found, [*self._constants], self._graph.device)
        self._of_constants = found


def _accumulate(found: dict[Any, Tensor], key: Any, grad: Tensor) -> None:
    """Sums over tiles; of half precision in float32."""
    if key in found:
        found[key].add_(grad)
    else:
        found[key] = grad.to(precise(grad.dtype), copy=True)


def _moving_nothing(call: Call) -> Call:
    """The call, with copies of the running statistics that it has moved in the forward pass."""
    copies = {id(one): one.clone() for one in call.moved}
    return call.with_constants(copies) if copies else call


def swapped(graph: Graph, swaps: dict[int, Tensor]) -> Graph:
    """The graph with other constants, by the ids of its own."""
    return dataclasses.replace(graph, calls=[call.with_constants(swaps) for call in graph.calls])
