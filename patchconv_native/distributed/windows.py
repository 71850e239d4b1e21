"""What a rank's outputs read: the part of the rule for convolutions, pools, padding and resizing that they share.

An output keeps to the ranks that hold the middle of what it reads (`cuts`). Each rank then fetches what its outputs
read and it does not hold, and computes as one device would on that range; what lies outside of the image comes from the
padding mode, on the ranks at its border. All sizes are the whole image's, so odd ones, strides that do not divide and
uneven parts are no cases of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cuts import Axis, Range, Wanted, hulls, inside, source_indices
from .exchange import Fetch, fetch
from .tensor import SpatialTensor, refuse


def pair(value: Any) -> list[int]:
    entries = [value] if isinstance(value, int) else [int(v) for v in value]
    return entries * 2 if len(entries) == 1 else entries


def fetching(local: Tensor, dim: int, axis: Axis, reads: list[Range], fill: float = 0.0, fresh: bool = True) -> Fetch:
    """Begins to get what this rank reads, `reads` being the ranges of all ranks, which may reach into the padding; with
    the padding, so that one copy serves for both.
    """
    low, high = reads[axis.index]
    wanted: Wanted = tuple((inside(one, axis.size),) for one in reads)
    a, b = wanted[axis.index][0]
    pads = (high - low, 0) if a == b else (a - low, high - b)
    return Fetch(local, dim, axis, wanted, fresh, pads, fill)


def reading(
    local: Tensor, dim: int, axis: Axis, reads: list[Range], mode: str = "zeros", fill: float = 0.0, fresh: bool = True
) -> Tensor:
    """What this rank reads, as of `fetching`, under any padding mode."""
    if mode == "zeros":
        return fetching(local, dim, axis, reads, fill, fresh).finish()
    indices = [source_indices(mode, one, axis.size) for one in reads]
    wanted: Wanted = tuple(hulls(one) for one in indices)
    local = fetch(local, dim, axis, wanted, fresh)
    order = [i for a, b in wanted[axis.index] for i in range(a, b)]
    if order != indices[axis.index]:
        places = {i: n for n, i in enumerate(order)}
        at = torch.tensor([places[i] for i in indices[axis.index]], device=local.device)
        local = in_format(local.index_select(dim, at), local)
    return local


def in_format(made: Tensor, like: Tensor) -> Tensor:
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        return made.contiguous(memory_format=torch.channels_last)
    return made


def check_image(function: str, x: Any) -> tuple[Tensor, int]:
    """The local tensor, and the first spatial dimension."""
    if not isinstance(x, SpatialTensor) or x.dim() not in (3, 4) or any(d < x.dim() - 2 for d in x.axes):
        raise refuse(function, "it takes (N, C, H, W) or (C, H, W), cut along H or W")
    return x._local, x.dim() - 2
