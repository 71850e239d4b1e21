"""What changes an image's size, with the signatures of torch.nn.functional: pools, interpolation, padding.

The part of `lean_functional` that keeps at most a byte an output for backward. Arguments that this package does not
serve go to the stock function whole.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _library

_library.load()
_ops = torch.ops.patchconv
_ours = _library.plain_eager


def _max_pool(dims: int) -> Callable[..., Any]:
    name = f"max_pool{dims}d"
    op, stock = getattr(_ops, name).default, getattr(F, name)

    def function(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if return_indices or not _ours(input):
            return stock(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        lists = (_list(kernel_size), [] if stride is None else _list(stride), _list(padding), _list(dilation))
        return op(input, *lists, ceil_mode)

    function.__name__ = name
    function.__doc__ = f"torch.nn.functional.{name}. Keeps one byte an output, two for windows of over 256 places."
    return function


def _adaptive_max_pool(dims: int) -> Callable[..., Any]:
    name = f"adaptive_max_pool{dims}d"
    op, stock = getattr(_ops, name).default, getattr(F, name)

    def function(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        if return_indices or not _ours(input):
            return stock(input, output_size, return_indices)
        return op(input, _sizes(input, output_size, dims))

    function.__name__ = name
    function.__doc__ = f"torch.nn.functional.{name}. Keeps one byte an output, two for windows of over 256 places."
    return function


def _adaptive_avg_pool(dims: int) -> Callable[..., Tensor]:
    name = f"adaptive_avg_pool{dims}d"
    op, stock = getattr(_ops, name).default, getattr(F, name)

    def function(input: Tensor, output_size: Any) -> Tensor:
        if not _ours(input):
            return stock(input, output_size)
        return op(input, _sizes(input, output_size, dims))

    function.__name__ = name
    function.__doc__ = f"torch.nn.functional.{name}. Keeps sizes alone."
    return function


def _list(value: Any) -> Any:
    return [int(value)] if isinstance(value, Integral) else list(value)


def _sizes(input: Tensor, output_size: Any, dims: int) -> list[int]:
    """An adaptive pool's output sizes: None stands for the input's."""
    entries = [output_size] * dims if output_size is None or isinstance(output_size, int) else list(output_size)
    if len(entries) == 1:
        entries *= dims
    own = input.shape[-dims:]
    return [own[i] if entry is None else entry for i, entry in enumerate(entries)]


max_pool1d, max_pool2d, max_pool3d = (_max_pool(dims) for dims in (1, 2, 3))
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (_adaptive_max_pool(dims) for dims in (1, 2, 3))
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (_adaptive_avg_pool(dims) for dims in (1, 2, 3))


def _avg_pool(dims: int) -> Callable[..., Tensor]:
    name = f"avg_pool{dims}d"
    op, stock = getattr(_ops, name).default, getattr(F, name)

    def function(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        last = () if dims == 1 else (divisor_override,)
        if not _ours(input):
            return stock(input, kernel_size, stride, padding, ceil_mode, count_include_pad, *last)
        steps = [] if stride is None else _list(stride)
        return op(input, _list(kernel_size), steps, _list(padding), ceil_mode, count_include_pad, *last)

    function.__name__ = name
    function.__doc__ = f"torch.nn.functional.{name}. Keeps sizes alone."
    return function


avg_pool1d, avg_pool2d, avg_pool3d = (_avg_pool(dims) for dims in (1, 2, 3))


# Number of spatial dimensions -> the modes of interpolation that are served.
_MODES = {
    1: ("nearest", "nearest-exact", "linear"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic"),
    3: ("nearest", "nearest-exact", "trilinear"),
}


def _entries(value: Any, kinds: tuple[type, ...], dims: int) -> list[Any] | None:
    """One entry a dimension, of these types; None if it is not that."""
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
    """torch.nn.functional.interpolate. Where its output is needed in backward, it is made again from the input.

    Stock does mode "area", antialias, recompute_scale_factor, and on CUDA what deterministic algorithms forbid.
    """
    if not _ours(input):
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
    """torch.nn.functional.pad. Where its output is needed in backward, it is made again from the input."""
    plain = isinstance(pad, (list, tuple)) and all(type(entry) is int for entry in pad)
    if not plain or not _ours(input) or (input.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return F.pad(input, pad, mode, value)
    return _ops.pad.default(input, pad, mode, value)
