"""Rules of unfold and fold: an image's windows as columns, one row of windows after the other, and back. An image that
is cut along its rows is cut along its columns of windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .layout import cut_out
from .rules import refuse, rule
from .tensor import SpatialTensor
from .windows import Window, by_sample, check_image, listed, reading


def _windows(kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> list[Window]:
    given = [listed(one, 2) for one in (kernel_size, stride, dilation, padding)]
    return [Window(*one) for one in zip(*given, strict=True)]


def _grid(function: str, windows: Sequence[Window], sizes: Sequence[int]) -> list[int]:
    """How many rows and columns of windows there are."""
    found = [(n + 2 * w.before - w.reach) // w.stride + 1 for w, n in zip(windows, sizes, strict=True)]
    if min(found) < 1:
        raise RuntimeError(f"{function}: expected windows to fit into the padded image, got an image of {list(sizes)}")
    return found


def _of_rows(rows: Window, columns: Window) -> list[tuple[int, ...]]:
    """Kernel size, dilation, padding and stride for rows that come with their padding."""
    return [
        (rows.kernel, columns.kernel), (rows.dilation, columns.dilation), (0, columns.before),
        (rows.stride, columns.stride),
    ]  # fmt: skip


@rule(F.unfold)
@by_sample(2)
def _unfold(input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Tensor:
    local, first = check_image("unfold", input, 2)
    if not input.axes:  # of some samples
        return SpatialTensor(F.unfold(local, kernel_size, dilation, padding, stride), {})
    if first + 1 in input.axes:
        raise refuse("unfold", "the columns are cut: windows in a row would not lie together")
    rows, columns = windows = _windows(kernel_size, dilation, padding, stride)
    height, width = _grid("unfold", windows, input.shape[first:])
    axis = rows.small_axis("unfold", input.axes[first], height, width)
    whole = [(a // width, -(-b // width)) for a, b in axis.ranges()]  # rows of windows
    local = reading(local, first, input.axes[first], [rows.reads(one) for one in whole])
    (begin, end), made = axis.range, whole[axis.index][0] * width
    if begin < end:
        found = cut_out(F.unfold(local, *_of_rows(rows, columns)), first, begin - made, end - begin)
    else:
        channels = local.size(first - 1) * rows.kernel * columns.kernel
        found = local.new_empty((*local.shape[: first - 1], channels, 0))
    return SpatialTensor(found, {first: axis})


@rule(F.fold)
@by_sample(1)
def _fold(
    input: Any, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Tensor:
    local, first = check_image("fold", input, 1)
    if not input.axes:  # of some samples
        return SpatialTensor(F.fold(local, output_size, kernel_size, dilation, padding, stride), {})
    rows, columns = windows = _windows(kernel_size, dilation, padding, stride)
    size, across = listed(output_size, 2)
    height, width = _grid("fold", windows, (size, across))
    if input.size(first) != height * width:
        raise RuntimeError(f"fold: expected {height} * {width} columns of windows, got {input.size(first)}")
    axis = rows.big_axis("fold", input.axes[first], size, width)
    touching = [rows.touches(one, height) for one in axis.ranges()]
    local = reading(local, first, input.axes[first], [(a * width, b * width) for a, b in touching])
    begin, end = axis.range
    low, high = rows.reads(touching[axis.index]) if local.size(first) else (begin, begin)  # the padding's rows too
    if low < high:
        found = F.fold(local, (high - low, across), *_of_rows(rows, columns))
    else:
        channels = local.size(first - 1) // (rows.kernel * columns.kernel)
        found = local.new_empty((*local.shape[: first - 1], channels, 0, across))
    a, b = max(begin, low), max(min(end, high), max(begin, low))
    found = cut_out(found, first, a - low, b - a)
    if (a, b) != (begin, end):
        found = F.pad(found, (0, 0, a - begin, end - b))  # rows that no window reads
    return SpatialTensor(found, {first: axis})
