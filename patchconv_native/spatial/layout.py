"""Tensors in the memory format of another one."""

from __future__ import annotations

import torch
from torch import Tensor


def layout(x: Tensor) -> torch.memory_format:
    """channels_last where x has that format alone, contiguous_format for everything else."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def in_layout_of(like: Tensor, made: Tensor) -> Tensor:
    """`made`, in channels_last where `like` is."""
    return made.contiguous(memory_format=torch.channels_last) if layout(like) == torch.channels_last else made


def empty(like: Tensor, dim: int, length: int, format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """An uninitialized tensor with another length along `dim`."""
    shape = list(like.shape)
    shape[dim] = length
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=format)
