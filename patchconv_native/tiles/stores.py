"""Where values are kept between sweeps: in the memory of the device, in that of the host, or in files."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..spatial.layout import empty, order
from .rows import Rows, Take

Where = str | os.PathLike[str]

CHUNK = 256 * 1024
"""Bytes that are brought into the order of a file, or out of it, at a time; at least one row."""


class Kept(Protocol):
    """The rows of a stored value, from the first one on."""

    end: int

    def add(self, rows: Tensor) -> None: ...

    def read(self, low: int, high: int, take: Take | None = None) -> Tensor:
        """These rows, or what `take` takes of them."""
        ...

    def drop(self, below: int) -> None: ...

    def close(self) -> None:
        """No row is read any more."""


class HostRows(Rows):
    """`Rows` in the host's memory, read back onto the device that they came from."""

    def __init__(self, dim: int, device: torch.device) -> None:
        super().__init__(dim)
        self._device = device

    def add(self, rows: Tensor) -> None:
        super().add(rows.cpu())

    def read(self, low: int, high: int, take: Take | None = None) -> Tensor:
        return self.host(low, high, take).to(self._device)

    def put(self, begin: int, rows: Tensor) -> None:
        """The rows from `begin` on, which are in the host's memory, to be used again. `end` tells of them already."""
        self._pieces.append((begin, rows.clone()))

    def host(self, low: int, high: int, take: Take | None = None) -> Tensor:
        """These rows, in the host's memory."""
        return super().read(low, high, take)


