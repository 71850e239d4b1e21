"""Rules for what reads neighbours: convolutions, pools, padding, resizing.

An output keeps to the ranks that hold the middle of what it reads (`cuts`). Each rank then fetches what its outputs
read and it does not hold, and computes as one device would on that range; what lies outside of the image comes from the
padding mode, on the ranks at its border. All sizes are the whole image's, so odd ones, strides that do not divide and
uneven parts are no cases of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional, lean_functional, lean_resize
from .cuts import Axis, Range, Wanted, Window, hulls, inside, scaled_cuts, source_indices
from .exchange import fetch
from .tensor import Axes, SpatialTensor, parameter, refuse, rule, wrap

_nn: Any = torch._C._nn
_ops = torch.ops.patchconv


def _pair(value: Any) -> list[int]:
    entries = [value] if isinstance(value, int) else [int(v) for v in value]
    return entries * 2 if len(entries) == 1 else entries


def reading(
    local: Tensor, dim: int, axis: Axis, reads: list[Range], mode: str = "zeros", fill: float | None = 0.0,
    fresh: bool = True,
) -> tuple[Tensor, int, int]:  # fmt: skip
    """What this rank reads, `reads` being the ranges of all ranks, which may reach into the padding. Gives the tensor
    and how much padding it lacks before and after: none, but in mode "zeros" with fill=None.
    """
    low, high = reads[axis.index]
    if mode == "zeros":
        wanted: Wanted = tuple((inside(one, axis.size),) for one in reads)
        a, b = wanted[axis.index][0]
        before, after = (high - low, 0) if a == b else (a - low, high - b)
        local = fetch(local, dim, axis, wanted, fresh)
        if fill is None and a < b:
            return local, before, after
        if before or after:
            local = lean_resize.pad(local, _pads(local.dim(), dim, before, after), value=fill or 0.0)
        return local, 0, 0
    indices = [source_indices(mode, one, axis.size) for one in reads]
    wanted = tuple(hulls(one) for one in indices)
    local = fetch(local, dim, axis, wanted, fresh)
    order = [i for a, b in wanted[axis.index] for i in range(a, b)]
    if order != indices[axis.index]:
        places = {i: n for n, i in enumerate(order)}
        at = torch.tensor([places[i] for i in indices[axis.index]], device=local.device)
        local = _in_format(local.index_select(dim, at), local)
    return local, 0, 0


def _pads(dims: int, dim: int, before: int, after: int) -> list[int]:
    """As F.pad wants them: the last dimension first."""
    return [0, 0] * (dims - 1 - dim) + [before, after]


def _in_format(made: Tensor, like: Tensor) -> Tensor:
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        return made.contiguous(memory_format=torch.channels_last)
    return made


def _check(function: str, x: Any) -> tuple[Tensor, int]:
    """The local tensor, and the first spatial dimension."""
    if not isinstance(x, SpatialTensor) or x.dim() not in (3, 4) or any(d < x.dim() - 2 for d in x.axes):
        raise refuse(function, "it takes (N, C, H, W) or (C, H, W), cut along H or W")
    return x._local, x.dim() - 2


# ----------------------------------------------------------------------------------------------------------------------
# Convolutions.


def _pads_of(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    if padding == "valid":
        return [(0, 0), (0, 0)]
    if padding == "same":
        spare = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        return [(spare[0] // 2, spare[0] - spare[0] // 2), (spare[1] // 2, spare[1] - spare[1] // 2)]
    entries = [padding] if isinstance(padding, int) else list(padding)
    if len(entries) == 4:
        return [(entries[0], entries[1]), (entries[2], entries[3])]
    rows, columns = _pair(entries)
    return [(rows, rows), (columns, columns)]


@rule(torch.conv2d, _ops.conv2d, _ops.conv2d.default)
def conv2d(
    input: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, *, padding_mode: str = "zeros", splits: Any = None,
) -> Tensor:  # fmt: skip
    local, first = _check("conv2d", input)
    kernel, strides, dilations = list(weight.shape[2:]), _pair(stride), _pair(dilation)
    pads = _pads_of(padding, kernel, dilations)
    axes: Axes = {}
    left: list[int] = []
    for i in range(2):
        d = first + i
        window = Window(kernel[i], strides[i], dilations[i], pads[i][0])
        size = (input.size(d) + sum(pads[i]) - window.reach) // strides[i] + 1
        if d not in input.axes:
            left += pads[i]
            continue
        axis = input.axes[d]
        if size < 1:
            raise RuntimeError(
                f"conv2d: expected {axis.name} of the padded input to be at least {window.reach}, the kernel's reach, "
                f"got {input.size(d) + sum(pads[i])}"
            )
        axes[d] = axis.cut_at(window.small_cuts("conv2d", axis, size))
        reads = [window.reads(part) for part in axes[d].parts()]
        local, before, after = reading(local, d, axis, reads, padding_mode, None)
        left += [before, after]
    weight, bias = parameter(weight, input), parameter(bias, input)
    y = functional.conv2d(
        local, weight, bias, strides, left, dilations, groups, padding_mode=padding_mode, splits=splits
    )
    return SpatialTensor(y, axes)


@rule(torch.conv_transpose2d, _ops.conv_transpose2d, _ops.conv_transpose2d.default)
def conv_transpose2d(
    input: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1, *, splits: Any = None,
) -> Tensor:  # fmt: skip
    local, first = _check("conv_transpose2d", input)
    kernel, strides, dilations = list(weight.shape[2:]), _pair(stride), _pair(dilation)
    pads, more = _pair(padding), _pair(output_padding)
    axes: Axes = {}
    left, extra, crops = [], [], []
    for i in range(2):
        d = first + i
        window = Window(kernel[i], strides[i], dilations[i], pads[i])
        size = (input.size(d) - 1) * strides[i] - 2 * pads[i] + window.reach + more[i]
        if d not in input.axes:
            left.append(pads[i])
            extra.append(more[i])
            continue
        axis = input.axes[d]
        if size < 1:
            raise RuntimeError(f"conv_transpose2d: expected an output of at least 1 along {axis.name}, got {size}")
        axes[d] = axis.cut_at(window.big_cuts("conv_transpose2d", axis, size))
        # What touches a part of the output; one coordinate at least, so that there is something to compute with.
        reads = []
        for part in axes[d].parts():
            a, b = window.touches(part, axis.size)
            a = min(max(a, 0), axis.size - 1)
            reads.append((a, max(b, a + 1)))
        local, _, _ = reading(local, d, axis, reads)
        a, b = reads[axis.index]
        low, high = axes[d].own
        begin = a * strides[i] - pads[i]  # of what these inputs give without padding
        end = begin + (b - a - 1) * strides[i] + window.reach
        left.append(0)
        extra.append(0)
        crops.append((d, low - begin, end - high, high - low))
    weight, bias = parameter(weight, input), parameter(bias, input)
    y = functional.conv_transpose2d(local, weight, bias, strides, left, extra, groups, dilations, splits=splits)
    for d, before, after, length in crops:
        if before < 0 or after < 0:  # reached by no input: the bias alone
            y = _with_bias_rows(y, bias, d, max(-before, 0), max(-after, 0))
            before = max(before, 0)
        y = y.narrow(d, before, length)
    return SpatialTensor(y, axes)


def _with_bias_rows(y: Tensor, bias: Tensor | None, dim: int, before: int, after: int) -> Tensor:
    parts = []
    for length in (before, after):
        shape = list(y.shape)
        shape[dim] = length
        rows = y.new_zeros(shape)
        parts.append(rows if bias is None else rows + bias.to(y.dtype).view(-1, 1, 1))
    return torch.cat([parts[0], y, parts[1]], dim)


# ----------------------------------------------------------------------------------------------------------------------
# Pools.


def _pooled_size(size: int, kernel: int, stride: int, padding: int, reach: int, ceil_mode: bool) -> int:
    pooled = (size + 2 * padding - reach + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (pooled - 1) * stride >= size + padding:
        pooled -= 1  # a window that begins in the padding at the end
    return pooled


def _read_for_pool(
    function: str, x: SpatialTensor, windows: list[Window], ceil_mode: bool, fill: float
) -> tuple[Tensor, Axes, list[int]]:
    """What the windows of this rank read, the new axes, and the padding of dimensions that are not cut."""
    local, first = _check(function, x)
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
        axes[d] = axis.cut_at(window.small_cuts(function, axis, size))
        local, _, _ = reading(local, d, axis, [window.reads(part) for part in axes[d].parts()], fill=fill)
        padding[i] = 0
    return local, axes, padding


@rule(torch.max_pool2d, F.max_pool2d)
def max_pool2d(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:  # fmt: skip
    kernel, dilations = _pair(kernel_size), _pair(dilation)
    strides = _pair(stride) if stride is not None and stride != [] else kernel
    pads = _pair(padding)
    if any(2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise RuntimeError(f"max_pool2d: expected padding to be at most half of kernel_size, got {pads} and {kernel}")
    windows = [Window(kernel[i], strides[i], dilations[i], pads[i]) for i in range(2)]
    local, axes, left = _read_for_pool("max_pool2d", input, windows, ceil_mode, float("-inf"))
    return SpatialTensor(lean_resize.max_pool2d(local, kernel, strides, left, dilations, ceil_mode), axes)


@rule(_nn.avg_pool2d, F.avg_pool2d)
def avg_pool2d(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    kernel, pads = _pair(kernel_size), _pair(padding)
    strides = _pair(stride) if stride is not None and stride != [] else kernel
    if any(2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise RuntimeError(f"avg_pool2d: expected padding to be at most half of kernel_size, got {pads} and {kernel}")
    windows = [Window(k, s, 1, p) for k, s, p in zip(kernel, strides, pads, strict=True)]
    local, axes, left = _read_for_pool("avg_pool2d", input, windows, ceil_mode, 0.0)
    counts = []
    for i, window in enumerate(windows):
        d = input.dim() - 2 + i
        size = input.size(d)
        pooled = _pooled_size(size, window.kernel, window.stride, window.before, window.kernel, ceil_mode)
        low, high = axes[d].own if d in axes else (0, pooled)
        begins = [p * window.stride - window.before for p in range(low, high)]
        limit = size + window.before if count_include_pad else size
        floor = -window.before if count_include_pad else 0
        counts.append([min(a + window.kernel, limit) - max(a, floor) for a in begins])
    one = divisor_override
    if one is None and all(len(set(count)) == 1 for count in counts):
        one = counts[0][0] * counts[1][0]
    y = lean_resize.avg_pool2d(local, kernel, strides, left, ceil_mode, True, one or 1)
    if one is None:
        rows, columns = (torch.tensor(count, dtype=torch.float64) for count in counts)
        y = y * (1 / (rows[:, None] * columns)).to(y)
    return SpatialTensor(y, axes)


def _adaptive(
    function: str, x: Any, output_size: Any, reduce: Callable[[Tensor, int], Tensor], rest: Callable[..., Tensor]
) -> Tensor:
    """Bins of several outputs along a cut dimension: a row of outputs at a time."""
    local, first = _check(function, x)
    wanted = [output_size] * 2 if isinstance(output_size, int) or output_size is None else list(output_size)
    sizes = [x.size(first + i) if n is None else n for i, n in enumerate(wanted)]
    axes: Axes = {}
    for i, size in enumerate(sizes):
        d = first + i
        if d not in x.axes:
            continue
        axis = x.axes[d]
        axes[d] = axis.cut_at(scaled_cuts(function, axis, size))
        reads = [(a * axis.size // size, -(-b * axis.size // size)) for a, b in axes[d].parts()]
        local, _, _ = reading(local, d, axis, reads, fresh=False)
        begin = reads[axis.index][0]
        rows = []
        for p in range(*axes[d].own):
            a, b = p * axis.size // size, -(-(p + 1) * axis.size // size)
            rows.append(reduce(local.narrow(d, a - begin, b - a), d))
        local = torch.cat(rows, d)
        sizes[i] = local.size(d)
    return SpatialTensor(rest(local, sizes), axes)


def _ones(x: Any, output_size: Any) -> bool:
    """Whether every cut dimension goes to one output: a global pool."""
    entries = [output_size] * 2 if isinstance(output_size, int) else list(output_size)
    return all(entries[d - x.dim() + 2] == 1 for d in x.axes)


@rule(F.adaptive_avg_pool2d, _nn.adaptive_avg_pool2d)
def adaptive_avg_pool2d(input: Any, output_size: Any) -> Tensor:
    _check("adaptive_avg_pool2d", input)
    if output_size is not None and _ones(input, output_size):
        from .shapes import mean_of

        y = mean_of(input, dim=tuple(input.axes), keepdim=True)
        entries = [output_size] * 2 if isinstance(output_size, int) else list(output_size)
        return y if len(input.axes) == 2 else F.adaptive_avg_pool2d(y, (entries[0], entries[1]))
    return _adaptive("adaptive_avg_pool2d", input, output_size, lambda x, d: x.mean(d, keepdim=True),
                     lean_resize.adaptive_avg_pool2d)  # fmt: skip


@rule(_nn.adaptive_max_pool2d, F.adaptive_max_pool2d)
def adaptive_max_pool2d(input: Any, output_size: Any, return_indices: bool = False) -> Tensor:
    _, first = _check("adaptive_max_pool2d", input)
    if return_indices:
        raise refuse("adaptive_max_pool2d", "return_indices=True")
    if output_size is not None and _ones(input, output_size):
        from .shapes import first_maximum

        y = first_maximum(input)
        entries = [output_size] * 2 if isinstance(output_size, int) else list(output_size)
        return y if len(input.axes) == 2 else F.adaptive_max_pool2d(y, entries)

    def highest(x: Tensor, d: int) -> Tensor:
        return F.adaptive_max_pool2d(x, [1 if first + i == d else x.size(first + i) for i in range(2)])

    return _adaptive("adaptive_max_pool2d", input, output_size, highest, lean_resize.adaptive_max_pool2d)


# ----------------------------------------------------------------------------------------------------------------------
# Padding and resizing.


@rule(F.pad, torch.constant_pad_nd, _nn.pad)
def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    if not isinstance(input, SpatialTensor):
        raise refuse("pad", "its input is a plain tensor")
    local, axes, rest = input._local, dict(input.axes), list(pad)
    name = {"constant": "zeros"}.get(mode, mode)
    for d, axis in input.axes.items():
        place = 2 * (input.dim() - 1 - d)
        if place >= len(rest) or rest[place : place + 2] == [0, 0]:
            continue
        before, after = rest[place : place + 2]
        rest[place : place + 2] = [0, 0]
        size = axis.size + before + after
        if mode != "constant" and (max(before, after) > axis.size - (mode == "reflect") and mode != "replicate"):
            raise RuntimeError(f"pad: expected padding of {axis.name} to be under its size {axis.size}, got {pad}")
        if size < 1:
            raise RuntimeError(f"pad: expected an output of at least 1 along {axis.name}, got {size}")
        axes[d] = axis.cut_at(Window(1, before=before).small_cuts("pad", axis, size))
        reads = [(a - before, b - before) for a, b in axes[d].parts()]
        local, _, _ = reading(local, d, axis, reads, name, value or 0.0, fresh=False)
    if any(rest):
        local = lean_resize.pad(local, rest, mode, value)
    return wrap(local, axes)


@rule(F.pixel_shuffle, torch.pixel_shuffle)
def pixel_shuffle(input: Any, upscale_factor: int) -> Tensor:
    local, _ = _check("pixel_shuffle", input)
    axes = {d: axis.cut_at(tuple(cut * upscale_factor for cut in axis.cuts)) for d, axis in input.axes.items()}
    return SpatialTensor(F.pixel_shuffle(local, upscale_factor), axes)


@rule(F.pixel_unshuffle, torch.pixel_unshuffle)
def pixel_unshuffle(input: Any, downscale_factor: int) -> Tensor:
    from .moving import recut

    _check("pixel_unshuffle", input)
    new = {}
    for d, axis in input.axes.items():
        if axis.size % downscale_factor:
            raise RuntimeError(f"pixel_unshuffle: expected {axis.name} to be a multiple of {downscale_factor}")
        new[d] = axis.cut_at(scaled_cuts("pixel_unshuffle", axis, axis.size // downscale_factor))
    there = recut(input, {d: tuple(cut * downscale_factor for cut in axis.cuts) for d, axis in new.items()})
    return SpatialTensor(F.pixel_unshuffle(there._local, downscale_factor), new)


def _taps(mode: str, size: int, out: int, scale: float | None, align: bool, own: Range) -> tuple[Tensor, Tensor]:
    """Of outputs in `own`: (taps, n) coordinates that are read, and their weights, in float64."""
    at = torch.arange(*own, dtype=torch.float64)
    step = 1 / scale if scale is not None else size / out
    if mode == "nearest":
        found = (at * step).floor().clamp(max=size - 1)
        return found[None].long(), torch.ones_like(at)[None]
    if mode == "nearest-exact":
        found = ((at + 0.5) * step).floor().clamp(max=size - 1)
        return found[None].long(), torch.ones_like(at)[None]
    if align:
        real = at * ((size - 1) / (out - 1) if out > 1 else 0.0)
    else:
        real = (at + 0.5) * step - 0.5
    if mode == "bilinear":
        real = real.clamp(min=0)
        low = real.floor().clamp(max=size - 1)
        part = (real - low).clamp(0, 1)
        return torch.stack([low, (low + 1).clamp(max=size - 1)]).long(), torch.stack([1 - part, part])
    low = real.floor()
    t = real - low
    a = -0.75
    near = [((a + 2) * u - (a + 3)) * u * u + 1 for u in (t, 1 - t)]
    far = [((a * u - 5 * a) * u + 8 * a) * u - 4 * a for u in (t + 1, 2 - t)]
    taps = torch.stack([low + k for k in (-1, 0, 1, 2)]).clamp(0, size - 1).long()
    return taps, torch.stack([far[0], near[0], near[1], far[1]])


@rule(F.interpolate, F.upsample)
def interpolate(
    input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Tensor:  # fmt: skip
    local, first = _check("interpolate", input)
    if input.dim() != 4:
        raise refuse("interpolate", "it takes (N, C, H, W)")
    if antialias or mode not in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        raise refuse("interpolate", f"mode {mode!r}{' with antialias' if antialias else ''}")
    whole = list(input.shape[2:])
    scales: list[float | None] = [None, None]
    if size is not None:
        if scale_factor is not None:
            raise ValueError("only one of size or scale_factor should be defined")
        sizes = [size] * 2 if isinstance(size, int) else [int(n) for n in size]
    else:
        factors = [float(f) for f in (scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor] * 2)]
        sizes = [int(n * f) for n, f in zip(whole, factors, strict=True)]
        if not recompute_scale_factor:
            scales = list(factors)
    if mode == "area":
        return adaptive_avg_pool2d(input, sizes)
    if min(sizes) < 1:
        raise RuntimeError(f"interpolate: expected an output of at least 1, got {sizes}")
    # Dimensions that are not cut first, by torch: along the others nothing changes then.
    align: dict[str, Any] = {} if mode.startswith("nearest") else {"align_corners": align_corners}
    if len(input.axes) < 2:
        cut = next(iter(input.axes)) - first
        other = 1 - cut
        if scales[other] is not None:
            one: Any = {"scale_factor": [1.0 if i == cut else scales[i] for i in range(2)]}
        else:
            one = {"size": [local.size(first + i) if i == cut else sizes[i] for i in range(2)]}
        if sizes[other] != whole[other] or scales[other] not in (None, 1.0):
            local = lean_functional.interpolate(local, **one, mode=mode, **align)
    axes: Axes = {}
    for d, axis in input.axes.items():
        out, scale = sizes[d - first], scales[d - first]
        axes[d] = axis.cut_at(scaled_cuts("interpolate", axis, out))
        found = [_taps(mode, axis.size, out, scale, bool(align_corners), part) for part in axes[d].parts()]
        reads = [(int(taps.min()), int(taps.max()) + 1) for taps, _ in found]
        local, _, _ = reading(local, d, axis, reads, fresh=False)
        taps, weights = found[axis.index]
        local = _resampled(local, d, taps - reads[axis.index][0], weights)
    return SpatialTensor(local, axes)


def _resampled(local: Tensor, dim: int, taps: Tensor, weights: Tensor) -> Tensor:
    shape = [-1 if d == dim else 1 for d in range(local.dim())]
    precise = torch.float32 if local.dtype in (torch.half, torch.bfloat16) else local.dtype
    parts = []
    for tap, weight in zip(taps, weights, strict=True):
        part = local.index_select(dim, tap.to(local.device))
        parts.append(part if len(taps) == 1 else part * weight.to(local.device, precise).view(shape))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return _in_format(total.to(local.dtype), local)
