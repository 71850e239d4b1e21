"""Runs the demo: both stages with both libraries, the table, the pictures.

The two workers of a stage start together and compute one after the other, each with the machine to itself. Where
stock's result would not fit into memory, stock is not run: the table says so, and patchconv_native's result is compared
with bands of rows that stock computes one at a time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

import patchconv_native as pc

from .._bytes import GIB, MIB, format_bytes
from . import packages, picture, report
from .errors import DemoError
from .filters import Orientation
from .picture import Photo
from .report import NoResult, StageResult
from .stages import GaborBank, Shapes, Stage, stages, stock_need
from .worker import Difference, Outcome, OutOfMemory, Worker, start_server

if TYPE_CHECKING:
    from .figures import Views

STEPS_OF_A_STAGE = 3
SLACK = 256 * MIB  # for what is no tensor of the stage: libraries, code, strips in the comparison
WHOLE_WIDTH = 2000  # pixels, about: of the whole picture in demo.png


def show(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns the exit code."""
    device = _device(arguments.device)
    photo = picture.load(arguments.image, arguments.megapixels)
    out = _folder(arguments.out)
    start_server(device)
    packages.check_torchvision()  # while the server imports it too
    from . import figures  # imports matplotlib

    cap = sys.maxsize if arguments.memory is None else int(arguments.memory * GIB)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    report.introduce(console, photo, device, arguments.seed)

    todo = stages(photo, arguments.seed)
    results, views = [], None
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[using]}", style="cyan"),
    )
    with Progress(*columns, console=console) as progress:
        bar = _Bar(progress, STEPS_OF_A_STAGE * len(todo) + 1)
        for stage in todo:
            result, seen = _run(stage, photo, device, cap, bar)
            results.append(result)
            views = views or seen
        bar.next("drawing")
        assert views is not None  # the first stage is the bank
        pictures = [out / "demo.png", out / "memory.png"]
        figures.draw_demo(pictures[0], photo, views, results)
        figures.draw_memory(pictures[1], photo, device, results)
        bar.finish()
    console.print(report.table(results))
    for line in report.verdict(results):
        console.print(line)
    console.print(f"wrote {pictures[0]} and {pictures[1]}", soft_wrap=True)
    return 0


def _device(asked: str | None) -> str:
    built = pc.build_info()["cuda"] is not None
    if asked == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: torch finds no GPU here")
    if asked == "cuda" and not built:
        raise DemoError("--device cuda: this patchconv_native was built without CUDA")
    return asked or ("cuda" if built and torch.cuda.is_available() else "cpu")


def _folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # fails now, not after minutes of work
    except OSError as error:
        raise DemoError(f"cannot write to --out {folder}: {error.strerror}") from None
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


def _run(stage: Stage, photo: Photo, device: str, cap: int, bar: _Bar) -> tuple[StageResult, Views | None]:
    shapes = stage.shapes()
    with ExitStack() as stack:
        ends = multiprocessing.Pipe()
        theirs, ours = (
            stack.enter_context(Worker(stage, converted, device, end, bar.using))
            for converted, end in zip((False, True), ends, strict=True)
        )
        for end in ends:
            end.close()  # the workers have them
        available = min(theirs.ask("available"), ours.ask("available"), cap)

        bar.next(f"{stage.name}: stock")
        stock = _run_stock(theirs, shapes, available)

        bar.next(f"{stage.name}: patchconv_native")
        need = shapes.floor + pc.workspace_limit() + SLACK
        both = isinstance(stock, Outcome)  # its result is kept for the comparison if two fit into memory
        if both and min(ours.ask("available"), cap - shapes.result) < need:
            theirs.ask("forget")
            both = False
        available = min(ours.ask("available"), cap)
        if available < need:
            raise DemoError(f"{stage.name} {_needs(need, available)}; use a smaller --megapixels")
        try:
            outcome: Outcome = ours.ask("compute")
        except OutOfMemory as error:
            raise DemoError(f"{stage.name}: out of memory ({error}); use a smaller --megapixels") from None

        bar.next(f"{stage.name}: comparing")
        if both:
            theirs.start("send")
            difference: Difference = ours.ask("compare")
            theirs.answer()
        else:
            difference = ours.ask("compare_bands")
        views = _views(ours, photo) if isinstance(stage, GaborBank) else None
        return StageResult(stage, shapes, stock, outcome, difference), views


def _run_stock(worker: Worker, shapes: Shapes, available: int) -> Outcome | NoResult:
    need = stock_need(shapes) + SLACK
    if need > available:
        return NoResult("not run", _needs(need, available))
    try:
        return worker.ask("compute")
    except OutOfMemory as error:
        return NoResult("out of memory", str(error))


def _needs(need: int, available: int) -> str:
    return f"needs about {format_bytes(need)} at this size and {format_bytes(available)} is available"


def whole_step(photo: Photo) -> int:
    """The whole picture is drawn at 1/step of the photograph's size."""
    return max(1, round(photo.size[1] / WHOLE_WIDTH))


def _views(worker: Worker, photo: Photo) -> Views:
    from . import figures

    step = whole_step(photo)
    whole: Orientation = worker.ask("small_orientation", step)
    place = figures.choose_window(photo, whole, step)
    return figures.Views(whole, step, worker.ask("orientation", *place), place)
