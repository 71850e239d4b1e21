"""Large pictures on several ranks: a DenseNet-169 with several heads on radiographs, trained in every way there is.

`python -m bench.xray --ranks 2 --how all` trains the same network on the same global batches in one process, data
parallel (DDP, with and without batch norm over all ranks; FSDP2), model parallel (two stages of a pipeline), data x
model parallel (4 ranks), with checkpoints, and spatially (each rank a strip of rows of every picture). Loss curves
beside those of one process, peak memory of each rank, time of a step, and the largest picture that fits a budget. It
starts its ranks by itself (gloo, or NCCL where each has a GPU), or is run by torchrun.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import patchconv_native as pc

from . import measure, report, tables, xray_model, xray_ways
from .launch import Found, backend, launch
from .measure import GIB, MIB
from .xray_ways import WAYS, chunked, way_of

# Net, side, global batch, steps, budget of a rank in bytes.
SIZES = {
    "full": ("full", 1024, 4, 6, 8 * GIB),
    "small": ("small", 256, 4, 6, GIB),
    "tiny": ("tiny", 64, 4, 4, 16 * MIB),
}
RATE = 0.01  # small: the larger it is, the more training amplifies rounding (NOTES.md)
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}  # relative, of a loss
STRIDE = 32  # of the network: sides are multiples of it
Runner = Callable[[list[dict[str, Any]]], Found]


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


def needed(job: dict[str, Any]) -> int:
    return math.prod((way_of(job["way"]).mesh(job["ranks"]) or {}).values())


def launcher(timeout: float) -> Runner:
    """In new processes, as many as it takes."""
    return lambda jobs: launch(jobs, max(map(needed, jobs)), timeout, "bench.xray_ways:train_all")


def in_group(jobs: list[dict[str, Any]]) -> Found:
    """In the process group that this process is in; ranks that a way has no use for wait."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, xray_ways.train_all(jobs))
    return every


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def largest_side(rows: dict[int, int], budget: int) -> int:
    """The side at which a rank's peak is the budget, if peaks are a constant and a multiple of the pixels: through the
    peaks measured at two sides. A multiple of the network's stride.
    """
    (less, low), (more, high) = sorted(rows.items())
    a_pixel = (high - low) / (more**2 - less**2)
    constant = high - a_pixel * more**2
    if a_pixel <= 0 or budget <= constant:
        return 0
    return int(((budget - constant) / a_pixel) ** 0.5) // STRIDE * STRIDE


