"""How a recorded module is computed: what is asked of a plan, and what it says. ways.py finds one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from .._budget import least_budget
from .._bytes import format_bytes
from .choices import largest_value, result_sizes
from .graph import Graph
from .kinds import Kinds, Region, Time
from .outside import Outside
from .reach import Reaches
from .sweeps import Sweep, bytes_of

RECORDING = 8 * 1024
"""Bytes that planning itself takes for a while: the state of torch's random generator."""


SAID = 0.1
"""Of one call's time: what steps cost besides their arithmetic is said where it is this much."""


@dataclass
class Stretch:
    """Sweeps `begin` to `end`, whose stored values are there together when the backward pass goes over them."""

    begin: int
    end: int
    again: list[Sweep] = field(default_factory=list)
    """What computes these values again, where the forward pass does not keep them."""


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
    tiles: dict[int, list[Fraction]] = field(default_factory=dict)
    """In backward, of each number of a sweep: which share of the image a tile has along each axis."""
    stretches: list[Stretch] = field(default_factory=list)
    """In backward, in the order of the forward pass."""
    apart: frozenset[int] = frozenset()
    """In backward, the sweeps before which stored values are asked for their shares of numbers of the whole image. For
    others, where there is no room for both the value and its gradient, it is computed again.
    """
    reaches: Sequence[Reaches] = field(default_factory=list)
    """Along each axis, that of each call."""
    backward: float | None = None
    """The arithmetic of the backward pass, in the same units. None: it was not looked at, since there is no budget, and
    the other figures are of the forward pass.
    """
    overhead: float = 0.0
    """About what the steps of strips and tiles cost besides, in units of one call's time."""
    parts: list[int] = field(default_factory=list)
    """At once, with gradients: the calls at which parts begin. All but the last are checkpoints."""
    in_lean: bool = False
    """At once, whether this package's functions are called in place of stock's, as in `lean`."""

    @property
    def needs(self) -> int:
        """Bytes of budget that this plan fits."""
        return max(least_budget(self.peak, self.margin) + self.result, RECORDING)

    @property
    def at_once(self) -> bool:
        """Whether nothing is cut."""
        return not self.kinds.dims

    @property
    def kept_by_autograd(self) -> bool:
        """Whether autograd keeps the history of the module's calls, as without tiles."""
        return bool(self.parts)

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
        more = "" if self.backward is None else f", and {self.backward:.2f} in the backward pass (stock: about 2)"
        lines.append(f"arithmetic  {self.arithmetic:.2f} of one call's{more}")
        if self.overhead >= SAID:
            steps = "strips" if self.backward is None else "strips and tiles"
            lines.append(f"overhead    about {self.overhead:.1f} of one call's time, for the steps of {steps}")
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
        if self.outside.ranks > 1:
            lines.append(
                f"ranks       {self.outside.ranks}, each with a part of dimension "
                f"{self.kinds.others[0].dims[self.graph.inputs[0]]}, in step; all figures are of one of them"
            )
        if self.sweeps and self.sweeps[0].bands > self.outside.ranks:
            across = " x ".join(str(max(b - a for a, b in one)) for one in zip(*self._bands(), strict=True))
            size = f", of at most {across} columns of the result" if across else ""
            lines.append(
                f"bands       {self.sweeps[0].bands // self.outside.ranks}, one after the other{size}; what they share "
                "is computed again"
            )
        if self.tiles:
            tiles = [math.prod(math.ceil(1 / share) for share in shares) for shares in self.tiles.values()]
            smallest = zip(result_sizes(self.graph, self.kinds), min(self.tiles.values(), key=math.prod), strict=False)
            size = " x ".join(str(math.ceil(n * share)) for n, share in smallest)
            alone = "; without a budget not predicted: the figures above are of the forward pass"
            lines.append(
                f"backward    {min(tiles)} to {max(tiles)} tiles a sweep, the smallest of {size} of the result"
                + alone * (self.backward is None)
            )
            again = {v for stretch in self.stretches for sweep in stretch.again for v in sweep.stores}
            if again:
                some = f"{len(again)} of {_count(len(self.stored), 'stored value')}"
                lines.append(f"again       {some}, for some sweeps of the backward pass at a time")
        if self.at_once:
            lines.append(f"at once     as one call of the module: {self._kept()}")
            return "\n".join(lines)
        whole = (f"whole       {self.graph.calls[place].where}: {why}" for place, why in self.kinds.why.items())
        lines += dict.fromkeys(whole)
        lines.append("sweep  strips  calls  rows of a strip  strip's largest  rows kept, most")
        for sweep in self.sweeps:
            lines.append(self._line(sweep))
        return "\n".join(lines)

    def _kept(self) -> str:
        if not self.kept_by_autograd:
            return "each value is freed when it is read last"
        lean = ", in `lean`" * self.in_lean
        if len(self.parts) == 1:
            return f"autograd keeps what it keeps of it{lean}"
        return f"{len(self.parts)} parts, of which all but the last are checkpoints{lean}"

    def _bands(self) -> list[Region]:
        """Of the result that the last sweep gives, the bands. Nothing: the result is not cut."""
        own = self.sweeps[-1].own
        return own[max(own, key=lambda v: bytes_of(self.graph, v))] if own else []

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
    out: bool = False
    """Whether the result is written into memory that is given."""


Least = tuple[TilePlan, Callable[[], str]]
"""A plan, and what tells the call during which it needs the most."""


def fits(plan: TilePlan) -> bool:
    return plan.budget is None or plan.needs <= plan.budget
