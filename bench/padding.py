"""Stock's time against ours where the zero padding is wide, float32 on the CPU.

oneDNN computes convolutions whose padding passes a few columns by ways that are 2 to about 280 times slower than
its usual one (ONEDNN_VERBOSE=1 names them: gemm, ref), although the padded convolution is no more work. Our
tiles bring wide padding with them, as zeros copied along with the tile, and then ask for a convolution
without any; from which width on is widest_fast_padding() in csrc/cpu/conv.cpp, which was derived from this
script's results. Kernels 3 to 31, 0 to 20 columns, 1 to 64 input channels, 16 outputs; for some also rows in place
of columns. Which way oneDNN takes depends on the number of threads and on the size of the picture as well, so
there are tables for one thread, and one for a large picture.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import patchconv_native as pc

from . import measure, report

OUTPUTS = 16
KERNELS = (3, 5, 7, 9, 11, 15, 21, 31)
COLUMNS = (0, 1, 2, 3, 4, 5, 7, 10, 15, 20)
CHANNELS = (1, 3, 16, 64)
ARITHMETIC = 0.4e9  # floating-point operations a call, about: at oneDNN's slowest a second, at its usual speed 5 ms
SECONDS = {"full": 0.15, "small": 0.05, "tiny": 0.0}
LIMIT = {
    "full": 180.0,
    "small": 30.0,
    "tiny": 20.0,
}  # seconds for the whole table; the report counts the cells that are missing then


@dataclass(frozen=True)
class Cell:
    channels: int
    kernel: int
    padding: int
    direction: str = "columns"  # that is padded, or "rows"
    threads: int = 0  # 0: as many as torch takes by itself
    large: bool = False

    @property
    def side(self) -> int:
        """Of the picture: what keeps arithmetic the same, within reason."""
        if self.large:
            return 512
        places = ARITHMETIC / (2 * OUTPUTS * self.channels * self.kernel**2)
        return max(self.kernel + 9, min(256, int(places**0.5)))


def cells(size: str) -> list[Cell]:
    if size == "tiny":
        return [Cell(1, k, p) for k in (3, 9) for p in (0, 5)]
    if size == "small":
        return [Cell(c, k, p, threads=t) for t in (0, 1) for c in (1, 16) for k in (3, 15) for p in (0, 3, 4, 7)]
    table = [Cell(c, k, p) for c in CHANNELS for k in KERNELS for p in COLUMNS]
    table += [Cell(c, k, p, threads=1) for c in (1, 16) for k in (3, 9, 15, 31) for p in COLUMNS]
    table += [Cell(c, k, p, "rows") for c in (1, 16) for k in (7, 15, 31) for p in (0, 3, 4, 7, 15)]
    return (
        table
        + [Cell(c, k, p, large=True) for c in (1, 16) for k in (9, 15) for p in (0, 3, 4, 7)]
        + [Cell(1, 31, p, large=True) for p in (0, 3, 4, 15)]
    )


def time_cell(cell: Cell, budget: float) -> dict[str, Any]:
    padding = (0, cell.padding) if cell.direction == "columns" else (cell.padding, 0)
    torch.manual_seed(0)
    stock = nn.Conv2d(cell.channels, OUTPUTS, cell.kernel, padding=padding).requires_grad_(False)
    ours = pc.Conv2d(cell.channels, OUTPUTS, cell.kernel, padding=padding).requires_grad_(False)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(1, cell.channels, cell.side, cell.side)
    threads = torch.get_num_threads()
    torch.set_num_threads(cell.threads or threads)
    try:
        timed = measure.paired({"stock": lambda: stock(x), "ours": lambda: ours(x)}, budget, least=1, most=20)
        places = ours(x).shape[2:].numel()
    finally:
        torch.set_num_threads(threads)
    # Stock's time in units of ours: how many times slower it is.
    return vars(cell) | {
        "side": cell.side,
        "gflop": round(2 * places * OUTPUTS * cell.channels * cell.kernel**2 / 1e9, 3),
        "path": pc.last_path()["path"],
        "rounds": timed.rounds,
        "ms": {side: timed.time(side).median * 1e3 for side in ("stock", "ours")},
        "stock_over_ours": timed.ratio("stock", "ours").facts(),
    }


def measure_all(size: str) -> dict[str, Any]:
    wanted = cells(size)
    data = measure.report_head("padding", size) | {"outputs": OUTPUTS, "rows": [], "missing": 0}
    start = time.perf_counter()
    for index, cell in enumerate(wanted):
        if time.perf_counter() - start > LIMIT[size]:
            data["missing"] = len(wanted) - index
            print(f"{data['missing']} of {len(wanted)} cells not measured: {LIMIT[size]:.0f} s are over")
            break
        row = time_cell(cell, SECONDS[size])
        data["rows"].append(row)
        print(
            f"C={row['channels']:<3} k={row['kernel']:<3} {row['padding']:>2} {row['direction']:<8} "
            f"{row['side']:>3} squared, {row['threads'] or 'all'} threads  "
            f"stock {row['ms']['stock']:9.2f} ms  ours {row['ms']['ours']:8.2f} ms ({row['path']})  "
            f"stock/ours {row['stock_over_ours']['median']:7.2f}",
            flush=True,
        )
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
