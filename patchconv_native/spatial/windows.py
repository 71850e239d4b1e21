"""What a part of an output reads: the side of the rule that convolutions, pools, padding and resizing share.

An output goes to the part that holds the middle of what it reads, unless the executor decides otherwise. Each part then
fetches what its outputs read and it does not hold, and computes on that range as on a whole image. Beyond the border
stand the values of the padding mode, on the parts that touch it. All sizes are the whole image's, so odd sizes, strides
that do not divide and uneven parts need no cases of their own. What an output range reads is `core/geometry`'s to say.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .. import _library
from .axis import Axes, Axis, Fetch, Range, Wanted
from .layout import in_layout_of
from .parts import fetch
from .rules import Rule, name_of, refuse
from .tensor import SpatialTensor

_geometry = _library.load().geometry


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Window:
    """One dimension of a convolution or a pool, between two grids.

    Coordinate p of the small grid (a convolution's output) reads the big one (its input) from p * stride - before on.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0

    @property
    def reach(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    @property
    def _middle(self) -> int:
        """Of what coordinate 0 of the small grid reads."""
        return (self.reach - 1) // 2 - self.before

    def small_axis(self, operator: str, axis: Axis, size: int, each: int = 1) -> Axis:
        """Of an output of `size` on the small grid: a coordinate belongs where the middle of what it reads is. each: so
        many places of the output are at one coordinate.
        """
        wished = [_ceil(cut - self._middle, self.stride) * each for cut in axis.cuts[1:-1]]
        return axis.executor.place(operator, axis, wished, size * each)

    def big_axis(self, operator: str, axis: Axis, size: int, each: int = 1) -> Axis:
        """Of a transposed convolution's output: what an input coordinate gives belongs where that is. each: so many
        places of the input are at one coordinate.
        """
        wished = [cut // each * self.stride + self._middle for cut in axis.cuts[1:-1]]
        return axis.executor.place(operator, axis, wished, size)

    def reads(self, small: Range) -> Range:
        """What a range of the small grid reads of the big one and of the padding around it."""
        return _geometry.big_range(
            small, kernel=self.kernel, stride=self.stride, dilation=self.dilation, pad_before=self.before
        )

    def small_inside(self, big: Range) -> Range:
        """The range of the small grid that reads nothing but `big`."""
        return _ceil(big[0] + self.before, self.stride), (big[1] + self.before - self.reach) // self.stride + 1

    def touches(self, big: Range, size: int) -> Range:
        """The range of the small grid, of `size`, that touches a range of the big one."""
        return _geometry.small_range(
            big, size=size, kernel=self.kernel, stride=self.stride, dilation=self.dilation, pad_before=self.before
        )


def scaled_axis(operator: str, axis: Axis, size: int) -> Axis:
    """Of a grid of another resolution over the same image."""
    wished = [_ceil(cut * size, axis.size) for cut in axis.cuts[1:-1]]
    return axis.executor.place(operator, axis, wished, size)


def inside(wanted: Range, size: int) -> Range:
    begin = min(max(wanted[0], 0), size)
    return begin, max(min(wanted[1], size), begin)


def fetching(local: Tensor, dim: int, axis: Axis, reads: list[Range], fill: float = 0.0, fresh: bool = True) -> Fetch:
    """Begins to get what this part reads. reads: the ranges of all parts, which may reach into the padding. The result
    has the padding, so that one copy serves for both.
    """
    low, high = reads[axis.index]
    wanted: Wanted = tuple((inside(one, axis.size),) for one in reads)
    a, b = wanted[axis.index][0]
    pads = (high - low, 0) if a == b else (a - low, high - b)
    return axis.executor.fetch(local, dim, axis, wanted, pads, fill, fresh)


def reading(
    local: Tensor, dim: int, axis: Axis, reads: list[Range], mode: str = "zeros", fill: float = 0.0, fresh: bool = True
) -> Tensor:
    """What this part reads, as of `fetching`, under any padding mode."""
    if mode == "zeros":
        return fetching(local, dim, axis, reads, fill, fresh).finish()
    return picking(local, dim, axis, [_shown(mode, one, axis.size) for one in reads], fresh)


def _shown(mode: str, read: Range, size: int) -> list[Range]:
    """A range that may reach into the padding, by the coordinates whose values stand there."""
    a, b = inside(read, size)
    before = _geometry.source_indices(mode, (read[0], min(read[1], a)), size)
    after = _geometry.source_indices(mode, (max(read[0], b), read[1]), size)
    return [*((i, i + 1) for i in before), (a, b), *((i, i + 1) for i in after)]


def picking(local: Tensor, dim: int, axis: Axis, ranges: list[list[Range]], fresh: bool = False) -> Tensor:
    """Ranges one after the other, in any order; one can occur several times. ranges: those of every part."""
    wanted: Wanted = tuple(_merged(one) for one in ranges)
    local = fetch(local, dim, axis, wanted, fresh)
    there, own = wanted[axis.index], [(a, b) for a, b in ranges[axis.index] if a < b]
    if sum(b - a for a, b in own) == sum(b - a for a, b in there) and own == sorted(own):
        return local
    places = dict(zip(there, itertools.accumulate((b - a for a, b in there), initial=0), strict=False))
    at = []
    for a, b in own:
        begin, place = next((one[0], place) for one, place in places.items() if one[0] <= a and b <= one[1])
        at.append(torch.arange(place + a - begin, place + b - begin, device=local.device))
    return in_layout_of(local, local.index_select(dim, torch.cat(at)))


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same coordinates in ascending order, each once."""
    found: list[Range] = []
    for a, b in sorted(one for one in ranges if one[0] < one[1]):
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(b, found[-1][1])
        else:
            found.append((a, b))
    return tuple(found)


def listed(value: Any, dims: int) -> list[int]:
    """An argument with an entry for each spatial dimension as a list, of one int or a sequence of one or `dims`."""
    entries = [value] if isinstance(value, int) else [int(v) for v in value]
    return entries * dims if len(entries) == 1 else entries


SIZES = {1: "L", 2: "H, W", 3: "D, H, W"}
"""How messages call the sizes of so many spatial dimensions."""
_CUT = {1: "L", 2: "H or W", 3: "D, H or W"}


def by_sample(dims: int | None = None) -> Callable[[Rule], Rule]:
    """For a rule of (N, C, ...), with so many spatial dimensions, that treats each sample alone: where the batch is
    cut, the rule gets this part's samples as if they were all.
    """

    def served(serve: Rule) -> Rule:
        @functools.wraps(serve)
        def of_samples(input: Any, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(input, SpatialTensor) or input.dim() != (dims or input.dim() - 2) + 2:
                return cast(Tensor, serve(input, *args, **kwargs))
            axes: Axes = {d: axis for d, axis in input.axes.items() if d == 0}
            if not axes:
                return cast(Tensor, serve(input, *args, **kwargs))
            inside = SpatialTensor(input._local, {d: axis for d, axis in input.axes.items() if d != 0})
            y = serve(inside, *args, **kwargs)
            if not isinstance(y, SpatialTensor):
                raise refuse(name_of(serve), "the batch is cut, and it needs numbers of whole images")
            return SpatialTensor(y._local, {**axes, **y.axes})

        return of_samples

    return served


def check_image(function: str, x: Any, dims: int) -> tuple[Tensor, int]:
    """The local tensor, and the first of `dims` spatial dimensions. NotServed for what is no image of so many."""
    if not isinstance(x, SpatialTensor) or x.dim() - dims not in (1, 2) or any(d < x.dim() - dims for d in x.axes):
        raise refuse(function, f"it takes (N, C, {SIZES[dims]}) or (C, {SIZES[dims]}), cut along {_CUT[dims]}")
    return x._local, x.dim() - dims
