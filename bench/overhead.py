"""Microseconds that a call of a converted module takes more than stock's, where nothing needs to be split.

The convolutions are as small as they come, so that a call is all overhead. Stock and ours run in turn in
blocks of a hundred calls or so; a block's mean is one sample, and what we add is the median of the pairs'
differences (beside it, the difference of the smallest samples, which is less disturbed by other work). Three
modes: without gradients; forward with the graph recorded; forward and backward. The target is 5 microseconds
for a forward call.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from . import measure, report, tables
from .measure import Spread

TARGET = 5.0
BLOCKS = {"full": (100, 150), "small": (10, 50), "tiny": (3, 10)}  # blocks, calls a block
MODES = ("no_grad", "forward", "forward and backward")


def shapes() -> dict[str, tuple[nn.Module, Tensor]]:
    return {
        "Conv1d 4->4 k3, length 8": (nn.Conv1d(4, 4, 3, padding=1), torch.randn(1, 4, 8)),
        "Conv2d 1->1 k1, 1x1": (nn.Conv2d(1, 1, 1), torch.randn(1, 1, 1, 1)),
        "Conv2d 8->8 k3, 8x8": (nn.Conv2d(8, 8, 3, padding=1), torch.randn(1, 8, 8, 8)),
        "Conv2d 8->8 k3 'same', 8x8": (nn.Conv2d(8, 8, 3, padding="same"), torch.randn(1, 8, 8, 8)),
        "ConvTranspose2d 4->4 k2, 4x4": (nn.ConvTranspose2d(4, 4, 2, stride=2), torch.randn(1, 4, 4, 4)),
    }


def block(module: nn.Module, x: Tensor, mode: str) -> Callable[[int], None]:
    def calls(count: int) -> None:
        for _ in range(count):
            module(x)

    def calls_without_gradients(count: int) -> None:
        with torch.no_grad():
            calls(count)

    def steps(count: int) -> None:
        leaves = [x, *module.parameters()]
        for _ in range(count):
            torch.autograd.grad(module(x).sum(), leaves)

    return {"no_grad": calls_without_gradients, "forward": calls, "forward and backward": steps}[mode]


def time_mode(module: nn.Module, x: Tensor, mode: str, blocks: int, calls: int) -> dict[str, Any]:
    """Microseconds a call of both sides, and what ours adds."""
    x = x.clone().requires_grad_(mode != "no_grad")
    stock, ours = block(module, x, mode), block(pc.convert(copy.deepcopy(module)), x, mode)
    samples: dict[str, list[float]] = {"stock": [], "ours": []}
    for run in (stock, ours):
        run(calls)
    gc.disable()
    try:
        for _ in range(blocks):
            for side, run in (("stock", stock), ("ours", ours)):
                start = time.perf_counter()
                run(calls)
                samples[side].append((time.perf_counter() - start) / calls * 1e6)
    finally:
        gc.enable()
    added = Spread.of(o - s for s, o in zip(samples["stock"], samples["ours"], strict=True))
    times = {side: Spread.of(values) for side, values in samples.items()}
    return {
        "us": {side: spread.facts(3) for side, spread in times.items()},
        "added": added.facts(3),
        "added_least": round(times["ours"].least - times["stock"].least, 3),
    }


def measure_all(size: str) -> dict[str, Any]:
    data = measure.report_head("overhead", size) | {"target": TARGET, "rows": []}
    # Threads of a pool would add noise and nothing else at these sizes.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (module, x) in shapes().items():
            for mode in MODES:
                row: dict[str, Any] = {"name": name, "mode": mode} | time_mode(module, x, mode, *BLOCKS[size])
                if mode != "forward and backward":
                    row["met"] = row["added"]["median"] <= TARGET
                data["rows"].append(row)
                print(_line(row), flush=True)
    finally:
        torch.set_num_threads(threads)
    return data


def _line(row: dict[str, Any]) -> str:
    verdict = f"  target {TARGET:.0f}: {tables.verdict(row['met'])}" if "met" in row else ""
    return (
        f"{row['name']:<30} {row['mode']:<21} stock {row['us']['stock']['median']:7.2f} us, "
        f"ours {row['us']['ours']['median']:7.2f}; added {row['added']['median']:6.2f} "
        f"(of the least {row['added_least']:.2f}){verdict}"
    )


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
