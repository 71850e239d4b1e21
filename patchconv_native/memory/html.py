"""A report as one page of HTML. Style and script are in the file; nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .._bytes import format_bytes
from . import labels, views
from .chart import Chart
from .records import PHASES, ModuleFacts, Trace
from .views import Node

HERE = Path(__file__).parent
OPEN_ROWS = 60
"""A larger tree is closed below the model's children at first."""
HELD = 40
"""Rows of what was alive at the peak."""
OPERATORS = 25
"""Rows of what is saved, by operator."""
TREE = (
    ("parameters", "of the module and all inside it"),
    ("saved", "saved for backward by what ran inside it, each storage once"),
    ("own saved", "of that, what its own code saved, not the modules inside it"),
    ("forward peak", "the highest memory during its forward pass, everything counted"),
    ("backward peak", "the same during its backward pass, with what a checkpoint recomputes"),
    ("rise", "the largest difference between its peak and the memory when it began"),
    ("calls", "forward passes, without those that a checkpoint recomputes"),
)


def page(trace: Trace) -> str:
    """The whole page."""
    title = escape(trace.title or "Memory of one step")
    nodes = [node for tree in views.forest(trace) for node in tree.walk()]
    chart = Chart(trace)
    body = "\n".join(
        [
            f"<header><h1>{title}</h1><p>{escape(labels.setting(trace))}</p></header>",
            _notes(trace),
            _cards(trace),
            f'<section><h2>Memory over the step</h2><div class="chart" id="chart">{chart.svg()}'
            '<div class="readout" id="readout" hidden></div></div></section>',
            _held(trace),
            _modules(nodes),
            '<div class="pair">',
            _operators(trace),
            _static(trace),
            "</div>",
        ]
    )
    data = json.dumps(_data(trace, nodes, chart), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_file('page.css')}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="data">{data}</script>\n<script>\n{_file("page.js")}</script>\n'
        "</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _data(trace: Trace, nodes: list[Node], chart: Chart) -> dict[str, Any]:
    """What the script reads: the chart's scales and curve, and every stretch as (module, phase, start, stop)."""
    every = [s.phase for node in nodes for s in node.facts.stretches] + [s.phase for s in trace.phases]
    phases = list(dict.fromkeys([*PHASES, *every]))
    stretches: list[list[float]] = []
    for index, node in enumerate(nodes):
        for s in node.facts.stretches:
            stretches.append([index, phases.index(s.phase), _rounded(s.start), _rounded(s.stop)])
    whole = [[phases.index(s.phase), _rounded(s.start), _rounded(s.stop)] for s in trace.phases]
    return {
        "clock": trace.clock,
        "plot": [chart.left, chart.right, chart.top, chart.bottom],
        "times": [chart.first, chart.last],
        "most": chart.most,
        "curve": [[_rounded(time), count] for time, count in chart.curve],
        "phases": phases,
        "whole": whole,
        "stretches": stretches,
    }


def _rounded(time: float) -> float:
    return float(f"{time:.7g}")


def _notes(trace: Trace) -> str:
    """The error and the notes."""
    parts = []
    if trace.error:
        parts.append(
            '<aside class="error" role="alert"><strong>The step was not finished.</strong> '
            f"What follows is as far as it came.<pre>{escape(trace.error.strip())}</pre></aside>"
        )
    if trace.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in trace.notes)
        parts.append(f'<aside class="notes"><ul>{notes}</ul></aside>')
    return "\n".join(parts)


def _cards(trace: Trace) -> str:
    peak, parameters = trace.peak.bytes, views.parameters(trace)
    cards = [
        ("peak", format_bytes(peak), f"{labels.moment(trace, trace.peak.time)}: {labels.where(trace.peak)}"),
        ("saved for backward", format_bytes(trace.saved), _share(trace.saved, peak)),
        ("parameters", format_bytes(parameters), _share(parameters, peak)),
        ("before the step", format_bytes(sum(trace.static.values())), ", ".join(views.static_kinds(trace.static))),
    ]
    if trace.after:
        after = format_bytes(sum(trace.after.values()))
        cards.append(("after the step", after, ", ".join(views.static_kinds(trace.after))))
    length = f"{trace.duration:,.0f} operators" if trace.clock == "operators" else labels.moment(trace, trace.duration)
    cards.append(("length", length, f"{len(trace.modules):,} modules"))
    body = "".join(
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>'
        for name, value, more in cards
    )
    return f'<div class="cards">{body}</div>'


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} % of the peak" if whole else ""


def _number(count: int | None, most: int, text: str | None = None) -> str:
    """A cell with its value for sorting, and a bar."""
    if count is None:
        return '<td data-v="-1"></td>'
    bar = f' style="--w:{100 * count / most:.3g}"' if most and count > 0 else ""
    return f'<td data-v="{count}"{bar}>{format_bytes(count) if text is None else text}</td>'


