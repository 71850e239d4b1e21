"""MemoryReport: a traced step as numbers, text, files and figures."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._bytes import format_bytes, parse_bytes
from . import text, views
from .records import Held, ModuleFacts, Peak, Stretch, Trace

FORMAT = "patchconv_native memory trace"
VERSION = 1
LOG = (
    *("module", "type", "phase", "call", "start", "stop", "before", "after", "peak", "rise"),
    *("parameters", "buffers", "gradients", "optimizer", "saved", "own_saved"),
)
"""Columns of the memory log. "rise" is the peak minus "before"; the last six are facts of the module."""


class MemoryReport:
    """One traced training step. `print(report)`, `report.print()` in colour, `report.save("step.html")`."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @property
    def peak(self) -> int:
        """The highest memory in bytes, with what was there before the step."""
        return self.trace.peak.bytes

    @property
    def saved(self) -> int:
        """Bytes saved for backward, without parameters."""
        return self.trace.saved

    @property
    def static(self) -> int:
        """Bytes in use before the step."""
        return sum(self.trace.static.values())

    @property
    def parameters(self) -> int:
        """Bytes of the parameters."""
        return views.parameters(self.trace)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients after the step."""
        return self.trace.after.get("gradients", 0)

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's state after the step."""
        return self.trace.after.get("optimizer", 0)

    @property
    def transient(self) -> int:
        """The peak minus what was there before the step: what the step itself needs."""
        return self.peak - self.static

    @property
    def duration(self) -> float:
        """Length of the step on the trace's clock: seconds or operators."""
        return self.trace.duration

    @property
    def finished(self) -> bool:
        """Whether the step ran to its end."""
        return self.trace.error is None

    def fits(self, budget: int | str) -> bool:
        """Whether the step needs at most `budget` (bytes, or "24GiB"). False for an unfinished step."""
        return self.finished and self.peak <= parse_bytes(budget, "fits")

    def module(self, name: str) -> ModuleFacts:
        """The facts of one module, by its name in named_modules(). KeyError if there is none."""
        for facts in self.trace.modules:
            if facts.name == name:
                return facts
        raise KeyError(f"the trace has no module {name!r}")

    def __repr__(self) -> str:
        return f"<MemoryReport: {self.trace.title}, peak {format_bytes(self.peak)}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, depth: int | None = None, width: int = 110) -> str:
        """The report as plain text in lines of at most `width` characters, with the modules down to `depth`.

        Without a depth, a tree of more than 120 modules is cut at the depth that leaves at most as many.
        """
        return text.plain(self.trace, depth, width)

    def print(self, depth: int | None = None, console: Any = None) -> None:
        """Prints the report in colour. Needs rich; `console` is one of its consoles."""
        try:
            from . import terminal
        except ImportError as error:
            raise ImportError(
                "report.print() needs rich: pip install rich, or pip install 'patchconv_native[report]'; "
                "print(report) does without"
            ) from error
        terminal.print_report(self.trace, depth, console)

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain data, which `from_dict` reads."""
        plain = dataclasses.asdict(dataclasses.replace(self.trace, curve=[]))
        plain["curve"] = [[time, count] for time, count in self.trace.curve]
        return {"format": FORMAT, "version": VERSION, **plain}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MemoryReport:
        """The report from the result of `to_dict`. ValueError for data of another format or version."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"this is no {FORMAT}")
        if data.get("version") != VERSION:
            raise ValueError(f"a {FORMAT} of version {data.get('version')}: this package reads version {VERSION}")
        plain = {name: value for name, value in data.items() if name not in ("format", "version")}
        plain["phases"] = [Stretch(**one) for one in plain["phases"]]
        plain["modules"] = [
            ModuleFacts(**{**one, "stretches": [Stretch(**s) for s in one["stretches"]]}) for one in plain["modules"]
        ]
        plain["peak"] = Peak(**{**plain["peak"], "held": [Held(**one) for one in plain["peak"]["held"]]})
        plain["curve"] = [(time, count) for time, count in plain["curve"]]
        return cls(Trace(**plain))

    def to_json(self, path: str | Path) -> Path:
        """Writes the whole trace, which `MemoryReport.load` reads."""
        return _write(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> MemoryReport:
        """Reads a file of `to_json`. ValueError for another file."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_csv(self, path: str | Path) -> Path:
        """Writes the memory log: a row for every stretch of a module and for every phase of the step."""
        path = Path(path)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(LOG)
            for facts, call, s in views.log(self.trace):
                if facts is None:
                    name, kind, own = "", "(step)", [self.parameters, "", "", "", self.saved, ""]
                else:
                    name, kind = facts.name or "(model)", facts.type
                    own = [facts.parameters, facts.buffers, facts.gradients, facts.optimizer]
                    own += [facts.saved, facts.own_saved]
                times = [f"{s.start:.9g}", f"{s.stop:.9g}"]
                writer.writerow([name, kind, s.phase, call, *times, s.before, s.after, s.peak, s.peak - s.before, *own])
        return path

    def to_markdown(self, path: str | Path | None = None, depth: int | None = None) -> str:
        """The report as Markdown, with the modules down to `depth`. Written to `path` if one is given."""
        made = text.markdown(self.trace, depth)
        if path is not None:
            _write(path, made)
        return made

    def to_html(self, path: str | Path) -> Path:
        """Writes a page for a browser, in one file."""
        from . import html

        return _write(path, html.page(self.trace))

    def plot(self, path: str | Path | None = None) -> Any:
        """A matplotlib figure of memory over the step. Written to `path` if one is given."""
        from . import plot

        return plot.plot(self.trace, path)

    def save(self, path: str | Path) -> Path:
        """Writes the report in the format of the suffix: .json (for `load`), .csv, .md, .html, .png, .svg or .pdf."""
        path = Path(path)
        writers: dict[str, Callable[[Path], Any]] = {
            ".json": self.to_json,
            ".csv": self.to_csv,
            ".md": self.to_markdown,
            ".html": self.to_html,
            **dict.fromkeys((".png", ".svg", ".pdf"), self.plot),
        }
        if path.suffix.lower() not in writers:
            raise ValueError(f"{path}: no report is written as {path.suffix!r}; one of {', '.join(writers)}")
        writers[path.suffix.lower()](path)
        return path


def _write(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.write_text(text, encoding="utf-8")
    return path
