"""Measures memory over time, peak memory and time of a function, on the CPU or on a GPU.

On the CPU it measures the resident memory of the process: what it really occupies, whatever was allocated. A thread
samples it while the function runs (torch's operators release the interpreter's lock). The kernel's high-water mark,
reset before the function, gives the peak between samples. On a GPU torch's allocator counts what is allocated, and its
peak is exact. The process must do nothing else at the time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from .._bytes import KIB
from ..commands.errors import Mistake

INTERVAL = 0.005  # seconds between samples
REPORT_EVERY = 0.1  # seconds between calls of `watch`


class Meter(Protocol):
    """Tells how much memory is in use, in bytes."""

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
            raise Mistake(f"measures memory through Linux's /proc, which is not here ({error})") from error

    def now(self) -> int:
        return int(os.pread(self._statm, 256, 0).split()[1]) * self._page

    def trim(self) -> None:
        """Returns the free pages of the heap to the system. Reused, they would hide memory that the work takes."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return _bytes_in("/proc/self/status", "VmHWM")

    def synchronize(self) -> None:
        """Operators on the CPU are done when they return."""


class PrivateMeter(HostMeter):
    """Resident memory without the pages of mapped files, which the system takes back when it wants them.

    Linux keeps no high-water mark of it: the peak is the largest sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self._most = 0

    def now(self) -> int:
        fields = os.pread(self._statm, 256, 0).split()
        used = (int(fields[1]) - int(fields[2])) * self._page
        self._most = max(self._most, used)
        return used

    def reset_peak(self) -> None:
        self._most = 0

    def peak(self) -> int:
        return max(self._most, self.now())


class CudaMeter:
    """Memory allocated by torch on the current GPU."""

    def now(self) -> int:
        return torch.cuda.memory_allocated()

    def trim(self) -> None:
        """Free memory that the allocator keeps does not count as allocated."""

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def meter_for(device: str, mapped: bool = True) -> Meter:
    """mapped: whether the host's meter counts the pages of mapped files."""
    return CudaMeter() if device == "cuda" else HostMeter() if mapped else PrivateMeter()


@dataclass(frozen=True)
class Measurement:
    """One run. Bytes are above what the process occupied before the run, which includes input and weights."""

    seconds: float
    peak: int  # the high-water mark
    result: int  # bytes of the result
    curve: list[tuple[float, int]]  # seconds since the start, bytes

    @property
    def workspace(self) -> int:
        """The peak above input, weights and result. 0 if the result went into memory that was occupied before."""
        return max(0, self.peak - self.result)


def measure(
    work: Callable[[], Any],
    meter: Meter,
    repeats: int = 1,
    watch: Callable[[int], None] | None = None,
) -> tuple[Any, Measurement]:
    """Runs `work` and returns its result and what it took. A result that is no tensor takes no bytes.

    The curve and the peak are those of the first run; the time is the median of all runs. The sampling thread calls
    `watch` now and then with the bytes in use.
    """
    meter.synchronize()
    gc.collect()  # what is freed while the work runs would hide memory that it takes
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
    size = result.nbytes if isinstance(result, torch.Tensor) else 0
    return result, Measurement(statistics.median(seconds), peak, size, curve)


class _Sampler:
    """Samples a meter in a thread during the `with` block."""

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
    """Bytes that are free: on the GPU, or on the host within the limits of the system and of a container."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    root = Path("/sys/fs/cgroup")
    return min(
        _bytes_in("/proc/meminfo", "MemAvailable"),
        _left_in_group(root, "memory.max", "memory.current"),
        _left_in_group(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )


def _left_in_group(group: Path, limit: str, used: str) -> int:
    """Bytes that the limit of a control group leaves. Its cached files count as free, as they are dropped on demand."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
        return max(0, int((group / limit).read_text()) - int((group / used).read_text()) + cached)
    except (OSError, ValueError, KeyError):  # no such group, or "max": no limit
        return sys.maxsize


def _bytes_in(file: str, field: str) -> int:
    """A size from a file of /proc, which has it in kB."""
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KIB
    raise Mistake(f"{file} has no {field}, which the demo measures memory by")
