"""Rules for reductions and losses. What is reduced over a cut dimension is then the same for every part along it."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axes, Executors, executors_of
from .operands import aligned, local_of, parameter, recut, wrap
from .parts import all_sum, part_of, precise, summed
from .rules import refuse, rule, rules
from .tensor import SpatialTensor


def dims_of(x: Tensor, dim: Any) -> list[int]:
    """An argument `dim` of torch as a list; None stands for all dimensions."""
    if dim is None or dim == () or dim == []:
        return list(range(x.dim()))
    return sorted({d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)})


def remaining_axes(x: SpatialTensor, dims: Sequence[int], keepdim: bool) -> Axes:
    """Of what a reduction over these dimensions gives."""
    return {d if keepdim else d - sum(r < d for r in dims): axis for d, axis in x.axes.items() if d not in dims}


def executors_over(x: SpatialTensor, dims: Sequence[int]) -> Executors:
    """Of the cut dimensions among these."""
    return tuple(axis.executor for d, axis in x.axes.items() if d in dims)


@rule(torch.sum, Tensor.sum)
def total_of(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = dims_of(x, dim)
    executors = executors_over(x, dims)
    if not executors:
        return wrap(x._local.sum(dims, keepdim, dtype=dtype), remaining_axes(x, dims, keepdim))
    half = precise(x.dtype) != x.dtype and dtype is None
    local = x._local.sum(dims, keepdim, dtype=precise(x.dtype) if half else dtype)
    total = summed(local, executors)
    return wrap(total.to(x.dtype) if half else total, remaining_axes(x, dims, keepdim))


@rule(torch.mean, Tensor.mean)
def mean_of(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = dims_of(x, dim)
    executors = executors_over(x, dims)
    kind = dtype or x.dtype
    if not executors or not (kind.is_floating_point or kind.is_complex):  # or torch's error
        return wrap(x._local.mean(dims, keepdim, dtype=dtype), remaining_axes(x, dims, keepdim))
    count = math.prod(x.size(d) for d in dims)
    local = x._local.sum(dims, keepdim, dtype=precise(dtype or x.dtype)) / count
    return wrap(summed(local, executors).to(dtype or x.dtype), remaining_axes(x, dims, keepdim))


def with_indices(function: Any) -> Callable[..., Any]:
    """Over a dimension that is not cut; values alone, or values and indices."""

    def serve(x: Any, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[0] if args and not isinstance(args[0], bool) else None)
        keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
        if not isinstance(x, SpatialTensor) or not isinstance(dim, int) or dim % x.dim() in x.axes:
            raise refuse(function.__name__, "the dimension that it goes over is cut")
        axes = remaining_axes(x, [dim % x.dim()], keepdim)
        found = function(x._local, *args, **kwargs)
        if isinstance(found, Tensor):
            return wrap(found, axes)
        return type(found)([wrap(part, axes) for part in found])

    return serve


rules(with_indices, (torch.argmax, torch.argmin, Tensor.argmax, Tensor.argmin, torch.logsumexp, Tensor.logsumexp,
                  torch.special.logsumexp, torch.prod, Tensor.prod, torch.median, Tensor.median))  # fmt: skip


@rule(torch.any, Tensor.any)
def _any(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _truth(x, _found(x, x._local != 0, dim, keepdim))


def _found(x: SpatialTensor, there: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """Whether any is true of all parts."""
    dims = dims_of(x, dim)
    executors = executors_over(x, dims)
    number = there.sum(dims, keepdim)
    return wrap((all_sum(number, executors) if executors else number) > 0, remaining_axes(x, dims, keepdim))


def _truth(x: Tensor, found: Tensor) -> Tensor:
    """As torch has it: of bytes it is one of them."""
    return found.byte() if x.dtype == torch.uint8 else found


@rule(torch.all, Tensor.all)
def _all(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _truth(x, ~_found(x, x._local == 0, dim, keepdim))


@rule(torch.var, Tensor.var)
def variance_of(
    x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Tensor:
    """Of deviations from the mean of all parts."""
    if isinstance(dim, bool):  # var(unbiased)
        dim, unbiased = None, dim
    if x.is_complex():
        raise refuse("var", "of complex numbers")
    dims = dims_of(x, dim)
    count = math.prod(x.size(d) for d in dims)
    values = x.to(precise(x.dtype))
    away: Any = values - mean_of(values, dims, keepdim=True)
    less = (1 if unbiased else 0) if correction is None else correction
    return (total_of(away * away, dims, keepdim) / (count - less)).to(x.dtype)


@rule(torch.std, Tensor.std)
def _std(x: Any, *args: Any, **kwargs: Any) -> Tensor:
    return variance_of(x.to(precise(x.dtype)), *args, **kwargs).sqrt().to(x.dtype)


@rule(torch.var_mean)
def _var_mean(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    over = None if isinstance(dim, bool) else dim  # var_mean(x, unbiased)
    return variance_of(input, dim, *args, **kwargs), mean_of(input, over, keepdim)


@rule(torch.std_mean)
def _std_mean(input: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(input.to(precise(input.dtype)), *args, **kwargs)
    return var.sqrt().to(input.dtype), mean.to(input.dtype)


def _ordered(function: Any, place: int) -> Callable[..., Any]:
    """Values and indices along a dimension that is not cut. place: of the argument `dim`."""

    def serve(x: Any, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[place] if len(args) > place else -1)
        if not isinstance(x, SpatialTensor) or isinstance(dim, bool) or dim % x.dim() in x.axes:
            raise refuse(function.__name__, "the dimension that it goes over is cut")
        found = function(x._local, *args, **kwargs)
        return wrap(found, x.axes) if isinstance(found, Tensor) else type(found)([wrap(part, x.axes) for part in found])

    return serve


rules(functools.partial(_ordered, place=0), (torch.sort, Tensor.sort, torch.argsort, Tensor.argsort))
rules(functools.partial(_ordered, place=1), (torch.topk, Tensor.topk))


@rule(torch.norm, Tensor.norm, torch.linalg.vector_norm)
def _norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    p = kwargs.pop("ord", p)
    if p not in (2, 2.0, "fro", None) or kwargs.get("dtype") is not None:
        raise refuse("norm", "of another order than 2")
    x = x.abs() if x.is_complex() else x
    values = x.to(precise(x.dtype))  # the square of half precision may be infinite
    return total_of(values * values, dim, keepdim).sqrt().to(x.dtype)


def _over_uncut(function: Any) -> Callable[..., Any]:
    def serve(x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, SpatialTensor) or dim is None or dim % x.dim() in x.axes:
            raise refuse(function.__name__, "the dimension that it goes over is cut")
        return wrap(function(x._local, dim, *args, **kwargs), x.axes)

    return serve


rules(_over_uncut, (F.softmax, F.log_softmax, F.softmin, torch.softmax, torch.log_softmax, Tensor.softmax,
                  Tensor.log_softmax, torch.special.softmax, torch.special.log_softmax, torch.cumsum,
                  Tensor.cumsum))  # fmt: skip


@rule(F.cosine_similarity)
def _cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Tensor:
    (a, b), axes = aligned("cosine_similarity", (x1, x2))
    dim %= max(a.dim(), b.dim())
    if dim in axes:
        raise refuse("cosine_similarity", "the dimension that it goes over is cut")
    return wrap(F.cosine_similarity(a, b, dim, eps), {d - (d > dim): axis for d, axis in axes.items()})


@rule(F.glu, torch._C._nn.glu)
def _glu(input: Any, dim: int = -1) -> Tensor:
    if dim % input.dim() in input.axes:
        raise refuse("glu", "the dimension that it halves is cut")
    return wrap(F.glu(input._local, dim), input.axes)


# ----------------------------------------------------------------------------------------------------------------------
# Losses, reduced over the whole image.


def _refuse_lost_weight() -> None:
    """F.l1_loss (torch 2.14) drops its `weight` when it hands the call on. It is looked up in the caller's frame."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("weight") is not None:
        raise refuse("l1_loss", "with a weight, which torch does not hand on")


