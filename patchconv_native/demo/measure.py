"""Memory over time and peak memory of one piece of work, on the host or on a GPU.

On the host the unit is the process's resident memory: what it really occupies, whatever was allocated. A
thread samples it while the work runs (an operator of torch releases the interpreter's lock), and the kernel's
own high-water mark, set back before the work, gives the peak between samples. On a GPU torch's allocator
counts what is allocated, and its peak is exact. Either is measured in a process that does nothing else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from . import DemoError

INTERVAL = 0.005  # seconds between samples
REPORT_EVERY = 0.1  # seconds between reports to whoever watches


class Meter(Protocol):
    """What tells how much memory is in use, in bytes."""

    def now(self) -> int: ...
    def trim(self) -> None: ...
    def reset_peak(self) -> None: ...
    def peak(self) -> int: ...
    def synchronize(self) -> None: ...


class HostMeter:
    """Resident memory of this process, from Linux's /proc."""

    def __init__(self) -> None:
        self._page = resource.getpagesize()
        try:
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError as error:
            raise DemoError(f"measures memory through Linux's /proc, which is not here ({error})") from error

    def now(self) -> int:
        return int(os.pread(self._statm, 256, 0).split()[1]) * self._page

    def trim(self) -> None:
        """Gives back free pages that the heap has kept: they would hide as much of what the work takes."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise DemoError("/proc/self/status has no VmHWM, the peak of resident memory")

    def synchronize(self) -> None:
        """Host operators are done when they return."""


class CudaMeter:
    """Memory that torch's allocator has given out on the current GPU."""

    def now(self) -> int:
        return torch.cuda.memory_allocated()

    def trim(self) -> None:
        """What the allocator keeps free does not count as allocated."""

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def meter_for(device: str) -> Meter:
    return CudaMeter() if device == "cuda" else HostMeter()


@dataclass(frozen=True)
class Measurement:
    """One run. Bytes are above what the process occupied before, its input and weights among it."""

    seconds: float
    peak: int  # the high-water mark
    result: int  # bytes of the result
    curve: list[tuple[float, int]]  # seconds since the start, bytes

    @property
    def workspace(self) -> int:
        """The peak above input, weights and result; a small result may go into memory occupied before."""
        return max(0, self.peak - self.result)

    @property
    def sampled_peak(self) -> int:
        return max(value for _, value in self.curve)


def measure(
    work: Callable[[], torch.Tensor],
    meter: Meter,
    repeats: int = 1,
    watch: Callable[[int], None] | None = None,
) -> tuple[torch.Tensor, Measurement]:
    """Runs `work` and returns its result with what it took.

    The curve and the peak are the first run's; the time is the median of all runs. `watch` is called now and
    then, from the sampling thread, with the bytes in use.
    """
    meter.synchronize()
    meter.trim()
    meter.reset_peak()
    before = meter.now()
    sampler = _Sampler(meter, before, watch)
    with sampler:
        start = time.perf_counter()
        result = work()
        meter.synchronize()
        seconds = [time.perf_counter() - start]
    peak = meter.peak() - before
    meter.trim()
    curve = [point for point in sampler.curve if point[0] < seconds[0]] + [(seconds[0], meter.now() - before)]
    for _ in range(repeats - 1):
        del result  # two at once may not fit
        start = time.perf_counter()
        result = work()
        meter.synchronize()
        seconds.append(time.perf_counter() - start)
    return result, Measurement(statistics.median(seconds), peak, result.nbytes, curve)


class _Sampler:
    """Samples a meter from a thread of its own for as long as the `with` block lasts."""

    def __init__(self, meter: Meter, before: int, watch: Callable[[int], None] | None) -> None:
        self.curve: list[tuple[float, int]] = [(0.0, 0)]
        self._meter, self._before, self._watch = meter, before, watch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        reported = 0.0
        while not self._stop.wait(INTERVAL):
            now, used = time.perf_counter() - self._start, self._meter.now()
            self.curve.append((now, used - self._before))
            if self._watch is not None and now - reported > REPORT_EVERY:
                self._watch(used)
                reported = now


def available_memory(device: str) -> int:
    """Bytes that can be had: free on the GPU, or on the host what the system and a control group leave."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    root = Path("/sys/fs/cgroup")
    return min(
        _meminfo_available(),
        _left_in_group(root, "memory.max", "memory.current"),
        _left_in_group(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )


def _left_in_group(group: Path, limit: str, used: str) -> int:
    """What a container's limit leaves. Cached files count as used there, but give way when need be."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
        return max(0, int((group / limit).read_text()) - int((group / used).read_text()) + cached)
    except (OSError, ValueError, KeyError):  # no such group, or "max": no limit
        return sys.maxsize


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise DemoError("/proc/meminfo does not say how much memory is available")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch or Python means that memory could not be had."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
