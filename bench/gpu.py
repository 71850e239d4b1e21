"""The one command for a machine with a GPU: `python -m bench.gpu` (what `make gpu` runs), under 10 minutes.

Parts, each in a process of its own, so that none can end the others:
  tests      the tests that are marked cuda
  large      those of them with more than 2^31 elements
  sanitizer  compute-sanitizer over a few small ones, where the tool is on PATH: memcheck, racecheck of our kernels
  masks, norms, pools, dropout
             times of the memory-bound kernels beside stock's and a plain copy (bench.gpu_kernels)
  convs      convolutions with bias and ReLU, and gradients, beside every rival: time, memory, error (bench.conv_gpu)
  networks   whole networks by tiles beside stock's call: peak, time, error (bench.gpu_tile)
  steps      training steps of whole models, converted beside stock: peak, prediction, time (bench.gpu_steps)
  memory     peaks of stock, patch_conv and ours on the published shapes (bench.gpu_measure)
  speed      times of the same
`--only PART` runs one of them and keeps the others' earlier results. Results are written as they come, to
bench/results/<device name>.json and .md. What there was no time for is named in the file. Without a GPU: one
line, exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import conv_gpu, gpu_kernels, gpu_measure, gpu_steps, gpu_tile, measure, report, report_gpu

NO_GPU = "bench.gpu: torch sees no CUDA device here; the benchmarks for the CPU are `python -m bench`"
GRACE = 20.0  # a part that has not ended this long after its time is ended


class Run:
    """The results file of one device, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.size = arguments.device, arguments.size
        self.out = measure.folder(arguments)
        self._end = time.perf_counter() + arguments.budget
        name = torch.cuda.get_device_name(0) if self.device == "cuda" else "cpu"
        self.name = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
        self.path = self.out / f"{self.name}.json"
        self.data = measure.report_head("gpu", self.size, self.device)
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            if kept["hardware"] == self.data["hardware"]:
                self.data = kept | self.data

    def left(self) -> float:
        return self._end - time.perf_counter()

    def save(self) -> None:
        measure.write_results(self.data, self.out, self.name)

    def missing(self, part: str, names: list[str]) -> None:
        earlier = [name for name in self.data.get("missing", []) if not name.startswith(part)]
        self.data["missing"] = earlier + names


PYTEST = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider"]
TESTS = {"tests": "cuda and not large", "large": "cuda and large"}  # marks


