"""What bench.gpu measures: peaks of memory and times of convolutions on one device, and the device's own
limits.

A variant is one way to compute a case: an implementation, a layout, a number of splits. Times are CUDA events
around one call, behind a write to a buffer larger than the level-2 cache (which also gives the host time to
queue the call); every variant is visited twice, in turn with the others, and the median is taken over both
visits. Stock runs with cuDNN's benchmark mode on; the calls in which it tries algorithms are not timed. Peaks
are max_memory_allocated above input, weight and result, of the first call (trials of algorithms included) and
of a later one. A call that runs out of memory is a result like any other. Without a GPU the same code runs on
the CPU, which tests it and measures nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from . import cases, measure
from .cases import GPU, OURS, PATCH_CONV, ROOFLINE, STOCK, Case
from .measure import Spread

Deadline = Callable[[], float]  # seconds left
Save = Callable[[], None]


@dataclass(frozen=True)
class Variant:
    implementation: str
    layout: str
    splits: int | None = None

    @property
    def name(self) -> str:
        return f"{self.implementation} {self.layout}" + (f", splits={self.splits}" if self.splits else "")


BOTH = [Variant(side, layout) for side in (STOCK, OURS) for layout in cases.LAYOUTS]
VARIANTS = [
    *BOTH,
    Variant(PATCH_CONV, "NCHW", 4),  # its default; it wants NCHW, and splits from 2^30 input elements on
    Variant(OURS, "NCHW", 4),
    Variant(OURS, "channels_last", 4),
    Variant(OURS, "channels_last", 16),
]


def work(size: str) -> Iterator[tuple[Case, str, list[Variant]]]:
    """(case, pass, variants), the most important first. Gradients where a roofline is known."""
    for case in GPU[size]:
        yield case, "fprop", VARIANTS
        if case in ROOFLINE[:3] or size == "tiny":
            yield case, "dgrad", BOTH
            yield case, "wgrad", BOTH


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def guarded(measured: Callable[[], dict[str, Any]], device: str, tidy: bool = True) -> dict[str, Any]:
    """What `measured` returns, or {"error": ...}: out of memory and refusals must not end a run. Memory that is cached
    is given back, unless all went well and `tidy` is False: it takes tens of milliseconds."""
    result: dict[str, Any]
    try:
        result = measured()
    except torch.OutOfMemoryError:
        result = {"error": "OOM"}
    except RuntimeError as error:
        if "CUDA error" in str(error):
            raise  # the device's state is lost: this process can measure nothing more
        result = {"error": first_line(error)}
    if not tidy and "error" not in result:
        return result
    # Only now are the frames that held tensors gone.
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return result


Item = TypeVar("Item")


def in_time(items: Iterable[Item], left: Deadline, missing: list[str], name: Callable[[Item], str]) -> Iterator[Item]:
    """The items that there is time for; the names of the others are added to `missing`."""
    for item in items:
        if left() > 0:
            yield item
        else:
            missing.append(name(item))


def bind(case: Case, variant: Variant, pass_: str, device: str) -> Callable[[], Any]:
    laid = case.with_(layout=variant.layout)
    module = laid.module(variant.implementation, variant.splits, device)
    return cases.prepare(laid, module, pass_, device)


def row_of(case: Case, pass_: str, variant: Variant, limits: dict[str, float]) -> dict[str, Any]:
    floor = max(case.flop / (limits["bf16_tflop_s"] * 1e12), case.bytes / (limits["copy_gb_s"] * 1e9))
    return (
        case.facts()
        | vars(variant)
        | {"name": case.name, "pass": pass_, "variant": variant.name, "floor_bytes": case.bytes}
        | {"floor_ms": round(floor * 1e3, 4)}
    )


def path_taken(implementation: str) -> dict[str, Any]:
    if implementation != OURS:
        return {}
    import patchconv_native as pc

    path = pc.last_path()
    return {"path": path["path"], "tiles": path["count"]}


def _peaks(case: Case, variant: Variant, pass_: str, device: str) -> dict[str, Any]:
    call = bind(case, variant, pass_, device)
    first, later = measure.peak_of(call, device), measure.peak_of(call, device)
    found = {"workspace": later.workspace, "first_workspace": first.workspace, "result": later.result}
    return found | path_taken(variant.implementation)


def memory(size: str, device: str, limits: dict[str, float], rows: list[Any], save: Save, left: Deadline) -> list[str]:
    """Fills `rows` with peaks; returns the names of what there was no time for."""
    missing: list[str] = []
    for case, pass_, variants in in_time(work(size), left, missing, lambda one: f"memory of {one[0].name} {one[1]}"):
        for variant in variants:
            row = row_of(case, pass_, variant, limits)
            row |= _measured(variant, partial(_peaks, case, variant, pass_, device), device)
            rows.append(row)
            outcome = (
                row.get("error")
                or f"{row['workspace'] / measure.MIB:.0f} MiB ({row['first_workspace'] / measure.MIB:.0f})"
            )
            print(f"memory {case.name:<40} {pass_:<6} {variant.name:<28} {outcome}", flush=True)
        save()
    return missing


def _measured(variant: Variant, measured: Callable[[], dict[str, Any]], device: str) -> dict[str, Any]:
    if variant.implementation == PATCH_CONV and measure.installed("patch_conv") is None:
        return {"error": "not installed"}
    return guarded(measured, device)


class Timer:
    """Milliseconds of calls, each behind a flushed cache."""

    def __init__(self, device: str) -> None:
        self._device = device
        size = 1 << 20
        if device == "cuda":
            size = max(256 << 20, 4 * torch.cuda.get_device_properties(0).L2_cache_size)
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def __call__(self, call: Callable[[], Any], budget: float, least: int = 5, most: int = 40) -> list[float]:
        for _ in range(3):
            call()  # the first ones choose algorithms
        if self._device == "cuda":
            torch.cuda.synchronize()
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < least or (len(times) < most and time.perf_counter() - start < budget):
            times.append(self.once(call))
        return times

    def once(self, call: Callable[[], Any]) -> float:
        """Of one call."""
        self._flush.zero_()
        if self._device != "cuda":
            return measure.seconds_of(call) * 1e3
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = call()
        end.record()
        del result
        end.synchronize()
        return begin.elapsed_time(end)


def _visit(
    case: Case, variant: Variant, pass_: str, device: str, timer: Timer, budget: float, taken: list[float]
) -> dict[str, Any]:
    """Times one variant for `budget` seconds and adds the milliseconds to `taken`."""
    taken += timer(bind(case, variant, pass_, device), budget)
    return path_taken(variant.implementation)


def speed(size: str, device: str, limits: dict[str, float], rows: list[Any], save: Save, left: Deadline) -> list[str]:
    """Fills `rows` with times; returns the names of what there was no time for."""
    missing: list[str] = []
    timer = Timer(device)
    budget = 0.3 if size == "full" else 0.01
    for case, pass_, variants in in_time(work(size), left, missing, lambda one: f"time of {one[0].name} {one[1]}"):
        found: dict[str, dict[str, Any]] = {v.name: row_of(case, pass_, v, limits) for v in variants}
        samples: dict[str, list[float]] = {v.name: [] for v in variants}
        for _ in range(2):
            for variant in variants:
                if "error" in found[variant.name]:
                    continue
                visit = partial(_visit, case, variant, pass_, device, timer, budget, samples[variant.name])
                found[variant.name] |= _measured(variant, visit, device)
        for variant in variants:
            row, taken = found[variant.name], samples[variant.name]
            if "error" not in row:
                row |= {"ms": Spread.of(taken).facts(), "calls": len(taken)}
                row["tflop_s"] = round(case.flop / statistics.median(taken) / 1e9, 1)
            rows.append(row)
            outcome = (
                row.get("error")
                or f"{row['ms']['median']:.3f} ms, {row['tflop_s']} TFLOP/s (floor {row['floor_ms']:.3f})"
            )
            print(f"time {case.name:<40} {pass_:<6} {variant.name:<28} {outcome}", flush=True)
        save()
    return missing


def device_limits(device: str) -> dict[str, float]:
    """What the device reaches at best here: a copy (read and write counted) and a bfloat16 matrix product."""
    timer = Timer(device)
    side, count = (8192, 1 << 30) if device == "cuda" else (256, 1 << 22)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = statistics.median(timer(lambda: target.copy_(source), 0.3))
    a = torch.randn(side, side, device=device).bfloat16()
    product = statistics.median(timer(lambda: a @ a, 0.3))
    return {
        "copy_gb_s": 2 * count / copy / 1e6,
        "bf16_tflop_s": 2 * side**3 / product / 1e9,
    }
