"""What the commands print besides their answers: notes, files that were written, progress."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def console() -> Any:
    """A rich console for answers. A pipe, which has no width, gets 120 columns."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def wrote(paths: Iterable[Path]) -> None:
    for path in paths:
        print(f"wrote {path}")


class Progress:
    """Progress on stderr: in a terminal with rich a bar, otherwise a line for each step; nothing if `quiet`.

    left: whether the time left is shown.
    """

    def __init__(self, quiet: bool, total: int | None = None, left: bool = False) -> None:
        self._quiet, self._total, self._left = quiet, total, left
        self._begun: tuple[float, int] | None = None
        self._bar: Any = None
        self._last = ""

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty() and has_rich():
            from rich import progress
            from rich.console import Console

            columns = [
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.TextColumn("{task.completed}") if self._total is None else progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                *([progress.TextColumn("left"), progress.TimeRemainingColumn()] if self._left else []),
            ]
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def next(self, text: str) -> None:
        """The next step begins; `text` says what it does."""
        if self._bar is not None:
            self._bar.update(self._task, description=text, advance=1 if self._last else 0)
        elif not self._quiet and text != self._last:
            print(text, file=sys.stderr, flush=True)
        self._last = text

    def at(self, text: str, done: int, total: int) -> None:
        """So much is done. Without a bar, a line for each tenth, with the time left."""
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=done, total=total)
            return
        begun, first = self._begun = self._begun or (time.monotonic(), done)
        if self._quiet or done * 10 // total == (done - 1) * 10 // total:
            return
        left = ""
        if first < done < total:
            seconds = (time.monotonic() - begun) / (done - first) * (total - done)
            left = f", {seconds:.0f} s left" if seconds < 120 else f", {seconds / 60:.0f} min left"
        print(f"{text} {done} of {total}{left}", file=sys.stderr, flush=True)
