"""Rules for reductions, losses, and what joins, cuts or renames dimensions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .cuts import Axis
from .exchange import all_parts, all_sum, shared, summed
from .moving import recut
from .resize import pad
from .tensor import Axes, SpatialTensor, aligned, groups_of, local_of, parameter, refuse, rule, rules, wrap

# ----------------------------------------------------------------------------------------------------------------------
# Reductions. What is reduced over a cut dimension is the same on every rank of its group afterwards.


def _dims_of(x: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == () or dim == []:
        return list(range(x.dim()))
    return sorted({d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)})


def _left(x: SpatialTensor, dims: Sequence[int], keepdim: bool) -> Axes:
    return {d if keepdim else d - sum(r < d for r in dims): axis for d, axis in x.axes.items() if d not in dims}


def _groups(x: SpatialTensor, dims: Sequence[int]) -> tuple[Any, ...]:
    return tuple(axis.group for d, axis in x.axes.items() if d in dims)


@rule(torch.sum, Tensor.sum)
def total_of(
    x: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, dtype: torch.dtype | None = None
) -> Tensor:
    dims = _dims_of(x, dim if axis is None else axis)
    groups = _groups(x, dims)
    if not groups:
        return wrap(x._local.sum(dims, keepdim, dtype=dtype), _left(x, dims, keepdim))
    half = x.dtype in (torch.half, torch.bfloat16) and dtype is None
    local = x._local.sum(dims, keepdim, dtype=torch.float32 if half else dtype)
    total = summed(local, groups)
    return wrap(total.to(x.dtype) if half else total, _left(x, dims, keepdim))


@rule(torch.mean, Tensor.mean)
def mean_of(
    x: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, dtype: torch.dtype | None = None
) -> Tensor:
    dims = _dims_of(x, dim if axis is None else axis)
    groups = _groups(x, dims)
    if not groups or not (dtype or x.dtype).is_floating_point:  # or torch's error
        return wrap(x._local.mean(dims, keepdim, dtype=dtype), _left(x, dims, keepdim))
    count = math.prod(x.size(d) for d in dims)
    precise = torch.float32 if (dtype or x.dtype) in (torch.half, torch.bfloat16) else dtype
    local = x._local.sum(dims, keepdim, dtype=precise) / count
    return wrap(summed(local, groups).to(dtype or x.dtype), _left(x, dims, keepdim))


def _extreme(x: SpatialTensor, dim: Any, keepdim: bool, largest: bool) -> Tensor:
    """The gradient goes evenly to all places that have the value, as torch's amax has it."""
    dims = _dims_of(x, dim)
    groups = _groups(x, dims)
    reduce = torch.amax if largest else torch.amin
    if not groups:
        return wrap(reduce(x._local, dims, keepdim), _left(x, dims, keepdim))
    with torch.no_grad():
        most = reduce(all_parts(reduce(x._local, dims, True), groups), 0)
    found = _Extreme.apply(x._local, most, dims, groups) if x._local.requires_grad else most
    return wrap(found if keepdim else found.squeeze(dims), _left(x, dims, keepdim))


class _Extreme(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, most: Tensor, dims: list[int], groups: tuple[Any, ...]) -> Tensor:
        there = (x == most) | (x.isnan() & most.isnan())
        number = all_sum(there.sum(dims, keepdim=True), groups)
        ctx.save_for_backward(there, number)
        return most.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        there, number = ctx.saved_tensors
        return there * (grads[0] / number), None, None, None


@rule(torch.amax, Tensor.amax)
def _amax(x: Any, dim: Any = (), keepdim: bool = False) -> Tensor:
    return _extreme(x, dim, keepdim, True)


@rule(torch.amin, Tensor.amin)
def _amin(x: Any, dim: Any = (), keepdim: bool = False) -> Tensor:
    return _extreme(x, dim, keepdim, False)


@rule(torch.max, Tensor.max)
def _max(x: Any, *args: Any, **kwargs: Any) -> Any:
    return _named_extreme(torch.max, torch.maximum, True, x, *args, **kwargs)


@rule(torch.min, Tensor.min)
def _min(x: Any, *args: Any, **kwargs: Any) -> Any:
    return _named_extreme(torch.min, torch.minimum, False, x, *args, **kwargs)


