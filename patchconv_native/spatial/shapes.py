"""Rules for what cuts or renames dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .axis import Axes
from .joins import repeated
from .layout import with_usual_strides
from .operands import aligned, recut, wrap
from .parts import gather_parts
from .reductions import dims_of, remaining_axes
from .resize import pad
from .rules import refuse, rule, rules
from .tensor import SpatialTensor
from .windows import Window, reading, scaled_axis


def _pieces(function: Any) -> Callable[..., Any]:
    def serve(x: Any, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if dim % x.dim() in x.axes:
            raise refuse(function.__name__, "the dimension that it splits is cut")
        return tuple(wrap(part, x.axes) for part in function(x._local, *args, **kwargs))

    return serve


_PIECES = "chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split unsafe_split_with_sizes"
rules(_pieces, (getattr(place, name) for name in _PIECES.split() for place in (torch, Tensor)))


@rule(torch.unbind, Tensor.unbind)
def _unbind(x: Any, dim: int = 0) -> Any:
    dim %= x.dim()
    if dim in x.axes:
        raise refuse("unbind", "the dimension that it takes apart is cut")
    return tuple(wrap(part, remaining_axes(x, [dim], False)) for part in x._local.unbind(dim))


@rule(torch.narrow, Tensor.narrow, torch.narrow_copy, Tensor.narrow_copy)
def _narrow(x: Any, dim: int, start: Any, length: int) -> Tensor:
    with _disable_current_modes():  # a tensor's number is there even where x has a shape alone
        start = int(start)
    start += x.size(dim) if start < 0 else 0
    return _slice(x, dim % x.dim(), start, start + int(length))


def _slice(x: SpatialTensor, dim: int, start: int, stop: int) -> Any:
    if dim not in x.axes:
        return wrap(x._local.narrow(dim, start, stop - start), x.axes)
    if stop - start < x.axes[dim].least:
        return _gathered(x, dim, start, stop - start, 1)
    pads = [0, 0] * (x.dim() - 1 - dim) + [-start, stop - x.size(dim)]
    cropped: Any = pad(x, pads)
    # A copy for every part, since it is one for those that fetch something.
    return wrap(cropped._local.clone(), cropped.axes)


@rule(torch.diff, Tensor.diff)
def _diff(x: Any, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Tensor:
    """A part reads the n coordinates behind it too."""
    value: Any = x
    if prepend is not None or append is not None:
        value = torch.cat([t for t in (prepend, x, append) if t is not None], dim)
    dim %= value.dim()
    axis, size = value.axes.get(dim), value.size(dim) - n
    if axis is None:
        return wrap(value._local.diff(n, dim), value.axes)
    if value is not x or size < axis.least:
        raise refuse("diff", "what it joins is cut" if value is not x else "little of a cut dimension is left")
    window = Window(n + 1)
    new = window.small_axis("diff", axis, size)
    local = reading(value._local, dim, axis, [window.reads(part) for part in new.ranges()], fresh=n > 0)
    return wrap(local.diff(n, dim), {**value.axes, dim: new})


def _gathered(x: SpatialTensor, dim: int, start: int, size: int, step: int) -> Tensor:
    """Every step-th coordinate, of which there are few: all of them for every part, which is no longer cut here."""
    axis = x.axes[dim]
    new = axis.cut_at(tuple(min(max(-(-(cut - start) // step), 0), size) for cut in axis.cuts))
    a, b = new.range
    begin = start + a * step - axis.range[0]
    own = slice(begin, begin + (b - a - 1) * step + 1, step) if a < b else slice(0, 0)
    local = gather_parts(x._local[(slice(None),) * dim + (own,)], {dim: new})
    return wrap(local, {d: other for d, other in x.axes.items() if d != dim})


def _stepped(x: SpatialTensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    """Every step-th coordinate: a window of 1 with that stride."""
    axis, window = x.axes[dim], Window(1, step, 1, -start)
    size = len(range(start, stop, step))
    if size < axis.least:
        return _gathered(x, dim, start, size, step)
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
    if any(isinstance(e, bool) for e in entries):
        raise refuse("indexing", "by a truth value")
    if any(isinstance(e, (Tensor, list)) for e in entries):
        return _picked(x, entries)
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


def _picked(x: SpatialTensor, entries: list[Any]) -> Tensor:
    """By a list of numbers along one dimension, which is not cut."""
    at = [place for place, entry in enumerate(entries) if isinstance(entry, (Tensor, list))]
    others = [entry for place, entry in enumerate(entries) if place not in at]
    plain = [entry for entry in entries if isinstance(entry, Tensor)]
    if len(at) > 1 or any(entry != slice(None) for entry in others) or at[0] in x.axes:
        raise refuse("indexing", "by tensors or lists along a cut dimension, or along several")
    if any(isinstance(entry, SpatialTensor) or entry.dim() != 1 or entry.dtype == torch.bool for entry in plain):
        raise refuse("indexing", "by a tensor that is no list of places")
    return wrap(x._local[tuple(entries)], x.axes)


@rule(torch.index_select, Tensor.index_select)
def _index_select(x: Any, dim: int, index: Tensor) -> Tensor:
    dim %= x.dim()
    if not isinstance(x, SpatialTensor) or isinstance(index, SpatialTensor) or dim in x.axes:
        raise refuse("index_select", "its dimension is cut, or its index is")
    return wrap(x._local.index_select(dim, index), x.axes)


def set_item(x: Any, index: Any, value: Any) -> Any:
    """x[index] = value, as a function."""
    x[index] = value
    return x


set_item.__name__ = "__setitem__"


def put_back(x: Any, index: Any, value: Any) -> Any:
    """set_item of what was x[index], and was written since: where that is the memory of x, nothing is left to do."""
    return x if _memory(x[index]) == _memory(value) else set_item(x, index, value)


put_back.__name__ = "__setitem__"


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


@rule(set_item, put_back, Tensor.__setitem__)
def _set_item(x: Any, index: Any, value: Any) -> Any:
    """Along dimensions that are not cut. Writes into the local tensor."""
    entries = list(index) if isinstance(index, tuple) else [index]
    known = all(isinstance(e, (int, slice, type(...))) and not isinstance(e, bool) for e in entries)
    if not isinstance(x, SpatialTensor) or not known:
        raise refuse("__setitem__", "it takes a SpatialTensor, numbers and slices")
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        entries[place : place + 1] = [slice(None)] * (x.dim() + 1 - len(entries))
    if any(d in x.axes and entry != slice(None) for d, entry in enumerate(entries)):
        raise refuse("__setitem__", "along a cut dimension")
    written: Any = _getitem(x, tuple(entries))  # a view
    if not isinstance(value, Tensor):
        written._local.fill_(value)
        return x
    given, axes = aligned("__setitem__", (written, value))
    if axes != written.axes:
        raise refuse("__setitem__", "of a value that is cut elsewhere")
    written._local.copy_(given[1])
    return x


@rule(torch.unsqueeze, Tensor.unsqueeze)
def _unsqueeze(x: Any, dim: int) -> Tensor:
    dim %= x.dim() + 1
    return wrap(x._local.unsqueeze(dim), {d + (d >= dim): axis for d, axis in x.axes.items()})


@rule(torch.squeeze, Tensor.squeeze)
def _squeeze(x: Any, dim: Any = None) -> Tensor:
    given = [] if dim in ((), []) else dims_of(x, dim)
    dims = [d for d in given if x.size(d) == 1 and d not in x.axes]
    return wrap(x._local.squeeze(dims), remaining_axes(x, dims, False))


@rule(torch.permute, Tensor.permute)
def _permute(x: Any, dims: Sequence[int]) -> Tensor:
    order = [d % x.dim() for d in dims]
    return wrap(x._local.permute(order), {order.index(d): axis for d, axis in x.axes.items()})


@rule(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, torch.swapdims, Tensor.swapdims)
def _transpose(x: Any, dim0: int, dim1: int) -> Tensor:
    order = list(range(x.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(x, order)


@rule(getattr(Tensor, "mT").__get__)  # noqa: B009
def _matrix_transposed(x: Any) -> Tensor:
    return _transpose(x, -2, -1)


@rule(torch.adjoint, Tensor.adjoint, getattr(Tensor, "mH").__get__)  # noqa: B009
def _adjoint(x: Any) -> Tensor:
    return _transpose(x, -2, -1).conj()


@rule(getattr(Tensor, "T").__get__)  # noqa: B009
def _transposed(x: Any) -> Tensor:
    return _permute(x, list(reversed(range(x.dim()))))


@rule(torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis)
def _movedim(x: Any, source: Any, destination: Any) -> Tensor:
    pairs = [(source, destination)] if isinstance(source, int) else zip(source, destination, strict=True)
    places = {b % x.dim(): a % x.dim() for a, b in pairs}
    rest = iter(d for d in range(x.dim()) if d not in places.values())
    return _permute(x, [places[d] if d in places else next(rest) for d in range(x.dim())])


def _reshaped(function: str, x: SpatialTensor, shape: Sequence[int]) -> Tensor:
    """A cut dimension stays one, or is joined with those that follow it, or is taken apart: then the first of its parts
    is cut.
    """
    sizes = [int(n) for n in shape]
    if -1 in sizes:
        rest = math.prod(n for n in sizes if n != -1)
        sizes[sizes.index(-1)] = x.numel() // rest if rest else 0
    if math.prod(sizes) != x.numel():
        raise RuntimeError(f"{function}: shape {list(shape)} is invalid for input of size {x.numel()}")
    axes: Axes = {}
    for d, axis in x.axes.items():
        place = _place_of(x, d, sizes)
        if place is None or place in axes:
            raise refuse(function, f"from {list(x.shape)} to {sizes} a cut dimension would not stay one")
        size = sizes[place]
        if size >= axis.size:
            axes[place] = axis.cut_at(tuple(cut * (size // axis.size) for cut in axis.cuts))
            continue
        each = axis.size // size
        axes[place] = scaled_axis(function, axis, size)
        x = recut(x, {d: tuple(cut * each for cut in axes[place].cuts)})
    local = x._local.reshape([axes[e].length if e in axes else n for e, n in enumerate(sizes)])
    return wrap(with_usual_strides(local), axes)


def _place_of(x: SpatialTensor, dim: int, sizes: Sequence[int]) -> int | None:
    """The dimension of a new shape that a cut dimension is the first part of, or that is the first part of it."""
    size, before = x.size(dim), math.prod(x.shape[:dim])
    after = math.prod(x.shape[dim + 1 :])
    places = []
    for e, n in enumerate(sizes):
        rest = math.prod(sizes[e + 1 :])
        if math.prod(sizes[:e]) == before and (n > 1 or size == 1) and rest and after:
            if n == size:
                return e
            if rest % after == 0 or after % rest == 0:
                places.append(e)
    return places[0] if places else None


@rule(Tensor.view)
def _view(x: Any, size: Any) -> Tensor:
    if isinstance(size, torch.dtype):
        raise refuse("view", "as another dtype")
    return _reshaped("view", x, size)


@rule(Tensor.view_as, Tensor.reshape_as)
def _view_as(x: Any, other: Any) -> Tensor:
    if not isinstance(x, SpatialTensor):
        raise refuse("view_as", "its input is a plain tensor")
    return _reshaped("view_as", x, other.shape)


@rule(torch.reshape, Tensor.reshape)
def _reshape(x: Any, shape: Sequence[int]) -> Tensor:
    return _reshaped("reshape", x, shape)


@rule(torch.flatten, Tensor.flatten, torch.ravel, Tensor.ravel)
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    a, b = start_dim % x.dim(), end_dim % x.dim()
    return _reshaped("flatten", x, [*x.shape[:a], math.prod(x.shape[a : b + 1]), *x.shape[b + 1 :]])


@rule(torch.unflatten, Tensor.unflatten)
def _unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Tensor:
    dim, given = dim % x.dim(), [int(n) for n in sizes]
    if -1 in given:
        given[given.index(-1)] = x.size(dim) // max(-math.prod(given), 1)
    return _reshaped("unflatten", x, [*x.shape[:dim], *given, *x.shape[dim + 1 :]])


@rule(torch.view_as_complex)
def _view_as_complex(x: Any) -> Tensor:
    if x.dim() - 1 in x.axes:
        raise refuse("view_as_complex", "its last dimension is cut")
    return wrap(torch.view_as_complex(x._local), x.axes)


@rule(torch.view_as_real)
def _view_as_real(x: Any) -> Tensor:
    return wrap(torch.view_as_real(x._local), x.axes)


@rule(Tensor.expand, torch.broadcast_to, Tensor.broadcast_to)
def _expand(x: Any, size: Sequence[int], implicit: bool = False) -> Tensor:
    sizes = list(size)
    more = len(sizes) - x.dim()
    for d, axis in x.axes.items():
        if axis.size == 1 and sizes[d + more] > 1:
            x = repeated("expand", x, d, sizes[d + more])
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
def _flip(x: Any, dims: Any) -> Tensor:
    if any(d % x.dim() in x.axes for d in ([dims] if isinstance(dims, int) else dims)):
        raise refuse("flip", "its dimension is cut")
    return wrap(x._local.flip(dims), x.axes)


@rule(torch.fliplr, Tensor.fliplr)
def _fliplr(x: Any) -> Tensor:
    return _flip(x, 1)


@rule(torch.flipud, Tensor.flipud)
def _flipud(x: Any) -> Tensor:
    return _flip(x, 0)


@rule(torch.channel_shuffle, F.channel_shuffle)
def _channel_shuffle(x: Any, groups: int) -> Tensor:
    return wrap(torch.channel_shuffle(x._local, groups), x.axes)
