"""Rules for pools."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .axis import Axes
from .extremes import first_maximum
from .layout import joined
from .reductions import mean_of
from .rules import refuse, rule
from .tensor import SpatialTensor
from .windows import Window, by_sample, check_image, listed, reading, scaled_axis

_nn: Any = torch._C._nn


def _pooled_size(size: int, kernel: int, stride: int, padding: int, reach: int, ceil_mode: bool) -> int:
    pooled = (size + 2 * padding - reach + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (pooled - 1) * stride >= size + padding:
        pooled -= 1  # a window that begins in the padding at the end
    return pooled


def _windows(
    function: str, dims: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[list[int], list[int], list[Window]]:
    """Kernel, strides, and a window for each spatial dimension."""
    kernel, pads, dilations = listed(kernel_size, dims), listed(padding, dims), listed(dilation, dims)
    strides = listed(stride, dims) if stride is not None and stride != [] else kernel
    if any(2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise RuntimeError(f"{function}: expected padding to be at most half of kernel_size, got {pads} and {kernel}")
    return kernel, strides, [Window(kernel[i], strides[i], dilations[i], pads[i]) for i in range(dims)]


def _read_for_pool(
    function: str, x: SpatialTensor, windows: list[Window], ceil_mode: bool, fill: float
) -> tuple[Tensor, Axes, list[int]]:
    """What the windows of this part read, the new axes, and the padding of dimensions that are not cut."""
    local, first = check_image(function, x, len(windows))
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


def _max_pool(dims: int) -> Callable[..., Tensor]:
    name = f"max_pool{dims}d"
    pool = getattr(functional, name)

    @by_sample(dims)
    def serve(
        input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor:  # fmt: skip
        kernel, strides, windows = _windows(name, dims, kernel_size, stride, padding, dilation)
        local, axes, op_padding = _read_for_pool(name, input, windows, ceil_mode, float("-inf"))
        return SpatialTensor(pool(local, kernel, strides, op_padding, listed(dilation, dims), ceil_mode), axes)

    return serve


def _avg_pool(dims: int) -> Callable[..., Tensor]:
    name = f"avg_pool{dims}d"
    pool = getattr(functional, name)

    @by_sample(dims)
    def serve(
        input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Tensor:  # fmt: skip
        if isinstance(input, SpatialTensor) and not input.axes:
            divisor = [] if dims == 1 else [divisor_override]
            y = pool(input._local, kernel_size, stride, padding, ceil_mode, count_include_pad, *divisor)
            return SpatialTensor(y, {})
        kernel, strides, windows = _windows(name, dims, kernel_size, stride, padding, 1)
        local, axes, op_padding = _read_for_pool(name, input, windows, ceil_mode, 0.0)
        counts = _counts(input, windows, axes, ceil_mode, count_include_pad)
        one = divisor_override
        if one is None and all(len(set(count)) == 1 for count in counts):
            one = math.prod(count[0] for count in counts)
        # That of one dimension takes no divisor. It is the one that is cut, and every window is within `local`.
        by = kernel[0] if dims == 1 else one or 1
        y = pool(local, kernel, strides, op_padding, *([] if dims == 1 else [ceil_mode, True, by]))
        if one is None:
            factor = torch.tensor(by, dtype=torch.float64)
            for count in counts:
                factor = factor[..., None] / torch.tensor(count, dtype=torch.float64)
            y = y * factor.to(y)
        elif one != by:
            y = y * (by / one)
        return SpatialTensor(y, axes)

    return serve


_TAKES_MOST = float(F.lp_pool1d(torch.tensor([[[2.0, 3.0]]]), math.inf, 2)) == 3
"""Whether power pools of this torch take the largest value for an infinite power, as those of 2.14 do."""


def _lp_pool(dims: int) -> Callable[..., Tensor]:
    """As torch's own: from the mean of the powers, also where windows at the end are cut off."""

    def serve(input: Any, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Tensor:
        if math.isinf(norm_type) and _TAKES_MOST:
            most: Any = _max_pool(dims)(input.abs() * math.copysign(1, norm_type), kernel_size, stride, 0, 1, ceil_mode)
            return most.abs()
        if norm_type == 0:
            raise ValueError(f"norm_type must be a non-zero value, but got {norm_type}")
        mean: Any = _avg_pool(dims)(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
        return (mean.sign() * mean.abs()).mul(math.prod(listed(kernel_size, dims))).pow(1.0 / norm_type)

    return serve


def _counts(
    x: SpatialTensor, windows: list[Window], axes: Axes, ceil_mode: bool, with_padding: bool
) -> list[list[int]]:
    """For each spatial dimension, over how many coordinates each output of this part averages."""
    counts = []
    for i, window in enumerate(windows):
        d = x.dim() - len(windows) + i
        size = x.size(d)
        pooled = _pooled_size(size, window.kernel, window.stride, window.before, window.kernel, ceil_mode)
        low, high = axes[d].range if d in axes else (0, pooled)
        begins = [p * window.stride - window.before for p in range(low, high)]
        limit = size + window.before if with_padding else size
        floor = -window.before if with_padding else 0
        counts.append([min(a + window.kernel, limit) - max(a, floor) for a in begins])
    return counts


def _sizes(x: Tensor, output_size: Any, dims: int) -> list[int]:
    """None in the argument stands for the input's size."""
    entries = list(output_size) if isinstance(output_size, (tuple, list)) else [output_size]
    if len(entries) == 1:
        entries *= dims
    return [size if n is None else n for n, size in zip(entries, x.shape[-dims:], strict=True)]


def _adaptive(
    function: str, x: SpatialTensor, sizes: list[int], reduce: Callable[[Tensor, int], Tensor],
    rest: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Along a cut dimension, one coordinate of the output at a time by `reduce`; then the others by `rest`."""
    local, first = check_image(function, x, len(sizes))
    left = list(sizes)
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
        local = joined(rows, d)
        left[i] = local.size(d)
    return SpatialTensor(rest(local, left), axes)


def _to_one(x: SpatialTensor, sizes: list[int]) -> list[int]:
    """The cut dimensions along which the output has size 1, as of a global pool."""
    return [d for d in x.axes if sizes[d - x.dim() + len(sizes)] == 1]


def adaptive_avg_pool(dims: int, input: Any, output_size: Any) -> Tensor:
    name = f"adaptive_avg_pool{dims}d"
    check_image(name, input, dims)
    sizes = _sizes(input, output_size, dims)
    pool = getattr(functional, name)
    if _to_one(input, sizes):
        over = [d for d, size in zip(range(input.dim() - dims, input.dim()), sizes, strict=True) if size == 1]
        y = mean_of(input, dim=over, keepdim=True)
        if len(over) == dims:
            return y
        return adaptive_avg_pool(dims, y, sizes) if isinstance(y, SpatialTensor) else pool(y, sizes)
    return _adaptive(name, input, sizes, lambda x, d: x.mean(d, keepdim=True), pool)


def adaptive_max_pool(dims: int, input: Any, output_size: Any, return_indices: bool = False) -> Tensor:
    name = f"adaptive_max_pool{dims}d"
    _, first = check_image(name, input, dims)
    if return_indices:
        raise refuse(name, "return_indices=True")
    sizes = _sizes(input, output_size, dims)
    pool = getattr(functional, name)
    if ones := _to_one(input, sizes):
        y = first_maximum(input, ones, sizes)
        return adaptive_max_pool(dims, y, sizes) if isinstance(y, SpatialTensor) else y

    def highest(x: Tensor, d: int) -> Tensor:
        return pool(x, [1 if first + i == d else x.size(first + i) for i in range(dims)])

    return _adaptive(name, input, sizes, highest, pool)


def _functions(name: str) -> list[Any]:
    """The functions of this name in torch's three places, as far as they exist."""
    found = [getattr(place, name, None) for place in (torch, F, _nn)]
    return [function for function in found if function is not None]


for _dims in (1, 2, 3):
    rule(*_functions(f"max_pool{_dims}d"))(_max_pool(_dims))
    rule(*_functions(f"avg_pool{_dims}d"))(_avg_pool(_dims))
    rule(getattr(F, f"lp_pool{_dims}d"))(_lp_pool(_dims))
    rule(*_functions(f"adaptive_avg_pool{_dims}d"))(by_sample(_dims)(functools.partial(adaptive_avg_pool, _dims)))
    rule(getattr(F, f"adaptive_max_pool{_dims}d"))(by_sample(_dims)(functools.partial(adaptive_max_pool, _dims)))
