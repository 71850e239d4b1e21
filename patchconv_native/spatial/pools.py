"""Rules for pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .axis import Axes
from .reductions import first_maximum, mean_of
from .rules import refuse, rule
from .tensor import SpatialTensor
from .windows import Window, check_image, pair, reading, scaled_axis

_nn: Any = torch._C._nn


def _pooled_size(size: int, kernel: int, stride: int, padding: int, reach: int, ceil_mode: bool) -> int:
    pooled = (size + 2 * padding - reach + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (pooled - 1) * stride >= size + padding:
        pooled -= 1  # a window that begins in the padding at the end
    return pooled


def _windows(
    function: str, kernel_size: Any, stride: Any, padding: Any, dilations: list[int]
) -> tuple[list[int], list[int], list[Window]]:
    """Kernel, strides, and a window for rows and one for columns."""
    kernel, pads = pair(kernel_size), pair(padding)
    strides = pair(stride) if stride is not None and stride != [] else kernel
    if any(2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise RuntimeError(f"{function}: expected padding to be at most half of kernel_size, got {pads} and {kernel}")
    return kernel, strides, [Window(kernel[i], strides[i], dilations[i], pads[i]) for i in range(2)]


def _read_for_pool(
    function: str, x: SpatialTensor, windows: list[Window], ceil_mode: bool, fill: float
) -> tuple[Tensor, Axes, list[int]]:
    """What the windows of this part read, the new axes, and the padding of dimensions that are not cut."""
    local, first = check_image(function, x)
    axes: Axes = {}
    padding = [window.before for window in windows]
    for i, window in enumerate(windows):
        d = first + i
        if d not in x.axes:
            continue
        axis = x.axes[d]
        size = _pooled_size(axis.size, window.kernel, window.stride, window.before, window.reach, ceil_mode)
        if size < 1:
            raise RuntimeError(f"{function}: expected {axis.name} to be at least the window's, got {axis.size}")
        axes[d] = window.small_axis(function, axis, size)
        local = reading(local, d, axis, [window.reads(part) for part in axes[d].ranges()], fill=fill)
        padding[i] = 0
    return local, axes, padding


@rule(torch.max_pool2d, F.max_pool2d)
def max_pool2d(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:  # fmt: skip
    dilations = pair(dilation)
    kernel, strides, windows = _windows("max_pool2d", kernel_size, stride, padding, dilations)
    local, axes, op_padding = _read_for_pool("max_pool2d", input, windows, ceil_mode, float("-inf"))
    return SpatialTensor(functional.max_pool2d(local, kernel, strides, op_padding, dilations, ceil_mode), axes)


@rule(_nn.avg_pool2d, F.avg_pool2d)
def avg_pool2d(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    kernel, strides, windows = _windows("avg_pool2d", kernel_size, stride, padding, [1, 1])
    local, axes, op_padding = _read_for_pool("avg_pool2d", input, windows, ceil_mode, 0.0)
    counts = []
    for i, window in enumerate(windows):
        d = input.dim() - 2 + i
        size = input.size(d)
        pooled = _pooled_size(size, window.kernel, window.stride, window.before, window.kernel, ceil_mode)
        low, high = axes[d].range if d in axes else (0, pooled)
        begins = [p * window.stride - window.before for p in range(low, high)]
        limit = size + window.before if count_include_pad else size
        floor = -window.before if count_include_pad else 0
        counts.append([min(a + window.kernel, limit) - max(a, floor) for a in begins])
    one = divisor_override
    if one is None and all(len(set(count)) == 1 for count in counts):
        one = counts[0][0] * counts[1][0]
    y = functional.avg_pool2d(local, kernel, strides, op_padding, ceil_mode, True, one or 1)
    if one is None:
        rows, columns = (torch.tensor(count, dtype=torch.float64) for count in counts)
        y = y * (1 / (rows[:, None] * columns)).to(y)
    return SpatialTensor(y, axes)


def _sizes(x: Tensor, output_size: Any) -> tuple[int, int]:
    """None in the argument stands for the input's size."""
    entries = list(output_size) if isinstance(output_size, (tuple, list)) else [output_size] * 2
    rows, columns = (size if n is None else n for n, size in zip(entries, x.shape[-2:], strict=True))
    return rows, columns


def _adaptive(
    function: str, x: Any, output_size: Any, reduce: Callable[[Tensor, int], Tensor], rest: Callable[..., Tensor]
) -> Tensor:
    """Along a cut dimension, one coordinate of the output at a time by `reduce`; then the others by `rest`."""
    local, first = check_image(function, x)
    sizes = list(_sizes(x, output_size))
    axes: Axes = {}
    for i, size in enumerate(sizes):
        d = first + i
        if d not in x.axes:
            continue
        axis = x.axes[d]
        axes[d] = scaled_axis(function, axis, size)
        reads = [(a * axis.size // size, -(-b * axis.size // size)) for a, b in axes[d].ranges()]
        local = reading(local, d, axis, reads, fresh=False)
        begin = reads[axis.index][0]
        rows = []
        for p in range(*axes[d].range):
            a, b = p * axis.size // size, -(-(p + 1) * axis.size // size)
            rows.append(reduce(local.narrow(d, a - begin, b - a), d))
        local = torch.cat(rows, d)
        sizes[i] = local.size(d)
    return SpatialTensor(rest(local, sizes), axes)


def _is_global(x: Any, output_size: Any) -> bool:
    """Whether every cut dimension of the output has size 1, as of a global pool."""
    return all(_sizes(x, output_size)[d - x.dim() + 2] == 1 for d in x.axes)


@rule(F.adaptive_avg_pool2d, _nn.adaptive_avg_pool2d)
def adaptive_avg_pool2d(input: Any, output_size: Any) -> Tensor:
    check_image("adaptive_avg_pool2d", input)
    if _is_global(input, output_size):
        y = mean_of(input, dim=tuple(input.axes), keepdim=True)
        return y if len(input.axes) == 2 else F.adaptive_avg_pool2d(y, _sizes(input, output_size))
    return _adaptive("adaptive_avg_pool2d", input, output_size, lambda x, d: x.mean(d, keepdim=True),
                     functional.adaptive_avg_pool2d)  # fmt: skip


@rule(_nn.adaptive_max_pool2d, F.adaptive_max_pool2d)
def adaptive_max_pool2d(input: Any, output_size: Any, return_indices: bool = False) -> Tensor:
    _, first = check_image("adaptive_max_pool2d", input)
    if return_indices:
        raise refuse("adaptive_max_pool2d", "return_indices=True")
    if _is_global(input, output_size):
        y = first_maximum(input)
        return y if len(input.axes) == 2 else F.adaptive_max_pool2d(y, _sizes(input, output_size))

    def highest(x: Tensor, d: int) -> Tensor:
        return F.adaptive_max_pool2d(x, [1 if first + i == d else x.size(first + i) for i in range(2)])

    return _adaptive("adaptive_max_pool2d", input, output_size, highest, functional.adaptive_max_pool2d)
