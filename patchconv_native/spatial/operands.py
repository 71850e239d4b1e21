"""What rules do with their arguments: SpatialTensors to local tensors that fit each other, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import parts
from .axis import Axes, executors_of
from .parts import part_of, scatter_part, shared
from .rules import refuse
from .tensor import SpatialTensor


def local_of(value: Any) -> Any:
    return value._local if isinstance(value, SpatialTensor) else value


def parameter(value: Any, like: SpatialTensor) -> Any:
    """A parameter, or any plain tensor, for use on parts."""
    return shared(value, executors_of(like.axes)) if isinstance(value, Tensor) else value


def wrap(local: Tensor, axes: Axes) -> Tensor:
    return SpatialTensor(local, axes) if axes else local


def scattered(whole: Tensor, axes: Axes) -> SpatialTensor:
    """This part, as a copy, of a tensor that is the same for every part."""
    return SpatialTensor(scatter_part(whole, axes), axes)


def recut(x: SpatialTensor, cuts: dict[int, tuple[int, ...]]) -> SpatialTensor:
    """The same image, cut at other places."""
    local, axes = x._local, dict(x.axes)
    for d, places in cuts.items():
        local = parts.recut(local, d, axes[d], places)
        axes[d] = axes[d].cut_at(places)
    return x if axes == x.axes else SpatialTensor(local, axes)


def aligned(function: str, values: Sequence[Any]) -> tuple[list[Any], Axes]:
    """Operands of an elementwise function as local tensors that broadcast against each other, and the result's axes.

    The first SpatialTensor decides where the result is cut. Others that are cut elsewhere are fetched; of a plain
    tensor the part that belongs to this one is taken.
    """
    dims = max(v.dim() for v in values if isinstance(v, Tensor))
    axes = _common_axes(function, values, dims)
    result = []
    for value in values:
        if isinstance(value, Tensor):
            shift = dims - value.dim()
            if isinstance(value, SpatialTensor):
                value = _part(function, value, axes, shift)
            else:
                value = _whole(function, value, axes, shift)
        result.append(value)
    return result, axes


def _common_axes(function: str, values: Sequence[Any], dims: int) -> Axes:
    axes: Axes = {}
    for value in values:
        if not isinstance(value, SpatialTensor):
            continue
        for d, axis in value.axes.items():
            place = d + dims - value.dim()
            first = axes.setdefault(place, axis)
            if first.size == 1:  # it broadcasts
                axes[place] = axis
            elif axis.size not in (1, first.size):
                raise RuntimeError(
                    f"{function}: expected dimension {place} to have the same size in all operands, got {first.size} "
                    f"and {axis.size}"
                )
            if first.executor != axis.executor:
                raise refuse(function, "its operands are cut between different groups of parts")
    if len({axis.name for axis in axes.values()}) < len(axes):  # as of a column and a row that was one
        raise refuse(function, "its operands are cut along different dimensions")
    return axes


def _part(function: str, value: SpatialTensor, axes: Axes, shift: int) -> Tensor:
    """axes: the result's. shift: how many dimensions more the result has."""
    here = {d - shift: axis for d, axis in axes.items()}
    for d in here:
        if d >= 0 and d not in value.axes and value.size(d) != 1:
            raise refuse(function, "its operands are cut along different dimensions")
    local = recut(value, {d: here[d].cuts for d, axis in value.axes.items() if axis.size == here[d].size})._local
    for d, axis in value.axes.items():
        if axis.size != here[d].size:  # every part reads the one row
            local = parts.fetch(local, d, axis, (((0, 1),),) * here[d].count)
    # Along the dimensions that it is not cut along, it is the same for every part.
    return shared(local, tuple(axis.executor for d, axis in here.items() if d not in value.axes))


def _whole(function: str, value: Tensor, axes: Axes, shift: int) -> Tensor:
    along = {d - shift: axis for d, axis in axes.items() if d >= shift and value.size(d - shift) != 1}
    for d, axis in along.items():
        if axis.size == 1:
            raise refuse(function, "of a cut operand there is one row, for many of a whole one")
        if value.size(d) != axis.size:
            raise RuntimeError(
                f"{function}: expected dimension {d + shift} to have size {axis.size}, or 1, got {value.size(d)}"
            )
    return part_of(shared(value, executors_of(axes)), along)
