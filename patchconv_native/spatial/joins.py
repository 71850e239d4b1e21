"""Rules for what joins images, or repeats one. Along a cut dimension, a part of the result reads a range of each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import functional
from .axis import Axes, Axis, Range, executors_of
from .operands import recut, wrap
from .parts import part_of, shared
from .rules import refuse, rule
from .tensor import SpatialTensor
from .windows import inside, picking, scaled_axis


def _fitting(function: str, t: SpatialTensor, axes: Axes) -> SpatialTensor:
    """An operand, cut as the others along the dimensions that are not joined."""
    for d, axis in axes.items():
        if t.axes[d].size != axis.size:
            raise RuntimeError(f"{function}: expected size {axis.size} along {axis.name}, got {t.size(d)}")
    return recut(t, {d: axis.cuts for d, axis in axes.items()})


def _uncut(function: str, t: Tensor, axes: Axes, dim: int) -> Tensor:
    """This part of an operand that is not cut along `dim`. axes: of the others."""
    beside = {d: axis for d, axis in axes.items() if d != dim}
    if not isinstance(t, SpatialTensor):
        return part_of(shared(t, executors_of(axes)), beside)
    if t.axes.keys() != beside.keys():
        raise refuse(function, "its operands are cut along different dimensions")
    local = _fitting(function, t, beside)._local
    return shared(local, (axes[dim].executor,)) if dim in axes else local


def _along_cut(tensors: Sequence[Any], dim: int) -> Tensor:
    cut = [k for k, t in enumerate(tensors) if isinstance(t, SpatialTensor) and dim in t.axes]
    largest = max(cut, key=lambda k: tensors[k].size(dim))
    axes = tensors[largest].axes
    sizes = [t.size(dim) for t in tensors]
    begins = list(itertools.accumulate(sizes, initial=0))
    new = _joined_axis(axes[dim], begins[largest], begins[-1])
    reads: list[list[Range]] = [
        [inside((a - begin, b - begin), size) for a, b in new.ranges()]
        for begin, size in zip(begins[:-1], sizes, strict=True)
    ]
    parts: dict[int, Tensor] = {}
    same: dict[int, list[int]] = {}  # an operand that is given several times is fetched once
    for k, t in enumerate(tensors):
        if k in cut:
            same.setdefault(id(t._local), []).append(k)
        else:
            a, b = reads[k][new.index]
            parts[k] = _uncut("cat", t, axes, dim).narrow(dim, a, b - a)
    for places in same.values():
        t = tensors[places[0]]
        if t.axes.keys() != axes.keys() or t.axes[dim].executor != new.executor:
            raise refuse("cat", "its operands are cut along different dimensions")
        t = _fitting("cat", t, {d: axis for d, axis in axes.items() if d != dim})
        ranges = [[reads[k][part] for k in places] for part in range(new.count)]
        rows = picking(t._local, dim, t.axes[dim], ranges)
        parts.update(zip(places, rows.split([b - a for a, b in ranges[new.index]], dim), strict=True))
    return SpatialTensor(functional.cat([parts[k] for k in range(len(tensors))], dim), {**axes, dim: new})


def _joined_axis(axis: Axis, begin: int, size: int) -> Axis:
    """Of a result of `size`, in which the largest operand, cut as `axis`, stands from `begin` on. It stays where it is
    where little is joined to it.
    """
    if 4 * axis.size < 3 * size:
        return scaled_axis("cat", axis, size)
    return axis.executor.place("cat", axis, [begin + cut for cut in axis.cuts[1:-1]], size)


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Any, dim: int = 0) -> Tensor:
    tensors = [t for t in tensors if t.shape != (0,)]  # of any shape, for torch
    dim %= tensors[0].dim()
    if any(isinstance(t, SpatialTensor) and dim in t.axes for t in tensors):
        return _along_cut(tensors, dim)
    like = next(t for t in tensors if isinstance(t, SpatialTensor))
    return SpatialTensor(functional.cat([_uncut("cat", t, like.axes, dim) for t in tensors], dim), like.axes)


@rule(torch.hstack)
def _hstack(tensors: Any) -> Tensor:
    return cat(tensors, 1)


@rule(torch.vstack, torch.row_stack)
def _vstack(tensors: Any) -> Tensor:
    return cat(tensors, 0)


@rule(torch.dstack)
def _dstack(tensors: Any) -> Tensor:
    return cat(tensors, 2)


@rule(torch.stack)
def stack(tensors: Any, dim: int = 0) -> Tensor:
    dim %= tensors[0].dim() + 1
    axes = next(t for t in tensors if isinstance(t, SpatialTensor)).axes
    parts = [_uncut("stack", t, axes, -1) for t in tensors]
    return SpatialTensor(torch.stack(parts, dim), {d + (d >= dim): axis for d, axis in axes.items()})


def repeated(function: str, x: SpatialTensor, dim: int, count: int) -> SpatialTensor:
    """The image so many times, one after the other along a cut dimension."""
    axis = x.axes[dim]
    if count < 1:
        raise refuse(function, "nothing of a cut dimension")
    new = scaled_axis(function, axis, count * axis.size)
    size = axis.size
    ranges = [[inside((a - n * size, b - n * size), size) for n in range(count)] for a, b in new.ranges()]
    return SpatialTensor(picking(x._local, dim, axis, ranges), {**x.axes, dim: new})


@rule(Tensor.repeat)
def _repeat(x: Any, repeats: Sequence[int]) -> Tensor:
    given = list(repeats)
    more = len(given) - x.dim()
    for d in list(x.axes):
        if more >= 0 and given[more + d] != 1:
            x = repeated("repeat", x, d, given[more + d])
            given[more + d] = 1
    return wrap(x._local.repeat(given), {d + more: axis for d, axis in x.axes.items()})


@rule(torch.tile, Tensor.tile)
def _tile(x: Any, dims: Sequence[int]) -> Tensor:
    return _repeat(x, [1] * (x.dim() - len(dims)) + list(dims))


@rule(torch.repeat_interleave, Tensor.repeat_interleave)
def _repeat_interleave(x: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Tensor:
    if not isinstance(x, SpatialTensor) or not isinstance(repeats, int) or repeats < 1 or dim is None:
        raise refuse("repeat_interleave", "it takes a number of at least 1, and a dimension")
    axes, dim = dict(x.axes), dim % x.dim()
    if dim in axes:
        axes[dim] = axes[dim].cut_at(tuple(cut * repeats for cut in axes[dim].cuts))
    return SpatialTensor(x._local.repeat_interleave(repeats, dim), axes)
