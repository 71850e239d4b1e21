"""Predicts the memory of a backward pass: its tiles run on values without data, those that take the most."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..memory.fake import Storages, references
from ..spatial.parts import precise
from .backward import Backward
from .backward_tiles import Tiles
from .chains import run_chain
from .costs import PeakOf
from .kinds import Kinds, Region, box_shape, calls_between, is_empty, part_of, whole_region
from .plan import TilePlan
from .run import Run
from .stores import Store, extra
from .strips import NeedsWhole
from .sweeps import Number, Step, Sweep, leading_to, of_stored


@dataclasses.dataclass
class Shapes(Run):
    """A run that has shapes and no data."""

    def read(self, v: int, own: Region, of_ranks: Sequence[Region] = ()) -> Tensor:
        copies = self.outside.inputs.get(v, 0) if v in self.inputs else 1
        if not copies and not of_ranks:
            return part_of(self.kinds, v, self.graph.fakes[v], own)
        made = [self.empty(v, own) for _ in range(max(copies, 1))]
        if v not in self.inputs:
            row = math.prod(box_shape(self.graph, self.kinds, v, ((0, 1), *own[1:])))
            made.append(made[0].new_empty(extra(self.outside.store, row), dtype=torch.uint8))
        if of_ranks:
            made += self.messages(v, of_ranks)
        return made[0]

    def messages(self, v: int, of_ranks: Sequence[Region]) -> list[Tensor]:
        """What there is at most while ranks read, or give gradients back: a rank's part, and what it gets and sends."""
        rows, _, *across = of_ranks[0]
        ranges = [one[1] for one in of_ranks]
        both = [sum(self.outside.messages(self.graph, self.kinds, v, ranges, rank)) for rank in range(len(ranges))]
        part = self.outside.largest_part(self.graph, self.kinds, v)[0][1]
        return [self.empty(v, (rows, (0, size), *across)) for size in (max(both), part)]


class Predicted(Backward):
    """Of each sweep it runs one of the largest tiles; borders: others, at the border of the image."""

    def __init__(
        self, plan: TilePlan, run: Run, swaps: dict[int, Tensor], grads: dict[int, Tensor], sums: dict[int, Tensor],
        borders: bool,
    ) -> None:  # fmt: skip
        """grads, sums: those of values and those of constants in half precision that are there before."""
        super().__init__(plan, run, swaps)
        self._borders = borders
        self.grads, self._of_constants = grads, sums

    def of_sweep(self, sweep: Sweep) -> None:
        self._run_tiles(Tiles(self._plan, sweep))

    def of_calls(self, places: Sequence[int]) -> None:
        """Calls on whole values, in this order."""
        for place in places:
            outputs = (v for v in self._graph.calls[place].outputs if v in self._needs and v not in self._kinds.dims)
            self._whole.update((v, torch.empty_like(self._graph.fakes[v])) for v in outputs)
            self._between(place)

    def _own(self, v: int) -> Region:
        return whole_region(self._graph, self._kinds, v)

    def _give_back(self, v: int, regions: list[Region]) -> None:
        self._fetched.pop(v, None)
        assert isinstance(self._run, Shapes)
        self._run.messages(v, regions)

    def _grad_of_number(self, number: Number, share: Tensor) -> Tensor:
        return torch.empty_like(share)

    def some(self, tiles: Tiles) -> Sequence[tuple[int, ...]]:
        every = tiles.all()
        parts = [sorted({tile[axis] for tile in every}) for axis in range(len(every[0]))]
        most = tuple(max(some, key=lambda part: tiles.rows(axis, part)) for axis, some in enumerate(parts))
        if not self._borders:
            return [most]
        corners = [tuple(some[end] for some in parts) for end in (0, -1)]
        return [tile for tile in dict.fromkeys(corners) if tile != most]  # there padding is joined to what is read


P = TypeVar("P", bound=Predicted)