def predicted(job: dict[str, Any], side: int) -> int:
    """The peak of a way that has one process, by fake tensors."""
    dtype = getattr(torch, job["dtype"])
    model: Any = xray_model.network(xray_model.NETS[job["net"]]).to(dtype)
    if way_of(job["way"]).lean:
        pc.convert(model)
    if way_of(job["way"]).checkpoints:
        pc.checkpoint_modules(model, xray_model.DenseLayer)
    x = torch.empty(job["batch"], 1, side, side, dtype=dtype, device="meta")
    findings = torch.zeros(job["batch"], xray_model.FINDINGS)
    found = pc.memory.trace(
        model, x, loss=lambda y: xray_model.loss(y, findings), optimizer=lambda p: xray_ways.sgd(p, job["rate"]),
        fake=True, device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    return found.peak


def wanted(how: list[str], ranks: int) -> tuple[list[str], dict[str, str]]:
    """The ways to run in turn, references among them, and why others are not."""
    chosen = list(WAYS) if how == ["all"] else [name for name in WAYS if name in how or name == "one"]
    left = {}
    for name in list(chosen):
        if WAYS[name].mesh(ranks) is None:
            left[name] = f"needs {2 * len(WAYS[name].axes)} ranks"
    chosen = [name for name in chosen if name not in left]
    references = sorted({WAYS[name].chunks(ranks) for name in chosen} - {1})
    return ["one", *(chunked(n) for n in references), *(name for name in chosen if name != "one")], left


def off(losses: list[float], reference: list[float]) -> float:
    """The largest distance of a loss from the reference's, in units of that."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['way']:<15} {row['ranks']} ranks: peaks {', '.join(f'{peak / MIB:.0f}' for peak in row['peaks'])} MiB, "
        f"step {row['seconds']['median']:.2f} s, loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}, off "
        f"{row['reference']} by {row['off']:.1e} ({tables.verdict(row['coincides'])}), largest side {row['largest']}"
    )


def measure_all(arguments: argparse.Namespace, run: Runner, speak: bool) -> dict[str, Any]:
    net, side, batch, steps, budget = SIZES[arguments.size]
    side, batch, steps = arguments.side or side, arguments.batch or batch, arguments.steps or steps
    budget = int(arguments.budget * GIB) if arguments.budget else budget
    shape = {"net": net, "batch": batch, "rate": RATE, "dtype": arguments.dtype, "ranks": arguments.ranks}
    tolerance = TOLERANCE[arguments.dtype]
    names, left = wanted(arguments.how, arguments.ranks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = measure.report_head("xray", arguments.size, device) | shape | {
        "depth": xray_model.NETS[net].depth, "side": side, "steps": steps, "budget": budget, "tolerance": tolerance,
        "backend": backend(), "watched": xray_ways.WATCHED, "sets": xray_ways.SETS, "left_out": left, "rows": [],
    }  # fmt: skip
    half = max(STRIDE, side // 2 // STRIDE * STRIDE)
    runs = [(half, xray_ways.WATCHED), (side, steps)]
    jobs = [{"way": name, "runs": runs, **shape} for name in names]
    for name, reason in left.items():
        if speak:
            print(f"{name:<15} left out: {reason}", flush=True)
    # Each way in processes of its own, if there is time for that.
    shared = arguments.together or arguments.size == "tiny"
    together = itertools.groupby(sorted(jobs, key=needed), needed if shared else id)
    rows: dict[str, dict[str, Any]] = {}
    for _, group in together:
        some = list(group)
        found = run(some)
        for i, job in enumerate(some):
            row = rows[job["way"]] = xray_ways.merged(job, [rank[i] for rank in found])
            row["largest"] = largest_side(dict(row["by_side"]), budget)
            row["reference"] = chunked(row["chunks"])
            row["off"] = off(row["losses"], rows[row["reference"]]["losses"])
            row["off_one"] = off(row["losses"], rows["one"]["losses"])
            row["coincides"] = row["off"] <= tolerance
            row["load"] = round(os.getloadavg()[0], 2)
            if not speak:
                continue
            if not way_of(job["way"]).axes and row["chunks"] == 1:
                row["predicted"] = predicted(job, side)
                row["predicted_largest"] = predicted(job, row["largest"]) if row["largest"] else None
            print(line(row), flush=True)
    data["rows"] = [rows[name] for name in names]
    return data


def parser() -> argparse.ArgumentParser:
    made = measure.parser(__doc__)
    world = int(os.environ.get("WORLD_SIZE", 2))
    made.add_argument("--ranks", type=int, choices=(2, 4), default=world, help="processes (default: 2, or torchrun's)")
    made.add_argument("--how", nargs="+", choices=("all", *WAYS), default=["all"], metavar="NAME",
                      help=f"all (default), or of: {', '.join(WAYS)}")  # fmt: skip
    made.add_argument("--side", type=int, help="of the pictures, in place of the size's")
    made.add_argument("--batch", type=int, help="pictures of a global batch")
    made.add_argument("--steps", type=int, help="at least 3: the memory of two is counted, the others are timed")
    made.add_argument("--budget", type=float, metavar="GIB", help="of a rank, for the largest picture")
    made.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    made.add_argument("--together", action="store_true", help="ways of as many ranks share processes (tiny does so)")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds that a rank waits for another")
    return made


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.steps is not None and arguments.steps <= xray_ways.WATCHED:
        parser().error(f"--steps: expected more than {xray_ways.WATCHED}, got {arguments.steps}")
    if "all" in arguments.how:
        arguments.how = ["all"]
    if "RANK" not in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that launch() ends its ranks
        try:
            data = measure_all(arguments, launcher(arguments.timeout), speak=True)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        report.store(data, arguments)
        return 0
    if arguments.ranks != int(os.environ["WORLD_SIZE"]):
        parser().error(f"--ranks: expected torchrun's {os.environ['WORLD_SIZE']}, got {arguments.ranks}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend(), timeout=datetime.timedelta(seconds=arguments.timeout))
    try:
        first = dist.get_rank() == 0
        data = measure_all(arguments, in_group, speak=first)
        if first:
            report.store(data, arguments)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
