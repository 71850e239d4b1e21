"""Messages between ranks: each gets ranges of the whole that others hold. Gradients go back the same way."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .. import _library
from ..spatial.axis import Axis, Wanted
from ..spatial.layout import empty, joined, layout
from ..spatial.parts import alias
from .moves import Moves, moves_for
from .traffic import add_transfer, count_sent

_library.load()
_cat = torch.ops.patchconv.cat.default


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return (parts[0] if len(parts) == 1 else joined(parts, dim)).contiguous()


def _like(x: Tensor, received: Tensor, dim: int) -> Tensor:
    """What was received, in the layout of `x`."""
    format = layout(x)
    if format == torch.contiguous_format:
        return received
    return empty(x, dim, received.size(dim), format).copy_(received)


class Transfer:
    """Messages on their way, all posted at once. They are contiguous, since the image can have another memory format on
    another rank.
    """

    def __init__(self, group: Any, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        # group_peer: a rank's number in the group, which can be another one in the world.
        posted = [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for peer, t in sends]
        posted += [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for peer, t in receives]
        count_sent([t for _, t in sends])
        self._sending = [t for _, t in sends]  # alive until they are sent
        self._works = dist.batch_isend_irecv(posted) if posted else []
        self.received = dict(receives)
        self._times = {"posted": time.perf_counter()}

    def wait(self) -> dict[int, Tensor]:
        if self._works:
            self._times["waited"] = time.perf_counter()
            for work in self._works:
                work.wait()
            self._times["there"] = time.perf_counter()
            add_transfer(self._times)
        self._sending, self._works = [], []
        return self.received


def _start(x: Tensor, dim: int, group: Any, moves: Moves) -> Transfer:
    """Begins to send what others want of x, and to receive what this rank wants of them."""
    x = x.detach()
    sends = [(peer, _joined([x.narrow(dim, a, b - a) for a, b in ranges], dim)) for peer, ranges in moves.sends]
    receives = [(peer, empty(x, dim, count)) for peer, count in moves.receives]
    return Transfer(group, sends, receives)


def _send_back(
    grad: Tensor | None, received: list[Tensor | None], like: tuple[Any, ...], dim: int, group: Any, moves: Moves,
    fresh: bool,
) -> Tensor:  # fmt: skip
    """Backward: gradients of what was received go to its owners and are added there. fresh: to `grad` in place."""
    if grad is None:
        shape, dtype, device, format = like
        grad, fresh = torch.zeros(shape, dtype=dtype, device=device).contiguous(memory_format=format), True
    sends, receives = [], []
    for (peer, count), g in zip(moves.receives, received, strict=True):
        g = empty(grad, dim, count).zero_() if g is None else g.detach().contiguous()
        sends.append((peer, g))
    for peer, ranges in moves.sends:
        receives.append((peer, empty(grad, dim, sum(b - a for a, b in ranges))))
    back = Transfer(group, sends, receives).wait()
    if not moves.sends:
        return grad
    grad = grad if fresh else grad.clone()
    for peer, ranges in moves.sends:
        place = 0
        for a, b in ranges:
            grad.narrow(dim, a, b - a).add_(back[peer].narrow(dim, place, b - a))
            place += b - a
    return grad


class _Exchange(Function):
    """x -> (x, what each rank sent). The first output is a view, so that what computed x is still known."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Any, moves: Moves, fresh: bool, begun: Transfer | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.given = (tuple(x.shape), x.dtype, x.device, layout(x)), dim, group, moves, fresh
        received = (begun or _start(x, dim, group, moves)).wait()
        return (alias(x), *(_like(x, received[peer], dim) for peer, _ in moves.receives))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        like, dim, group, moves, fresh = ctx.given
        if torch.is_grad_enabled():
            return (_SendBack.apply(like, dim, group, moves, *grads), *[None] * 5)
        return (_send_back(grads[0], list(grads[1:]), like, dim, group, moves, fresh), *[None] * 5)


class _SendBack(Function):
    @staticmethod
    def forward(ctx: Any, like: Any, dim: int, group: Any, moves: Moves, *grads: Tensor | None) -> Tensor:
        ctx.given = dim, group, moves
        return _send_back(grads[0], list(grads[1:]), like, dim, group, moves, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, None, None, *_Exchange.apply(grads[0], *ctx.given, False, None))


def give_back(x: Tensor, dim: int, group: Any, moves: Moves, index: int, into: Tensor) -> None:
    """As `Ranks.give_back`, for the rank of number `index`."""
    received: dict[int, list[Tensor]] = {}
    place = 0
    for owner, begin, length in moves.pieces:
        piece = x.narrow(dim, place, length)
        place += length
        if owner == index:
            into.narrow(dim, begin, length).add_(piece)
        else:
            received.setdefault(owner, []).append(piece)
    if moves.anyone:
        back = [_joined(received[peer], dim) for peer, _ in moves.receives]
        _send_back(into, [*back], (), dim, group, moves, fresh=True)


class Exchange:
    """Gets the ranges that this rank wants of the whole image (`spatial.Fetch`); arguments as of `Executor.fetch`.

    Messages are posted at once, so that what needs none of them can be computed before `finish`.
    """

    def __init__(
        self, group: Any, x: Tensor, dim: int, axis: Axis, wanted: Wanted, pads: tuple[int, int], fill: float,
        fresh: bool,
    ) -> None:  # fmt: skip
        self._group, self._x, self._dim, self._index = group, x, dim, axis.index
        self._pads, self._fill, self._fresh = pads, fill, fresh
        self._moves = moves_for(axis.cuts, wanted, axis.index)
        self._transfer = _start(x, dim, group, self._moves) if self._moves.anyone else None

    @property
    def complete(self) -> bool:
        return self._transfer is None

    def _parts(self, x: Tensor, received: dict[int, Tensor]) -> list[Tensor]:
        parts = []
        for owner, place, length in self._moves.pieces:
            source = x if owner == self._index else received[owner]
            parts.append(source if length == source.size(self._dim) else source.narrow(self._dim, place, length))
        if not parts:
            parts.append(x.narrow(self._dim, 0, 0))
        for place, length in zip((0, len(parts) + 1), self._pads, strict=True):
            if length:
                parts.insert(place, empty(x, self._dim, length, layout(x)).fill_(self._fill))
        return parts

    def rows(self, low: int, high: int) -> Tensor:
        """Coordinates of the result, without history. Waits for the messages."""
        taken, place = [], 0
        for part in self._parts(self._x.detach(), self._transfer.wait() if self._transfer else {}):
            length = part.size(self._dim)
            a, b = max(low - place, 0), min(high - place, length)
            if a < b:
                taken.append(part.narrow(self._dim, a, b - a))
            place += length
        whole = taken[0] if len(taken) == 1 else joined(taken, self._dim)
        return whole.contiguous(memory_format=layout(self._x))

    def finish(self) -> Tensor:
        """The ranges and the padding, joined. Waits for the messages."""
        x, received = self._x, {}
        if self._transfer is not None:
            out = _Exchange.apply(x, self._dim, self._group, self._moves, self._fresh, self._transfer)
            x, received = out[0], dict(zip((peer for peer, _ in self._moves.receives), out[1:], strict=True))
        parts = self._parts(x, received)
        # Not torch.cat: this one is computed again in backward, and saves no copy of x with its halo.
        return parts[0] if len(parts) == 1 else _cat(parts, self._dim)
