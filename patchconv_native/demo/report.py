"""The text of the demo: the introduction, the table, the differences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._bytes import format_bytes
from .measure import Measurement
from .picture import Photo
from .worker import Compared


@dataclass(frozen=True)
class Results:
    """What the runs gave. Memory in bytes."""

    budget: int
    ours: Measurement
    blended: Measurement
    stock_peak: int  # of one call on the whole picture, predicted
    part: tuple[int, int]  # height and width of the part that one stock call was run on
    part_peak: int  # predicted
    compared: Compared
    side: int  # of a blended tile
    apart: Apart


@dataclass(frozen=True)
class Apart:
    """How far blended tiles are from the network's result on the whole picture, in levels of 255."""

    largest: float
    mean: float
    rms: float  # in units of the result's


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def megapixels(size: tuple[int, int]) -> str:
    return f"{size[0] * size[1] / 1e6:.3g} megapixels"


def processor() -> str:
    """The CPU's name, as Linux has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "a CPU without a name"


def introduce(console: Console, photo: Photo, device: str) -> None:
    """Prints the picture, its size and the device."""
    height, width = photo.opened_size
    way = "as it is"
    if photo.scale > 1.001:
        way = f"enlarged {photo.scale:.3g} times"
    elif photo.opened_size != photo.size:
        way = f"made smaller {width / photo.size[1]:.3g} times"
    where = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {torch.get_num_threads()} threads"
    console.print(
        f"[bold]{escape(photo.name)}[/], {width} x {height}, {way} to {photo.size[1]} x {photo.size[0]} "
        f"({megapixels(photo.size)}), on {escape(where)}"
    )
    console.print("made dark and noisy; a small U-Net with group norms, trained here on it, restores it", style="dim")


def table(results: Results) -> Table:
    """A row for each way: what it took."""
    body = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    body.add_column("the whole network", no_wrap=True)
    body.add_column("peak memory", justify="right", no_wrap=True)
    body.add_column("time", justify="right", no_wrap=True)
    body.add_column("largest difference from one call", justify="right", no_wrap=True)
    compared, side = results.compared, results.side
    body.add_row("one call, stock PyTorch", f"{format_bytes(results.stock_peak)}, predicted", "not run", "")
    body.add_row(
        f"[bold]pc.tile, budget {format_bytes(results.budget)}[/]",
        f"[bold green]{format_bytes(results.ours.peak)}[/]",
        seconds(results.ours.seconds),
        f"[bold]{compared.levels}[/] of 255 levels (float32: {compared.error:.1g})",
    )
    body.add_row(
        f"tiles of {side} x {side}, blended",
        format_bytes(results.blended.peak),
        seconds(results.blended.seconds),
        f"up to {results.apart.largest:.0f}, {results.apart.mean:.1f} on average",
    )
    return body


def notes(results: Results) -> list[str]:
    """How the figures were found."""
    compared, (height, width) = results.compared, results.part
    stock = compared.stock
    return [
        f"pc.tile beside one call: on a part of {width} x {height}, where that takes {format_bytes(stock.peak)} "
        f"(predicted: {format_bytes(results.part_peak)}) and {seconds(stock.seconds)}",
        f"blended tiles beside pc.tile: on the whole picture; rms {100 * results.apart.rms:.2g} % of the result",
        "memory is the process's own growth: the picture and both results are files, whose pages do not count",
    ]
