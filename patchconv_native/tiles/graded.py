"""Chooses how a call with gradients keeps its budget: what the forward pass keeps, what the backward pass computes
again, and the tiles of the latter.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from .._budget import MARGIN_OF_BACKWARD, largest_peak
from .backward_costs import BackwardCosts
from .backward_tiles import Tiles
from .choices import Choice, Planner
from .estimates import Estimates
from .graph import Graph
from .kinds import Kinds, parted
from .plan import Least, TilePlan, Wishes, fits
from .routes import Route, Routes
from .strip_sizes import tile_bytes, tile_step_work
from .sweeps import Sweep, balanced, bytes_of
from .ways import Bands, narrower

PARTS = (2, 4, 8)
"""Into so many parts networks are cut that have fewer sweeps anyway."""
LESS_ASKED = 0.9
"""Of the room, for a forward pass that takes more than about what it was given."""
LEAST_GAIN = 0.97
"""A search for the least passes over what takes more than this part of what was found."""
SAFE = 2
"""So many times what a tile is estimated to take it does not take."""
MOST_TRIED = 4
"""Routes whose plans are looked at: they may take more than about what they should."""
Forward = tuple[TilePlan, Planner, Choice]
"""A forward pass, and what it was chosen by."""


class Graded(Bands):
    """Plans with gradients."""

    def __init__(
        self, graph: Graph, dims: Sequence[int], wishes: Wishes, base: Graded | None = None, kinds: Kinds | None = None
    ) -> None:
        """kinds: in place of the graph's own, of which `base` is; what that has learned is shared.

        `base` itself isn't held: it holds this one, and the two would live on until the next garbage collection.
        """
        self._given = kinds
        super().__init__(graph, dims, wishes)
        if base is not None:
            self._learned = dataclasses.replace(base._learned, needed={})
            self._costs = base._costs.of_kinds(self.kinds)
            self._estimates = base._estimates.of_costs(self._costs)
            self._ways = [(self._planner(widths, rough=True), widths) for _, widths in self._ways]
        if self._room is not None:
            self._room = largest_peak(max((wishes.budget or 0) - self._result, 0), MARGIN_OF_BACKWARD)
        largest = [Fraction(1), *self._widest]
        self._shares = [largest, *narrower(graph, self.kinds.axes, largest)]
        self._exact = self._planner(self._ways[0][1])
        self._dims = dims
        self._again: dict[tuple[Any, ...], tuple[float, int]] = {}

    def _kinds(self, graph: Graph, dims: Sequence[int]) -> Kinds:
        return self._given or super()._kinds(graph, dims)

    @functools.cached_property
    def _parted(self) -> list[Graded]:
        """Others, whose sweeps are parted so that what lies between can be stored."""
        return [
            Graded(
                self._graph, self._dims, self._wishes, self, parted(self._graph, self.kinds, self._part_begins(parts))
            )
            for parts in PARTS
            if parts > self._exact.count
        ]

    def _part_begins(self, count: int) -> list[int]:
        """The calls at which so many parts begin: of about as much arithmetic each, with little to store between."""
        calls = self._graph.calls
        made = {v: place for place, call in enumerate(calls) for v in call.outputs}
        read = {v: place for place, call in enumerate(calls) for v in call.inputs}
        flops = [
            self._exact.call_flops(place)
            if any(v in self.kinds.dims for v in call.inputs) and not self.kinds.gathers[place]
            else 0
            for place, call in enumerate(calls)
        ]
        before = [0, *itertools.accumulate(flops)]
        live = [0] * len(calls)
        for v in made.keys() & read.keys() & self.kinds.dims.keys():
            for place in range(made[v] + 1, read[v] + 1):
                live[place] += bytes_of(self._graph, v)
        return balanced(before, live, count)

    @functools.cached_property
    def _costs(self) -> BackwardCosts:
        stored = self._exact.everything_stored()
        choice = self._exact.choose(stored, None)
        return BackwardCosts(self._plan(self._exact, stored, choice), choice.answers)

    @functools.cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self._costs)

    @functools.cached_property
    def _routes(self) -> Routes:
        return Routes(self._graph, self.kinds, self._exact, self._costs, self._wishes.outside.counted)

    def fitting(self) -> TilePlan | None:
        """Of the routes that fit, that of the least work."""
        if self._wishes.tile:
            return self._of_tile_sizes[0] if fits(self._of_tile_sizes[0]) else None
        least, found = math.inf, []
        routes = [(way, route) for way in (self, *self._parted) for route in way._routes.all]
        for way, route in sorted(routes, key=lambda one: one[1].work):
            if route.work >= least:
                break
            tiled = way._tiles_of(route, self._room or 0)
            if tiled is not None:
                found.append((way._work(*tiled), way, tiled))
                least = min(least, found[-1][0])
        for _, way, tiled in sorted(found, key=lambda one: one[0])[:MOST_TRIED]:
            plan = way._planned(*tiled)
            if plan is not None:
                return plan
        return self._least[0] if fits(self._least[0]) else None

    def least(self, below: float) -> Least | None:
        return self._of_tile_sizes if self._wishes.tile else self._least

    @functools.cached_property
    def _of_tile_sizes(self) -> Least:
        """Of tiles as `tile` asks for: the plan of the least work that fits, or of the least peak."""
        wish, room = self._of_wish(), self._room or 0
        tiles = dict.fromkeys(range(self._exact.count + 1), wish)
        best: Least | None = None
        for route in self._routes.all:
            for apart in (route.apart, frozenset()):
                one = dataclasses.replace(route, apart=apart)
                about = self._backward_peak(one, tiles, rough=True)
                if best is not None and about > max(room, LEAST_GAIN * best[0].peak):
                    continue
                planner = self._planner(wish[1:], kept=route.kept)
                choice = planner.choose(route.stored, None, math.ceil(1 / wish[0]))
                forward = self._plan(planner, route.stored, choice), planner, choice
                plan = self._with_tiles(forward, one, tiles, room)
                if best is None or plan.peak < best[0].peak:
                    best = plan, functools.partial(planner.where, route.stored, choice)
                if fits(plan):
                    return best
        assert best is not None
        return best

    def _tiles_of(self, route: Route, room: int) -> tuple[Route, dict[int, list[Fraction]]] | None:
        """Of each sweep, the largest tiles that about fit into this many bytes; None, where there are none. The route
        asks apart where that fits.
        """
        found = {}
        together = dataclasses.replace(route, apart=frozenset())
        for number, held in sorted(enumerate(route.held), key=lambda one: -one[1]):
            left = room - self._costs.always - held
            if self._costs.between(number) > left:
                return None
            place = self._largest(route, number, left)
            if place == len(self._shares) and self._asks(route, number):
                route = dataclasses.replace(route, apart=route.apart - {number})
                place = self._largest(together, number, left)
            if place == len(self._shares):
                return None
            found[number] = self._shares[place]
        work = route.work + self._routes.backward_flops(route.stored, route.apart)
        work -= self._routes.backward_flops(route.stored, frozenset(range(self._exact.count + 1)))
        return dataclasses.replace(route, work=work), found

    def _asks(self, route: Route, number: int) -> bool:
        """Whether a stored value is asked apart there."""
        return bool(self._costs.sweep_of(route.stored, number, number in route.apart, asks=True).steps)

    def _largest(self, route: Route, number: int, left: int) -> int:
        """The place of the largest tiles that about take this many bytes; the number of all, where none do."""
        least = self._of_sweep(route, number, self._shares[-1], rough=True)
        if least > left:  # most often it is so
            return len(self._shares)
        sweep = self._costs.sweep_of(route.stored, number, number in route.apart)
        values = [v for step in sweep.steps for v in self._graph.calls[step.call].outputs if v in self.kinds.dims]
        largest = max((bytes_of(self._graph, v) for v in (*values, *sweep.sources)), default=0)
        parts = [math.prod(shares) for shares in self._shares]
        place = next((k for k, part in enumerate(parts) if largest * part <= tile_bytes(self._graph)), len(parts) - 1)
        last = len(parts) - 1
        slope: float = sum(bytes_of(self._graph, v) for v in values)
        while place < last:  # above the smallest, what a tile takes is about in proportion to its part of the image
            more = (k for k in range(place, last) if least + slope * float(parts[k] - parts[last]) <= left)
            place = next(more, last)
            taken = self._of_sweep(route, number, self._shares[place], rough=True)
            if taken <= left:
                return place
            slope, place = (taken - least) / float(parts[place] - parts[last]), place + 1
        return last

    def _takes(self, route: Route, number: int, shares: list[Fraction], rough: bool = False) -> int:
        """What is there during a sweep. rough: about what a tile inside the image takes."""
        there = max(self._of_sweep(route, number, shares, rough), self._costs.between(number))
        return self._costs.always + route.held[number] + there

    def _of_sweep(self, route: Route, number: int, shares: list[Fraction], rough: bool) -> int:
        """Above what is held: stored values are there until they were asked for their shares."""
        of_tile = (self._estimates if rough else self._costs).sweep
        found = of_tile(route.stored, number, shares, number in route.apart, False)
        if not self._asks(route, number):
            return found
        asking = of_tile(route.stored, number, shares, number in route.apart, True)
        if self._wishes.outside.counted:
            asking += sum(self._exact.kept_bytes(v) for v in route.stored if self.kinds.level[v] == number)
        return max(found, asking)

    def _backward_peak(
        self, route: Route, tiles: dict[int, list[Fraction]], below: float = math.inf, rough: bool = False
    ) -> int:
        """below: what takes as much or more is not looked at to the end. rough: as of `_takes`."""
        abouts = {number: self._takes(route, number, shares, rough=True) for number, shares in tiles.items()}
        most = 0
        for number in sorted(abouts, key=lambda number: -abouts[number]):
            held = self._costs.always + route.held[number]
            if rough or held + SAFE * (abouts[number] - held) > most:
                most = max(most, abouts[number] if rough else self._takes(route, number, tiles[number]))
            if most >= below:
                break
        return most

    def _work(self, route: Route, tiles: dict[int, list[Fraction]]) -> float:
        """The arithmetic, and what each step of a tile costs besides."""
        return self._arithmetic(route, tiles) + self._overhead(route, tiles)

    def _overhead(self, route: Route, tiles: dict[int, list[Fraction]]) -> float:
        return sum(steps for _, steps in self._per_sweep(route, tiles)) * tile_step_work(self._graph)

    def _arithmetic(self, route: Route, tiles: dict[int, list[Fraction]]) -> float:
        """With what tiles read of each other."""
        return route.work + sum(work for work, _ in self._per_sweep(route, tiles))

    def _per_sweep(self, route: Route, tiles: dict[int, list[Fraction]]) -> Iterator[tuple[float, int]]:
        """Of each sweep of the backward pass, the arithmetic of what its tiles compute more than once, and their
        steps.
        """
        for number, shares in tiles.items():
            for asks in (False, True):
                sweep = self._costs.sweep_of(route.stored, number, number in route.apart, asks)
                key = id(sweep), *shares
                if key not in self._again:
                    self._again[key] = self._again_of(sweep, shares) if sweep.steps else (0.0, 0)
                yield self._again[key]

    def _again_of(self, sweep: Sweep, shares: list[Fraction]) -> tuple[float, int]:
        cut = Tiles(dataclasses.replace(self._costs.forward, tiles={sweep.number: shares}), sweep)
        steps = enumerate(sweep.steps)
        work = sum(self._routes.step_flops(sweep, one) * max(0.0, cut.share_made(n) - 1) for n, one in steps)
        return work, len(cut.all()) * len(sweep.steps)

    def _planned(self, route: Route, tiles: dict[int, list[Fraction]]) -> TilePlan | None:
        """With tiles of about these sizes."""
        room = asked = self._room or 0
        forward = self._forward(route, asked)
        for _ in range(3):  # the first ones may take more than about
            if forward is None:
                return None
            plan = self._with_tiles(forward, route, tiles, room)
            if fits(plan):
                return plan
            left = room - self._more_answers(forward)
            tiles = {number: self._smaller(route, number, shares, left) for number, shares in tiles.items()}
            if forward[0].peak > room:
                asked = int(LESS_ASKED * asked)
                forward = self._forward(route, asked)
        return None

    def _more_answers(self, forward: Forward) -> int:
        """Bytes of shares of numbers of the whole image, above what the costs know of: there is one of each strip."""
        return forward[2].answers - self._costs.answers

    def _smaller(self, route: Route, number: int, shares: list[Fraction], room: int) -> list[Fraction]:
        """The next smaller ones, where these do not fit."""
        if self._takes(route, number, shares) <= room:
            return shares
        return self._shares[min(self._shares.index(shares) + 1, len(self._shares) - 1)]

    def _forward(self, route: Route, room: int) -> Forward | None:
        """The forward pass, in bands where strips as wide as the image take more than this many bytes."""

        def found(widths: list[Fraction]) -> tuple[Planner, Choice]:
            planner = self._planner(widths, rough=True, kept=route.kept)
            return planner, planner.choose(route.stored, room)

        def fit(widths: list[Fraction]) -> bool:
            return max(found(widths)[1].peaks) <= room

        widths = [one for _, one in self._ways]
        place = 0 if fit(widths[0]) else bisect.bisect_left(widths, True, lo=1, key=fit)
        if place == len(widths):
            return None
        planner = self._planner(widths[place], kept=route.kept)
        choice = planner.choose(route.stored, None, cuts=found(widths[place])[1].cuts)
        return self._plan(planner, route.stored, choice), planner, choice

    def _with_tiles(self, forward: Forward, route: Route, tiles: dict[int, list[Fraction]], room: int) -> TilePlan:
        plan, planner, _ = forward
        more = self._more_answers(forward)
        peak = max(plan.peak, self._backward_peak(route, tiles) + more)
        stretches = [dataclasses.replace(one, again=[]) for one in route.stretches]
        for number, wanted in self._routes.again(route.stored, route.kept):
            stretch = next(one for one in stretches if one.begin <= number < one.end)
            held = self._costs.always + more + route.held[stretch.end - 1]
            sweep, taken = planner.again(route.stored, number, wanted, room - held)
            stretch.again.append(sweep)
            peak = max(peak, held + taken)
        margin = max(plan.margin, MARGIN_OF_BACKWARD)
        call = max(self._exact.whole_flops(self._exact.everything_stored()), 1)
        return dataclasses.replace(
            plan, tiles=tiles, stretches=stretches, apart=route.apart, margin=margin, peak=peak,
            backward=(self._arithmetic(route, tiles) - self._exact.whole_flops(route.stored)) / call,
            overhead=plan.overhead + self._overhead(route, tiles) / self._exact.call_work(),
        )  # fmt: skip

    @functools.cached_property
    def _least(self) -> Least:
        """Of the smallest tiles, the plan of the route that takes the least. Nothing is asked apart."""
        routes = [
            (way, dataclasses.replace(route, apart=frozenset()))
            for way in (self, *self._parted)
            for route in (way._routes.of_nothing_stored(), *way._routes.all)
        ]
        guesses = [way._backward_peak(route, way._smallest(), rough=True) for way, route in routes]
        best: Least | None = None
        below = math.inf
        for about, (way, route) in sorted(zip(guesses, routes, strict=True), key=lambda one: one[0]):
            less = LEAST_GAIN * below
            peak = about if about >= less else way._backward_peak(route, way._smallest(), less)
            found = way._with_smallest(route, peak) if peak < less else None
            if found is not None and found[0].peak < below:
                best, below = found, found[0].peak
        assert best is not None
        return best

    def _smallest(self) -> dict[int, list[Fraction]]:
        return dict.fromkeys(range(self._exact.count + 1), self._shares[-1])

    def _with_smallest(self, route: Route, room: int) -> Least:
        """room: what the backward pass takes; a forward pass that takes no more is looked for."""
        planner = self._planner(self._ways[0][1], kept=route.kept)
        choice = planner.choose(route.stored, room)
        found = (self._plan(planner, route.stored, choice), planner, choice)
        if max(choice.peaks) > room:
            found = self._forward(route, room) or found
        plan = self._with_tiles(found, route, self._smallest(), room)
        return plan, lambda: found[1].where(route.stored, found[2])
