"""memory.trace and the planner beside what is true: what watching a step costs, how good predictions and plans are.

Overhead: a step that trace watches against the same step unwatched, in turn: its time on the trace's clock, and the
time of the whole call, which also copies what a step changes, collects garbage and makes the report. Predictions: the
peak of a step with fake tensors in units of the measured one, over models, forms and layouts, and over single
convolutions of sizes drawn by lot. Plans: what they promise, peak and time, and what the model then does. On the CPU,
each model in a process of its own.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory import MemoryReport
from patchconv_native.planner import BudgetError

from . import measure, report, resnet, tables
from .cases import LAYOUTS
from .measure import MIB

TARGETS = {"overhead": 0.10, "prediction": 0.05}
WATCHED = {"full": ("resnet18", "densenet121"), "small": ("resnet18",), "tiny": ("squeezenet1_1",)}
BATCHES = {"full": (8, 2), "small": (2,), "tiny": (1,)}
PREDICTED = {
    "full": (
        "resnet18", "resnet50", "vgg11_bn", "densenet121", "mobilenet_v2", "mobilenet_v3_large", "convnext_tiny",
        "mnasnet1_0", "efficientnet_b0", "regnet_y_400mf", "squeezenet1_1", "resnext50_32x4d", "shufflenet_v2_x1_0",
        "swin_t", "alexnet",
    ),
    "small": ("resnet18", "mobilenet_v2"),
    "tiny": ("squeezenet1_1",),
}  # fmt: skip
# Model, and budget in units of the peak that is predicted for it as it is.
PLANNED = {
    "full": (
        ("resnet18", 0.8), ("resnet18", 0.65), ("resnet50", 0.6), ("mobilenet_v2", 0.5), ("densenet121", 0.3),
        ("vgg11_bn", 0.85), ("efficientnet_b0", 0.35), ("convnext_tiny", 0.45),
    ),
    "small": (("resnet18", 0.8),),
    "tiny": (("squeezenet1_1", 0.8), ("squeezenet1_1", 0.01)),
}  # fmt: skip
# What single convolutions are drawn from, and how many are.
CONVS = {
    "ins": (1, 3, 8, 16, 24, 32, 64, 96), "outs": (8, 24, 32, 64, 96), "kernel": (1, 3, 5, 7), "stride": (1, 2),
    "side": (28, 56, 112), "batch": (1, 4), "layout": tuple(LAYOUTS), "input_trained": (False, True),
}  # fmt: skip
DRAWN = {"full": 200, "small": 20, "tiny": 4}
PLANNED_BATCH = {"full": 8, "small": 2, "tiny": 2}
SIDES = {"full": 224, "small": 96, "tiny": 64}
SECONDS = {"full": 8.0, "small": 2.0, "tiny": 0.1}


def network(name: str) -> nn.Module:
    return resnet.model(name).train()


def converted(model: nn.Module, form: str) -> nn.Module:
    return model if form == "stock" else pc.convert(model, functional=form == "convert")


def step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    return loss.detach()


def traced(model: nn.Module, x: Tensor, fake: bool = False) -> MemoryReport:
    return pc.memory.trace(model, x, fake=fake)


def overhead(name: str, batch: int, side: int, seconds: float) -> dict[str, Any]:
    """Rounds of a bare step, and of a traced one by its own clock and by the caller's."""
    model, x = network(name), torch.randn(batch, 3, side, side)
    found: dict[str, list[float]] = {"bare": [], "watched": [], "call": []}

    def bare() -> float:
        model.zero_grad()
        gc.collect()
        taken = measure.seconds_of(lambda: step(model, x))
        model.zero_grad()
        return taken

    bare(), traced(model, x)
    start = time.perf_counter()
    while len(found["bare"]) < 3 or time.perf_counter() - start < seconds:
        found["bare"].append(bare())
        begin = time.perf_counter()
        log = traced(model, x)
        found["call"].append(time.perf_counter() - begin)
        found["watched"].append(log.duration)
    row: dict[str, Any] = {"model": name, "batch": batch, "side": side} | measure.Paired(found).facts("bare")
    row["events"] = len(log.trace.curve)
    row["least"] = min(found["watched"]) / min(found["bare"])
    row["met"] = row["ratio"]["watched"]["median"] <= 1 + TARGETS["overhead"]
    return row


def predictions(name: str, batch: int, side: int) -> dict[str, Any]:
    """Measured and predicted peaks of every form and layout."""
    rows = []
    for form in ("stock", "layers", "convert"):
        for layout, order in LAYOUTS.items():
            model = converted(network(name), form).to(memory_format=order)
            x = torch.randn(batch, 3, side, side).to(memory_format=order)
            real, fake = traced(model, x), traced(model, x, fake=True)
            rows.append(
                {
                    "model": name, "form": form, "layout": layout, "peak": real.peak, "predicted": fake.peak,
                    "above": real.transient, "ratio": fake.peak / real.peak, "same_saved": fake.saved == real.saved,
                    "at": [real.trace.peak.operator, fake.trace.peak.operator],
                }
            )  # fmt: skip
    return {"rows": rows}


