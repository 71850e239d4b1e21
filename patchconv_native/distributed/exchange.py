"""What travels between ranks, as differentiable operators on plain tensors.

Two kinds of values: a part of an image, another one on every rank; and a value that is the same on every rank. What
goes from one kind to the other has a gradient that follows from that: a parameter (the same everywhere) that is used
on parts gets the sum of all ranks' gradients, and a sum over all parts hands the gradient that comes (the same
everywhere) to each part once. All of it can be differentiated again.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .. import _library
from .cuts import Axis, Moves, Range, Wanted, moves

_library.load()
_cat = torch.ops.patchconv.cat.default
_alias = torch.ops.aten.alias.default  # view_as changes the strides of dimensions of size 1, and with them the layout


class Traffic:
    """Counts what this rank sends while it is open: `messages` and `bytes` of parts of images, `reduced` bytes of what
    is summed or merged over ranks. `transfers`: of each exchange, when (time.perf_counter) its messages were "posted",
    first "waited" for, and "there".
    """

    _open: list[Traffic] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.messages = self.bytes = self.reduced = 0
        self.transfers: list[dict[str, float]] = []

    def __enter__(self) -> Traffic:
        self._open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.remove(self)


def _count(tensors: list[Tensor]) -> None:
    for traffic in Traffic._open:
        traffic.messages += len(tensors)
        traffic.bytes += sum(t.nbytes for t in tensors)


def layout(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim)).contiguous()


def _like(x: Tensor, came: Tensor, dim: int) -> Tensor:
    """What came, in the layout of `x`."""
    format = layout(x)
    if format == torch.contiguous_format:
        return came
    return _sized(x, dim, came.size(dim), format).copy_(came)


class Transfer:
    """Messages on their way: all of a step are posted at once. They are contiguous whatever the layout of what they are
    parts of, which can be another one on another rank.
    """

    def __init__(self, group: Any, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        # Named by their number in the group, whatever their number in the world is.
        posted = [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for peer, t in sends]
        posted += [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for peer, t in receives]
        _count([t for _, t in sends])
        self._kept = sends  # until they are sent
        self._works = dist.batch_isend_irecv(posted) if posted else []
        self.came = dict(receives)
        self._times = {"posted": time.perf_counter()}

    def wait(self) -> dict[int, Tensor]:
        if self._works:
            self._times["waited"] = time.perf_counter()
            for work in self._works:
                work.wait()
            self._times["there"] = time.perf_counter()
            for traffic in Traffic._open:
                traffic.transfers.append(self._times)
        self._kept, self._works = [], []
        return self.came


def _sized(like: Tensor, dim: int, length: int, format: torch.memory_format = torch.contiguous_format) -> Tensor:
    shape = list(like.shape)
    shape[dim] = length
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=format)


def start(x: Tensor, dim: int, group: Any, plan: Moves) -> Transfer:
    """Sends what others want of `x`, and receives what this rank wants of them."""
    x = x.detach()
    sends = [(peer, _joined([x.narrow(dim, a, b - a) for a, b in ranges], dim)) for peer, ranges in plan.sends]
    receives = [(peer, _sized(x, dim, count)) for peer, count in plan.receives]
    return Transfer(group, sends, receives)


def _send_back(
    grad: Tensor | None, came: list[Tensor | None], like: tuple[Any, ...], dim: int, group: Any, plan: Moves, own: bool
) -> Tensor:
    """The reverse: gradients of what came go to where it came from, and are added there. `own`: to `grad` itself."""
    shape, dtype, device, format = like
    if grad is None:
        grad, own = torch.zeros(shape, dtype=dtype, device=device).contiguous(memory_format=format), True
    sends, receives = [], []
    for (peer, count), g in zip(plan.receives, came, strict=True):
        g = _sized(grad, dim, count).zero_() if g is None else g.detach().contiguous()
        sends.append((peer, g))
    for peer, ranges in plan.sends:
        receives.append((peer, _sized(grad, dim, sum(b - a for a, b in ranges))))
    back = Transfer(group, sends, receives).wait()
    if not plan.sends:
        return grad
    grad = grad if own else grad.clone()
    for peer, ranges in plan.sends:
        place = 0
        for a, b in ranges:
            grad.narrow(dim, a, b - a).add_(back[peer].narrow(dim, place, b - a))
            place += b - a
    return grad


class _Exchange(Function):
    """x -> (x, what came from each rank). The first output is a view, of which a producer of x is still known."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Any, plan: Moves, fresh: bool, begun: Transfer | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.given = (tuple(x.shape), x.dtype, x.device, layout(x)), dim, group, plan, fresh
        came = (begun or start(x, dim, group, plan)).wait()
        return (_alias(x), *(_like(x, came[peer], dim) for peer, _ in plan.receives))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        like, dim, group, plan, fresh = ctx.given
        if torch.is_grad_enabled():
            return (_SendBack.apply(like, dim, group, plan, *grads), *[None] * 5)
        return (_send_back(grads[0], list(grads[1:]), like, dim, group, plan, fresh), *[None] * 5)


class _SendBack(Function):
    @staticmethod
    def forward(ctx: Any, like: Any, dim: int, group: Any, plan: Moves, *grads: Tensor | None) -> Tensor:
        ctx.given = dim, group, plan
        return _send_back(grads[0], list(grads[1:]), like, dim, group, plan, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, None, None, *_Exchange.apply(grads[0], *ctx.given, False, None))


