"""What parts have to do with each other, as differentiable functions of plain tensors.

Two kinds of values: a part of an image, another one for every part; and a value that is the same for every part. What
goes from one kind to the other has a gradient that follows from that. A parameter (the same everywhere) that is used on
parts gets the sum of all parts' gradients. A sum over all parts (the same everywhere) hands its gradient to each part
once. All of it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .axis import Axes, Axis, Executors, Range, Wanted
from .layout import cut_out, empty, layout

# view_as would change the strides of dimensions of size 1, and with them the memory format.
alias = torch.ops.aten.alias.default


def precise(dtype: torch.dtype) -> torch.dtype:
    """In which values of a dtype are summed: float32 for half precision."""
    return torch.float32 if dtype in (torch.half, torch.bfloat16) else dtype


def fetch(x: Tensor, dim: int, axis: Axis, wanted: Wanted, fresh: bool = False) -> Tensor:
    """The ranges that this part wants, one after the other."""
    return axis.executor.fetch(x, dim, axis, wanted, fresh=fresh).finish()


def recut(x: Tensor, dim: int, axis: Axis, cuts: tuple[int, ...]) -> Tensor:
    """This part of the same image, cut at other places."""
    return x if cuts == axis.cuts else fetch(x, dim, axis, tuple((part,) for part in axis.cut_at(cuts).ranges()))


# ----------------------------------------------------------------------------------------------------------------------
# Over all parts. Without history.


def all_sum(values: Tensor, executors: Executors) -> Tensor:
    """The sum over all parts; half precision is added in float32. The same bits for every part."""
    total = values.detach().to(precise(values.dtype)).clone(memory_format=torch.contiguous_format)
    for executor in executors:
        total = executor.sum(total)
    return total.to(values.dtype)


def all_parts(make: Callable[[], Tensor], executors: Executors) -> Tensor:
    """What `make` gives for every part, stacked along a new first dimension."""
    known = executors[0].known() if executors else None
    if known is not None:
        return known
    values = make().detach().contiguous()[None]
    for executor in executors:
        values = executor.stack(values)
    return values


# ----------------------------------------------------------------------------------------------------------------------
# Between parts and values that are the same for every part.


class _Shared(Function):
    """The same everywhere -> used on parts."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, executors: Executors) -> Tensor:
        ctx.executors = executors
        return alias(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Summed.apply(grads[0], ctx.executors), None


class _Summed(Function):
    """Each part's -> their sum, the same everywhere."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, executors: Executors) -> Tensor:
        ctx.executors = executors
        return all_sum(value, executors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Shared.apply(grads[0], ctx.executors), None


def shared(value: Tensor, executors: Executors) -> Tensor:
    """A value that is the same for every part, to be used on parts: its gradient is the sum over all parts."""
    if not executors or executors[0].link is not None:  # or parts are differentiated one by one
        return value
    return _Shared.apply(value, executors) if value.requires_grad and torch.is_grad_enabled() else value


def summed(value: Tensor, executors: Executors) -> Tensor:
    """The sum of all parts' values, the same for every part."""
    link = executors[0].link if executors else None
    return _Summed.apply(value, executors) if link is None else link(all_sum(value, executors), lambda: value)


class _Scatter(Function):
    """The whole, the same everywhere -> this part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.given = dim, axis
        part = whole.narrow(dim, axis.range[0], axis.length)
        return empty(whole, dim, axis.length, layout(whole)).copy_(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Gather.apply(grads[0], *ctx.given), None, None


class _Gather(Function):
    """Parts -> the whole, the same everywhere."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.given = dim, axis
        everything: tuple[Range, ...] = ((0, axis.size),)
        return fetch(part.detach(), dim, axis, (everything,) * axis.count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Scatter.apply(grads[0], *ctx.given), None, None


def scatter_part(whole: Tensor, axes: Axes) -> Tensor:
    """This part, as a copy, of a tensor that is the same for every part. Every part gets the whole gradient."""
    for d, axis in axes.items():
        whole = _Scatter.apply(whole, d, axis)
    return whole


def gather_parts(part: Tensor, axes: Axes) -> Tensor:
    """The whole, the same for every part. Its gradient, also the same, is taken once: each part gets its own share."""
    for d, axis in reversed(axes.items()):
        part = _Gather.apply(part, d, axis)
    return part


def part_of(whole: Tensor, axes: Axes) -> Tensor:
    """A view of this part of a tensor that is the same for every part."""
    for d, axis in axes.items():
        whole = cut_out(whole, d, axis.range[0], axis.length)
    return whole