def tests(part: str, run: Run) -> None:
    """Tests of the suite whose device is a GPU; on the CPU a few others, to try this."""
    command = [*PYTEST, "-m", TESTS[part]] if run.device == "cuda" else [*PYTEST, "tests/build", "-k", "listed"]
    if part == "tests" and measure.installed("pytest-xdist"):
        command += ["-n", str(min(14, os.cpu_count() or 1)), "--dist", "worksteal"]
    seconds = run.left()
    output, code = _finished(command, seconds, os.environ | {"OMP_NUM_THREADS": "2"})
    lines = output.splitlines() or ["no output"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    summary = lines[-1].strip("= ")
    if code is None:
        reached = re.findall(r"\[ *(\d+)%\]", output)
        summary = f"not finished in {seconds:.0f} s, reached {reached[-1] if reached else 0} %"
    run.data[part] = {"passed": code == 0, "summary": summary, "failed": failed[:40]}
    print("\n".join([*failed, f"{part}: {summary}"]), flush=True)


# compute-sanitizer's tools, their options, and the share of the time left that each may take. A race can only be in
# shared memory, and only in our own kernels is it ours to find.
SANITIZERS: dict[str, tuple[list[str], float]] = {
    "memcheck": ([], 0.65),
    "racecheck": (["--kernel-name", "kns=patchconv"], 1.0),
}
FEW = ["tests/cuda", "-m", "cuda and not large", "-k", "test_native and (test_dropout or (bfloat16 and noise))"]


def sanitizer(run: Run) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None or run.device != "cuda":
        run.data["sanitizer"] = {"summary": "not run: compute-sanitizer is not on PATH"}
        print(f"sanitizer: {run.data['sanitizer']['summary']}", flush=True)
        return
    # Without the caching allocator every tensor is an allocation of its own, whose bounds are then known.
    settings = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found: dict[str, dict[str, Any]] = {}
    for name, (options, share) in SANITIZERS.items():
        command = [tool, "--tool", name, *options, "--error-exitcode", "99", *PYTEST, *FEW]
        output, code = _finished(command, share * run.left(), settings)
        summary = next((line for line in output.splitlines() if "SUMMARY" in line), "no summary").strip("= ")
        if code is None:
            summary = "not finished in time"
        found[name] = {"summary": summary, "exit": code, "output": output[-4000:] if code else ""}
        print(f"sanitizer: {name}: {summary}", flush=True)
    run.data["sanitizer"] = found | {
        "summary": "; ".join(f"{name}: {one['summary']}" for name, one in found.items()),
        "exit": next((one["exit"] for one in found.values() if one["exit"] != 0), 0),
    }


def kernels(section: str, run: Run) -> None:
    rows: list[Any] = []
    run.data.setdefault("kernels", {})[section] = rows
    missing = gpu_kernels.measure_section(section, run.size, run.device, rows, run.save, run.left)
    run.missing(f"{section}:", missing)
    print(report_gpu.kernel_targets(rows), report_gpu.allocations(rows), sep="\n", flush=True)


def convs(run: Run) -> None:
    data = run.data["convs"] = {}
    run.missing("convs:", conv_gpu.measure_section(run.size, run.device, data, run.save, run.left))
    print(report_gpu.conv_targets(data["rows"]), flush=True)


def networks(run: Run) -> None:
    data = run.data["networks"] = {}
    run.missing("networks:", gpu_tile.measure_section(run.size, run.device, data, run.save, run.left))


def steps(run: Run) -> None:
    rows: list[Any] = []
    run.data["steps"] = rows
    run.missing("steps:", gpu_steps.measure_section(run.size, run.device, rows, run.save, run.left))


def cases(part: str, run: Run) -> None:
    torch.backends.cudnn.benchmark = True
    run.data["limits"] = limits = gpu_measure.device_limits(run.device)
    print(f"device: copy {limits['copy_gb_s']:.0f} GB/s, bf16 {limits['bf16_tflop_s']:.1f} TFLOP/s", flush=True)
    rows: list[Any] = []
    run.data[part] = rows
    work = gpu_measure.memory if part == "memory" else gpu_measure.speed
    missing = work(run.size, run.device, limits, rows, run.save, run.left)
    run.missing({"memory": "memory of", "speed": "time of"}[part], missing)


# What there is to do, and seconds of the total that it may take; what one leaves, the last gets.
PARTS: dict[str, tuple[Callable[[Run], None], float]] = {
    "tests": (partial(tests, "tests"), 150.0),
    "large": (partial(tests, "large"), 20.0),
    "sanitizer": (sanitizer, 48.0),
    "masks": (partial(kernels, "masks"), 18.0),
    "norms": (partial(kernels, "norms"), 30.0),
    "pools": (partial(kernels, "pools"), 26.0),
    "dropout": (partial(kernels, "dropout"), 11.0),
    "convs": (convs, 70.0),
    "networks": (networks, 60.0),
    "steps": (steps, 60.0),
    "memory": (partial(cases, "memory"), 40.0),
    "speed": (partial(cases, "speed"), 50.0),
}
TOTAL = sum(seconds for _, seconds in PARTS.values())


def _finished(command: list[str], seconds: float, environment: Any = None) -> tuple[str, int | None]:
    """Output and exit code of a command; None for the code if it had to be ended."""
    try:
        done = subprocess.run(
            command, cwd=measure.ROOT, env=environment, text=True, timeout=max(1.0, seconds),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        return output if isinstance(output, str) else output.decode(errors="replace"), None


def run_all(arguments: argparse.Namespace) -> int:
    """Every part in a process of its own, within the budget."""
    run = Run(arguments)
    run.path.unlink(missing_ok=True)  # of an earlier run: parts of two runs are not mixed
    failed = []
    for part, (_, share) in PARTS.items():
        share *= arguments.budget / TOTAL
        seconds = run.left() if part == "speed" else min(share, run.left())
        if seconds <= 1:
            failed.append(part)
            continue
        print(f"== {part}, at most {seconds:.0f} s", flush=True)
        command = [sys.executable, "-m", "bench.gpu", "--only", part, "--budget", f"{seconds:.1f}"]
        command += ["--device", run.device, "--size", run.size, "--out", str(run.out.resolve())]
        try:
            if subprocess.run(command, cwd=measure.ROOT, timeout=seconds + GRACE).returncode != 0:
                failed.append(part)
        except subprocess.TimeoutExpired:
            print(f"{part}: ended, it did not stop by itself", flush=True)
            failed.append(part)
    if run.path.exists():
        print(*report.render(run.path))
    if failed:
        print(f"not complete: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__, sizes=("full", "tiny"))
    parser.add_argument("--only", choices=list(PARTS), help="one part; the other parts' results stay")
    parser.add_argument("--budget", type=float, help="seconds (default: 583 for all parts)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    if arguments.budget is None:
        arguments.budget = PARTS[arguments.only][1] if arguments.only else TOTAL
    if arguments.only is None:
        return run_all(arguments)
    run = Run(arguments)
    PARTS[arguments.only][0](run)
    run.save()
    report.render(run.path)
    bad = arguments.only in TESTS and not run.data[arguments.only]["passed"]
    bad |= arguments.only == "sanitizer" and run.data["sanitizer"].get("exit", 0) != 0
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
