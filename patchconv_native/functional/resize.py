"""Interpolation and padding. They save sizes alone; a later layer that needs the result in backward makes it again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._library import plain_eager

__all__ = ["interpolate", "pad"]

_ops = torch.ops.patchconv

# Number of spatial dimensions -> the modes of interpolation that are served.
_MODES = {
    1: ("nearest", "nearest-exact", "linear"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic"),
    3: ("nearest", "nearest-exact", "trilinear"),
}


def _entries(value: Any, kinds: tuple[type, ...], dims: int) -> list[Any] | None:
    """One entry a dimension, each of one of these types, or None if value is something else."""
    entries = [value] * dims if type(value) in kinds else list(value) if isinstance(value, (list, tuple)) else []
    return entries if len(entries) == dims and all(type(entry) in kinds for entry in entries) else None


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """torch.nn.functional.interpolate. A layer that needs the result in backward makes it again from the input.

    The stock function serves mode "area", antialias, recompute_scale_factor, and CUDA with deterministic algorithms.
    """
    if not plain_eager(input):
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    dims = input.dim() - 2
    sizes, scales = _entries(size, (int,), dims), _entries(scale_factor, (int, float), dims)
    given = (size is None, scale_factor is None) in ((sizes is None, True), (True, scales is None))
    if (
        not given
        or (sizes is None) == (scales is None)
        or mode not in _MODES.get(dims, ())
        or (align_corners is not None and mode.startswith("nearest"))
        or recompute_scale_factor
        or antialias
        or (input.is_cuda and torch.are_deterministic_algorithms_enabled())
    ):
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    return _ops.upsample.default(input, sizes, scales, mode, bool(align_corners))


def pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    """torch.nn.functional.pad. A layer that needs the result in backward makes it again from the input."""
    plain = isinstance(pad, (list, tuple)) and all(type(entry) is int for entry in pad)
    if not plain or not plain_eager(input) or (input.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return F.pad(input, pad, mode, value)
    return _ops.pad.default(input, pad, mode, value)
