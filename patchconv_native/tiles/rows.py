"""Rows of a value that are at hand: pieces along the cut dimension, in order, joined where one call reads several."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor

from .._library import load
from ..spatial.layout import empty, joined, order

_strips = load().strips

Take = Callable[[Tensor], Tensor]
"""Gives a view of a part of some rows."""


def alone(rows: Tensor) -> Tensor:
    """A copy of a view, which would keep all that it is a part of."""
    return rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows


class Rows:
    """Rows `begin` to `end` of a whole. New ones are added at the end, and those before some row are let go."""

    def __init__(self, dim: int, begin: int = 0) -> None:
        self._dim = dim
        self._pieces: list[tuple[int, Tensor]] = []
        self._room: tuple[int, Tensor, Tensor] | None = None
        self._below = begin
        self.end = begin

    def room(self, like: Tensor) -> Tensor | None:
        """Where as many rows as those of `like` can be written, to be added then; None where that gains nothing."""
        length = like.size(self._dim)
        begin = max(self._below, self._pieces[0][0]) if self._pieces else self.end
        rest = self.end - begin
        if not _strips.makes_room(rest, length):
            return None
        whole = empty(like, self._dim, rest + length, order(like))
        whole.narrow(self._dim, 0, rest).copy_(self.read(begin, self.end))
        rows = whole.narrow(self._dim, rest, length)
        self._room = begin, whole, rows
        return rows

    def add(self, rows: Tensor) -> None:
        """The rows that follow."""
        if self._room is not None:
            begin, whole, written = self._room
            self._room = None
            if rows is written:
                self._pieces = [(begin, whole)]
                self.end += rows.size(self._dim)
                return
        rows = alone(rows)
        self._pieces.append((self.end, rows))
        self.end += rows.size(self._dim)

    def read(self, low: int, high: int, take: Take | None = None) -> Tensor:
        """These rows: a view where one piece holds them. take: what is taken of them."""
        parts = []
        for begin, piece in self._pieces:
            a, b = max(low - begin, 0), min(high - begin, piece.size(self._dim))
            if a < b:
                rows = piece if b - a == piece.size(self._dim) else piece.narrow(self._dim, a, b - a)
                parts.append(rows if take is None else take(rows))
        if sum(part.size(self._dim) for part in parts) != high - low:
            raise RuntimeError(f"tile: rows {low} to {high} are read, and not all of them are there")
        return parts[0] if len(parts) == 1 else joined(parts, self._dim)

    def drop(self, below: int) -> None:
        """Lets go of the rows below this one. Of a piece that is mostly let go, the rest is copied."""
        self._below = below
        while self._pieces:
            begin, piece = self._pieces[0]
            length = piece.size(self._dim)
            if begin + length <= below:
                del self._pieces[0]
                continue
            rest = begin + length - below
            if _strips.copies_rest(rest, length):
                self._pieces[0] = below, piece.narrow(self._dim, length - rest, rest).clone()
            return

    @property
    def pieces(self) -> list[Tensor]:
        return [piece for _, piece in self._pieces]

    def again(self, pieces: list[Tensor]) -> Rows:
        """Rows of the same kind, with these pieces. Those of self stay."""
        made = copy.copy(self)
        made._pieces, made.end = [], made._below
        for piece in pieces:
            made.add(piece)
        return made

    def close(self) -> None:
        """No row is read any more."""
        self._pieces.clear()
