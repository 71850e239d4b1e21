"""Rules for padding and resizing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from .. import functional
from .axis import Axes, Range
from .layout import in_layout_of
from .operands import recut, wrap
from .parts import precise
from .pools import adaptive_avg_pool
from .rules import refuse, rule
from .tensor import SpatialTensor
from .windows import SIZES, Window, by_sample, check_image, picking, reading, scaled_axis

_nn: Any = torch._C._nn


@rule(F.pad, _nn.pad)
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
        left = axis.size + (min(before, 0) + min(after, 0) if mode == "circular" else 0)
        if mode != "constant" and (max(before, after) > left - (mode == "reflect") and mode != "replicate"):
            raise RuntimeError(f"pad: expected padding of {axis.name} to be under its size {axis.size}, got {pad}")
        if size < 1:
            raise refuse("pad", "nothing of a cut dimension")
        axes[d] = Window(1, before=before).small_axis("pad", axis, size)
        reads = [(a - before, b - before) for a, b in axes[d].ranges()]
        if left < axis.size:
            local = picking(local, d, axis, [_wrapped(one, max(-before, 0), left) for one in reads])
        else:
            local = reading(local, d, axis, reads, name, value or 0.0, fresh=False)
    if any(rest):
        local = functional.pad(local, rest, mode, value)
    return wrap(local, axes)


@rule(torch.constant_pad_nd)
def _constant_pad(input: Any, sizes: Sequence[int], value: float = 0) -> Tensor:
    return pad(input, sizes, value=value)


def _wrapped(read: Range, begin: int, left: int) -> list[Range]:
    """Of circular padding of an image that is cropped to `left` coordinates from `begin` on: those that stand there."""
    turns = (begin - left, begin, begin + left)
    return [(max(read[0], turn) - turn + begin, min(read[1], turn + left) - turn + begin) for turn in turns]


@rule(F.pixel_shuffle, torch.pixel_shuffle)
@by_sample(2)
def pixel_shuffle(input: Any, upscale_factor: int) -> Tensor:
    local, _ = check_image("pixel_shuffle", input, 2)
    axes = {d: axis.cut_at(tuple(cut * upscale_factor for cut in axis.cuts)) for d, axis in input.axes.items()}
    return SpatialTensor(F.pixel_shuffle(local, upscale_factor), axes)


@rule(F.pixel_unshuffle, torch.pixel_unshuffle)
@by_sample(2)
def pixel_unshuffle(input: Any, downscale_factor: int) -> Tensor:
    check_image("pixel_unshuffle", input, 2)
    new = {}
    for d, axis in input.axes.items():
        if axis.size % downscale_factor:
            raise RuntimeError(f"pixel_unshuffle: expected {axis.name} to be a multiple of {downscale_factor}")
        new[d] = scaled_axis("pixel_unshuffle", axis, axis.size // downscale_factor)
    there = recut(input, {d: tuple(cut * downscale_factor for cut in axis.cuts) for d, axis in new.items()})
    return SpatialTensor(F.pixel_unshuffle(there._local, downscale_factor), new)


def _taps(
    mode: str, dims: int, size: int, out: int, scale: float | None, align: bool, dtype: torch.dtype, device: Any,
    outputs: Range,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of a range of outputs: (taps, n) coordinates that are read, and their weights, in float64."""
    at = torch.arange(*outputs, dtype=torch.float64)
    if mode.startswith("nearest"):
        # The coordinates that torch takes: its own function, on the coordinates themselves. (Where the exact place is a
        # whole number, its kernels can differ from each other by one.) Where x has a shape alone, the CPU's.
        ones = [1] * (dims - 1)
        places = torch.arange(size, dtype=dtype, device=device).view(1, 1, size, *ones)
        given: Any = {"size": (out, *ones)} if scale is None else {"scale_factor": (scale, *map(float, ones))}
        found = F.interpolate(places, **given, mode=mode).flatten()[outputs[0] : outputs[1]]
        return found[None].round().long().cpu(), torch.ones_like(at)[None]
    if size == out and mode != "bicubic":
        return at[None].long(), torch.ones_like(at)[None]
    step = 1 / scale if scale is not None else size / out
    if align:
        real = at * ((size - 1) / (out - 1) if out > 1 else 0.0)
    else:
        real = (at + 0.5) * step - 0.5
    if mode != "bicubic":
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


@functools.lru_cache(maxsize=32)
def _all_reads(
    mode: str, dims: int, size: int, out: int, scale: float | None, align: bool, dtype: torch.dtype, device: Any
) -> tuple[list[int], list[int]]:
    """Of each output, the lowest and the highest coordinate that it reads."""
    taps, _ = _taps(mode, dims, size, out, scale, align, dtype, device, (0, out))
    return taps.amin(0).tolist(), taps.amax(0).tolist()


