"""Views of recorded values: what is written into one is seen in the value that it is a view of, and in other views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..spatial.shapes import put_back
from .graph import DETACHES, Call, Ref
from .watch import storage_of

Noted = Callable[..., Ref]


@dataclass
class View:
    """How a value was made that shows memory of another one."""

    base: Any
    """The other one."""
    function: Any
    args: tuple[Any, ...]
    """Behind the base."""
    kwargs: dict[str, Any]
    alone: bool
    """Whether the function gave nothing else."""
    history: bool
    """Whether it was called with gradients on."""


class Views:
    """Of one recording. Values are objects with `_fake`, `_index`, `_lost` and `_view`, as `Recorded`. `noted` writes a
    call down, by its function, its arguments, whether it has history, and its result's fake.
    """

    def __init__(self, gradients: bool) -> None:
        self._gradients = gradients

    def link(self, call: Call, made: Sequence[Any], given: Sequence[Any]) -> None:
        """Notes what results are views of. With gradients not of detached ones, and not of one of several results, into
        which torch refuses to write.
        """
        if self._gradients and (call.name in DETACHES or len(made) > 1):
            return
        first = call.args[0] if call.args else None
        for base in (one for one in given if first == Ref(one._index)):
            for value in made:
                if storage_of(value._fake) == storage_of(base._fake):
                    value._view = View(base, call.function, call.args[1:], call.kwargs, len(made) == 1, call.history)

    def written(self, value: Any, noted: Noted) -> None:
        """A value was written: what it is a view of has another part now."""
        while value._view is not None and self._put_back(value, value._view.base, noted):
            value = value._view.base

    def _put_back(self, value: Any, base: Any, noted: Noted) -> bool:
        history = torch.is_grad_enabled()
        place = place_of(value._fake, base._fake)
        if (self._gradients and not history) or (place is None and not in_order(value._fake, base._fake)):
            return False
        part = Ref(value._index)
        if place is None:
            part = noted(Tensor.reshape, (part, tuple(base._fake.shape)), {}, history, base._fake)
        elif place.turned:
            part = noted(Tensor.permute, (part, place.order), {}, history, value._fake.permute(place.order))
        if place is not None and (value._fake.numel(), value.dim()) != (base._fake.numel(), base._fake.dim()):
            part = noted(put_back, (Ref(base._index), place.index, part), {}, history, base._fake)
        base._index, base._lost = part.index, ""
        return True

    def made_again(self, value: Any, noted: Noted) -> bool:
        """Whether it can be read. A view of what was written into is made again."""
        if not value._lost:
            return True
        view: View | None = value._view
        if view is None or not self.made_again(view.base, noted):
            return False
        base, place = Ref(view.base._index), place_of(value._fake, view.base._fake)
        if view.alone:
            made = noted(view.function, (base, *view.args), view.kwargs, view.history, value._fake)
        elif place is not None and not place.turned:
            made = noted(Tensor.__getitem__, (base, place.index), {}, view.history, value._fake)
        else:
            return False
        value._index, value._lost = made.index, ""
        return True


@dataclass
class Place:
    """Which box of its base a view shows."""

    index: tuple[int | slice, ...]
    """Along each dimension of the base."""
    order: tuple[int, ...]
    """Of the dimensions of base[index], which one of the view each is."""

    @property
    def turned(self) -> bool:
        return self.order != tuple(range(len(self.order)))


def place_of(view: Tensor, base: Tensor) -> Place | None:
    """None where the view is not a box of the base: one of joined or added dimensions, of another dtype, expanded."""
    strides = view.stride()
    dims = sorted((d for d in range(view.dim()) if view.size(d) > 1), key=lambda d: -strides[d])
    starts = _starts(int(view.storage_offset() - base.storage_offset()), base)
    if starts is None or not _alike(view, base) or view.dim() > base.dim() or view.numel() == 0 or overlaps(base):
        return None
    steps: dict[int, int] = {}
    of_view: dict[int, int] = {}  # by dimensions of the base
    for dim in dims:
        fitting = [d for d in range(base.dim()) if d not in of_view and _fits(view, dim, base, d, starts[d])]
        if not fitting:
            return None
        found = max(fitting, key=lambda d: base.stride()[d])
        of_view[found], steps[found] = dim, strides[dim] // base.stride()[found]
    ones = [d for d in range(view.dim()) if view.size(d) == 1]
    left = sorted((d for d in range(base.dim()) if d not in of_view), key=lambda d: (base.shape[d] > 1, d))
    of_view.update(zip(sorted(left[: len(ones)]), ones, strict=True))
    index = [
        _entry(starts[d], view.size(of_view[d]), steps.get(d, 1), base.size(d)) if d in of_view else starts[d]
        for d in range(base.dim())
    ]
    return Place(tuple(index), tuple(of_view[d] for d in sorted(of_view)))


def _starts(offset: int, base: Tensor) -> list[int] | None:
    """Where along each dimension of the base lies what is so many elements behind its first one."""
    shape, strides = base.shape, base.stride()
    starts = [0] * len(shape)
    for dim in sorted((d for d, size in enumerate(shape) if size > 1), key=lambda d: -strides[d]):
        if strides[dim] == 0:
            return None
        starts[dim], offset = divmod(offset, strides[dim])
    return starts if offset == 0 and all(0 <= a < n for a, n in zip(starts, shape, strict=True)) else None


def _fits(view: Tensor, dim: int, base: Tensor, of_base: int, start: int) -> bool:
    stride, step = base.stride()[of_base], view.stride()[dim]
    if stride == 0 or step == 0 or step % stride:
        return False
    return start + (view.shape[dim] - 1) * (step // stride) < base.shape[of_base]


def _entry(start: int, count: int, step: int, size: int) -> slice:
    return slice(None) if count == size else slice(start, start + (count - 1) * step + 1, step)


def in_order(view: Tensor, base: Tensor) -> bool:
    """Whether the view shows all elements of the base in the same order, as one of another shape does."""
    same = _alike(view, base) and view.numel() == base.numel()
    return same and view.is_contiguous() and base.is_contiguous()


def _alike(view: Tensor, base: Tensor) -> bool:
    """Whether an element is the same number in both."""
    numbers = view.dtype, view.is_conj(), view.is_neg()
    return numbers == (base.dtype, base.is_conj(), base.is_neg())


def overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory, as in windows by Tensor.unfold."""
    end = 0
    for stride, size in sorted((stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False
