"""Rules for padding and resizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .axis import Axes, Range
from .layout import in_layout_of
from .operands import recut, wrap
from .parts import precise
from .pools import adaptive_avg_pool2d
from .rules import refuse, rule
from .tensor import SpatialTensor
from .windows import Window, check_image, reading, scaled_axis

_nn: Any = torch._C._nn


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
        axes[d] = Window(1, before=before).small_axis("pad", axis, size)
        reads = [(a - before, b - before) for a, b in axes[d].ranges()]
        local = reading(local, d, axis, reads, name, value or 0.0, fresh=False)
    if any(rest):
        local = functional.pad(local, rest, mode, value)
    return wrap(local, axes)


@rule(F.pixel_shuffle, torch.pixel_shuffle)
def pixel_shuffle(input: Any, upscale_factor: int) -> Tensor:
    local, _ = check_image("pixel_shuffle", input)
    axes = {d: axis.cut_at(tuple(cut * upscale_factor for cut in axis.cuts)) for d, axis in input.axes.items()}
    return SpatialTensor(F.pixel_shuffle(local, upscale_factor), axes)


@rule(F.pixel_unshuffle, torch.pixel_unshuffle)
def pixel_unshuffle(input: Any, downscale_factor: int) -> Tensor:
    check_image("pixel_unshuffle", input)
    new = {}
    for d, axis in input.axes.items():
        if axis.size % downscale_factor:
            raise RuntimeError(f"pixel_unshuffle: expected {axis.name} to be a multiple of {downscale_factor}")
        new[d] = scaled_axis("pixel_unshuffle", axis, axis.size // downscale_factor)
    there = recut(input, {d: tuple(cut * downscale_factor for cut in axis.cuts) for d, axis in new.items()})
    return SpatialTensor(F.pixel_unshuffle(there._local, downscale_factor), new)


def _taps(
    mode: str, size: int, out: int, scale: float | None, align: bool, outputs: Range, dtype: torch.dtype, device: Any
) -> tuple[Tensor, Tensor]:
    """Of a range of outputs: (taps, n) coordinates that are read, and their weights, in float64."""
    at = torch.arange(*outputs, dtype=torch.float64)
    if mode.startswith("nearest"):
        # The coordinates that torch takes: its own function, on the coordinates themselves. (Where the exact place is a
        # whole number, its kernels can differ from each other by one.) Where x has a shape alone, the CPU's.
        device = "cpu" if device.type == "meta" else device
        places = torch.arange(size, dtype=dtype, device=device).view(1, 1, size, 1)
        given: Any = {"size": (out, 1)} if scale is None else {"scale_factor": (scale, 1.0)}
        found = F.interpolate(places, **given, mode=mode).flatten()[outputs[0] : outputs[1]]
        return found[None].round().long().cpu(), torch.ones_like(at)[None]
    if size == out and mode == "bilinear":
        return at[None].long(), torch.ones_like(at)[None]
    step = 1 / scale if scale is not None else size / out
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
    local, first = check_image("interpolate", input)
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
    # First the dimension that is not cut, by torch's function, which leaves the other one as it is.
    align: dict[str, Any] = {} if mode.startswith("nearest") else {"align_corners": align_corners}
    if len(input.axes) < 2:
        cut = next(iter(input.axes)) - first
        other = 1 - cut
        if scales[other] is not None:
            one: Any = {"scale_factor": [1.0 if i == cut else scales[i] for i in range(2)]}
        else:
            one = {"size": [local.size(first + i) if i == cut else sizes[i] for i in range(2)]}
        if sizes[other] != whole[other] or scales[other] not in (None, 1.0):
            local = functional.interpolate(local, **one, mode=mode, **align)
    axes: Axes = {}
    for d, axis in input.axes.items():
        out, scale = sizes[d - first], scales[d - first]
        axes[d] = scaled_axis("interpolate", axis, out)
        given = mode, axis.size, out, scale, bool(align_corners)
        found = [_taps(*given, part, precise(local.dtype), local.device) for part in axes[d].ranges()]
        reads = [(int(taps.min()), int(taps.max()) + 1) if taps.numel() else (0, 0) for taps, _ in found]
        local = reading(local, d, axis, reads, fresh=False)
        taps, weights = found[axis.index]
        local = _resampled(local, d, taps - reads[axis.index][0], weights)
    return SpatialTensor(local, axes)


def _resampled(local: Tensor, dim: int, taps: Tensor, weights: Tensor) -> Tensor:
    shape = [-1 if d == dim else 1 for d in range(local.dim())]
    parts = []
    for tap, weight in zip(taps, weights, strict=True):
        part = local.index_select(dim, tap.to(local.device))
        parts.append(part if len(taps) == 1 else part * weight.to(local.device, precise(local.dtype)).view(shape))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return in_layout_of(local, total.to(local.dtype))
