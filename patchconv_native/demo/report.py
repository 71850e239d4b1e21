"""The text of the demo: the introduction, the table, the summary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._bytes import MIB, format_bytes
from .picture import Photo
from .stages import Shapes, Stage
from .worker import Difference, Outcome

NOISE = MIB  # bytes: differences of resident memory below this mean nothing


@dataclass(frozen=True)
class NoResult:
    """Stock has no result: "not run" or "out of memory", and why."""

    what: str
    why: str


@dataclass(frozen=True)
class StageResult:
    """The results of one stage: stock's, or why it has none, and this library's."""

    stage: Stage
    shapes: Shapes
    stock: Outcome | NoResult
    ours: Outcome
    difference: Difference


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def megapixels(photo: Photo) -> str:
    return f"{photo.size[0] * photo.size[1] / 1e6:.3g} megapixels"


def introduce(console: Console, photo: Photo, device: str, seed: int) -> None:
    """Prints the picture, its size and the device."""
    height, width = photo.opened_size
    way = "as it is"
    if photo.scale > 1.001:
        way = f"enlarged {photo.scale:.3g} times"
    elif photo.opened_size != photo.size:
        way = f"made smaller {width / photo.size[1]:.3g} times"
    where = torch.cuda.get_device_name() if device == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    console.print(
        f"[bold]{escape(photo.name)}[/], {width} x {height}, {way} to {photo.size[1]} x {photo.size[0]} "
        f"({megapixels(photo)}), float32, on {where}"
    )
    console.print(f"the network's weights are random, from seed {seed}: nothing is downloaded", style="dim")


def table(results: list[StageResult]) -> Table:
    """Two rows for each stage: what stock took, or why it was not run, and what this library took."""
    body = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    body.add_column("stage", no_wrap=True)
    body.add_column("computed by", no_wrap=True)
    body.add_column("time", justify="right", no_wrap=True)
    body.add_column("peak above input,\nweights and result", justify="right", no_wrap=True)
    body.add_column("largest difference", justify="right")
    for result in results:
        ours, apart = result.ours, result.difference
        where = f"\n{apart.where}" if apart.where else ""
        name, detail = result.stage.name, f"[dim]{format_bytes(result.shapes.result)} result[/]"
        if isinstance(result.stock, NoResult):
            body.add_row(name, "stock PyTorch", "", result.stock.what, "")
        else:
            took = result.stock.measured
            body.add_row(name, "stock PyTorch", seconds(took.seconds), format_bytes(took.workspace), "")
        body.add_row(
            detail,
            f"[bold]patchconv_native[/]\n[dim]{ours.path}[/]",
            seconds(ours.measured.seconds),
            f"[bold green]{format_bytes(ours.measured.workspace)}[/]",
            f"[bold]{apart.largest:.2g}[/]\n[dim]of values to {ours.largest:.3g}{where}[/]",
            end_section=True,
        )
    return body


def verdict(results: list[StageResult]) -> list[str]:
    """A sentence for each stage whose peaks are large enough to compare."""
    lines = []
    for result in results:
        if isinstance(result.stock, NoResult):
            lines.append(f"{result.stage.name}: stock {result.stock.what}: {result.stock.why}")
            continue
        stock, ours = result.stock.measured, result.ours.measured
        if max(stock.workspace, ours.workspace) < NOISE:
            continue
        ratio = ours.seconds / stock.seconds
        lines.append(
            f"{result.stage.name}: {format_bytes(ours.workspace)} above the result where stock takes "
            f"{format_bytes(stock.workspace)}, in {ratio:.2f} of its time"
        )
    return lines