def _reads(given: tuple[Any, ...], outputs: Range) -> Range:
    """The coordinates that a range of outputs reads: its first output reads the lowest one, its last the highest."""
    low, high = outputs
    if low >= high:
        return 0, 0
    lowest, highest = _all_reads(*given)
    return lowest[low], highest[high - 1] + 1


_MODES = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}


def _sizes_and_scales(
    whole: list[int], size: Any, scale_factor: Any, recompute: bool | None
) -> tuple[list[int], list[float | None]]:
    """The sizes of the output, and the scales by which it is computed; None where they follow from the sizes."""
    dims = len(whole)
    given = scale_factor if size is None else size
    entries = list(given) if isinstance(given, (tuple, list)) else [given] * dims
    if (size is None) == (scale_factor is None) or len(entries) != dims:
        raise ValueError(
            f"interpolate: expected either size or scale_factor, a number or {dims} of them, got {size} and "
            f"{scale_factor}"
        )
    if size is not None:
        return [int(n) for n in entries], [None] * dims
    factors = [float(factor) for factor in entries]
    sizes = [int(n * factor) for n, factor in zip(whole, factors, strict=True)]
    return sizes, [None] * dims if recompute else list(factors)


@rule(F.interpolate, F.upsample)
def interpolate(
    input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Tensor:  # fmt: skip
    dims = input.dim() - 2
    if dims not in _MODES or not isinstance(input, SpatialTensor):
        raise refuse("interpolate", f"it takes {' or '.join(f'(N, C, {sizes})' for sizes in SIZES.values())}")
    return by_sample(dims)(_interpolate)(
        input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    )


def _interpolate(
    input: Any, size: Any, scale_factor: Any, mode: str, align_corners: bool | None, recompute: bool | None,
    antialias: bool,
) -> Tensor:  # fmt: skip
    dims = input.dim() - 2
    local, first = check_image("interpolate", input, dims)
    if antialias or mode not in ("nearest", "nearest-exact", "area", *_MODES[dims]):
        raise refuse("interpolate", f"mode {mode!r}{' with antialias' if antialias else ''} of (N, C, {SIZES[dims]})")
    if not (input.is_floating_point() or mode.startswith("nearest")):
        raise refuse("interpolate", f"mode {mode!r} of {input.dtype}")
    whole = list(input.shape[2:])
    sizes, scales = _sizes_and_scales(whole, size, scale_factor, recompute)
    if mode == "area":
        return adaptive_avg_pool(dims, input, sizes)
    if min(sizes) < 1:
        raise RuntimeError(f"interpolate: expected an output of at least 1, got {sizes}")
    # First the dimensions that are not cut, by torch's function, which leaves the others as they are.
    uncut = [i for i in range(dims) if first + i not in input.axes]
    if any(sizes[i] != whole[i] or scales[i] not in (None, 1.0) for i in uncut):
        if scales[0] is not None:
            one: Any = {"scale_factor": [scales[i] if i in uncut else 1.0 for i in range(dims)]}
        else:
            one = {"size": [sizes[i] if i in uncut else local.size(first + i) for i in range(dims)]}
        align: Any = {} if mode.startswith("nearest") else {"align_corners": align_corners}
        local = functional.interpolate(local, **one, mode=mode, **align)
    axes: Axes = {}
    device = torch.device("cpu") if is_fake(local) or local.is_meta else local.device
    for d, axis in input.axes.items():
        out, scale = sizes[d - first], scales[d - first]
        axes[d] = scaled_axis("interpolate", axis, out)
        given = mode, dims, axis.size, out, scale, bool(align_corners), precise(local.dtype), device
        with _disable_current_modes():  # coordinates are computed even where x has a shape alone
            parts = axes[d].ranges()
            reads = [_reads(given, part) for part in parts]
            taps, weights = _taps(*given, parts[axis.index])
        local = reading(local, d, axis, reads, fresh=False)
        local = _resampled(local, d, taps, weights, reads[axis.index][0])
    return SpatialTensor(local, axes)


def _resampled(local: Tensor, dim: int, taps: Tensor, weights: Tensor, begin: int) -> Tensor:
    """begin: the coordinate of the first row of `local`."""
    shape = [-1 if d == dim else 1 for d in range(local.dim())]
    parts = []
    for tap, weight in zip(taps, weights, strict=True):
        part = local.index_select(dim, (tap - begin).to(local.device))
        parts.append(part if len(taps) == 1 else part * weight.to(local.device, precise(local.dtype)).view(shape))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return in_layout_of(local, total.to(local.dtype))
