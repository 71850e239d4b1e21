"""MemoryReport: what a traced step needed, as text, as files, as pictures."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._bytes import format_bytes, parse_bytes
from . import words
from .records import Held, ModuleFacts, Peak, Stretch, Trace
from .words import Node

FORMAT = "patchconv_native memory trace"
VERSION = 1
ROWS = 120
"""Of the tree in a text, where no depth is given: below them the tree is cut at a depth."""
COLUMNS = ("parameters", "saved", "forward peak", "backward peak")
LOG = (
    *("module", "type", "phase", "call", "start", "stop", "before", "after", "peak", "rise"),
    *("parameters", "buffers", "gradients", "optimizer", "saved", "own_saved"),
)
"""The columns of the memory log; "rise" is peak less before. The last six are of the module, the same in every row."""


class MemoryReport:
    """One traced training step. `print(report)`, `report.print()` in colour, `report.save("step.html")`."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @property
    def peak(self) -> int:
        """The most memory at one moment, in bytes, with what was there before the step."""
        return self.trace.peak.bytes

    @property
    def saved(self) -> int:
        """Bytes kept for backward, without parameters."""
        return self.trace.saved

    @property
    def static(self) -> int:
        """Bytes that were there before the step."""
        return sum(self.trace.static.values())

    @property
    def parameters(self) -> int:
        """Bytes of the parameters."""
        return self.trace.static.get("parameters", 0) or words.model(self.trace).parameters

    @property
    def gradients(self) -> int:
        """Bytes of the gradients that there are after the step."""
        return self.trace.after.get("gradients", 0)

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's state after the step."""
        return self.trace.after.get("optimizer", 0)

    @property
    def transient(self) -> int:
        """The peak less what was there before the step: what the step itself needs."""
        return self.peak - self.static

    @property
    def duration(self) -> float:
        """On the trace's clock."""
        return self.trace.duration

    @property
    def finished(self) -> bool:
        """Whether the step came to its end."""
        return self.trace.error is None

    def fits(self, budget: int | str) -> bool:
        """Whether the step needs at most `budget` (bytes, or "24GiB"). A step that was not finished does not fit."""
        return self.finished and self.peak <= parse_bytes(budget, "fits")

    def module(self, name: str) -> ModuleFacts:
        """The facts of one module, by its name in named_modules()."""
        for facts in self.trace.modules:
            if facts.name == name:
                return facts
        raise KeyError(f"the trace has no module {name!r}")

    def __repr__(self) -> str:
        return f"<MemoryReport: {self.trace.title}, peak {format_bytes(self.peak)}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, depth: int | None = None, width: int = 110) -> str:
        """The report as plain text, no line longer than `width`; of the tree what lies no deeper than `depth`.

        Without a depth a tree of more than ROWS modules is cut to the depth that leaves at most as many.
        """
        lines = [words.shortened(line, width) for line in self.head()]
        trees = words.forest(self.trace)
        if not trees:
            return "\n".join(lines)
        chosen = _depth(trees) if depth is None else depth
        nodes = [node for tree in trees for node in tree.walk(chosen)]
        cells = [[format_bytes(count) if count is not None else "" for count in numbers(node.facts)] for node in nodes]
        widths = [max(len(title), *(len(row[i]) for row in cells)) for i, title in enumerate(COLUMNS)]
        left = max(12, width - sum(widths) - 2 * len(widths))
        kinds = min(max(len("type"), *(len(node.facts.type) for node in nodes)), left // 3)
        names = min(max(len("module"), *(2 * node.depth + len(node.label) for node in nodes)), left - kinds - 2)

        def line(name: str, kind: str, row: list[str] | tuple[str, ...]) -> str:
            columns = "".join(f"  {cell:>{columns}}" for cell, columns in zip(row, widths, strict=True))
            return f"{name:<{names}}  {words.shortened(kind, kinds):<{kinds}}{columns}".rstrip()

        lines += ["", line("module", "type", COLUMNS)]
        for node, row in zip(nodes, cells, strict=True):
            indent = " " * min(2 * node.depth, names - min(len(node.label), 12))
            lines.append(line(indent + words.shortened(node.label, names - len(indent)), node.facts.type, row))
        if left_out := len(self.trace.modules) - len(nodes):
            lines.append(f"{left_out:,} modules lie deeper: text(depth=...) shows them")
        return "\n".join(lines)

    def head(self) -> Iterator[str]:
        """What stands above the tree."""
        trace = self.trace
        yield f"{trace.title or 'one step'} ({words.setting(trace)})"
        if trace.error:
            yield f"not finished: {trace.error.strip().partition(chr(10))[0]}"
            yield "what follows is as far as it came"
        yield f"peak    {format_bytes(self.peak)} at {words.moment(trace, trace.peak.time)}: {words.where(trace.peak)}"
        yield f"saved   {format_bytes(trace.saved)} for backward"
        for name, table in (("before", trace.static), ("after", trace.after)):
            if any(table.values()):
                listed = ", ".join(f"{kind} {format_bytes(table[kind])}" for kind in words.kinds(table))
                yield f"{name:<8}{format_bytes(sum(table.values()))}: {listed}"
        shown, rest, count = words.grouped(trace.peak.held, 8)
        if shown:
            yield "alive at the peak:"
        for one in shown:
            times = f" ({one.count} tensors)" if one.count > 1 else ""
            by = ", ".join(word for word in (one.operator, one.phase) if word)
            yield f"  {format_bytes(one.bytes):>9}  {one.module or words.OUTSIDE}: {by}{times}"
        if count:
            yield f"  {format_bytes(rest):>9}  in {count:,} more rows"
        for note in trace.notes:
            yield f"note: {' '.join(note.split())}"

    def print(self, depth: int | None = None, console: Any = None) -> None:
        """The report in colour, by rich (`console`: one of its consoles)."""
        try:
            from . import coloured
        except ImportError as error:
            raise ImportError(
                "report.print() needs rich: pip install rich, or pip install 'patchconv_native[report]'; "
                "print(report) does without"
            ) from error
        coloured.show(self, depth, console)

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain data; `from_dict` makes the report again."""
        plain = dataclasses.asdict(dataclasses.replace(self.trace, curve=[]))
        plain["curve"] = [[time, count] for time, count in self.trace.curve]
        return {"format": FORMAT, "version": VERSION, **plain}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MemoryReport:
        """The report of what `to_dict` gave."""
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
        """Writes all of the trace; `MemoryReport.load` reads it."""
        return _write(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> MemoryReport:
        """The report that `to_json` wrote."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_csv(self, path: str | Path) -> Path:
        """Writes the memory log: a row for every stay in a module or, without module, in a phase of the step."""
        path = Path(path)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(LOG)
            for facts, call, s in words.log(self.trace):
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
        """The report as Markdown, written to `path` if there is one."""
        head = list(self.head())
        lines = [f"**{_cell(head[0])}**", "", *(f"- {_cell(line.strip())}" for line in head[1:]), ""]
        lines += ["| module | type | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * len(COLUMNS)]
        for node in (node for tree in words.forest(self.trace) for node in tree.walk(depth)):
            row = " | ".join(format_bytes(count) if count is not None else "" for count in numbers(node.facts))
            lines.append(f"| {'&emsp;' * node.depth}{_cell(node.label)} | {_cell(node.facts.type)} | {row} |")
        text = "\n".join(lines) + "\n"
        if path is not None:
            _write(path, text)
        return text

    def to_html(self, path: str | Path) -> Path:
        """Writes one page that needs nothing else, to open in a browser."""
        from . import html

        return _write(path, html.page(self))

    def plot(self, path: str | Path | None = None) -> Any:
        """A matplotlib figure of memory over the step, written to `path` if there is one."""
        from . import plot

        return plot.plot(self, path)

    def save(self, path: str | Path) -> Path:
        """Writes the report as the suffix says: .json (which `load` reads), .csv, .md, .html, .png, .svg or .pdf."""
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


def numbers(facts: ModuleFacts) -> tuple[int | None, ...]:
    """A module's values in COLUMNS."""
    return facts.parameters, facts.saved, words.peak_of(facts, "forward"), words.peak_of(facts, "backward")


def _depth(trees: list[Node]) -> int | None:
    """The depth down to which there are at most ROWS modules; at least 1."""
    depths = sorted(node.depth for tree in trees for node in tree.walk())
    return None if len(depths) <= ROWS else max(1, depths[ROWS] - 1)


def _cell(text: str) -> str:
    """A text that Markdown shows as it is, in a cell of a table too."""
    for sign in "\\`*_[]|~":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _write(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.write_text(text, encoding="utf-8")
    return path
