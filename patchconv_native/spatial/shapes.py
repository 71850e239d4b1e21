"""Rules for what joins, cuts or renames dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .axis import Axes, executors_of
from .operands import aligned, recut, wrap
from .parts import part_of, shared
from .reductions import dims_of, remaining_axes
from .resize import pad
from .rules import refuse, rule, rules
from .tensor import SpatialTensor
from .windows import Window, reading


def _same_cuts(function: str, tensors: Sequence[Any], dim: int) -> tuple[list[Tensor], Axes]:
    """Local tensors that are all cut as the first SpatialTensor, to be joined along `dim`; and its axes."""
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
            parts.append(part_of(shared(t, executors_of(like.axes)), like.axes))
    return parts, like.axes


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Any, dim: int = 0, axis: int | None = None) -> Tensor:
    dim = dim if axis is None else axis
    dim %= tensors[0].dim()
    parts, axes = _same_cuts("cat", tensors, dim)
    return SpatialTensor(functional.cat(parts, dim), axes)


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
    return tuple(wrap(part, remaining_axes(x, [dim], False)) for part in x._local.unbind(dim))


@rule(torch.narrow, Tensor.narrow)
def _narrow(x: Any, dim: int, start: int, length: int) -> Tensor:
    start = int(start) + (x.size(dim) if start < 0 else 0)
    return _slice(x, dim % x.dim(), start, start + int(length))


def _slice(x: SpatialTensor, dim: int, start: int, stop: int) -> Any:
    if dim not in x.axes:
        return wrap(x._local.narrow(dim, start, stop - start), x.axes)
    pads = [0, 0] * (x.dim() - 1 - dim) + [-start, stop - x.size(dim)]
    cropped: Any = pad(x, pads)
    # A copy for every part, since it is one for those that fetch something.
    return wrap(cropped._local.clone(), cropped.axes)


def _stepped(x: SpatialTensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    """Every step-th coordinate: a window of 1 with that stride."""
    axis, window = x.axes[dim], Window(1, step, 1, -start)
    size = len(range(start, stop, step))
    if size < 1:
        raise refuse("indexing", "nothing of a cut dimension")
    new = window.small_axis("indexing", axis, size)
    local = reading(x._local, dim, axis, [window.reads(part) for part in new.ranges()], fresh=False)
    return wrap(local[(slice(None),) * dim + (slice(None, None, step),)].clone(), {**x.axes, dim: new})


@rule(torch.select, Tensor.select)
def _select(x: Any, dim: int, index: int) -> Tensor:
    dim %= x.dim()
    if dim in x.axes:
        raise refuse("select", "its dimension is cut")
    return wrap(x._local.select(dim, index), remaining_axes(x, [dim], False))


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
                    x = _stepped(x, dim, start, stop, step)
                    dim += 1
                    continue
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
    dims = [d for d in dims_of(x, dim) if x.size(d) == 1 and d not in x.axes]
    return wrap(x._local.squeeze(dims), remaining_axes(x, dims, False))


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
    axes: Axes = {}
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


@rule(Tensor.expand)
def _expand(x: Any, *shape: Any) -> Tensor:
    sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    more = len(sizes) - x.dim()
    axes = {d + more: axis for d, axis in x.axes.items()}
    if any(sizes[d] not in (-1, axis.size) for d, axis in axes.items()):
        raise RuntimeError(f"expand: expected cut dimensions to keep their sizes, got {sizes} for {list(x.shape)}")
    return wrap(x._local.expand([-1 if d in axes else n for d, n in enumerate(sizes)]), axes)


@rule(Tensor.expand_as)
def _expand_as(x: Any, other: Any) -> Tensor:
    (local, like), axes = aligned("expand_as", (x, other))
    return wrap(local.expand_as(like), axes)


@rule(torch.roll, Tensor.roll)
def _roll(x: Any, shifts: Any, dims: Any = None) -> Tensor:
    if dims is None or any(d in x.axes for d in dims_of(x, dims)):
        raise refuse("roll", "along a cut dimension")
    return wrap(x._local.roll(shifts, dims), x.axes)


@rule(torch.flip, Tensor.flip)
def _flip(x: Any, *dims: Any) -> Tensor:
    given = dims_of(x, dims[0] if len(dims) == 1 else dims)
    if any(d in x.axes for d in given):
        raise refuse("flip", "its dimension is cut")
    return wrap(x._local.flip(given), x.axes)


@rule(torch.channel_shuffle, F.channel_shuffle)
def _channel_shuffle(x: Any, groups: int) -> Tensor:
    return wrap(torch.channel_shuffle(x._local, groups), x.axes)
