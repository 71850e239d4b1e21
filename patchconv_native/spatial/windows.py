"""What a part of an output reads: the side of the rule that convolutions, pools, padding and resizing share.

An output goes to the part that holds the middle of what it reads, unless the executor decides otherwise. Each part then
fetches what its outputs read and it does not hold, and computes on that range as on a whole image. Beyond the border
stand the values of the padding mode, on the parts that touch it. All sizes are the whole image's, so odd sizes, strides
that do not divide and uneven parts need no cases of their own. What an output range reads is `core/geometry`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .axis import Axis, Fetch, Range, Wanted
from .layout import in_layout_of
from .parts import fetch
from .rules import refuse
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

    def small_axis(self, operator: str, axis: Axis, size: int) -> Axis:
        """Of an output of `size` on the small grid: a coordinate belongs where the middle of what it reads is."""
        wished = [_ceil(cut - self._middle, self.stride) for cut in axis.cuts[1:-1]]
        return axis.executor.place(operator, axis, wished, size)

    def big_axis(self, operator: str, axis: Axis, size: int) -> Axis:
        """Of a transposed convolution's output: what an input coordinate gives belongs where that is."""
        wished = [cut * self.stride + self._middle for cut in axis.cuts[1:-1]]
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
    # For every coordinate, the one whose value stands there.
    indices = [list(_geometry.source_indices(mode, one, axis.size)) for one in reads]
    wanted: Wanted = tuple(_joined(one) for one in indices)
    local = fetch(local, dim, axis, wanted, fresh)
    order = [i for a, b in wanted[axis.index] for i in range(a, b)]
    if order != indices[axis.index]:
        places = {i: n for n, i in enumerate(order)}
        at = torch.tensor([places[i] for i in indices[axis.index]], device=local.device)
        local = in_layout_of(local, local.index_select(dim, at))
    return local


def _joined(indices: list[int]) -> tuple[Range, ...]:
    """The ranges that these coordinates make up, in ascending order."""
    ranges: list[list[int]] = []
    for i in sorted(set(indices)):
        if ranges and ranges[-1][1] == i:
            ranges[-1][1] = i + 1
        else:
            ranges.append([i, i + 1])
    return tuple((a, b) for a, b in ranges)


def pair(value: Any) -> list[int]:
    """An argument of two dimensions as a list of two, of one int or a sequence of one or two."""
    entries = [value] if isinstance(value, int) else [int(v) for v in value]
    return entries * 2 if len(entries) == 1 else entries


def check_image(function: str, x: Any) -> tuple[Tensor, int]:
    """The local tensor, and the first spatial dimension."""
    if not isinstance(x, SpatialTensor) or x.dim() not in (3, 4) or any(d < x.dim() - 2 for d in x.axes):
        raise refuse(function, "it takes (N, C, H, W) or (C, H, W), cut along H or W")
    return x._local, x.dim() - 2
