"""Times, memory and errors of the project's convolution kernels beside their rivals: the section "convs" of bench.gpu.

Forward is a convolution with bias and ReLU by one call of conv2d_fused; its rivals do the same job on the same tensors
in the same layout: stock (convolution, then relu_), cuDNN's own fused call, cuDNN's Python front end, patch_conv.
Gradients are of the convolution alone, beside stock's. Every way is visited twice in turns, each call behind a flushed
level-2 cache; cuDNN's benchmark mode is on and TF32 is allowed for float32. Memory is the peak above input, weight,
bias and result. Errors are the largest distances from float64 at probed places (bench/conv_errors.py), of noise and of
a ramp, ours beside stock's. The floor is an H100's, where the device is one. Without a GPU the same code times what
computes there, which tests it and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import patchconv_native as pc

from . import conv_cases, conv_errors, conv_rivals, measure
from .cases import LAYOUTS, UNIT
from .conv_cases import AT_MOST, AUTO, DTYPES, NATIVE, PASSES, ConvJob, peak_gib, targets
from .conv_rivals import OURS, STOCK, Call
from .gpu_measure import Deadline, Save, Timer, first_line, guarded, in_time
from .measure import GIB, MIB, Spread

SECONDS = {"full": 0.1, "tiny": 0.0}  # of one of the two visits to a way
AHEAD = 12  # jobs: three cases in both types and layouts
PROBES = {
    f"{mark} {layout}{' depthwise' if groups > 1 else ''}": (mark, layout, groups)
    for mark in conv_errors.LARGE for layout in LAYOUTS for groups in (1, 16)
}  # fmt: skip


def who(call: Call, pass_: str) -> dict[str, Any]:
    """What the record of paths says computed this pass."""
    with pc.record_paths() as records:
        call()
    found = [record for record in records if record["pass"] == pass_]
    if not found:
        return {"path": "none recorded"}
    kernels = {"kernel": found[-1]["kernel"]} if "kernel" in found[-1] else {}
    return {"path": found[-1]["path"], "tiles": found[-1]["count"], **kernels}


def one(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def errors(job: ConvJob, pass_: str, device: str, sides: tuple[str, ...] = (NATIVE, STOCK)) -> dict[str, Any]:
    """Largest errors at probed places, by content and side, in units of the largest exact value there."""
    found: dict[str, Any] = {}
    for content in ("noise", "ramp"):
        tensors = x, weight, bias = job.tensors(device, content)
        with torch.no_grad():
            if pass_ == "fprop":
                calls = conv_rivals.forward_calls(job, tensors, device)
                where: list[Any] = conv_errors.places(job.output_size, job.layout)
                exact = conv_errors.forward(job, x, weight, bias, where)
            else:
                grad = job.filled(job.output_size, device, content)
                calls = conv_rivals.gradient_calls(job, pass_, tensors, grad, device)
                if pass_ == "dgrad":
                    where = conv_errors.places(job.input_size, job.layout)
                    exact = conv_errors.input_gradient(job, grad, weight, where)
                else:
                    where = conv_errors.taps(job, 24)
                    exact = conv_errors.weight_gradient(job, x, grad, where)
        size = float(exact.abs().max()) or 1.0
        found[content] = {}
        for side in sides:
            with torch.set_grad_enabled(pass_ != "fprop"):
                got = conv_errors.at(one(calls[side]()()), where)
            found[content][side] = float((got - exact).abs().nan_to_num(float("inf")).max()) / size
    return found


def error_ratio(job: ConvJob, found: dict[str, Any]) -> float:
    """Ours in units of stock's, the worse of the contents. Stock's counts as a sixteenth of a rounding at least."""
    least = UNIT[DTYPES[job.dtype]] / 16
    return max(sides[NATIVE] / max(sides[STOCK], least) for sides in found.values())


def timed_sides(calls: dict[str, Callable[[], Call]], pass_: str, device: str, timer: Timer, seconds: float) -> Any:
    """Every way: milliseconds, memory and path, or what keeps it from running."""
    found: dict[str, dict[str, Any]] = {side: {} for side in calls}
    samples: dict[str, list[float]] = {side: [] for side in calls}
    for turn in range(2):
        for side, make in calls.items():
            if "error" in found[side]:
                continue
            visit = partial(_visit, make, side, pass_, device, timer, seconds, samples[side], turn == 0)
            found[side] |= guarded(visit, device, tidy=False)
    for side, taken in samples.items():
        if "error" not in found[side]:
            found[side] |= {"ms": Spread.of(taken).facts(5), "calls": len(taken)}
    return found


def _visit(make: Callable[[], Call], side: str, pass_: str, device: str, timer: Timer, seconds: float,
           taken: list[float], first: bool) -> dict[str, Any]:  # fmt: skip
    facts: dict[str, Any] = {}
    try:
        call = make()
        call()  # cuDNN tries its algorithms
    except Exception as error:
        if side in OURS or isinstance(error, RuntimeError):
            raise
        # A front end of another version must not end a run.
        raise RuntimeError(f"{type(error).__name__}: {first_line(error)}") from error
    if first:
        facts = {"workspace": measure.peak_of(call, device).workspace}
        if side in OURS:
            facts |= who(call, pass_)
    taken += timer(call, seconds)
    return facts


def _timed(job: ConvJob, pass_: str, device: str, timer: Timer, seconds: float) -> dict[str, Any]:
    with torch.set_grad_enabled(pass_ != "fprop"):
        tensors = job.tensors(device)
        if pass_ == "fprop":
            calls = conv_rivals.forward_calls(job, tensors, device)
        else:
            calls = conv_rivals.gradient_calls(job, pass_, tensors, job.filled(job.output_size, device), device)
        return timed_sides(calls, pass_, device, timer, seconds)


def measured(job: ConvJob, pass_: str, device: str, timer: Timer, seconds: float) -> dict[str, Any]:
    """A row of the results."""
    row: dict[str, Any] = {"sides": _timed(job, pass_, device, timer, seconds), "floor_bytes": job.bytes}
    row["errors"] = guarded(lambda: errors(job, pass_, device), device, tidy=False)
    return row | judged(job, pass_, row, on_h100(device))


def on_h100(device: str) -> bool:
    return device == "cuda" and "H100" in torch.cuda.get_device_name(0)


def judged(job: ConvJob, pass_: str, row: dict[str, Any], h100: bool) -> dict[str, Any]:
    """Ratios and targets of what was measured; a target whose figure is missing is not met."""
    sides, figures = row["sides"], {}
    rivals = {side: found["ms"]["median"] for side, found in sides.items() if side not in OURS and "ms" in found}
    fastest = min(rivals, key=rivals.__getitem__, default=None)
    facts: dict[str, Any] = {"fastest_rival": fastest}
    for side, name in ((NATIVE, "of_rival"), (AUTO, "auto_of_rival")):
        if "ms" in sides[side]:
            taken = sides[side]["ms"]["median"]
            if fastest:
                figures[name] = round(rivals[fastest] / taken, 3)
            sides[side]["tflop_s"] = round(job.flop / taken / 1e9, 1)
            if h100:
                sides[side]["of_roofline"] = round(job.floor_ms / taken, 3)
    if "ms" in sides[NATIVE]:
        most = max(sides[side]["workspace"] for side in OURS if "ms" in sides[side])
        figures |= {"tflop_s": sides[NATIVE]["tflop_s"], "memory_mib": round(most / MIB, 2)}
        figures["peak_gib"] = round(peak_gib(job, sides[NATIVE]["workspace"]), 3)
    if "error" not in row["errors"]:
        figures["error"] = round(error_ratio(job, row["errors"]), 3)
    if h100:
        facts["floor_ms"] = round(job.floor_ms, 4)
    asked = targets(job, pass_)
    met = {}
    for name, bound in asked.items():
        value = figures.get(name)
        met[name] = value is not None and (value <= bound if name in AT_MOST else value >= bound)
    return facts | {"figures": figures, "targets": asked, "met": met}


def probes(size: str, device: str, rows: list[Any], save: Save, left: Deadline) -> list[str]:
    """More than 2^31 and 2^32 elements, at probed places."""
    missing: list[str] = []
    for name, (mark, layout, groups) in in_time(
        PROBES.items(), left, missing, lambda one: f"convs: elements past {one[0]}"
    ):
        side = conv_errors.LARGE[mark] if size == "full" else 24
        found = guarded(partial(_probe, device, layout, side, groups), device)
        rows.append({"name": name, "elements": 16 * side * side} | found)
        outcome = found.get("error") or found["wrong"] or f"error {found['worst']:.3f} of its bound"
        print(f"elements past {name:<28} {outcome}", flush=True)
        save()
    return missing


def _probe(device: str, layout: str, side: int, groups: int) -> dict[str, Any]:
    worst, wrong = conv_errors.probe_large(device, layout, side, groups=groups)
    return {"worst": min(worst, 1e9), "wrong": wrong}


def measure_section(size: str, device: str, data: dict[str, Any], save: Save, left: Deadline) -> list[str]:
    """Fills data["rows"] and data["probes"]; returns the names of what there was no time for. First the most important
    cases with their gradients, then the tensors past 2^31 elements, then all forward passes, then all gradients."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    data |= {"rows": [], "probes": []}
    timer, jobs = Timer(device), list(conv_cases.jobs(size))
    missing: list[str] = []

    def visit(wanted: list[tuple[ConvJob, str]]) -> None:
        for job, pass_ in in_time(wanted, left, missing, lambda one: f"convs: {one[0]} {one[1]}"):
            work = partial(measured, job, pass_, device, timer, SECONDS[size])
            found = guarded(work, device, tidy=job.bytes > GIB)
            row = job.facts() | {"pass": pass_} | found
            data["rows"].append(row)
            print(line_of(job, pass_, row), flush=True)
            save()

    visit([(job, pass_) for job in jobs[:AHEAD] for pass_ in PASSES])
    missing += probes(size, device, data["probes"], save, left)
    visit([(job, pass_) for pass_ in PASSES for job in jobs[AHEAD:]])
    return missing


def line_of(job: ConvJob, pass_: str, row: dict[str, Any]) -> str:
    head = f"{job!s:<52} {pass_:<6}"
    if "error" in row:
        return f"{head} {row['error']}"
    times = [f"{side} {found['ms']['median']:.4f}" for side, found in row["sides"].items() if "ms" in found]
    return f"{head} {', '.join(times)} ms; error {row['figures'].get('error', 'none')} of stock's"
