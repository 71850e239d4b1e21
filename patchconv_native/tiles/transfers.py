"""Copies between the host's memory and a device while strips are computed: what a strip reads is on its way while the
one before it is computed, and what it gives is written while the next one is.

Each direction has a stream of its own beside the one that computes, and page-locked ("pinned") buffers, from and to
which a device copies by itself: two for each value that is read, one for each that is written, as large as the largest
part. On the device there is one part more of each of them (`Outside.beside`).

Who waits for whom. A copy to the device waits for what the device had been given when the memory was taken, since its
block may have been in use until then; what reads the copy waits for it. A copy from the device waits for what computes
the rows, and these are held until it is done. The host waits for a copy before it writes into the buffer that is copied
from, and before it reads the one that is copied to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kinds import Region

SERVED = {"cuda"}
"""Types of devices that copy by themselves."""


class DeviceCopies:
    """The few calls that transfers make on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.computes: Any = torch.cuda.current_stream(device)
        """The stream on which strips are computed: the caller's."""

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def record(self, stream: Any) -> Any:
        """An event: all that the stream has been given so far is done."""
        return stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is given from here on waits for the event; the host goes on."""
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        """The host waits for the event."""
        event.synchronize()

    def pinned(self, size: int) -> Tensor:
        """Bytes in the host's memory."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, into: Tensor, rows: Tensor, stream: Any) -> None:
        """Between pinned memory and the device's, for the stream to do; both are held until it is done."""
        with torch.cuda.stream(stream):
            into.copy_(rows, non_blocking=True)


def device_copies(device: torch.device) -> DeviceCopies:
    return DeviceCopies(device)


def serves(device: torch.device) -> bool:
    return device.type in SERVED


class Part(NamedTuple):
    """What one strip reads of a value."""

    strip: int
    region: Region


class Readings(NamedTuple):
    """What a sweep reads of a value. largest: the bytes of the largest part."""

    parts: Iterator[Part]
    largest: int


@dataclass
class _Ahead:
    """Of a value, the part that is read next, and the buffers by way of which it is read."""

    readings: Readings
    buffers: list[Tensor]
    part: Part | None = None
    rows: Tensor | None = None
    """On the device: where the part goes."""
    usable: Any = None
    """The event after which nothing else is in that memory."""
    copied: Any = None
    """The event after which the part is there; None: its copy has not begun."""
    copies: list[Any] = field(default_factory=lambda: [None, None])
    """Of each buffer, the event after which nothing is copied from it."""


@dataclass
class _Behind:
    """Rows on their way to the host."""

    rows: Tensor
    host: Tensor
    copied: Any
    put: Callable[[Tensor], None]


class Transfers:
    """read: fills a tensor in the host's memory with a part of a value. empty: makes one on the device.

    In a `with` block: what has been written is there when it is left, also by an exception.
    """

    def __init__(
        self, device: torch.device, read: Callable[[int, Region, Tensor], None], empty: Callable[[int, Region], Tensor]
    ) -> None:
        self._copies, self._read, self._empty = device_copies(device), read, empty
        self._inward, self._outward = self._copies.stream(), self._copies.stream()
        self._ahead: dict[int, _Ahead] = {}
        self._sizes: dict[Hashable, int] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._behind: dict[Hashable, _Behind] = {}

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        quiet = contextlib.suppress(*([] if error is None else [Exception]))  # the first error is the one to tell
        with quiet:
            for stream in (self._inward, self._outward):  # before memory that is copied is given to others
                self._copies.wait(self._copies.computes, self._copies.record(stream))
        for key in list(self._behind):
            with quiet:
                self._settle(key)
        with quiet:
            self._finish()

    def begin(self, reads: Mapping[int, Readings], writes: Mapping[Any, int]) -> None:
        """Of a sweep. writes: what is written, with the bytes of the largest part."""
        self._sizes = dict(writes)
        for v, readings in reads.items():
            buffers = [self._copies.pinned(readings.largest) for _ in range(2)]
            self._ahead[v] = _Ahead(readings, buffers)
            self._prepare(v, self._ahead[v])
        self.ahead()

    def end(self) -> None:
        """Of a sweep: all that it has written is there."""
        self.settle()
        self._finish()

    def reads(self, v: int) -> bool:
        return v in self._ahead

    def writes(self, key: Hashable) -> bool:
        return key in self._sizes

    def take(self, v: int, region: Region) -> Tensor:
        """On the device, the part of a value that is read next."""
        one = self._ahead[v]
        if one.part is None or one.rows is None or one.part.region != region:
            raise RuntimeError(f"tile: {region} is read of value {v}, and {one.part} was expected")
        if one.copied is None:
            self._start(v, one)
        self._copies.wait(self._copies.computes, one.copied)
        rows, strip = one.rows, one.part.strip
        self._prepare(v, one)
        if one.part is not None and one.part.strip == strip:
            self._start(v, one)
        return rows

    def ahead(self) -> None:
        """Begins to copy what is read next. To be called when a strip has been given to the device, which computes it
        while the host fills buffers.
        """
        for v, one in self._ahead.items():
            if one.part is not None and one.copied is None:
                self._start(v, one)

    def write(self, key: Hashable, rows: Tensor, put: Callable[[Tensor], None]) -> None:
        """Rows on the device go to the host, and there, some time later, to `put`, which keeps no hold of them."""
        self._settle(key)
        rows = rows.resolve_conj().resolve_neg()
        if rows.untyped_storage().nbytes() != rows.nbytes:
            rows = rows.clone()  # with gaps it could not be copied at once, and it would hold all that it is a part of
        if key not in self._buffers or self._buffers[key].nbytes < rows.nbytes:
            self._buffers[key] = self._copies.pinned(max(self._sizes[key], rows.nbytes))
        host = _as(self._buffers[key], rows)
        self._copies.wait(self._outward, self._copies.record(self._copies.computes))
        self._copies.copy(host, rows, self._outward)
        self._behind[key] = _Behind(rows, host, self._copies.record(self._outward), put)

    def settle(self) -> None:
        """All that has been written is there."""
        for key in list(self._behind):
            self._settle(key)

    def _settle(self, key: Hashable) -> None:
        one = self._behind.pop(key, None)
        if one is not None:
            self._copies.synchronize(one.copied)
            one.put(one.host)

    def _prepare(self, v: int, one: _Ahead) -> None:
        """Takes memory for the next part: before the strip is computed, for which its copy need not wait then."""
        one.copied = one.rows = None
        one.part = next(one.readings.parts, None)
        if one.part is not None:
            one.rows = self._empty(v, one.part.region)
            one.usable = self._copies.record(self._copies.computes)

    def _start(self, v: int, one: _Ahead) -> None:
        assert one.part is not None and one.rows is not None
        if one.copies[0] is not None:
            self._copies.synchronize(one.copies[0])
        host = _as(one.buffers[0], one.rows)
        self._read(v, one.part.region, host)
        self._copies.wait(self._inward, one.usable)
        self._copies.copy(one.rows, host, self._inward)
        one.copied = self._copies.record(self._inward)
        one.buffers.reverse()
        one.copies = [one.copies[1], one.copied]

    def _finish(self) -> None:
        """Gives the buffers back."""
        self._copies.synchronize(self._copies.record(self._inward))
        self._ahead.clear()
        self._buffers.clear()
        self._sizes.clear()


def _as(buffer: Tensor, rows: Tensor) -> Tensor:
    """The buffer, as a tensor like `rows`, which has no gaps."""
    return buffer[: rows.nbytes].view(rows.dtype).as_strided(rows.shape, rows.stride())
