"""A report as plain text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from .._bytes import format_bytes
from . import labels, views
from .labels import shortened
from .records import Trace
from .views import COLUMNS, Node

ALIVE = 8
"""Rows of what was alive at the peak."""


def head(trace: Trace) -> Iterator[str]:
    """The lines above the tree."""
    yield f"{trace.title or 'one step'} ({labels.setting(trace)})"
    if trace.error:
        yield f"not finished: {trace.error.strip().partition(chr(10))[0]}"
        yield "what follows is as far as it came"
    peak = trace.peak
    yield f"peak    {format_bytes(peak.bytes)} at {labels.moment(trace, peak.time)}: {labels.where(peak)}"
    yield f"saved   {format_bytes(trace.saved)} for backward"
    for name, table in (("before", trace.static), ("after", trace.after)):
        if any(table.values()):
            listed = ", ".join(f"{kind} {format_bytes(table[kind])}" for kind in views.static_kinds(table))
            yield f"{name:<8}{format_bytes(sum(table.values()))}: {listed}"
    rows, rest, count = views.largest(peak.held, ALIVE)
    if rows:
        yield "alive at the peak:"
    for row in rows:
        times = f" ({row.count} tensors)" if row.count > 1 else ""
        by = ", ".join(part for part in (row.operator, row.phase) if part)
        yield f"  {format_bytes(row.bytes):>9}  {row.module or labels.OUTSIDE}: {by}{times}"
    if count:
        yield f"  {format_bytes(rest):>9}  in {count:,} more rows"
    for note in trace.notes:
        yield f"note: {' '.join(note.split())}"


def _cells(node: Node) -> list[str]:
    """A module's numbers as text."""
    return [format_bytes(count) if count is not None else "" for count in views.numbers(node.facts)]


def plain(trace: Trace, depth: int | None, width: int) -> str:
    """The report in lines of at most `width` characters."""
    lines = [shortened(line, width) for line in head(trace)]
    trees = views.forest(trace)
    if not trees:
        return "\n".join(lines)
    chosen = views.fitting_depth(trees) if depth is None else depth
    nodes = [node for tree in trees for node in tree.walk(chosen)]
    cells = [_cells(node) for node in nodes]
    widths = [max(len(title), *(len(row[i]) for row in cells)) for i, title in enumerate(COLUMNS)]
    left = max(12, width - sum(widths) - 2 * len(widths))
    kinds = min(max(len("type"), *(len(node.facts.type) for node in nodes)), left // 3)
    names = min(max(len("module"), *(2 * node.depth + len(node.label) for node in nodes)), left - kinds - 2)

    def line(name: str, kind: str, row: list[str] | tuple[str, ...]) -> str:
        columns = "".join(f"  {cell:>{columns}}" for cell, columns in zip(row, widths, strict=True))
        return f"{name:<{names}}  {shortened(kind, kinds):<{kinds}}{columns}".rstrip()

    lines += ["", line("module", "type", COLUMNS)]
    for node, row in zip(nodes, cells, strict=True):
        indent = " " * min(2 * node.depth, names - min(len(node.label), 12))
        lines.append(line(indent + shortened(node.label, names - len(indent)), node.facts.type, row))
    if left_out := len(trace.modules) - len(nodes):
        lines.append(f"{left_out:,} modules lie deeper: text(depth=...) shows them")
    return "\n".join(lines)


def markdown(trace: Trace, depth: int | None) -> str:
    """The report as a list and a table of modules."""
    first, *rest = head(trace)
    lines = [f"**{markdown_cell(first)}**", "", *(f"- {markdown_cell(line.strip())}" for line in rest), ""]
    lines += ["| module | type | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * len(COLUMNS)]
    for node in (node for tree in views.forest(trace) for node in tree.walk(depth)):
        name = f"{'&emsp;' * node.depth}{markdown_cell(node.label)}"
        lines.append(f"| {name} | {markdown_cell(node.facts.type)} | {' | '.join(_cells(node))} |")
    return "\n".join(lines) + "\n"


def markdown_cell(text: str) -> str:
    """The text with Markdown's special characters escaped, also for a cell of a table."""
    for sign in "\\`*_[]|~":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
