"""Rules for the largest and the smallest value of the image, and the places that have it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .operands import wrap
from .parts import all_parts, summed
from .reductions import dims_of, executors_over, remaining_axes, with_indices
from .rules import rule
from .tensor import SpatialTensor


def _extreme(x: SpatialTensor, dim: Any, keepdim: bool, largest: bool) -> Tensor:
    """The gradient goes evenly to all places that have the value, as torch's amax has it."""
    dims = dims_of(x, dim)
    executors = executors_over(x, dims)
    reduce = torch.amax if largest else torch.amin
    local = x._local
    if not executors:
        return wrap(reduce(local, dims, keepdim), remaining_axes(x, dims, keepdim))
    if not local.is_floating_point():
        most = reduce(all_parts(lambda: reduce(local, dims, True), executors), 0)
        return wrap(most if keepdim else most.squeeze(dims), remaining_axes(x, dims, keepdim))

    def of_part() -> Tensor:
        own, at = (torch.max if largest else torch.min)(_flattened(local, dims), -1)
        own, at = (t.reshape([1 if d in dims else n for d, n in enumerate(local.shape)]) for t in (own, at))
        number = _is(local, own).sum(list(dims), keepdim=True)
        return torch.stack([own.double(), number.double(), _place_in_whole(x, dims, at).double()])

    with torch.no_grad():
        owns, numbers, places = all_parts(of_part, executors).unbind(1)
        most = reduce(owns, 0)
        there = _is(owns, most)
        number = torch.where(there, numbers, 0.0).sum(0)
        place = torch.where(there, places, math.inf).amin(0).long()
        most = most.to(local.dtype)
    link = executors[0].link
    if link is not None:
        constant = most
        most = link(most, lambda: _added_extreme(x, dims, constant, number, place))
    elif local.requires_grad:
        most = _Extreme.apply(local, most, number)
    return wrap(most if keepdim else most.squeeze(dims), remaining_axes(x, dims, keepdim))


def _flattened(x: Tensor, dims: Sequence[int]) -> Tensor:
    """With these dimensions as the last one."""
    return x.movedim(tuple(dims), tuple(range(-len(dims), 0))).flatten(-len(dims))


def _place_in_whole(x: SpatialTensor, dims: Sequence[int], at: Tensor) -> Tensor:
    """Of a place in this part, counted over `dims`, that in the whole."""
    found, stride = torch.zeros_like(at), 1
    for d in reversed(dims):
        found = found + (at % x._local.size(d) + x.offset[d]) * stride
        at, stride = at // x._local.size(d), stride * x.size(d)
    return found


def _values_at(x: SpatialTensor, dims: Sequence[int], places: Tensor) -> Tensor:
    """The values at places of the whole, which are counted over `dims`; 0 for those that are not in this part. places:
    of the shape of the part, but for `dims`.
    """
    local, rest, at, stride = x._local, places, torch.zeros_like(places), 1
    here = torch.ones_like(places, dtype=torch.bool)
    for d in reversed(dims):
        own = rest % x.size(d) - x.offset[d]
        here &= (own >= 0) & (own < local.size(d))
        at, rest, stride = at + own * stride, rest // x.size(d), stride * local.size(d)
    found = _flattened(local, dims).gather(-1, _flattened(torch.where(here, at, 0), dims))
    found = found.view(_flattened(places, dims).shape).unflatten(-1, [places.size(d) for d in dims])
    return torch.where(here, found.movedim(tuple(range(-len(dims), 0)), list(dims)), 0.0)


def _added_extreme(x: SpatialTensor, dims: Sequence[int], most: Tensor, number: Tensor, place: Tensor) -> Tensor:
    """What this part adds to the extreme of all parts, where its values were computed again. They may be off by their
    rounding: one alone is known by its place, and several by about its value.
    """
    found, local = _values_at(x, dims, place), x._local
    with torch.no_grad():
        near = (local - most).abs() <= 16 * torch.finfo(local.dtype).eps * most.abs()
        near |= _is(local, most)
    tied = torch.where(near, local, 0.0).sum(list(dims), keepdim=True) / number
    return torch.where(number > 1, tied.to(local.dtype), found)


def _is(x: Tensor, value: Tensor) -> Tensor:
    return (x == value) | (x.isnan() & value.isnan())


class _Extreme(Function):
    """most, the extreme value of all parts, which as many places have as `number` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(_is(x, most), number)
        return most.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        there, number = ctx.saved_tensors
        return there * (grads[0] / number).to(grads[0].dtype), None, None


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
    return with_indices(whole)(x, *args, **kwargs)


def first_maximum(x: SpatialTensor, over: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """As an adaptive max pool to `sizes`, of size 1 along the cut dimensions `over`; other cut ones stay as they are.
    The gradient goes to the first place in the image that has the maximum, and NaN counts as the largest.
    """
    spatial, executors = range(x.dim() - len(sizes), x.dim()), executors_over(x, over)
    pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[len(sizes) - 1]
    kept = [d for d in x.axes if d not in over]
    here = [x._local.size(d) if d in kept else size for d, size in zip(spatial, sizes, strict=True)]
    value, place = pool(x._local, here, return_indices=True)
    with torch.no_grad():
        order = -_place_in_whole(x, spatial, place).double()
        key = torch.where(value.isnan(), torch.full_like(value, math.inf), value).double()
        found = all_parts(lambda: torch.stack([key, order, value.isnan().double()]), executors)
        keys, orders, nans = found.unbind(1)
        nan_anywhere = nans.amax(0) > 0
        candidates = torch.where(nan_anywhere, nans > 0, keys == keys.amax(0))
        best = torch.where(candidates, orders, torch.full_like(orders, -math.inf)).amax(0)
        first = (order == best) & torch.where(nan_anywhere, value.isnan(), key == keys.amax(0))
    if executors[0].link is None:
        value = torch.where(first, value, torch.zeros_like(value))
    else:  # computed again, the maximum may be off by its rounding
        value = _values_at(x, spatial, (-best).long())
    return wrap(summed(value, executors), remaining_axes(x, over, True))
