"""How long strips take beside one call of stock, in turn, on networks without gradients, in both layouts.

`pc.tile_modules(model)` without a budget: strips are chosen for speed. ResNet-18's first stages, MobileNetV2,
EfficientNet-B0 and ConvNeXt-T (features), and a U-Net, at a size where strips are chosen. Each row is a process of its
own, in which stock and strips are called in turn; planning is done in the rounds that do not count.

Each row is measured twice. The C library gives large blocks back to the system when they are freed, and every page of
the next one costs a fault, of which stock has far more. A second process keeps what is freed, as other allocators do.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

from . import measure, report, resnet, whole_models
from .measure import MIB

LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
SECONDS = {"full": 15.0, "tiny": 0.1}
"""Of the rounds of a row."""


@dataclass(frozen=True)
class Net:
    model: Callable[[], nn.Module]
    side: int
    """Of the image."""
    targets: tuple[float, float] | None = None
    """Time in units of stock's, in each layout."""


def features(name: str) -> nn.Module:
    return cast(Any, resnet.model(name)).features


NETS = {
    "ResNet-18 to layer2": Net(lambda: nn.Sequential(*list(resnet.model().children())[:6]), 4096, (0.5, 0.9)),
    "MobileNetV2": Net(lambda: features("mobilenet_v2"), 2048, (0.4, 0.45)),
    "EfficientNet-B0": Net(lambda: features("efficientnet_b0"), 2048, (0.4, 0.45)),
    "ConvNeXt-T": Net(lambda: features("convnext_tiny"), 1024, (0.4, 0.45)),
    "U-Net": Net(whole_models.UNet, 1536),
}


def keep_freed_memory() -> None:
    """For this process: no block is mapped by itself, and the heap does not shrink."""
    m_trim_threshold, m_mmap_max = -1, -4  # of malloc.h
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(m_mmap_max, 0) or not mallopt(m_trim_threshold, 2**31 - 1):
        raise RuntimeError("mallopt: the C library did not take the settings")


@torch.no_grad()
def measured(name: str, layout: str, size: str, kept: bool = False) -> dict[str, Any]:
    if kept:
        keep_freed_memory()
    net, side = NETS[name], NETS[name].side if size == "full" else 128
    torch.manual_seed(0)
    stock = net.model().eval().to(memory_format=LAYOUTS[layout])
    x = torch.randn(1, 3, side, side).contiguous(memory_format=LAYOUTS[layout])
    tiled = pc.tile_modules(copy.deepcopy(stock))
    calls: dict[str, Callable[[], Tensor]] = {"stock": lambda: stock(x), "tile": lambda: tiled(x)}
    found = measure.paired(calls, SECONDS[size])
    result, peaks = stock(x).nbytes, {}
    for form, call in calls.items():
        peaks[form] = allocated_peak(call) - result
    return {"net": name, "layout": layout, "side": side, "peaks": peaks, **found.facts("stock")}


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__, ("full", "tiny"))
    parser.add_argument("--only", nargs="+", choices=list(NETS), default=list(NETS))
    arguments = parser.parse_args(argv)
    data = measure.report_head("tile_speed", arguments.size) | {"rows": []}
    for name in arguments.only:
        for layout in LAYOUTS:
            given = {"name": name, "layout": layout, "size": arguments.size}
            row = measure.in_fresh_process("bench.tile_speed:measured", 1200, **given)
            row["kept"] = measure.in_fresh_process("bench.tile_speed:measured", 1200, **given, kept=True)
            targets = NETS[name].targets
            row["target"] = targets[list(LAYOUTS).index(layout)] if targets else None
            peaks = [round(row["peaks"][form] / MIB) for form in ("stock", "tile")]
            print(
                f"{name:<20} {layout:<14} {row['ratio']['tile']} kept {row['kept']['ratio']['tile']} {peaks}",
                flush=True,
            )
            data["rows"].append(row)
            report.store(data, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
