"""How things are measured here: clocks, paired timings, peaks of memory, and the description of the machine.

Timings are taken in rounds (A B A B ...): each round calls every side once, so that what the machine does
beside us falls on all sides alike, and a ratio is the median of the rounds' ratios. A call's result is freed
after the clock has stopped; allocating it is part of the call, on every side. Nothing here is asserted: a
measurement is data.

A peak of memory is what a call needed above what was resident before it, its result subtracted. On the host
that is the kernel's high-water mark of the process (VmHWM), which sees everything, wherever it was allocated;
on CUDA it is what torch's allocator gave out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SMOKE_RESULTS = ROOT / "build" / "bench"  # of runs at less than full size: never beside real ones
MIB = 2**20
GIB = 2**30

# ------------------------------------------------------------------------------------------------------------
# Time


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of several measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        kept = list(values)
        return cls(statistics.median(kept), min(kept), max(kept))

    def facts(self, digits: int = 4) -> dict[str, float]:
        return {name: round(value, digits) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Paired:
    """Seconds of every side in every round."""

    seconds: dict[str, list[float]]

    @property
    def rounds(self) -> int:
        return len(next(iter(self.seconds.values())))

    def time(self, side: str) -> Spread:
        return Spread.of(self.seconds[side])

    def ratio(self, side: str, base: str) -> Spread:
        """Time of `side` in units of `base`'s, round by round."""
        pairs = zip(self.seconds[side], self.seconds[base], strict=True)
        return Spread.of(one / other for one, other in pairs)

    def facts(self, base: str) -> dict[str, Any]:
        """For a results file: milliseconds of each side, and ratios to `base` of the others."""
        sides = list(self.seconds)
        return {
            "rounds": self.rounds,
            "ms": {side: Spread.of(1e3 * s for s in self.seconds[side]).facts() for side in sides},
            "ratio": {side: self.ratio(side, base).facts() for side in sides if side != base},
        }


def seconds_of(call: Callable[[], object]) -> float:
    """One call on the host's clock; its result dies after the clock has stopped."""
    start = time.perf_counter()
    result = call()
    stop = time.perf_counter()
    del result
    return stop - start


def paired(
    calls: Mapping[str, Callable[[], object]], budget: float, least: int = 3, most: int = 60, warm: int = 1
) -> Paired:
    """Rounds of one call a side, after `warm` rounds that do not count: at least `least`, then as many as end
    within `budget` seconds, at most `most`.
    """
    start = time.perf_counter()
    for _ in range(warm):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    longest = 0.0
    for done in range(most):
        begin = time.perf_counter()
        if done >= least and begin - start + longest > budget:
            break
        for side, call in calls.items():
            seconds[side].append(seconds_of(call))
        longest = max(longest, time.perf_counter() - begin)
    return Paired(seconds)


# ------------------------------------------------------------------------------------------------------------
# Memory


def result_bytes(result: Any) -> int:
    tensors = [result] if isinstance(result, Tensor) else [t for t in result if t is not None]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@dataclass(frozen=True)
class Peak:
    """Bytes of one call."""

    above: int  # of what was resident before
    result: int

    @property
    def workspace(self) -> int:
        """The peak above what was there before and the result."""
        return self.above - self.result


def peak_of(call: Callable[[], Any], device: str = "cpu") -> Peak:
    """The peak of one call. On the host it is exact only in a process that does nothing else."""
    from patchconv_native.demo.measure import meter_for

    meter = meter_for(device)
    meter.synchronize()
    meter.trim()
    meter.reset_peak()
    before = meter.now()
    result = call()
    meter.synchronize()
    return Peak(meter.peak() - before, result_bytes(result))


# ------------------------------------------------------------------------------------------------------------
# Processes


def processes() -> Any:
    """New processes come from a server that has imported torch and has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "patchconv_native"])
    return context


def in_fresh_process(target: str, timeout: float = 120.0, **arguments: Any) -> dict[str, Any]:
    """Calls "module:function" with JSON arguments in a new process and returns the JSON that it returns.

    {"error": "out of memory"} if the process is killed for memory or is refused it, {"error": "not done in ... s"} if
    it takes longer than `timeout` seconds; any other failure raises RuntimeError with the traceback.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = processes().Process(target=_answer, args=(sender, target, json.dumps(arguments)))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return {"error": f"not done in {timeout:.0f} s"}
        answer = receiver.recv()
        process.join()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGKILL:
            return {"error": "out of memory"}
        answer = f"it ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise RuntimeError(f"{target} with {arguments} failed:\n{answer}")
    return json.loads(answer[0])


def _answer(sender: Any, target: str, arguments: str) -> None:
    """In the new process: sends the result as JSON in a tuple, or the text of an error."""
    from patchconv_native.commands.errors import out_of_memory

    try:
        answer: Any = (json.dumps(function_named(target)(**json.loads(arguments))),)
    except Exception as error:
        refused = out_of_memory(error)
        answer = (json.dumps({"error": "out of memory"}),) if refused else traceback.format_exc()
    sender.send(answer)


def function_named(target: str) -> Callable[..., Any]:
    """ "module:function" """
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


# ------------------------------------------------------------------------------------------------------------
# The machine, and results


def hardware(device: str = "cpu") -> dict[str, Any]:
    """What the numbers were measured on and with."""
    import patchconv_native as pc

    config = torch.__config__.show()
    onednn = re.search(r"MKL-DNN v(\S+)", config) or re.search(r"oneDNN v(\S+)", config)
    info: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        "torch": torch.__version__,
        "onednn": onednn[1] if onednn else None,
        "onednn_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "patchconv_native": pc.__version__,
        "patch_conv": installed("patch_conv"),
        "python": platform.python_version(),
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        info |= {
            "gpu": gpu.name,
            "gpu_memory_gib": round(gpu.total_memory / GIB, 1),
            "capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "l2_mib": round(gpu.L2_cache_size / MIB, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    return info


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", version.read_text()) if version.exists() else None
    return found[1] if found else None


def report_head(bench: str, size: str, device: str = "cpu") -> dict[str, Any]:
    """What every results file starts with. The load tells later readers whether the machine was quiet."""
    return {
        "bench": bench,
        "size": size,
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 2),
        "hardware": hardware(device),
    }


def heads_of(old: dict[str, Any], cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """When and on what these cases of an earlier results file were measured, which may itself have kept some."""
    head = {key: old[key] for key in ("date", "load", "hardware") if key in old}
    return {case: old.get("heads", {}).get(case, head) for case in cases}


def write_results(data: dict[str, Any], out: Path, name: str | None = None) -> Path:
    """Writes data as out/<name>.json, whole at every moment, also while a later state replaces it."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name or data['bench']}.json"
    draft = path.with_suffix(".json.part")
    draft.write_text(json.dumps(data, indent=1) + "\n")
    draft.replace(path)
    return path


def parser(doc: str | None, sizes: tuple[str, ...] = ("full", "small", "tiny")) -> argparse.ArgumentParser:
    """The options that all scripts share."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--size", choices=sizes, default=sizes[0], help="less than full shows that it works, no more")
    made.add_argument("--out", type=Path, help="folder of the results (default: bench/results, or build/bench)")
    return made


def folder(arguments: argparse.Namespace) -> Path:
    return arguments.out or (RESULTS if arguments.size == "full" else SMOKE_RESULTS)