def _values(facts: ModuleFacts) -> tuple[int | None, ...]:
    """A module's values for TREE, without the calls."""
    rise = max((s.peak - s.before for s in facts.stretches), default=None)
    peaks = views.peak_of(facts, "forward"), views.peak_of(facts, "backward")
    return facts.parameters, facts.saved, facts.own_saved, *peaks, rise


def _modules(nodes: list[Node]) -> str:
    if not nodes:
        return "<section><h2>Modules</h2><p>The trace has none.</p></section>"
    values = [_values(node.facts) for node in nodes]
    most = [max((row[i] or 0 for row in values), default=0) for i in range(len(TREE) - 1)]
    rows = []
    for node, row in zip(nodes, values, strict=True):
        name = escape(node.facts.name)
        toggle = '<button class="twist" aria-expanded="true" aria-label="what is inside"></button>'
        cells = "".join(_number(count, top) for count, top in zip(row, most, strict=True))
        calls = sum(s.phase == "forward" for s in node.facts.stretches)
        rows.append(
            f'<tr data-depth="{node.depth}" data-name="{name}"><th scope="row" title="{name}" style="--d:{node.depth}">'
            f"{toggle if node.children else '<i></i>'}<span>{escape(node.label)}</span></th>"
            f"<td>{escape(node.facts.type)}</td>{cells}{_number(calls, 0, f'{calls:,}')}</tr>"
        )
    heads = "".join(
        f'<th scope="col" aria-sort="none" title="{escape(meaning)}"><button>{escape(name)}</button></th>'
        for name, meaning in (("module", "by name"), ("type", "by type"), *TREE)
    )
    closed = 1 if len(nodes) > OPEN_ROWS else -1
    return (
        '<section><h2>Modules</h2><div class="tools"><input type="search" id="filter" '
        'placeholder="find a module or a type" aria-label="find a module or a type">'
        '<button id="open">open all</button><button id="close">close all</button></div>'
        f'<div class="scroll"><table id="tree" data-closed="{closed}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _table(title: str, lead: str, heads: Sequence[str], rows: Iterable[str], name: str) -> str:
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    return (
        f'<section><h2>{escape(title)}</h2><p>{escape(lead)}</p><div class="scroll low"><table id="{name}"><thead>'
        f"<tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _held(trace: Trace) -> str:
    rows_held, rest, count = views.largest(trace.peak.held, HELD)
    if not rows_held:
        return ""
    most = max(one.bytes for one in rows_held)
    rows = [
        f'<tr><th scope="row">{escape(one.module or labels.OUTSIDE)}</th><td>{escape(one.operator)}</td>'
        f"<td>{escape(one.phase)}</td>{_number(one.bytes, most)}{_number(one.count, 0, f'{one.count:,}')}</tr>"
        for one in rows_held
    ]
    if count:
        rows.append(
            f'<tr class="rest"><th scope="row">{count:,} more</th><td></td><td></td>{_number(rest, 0)}<td></td></tr>'
        )
    lead = f"{format_bytes(trace.peak.bytes)} at {labels.moment(trace, trace.peak.time)}, by who allocated it."
    heads = ("module", "operator", "phase", "bytes", "tensors")
    return _table("Alive at the peak", lead, heads, rows, "held")


def _operators(trace: Trace) -> str:
    found = dict(views.model(trace).saved_by)
    if outside := trace.saved - sum(found.values()):
        found["(outside of the model)"] = found.get("(outside of the model)", 0) + outside
    ordered = sorted(((name, count) for name, count in found.items() if count > 0), key=lambda row: -row[1])
    if not ordered:
        return ""
    if rest := ordered[OPERATORS:]:
        ordered = [*ordered[:OPERATORS], (f"{len(rest):,} more", sum(count for _, count in rest))]
    rows = [f'<tr><th scope="row">{escape(name)}</th>{_number(count, ordered[0][1])}</tr>' for name, count in ordered]
    lead = f"{format_bytes(trace.saved)} saved for backward, by the operator that saved it."
    return _table("Saved, by operator", lead, ("operator", "bytes"), rows, "operators")


def _static(trace: Trace) -> str:
    names = views.static_kinds(trace.static, trace.after)
    if not names:
        return ""
    most = max(max(trace.static.get(name, 0), trace.after.get(name, 0)) for name in names)
    rows = [
        f'<tr><th scope="row">{escape(name)}</th>{_number(trace.static.get(name, 0), most)}'
        f"{_number(trace.after.get(name, 0), most)}</tr>"
        for name in names
    ]
    before, after = (sum(table.values()) for table in (trace.static, trace.after))
    rows.append(f'<tr class="rest"><th scope="row">in all</th>{_number(before, 0)}{_number(after, 0)}</tr>')
    lead = "Memory in use when the step began, and when it was over."
    return _table("Before and after", lead, ("", "before", "after"), rows, "static")
