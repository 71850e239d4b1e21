"""A report in a terminal, in colour. Needs rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._bytes import format_bytes
from . import words

if TYPE_CHECKING:
    from .report import MemoryReport

SHADES = ("grey50", "default", "yellow", "bold red")
"""Of a share of the step's largest, from none to nearly all."""


WIDE = 90
"""Columns of a terminal that has room for bars."""


def show(report: MemoryReport, depth: int | None, console: Console | None) -> None:
    """Prints the head and the tree."""
    console = console or Console(highlight=False)
    first, *rest = report.head()
    console.print(Text(words.flat(first), style="bold"))
    for line in map(words.flat, rest):
        key, gap, value = line.partition(" ")
        if key in ("peak", "saved", "before", "after"):
            text = Text.assemble((key, "cyan"), gap, (value, "bold" if key == "peak" else ""))
        else:
            text = Text(line, style={"not": "bold red", "note:": "dim"}.get(key, ""))
        console.print(text, overflow="ellipsis", no_wrap=key not in ("not", "note:"))
    trees = words.forest(report.trace)
    if trees:
        console.print(_tree(report, trees, depth, console.width))


def _tree(report: MemoryReport, trees: list[words.Node], depth: int | None, width: int) -> Table:
    from .report import COLUMNS, _depth, numbers

    chosen = _depth(trees) if depth is None else depth
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="cyan")
    nodes = [node for tree in trees for node in tree.walk(chosen)]
    bars = width >= WIDE
    room = width - (70 if bars else 54)  # what numbers, bars and the gaps between columns leave
    kinds = max(len(words.flat(node.facts.type)) for node in nodes)
    names = max(8, min(max(3 * node.depth + len(node.label) for node in nodes), room - min(kinds, max(room // 3, 6))))
    table.add_column("module", no_wrap=True, overflow="ellipsis", max_width=names)
    table.add_column("type", no_wrap=True, overflow="ellipsis", style="dim", max_width=max(4, room - names))
    for title in COLUMNS:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True, min_width=8)
    if bars:
        table.add_column("saved by\nits own code", no_wrap=True, min_width=12)
    most = max((facts.own_saved for facts in report.trace.modules), default=0)
    largest = [max((numbers(f)[i] or 0 for f in report.trace.modules), default=0) for i in range(len(COLUMNS))]
    stack = [(tree, "", "") for tree in reversed(trees)]
    while stack:
        node, lead, below = stack.pop()
        cells = [_shaded(count, top) for count, top in zip(numbers(node.facts), largest, strict=True)]
        if bars:
            cells.append(Text("█" * round(12 * node.facts.own_saved / most) if most else "", style="cyan"))
        name = Text.assemble((lead, "dim"), (words.flat(node.label), "bold" if node.children else ""))
        table.add_row(name, Text(words.flat(node.facts.type)), *cells)
        inside = node.children if chosen is None or node.depth < chosen else []
        for index, child in reversed(list(enumerate(inside))):
            last = index == len(inside) - 1
            stack.append((child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")))
    return table


def _shaded(count: int | None, most: int) -> Text:
    if count is None:
        return Text("")
    share = count / most if most else 0
    return Text(format_bytes(count), style=SHADES[(share > 0) + (share > 0.5) + (share > 0.9)])
