"""Runs a recorded module, sweep by sweep and strip by strip."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..spatial import Range
from ..spatial.layout import cut_out, in_layout_of, layout
from ..spatial.norms import TRACKING
from .arrays import Sink, Source
from .draws import moved, sources_of
from .graph import Call, Graph
from .kinds import (
    Kinds,
    Region,
    Time,
    axes_at,
    box_shape,
    calls_between,
    is_empty,
    on_whole,
    part_of,
    whole_region,
)  # fmt: skip
from .outside import Outside
from .rows import Take
from .shared import along
from .stores import Kept, Store
from .strips import Asked, Links, local_of, part_cuts, run_part, run_whole
from .sweeps import Sweep
from .transfers import Transfers


@dataclass
class Run:
    """What is there during a call."""

    graph: Graph
    kinds: Kinds
    read_later: set[int]
    """Stored values that a sweep reads after a call has got them whole."""
    results: dict[int, Sink]
    """Cut values that are results, each as large as the whole, to be written into."""
    store: Store
    whole: dict[int, Tensor] = field(default_factory=dict)
    stored: dict[int, list[Kept]] = field(default_factory=dict)
    """Of each stored value, its rows in each band; of an image that is shared, in each of this rank's."""
    own: dict[int, list[Region]] = field(default_factory=dict)
    """Of each stored value, these bands."""
    answers: dict[int, list[Tensor]] = field(default_factory=dict)
    moved: dict[int, list[Tensor]] = field(default_factory=dict)
    """By how much calls on whole values move running statistics that others, which are computed in strips, move too."""
    drawn: dict[int, list[Any]] = field(default_factory=dict)
    """Of calls on whole values that drew random numbers, the generators as they were before, for backward."""
    inputs: dict[int, Source] = field(default_factory=dict)
    outside: Outside = field(default_factory=lambda: Outside("device"))
    transfers: Transfers | None = None
    """What copies while strips are computed, as `outside` says."""

    def again(
        self, images: dict[int, Any], stored: dict[int, list[Kept]], whole: dict[int, Tensor],
        answers: dict[int, list[Tensor]],
    ) -> Run:  # fmt: skip
        """The same, with what was taken out of it."""
        device = self.graph.device
        inputs = {v: Source("tile", image, device) for v, image in images.items()}
        return replace(self, inputs=inputs, stored=stored, whole=whole, answers=answers, transfers=None)

    def bands(self, sweep: Sweep) -> range:
        """Those that are computed here."""
        shared = self.outside.shared
        return range(sweep.bands) if shared is None else shared.bands(sweep.bands)

    def peers(self, sweep: Sweep, band: int) -> list[int]:
        """The bands that are computed at the same time: one on each rank."""
        shared = self.outside.shared
        return [band] if shared is None else shared.peers(sweep.bands, band)

    def where(self, v: int, region: Region) -> dict[int, Range]:
        """In an image or a result: of one that is shared, in the rank's part."""
        found = {one.dims[v]: part for one, part in zip(self.kinds.axes, region, strict=True)}
        shared = self.outside.shared
        if shared is not None:
            dim, first = self.kinds.others[0].dims[v], shared.part(self._cuts(v))[0]
            found[dim] = found[dim][0] - first, found[dim][1] - first
        return found

    def own_region(self, v: int) -> Region:
        """What there is here of an image, or of a value that is kept."""
        rows, *across = whole_region(self.graph, self.kinds, v)
        if self.outside.shared is not None:
            across[0] = self.outside.shared.part(self._cuts(v))
        return rows, *across

    def give_back(self, v: int, grad: Tensor, regions: Sequence[Region], into: Tensor) -> None:
        """The way back of `read`, of an image that is shared: adds gradients of what each rank has read."""
        shared = self.outside.shared
        assert shared is not None
        ranges = [along(one) for one in regions]
        shared.give_back(grad, self.kinds.others[0].dims[v], self._cuts(v), ranges, into)

    def _cuts(self, v: int) -> tuple[int, ...]:
        """Where an image or a value that is kept is cut between ranks."""
        assert self.outside.shared is not None
        if v in self.inputs:
            return self.outside.shared.given[self.graph.inputs.index(v)]
        return self.outside.shared.cuts(self.graph.fakes[v].size(self.kinds.others[0].dims[v]))

    def copies(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The block in which sweeps run."""
        if not self.outside.ahead:
            return contextlib.nullcontext()
        self.transfers = Transfers(device, self.fill, self.empty)
        return self.transfers

    def read(self, v: int, own: Region, of_ranks: Sequence[Region] = ()) -> Tensor:
        """A part of an image or of a stored value. of_ranks: of one that is shared, what each rank reads then."""
        shared = self.outside.shared
        there = next((one for one in of_ranks or [own] if not is_empty(one)), None)
        if there is None:
            return self.empty(v, own)  # for what reads nothing but padding
        if shared is None:
            return self._read(v, own)
        cuts, (rows, _, *across) = self._cuts(v), there
        found = shared.fetch(
            self._read(v, (rows, shared.part(cuts), *across)), self.kinds.others[0].dims[v], cuts,
            [along(one) for one in of_ranks],
        )  # fmt: skip
        return self.empty(v, own) if is_empty(own) else found

    def read_whole(self, v: int) -> Tensor:
        """All of an image or of a stored value, on every rank."""
        region = whole_region(self.graph, self.kinds, v)
        return self.read(v, region, [] if self.outside.shared is None else [region] * self.outside.ranks)

    def _read(self, v: int, region: Region) -> Tensor:
        if self.transfers is not None and self.transfers.reads(v):
            return self.transfers.take(v, region)
        fake = self.graph.fakes[v]
        if v in self.inputs:
            rows = self.inputs[v].read(self.where(v, region))
            return rows if self.inputs[v].strides == fake.stride() else in_layout_of(fake, rows)
        if len(self.own[v]) == 1:
            return self.stored[v][0].read(*region[0], self._take(v, region[1:], self.own[v][0]))
        made = self.empty(v, region)
        self._join(v, region, made, lambda kept, take: kept.read(*region[0], take))
        return made

    def _take(self, v: int, across: Region, own: Region) -> Take | None:
        """What takes this part along the other dimensions of rows that are `own` there."""
        if across == own:
            return None

        def take(rows: Tensor) -> Tensor:
            for one, (low, high), (begin, _) in zip(self.kinds.others, across, own, strict=True):
                rows = cut_out(rows, one.dims[v], low - begin, high - low)
            return rows

        return take

    def fill(self, v: int, region: Region, made: Tensor) -> None:
        """Reads into memory of the host's what is in the host's memory or in files."""
        if v in self.inputs:
            self.inputs[v].fill(self.where(v, region), made)
        else:
            self._join(v, region, made, lambda kept, take: kept.host(*region[0], take))

    def _join(self, v: int, region: Region, made: Tensor, read: Callable[[Any, Take | None], Tensor]) -> None:
        """Of the parts of a stored value that the bands have, read from each."""
        for own, kept in zip(self.own[v], self.stored[v], strict=True):
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region[1:], own, strict=True))
            if all(a < b for a, b in common):
                there = read(kept, self._take(v, common, own))
                part_of(self.kinds, v, made, (region[0], *common), region).copy_(there)

    def add(self, v: int, band: int, rows: Tensor) -> None:
        """The rows that follow, of a value that is stored."""
        kept: Any = self.stored[v][band]
        if self.transfers is None or not self.transfers.writes(("stored", v)):
            kept.add(rows)
            return
        begin, kept.end = kept.end, kept.end + rows.size(self.kinds.dims[v])
        self.transfers.write(("stored", v), rows, functools.partial(kept.put, begin))

    def write(self, v: int, region: Region, rows: Tensor) -> None:
        """A part of a result."""
        if self.transfers is None or not self.transfers.writes(("result", v)):
            self.results[v].write(self.where(v, region), rows)
            return
        self.transfers.write(("result", v), rows, functools.partial(self.results[v].put, self.where(v, region)))

    def empty(self, v: int, region: Region) -> Tensor:
        fake = self.graph.fakes[v]
        shape = box_shape(self.graph, self.kinds, v, region)
        return torch.empty(shape, dtype=fake.dtype, device=fake.device, memory_format=layout(fake))

    def keep(self, v: int, bands: list[Region], end: int = 0) -> None:
        """Of a value that is stored from here on, or from row `end` on, the next one of these bands."""
        self.own[v] = bands
        there = self.stored.setdefault(v, [])
        fake, dim = self.graph.fakes[v], self.kinds.dims[v]
        meta = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        like = part_of(self.kinds, v, meta, ((0, fake.size(dim)), *bands[len(there)]))
        there.append(self.store.rows(f"{v}-{len(there)}", dim, like, fake.device, end))

    def free(self, v: int) -> None:
        for rows in self.stored.pop(v, []):
            rows.close()


def run_between(run: Run, number: int, last: dict[int, Time], done: Callable[[int], None] = lambda place: None) -> None:
    """What is computed on whole values before sweep `number`. last: as of `last_uses`. done: called after each call."""
    graph, kinds = run.graph, run.kinds
    there = [*(run.whole[v] for v in graph.inputs if v in run.whole), *(t for c in graph.calls for t in c.constants)]
    given = {one.untyped_storage()._cdata for one in there}  # images also when all that is read of them are views
    del there
    for v in [v for v in run.whole if last[v] < (number, 0)]:
        del run.whole[v]  # read last in a sweep
    for place in calls_between(graph, kinds, number):
        call = graph.calls[place]
        if on_whole(graph, kinds, place):
            written = call.inputs[0] if call.writes else None
            whole = {v: _whole(run, v, v == written and not _may_write(run, v, given)) for v in call.inputs}
            sources = sources_of(graph.device, tree_leaves((call.args, call.kwargs))) if graph.needs else []
            found = run_whole(_moving_later(run, place), whole.__getitem__)
            if moved(sources):
                run.drawn[place] = sources
            del whole
        else:
            found = from_answers(run, place)
        for v, value in zip(call.outputs, found, strict=True):
            if v not in kinds.dims and v in last:
                run.whole[v] = local_of(value)
        del found, value
        for v in call.inputs:
            if last.get(v) == (number, place):
                run.whole.pop(v, None)
                if v not in run.read_later:
                    run.free(v)
        done(place)


def _may_write(run: Run, v: int, given: set[int]) -> bool:
    """Whether a call that writes into a value may do so. Where nothing is cut, calls run in the module's order, and
    nothing reads what was there before; images and parameters, whose storages are `given`, stay as they are.
    """
    return not run.kinds.dims and run.whole[v].untyped_storage()._cdata not in given


def _whole(run: Run, v: int, copy: bool) -> Tensor:
    if v not in run.kinds.dims:
        return run.whole[v].clone() if copy else run.whole[v]
    found = run.read_whole(v)
    return found.clone() if copy else found


def from_answers(
    run: Run, place: int, moves: bool = False, links: Links | None = None, probing: bool = False
) -> list[Any]:
    """The results of a call that follow from numbers of the whole image alone. moves: it moves running statistics."""
    call, kinds = run.graph.calls[place], run.kinds
    given = {v: _dummy(run, v) if v in kinds.dims else run.whole[v] for v in call.inputs}
    cuts = dict.fromkeys((one.axis for one in kinds.axes), part_cuts(0, 1, 1))
    return run_part(call, Asked(cuts, 1, run.answers.get(place, ()), probing, first=moves, links=links), given)


def _moving_later(run: Run, place: int) -> Call:
    """The call. Of running statistics that a call in strips moves too it moves zeros, for `move_statistics`."""
    call, questions = run.graph.calls[place], run.kinds.questions
    if not call.moved:
        return call
    others = [one for i, other in enumerate(run.graph.calls) if questions[i] for one in other.moved]
    if not any(one is other for one in call.moved for other in others):
        return call
    run.moved[place] = [torch.zeros_like(one) for one in call.moved]
    return call.with_constants({id(one): zeros for one, zeros in zip(call.moved, run.moved[place], strict=True)})


def move_statistics(run: Run) -> None:
    """Of norms over the image, in the order in which the module calls them; also where nobody reads the result."""
    for place, call in enumerate(run.graph.calls):
        if place in run.moved:
            for one, by in zip(call.moved, run.moved.pop(place), strict=True):
                one.mul_(1 - call.momentum).add_(by)
        elif call.function in TRACKING and run.kinds.questions[place]:
            from_answers(run, place, moves=True)


def _dummy(run: Run, v: int) -> Any:
    """One place in a value, for a call whose result follows from numbers of the whole image alone."""
    region = ((0, 1),) * len(run.kinds.axes)
    return run.empty(v, region).zero_(), axes_at(run.graph, run.kinds, v, region)
