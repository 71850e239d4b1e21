"""Checkpoints in training: DenseNet-BC, whose bottlenecks are what efficient_densenet checkpoints.

DenseNet-BC-100 with growth rate 12 on 32x32 pictures. Five forms: naive; torch.utils.checkpoint around each bottleneck
(concatenation, norm, ReLU, 1x1 convolution); pc.checkpoint there; naive code after pc.convert, which
is lean() with no checkpoint; and both. Peak of memory of a whole training step, each in a process of its own, and time
of one, in turn; the same on two processes under DistributedDataParallel (gloo), half of the batch each. And how far
running statistics are, after one step, from those of a naive step in float64.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import patchconv_native as pc

from . import measure, report
from .launch import launch
from .measure import MIB
from .resnet import training_step
from .xray_model import DenseBlock, Run, plain

# Layers, batch and side of the pictures, seconds of timing, rounds under DDP.
SIZES = {"full": (100, 32, 32, 40.0, 3), "small": (40, 16, 32, 5.0, 2), "tiny": (10, 4, 8, 0.1, 1)}
GROWTH, RANKS = 12, 2


def torch_checkpoint(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)


# Form: how bottlenecks are run, and whether the model is converted.
FORMS: dict[str, tuple[Run, bool]] = {
    "naive": (plain, False),
    "torch": (torch_checkpoint, False),
    "ours": (pc.checkpoint, False),
    "lean": (plain, True),
    "ours + lean": (pc.checkpoint, True),
}


def network(form: str, depth: int) -> nn.Module:
    """Three dense blocks, with transitions that halve channels and sides; ten classes."""
    torch.manual_seed(0)
    run, converted = FORMS[form]
    channels = 2 * GROWTH
    model = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False))
    for block in range(3):
        model.append(DenseBlock(channels, (depth - 4) // 6, GROWTH, run))
        channels += (depth - 4) // 6 * GROWTH
        model.extend([nn.BatchNorm2d(channels), nn.ReLU()])
        if block < 2:
            model.extend([nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)])
            channels //= 2
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)])
    return pc.convert(model) if converted else model


def pictures(batch: int, side: int, rank: int = 0) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(rank))


def peak(form: str, depth: int, batch: int, side: int) -> dict[str, int]:
    """The peak of the second step: what the first one sets up once is there."""
    step = training_step(network(form, depth), pictures(batch, side))
    step()
    return {"peak": measure.peak_of(step).above}


def times(depth: int, batch: int, side: int, seconds: float) -> dict[str, Any]:
    x = pictures(batch, side)
    calls = {form: training_step(network(form, depth), x) for form in FORMS}
    return measure.paired(calls, seconds).facts("naive")


def errors(form: str, depth: int, batch: int, side: int) -> dict[str, Any]:
    """Distance of the bottlenecks' running statistics from float64's, in units of how far these moved; and whether
    gradients are the naive model's to the bit.
    """
    model, naive, exact = network(form, depth), network("naive", depth), network("naive", depth).double()
    x = pictures(batch, side)
    for net, input in ((model, x), (naive, x), (exact, x.double())):
        net.train()
        F.cross_entropy(net(input), torch.zeros(batch, dtype=torch.long)).backward()

    def moved(net: nn.Module, name: str) -> Tensor:
        start = 1.0 if name == "running_var" else 0.0
        return torch.cat([b.double() - start for n, b in net.named_buffers() if n.endswith(f"norm1.{name}")])

    found: dict[str, Any] = {
        name: ((moved(model, name) - moved(exact, name)).norm() / moved(exact, name).norm()).item()
        for name in ("running_mean", "running_var")
    }
    counts = [b for name, b in model.named_buffers() if name.endswith("norm1.num_batches_tracked")]
    found["batches"] = sorted({int(count) for count in counts})
    pairs = zip(model.parameters(), naive.parameters(), strict=True)
    found["same_bits"] = all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None)
    return found


def all_errors(**shape: int) -> dict[str, Any]:
    return {form: errors(form, **shape) for form in FORMS}


def in_ddp(jobs: list[dict[str, Any]]) -> list[Any]:
    """On one rank: the peak of a form's step, or the seconds of all forms' steps, for each job."""
    torch.set_num_threads(1)
    found: list[Any] = []
    for job in jobs:
        x = pictures(job["batch"] // RANKS, job["side"], dist.get_rank())
        steps = {}
        for form in FORMS if job["what"] == "times" else [job["what"]]:
            steps[form] = training_step(nn.parallel.DistributedDataParallel(network(form, job["depth"])), x)
            steps[form]()
        if job["what"] != "times":
            dist.barrier()
            found.append(measure.peak_of(steps[job["what"]]).above)
            continue
        found.append({form: [] for form in FORMS})
        for _ in range(job["rounds"]):
            for form, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                found[-1][form].append(time.perf_counter() - start)
    return found


def under_ddp(what: str, **arguments: int) -> list[Any]:
    """What each rank found, in new processes."""
    return [found[0] for found in launch([{"what": what} | arguments], RANKS, 300.0, "bench.checkpointing:in_ddp")]


def measure_all(size: str) -> dict[str, Any]:
    depth, batch, side, seconds, rounds = SIZES[size]
    data = measure.report_head("checkpointing", size) | {"depth": depth, "batch": batch, "side": side, "rows": []}
    shape = {"depth": depth, "batch": batch, "side": side}

    def run(target: str, **arguments: Any) -> dict[str, Any]:
        return measure.in_fresh_process(f"bench.checkpointing:{target}", 600, **arguments)

    wrong = run("all_errors", **shape | {"batch": min(batch, 8)})
    timed = run("times", **shape, seconds=seconds)
    ddp = under_ddp("times", **shape, rounds=rounds)
    # A step is over when both ranks are.
    both = {form: [max(pair) for pair in zip(*(rank[form] for rank in ddp), strict=True)] for form in FORMS}
    in_turn = measure.Paired(both).facts("naive")
    for form in FORMS:
        row: dict[str, Any] = {"form": form, "peak": run("peak", form=form, **shape)["peak"]}
        row |= {"ms": timed["ms"][form], "ratio": timed["ratio"].get(form), "rounds": timed["rounds"]}
        row["errors"] = wrong[form]
        row["ddp"] = {
            "peaks": under_ddp(form, **shape),
            "ms": in_turn["ms"][form], "ratio": in_turn["ratio"].get(form), "rounds": rounds,
        }  # fmt: skip
        data["rows"].append(row)
        print(
            f"{form:<12} peak {row['peak'] / MIB:7.0f} MiB, step {row['ms']['median']:7.0f} ms; two ranks: peak "
            f"{statistics.mean(row['ddp']['peaks']) / MIB:7.0f} MiB, step {row['ddp']['ms']['median']:7.0f} ms; "
            f"running_var off by {row['errors']['running_var']:.1e}",
            flush=True,
        )
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
