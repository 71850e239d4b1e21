"""The memory log of a ResNet-18 and what makes its peak smaller, after a well-known article, end to end.

The article logs the memory of a training step (batch 128, 224x224) on a GPU, and takes a peak to 0.2 of what it was by
checkpoints in 3 chunks and mixed precision. Here: the same forms, this package's beside them (all together with
micro-batches and without), and what its planner finds: the least without tiles, and, in mixed precision, a plan for the
article's 0.2. Predicted at the article's size with fake tensors, and measured on the CPU and on a GPU where there is
one, each form in a process of its own, with the prediction of the same step beside it. `--log FILE` writes the log of
one form, a row for every stay in a module, as CSV, and measures nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory import MemoryReport, views
from patchconv_native.planner import Strategy

from . import measure, report, tables
from .measure import MIB

# Blocks a stage, batch and side that are predicted, batch that is measured on the CPU, seconds of timing.
SIZES = {"full": (2, 128, 224, 128, 60.0), "small": (2, 16, 64, 4, 5.0), "tiny": (1, 8, 32, 2, 0.1)}
TARGET = 0.15
ARTICLE = 0.2
CHUNKS = 3
# With micro-batches: the stem, whose layers are then one stage, and the blocks in so many of them (at most one sample
# each); behind the stem so many checkpoints, a stage of the ResNet each but for the last, which is not checkpointed.
STEM = ("conv1", "bn1", "relu", "maxpool")
MICROBATCHES = {"stem": 8, "layer1": 8, "layer2": 4}
SEGMENTS = 5
POINTS = 240  # of a curve that is kept for the figure
HALF = torch.bfloat16
# In place of the planner's search, which takes long at any size.
TRIAL: dict[str, Any] = {
    "any": {"convert": True, "amp": "bfloat16"}, "exact": {"convert": True, "checkpoints": ["layers.layer1_0"]},
    "budget": {"tile": 128 * MIB},
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    checkpoints: Callable[[nn.Sequential, Tensor], Tensor] | None = None
    amp: bool = False
    converted: bool = False
    planned: str = ""
    """Which of the planner's answers: the least with autocast allowed ("any") or without ("exact"), or "budget"."""


