"""Tensors in the memory format of another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def layout(x: Tensor) -> torch.memory_format:
    """channels_last (or channels_last_3d) where x has that format alone, contiguous_format for everything else."""
    last = _LAST.get(x.dim())
    if last is not None and x.is_contiguous(memory_format=last) and not x.is_contiguous():
        return last
    return torch.contiguous_format


def order(x: Tensor) -> torch.memory_format:
    """As `layout`, of the image that x is or is a part of: some of its rows and columns do not lie together."""
    last = _LAST.get(x.dim())
    if last is None or x.is_contiguous() or x.size(1) == 1 or x.stride(1) != 1:
        return torch.contiguous_format
    strides = [x.size(1), *(x.stride(d) for d in (*range(x.dim() - 1, 1, -1), 0) if x.size(d) > 1)]
    return last if strides == sorted(strides) else torch.contiguous_format


def in_layout_of(like: Tensor, made: Tensor) -> Tensor:
    """`made`, in channels_last where `like`, of as many dimensions, is."""
    format = order(like)
    return made if format == torch.contiguous_format else made.contiguous(memory_format=format)


def with_usual_strides(x: Tensor) -> Tensor:
    """x with the strides of a new tensor in its memory format. What is computed of a view may step from one image to
    the next by less than an image where there is but one, and torch then takes channels_last for contiguous_format.
    """
    if layout(x) == torch.contiguous_format or x.requires_grad:
        return x
    strides, step = list(x.stride()), 1
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        strides[d], step = step, step * x.size(d)
    return x.as_strided(x.shape, strides)


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one dtype, one after the other. Under autocast, torch.cat does not take every dtype."""
    kind = parts[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):  # meta has none
        return torch.cat(list(parts), dim)
    with torch.autocast(kind, enabled=False):
        return torch.cat(list(parts), dim)


def cut_out(x: Tensor, dim: int, begin: int, length: int) -> Tensor:
    """A view of these coordinates; all of x is x itself: in backward, a view makes a gradient of its own."""
    return x if begin == 0 and length == x.size(dim) else x.narrow(dim, begin, length)


def empty(like: Tensor, dim: int, length: int, format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """An uninitialized tensor with another length along `dim`."""
    shape = list(like.shape)
    shape[dim] = length
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=format)