def _loss(function: Any) -> Callable[..., Any]:
    def serve(input: Any, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        reduction = kwargs.pop("reduction", "mean")
        if args or kwargs.pop("size_average", None) is not None or kwargs.pop("reduce", None) is not None:
            raise refuse(function.__name__, "arguments besides input and target must be named")
        if function is F.l1_loss and "weight" not in kwargs:
            _refuse_lost_weight()
        names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        values, axes = aligned(function.__name__, [input, target, *(kwargs[name] for name in names)])
        kwargs.update(zip(names, values[2:], strict=True))
        each = wrap(function(values[0], values[1], reduction="none", **kwargs), axes)
        if reduction == "none":
            return each
        if reduction == "sum":
            return total_of(each)
        if function is F.kl_div and reduction == "batchmean":
            return total_of(each) / input.size(0)
        if function in (F.mse_loss, F.l1_loss) and kwargs.get("weight") is not None:  # by their sum
            weights = wrap(kwargs["weight"].expand_as(local_of(each)), axes)
            return total_of(each) / total_of(weights)
        return mean_of(each)

    return serve


rules(_loss, (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
                  F.binary_cross_entropy_with_logits, F.kl_div))  # fmt: skip


@rule(F.cross_entropy)
def cross_entropy(
    input: Any, target: Any, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    if not isinstance(input, SpatialTensor) or 1 in input.axes or size_average is not None or reduce is not None:
        raise refuse("cross_entropy", "it takes logits (N, C, H, W) as a SpatialTensor")
    by_class = not target.is_floating_point()
    places = {max(d - 1, 0): axis for d, axis in input.axes.items()}  # of (N, H, W)
    axes = places if by_class else dict(input.axes)
    if isinstance(target, SpatialTensor):
        target = recut(target, {d: axis.cuts for d, axis in axes.items()})._local
    else:
        target = part_of(target, axes)
    scale = parameter(weight, input)
    given: dict[str, Any] = {"weight": scale, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if reduction == "none":
        each = F.cross_entropy(input._local, target, reduction="none", **given)
        return SpatialTensor(each, places)
    executors = executors_of(input.axes)
    total = summed(F.cross_entropy(input._local, target, reduction="sum", **given), executors)
    if reduction == "sum":
        return total
    if not by_class:
        return total / (input.numel() // input.size(1))
    counted = target != ignore_index
    number = (counted if weight is None else weight[target.masked_fill(~counted, 0)] * counted).sum()
    return total / summed(number.to(total.dtype), executors)
