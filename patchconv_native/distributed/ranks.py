"""The executor of spatial rules on torch.distributed: each rank of a process group has one part of every image."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _library
from ..spatial import Axis, Wanted
from .exchange import Exchange, give_back
from .moves import moves_for
from .traffic import count_reduced

_geometry = _library.load().geometry


@dataclass(frozen=True)
class Ranks:
    """What rules ask (`spatial.Executor`), answered by messages within a process group."""

    group: Any
    advice: str = "Call `gather` on it first, or name the module that calls this in spatial(gather=...)"
    updates_buffers: bool = True  # each rank has its own copy of the model
    unread: bool = False
    link: None = None

    def place(self, operator: str, axis: Axis, wished: Sequence[int], size: int) -> Axis:
        """Where the rule wishes, or even cuts where a rank would get nothing."""
        cuts = (0, *(min(max(cut, 0), size) for cut in wished), size)
        if any(a >= b for a, b in itertools.pairwise(cuts)):
            cuts = even(operator, axis.name, size, axis.count)
        return axis.cut_at(cuts)

    def fetch(
        self, x: Tensor, dim: int, axis: Axis, wanted: Wanted, pads: tuple[int, int] = (0, 0), fill: float = 0.0,
        fresh: bool = False,
    ) -> Exchange:  # fmt: skip
        return Exchange(self.group, x, dim, axis, wanted, pads, fill, fresh)

    def give_back(self, x: Tensor, dim: int, axis: Axis, wanted: Wanted, into: Tensor) -> None:
        """The way back of `fetch`, where parts are differentiated one by one: adds what every rank has, `x`, for the
        ranges that it wanted, where these came from: to `into`, this rank's part of a tensor cut along `dim` as `axis`.
        """
        give_back(x, dim, self.group, moves_for(axis.cuts, wanted, axis.index), axis.index, into)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        count_reduced(values)
        return values

    def known(self) -> None:
        return None

    def stack(self, values: Tensor) -> Tensor:
        found = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(found, values, group=self.group)
        count_reduced(values)
        return torch.cat(found)


def even(operator: str, name: str, size: int, ranks: int) -> tuple[int, ...]:
    """Parts that differ by one at most. ValueError, on every rank alike, where a rank would get nothing."""
    if size < ranks:
        raise ValueError(
            f"{operator}: expected {name} to be at least {ranks}, one coordinate for each of {ranks} ranks, got "
            f"{size}; run this part gathered, or on fewer ranks"
        )
    return (*(_geometry.piece_of(size, ranks, rank)[0] for rank in range(ranks)), size)


def group_of(axis: Axis) -> Any:
    """The process group of an image that `scatter` or a model of `spatial` has cut."""
    if not isinstance(axis.executor, Ranks):
        raise TypeError(f"expected an image that is cut between ranks, got one on {type(axis.executor).__name__}")
    return axis.executor.group


def same_everywhere(values: Tensor, axes: Iterable[Axis]) -> bool:
    """Whether all ranks of the axes' groups have the same bytes. All of them get the same answer."""
    number, differ = zlib.crc32(bytes(values.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())), 0
    groups = [group_of(axis) for axis in axes]
    for group in [*groups, *groups]:  # twice, so that every rank of a mesh hears of a difference in any of its rows
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        found = torch.tensor([number, -number, differ], dtype=torch.int64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        most, least, differ = found.tolist()
        differ = max(differ, int(most != -least))
    return not differ