class FileRows:
    """Rows in a file, one after the other: written and read as copies, so that the process holds none of them.

    like: has the shape, the dtype, the device and the order of the dimensions of the whole value. end: the rows that
    the file has already. remove: what is called with the path in the end.
    """

    def __init__(
        self,
        path: Path,
        dim: int,
        like: Tensor,
        end: int = 0,
        remove: Callable[[Path], Any] = Path.unlink,
        device: torch.device | None = None,
    ) -> None:
        self._remove, self._path, self._dim, self._dtype = remove, path, dim, like.dtype
        self._device = device or like.device
        self._shape = list(like.shape)
        strides = like.stride()
        self._dense = sorted(range(like.dim()), key=lambda d: -strides[d])  # the order of a strip in memory
        self._order = [dim, *(d for d in self._dense if d != dim)]  # and in the file
        self._bytes = like.numel() // max(like.size(dim), 1) * like.dtype.itemsize
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.end = end

    def add(self, rows: Tensor) -> None:
        """The rows that follow."""
        self.put(self.end, rows)
        self.end += rows.size(self._dim)

    def put(self, begin: int, rows: Tensor) -> None:
        """The rows from `begin` on, which the caller may use again. `end` stays."""
        for first, length in self._chunks(0, rows.size(self._dim), rows):
            part = rows.narrow(self._dim, first, length).permute(self._order).contiguous().cpu()
            self._move(os.pwritev, part, begin + first)

    def read(self, low: int, high: int, take: Take | None = None) -> Tensor:
        """A copy of these rows."""
        return self._read(low, high, self._device, take)

    def host(self, low: int, high: int, take: Take | None = None) -> Tensor:
        """These rows, in the host's memory."""
        return self._read(low, high, torch.device("cpu"), take)

    def _read(self, low: int, high: int, device: torch.device, take: Take | None = None) -> Tensor:
        if take is not None:  # row by row: no more of a whole row is there than one
            first = take(self._read(low, low + 1, device))
            some = empty(first, self._dim, high - low, order(first))
            for row in range(low, high):
                one = first if row == low else take(self._read(row, row + 1, device))
                some.narrow(self._dim, row - low, 1).copy_(one)
                del one
            return some
        if high > self.end:
            raise RuntimeError(f"tile: rows {low} to {high} are read, and not all of them are there")
        made = self._empty(high - low, self._dense, device)
        for begin, length in self._chunks(low, high, made):
            into = made.narrow(self._dim, begin - low, length).permute(self._order)
            if into.is_contiguous() and into.device.type == "cpu":
                self._move(os.preadv, into, begin)
                continue
            part = self._empty(length, self._order, torch.device("cpu")).permute(self._order)
            self._move(os.preadv, part, begin)
            into.copy_(part)
        return made

    def drop(self, below: int) -> None:
        """A file keeps its rows until it is closed."""

    def close(self) -> None:
        if self._file >= 0:
            self.leave()
            self._remove(self._path)

    def leave(self) -> None:
        """Closes the file, which stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def flush(self) -> None:
        os.fsync(self._file)

    def _chunks(self, low: int, high: int, rows: Tensor) -> list[tuple[int, int]]:
        """Where chunks begin and how long they are: one chunk where the rows are in the file's order already."""
        step = max(1, CHUNK // max(self._bytes, 1))
        if rows.permute(self._order).is_contiguous():
            step = max(high - low, 1)
        return [(begin, min(step, high - begin)) for begin in range(low, high, step)]

    def _empty(self, length: int, order: list[int], device: torch.device) -> Tensor:
        shape = [length if d == self._dim else self._shape[d] for d in order]
        made = torch.empty(shape, dtype=self._dtype, device=device)
        return made.permute([order.index(d) for d in range(len(order))])

    def _move(self, call: Any, rows: Tensor, row: int) -> None:
        """Between memory and the file, at this row."""
        size, done = rows.nbytes, 0
        if not size:
            return
        memory = memoryview((ctypes.c_char * size).from_address(rows.data_ptr())).cast("B")
        while done < size:
            try:
                moved = call(self._file, [memory[done:]], row * self._bytes + done)
            except OSError as error:
                raise OSError(error.errno, f"tile: {error.strerror}", str(self._path)) from error
            if not moved:
                raise OSError(f"tile: {self._path} is shorter than what was written into it")
            done += moved


class Store:
    """Makes what keeps values between sweeps, and removes all of it at the end.

    name: of a folder that is left there after an error, for a later call. A file in it is removed by `purge`.
    """

    def __init__(self, where: Where, name: str | None = None) -> None:
        self._where = where
        self._folder = None if name is None or not is_folder(where) else Path(where) / name
        self._stays = self._folder is not None
        self._unneeded: list[Path] = []
        self._files: list[FileRows] = []

    def __enter__(self) -> Store:
        return self

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        for rows in self._files:
            rows.leave()
        if error is None or not self._stays:
            self.clear()

    def clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def purge(self) -> None:
        """Removes the files that are closed."""
        while self._unneeded:
            self._unneeded.pop().unlink(missing_ok=True)

    def rows(self, name: str, dim: int, like: Tensor, device: torch.device, end: int = 0) -> Kept:
        """For a value on a device. like: its shape, dtype and strides. end: the rows that are there."""
        if self._where == "device":
            return Rows(dim)
        if self._where == "cpu":
            return HostRows(dim, device)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="patchconv-tile-", dir=self._where))
        self._folder.mkdir(exist_ok=True)
        remove = self._unneeded.append if self._stays else Path.unlink
        self._files.append(FileRows(self._folder / f"{name}.rows", dim, like, end, remove, device))
        return self._files[-1]


def extra(store: Where, row: int) -> int:
    """The most bytes that one read or write of a stored value takes besides the rows. row: bytes of one row."""
    return max(CHUNK, row) if is_folder(store) else 0


def is_folder(store: Where) -> bool:
    return store not in ("device", "cpu")


def check_store(owner: str, store: Any, device: torch.device) -> None:
    expected = "expected store to be 'device', 'cpu' or a folder that exists, such as './scratch'"
    if not isinstance(store, (str, os.PathLike)):
        raise ValueError(f"{owner}: {expected}, got {store!r}")
    if store == "device":
        return
    if store == "cpu":
        if device.type == "cpu":
            raise ValueError(f"{owner}: store='cpu' is the same as 'device' for a model on the CPU; give a folder")
        return
    name = os.fspath(store)
    if isinstance(store, str) and os.sep not in store:
        raise ValueError(f"{owner}: {expected}, got {store!r}")
    if not os.path.isdir(name):
        raise ValueError(f"{owner}: {expected}, got {name!r}, which is not a folder")
    if not os.access(name, os.W_OK | os.X_OK):
        raise ValueError(f"{owner}: {expected}, got {name!r}, which cannot be written")