def torch_checkpoints(layers: nn.Sequential, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint_sequential(layers, CHUNKS, x, use_reentrant=False)


def pc_checkpoints(layers: nn.Sequential, x: Tensor) -> Tensor:
    return pc.checkpoint_sequential(layers, CHUNKS, x)


def in_microbatches(layers: nn.Sequential, x: Tensor) -> Tensor:
    def stage(name: str, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        chunks = MICROBATCHES.get(name.split("_")[0])
        return layer if chunks is None else lambda x: pc.microbatch(layer, x, min(chunks, len(x)))

    stem, *others = (stage(name, layer) for name, layer in layers.named_children())
    return pc.checkpoint_sequential(others, SEGMENTS, stem(x))


FORMS = {
    "baseline": Form(),
    "checkpoints, torch": Form(torch_checkpoints),
    "checkpoints, ours": Form(pc_checkpoints),
    "mixed": Form(amp=True),
    "checkpoints, torch + mixed": Form(torch_checkpoints, amp=True),
    "checkpoints, ours + mixed": Form(pc_checkpoints, amp=True),
    "converted": Form(converted=True),
    "converted + mixed": Form(amp=True, converted=True),
    "all but micro-batches": Form(pc_checkpoints, amp=True, converted=True),
    "all": Form(in_microbatches, amp=True, converted=True),
    "planned, exact": Form(planned="exact"),
    "planned": Form(planned="any"),
    "planned, in a budget": Form(amp=True, planned="budget"),
}


class Chain(nn.Module):
    """A ResNet with two convolutions a block as a chain of layers, blocks as units, run as a form says."""

    def __init__(self, blocks: int, run: Callable[[nn.Sequential, Tensor], Tensor] | None) -> None:
        from torchvision.models.resnet import BasicBlock, ResNet

        super().__init__()
        net = ResNet(BasicBlock, [blocks] * 4)
        self.layers = nn.Sequential()
        for name, layer in net.named_children():
            if isinstance(layer, nn.Sequential):
                for number, block in enumerate(layer):
                    self.layers.add_module(f"{name}_{number}", block)
            else:
                if name == "fc":
                    self.layers.add_module("flatten", nn.Flatten())
                self.layers.add_module(name, layer)
        if run is in_microbatches:
            stem = nn.Sequential(OrderedDict((name, getattr(self.layers, name)) for name in STEM))
            others = [(name, layer) for name, layer in self.layers.named_children() if name not in STEM]
            self.layers = nn.Sequential(OrderedDict([("stem", stem), *others]))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if self.run is None else self.run(self.layers, x)


def network(form: str, blocks: int, strategy: dict[str, Any] | None = None) -> nn.Module:
    """The model of a form; strategy: the planner's, for the forms that are planned."""
    torch.manual_seed(0)
    model: nn.Module = Chain(blocks, FORMS[form].checkpoints)
    if FORMS[form].converted:
        pc.convert(model)
    if FORMS[form].planned:
        Strategy(**(strategy or {})).apply(model)
    return model


def loss(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device=output.device))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def traced(form: str, model: nn.Module, x: Tensor, fake: bool, device: str) -> MemoryReport:
    amp = HALF if FORMS[form].amp else None
    return pc.memory.trace(model, x, loss=loss, optimizer=sgd, amp=amp, fake=fake, device=device)


def training_step(form: str, model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    model.train()
    optimizer = sgd(model.parameters())

    def call() -> Tensor:
        optimizer.zero_grad()
        amp = torch.autocast(x.device.type, dtype=HALF) if FORMS[form].amp else contextlib.nullcontext()
        with amp:
            value = loss(model(x))
        value.backward()
        optimizer.step()
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        return value.detach()

    return call


def here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def searched(blocks: int, batch: int, side: int, device: str) -> dict[str, Any]:
    """The strategies with the least peak, of all that the planner tries and of those without autocast; and the one for
    the article's share of the baseline's peak, planned for a step under autocast.
    """
    x = torch.empty(batch, 3, side, side, device="meta")
    model = network("baseline", blocks)
    found = pc.plan(model, x, frontier=True, loss=loss, optimizer=sgd, amp=HALF, device=device, tiles=False)
    exact = [one for one in found.tried if not one.strategy.amp]
    budget = int(ARTICLE * found.tried[[one.strategy for one in found.tried].index(Strategy())].peak)
    with torch.autocast(device, HALF):
        try:
            in_budget = pc.plan(model, x, budget=budget, loss=loss, optimizer=sgd, device=device)
        except pc.BudgetError as error:  # small images: the parameters alone take more
            in_budget = error.plan
    return {"budget": in_budget.strategy.to_dict()} | {
        kind: min(tried, key=lambda one: one.peak).strategy.to_dict()
        for kind, tried in (("any", found.tried), ("exact", exact))
    }


def facts(found: MemoryReport) -> dict[str, Any]:
    peak = found.trace.peak
    return {
        "peak": found.peak, "saved": found.saved, "static": found.static,
        "at": {"module": peak.module, "phase": peak.phase, "operator": peak.operator},
        "held": [[one.module, one.operator, one.bytes] for one in peak.held[:5]],
    }  # fmt: skip


def curve(found: MemoryReport) -> str:
    """The report without its modules, and with fewer points of its curve: enough to draw it."""
    data = found.to_dict()
    data["modules"], data["phases"], data["peak"]["held"] = [], [], []
    data["curve"] = views.thinned(found.trace.curve, POINTS)
    return json.dumps(data)


def predicted(form: str, blocks: int, batch: int, side: int, strategy: dict[str, Any] | None) -> dict[str, Any]:
    x = torch.empty(batch, 3, side, side, device="meta")
    found = traced(form, network(form, blocks, strategy), x, True, here())
    return facts(found) | {"log": curve(found)}


def measured(
    form: str, blocks: int, batch: int, side: int, strategy: dict[str, Any] | None, device: str, heap: bool = False
) -> dict[str, Any]:
    """Of the second step: what the first one sets up once is there. Resident: what the process needed for a step that
    nobody watches; heap: with holes in the C library's heap, which is otherwise kept to small blocks.
    """
    if not heap:
        ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: larger blocks go back to the system at once
    x = torch.randn(batch, 3, side, side, device=device)
    model = network(form, blocks, strategy).to(device)
    traced(form, model, x, False, device)
    found = traced(form, model, x, False, device)
    row = facts(found) | {"above": found.transient, "predicted": traced(form, model, x, True, device).peak}
    step = training_step(form, model, x)
    step()
    model.zero_grad()
    return row | {"resident": measure.peak_of(step, device).above}


def times(blocks: int, batch: int, side: int, strategies: dict[str, Any], seconds: float, device: str) -> Any:
    x = torch.randn(batch, 3, side, side, device=device)
    calls = {}
    for form, how in FORMS.items():
        calls[form] = training_step(form, network(form, blocks, strategies.get(how.planned)).to(device), x)
    return measure.paired(calls, seconds).facts("baseline")


def measure_all(size: str) -> dict[str, Any]:
    blocks, batch, side, small, seconds = SIZES[size]
    data = measure.report_head("article", size, here()) | {
        "blocks": blocks, "batch": batch, "side": side, "small": small, "device": here(),
        "target": TARGET, "article": ARTICLE, "chunks": CHUNKS,
        "microbatches": MICROBATCHES, "stem": STEM, "segments": SEGMENTS, "rows": [], "measured": [],
    }  # fmt: skip

    def run(target: str, **arguments: Any) -> dict[str, Any]:
        if size == "tiny":  # a trial has no time for processes
            return json.loads(json.dumps(globals()[target](**arguments)))
        return measure.in_fresh_process(f"bench.article:{target}", 3600, **arguments)

    shape: dict[str, Any] = {"blocks": blocks, "batch": batch, "side": side}
    strategies = TRIAL if size == "tiny" else run("searched", **shape, device=here())
    data["strategies"] = {kind: str(Strategy(**how)) for kind, how in strategies.items()}
    for form, how in FORMS.items():
        row = {"form": form, **predicted(form, **shape, strategy=strategies.get(how.planned))}
        row["ratio"] = row["peak"] / (data["rows"] or [row])[0]["peak"]
        row["met"] = row["ratio"] <= TARGET
        data["rows"].append(row)
        print(
            f"{form:<28} predicted, batch {batch}: {row['peak'] / MIB:6.0f} MiB, {row['ratio']:.3f} of the baseline "
            f"(target {TARGET}: {tables.verdict(row['met'])})",
            flush=True,
        )
    devices = {"cpu": small} | ({"cuda": batch} if here() == "cuda" else {})
    for device, many in devices.items():
        shape["batch"] = many
        same = size == "tiny" or (many, device) == (batch, here())
        found = strategies if same else run("searched", **shape, device=device)
        data["strategies"] |= {f"{kind}, {device}": str(Strategy(**how)) for kind, how in found.items()}
        data["load_timing"] = round(os.getloadavg()[0], 2)
        timed = run("times", **shape, strategies=found, seconds=seconds, device=device)
        rows: list[dict[str, Any]] = []
        for form, how in FORMS.items():
            row = {"form": form, "device": device, "batch": many}
            row |= run("measured", form=form, **shape, strategy=found.get(how.planned), device=device)
            row["ratio"] = row["peak"] / (rows or [row])[0]["peak"]
            row["of_prediction"] = row["predicted"] / row["peak"]
            row |= {"ms": timed["ms"][form], "time": timed["ratio"].get(form), "rounds": timed["rounds"]}
            rows.append(row)
            print(
                f"{form:<28} measured, {device}, batch {many}: {row['peak'] / MIB:6.0f} MiB, {row['ratio']:.3f} of the "
                f"baseline, prediction {row['of_prediction']:.3f} of it, step {row['ms']['median']:6.0f} ms",
                flush=True,
            )
        data["measured"] += rows
    shape["batch"] = small
    data["heap"] = run("measured", form="baseline", **shape, strategy=None, device="cpu", heap=True)["resident"]
    return data


def write_log(path: Path, form: str, size: str) -> None:
    blocks, batch, side, *_ = SIZES[size]
    x = torch.empty(batch, 3, side, side, device="meta")
    how = searched(blocks, batch, side, here())[FORMS[form].planned] if FORMS[form].planned else None
    traced(form, network(form, blocks, how), x, True, here()).to_csv(path)


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__)
    parser.add_argument("--log", type=Path, metavar="FILE", help="write the memory log of --form as CSV, nothing else")
    parser.add_argument("--form", choices=FORMS, default="baseline", help="of --log (default: baseline)")
    arguments = parser.parse_args(argv)
    if arguments.log is not None:
        write_log(arguments.log, arguments.form, arguments.size)
        return 0
    report.store(measure_all(arguments.size), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
