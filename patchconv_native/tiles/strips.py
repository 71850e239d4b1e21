"""One call of a function for one strip of its result, by the function's rule in `spatial`.

A strip is a range of rows, and, where the image is cut into bands too, a range along every other spatial dimension.
The rule asks for what it reads, which is at hand, and for numbers of the whole image, which are known or are not. Where
they are not, the strip gives its share of them and no result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..spatial import AtHand, Axes, Axis, NotServed, Range, SpatialTensor, Wanted
from ..spatial.axis import Link
from ..spatial.layout import cut_out, empty, joined, order
from ..spatial.products import attend
from ..spatial.rules import RULES
from .graph import Call, Ref, autocast_of

ADVICE = "pc.tile_plan(module, x) shows what is computed by strips"


class NeedsWhole(Exception):
    """A number of the whole image is needed that is not known yet. share: of this strip. In backward, of the number
    whose gradient is asked for: what this part adds to it.
    """

    def __init__(self, share: Tensor) -> None:
        super().__init__()
        self.share = share


@dataclass
class Links:
    """In backward, the numbers of the whole image that a call asks for, each with history of its own.

    target: the one whose gradient parts are asked for. wanted: whether the gradients of others are.
    """

    target: int | None = None
    wanted: bool = True
    unread: bool = False
    """Whether nothing reads the values of the call's result, of which only the history counts."""
    leaves: dict[int, Tensor] = field(default_factory=dict)

    def leaf(self, question: int, value: Tensor) -> Tensor:
        if not self.wanted:
            return value
        return self.leaves.setdefault(question, value.detach().requires_grad_())


@dataclass
class Asked:
    """What a rule asks during one call.

    cuts, index: along each axis, by its name, where the result is cut, and which part of it is computed. Along others
    it is one part.
    answers: for each number of the whole image that is known, the shares of all strips.
    """

    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    index: int = 0
    answers: Sequence[Tensor] = ()
    probing: bool = False
    """Whether only shapes and ranges count: rows that are not at hand are made up, and so are numbers."""
    made_up: int = 0
    """How many numbers of the whole image are made up, where only memory counts."""
    first: bool = False
    questions: int = 0
    placed: bool = False
    reads: dict[int, list[Range]] = field(default_factory=dict)
    """For each input, by its number, the rows that each part reads."""
    links: Links | None = None
    """In backward."""
    answered: Tensor | None = None
    """The last answer. It is of the whole image: along a second axis nothing is left to ask."""


@dataclass
class _Along:
    """`spatial.Executor` of one input along one axis. Those of all inputs are equal: they cut the same image."""

    asked: Asked
    axis: str
    input: int = field(compare=False)
    advice: str = field(default="", compare=False)

    @property
    def updates_buffers(self) -> bool:
        return self.asked.first and not self.asked.probing

    @property
    def link(self) -> Link | None:
        return None if self.asked.links is None else self._link

    @property
    def unread(self) -> bool:
        return self.asked.links is not None and self.asked.links.unread

    def _link(self, value: Tensor, added: Callable[[], Tensor]) -> Tensor:
        assert self.asked.links is not None
        question = self.asked.questions - 1
        if question == self.asked.links.target:
            raise NeedsWhole(added())
        return self.asked.links.leaf(question, value)

    def place(self, operator: str, axis: Axis, wished: Sequence[int], size: int) -> Axis:
        self.asked.placed = True
        cuts = self.asked.cuts.get(self.axis, (0, size))
        if cuts[-1] != size:
            raise NotServed(f"{operator}: not served by strips: a result of {size} where {cuts[-1]} were recorded")
        return Axis(axis.name, cuts, self.asked.index, self)

    def fetch(
        self, x: Tensor, dim: int, axis: Axis, wanted: Wanted, pads: tuple[int, int] = (0, 0), fill: float = 0.0,
        fresh: bool = False,
    ) -> AtHand:  # fmt: skip
        self.asked.reads[self.input] = [
            (min(a for a, _ in one), max(b for _, b in one)) if one else (0, 0) for one in wanted
        ]
        begin, end = axis.range
        ranges = [(a, b) for a, b in wanted[axis.index] if a < b]
        if self.asked.probing and not all(begin <= a and b <= end for a, b in ranges):
            parts = [x.new_empty((*x.shape[:dim], b - a, *x.shape[dim + 1 :])) for a, b in ranges]
        else:
            parts = [cut_out(x, dim, a - begin, b - a) for a, b in ranges]
        if not parts:
            parts = [x.narrow(dim, 0, 0)]
        for place, length in zip((0, len(parts) + 1), pads, strict=True):
            if length:
                parts.insert(place, empty(x, dim, length, order(x)).fill_(fill))
        if len(parts) > 1:
            return AtHand(joined(parts, dim), dim)
        # Functions would copy rows that do not lie together themselves, where nobody could count it.
        return AtHand(parts[0].contiguous(memory_format=order(parts[0])), dim)

    def known(self) -> Tensor | None:
        if self.asked.questions >= len(self.asked.answers):
            return None
        self.asked.questions += 1
        return self.asked.answers[self.asked.questions - 1]

    def stack(self, values: Tensor) -> Tensor:
        if values is self.asked.answered:
            return values
        found = self.known()
        if found is None:
            if not self.asked.probing and self.asked.questions >= self.asked.made_up:
                raise NeedsWhole(values)
            self.asked.questions += 1
            found = values
        self.asked.answered = found
        return found

    def sum(self, values: Tensor) -> Tensor:
        if values is not self.asked.answered:
            values = self.asked.answered = self.stack(values[None]).sum(0)
        return values


