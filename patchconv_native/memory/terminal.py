"""A report in a terminal, in colour, by rich."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._bytes import format_bytes
from . import views
from .labels import flat
from .records import Trace
from .text import head
from .views import COLUMNS, Node

SHADES = ("grey50", "default", "yellow", "bold red")
"""Styles of a number by its share of the column's largest: zero, up to half, up to 0.9, more."""
WIDE = 90
"""Columns of a terminal that has room for bars."""


def print_report(trace: Trace, depth: int | None, console: Console | None) -> None:
    """Prints the report: the lines of `head`, then the tree of modules."""
    console = console or Console(highlight=False)
    first, *rest = head(trace)
    console.print(Text(flat(first), style="bold"))
    for line in map(flat, rest):
        key, gap, value = line.partition(" ")
        if key in ("peak", "saved", "before", "after"):
            text = Text.assemble((key, "cyan"), gap, (value, "bold" if key == "peak" else ""))
        else:
            text = Text(line, style={"not": "bold red", "note:": "dim"}.get(key, ""))
        console.print(text, overflow="ellipsis", no_wrap=key not in ("not", "note:"))
    trees = views.forest(trace)
    if trees:
        console.print(_tree(trace, trees, depth, console.width))


def _tree(trace: Trace, trees: list[Node], depth: int | None, width: int) -> Table:
    chosen = views.fitting_depth(trees) if depth is None else depth
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="cyan")
    nodes = [node for tree in trees for node in tree.walk(chosen)]
    bars = width >= WIDE
    room = width - (70 if bars else 54)  # without the numbers, the bars and the gaps between columns
    kinds = max(len(flat(node.facts.type)) for node in nodes)
    names = max(8, min(max(3 * node.depth + len(node.label) for node in nodes), room - min(kinds, max(room // 3, 6))))
    table.add_column("module", no_wrap=True, overflow="ellipsis", max_width=names)
    table.add_column("type", no_wrap=True, overflow="ellipsis", style="dim", max_width=max(4, room - names))
    for title in COLUMNS:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True, min_width=8)
    if bars:
        table.add_column("saved by\nits own code", no_wrap=True, min_width=12)
    most = max((facts.own_saved for facts in trace.modules), default=0)
    top = [max((views.numbers(f)[i] or 0 for f in trace.modules), default=0) for i in range(len(COLUMNS))]
    stack = [(tree, "", "") for tree in reversed(trees)]
    while stack:
        node, lead, below = stack.pop()
        cells = [_shaded(count, highest) for count, highest in zip(views.numbers(node.facts), top, strict=True)]
        if bars:
            cells.append(Text("█" * round(12 * node.facts.own_saved / most) if most else "", style="cyan"))
        name = Text.assemble((lead, "dim"), (flat(node.label), "bold" if node.children else ""))
        table.add_row(name, Text(flat(node.facts.type)), *cells)
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
