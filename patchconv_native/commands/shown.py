"""What the commands say besides their answers: errors of one line, files that were written, progress."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..memory.words import flat

LONGEST = 400


class Mistake(Exception):
    """Something that was asked for and cannot be; its text is one line. Exit code 2."""


class Failed(Exception):
    """Something went wrong in the work; its text is one line. Exit code 1."""


def line(error: BaseException) -> str:
    """An error of any kind in one line."""
    text = str(error).strip()
    first = flat(text.splitlines()[0]).strip() if text else ""
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of an allocator."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    signs = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def near(word: str, known: Iterable[str], before: str = "") -> str:
    """ "; did you mean ...?" with the known words most like this one, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(before + one for one in found)}?" if found else ""


def rich_here() -> bool:
    return importlib.util.find_spec("rich") is not None


def console() -> Any:
    """For answers. A pipe has no width of its own."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def wrote(paths: Iterable[Path]) -> None:
    for path in paths:
        print(f"wrote {path}")


class Progress:
    """What is being done, on stderr: a bar in a terminal that rich draws, else a line for each thing; or silence."""

    def __init__(self, quiet: bool, total: int | None = None) -> None:
        self._quiet, self._total = quiet, total
        self._bar: Any = None
        self._last = ""

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty() and rich_here():
            from rich import progress
            from rich.console import Console

            columns = [
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.TextColumn("{task.completed}") if self._total is None else progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
            ]
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def next(self, text: str) -> None:
        """The next thing begins."""
        if self._bar is not None:
            self._bar.update(self._task, description=text, advance=1 if self._last else 0)
        elif not self._quiet and text != self._last:
            print(text, file=sys.stderr, flush=True)
        self._last = text
