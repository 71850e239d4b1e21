"""Stock's time against ours in float16 and bfloat16 on the CPU.

Where the processor has no instructions for them, stock computes a half-precision convolution through a column
buffer and matrix products of its own, element by element. Our tiles are turned to float32, computed by oneDNN and
turned back. From how much work on that pays is the constant kManyProducts in csrc/cpu/conv.cpp (kLargeMatrix for
weight gradients), derived from this script's results. A row says whether the processor multiplies the dtype;
where it does, both sides make the same call. Kernel 3x3, padding 1; forward, gradient of the input, of the weight.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import patchconv_native as pc

from . import measure, report

PASSES = ("fprop", "dgrad", "wgrad")
SECONDS = {"full": 1.0, "small": 0.3, "tiny": 0.0}
SUPPORTED = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}


@dataclass(frozen=True)
class Cell:
    channels: int
    outputs: int
    side: int
    batch: int = 1
    groups: int = 1

    @property
    def name(self) -> str:
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{self.batch}x{self.channels}->{self.outputs} {self.side}x{self.side}{groups}"


CELLS = {
    "full": [
        Cell(8, 8, 8), Cell(64, 64, 8), Cell(1, 8, 64), Cell(16, 16, 32), Cell(32, 32, 32), Cell(32, 32, 56, groups=32),
        Cell(64, 64, 56), Cell(64, 64, 56, batch=8), Cell(16, 16, 128), Cell(3, 64, 224), Cell(64, 64, 128),
    ],
    "small": [Cell(8, 8, 8), Cell(64, 64, 8), Cell(16, 16, 32)],
    "tiny": [Cell(8, 8, 8)],
}  # fmt: skip


def calls(cell: Cell, dtype: torch.dtype, pass_: str) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(cell.batch, cell.channels, cell.side, cell.side).to(dtype)
    w = torch.randn(cell.outputs, cell.channels // cell.groups, 3, 3).to(dtype)
    x.requires_grad_(pass_ == "dgrad")
    w.requires_grad_(pass_ == "wgrad")
    sides: dict[str, Any] = {}
    for side, conv in (("stock", torch.nn.functional.conv2d), ("ours", pc.functional.conv2d)):

        def forward(conv: Any = conv) -> Tensor:
            return conv(x, w, None, 1, 1, 1, cell.groups)

        if pass_ == "fprop":
            sides[side] = forward
            continue
        y = forward()
        grad = torch.randn_like(y)
        sides[side] = lambda y=y, grad=grad: torch.autograd.grad(
            y, x if pass_ == "dgrad" else w, grad, retain_graph=True
        )
    return sides


def measure_all(size: str) -> dict[str, Any]:
    data = measure.report_head("half", size) | {"rows": []}
    for name, query in SUPPORTED.items():
        native = getattr(torch.ops.mkldnn, query)()
        for cell in CELLS[size]:
            for pass_ in PASSES:
                sides = calls(cell, getattr(torch, name), pass_)
                sides["ours"]()
                path = pc.last_path()["path"]
                timed = measure.paired(sides, SECONDS[size], least=1, most=30)
                row = {"name": cell.name, "dtype": name, "native": native, "pass": pass_, "path": path}
                row |= {"rounds": timed.rounds, "stock_over_ours": timed.ratio("stock", "ours").facts()}
                row["ms"] = {side: timed.time(side).median * 1e3 for side in sides}
                data["rows"].append(row)
                print(
                    f"{name:<9} {cell.name:<26} {pass_}  stock {row['ms']['stock']:10.3f} ms  ours "
                    f"{row['ms']['ours']:8.3f} ms ({path})  stock/ours {row['stock_over_ours']['median']:8.2f}",
                    flush=True,
                )
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
