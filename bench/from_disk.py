"""A gigapixel image of bytes from a file through a network into a file: memory of the process, and throughput.

The script writes the image, (1, 3, 32768, 32768). One network only reads: means of 32x32 pixels. The other is
ResNet-18, to its last features. Each runs in a process of its own, by `pc.tile` on numpy.memmap in a budget; the memory
is the kernel's high-water mark above what the process held when libraries and model were loaded. Beside them a plain
read of the file, from first byte to last. The page cache has nothing of the file before each of them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import patchconv_native as pc

from . import measure, report, resnet
from .measure import MIB

SIDES = {"full": 32768, "tiny": 256}
BUDGET = "512MiB"
BLOCK = 16 * MIB
CHECKED = 1024
"""Rows of the image whose features are compared with those of one call of stock."""
HALO = 512
"""More rows than a row of ResNet-18's features reads beside its own 32."""


class OfBytes(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.float() / 255)


def network(case: str) -> nn.Module:
    torch.manual_seed(0)
    if case == "means":
        return OfBytes(nn.AvgPool2d(32)).eval()
    return OfBytes(nn.Sequential(*list(resnet.model("resnet18").children())[:-2])).eval()


CHANNELS = {"means": 3, "features": 512}


def write_image(path: Path, side: int) -> None:
    """Noise on slopes, written a few rows at a time."""
    image = numpy.lib.format.open_memmap(path, "w+", "uint8", (1, 3, side, side))
    draw, slope = numpy.random.default_rng(0), numpy.linspace(0, 160, side)
    rows = max(1, BLOCK // side)
    for channel in range(3):
        for low in range(0, side, rows):
            part = image[0, channel, low : low + rows]
            part[...] = draw.integers(0, 96, part.shape, dtype="uint8") + numpy.roll(slope, low).astype("uint8")
    image.flush()


def forget(path: Path) -> None:
    """Nothing of the file stays in the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(path: str) -> dict[str, float]:
    forget(Path(path))
    block, start = bytearray(BLOCK), time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
    return {"seconds": time.perf_counter() - start}


@torch.no_grad()
def called(case: str, path: str, result: str) -> dict[str, Any]:
    net, image = network(case), numpy.load(path, mmap_mode="r")
    side = image.shape[2]
    out = numpy.lib.format.open_memmap(result, "w+", "float32", (1, CHANNELS[case], side // 32, side // 32))
    pc.tile(net, torch.zeros(1, 3, 256, 256, dtype=torch.uint8), budget=BUDGET)  # libraries are loaded
    forget(Path(path))
    seconds: list[float] = []

    def run() -> tuple[()]:
        seconds.append(measure.seconds_of(lambda: pc.tile(net, image, out=out, budget=BUDGET)))
        return ()

    grown = measure.peak_of(run).above
    return {"process": grown, "seconds": seconds[0], "difference": difference(net, image, out)}


def difference(net: nn.Module, image: Any, out: Any) -> float:
    """The largest difference from stock's call on some rows in the middle, of the largest value there. The rows lie
    far enough inside that no border of the part can be seen.
    """
    side = image.shape[2]
    part = min(side, CHECKED + 2 * HALO)
    low = (side - part) // 2 // 32 * 32
    columns = min(side, part)
    want = net(torch.from_numpy(numpy.array(image[:, :, low : low + part, :columns])))
    skip = HALO // 32 if part < side else 0
    want = want[:, :, skip : want.size(2) - skip, : want.size(3) - skip]
    got = torch.from_numpy(numpy.array(out[:, :, low // 32 + skip :, :][:, :, : want.size(2), : want.size(3)]))
    return float((got - want).abs().max() / want.abs().max())


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__, ("full", "tiny"))
    parser.add_argument("--scratch", type=Path, help="folder of the image and the results, 6 GiB (default: a new one)")
    arguments = parser.parse_args(argv)
    side = SIDES[arguments.size]
    data = measure.report_head("from_disk", arguments.size) | {"side": side, "budget": BUDGET, "rows": []}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        path = Path(folder, "image.npy")
        write_image(path, side)
        data["bytes"] = path.stat().st_size
        for case in ("read", *CHANNELS):
            target = "plain_read" if case == "read" else "called"
            more = {} if case == "read" else {"case": case, "result": str(path.with_name(f"{case}.npy"))}
            row = measure.in_fresh_process(f"bench.from_disk:{target}", 7200, path=str(path), **more)
            print(f"{case:<10} {row}", flush=True)
            data["rows"].append({"case": case} | row)
            report.store(data, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