@contextlib.contextmanager
def under(call: Call) -> Iterator[None]:
    """As the module made the call: under its autocast, and without gradients where it was without them."""
    device, dtype, enabled, cache = call.autocast
    cache = cache and torch.is_autocast_cache_enabled()  # fakes keep none
    with contextlib.ExitStack() as stack:
        if not call.history and torch.is_grad_enabled():
            stack.enter_context(torch.no_grad())
        if (device, dtype, enabled, cache) != autocast_of(device):
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


def with_values(arguments: Any, given: Callable[[int], Any]) -> Any:
    """The arguments with a value in place of each Ref."""
    kind = type(arguments)
    if kind is Ref:
        return given(arguments.index)
    if kind is list:
        return [with_values(one, given) for one in arguments]
    if isinstance(arguments, tuple) and kind is not torch.Size:  # one with names too, such as a result of max
        return tuple([with_values(one, given) for one in arguments])
    if kind is dict:
        return {key: with_values(one, given) for key, one in arguments.items()}
    return arguments


def run_whole(call: Call, given: Callable[[int], Any]) -> list[Tensor]:
    """The function itself, on whole tensors. Its results in the order of `call.outputs`."""
    args, kwargs = with_values((call.args, call.kwargs), given)
    function = attend if call.function is F.scaled_dot_product_attention else call.function
    with under(call):
        return _tensors(call, function(*args, **kwargs))


def _tensors(call: Call, result: Any) -> list[Any]:
    """The tensors of a result, in the order of `call.outputs`: of a function that writes, the one that it wrote."""
    if isinstance(result, Tensor):
        return [result]
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if len(leaves) != len(call.outputs):
        many = f"{len(leaves)} tensors where {len(call.outputs)} were recorded"
        raise NotServed(f"tile: {call.where} is not served: its rule returns {many}")
    return leaves


def run_part(call: Call, asked: Asked, given: dict[int, tuple[Tensor, Axes] | Tensor]) -> list[Any]:
    """The function's rule, for one part. given: of each input what is at hand and, for each cut dimension, where that
    is in the whole (the executor is set here), or a whole tensor. NeedsWhole where a number is missing.
    """

    def value(index: int) -> Any:
        found = given[index]
        if isinstance(found, Tensor):
            return found
        local, axes = found
        return SpatialTensor(
            local, {d: replace(axis, executor=_Along(asked, axis.name, index, ADVICE)) for d, axis in axes.items()}
        )

    serve = RULES.get(call.function)
    if serve is None:
        scripted = isinstance(call.function, (torch.ScriptMethod, torch.ScriptFunction))
        why = "it is TorchScript: give the module that it was made from" if scripted else "it has no rule"
        raise NotServed(f"tile: {call.where} is not served: {why}")
    args, kwargs = with_values((call.args, call.kwargs), value)
    with under(call):
        return _tensors(call, serve(*args, **kwargs))


def local_of(value: Any) -> Tensor:
    return value._local if isinstance(value, SpatialTensor) else value


def axis_of(name: str, cuts: tuple[int, ...], index: int) -> Axis:
    """Where one of `given` of `run_part` is, along one dimension."""
    return Axis(name, cuts, index, None)  # type: ignore[arg-type]


def part_cuts(low: int, high: int, size: int) -> tuple[int, ...]:
    """So that these coordinates are the part of number 1."""
    return 0, low, high, size
