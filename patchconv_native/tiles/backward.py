"""The backward pass of a call of `tile`: its sweeps in reverse order.

Stored values that the forward pass did not keep are computed again, for one stretch of sweeps after the other. Each
sweep is cut into tiles: parts of what it gives (results, stored values, shares of numbers of the whole image), which do
not overlap. For one tile after the other, what it gives is computed again from what is stored, with history,
and differentiated. Gradients of stored values and of images are added up at their places, always in the same order;
those of a number of the whole image become those of each tile's share of it, in the sweep that asked for it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..spatial import Range
from ..spatial.parts import precise
from .bands import AxisTiles
from .chains import run_chain
from .graph import Call, Graph
from .heap import give_back
from .kinds import Region, calls_between, on_whole, part_of, whole_region
from .plan import TilePlan
from .run import Run, from_answers, run_sweep
from .strips import Links, NeedsWhole, local_of, run_whole
from .sweeps import Number, Step, Sweep, leading_to


class _Graph:
    """What is differentiated at once: outputs with their gradients, and leaves with what takes theirs."""

    def __init__(self) -> None:
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._leaves: list[tuple[Tensor, Callable[[Tensor], None] | None]] = []

    def output(self, value: Tensor, grad: Tensor) -> None:
        if value.requires_grad:
            self._outputs.append((value, grad.to(value.dtype)))

    def leaf(self, value: Tensor, add: Callable[[Tensor], None] | None = None) -> None:
        """add: what takes its gradient. None: it is added up in `value.grad`."""
        self._leaves.append((value, add))

    def differentiate(self) -> None:
        if not self._outputs or not self._leaves:
            return
        outputs, grads = zip(*self._outputs, strict=True)
        self._outputs.clear()
        # Not autograd.grad: all gradients of weights would be there at once beside their sums.
        torch.autograd.backward(outputs, grads, inputs=[leaf for leaf, _ in self._leaves])
        del outputs, grads
        for leaf, add in self._leaves:
            if add is not None and leaf.grad is not None:
                grad, leaf.grad = leaf.grad, None
                add(grad)


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


def is_empty(region: Region) -> bool:
    return any(low >= high for low, high in region)


class Backward:
    """run: as it was after the forward pass; images whose gradients are asked for require one. swaps: for a constant of
    the graph, by its id, what is in its place. once: whether there is no other backward pass.
    """

    def __init__(self, plan: TilePlan, run: Run, swaps: dict[int, Tensor], once: bool = True) -> None:
        self.grads: dict[int, Tensor] = {}
        """Of images, of stored values and of results that are cut."""
        self._plan, self._kinds = plan, plan.kinds
        self._graph = _swapped(plan.graph, swaps)
        self._run = dataclasses.replace(run, graph=self._graph)
        asked = {v for v in run.inputs if getattr(run.inputs[v].x, "requires_grad", False)}
        self._needs = (plan.graph.needs - set(plan.graph.inputs)) | asked
        self._whole: dict[int, Tensor] = {}
        self._numbers: dict[Number, Tensor] = {}
        self._constants = {id(one): one for one in swaps.values() if one.requires_grad}
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
                for v in [v for v in self._run.stored if self._kinds.level[v] >= number and v not in self._kept]:
                    self._run.free(v)  # no sweep up to this one reads it
                self._sweep(number, results)
                give_back(self._plan)
                for place in reversed(calls_between(self._graph, self._kinds, number)):
                    self._between(place)

    def _sweep(self, number: int, results: set[int]) -> None:
        graph, kinds = self._graph, self._kinds
        stores = {v for v in self._plan.stored if kinds.level[v] == number and v in self.grads}
        asked = {(place, n) for place, n in self._numbers if kinds.start[place] + n == number}
        sweep = leading_to(graph, kinds, self._plan.stored, number, results | stores, asked)
        if sweep.steps:
            self._run_tiles(Tiles(self._plan, sweep))
        for v in stores | (results & set(sweep.results)):
            self.grads.pop(v, None)
        for one in asked:
            del self._numbers[one]

    def _run_tiles(self, tiles: Tiles) -> None:
        for tile in self._some(tiles):
            self._tile(tiles, tile)

    def _some(self, tiles: Tiles) -> Sequence[tuple[int, ...]]:
        """Those that are run."""
        return tiles.all()

    def _tile(self, tiles: Tiles, tile: tuple[int, ...]) -> None:
        """One tile, forward with history and back."""
        sweep, found = tiles.sweep, _Graph()
        there: dict[int, tuple[Tensor, Region]] = {}
        with torch.enable_grad():
            for v in sweep.sources:
                region = tiles.source(v, tile)
                if region is not None:
                    there[v] = self._source(found, v, region), region
            wholes: dict[int, Tensor] = {}
            for place, step in enumerate(sweep.steps):
                if not is_empty(tiles.made(place, tile)):
                    self._step(tiles, tile, place, there, wholes, found)
                for v in [v for v in step.reads if sweep.last_read[v] == place]:
                    there.pop(v, None)
            there.clear()
            self._add_constants(found, sweep.steps)
        found.differentiate()

    def _step(
        self, tiles: Tiles, tile: tuple[int, ...], place: int, there: dict[int, tuple[Tensor, Region]],
        wholes: dict[int, Tensor], found: _Graph,
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
        links = Links(number[1] if step.asks else None, self._is_asked(step.call))
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
                    found.output(part_of(kinds, v, local, own, region), part_of(kinds, v, self.grads[v], own))

    def _between(self, place: int) -> None:
        """A call that was computed on whole values, or from numbers of the whole image."""
        call, kinds, found = self._graph.calls[place], self._kinds, _Graph()
        grads = {v: self._whole.pop(v) for v in call.outputs if v in self._whole}
        if not grads:
            return
        with torch.enable_grad():
            wholes = {v: self._whole_leaf(found, v) for v in call.inputs if v not in kinds.dims}
            if on_whole(self._graph, kinds, place):
                for v in [v for v in call.inputs if v in kinds.dims]:
                    wholes[v] = self._source(found, v, whole_region(self._graph, kinds, v))
                if call.writes:
                    wholes[call.inputs[0]] = wholes[call.inputs[0]].clone()
                results = run_whole(_moving_nothing(call), wholes.__getitem__)
            else:
                links = Links(wanted=self._is_asked(place))
                results = from_answers(dataclasses.replace(self._run, whole=wholes), place, links=links)
                self._add_links(found, place, links)
            for v, result in zip(call.outputs, results, strict=True):
                if v in grads:
                    found.output(local_of(result), grads[v])
            del results, result, wholes
            self._add_constants(found, [Step(place, [], False)])
        found.differentiate()

    # Leaves.

    def _source(self, found: _Graph, v: int, region: Region) -> Tensor:
        """A part of an image or of a stored value."""
        part = self._run.read(v, region).detach()
        if v in self._needs:
            found.leaf(part.requires_grad_(), lambda grad: self._add(v, region, grad))
        return part

    def _whole_leaf(self, found: _Graph, v: int) -> Tensor:
        value = self._run.whole[v].detach()
        if v in self._needs:
            found.leaf(value.requires_grad_(), lambda grad: _accumulate(self._whole, v, grad))
        return value

    def _add_links(self, found: _Graph, place: int, links: Links) -> None:
        for question, leaf in links.leaves.items():
            found.leaf(leaf, functools.partial(_accumulate, self._numbers, (place, question)))

    def _add_constants(self, found: _Graph, steps: Iterable[Step]) -> None:
        some = {id(one): one for step in steps for one in self._graph.calls[step.call].constants}
        for key, one in some.items():
            if key in self._constants:
                half = precise(one.dtype) != one.dtype
                found.leaf(one, functools.partial(_accumulate, self._of_constants, key) if half else None)

    def _grad_of_number(self, number: Number, share: Tensor) -> Tensor:
        """Of a tile's share of it."""
        return self._numbers[number]

    def _is_asked(self, place: int) -> bool:
        """Whether the gradients of a call's arguments are needed, and with them those of its numbers."""
        return not self._needs.isdisjoint(self._graph.calls[place].inputs)

    def _add(self, v: int, region: Region, grad: Tensor) -> None:
        """To the gradient of a part of an image or of a stored value."""
        if v not in self.grads:
            image = self._run.inputs.get(v)
            whole = whole_region(self._graph, self._kinds, v)
            self.grads[v] = (self._run.empty(v, whole) if image is None else torch.empty_like(image.x)).zero_()
        into = part_of(self._kinds, v, self.grads[v], region)
        into.add_(grad.to(into.device))


def _accumulate(found: dict[Any, Tensor], key: Any, grad: Tensor) -> None:
    """Sums over tiles; of half precision in float32."""
    if key in found:
        found[key].add_(grad)
    else:
        found[key] = grad.to(precise(grad.dtype), copy=True)


def _moving_nothing(call: Call) -> Call:
    """The call, with copies of the running statistics that it has moved in the forward pass."""
    copies = {id(one): one.clone() for one in call.moved}
    return _with(call, copies) if copies else call


def _with(call: Call, swaps: dict[int, Tensor]) -> Call:
    """The call with other constants, by the ids of its own."""
    args, kwargs = tree_map_only(Tensor, lambda one: swaps.get(id(one), one), (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs, in_place=None)


def _swapped(graph: Graph, swaps: dict[int, Tensor]) -> Graph:
    return dataclasses.replace(graph, calls=[_with(call, swaps) for call in graph.calls])
