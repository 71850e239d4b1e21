"""Runs the demo: trains the network, runs it in three ways, prints the table, draws the pictures.

Each way has a process of its own, and the machine to itself. The picture and the results are files in a temporary
folder.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import patchconv_native as pc

from .._bytes import MIB, format_bytes
from ..commands.errors import Mistake
from . import picture, report
from .blended import tile_side
from .network import STRIP_ROWS, Restorer, train, write_dark
from .picture import Photo
from .report import Apart, Results
from .worker import OutOfMemory, Worker, start_server

BUDGET = 256 * MIB
STEPS = 6
PART = 2048, 3072  # height and width, at most, of what one stock call is run on
SLACK = 256 * MIB  # for what is no tensor: libraries, code


def show(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns the exit code."""
    device = _device(arguments.device)
    photo = picture.load(arguments.image, arguments.megapixels)
    out = _folder(arguments.out)
    start_server(device)
    from . import figures  # imports matplotlib

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    report.introduce(console, photo, device)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[using]}", style="cyan"),
    )
    pictures = [out / "demo.png", out / "memory.png"]
    with Progress(*columns, console=console) as progress, tempfile.TemporaryDirectory(dir=out) as folder:
        bar = _Bar(progress, STEPS)
        files = _Files(Path(folder), photo)
        results = _run(photo, files, device, arguments.seed, bar)
        bar.next("drawing")
        figures.draw_demo(pictures[0], photo, results, *(np.load(file, mmap_mode="r") for file in files.all()))
        figures.draw_memory(pictures[1], photo, device, results)
        bar.finish()
    console.print(report.table(results))
    for line in report.notes(results):
        console.print(line, soft_wrap=True)
    console.print(f"wrote {pictures[0]} and {pictures[1]}", soft_wrap=True)
    return 0


def _device(asked: str | None) -> str:
    built = pc.build_info()["cuda"] is not None
    if asked == "cuda" and not torch.cuda.is_available():
        raise Mistake("--device cuda: torch finds no GPU here")
    if asked == "cuda" and not built:
        raise Mistake("--device cuda: this patchconv_native was built without CUDA")
    return asked or ("cuda" if built and torch.cuda.is_available() else "cpu")


def _folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # fails now, not after minutes of work
    except OSError as error:
        raise Mistake(f"cannot write to --out {folder}: {error.strerror}") from None
    return folder


class _Bar:
    """The progress bar: the present step, the number of steps done, and the memory that the worker occupies."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._begun = progress, False
        self._task = progress.add_task("", total=total, using="")

    def next(self, description: str) -> None:
        self._progress.update(self._task, description=description, using="", advance=1 if self._begun else 0)
        self._begun = True

    def using(self, used: int) -> None:
        self._progress.update(self._task, using=format_bytes(used))

    def finish(self) -> None:
        self._progress.update(self._task, description="done", using="", advance=1)


class _Files:
    """The dark picture (bytes) and the two results (float32), (1, 3, H, W) each."""

    def __init__(self, folder: Path, photo: Photo) -> None:
        self.dark, self.ours, self.blended = (folder / f"{name}.npy" for name in ("dark", "ours", "blended"))
        for file, dtype in zip(self.all(), ("uint8", "float32", "float32"), strict=True):
            np.lib.format.open_memmap(file, "w+", dtype, (1, 3, *photo.size))

    def all(self) -> tuple[Path, Path, Path]:
        return self.dark, self.ours, self.blended


def _run(photo: Photo, files: _Files, device: str, seed: int, bar: _Bar) -> Results:
    bar.next("training")
    network = train(photo, seed)
    write_dark(photo, seed, np.load(files.dark, mmap_mode="r+"))

    bar.next("pc.tile")
    ours = _ask(network, device, bar, BUDGET, "tile", files.dark, files.ours, BUDGET)

    bar.next("blended tiles")
    side = tile_side(photo.size)
    need = predicted_peak(network, min(side, photo.size[0]), side)
    blended = _ask(network, device, bar, need, "blend", files.dark, files.blended, side)

    bar.next("one call on a part")
    height, width = (min(most, whole) for most, whole in zip(PART, photo.size, strict=True))
    top, left = (photo.size[0] - height) // 2, (photo.size[1] - width) // 2
    part_peak = predicted_peak(network, height, width)
    compared = _ask(network, device, bar, part_peak, "compare", files.dark, top, left, height, width, BUDGET)

    bar.next("comparing")
    stock_peak = predicted_peak(network, *photo.size)
    apart = _apart(np.load(files.ours, mmap_mode="r"), np.load(files.blended, mmap_mode="r"))
    return Results(BUDGET, ours, blended, stock_peak, (height, width), part_peak, compared, side, apart)


def predicted_peak(network: Restorer, height: int, width: int) -> int:
    """Bytes of one stock call, with its input and its result; nothing is computed."""
    image = torch.empty(1, 3, height, width, dtype=torch.uint8, device="meta")
    with torch.no_grad():
        return pc.memory.trace(network, image, fake=True, train=False).peak


def _ask(network: Restorer, device: str, bar: _Bar, need: int, command: str, *arguments: Any) -> Any:
    with Worker(network, device, bar.using) as worker:
        available = worker.ask("available")
        if need + SLACK > available:
            raise Mistake(
                f"needs about {format_bytes(need + SLACK)} at this size and {format_bytes(available)} is available; "
                "use a smaller --megapixels"
            )
        try:
            return worker.ask(command, *arguments)
        except OutOfMemory as error:
            raise Mistake(f"out of memory ({error}); use a smaller --megapixels") from None


def _apart(ours: np.ndarray, blended: np.ndarray) -> Apart:
    total = squares = whole = largest = 0.0
    for top in range(0, ours.shape[2], STRIP_ROWS):
        one, other = (torch.tensor(file[:, :, top : top + STRIP_ROWS]) for file in (ours, blended))
        difference = (other.clamp(0, 1) - one.clamp(0, 1)).abs()
        total += float(difference.sum(dtype=torch.float64))
        squares += float(difference.double().square().sum())
        whole += float(one.double().square().sum())
        largest = max(largest, float(difference.max()))
    return Apart(255 * largest, 255 * total / math.prod(ours.shape), math.sqrt(squares / max(whole, 1e-30)))
