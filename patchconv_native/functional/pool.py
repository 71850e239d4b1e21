"""Pools. Max pools save for backward one or two bytes an output, average pools sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._library import plain_eager
from .naming import named

__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d",
]  # fmt: skip

_ops = torch.ops.patchconv
_OFFSETS = "Saves one byte an output, two for windows of over 256 elements."


def _list(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return [value]
    one = isinstance(value, Integral) or (isinstance(value, Tensor) and value.dim() == 0)
    return [int(value)] if one else list(value)


def _sizes(input: Tensor, output_size: Any, dims: int) -> list[int]:
    """An adaptive pool's output sizes: None stands for the input's."""
    entries: list[Any] = (
        [output_size] * dims
        if output_size is None or isinstance(output_size, (int, torch.SymInt))
        else list(output_size)
    )
    if len(entries) == 1:
        entries *= dims
    sizes = input.shape[-dims:]
    return [sizes[i] if entry is None else entry for i, entry in enumerate(entries)]


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
        if return_indices or not plain_eager(input) or input.is_quantized:
            return stock(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        lists = (_list(kernel_size), [] if stride is None else _list(stride), _list(padding), _list(dilation))
        return op(input, *lists, ceil_mode)

    return named(function, name, f"torch.nn.functional.{name}. {_OFFSETS}")


def _adaptive_max_pool(dims: int) -> Callable[..., Any]:
    name = f"adaptive_max_pool{dims}d"
    op, stock = getattr(_ops, name).default, getattr(F, name)

    def function(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        if return_indices or not plain_eager(input):
            return stock(input, output_size, return_indices)
        return op(input, _sizes(input, output_size, dims))

    return named(function, name, f"torch.nn.functional.{name}. {_OFFSETS}")


def _adaptive_avg_pool(dims: int) -> Callable[..., Tensor]:
    name = f"adaptive_avg_pool{dims}d"
    op, stock = getattr(_ops, name).default, getattr(F, name)

    def function(input: Tensor, output_size: Any) -> Tensor:
        if not plain_eager(input):
            return stock(input, output_size)
        return op(input, _sizes(input, output_size, dims))

    return named(function, name, f"torch.nn.functional.{name}. Saves sizes alone.")


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
        if not plain_eager(input):
            return stock(input, kernel_size, stride, padding, ceil_mode, count_include_pad, *last)
        steps = [] if stride is None else _list(stride)
        return op(input, _list(kernel_size), steps, _list(padding), ceil_mode, count_include_pad, *last)

    return named(function, name, f"torch.nn.functional.{name}. Saves sizes alone.")


max_pool1d, max_pool2d, max_pool3d = (_max_pool(dims) for dims in (1, 2, 3))
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (_adaptive_max_pool(dims) for dims in (1, 2, 3))
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (_adaptive_avg_pool(dims) for dims in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (_avg_pool(dims) for dims in (1, 2, 3))
