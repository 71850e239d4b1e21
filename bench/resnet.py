"""A whole network, torchvision's ResNet-18 on 224x224 pictures, converted against stock, on the CPU.

Nothing in it is large enough to be split, so this shows what conversion costs a user who did not need it: the
forward pass in eval mode without gradients, and a training step (forward, cross entropy, backward, SGD), at
batch 1 and 8. Stock and converted run in turn on the same picture from the same weights. Target: at most
1.02.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from . import measure, report, tables

TARGET = 1.02
SECONDS = {"full": 25.0, "small": 3.0, "tiny": 0.1}  # a mode and batch


def model(name: str = "resnet18") -> nn.Module:
    """One of torchvision's, with the same parameters every time."""
    import torchvision

    torch.manual_seed(0)
    return getattr(torchvision.models, name)(weights=None)


def forward(net: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    net.eval()

    def call() -> Tensor:
        with torch.no_grad():
            return net(x)

    return call


def training_step(net: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    net.train()
    labels = torch.zeros(x.shape[0], dtype=torch.long)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def call() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return call


def measure_all(size: str) -> dict[str, Any]:
    data = measure.report_head("resnet", size) | {"target": TARGET, "rows": []}
    side = 224 if size == "full" else 64
    for mode, make in (("forward", forward), ("training step", training_step)):
        for batch in (1, 8):
            x = torch.randn(batch, 3, side, side)
            stock = model()
            ours = pc.convert(copy.deepcopy(stock))
            timed = measure.paired({"stock": make(stock, x), "ours": make(ours, x)}, SECONDS[size], warm=2, most=400)
            row: dict[str, Any] = {"mode": mode, "batch": batch, "picture": side} | timed.facts("stock")
            row["met"] = row["ratio"]["ours"]["median"] <= TARGET
            data["rows"].append(row)
            print(
                f"ResNet-18 {mode:<14} batch {batch}: stock {row['ms']['stock']['median']:8.2f} ms, "
                f"ours/stock {row['ratio']['ours']['median']:.4f} in {timed.rounds} rounds, least times "
                f"{row['ms']['ours']['least'] / row['ms']['stock']['least']:.4f} "
                f"(target {TARGET}: {tables.verdict(row['met'])})",
                flush=True,
            )
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