class BackwardCosts:
    """What the sweeps of a backward pass take besides the stored values and the gradients that are there before them.
    Each is looked at once.
    """

    def __init__(self, forward: TilePlan, answers: int) -> None:
        """forward: a plan of the forward pass. answers: bytes of its shares of numbers of the whole image."""
        self.graph, self.kinds, self.forward = forward.graph, forward.kinds, forward
        self._known: dict[tuple[Any, ...], int] = {}
        self._sweeps: dict[tuple[Any, ...], Sweep] = {}
        self._forms: dict[tuple[Any, ...], int] = {}
        self._form_of: dict[int, int] = {}
        self._between: dict[int, int] = {}
        graph = self.graph
        constants = {id(one): one for call in graph.calls for one in call.constants}
        sums = sum(_sum_of_gradient(one) for one in constants.values() if one.requires_grad)
        read = {v for call in graph.calls for v in call.inputs if v not in self.kinds.dims and v not in graph.inputs}
        whole = {graph.fakes[v].untyped_storage()._cdata: graph.fakes[v].untyped_storage().nbytes() for v in read}
        self.answers = answers
        self.always = sum(whole.values()) + answers + sums + graph.made
        """Bytes of what is there during the whole pass: whole values, and sums of gradients of parameters."""
        with graph.mode, torch.no_grad():
            self._swaps = {key: like(graph.mode, one) for key, one in constants.items()}
            self._grads = {v: torch.empty_like(graph.fakes[v]) for v in graph.needs if v in self.kinds.dims}
            self._sums = _sums_of_gradients(self._swaps)
            images: dict[int, Any] = {
                v: SimpleNamespace(x=graph.fakes[v].detach().requires_grad_(v in graph.needs)) for v in graph.inputs
            }
            self._run = Shapes(graph, self.kinds, set(), {}, Store("device"), inputs=images, outside=forward.outside)
            self._run.whole = {v: fake for v, fake in enumerate(graph.fakes) if v not in self.kinds.dims}
            self._run.answers = _answers(forward, self._run)
        summed = [*self._sums.values(), *(one.grad for one in self._swaps.values())]
        self._there = references([graph.fakes, self._swaps, self._run.answers, self._grads, summed])

    def of_kinds(self, kinds: Kinds) -> BackwardCosts:
        """Of the same graph, with other sweeps. What is known is shared."""
        found = copy.copy(self)
        found.kinds, found.forward, found._sweeps = kinds, dataclasses.replace(self.forward, kinds=kinds), {}
        found._form_of, found._between = {}, {}
        found._run = dataclasses.replace(self._run, kinds=kinds)
        return found

    def sweep_of(self, stored: set[int], number: int, apart: bool, asks: bool = False) -> Sweep:
        """apart: as of `TilePlan.apart`. asks: what is asked then."""
        key = number, frozenset(v for v in stored if self.kinds.level[v] <= number), apart, asks
        if key not in self._sweeps:
            self._sweeps[key] = self._found(stored, number, apart, asks)
        return self._sweeps[key]

    def _found(self, stored: set[int], number: int, apart: bool, asks: bool) -> Sweep:
        graph, kinds = self.graph, self.kinds
        asked = {
            (place, number - kinds.start[place])
            for place, call in enumerate(graph.calls)
            if kinds.start[place] <= number < kinds.done(place) and not graph.needs.isdisjoint(call.inputs)
        }
        first = of_stored(graph, kinds, stored, asked) if apart else set()
        if asks:
            return leading_to(graph, kinds, stored, number, set(), first, own=True)
        return leading_to(graph, kinds, stored, number, (stored | set(graph.results)) & graph.needs, asked - first)

    def sweep(self, stored: set[int], number: int, shares: list[Fraction], apart: bool, asks: bool) -> int:
        """The most bytes that a tile takes. shares: as of `TilePlan.tiles`. apart, asks: as of `sweep_of`."""
        sweep = self.sweep_of(stored, number, apart, asks)
        plan = dataclasses.replace(self.forward, stored=stored, tiles={number: shares})
        form, most = self.form(sweep), 0
        for borders in (False, True) if sweep.steps else ():
            which = form, *shares, borders
            if which not in self._known:
                self._known[which] = self._peak(plan, borders, lambda one: one.of_sweep(sweep))
            most = max(most, self._known[which])
        return most

    def form(self, sweep: Sweep) -> int:
        """Of a sweep of `sweep_of` a number, the same one for sweeps that take the same, as those of blocks that a
        network repeats.
        """
        if id(sweep) not in self._form_of:
            self._form_of[id(sweep)] = self._forms.setdefault(self._form(sweep), len(self._forms))
        return self._form_of[id(sweep)]

    def _form(self, sweep: Sweep) -> tuple[Any, ...]:
        graph, kinds, numbers = self.graph, self.kinds, dict[int, int]()

        def name(one: int) -> int:
            return numbers.setdefault(one, len(numbers))

        given = sweep.results | sweep.stores
        found: list[Any] = []
        for step in sweep.steps:
            call = graph.calls[step.call]
            question = sweep.number - kinds.start[step.call] if step.asks else None
            found.append((kinds.alike[step.call], question, call.history, call.autocast))
            found += [(name(v), v in graph.needs, v in sweep.sources, v in graph.inputs) for v in call.inputs]
            found += [(name(v), v in graph.needs, v in given) for v in call.outputs]
            found += [(name(-id(one)), one.requires_grad) for one in call.constants]
            found += [one.shape for one in self._run.answers.get(step.call, ())]
        return tuple(found)

    def between(self, number: int) -> int:
        """The most bytes that the calls on whole values before a sweep take."""
        if number not in self._between:
            places = calls_between(self.graph, self.kinds, number)[::-1]
            found = self._peak(self.forward, False, lambda one: one.of_calls(places)) if places else 0
            self._between[number] = found
        return self._between[number]

    def predicted(self, kind: type[P], plan: TilePlan, borders: bool = False) -> P:
        """What runs tiles on values without data."""
        with self.graph.mode, torch.no_grad():
            return kind(plan, self._run, self._swaps, self._grads, self._sums, borders)

    @contextlib.contextmanager
    def counting(self) -> Iterator[PeakOf]:
        """Counts what is made in the block."""
        graph, device = self.graph, self.graph.device
        peak = PeakOf(device.type)
        with graph.mode, Storages(peak, device, there=self._there), torch.no_grad():
            yield peak

    def _peak(self, plan: TilePlan, borders: bool, run: Callable[[Predicted], None]) -> int:
        predicted = self.predicted(Predicted, plan, borders)
        with self.counting() as peak:
            run(predicted)
        return peak.most