class Fetch:
    """Gets the ranges that this rank wants of the whole image; `x` is its part, cut along `dim`. Messages are posted at
    once, so that what needs none of them can be computed before `finish`.

    fresh: whoever reads the result writes a gradient of its own, to which others' gradients may be added in place.
    pads: of this rank's result, before and after, with `fill`.
    """

    def __init__(
        self, x: Tensor, dim: int, axis: Axis, wanted: Wanted, fresh: bool = False, pads: tuple[int, int] = (0, 0),
        fill: float = 0.0,
    ) -> None:  # fmt: skip
        self.x, self.dim, self.axis, self.fresh, self.pads, self.fill = x, dim, axis, fresh, pads, fill
        self.plan = moves(axis.cuts, wanted, axis.index)
        self.transfer = start(x, dim, axis.group, self.plan) if self.plan.anyone else None

    def _parts(self, x: Tensor, came: dict[int, Tensor]) -> list[Tensor]:
        parts = []
        for owner, place, length in self.plan.pieces:
            source = x if owner == self.axis.index else came[owner]
            parts.append(source if length == source.size(self.dim) else source.narrow(self.dim, place, length))
        if not parts:
            parts.append(x.narrow(self.dim, 0, 0))
        for place, length in zip((0, len(parts) + 1), self.pads, strict=True):
            if length:
                parts.insert(place, _sized(x, self.dim, length, layout(x)).fill_(self.fill))
        return parts

    def rows(self, low: int, high: int) -> Tensor:
        """A range of the result, without history. Waits for the messages."""
        taken, place = [], 0
        for part in self._parts(self.x.detach(), self.transfer.wait() if self.transfer else {}):
            length = part.size(self.dim)
            a, b = max(low - place, 0), min(high - place, length)
            if a < b:
                taken.append(part.narrow(self.dim, a, b - a))
            place += length
        whole = taken[0] if len(taken) == 1 else torch.cat(taken, self.dim)
        return whole.contiguous(memory_format=layout(self.x))

    def finish(self) -> Tensor:
        """The ranges, joined."""
        x, came = self.x, {}
        if self.transfer is not None:
            out = _Exchange.apply(x, self.dim, self.axis.group, self.plan, self.fresh, self.transfer)
            x, came = out[0], dict(zip((peer for peer, _ in self.plan.receives), out[1:], strict=True))
        parts = self._parts(x, came)
        # Not torch's: its input's producer can make it again.
        return parts[0] if len(parts) == 1 else _cat(parts, self.dim)


def fetch(x: Tensor, dim: int, axis: Axis, wanted: Wanted, fresh: bool = False) -> Tensor:
    return Fetch(x, dim, axis, wanted, fresh).finish()


# ----------------------------------------------------------------------------------------------------------------------
# Sums, and values that are the same everywhere.


def all_sum(values: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """Over all ranks of the groups; half precision is added in float32. The same bits on every rank."""
    total = values.detach().to(torch.float32 if values.dtype in (torch.half, torch.bfloat16) else values.dtype)
    total = total.clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(total, group=group)
        for traffic in Traffic._open:
            traffic.reduced += total.nbytes
    return total.to(values.dtype)


def all_parts(values: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """Every rank's `values`, stacked."""
    values = values.detach().contiguous()[None]
    for group in groups:
        found = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, values, group=group)
        for traffic in Traffic._open:
            traffic.reduced += values.nbytes
        values = torch.cat(found)
    return values


def same_everywhere(values: Tensor, axes: Iterable[Axis]) -> bool:
    """Whether all ranks of the axes' groups have the same bytes. All of them get the same answer."""
    number, differ = zlib.crc32(bytes(values.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())), 0
    for axis in [*axes, *axes]:  # twice: what one row of a mesh found, the others are told then
        device = "cuda" if dist.get_backend(axis.group) == "nccl" else "cpu"
        found = torch.tensor([number, -number, differ], dtype=torch.int64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=axis.group)
        most, least, differ = found.tolist()
        differ = max(differ, int(most != -least))
    return not differ


class _Shared(Function):
    """The same everywhere -> used on parts."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: tuple[Any, ...]) -> Tensor:
        ctx.groups = groups
        return _alias(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Summed.apply(grads[0], ctx.groups), None


class _Summed(Function):
    """Of parts -> their sum, the same everywhere."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: tuple[Any, ...]) -> Tensor:
        ctx.groups = groups
        return all_sum(value, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Shared.apply(grads[0], ctx.groups), None


def shared(value: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """A value that is the same on every rank, for use on parts: its gradient is the sum of all ranks'."""
    return _Shared.apply(value, groups) if groups and value.requires_grad and torch.is_grad_enabled() else value


def summed(value: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """The sum of all ranks' values, the same on every rank."""
    return _Summed.apply(value, groups)


class _Scatter(Function):
    """The whole, the same everywhere -> this rank's part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.given = dim, axis
        part = whole.narrow(dim, axis.own[0], axis.length)
        return _sized(whole, dim, axis.length, layout(whole)).copy_(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Gather.apply(grads[0], *ctx.given), None, None


class _Gather(Function):
    """Parts -> the whole, the same everywhere."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.given = dim, axis
        everything: tuple[Range, ...] = ((0, axis.size),)
        return fetch(part.detach(), dim, axis, (everything,) * axis.ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Scatter.apply(grads[0], *ctx.given), None, None


def scatter_part(whole: Tensor, dim: int, axis: Axis) -> Tensor:
    return _Scatter.apply(whole, dim, axis)


def gather_part(part: Tensor, dim: int, axis: Axis) -> Tensor:
    return _Gather.apply(part, dim, axis)