def _named_extreme(whole: Any, pairs: Any, largest: bool, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs:
        return _extreme(x, None, False, largest)
    if args and isinstance(args[0], Tensor):
        return pairs(x, args[0])
    return _with_indices(whole)(x, *args, **kwargs)


def _with_indices(function: Any) -> Callable[..., Any]:
    """Over a dimension that is not cut; values alone, or values and indices."""

    def serve(x: Any, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[0] if args and not isinstance(args[0], bool) else None)
        keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
        if not isinstance(x, SpatialTensor) or dim is None or dim % x.dim() in x.axes:
            raise refuse(function.__name__, "the dimension that it goes over is cut")
        axes = _left(x, [dim % x.dim()], keepdim)
        found = function(x._local, *args, **kwargs)
        if isinstance(found, Tensor):
            return wrap(found, axes)
        return type(found)([wrap(part, axes) for part in found])

    return serve


rules(_with_indices, (torch.argmax, torch.argmin, Tensor.argmax, Tensor.argmin, torch.logsumexp, Tensor.logsumexp,
                  torch.prod, Tensor.prod, torch.median, Tensor.median, torch.any, torch.all, Tensor.any, Tensor.all,
                  torch.norm, Tensor.norm))  # fmt: skip


def first_maximum(x: SpatialTensor) -> Tensor:
    """Over all cut dimensions, kept at 1; the gradient goes to the first place in the image that has it, as a max
    pool's does, and NaN counts as the largest.
    """
    sizes = [1 if x.dim() - 2 + i in x.axes else x.size(x.dim() - 2 + i) for i in range(2)]
    value, place = F.adaptive_max_pool2d(x._local, sizes, return_indices=True)
    with torch.no_grad():
        width = x._local.size(-1)
        row, column = place // width + x.offset[-2], place % width + x.offset[-1]
        order = -(row * x.size(-1) + column).double()
        key = torch.where(value.isnan(), torch.full_like(value, math.inf), value).double()
        keys, orders = all_parts(torch.stack([key, order]), groups_of(x.axes)).unbind(1)
        nans = all_parts(value.isnan().double(), groups_of(x.axes))
        nan_anywhere = nans.amax(0) > 0
        candidates = torch.where(nan_anywhere, nans > 0, keys == keys.amax(0))
        best = torch.where(candidates, orders, torch.full_like(orders, -math.inf)).amax(0)
        mine = (order == best) & torch.where(nan_anywhere, value.isnan(), key == keys.amax(0))
    return summed(torch.where(mine, value, torch.zeros_like(value)), groups_of(x.axes))


def _over_uncut(function: Any) -> Callable[..., Any]:
    def serve(x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, SpatialTensor) or dim is None or dim % x.dim() in x.axes:
            raise refuse(function.__name__, "the dimension that it goes over is cut")
        return wrap(function(x._local, dim, *args, **kwargs), x.axes)

    return serve


rules(_over_uncut, (F.softmax, F.log_softmax, F.softmin, torch.softmax, torch.log_softmax, Tensor.softmax,
                  Tensor.log_softmax, torch.cumsum, Tensor.cumsum))  # fmt: skip


@rule(F.glu)
def _glu(input: Any, dim: int = -1) -> Tensor:
    if dim % input.dim() in input.axes:
        raise refuse("glu", "the dimension that it halves is cut")
    return wrap(F.glu(input._local, dim), input.axes)


# ----------------------------------------------------------------------------------------------------------------------
# Losses, reduced over the whole image.


def _refuse_lost_weight() -> None:
    """F.l1_loss (torch 2.14) does not hand on its `weight`; what was given is still in its frame."""
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
        if function in (F.mse_loss, F.l1_loss) and kwargs.get("weight") is not None:  # by their sum
            weights = wrap(kwargs["weight"].expand_as(local_of(each)), axes)
            return total_of(each) / total_of(weights)
        return mean_of(each)

    return serve


rules(_loss, (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
                  F.binary_cross_entropy_with_logits))  # fmt: skip


@rule(F.cross_entropy)
def cross_entropy(
    input: Any, target: Any, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    if not isinstance(input, SpatialTensor) or 1 in input.axes or size_average is not None or reduce is not None:
        raise refuse("cross_entropy", "it takes logits (N, C, H, W) as a SpatialTensor")
    by_class = not target.is_floating_point()
    axes = {d - 1: axis for d, axis in input.axes.items()} if by_class else dict(input.axes)
    if isinstance(target, SpatialTensor):
        target = recut(target, {d: axis.cuts for d, axis in axes.items()})._local
    else:
        for d, axis in axes.items():
            target = target.narrow(d, axis.own[0], axis.length)
    scale = parameter(weight, input)
    given: dict[str, Any] = {"weight": scale, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if reduction == "none":
        each = F.cross_entropy(input._local, target, reduction="none", **given)
        return SpatialTensor(each, {d - 1: axis for d, axis in input.axes.items()})
    groups = groups_of(input.axes)
    total = summed(F.cross_entropy(input._local, target, reduction="sum", **given), groups)
    if reduction == "sum":
        return total
    if not by_class:
        return total / (input.numel() // input.size(1))
    counted = target != ignore_index
    number = (counted if weight is None else weight[target.masked_fill(~counted, 0)] * counted).sum()
    return total / summed(number.to(total.dtype), groups)


# ----------------------------------------------------------------------------------------------------------------------
# Joining and cutting.


def _same_cuts(function: str, tensors: Sequence[Any], dim: int) -> tuple[list[Tensor], Axes]:
    """Local tensors, all cut as the first SpatialTensor is; `dim` is joined over."""
    like = next(t for t in tensors if isinstance(t, SpatialTensor))
    if dim in like.axes:
        raise refuse(function, "the dimension that it joins is cut")
    parts = []
    for t in tensors:
        if isinstance(t, SpatialTensor):
            if t.axes.keys() != like.axes.keys():
                raise refuse(function, "its operands are cut along different dimensions")
            for d, axis in like.axes.items():
                if t.axes[d].size != axis.size:
                    raise RuntimeError(f"{function}: expected size {axis.size} along {axis.name}, got {t.size(d)}")
            parts.append(recut(t, {d: axis.cuts for d, axis in like.axes.items()})._local)
        else:
            part = shared(t, groups_of(like.axes))
            for d, axis in like.axes.items():
                part = part.narrow(d, axis.own[0], axis.length)
            parts.append(part)
    return parts, like.axes


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Any, dim: int = 0, axis: int | None = None) -> Tensor:
    from .. import lean_functional

    dim = dim if axis is None else axis
    dim %= tensors[0].dim()
    parts, axes = _same_cuts("cat", tensors, dim)
    return SpatialTensor(lean_functional.cat(parts, dim), axes)


@rule(torch.stack)
def stack(tensors: Any, dim: int = 0) -> Tensor:
    dim %= tensors[0].dim() + 1
    parts, axes = _same_cuts("stack", tensors, -1)
    return SpatialTensor(torch.stack(parts, dim), {d + (d >= dim): axis for d, axis in axes.items()})


def _pieces(function: Any) -> Callable[..., Any]:
    def serve(x: Any, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if dim % x.dim() in x.axes:
            raise refuse(function.__name__, "the dimension that it splits is cut")
        return tuple(wrap(part, x.axes) for part in function(x._local, *args, **kwargs))

    return serve


rules(_pieces, (torch.chunk, torch.split, Tensor.chunk, Tensor.split, torch.tensor_split, torch.split_with_sizes))


@rule(torch.unbind, Tensor.unbind)
def _unbind(x: Any, dim: int = 0) -> Any:
    dim %= x.dim()
    if dim in x.axes:
        raise refuse("unbind", "the dimension that it takes apart is cut")
    return tuple(wrap(part, _left(x, [dim], False)) for part in x._local.unbind(dim))


@rule(torch.narrow, Tensor.narrow)
def _narrow(x: Any, dim: int, start: int, length: int) -> Tensor:
    start = int(start) + (x.size(dim) if start < 0 else 0)
    return _slice(x, dim % x.dim(), start, start + int(length))


def _slice(x: SpatialTensor, dim: int, start: int, stop: int) -> Any:
    if dim not in x.axes:
        return wrap(x._local.narrow(dim, start, stop - start), x.axes)
    pads = [0, 0] * (x.dim() - 1 - dim) + [-start, stop - x.size(dim)]
    cropped: Any = pad(x, pads)
    # Not a view on one rank and a copy on another.
    return wrap(cropped._local.clone(), cropped.axes)


@rule(torch.select, Tensor.select)
def _select(x: Any, dim: int, index: int) -> Tensor:
    dim %= x.dim()
    if dim in x.axes:
        raise refuse("select", "its dimension is cut")
    return wrap(x._local.select(dim, index), _left(x, [dim], False))


@rule(Tensor.__getitem__)
def _getitem(x: Any, index: Any) -> Any:
    if not isinstance(x, SpatialTensor):
        raise refuse("indexing", "a plain tensor by a SpatialTensor")
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(e, (Tensor, list)) for e in entries):
        raise refuse("indexing", "by tensors or lists")
    given = len([e for e in entries if e is not None and e is not Ellipsis])
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        entries[place : place + 1] = [slice(None)] * (x.dim() - given)
    dim = 0
    for entry in entries:
        if entry is None:
            x = _unsqueeze(x, dim)
            dim += 1
        elif isinstance(entry, slice):
            start, stop, step = entry.indices(x.size(dim))
            if step != 1:
                if dim in x.axes:
                    raise refuse("indexing", "with a step along a cut dimension")
                x = wrap(x._local[(slice(None),) * dim + (entry,)], x.axes)
            elif (start, stop) != (0, x.size(dim)):
                x = _slice(x, dim, start, max(stop, start))
            dim += 1
        else:
            x = _select(x, dim, int(entry))
    return x


@rule(torch.unsqueeze, Tensor.unsqueeze)
def _unsqueeze(x: Any, dim: int) -> Tensor:
    dim %= x.dim() + 1
    return wrap(x._local.unsqueeze(dim), {d + (d >= dim): axis for d, axis in x.axes.items()})


@rule(torch.squeeze, Tensor.squeeze)
def _squeeze(x: Any, dim: Any = None) -> Tensor:
    dims = [d for d in _dims_of(x, dim) if x.size(d) == 1 and d not in x.axes]
    return wrap(x._local.squeeze(dims), _left(x, dims, False))


@rule(torch.permute, Tensor.permute)
def _permute(x: Any, *dims: Any) -> Tensor:
    order = [d % x.dim() for d in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]
    return wrap(x._local.permute(order), {order.index(d): axis for d, axis in x.axes.items()})


@rule(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes)
def _transpose(x: Any, dim0: int, dim1: int) -> Tensor:
    order = list(range(x.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(x, order)


@rule(torch.movedim, Tensor.movedim)
def _movedim(x: Any, source: int, destination: int) -> Tensor:
    order = [d for d in range(x.dim()) if d != source % x.dim()]
    order.insert(destination % x.dim(), source % x.dim())
    return _permute(x, order)


def _reshaped(function: str, x: SpatialTensor, shape: Sequence[int], reshape: Callable[..., Tensor]) -> Tensor:
    """A cut dimension must stay one: the same size, after as many elements."""
    sizes = [int(n) for n in shape]
    if -1 in sizes:
        rest = math.prod(n for n in sizes if n != -1)
        sizes[sizes.index(-1)] = x.numel() // rest if rest else 0
    if math.prod(sizes) != x.numel():
        raise RuntimeError(f"{function}: shape {list(shape)} is invalid for input of size {x.numel()}")
    axes: dict[int, Axis] = {}
    for d, axis in x.axes.items():
        before = math.prod(x.shape[:d])
        places = [e for e, n in enumerate(sizes) if n == axis.size and math.prod(sizes[:e]) == before]
        if not places:
            raise refuse(function, f"from {list(x.shape)} to {sizes} a cut dimension would not stay one")
        axes[places[0]] = axis
    return wrap(reshape(x._local, [axes[e].length if e in axes else n for e, n in enumerate(sizes)]), axes)


@rule(Tensor.view)
def _view(x: Any, *shape: Any) -> Tensor:
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise refuse("view", "as another dtype")
    return _reshaped("view", x, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, Tensor.view)


@rule(torch.reshape, Tensor.reshape)
def _reshape(x: Any, *shape: Any) -> Tensor:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return _reshaped("reshape", x, sizes, Tensor.reshape)


@rule(torch.flatten, Tensor.flatten)
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    a, b = start_dim % x.dim(), end_dim % x.dim()
    return _reshaped("flatten", x, [*x.shape[:a], math.prod(x.shape[a : b + 1]), *x.shape[b + 1 :]], Tensor.reshape)


@rule(torch.unflatten, Tensor.unflatten)
def _unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Tensor:
    dim %= x.dim()
    if dim in x.axes:
        raise refuse("unflatten", "its dimension is cut")
    axes = {d if d < dim else d + len(sizes) - 1: axis for d, axis in x.axes.items()}
    return wrap(x._local.unflatten(dim, sizes), axes)


@rule(torch.flip, Tensor.flip)
def _flip(x: Any, *dims: Any) -> Tensor:
    given = _dims_of(x, dims[0] if len(dims) == 1 else dims)
    if any(d in x.axes for d in given):
        raise refuse("flip", "its dimension is cut")
    return wrap(x._local.flip(given), x.axes)


@rule(torch.channel_shuffle, F.channel_shuffle)
def _channel_shuffle(x: Any, groups: int) -> Tensor:
    return wrap(torch.channel_shuffle(x._local, groups), x.axes)
