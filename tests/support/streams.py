"""A device that is not there: streams are queues of copies, and the CPU's memory is that of the host and of the device.

What torch computes is done at once. A copy is done as late as can be, when something waits for it, or at random times
from the moment on at which it is asked for. So whatever reads, writes over or frees memory without a wait meets rows
that are not there yet, or are not those any more. What was not written, or was freed, reads as NaN (-1 in integers).

The one thing that both leave out, that the device is behind with what it computes, is counted instead: each operator
that writes moves a clock, and a copy from or to the device's memory on a stream that does not know of the last write
into it, by an event that it has waited for, gives NaN.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def poison(x: Tensor) -> None:
    """NaN, or -1, in all of its memory."""
    memory = x.untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(memory, 0, (memory.nbytes(),)).fill_(255)


def bits(x: Tensor) -> Any:
    """A copy, not in torch's memory, in which NaN is itself."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]).numpy().copy()


class Memory:
    """Where a tensor is, without holding it."""

    def __init__(self, x: Tensor) -> None:
        self._storage = weakref.ref(x.untyped_storage())
        self.key = x.untyped_storage()._cdata
        self._how = x.dtype, x.storage_offset(), x.shape, x.stride()

    def tensor(self) -> Tensor | None:
        """None where it was freed."""
        storage, (dtype, *how) = self._storage(), self._how
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *how)


class Stream:
    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.done = 0
        self.knows = 0
        """The clock of the last event of what computes that it has waited for."""

    def run(self, until: int) -> None:
        """The first `until` of all that it was ever given."""
        while self.pending and self.done < until:
            self.done += 1
            self.pending.pop(0)()

    @property
    def given(self) -> int:
        return self.done + len(self.pending)


class Streams(TorchDispatchMode):
    """In place of `transfers.DeviceCopies`; to be used in a `with` block. seed: of random times; None: late."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.computes = Stream()
        self.faults: list[str] = []
        self.log: list[str] = []
        self.most_pinned = 0
        self._random = None if seed is None else random.Random(seed)
        self.streams: list[Stream] = []
        self._copied: list[tuple[Stream, int, Memory, Any]] = []
        """Copies that were done and of which the host may not know yet, with the rows."""
        self._pinned: dict[int, int] = {}
        self._clock, self._ours = 0, False
        self._written: dict[int, int] = {}
        """By memory, the clock when what computes wrote into it last, or got it."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for stream in self.streams:
            stream.run(stream.given)  # also what nobody has waited for happens some time
            self._look(stream, stream.given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._ours or func.is_view:
            return result
        self._clock += 1
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and not isinstance(made, FakeTensor) and made.device.type == "cpu":
                if func is torch.ops.aten.empty.memory_format:
                    poison(made)
                self._written[made.untyped_storage()._cdata] = self._clock
        return result

    @contextlib.contextmanager
    def _by_itself(self) -> Iterator[None]:
        """What this does is not computed on the device."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    # As of DeviceCopies.

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def record(self, stream: Stream) -> tuple[Stream, int]:
        return stream, self._clock if stream is self.computes else stream.given

    def wait(self, stream: Stream, event: tuple[Stream, int]) -> None:
        other, moment = event
        if stream is self.computes:
            other.run(moment)
            return

        def waited() -> None:
            if other is self.computes:
                stream.knows = max(stream.knows, moment)
            else:
                other.run(moment)

        stream.pending.append(waited)
        self._sometimes()

    def synchronize(self, event: tuple[Stream, int]) -> None:
        stream, moment = event
        if stream is not self.computes:
            stream.run(moment)
            self._look(stream, moment)
        self._sometimes()

    def pinned(self, size: int) -> Tensor:
        with self._by_itself():
            made = torch.empty(size, dtype=torch.uint8)
            poison(made)
        memory = made.untyped_storage()
        self._pinned[memory._cdata] = size
        weakref.finalize(memory, self._pinned.pop, memory._cdata, 0)
        self.most_pinned = max(self.most_pinned, sum(self._pinned.values()))
        return made

    def copy(self, into: Tensor, rows: Tensor, stream: Stream) -> None:
        inward = rows.untyped_storage()._cdata in self._pinned
        if inward == (into.untyped_storage()._cdata in self._pinned):
            self.faults.append("a copy that is not between pinned memory and the device's")
        self.log.append("in" if inward else "out")
        source, goal = Memory(rows), Memory(into)
        stream.pending.append(lambda: self._copy(goal, source, (goal if inward else source).key, stream))
        self._sometimes()

    def _copy(self, goal: Memory, source: Memory, device: int, stream: Stream) -> None:
        with self._by_itself():
            into, rows = goal.tensor(), source.tensor()
            if into is None:
                self.faults.append("a copy into memory that was freed")
            elif rows is None:
                self.faults.append("a copy from memory that was freed")
                poison(into)
            elif stream.knows < self._written.get(device, 0):
                self.faults.append("a copy that does not wait for what computes")
                poison(into)
            else:
                into.copy_(rows)
                self._copied.append((stream, stream.done, source, bits(rows)))

    def _look(self, stream: Stream, moment: int) -> None:
        """The host knows of these copies by now: what they are from must not have changed before."""
        copied, self._copied = self._copied, []
        with self._by_itself():
            for one in copied:
                other, place, source, rows = one
                if other is not stream or place > moment:
                    self._copied.append(one)
                    continue
                now = source.tensor()
                if source.key in self._pinned and (now is None or (bits(now) != rows).any()):
                    self.faults.append("a buffer that is used again, or freed, while it is copied from")

    def _sometimes(self) -> None:
        if self._random is not None:
            for stream in self._random.sample(self.streams, len(self.streams)):
                stream.run(stream.done + self._random.choice([0, 0, 1, 1, 2, 100]))