def convolutions(count: int) -> dict[str, Any]:
    """Measured and predicted peaks of a step of one convolution."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        drawn: dict[str, Any] = {name: draw.choice(values) for name, values in CONVS.items()}
        ins, outs, kernel, stride, side, batch, layout, input_trained = drawn.values()
        model = nn.Conv2d(ins, outs, kernel, stride, kernel // 2).to(memory_format=LAYOUTS[layout])
        x = torch.randn(batch, ins, side, side).to(memory_format=LAYOUTS[layout]).requires_grad_(input_trained)
        real, fake = traced(model, x), traced(model, x, fake=True)
        rows.append(drawn | {"peak": real.peak, "predicted": fake.peak, "ratio": fake.peak / real.peak})
    return {"rows": rows}


def planned(name: str, share: float, batch: int, side: int, seconds: float) -> dict[str, Any]:
    """What a plan for a share of the model's own peak promises, and what comes of it."""
    model, x = network(name), torch.randn(batch, 3, side, side)
    budget = int(share * traced(model, x, fake=True).peak)
    row: dict[str, Any] = {"model": name, "batch": batch, "share": share, "budget": budget}
    start = time.perf_counter()
    try:
        plan = pc.plan(model, x, budget=budget)
        row["fits"] = True
    except BudgetError as error:
        plan = error.plan
        row["fits"] = False
    row |= {"search": time.perf_counter() - start, "plan": str(plan.strategy), "predicted": plan.peak}
    changed = plan.apply(network(name))
    traced(changed, x)
    row |= {"peak": traced(changed, x).peak, "stock_peak": traced(model, x).peak, "estimated": 1 + plan.extra_time}

    def call(net: nn.Module) -> Tensor:
        net.zero_grad()
        return step(net, x)

    timed = measure.paired({"stock": lambda: call(model), "plan": lambda: call(changed)}, seconds)
    row |= timed.facts("stock")
    row["kept"] = row["peak"] <= budget
    return row


def measure_all(size: str, budget: float) -> dict[str, Any]:
    """Each part begins nothing more when its third of `budget` seconds is over; what is left out is named."""
    side, seconds = SIDES[size], SECONDS[size]

    def run(target: str, **arguments: Any) -> dict[str, Any]:
        if size == "tiny":  # a trial has no time for processes
            return globals()[target](**arguments)
        return measure.in_fresh_process(f"bench.memory_trace:{target}", 600, **arguments)

    data = measure.report_head("memory_trace", size) | {
        "targets": TARGETS, "side": side, "batch": 2, "rows": [], "predictions": [], "plans": [], "missing": [],
        "convolutions": run("convolutions", count=DRAWN[size])["rows"],
    }  # fmt: skip

    def within(what: str, cases: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        start = time.perf_counter()
        for case in cases:
            if time.perf_counter() - start < budget / 3:
                yield case
            else:
                data["missing"].append(f"{what} of {' '.join(map(str, case))}")

    for batch, name in within("overhead", itertools.product(BATCHES[size], WATCHED[size])):
        row = run("overhead", name=name, batch=batch, side=side, seconds=seconds)
        data["rows"].append(row)
        data["load_after"] = round(os.getloadavg()[0], 2)
        print(
            f"{name:<20} batch {batch}: bare {row['ms']['bare']['median']:7.1f} ms, watched "
            f"{row['ratio']['watched']['median']:.3f} of it ({tables.verdict(row['met'])}), the whole call "
            f"{row['ratio']['call']['median']:.2f}",
            flush=True,
        )
    for name, share in within("a plan", PLANNED[size]):
        row = run("planned", name=name, share=share, batch=PLANNED_BATCH[size], side=side, seconds=seconds)
        data["plans"].append(row)
        print(
            f"{name:<20} {share} of its peak: predicted {row['predicted'] / MIB:6.0f} MiB, measured "
            f"{row['peak'] / MIB:6.0f}; time estimated {row['estimated']:.2f}, measured "
            f"{row['ratio']['plan']['median']:.2f}",
            flush=True,
        )
    for (name,) in within("predictions", [(name,) for name in PREDICTED[size]]):
        rows = run("predictions", name=name, batch=2, side=side)["rows"]
        data["predictions"] += rows
        off = [abs(row["ratio"] - 1) for row in rows]
        print(f"{name:<20} predictions off by {statistics.median(off):.2%}, at most {max(off):.2%}", flush=True)
    return data


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__)
    parser.add_argument("--budget", type=float, default=1200.0, help="seconds, about (default: %(default)s)")
    arguments = parser.parse_args(argv)
    data = measure_all(arguments.size, arguments.budget)
    report.store(data, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
