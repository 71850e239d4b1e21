"""A dimension that is cut into parts, and what a rule may ask of its executor.

Each call of a rule computes one part of a result. A rule knows the sizes of the whole and where all parts begin and
end. What it needs of the other parts it asks of the dimension's executor: a range of the whole image, a sum over all
parts, or the values of all parts. An executor decides where these come from (messages between ranks, or a stored
tensor) and where results are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from .layout import cut_out

Range = tuple[int, int]
"""The first coordinate, and the one after the last."""
Wanted = tuple[tuple[Range, ...], ...]
"""For each part, the ranges of the whole that it wants, in the order in which it wants them."""
Link = Callable[[Tensor, Callable[[], Tensor]], Tensor]
"""link(value, added): value with history. added(): something of its shape whose gradient is that of what this part adds
to the value, where the value is taken for a sum over parts. Of a mean that is this part's sum, divided by the number of
all.
"""


@dataclass(frozen=True)
class Axis:
    """One dimension of a tensor, as one part sees it."""

    name: str
    """"D", "H" or "W" of an image or a volume, "L" of a signal; for messages."""
    cuts: tuple[int, ...]
    """Part i has the coordinates cuts[i] to cuts[i + 1]."""
    index: int
    """Which part this is."""
    executor: Executor
    least: int = 1
    """Of how many coordinates a result along this dimension must be, to be cut. Every part has all of a slice that is
    of fewer.
    """

    @property
    def size(self) -> int:
        """Of the whole."""
        return self.cuts[-1]

    @property
    def count(self) -> int:
        """How many parts there are."""
        return len(self.cuts) - 1

    @property
    def range(self) -> Range:
        """The coordinates of this part."""
        return self.cuts[self.index], self.cuts[self.index + 1]

    @property
    def length(self) -> int:
        """Of this part."""
        return self.range[1] - self.range[0]

    def ranges(self) -> list[Range]:
        """The coordinates of every part."""
        return list(zip(self.cuts[:-1], self.cuts[1:], strict=True))

    def cut_at(self, cuts: tuple[int, ...]) -> Axis:
        """The same parts of another size, or cut at other places."""
        return self if cuts == self.cuts else replace(self, cuts=cuts)


class Fetch(Protocol):
    """Ranges of the whole that were asked for. They may still be on their way."""

    @property
    def complete(self) -> bool:
        """Whether nothing has to come from another part, here or for any other part."""
        ...

    def rows(self, low: int, high: int) -> Tensor:
        """Coordinates low to high of the result, without autograd history. Waits for what has to come."""
        ...

    def finish(self) -> Tensor:
        """The result: the ranges one after the other, with the padding; differentiable. Waits for what has to come."""
        ...


@dataclass
class AtHand:
    """A `Fetch` of which nothing has to come."""

    result: Tensor
    dim: int
    complete: bool = True

    def rows(self, low: int, high: int) -> Tensor:
        return cut_out(self.result, self.dim, low, high - low)

    def finish(self) -> Tensor:
        return self.result


class Executor(Protocol):
    """What runs rules on the parts along one dimension. Every part's call asks for the same things in the same order.
    Answers of several questions are not held against each other part by part: the parts may be others each time.

    None of the answers but `fetch`'s has autograd history; `parts` makes differentiable functions of them.
    """

    @property
    def advice(self) -> str:
        """What a user can do where a function is not served. It ends the text of `NotServed`."""
        ...

    @property
    def updates_buffers(self) -> bool:
        """Whether this part's call updates running statistics. Of calls that share a module's buffers, one does."""
        ...

    @property
    def link(self) -> Link | None:
        """Where parts are differentiated one by one: gives a value of all parts, which came as a constant, its autograd
        history. None where the functions of `parts` do that, by asking again in backward.
        """
        ...

    @property
    def unread(self) -> bool:
        """Whether nothing reads the result's values, but for its history: a rule need not compute them."""
        ...

    def place(self, operator: str, axis: Axis, wished: Sequence[int], size: int) -> Axis:
        """Of a result of `size` that is computed from an input cut as `axis`: where it is cut.

        wished: for each place between two parts, the one that leaves a result where most of what it reads is.
        """
        ...

    def fetch(
        self, x: Tensor, dim: int, axis: Axis, wanted: Wanted, pads: tuple[int, int] = (0, 0), fill: float = 0.0,
        fresh: bool = False,
    ) -> Fetch:  # fmt: skip
        """Begins to get the ranges that this part wants. x: this part of a tensor that is cut along `dim` as `axis`.

        pads: coordinates with the value `fill` before and after the ranges. fresh: the gradient of the result is a new
        tensor that nobody else reads, so that other gradients may be added to it in place.
        """
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum of all parts' values, the same bits for every part. May write into `values`."""
        ...

    def known(self) -> Tensor | None:
        """What `stack` would answer next, where that is known without this part's values; else None."""
        ...

    def stack(self, values: Tensor) -> Tensor:
        """The values of all parts along a first dimension, of which `values` has 1."""
        ...


Axes = dict[int, Axis]
"""The dimensions of a tensor that are cut."""
Executors = tuple[Executor, ...]


def executors_of(axes: Axes) -> Executors:
    return tuple(axis.executor for axis in axes.values())
