"""Stock's time against ours where the zero padding is wide, float32 on the CPU.

oneDNN computes convolutions whose padding passes a few columns by ways that are 2 to 700 times slower than
its usual one (ONEDNN_VERBOSE=1 names them: gemm, ref), although the padded convolution is no more work. Our
tiles bring wide padding with them, as zeros copied along with the tile, and then ask for a convolution
without any; from which width on is the constant kMaxPadding in csrc/cpu/conv.cpp, and this script is where it
comes from. Kernels 3 to 31, 0 to 20 columns, 1 to 64 input channels, 16 outputs; for some also rows in place
of columns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
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
}  # seconds for the whole table; what is missing then is said


@dataclass(frozen=True)
class Cell:
    channels: int
    kernel: int
    padding: int
    direction: str  # that is padded: "columns" or "rows"

    @property
    def side(self) -> int:
        """Of the image: what keeps arithmetic the same, within reason."""
        places = ARITHMETIC / (2 * OUTPUTS * self.channels * self.kernel**2)
        return max(self.kernel + 9, min(256, int(places**0.5)))


def cells(size: str) -> Iterator[Cell]:
    if size == "tiny":
        yield from (Cell(1, k, p, "columns") for k in (3, 9) for p in (0, 5))
        return
    kernels = KERNELS if size == "full" else (3, 9, 15)
    for channels in CHANNELS if size == "full" else (1, 16):
        for kernel in kernels:
            yield from (Cell(channels, kernel, padding, "columns") for padding in COLUMNS)
    if size == "full":
        for channels in (1, 16):
            for kernel in (7, 15, 31):
                yield from (Cell(channels, kernel, padding, "rows") for padding in (0, 3, 4, 7, 15))


def time_cell(cell: Cell, budget: float) -> dict[str, Any]:
    padding = (0, cell.padding) if cell.direction == "columns" else (cell.padding, 0)
    torch.manual_seed(0)
    stock = nn.Conv2d(cell.channels, OUTPUTS, cell.kernel, padding=padding).requires_grad_(False)
    ours = pc.Conv2d(cell.channels, OUTPUTS, cell.kernel, padding=padding).requires_grad_(False)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(1, cell.channels, cell.side, cell.side)
    timed = measure.paired({"stock": lambda: stock(x), "ours": lambda: ours(x)}, budget, least=1, most=20)
    flop = 2 * stock(x).numel() * cell.channels * cell.kernel**2
    # Stock's time in units of ours: how many times slower it is.
    return vars(cell) | {
        "side": cell.side,
        "gflop": round(flop / 1e9, 3),
        "path": pc.last_path()["path"],
        "rounds": timed.rounds,
        "ms": {side: timed.time(side).median * 1e3 for side in ("stock", "ours")},
        "stock_over_ours": timed.ratio("stock", "ours").facts(),
    }


def measure_all(size: str) -> dict[str, Any]:
    wanted = list(cells(size))
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
            f"stock {row['ms']['stock']:9.2f} ms  ours {row['ms']['ours']:8.2f} ms ({row['path']})  "
            f"stock/ours {row['stock_over_ours']['median']:7.2f}",
            flush=True,
        )
    return data


def main(argv: list[str] | None = None) -> int:
    arguments = measure.parser(__doc__).parse_args(argv)
    report.render(measure.write_results(measure_all(arguments.size), measure.folder(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