def _sum_of_gradient(constant: Tensor) -> int:
    """Bytes that the sum of a constant's gradients takes above that gradient, where it is asked for: not of a weight
    that the module has computed.
    """
    return constant.numel() * precise(constant.dtype).itemsize - (constant.nbytes if constant.is_leaf else 0)


def _sums_of_gradients(constants: dict[int, Tensor]) -> dict[int, Tensor]:
    """Those of half precision, by the keys of their constants. The others are those constants' `grad`."""
    found = {}
    for key, one in constants.items():
        if one.requires_grad and precise(one.dtype) != one.dtype:
            found[key] = torch.empty_like(one, dtype=precise(one.dtype))
        elif one.requires_grad:
            one.grad = torch.empty_like(one)
    return found


def like(mode: Any, constant: Tensor) -> Tensor:
    """A constant without data, as a leaf."""
    made = constant.detach()
    if not isinstance(made, FakeTensor):
        made = mode.from_tensor(made)
    return made.requires_grad_(constant.requires_grad)


def _answers(plan: TilePlan, run: Run) -> dict[int, list[Tensor]]:
    """Of each call that asks, the shares of all strips, as the forward pass has them."""
    found: dict[int, list[Tensor]] = {}
    for sweep in plan.sweeps:
        for step in sweep.steps:
            if step.asks:
                share = _share(plan, run, step, found)
                strips = sum(low < high for low, high in step.rows) * sum(not is_empty(box) for box in step.across)
                found.setdefault(step.last, []).append(share.new_empty((strips, *share.shape[1:])))
    return found


def _share(plan: TilePlan, run: Run, step: Step, answers: dict[int, list[Tensor]]) -> Tensor:
    strip = next(number for number, (low, high) in enumerate(step.rows) if low < high)
    band = next(number for number, box in enumerate(step.across) if not is_empty(box))
    reads = {v: step.read(v, strip, band) for v in step.reads}
    cut = {v: run.empty(v, region) for v, region in reads.items()}
    try:
        run_chain(
            plan.graph, plan.kinds, step, step.region(strip, band), cut, reads, run.whole.__getitem__,
            lambda place: answers.get(place, ()),
        )  # fmt: skip
    except NeedsWhole as needs:
        return needs.share
    raise AssertionError("a step that asks has an answer")
