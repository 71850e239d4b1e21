"""Several runs side by side, for instance a model before and after a change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._bytes import format_bytes
from . import labels
from .report import MemoryReport
from .text import markdown_cell

COLUMNS = ("run", "peak", "of first", "saved", "of first", "before the step", "peak at")


@dataclass(frozen=True)
class Comparison:
    """Several reports, to print or to draw. Ratios are to the first run."""

    reports: dict[str, MemoryReport]

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table: a row for each run, a cell for each of COLUMNS."""
        runs = list(self.reports.items())
        first = runs[0][1]
        rows: list[tuple[str, ...]] = []
        for name, report in runs:
            peak = format_bytes(report.peak) if report.finished else f"over {format_bytes(report.peak)}"
            saved = format_bytes(report.saved) if report.finished else f"over {format_bytes(report.saved)}"
            whole = report.finished and first.finished
            ratios = (_ratio(report.peak, first.peak, whole), _ratio(report.saved, first.saved, whole))
            at = labels.where(report.trace.peak) + ("" if report.finished else " (not finished)")
            rows.append((name, peak, ratios[0], saved, ratios[1], format_bytes(report.static), at))
        return rows

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        rows = [(labels.shortened(row[0], 32), *row[1:-1], labels.shortened(row[-1], 56)) for row in rows]
        return labels.aligned(rows, "<>>>>><")

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The table as Markdown. Written to `path` if one is given."""
        lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * 5 + "---|"]
        lines += ["| " + " | ".join(map(markdown_cell, row)) + " |" for row in self.rows()]
        text = "\n".join(lines) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def plot(self, path: str | Path | None = None) -> Any:
        """A matplotlib figure of the runs. Written to `path` if one is given."""
        from .plot import plot_runs

        return plot_runs({name: report.trace for name, report in self.reports.items()}, path)


def _ratio(count: int, first: int, whole: bool) -> str:
    return f"{count / first:.2f}" if first and whole else ""


def compare(reports: Mapping[str, MemoryReport], path: str | Path | None = None) -> Comparison:
    """Compares reports, given by the names of their runs; ratios are to the first.

    path: where to write a figure. Raises ValueError without reports.
    """
    if not reports:
        raise ValueError("compare: no reports were given")
    comparison = Comparison(dict(reports))
    if path is not None:
        comparison.plot(path)
    return comparison
