"""What saving less costs in time on the CPU: whole training steps, and packed ReLU beside a plain copy.

A step of ResNet-18 and of VGG16-BN on 224x224 pictures (forward, cross entropy, backward, SGD), in both layouts, stock
and converted in turn. Target: at most 1.03 of stock's time. And ReLU on a float32 tensor far larger than the caches:
forward and backward of the packed mask, stock's, and a copy of the tensor, which moves what neither can avoid; new
memory for every result on all sides, or memory that is there (in place). Target: at least 0.9 of the copy's bytes a
second.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F

import patchconv_native as pc

from . import measure, report, resnet
from .cases import LAYOUTS
from .measure import MIB

TARGET, RATE = 1.03, 0.9
RELU = (0, 0.0, 0.0)  # csrc/core/mask.h
STEPS = {"resnet18": 8, "vgg16_bn": 4}  # model: batch
SECONDS = {"full": 45.0, "small": 5.0, "tiny": 0.1}
ELEMENTS = {"full": 64 * MIB, "small": 4 * MIB, "tiny": MIB // 4}


def steps(size: str) -> list[dict[str, Any]]:
    rows = []
    side = 224 if size == "full" else 32
    for name, batch in list(STEPS.items())[: None if size != "tiny" else 1]:
        for layout, format in LAYOUTS.items():
            stock: Any = resnet.model(name).to(memory_format=format)
            sides = {
                "stock": stock,
                "layers": pc.convert(copy.deepcopy(stock), functional=False),
                "convert": pc.convert(copy.deepcopy(stock)),
            }
            x = torch.randn(batch, 3, side, side).to(memory_format=format)
            calls = {form: resnet.training_step(model, x) for form, model in sides.items()}
            timed = measure.paired(calls, SECONDS[size], warm=2, most=60)
            row: dict[str, Any] = {"model": name, "batch": batch, "picture": side, "layout": layout}
            row |= timed.facts("stock")
            row["met"] = {form: row["ratio"][form]["median"] <= TARGET for form in ("layers", "convert")}
            rows.append(row)
            print(name, row["layout"], "step, of stock's:", row["ratio"], flush=True)
    return rows


def relu(size: str) -> list[dict[str, Any]]:
    """Bytes a second of each side, those of the bits included."""
    x = torch.randn(ELEMENTS[size])
    grad = torch.randn_like(x)
    y, bits = torch.ops.patchconv._mask_forward(x, *RELU)
    target, whole = torch.zeros_like(x), 2 * x.nbytes
    passes = {
        "forward": ({
            "copy": lambda: x.clone(),
            "ours": lambda: torch.ops.patchconv._mask_forward(x, *RELU),
            "stock": lambda: F.relu(x),
        }, {"copy": whole, "ours": whole + bits.nbytes, "stock": whole}),
        "forward in place": ({
            "copy": lambda: target.copy_(x),
            "ours": lambda: torch.ops.patchconv._mask_forward_(x, *RELU),
            "stock": lambda: F.relu_(x),
        }, {"copy": whole, "ours": whole + bits.nbytes, "stock": whole}),
        "backward": ({
            "copy": lambda: grad.clone(),
            "ours": lambda: torch.ops.patchconv._mask_backward(grad, bits, 1.0, 0.0),
            "stock": lambda: torch.ops.aten.threshold_backward(grad, y, 0),
        }, {"copy": whole, "ours": whole + bits.nbytes, "stock": 3 * x.nbytes}),
    }  # fmt: skip
    rows = []
    for name, (calls, moved) in passes.items():
        timed = measure.paired(calls, SECONDS[size] / 3, warm=2, most=60)
        row: dict[str, Any] = {"pass": name, "mib": x.nbytes // MIB} | timed.facts("copy")
        row["gb_s"] = {side: round(moved[side] / timed.time(side).median / 1e9, 2) for side in calls}
        row["rate"] = round(moved["ours"] / moved["copy"] / timed.ratio("ours", "copy").median, 3)
        row["met"] = row["rate"] >= RATE
        rows.append(row)
        print("ReLU", name, row["gb_s"], "of the copy's rate:", row["rate"], flush=True)
    return rows


def measure_all(size: str) -> dict[str, Any]:
    head = measure.report_head("lean_speed", size) | {"target": TARGET, "rate": RATE}
    with torch.no_grad():
        masks = relu(size)
    return head | {"relu": masks, "steps": steps(size)}


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
