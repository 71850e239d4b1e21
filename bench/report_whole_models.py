"""The tables of what bench.whole_models measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .tables import Row, Section, measured_elsewhere, mib, spread

TITLES = {
    "stock": "stock",
    "channels_last": "stock, channels_last",
    "layers": "`pc.convert(model, functional=False)`",
    "convert": "`pc.convert(model)`",
    "convert, channels_last": "`pc.convert(model)`, channels_last",
    "diffusers' tiling": "diffusers' `enable_tiling()`, stock",
    "torch checkpoints": "torch.utils.checkpoint around the blocks, stock",
    "pc checkpoints": "`pc.checkpoint_modules` of the blocks",
    "convert, pc checkpoints": "`pc.convert(model)` and `pc.checkpoint_modules`",
    "plan": "`pc.plan`",
    "compiled": "`torch.compile(model)`, stock",
    "compiled, half of the memory": "`torch.compile(model)`, activation_memory_budget = 0.5, stock",
    "tile": "`pc.tile_modules(model)`",
    "tile, channels_last": "`pc.tile_modules(model)`, channels_last",
    "tile, 64MiB": '`pc.tile_modules(model, budget="64MiB")`',
    "tile, 128MiB": '`pc.tile_modules(model, budget="128MiB")`',
    "tile, 512MiB": '`pc.tile_modules(model, budget="512MiB")`',
}
TEXT = (
    "Float32, random weights, batch 1 unless noted. Peak: the most that torch allocates in a call above what was there "
    "before it (parameters, input), without the result; gradients count. Process: how far the process's resident "
    "memory grew in the same call, the C library's heap included. A training step is the mean square of the outputs, "
    "backward and SGD. Error: root mean square of the difference from stock's "
    "result, and its largest element, in units of the result's own; zero is the same bits. Gradients of converted "
    "models are compared in lean_error.md."
)


SHORT = (
    "In units of stock's on the same machine: peak / process / time. Stock's own are in MiB and seconds. Below, each "
    "model's table names its machine where that is another one."
)
PLANNED = ("plan", "tile")
"""What is shown as planned: of training steps, and without gradients."""


def sections(data: Row) -> Iterator[Section]:
    yield Section(TEXT)
    yield short(data)
    for what, group in itertools.groupby(data["rows"], key=lambda row: row["what"]):
        rows = list(group)
        notes = [measured_elsewhere(data, rows[0]["case"])]
        notes += [f"{TITLES[row['form']]}: {row['note']}." for row in rows if row.get("note")]
        head = ["form", "peak, MiB", "of stock's", "process, MiB", "of stock's"]
        head += ["error, rms", "error, most"] * ("error" in rows[0]) + ["ms", "of stock's"] * ("ms" in rows[0])
        yield Section("\n\n".join(filter(None, notes)), head, [_line(row, rows[0]) for row in rows], what)


def short(data: Row) -> Section:
    """A line a model."""
    lines = []
    for what, group in itertools.groupby(data["rows"], key=lambda row: row["what"]):
        rows = {row["form"]: row for row in group}
        stock = rows["stock"]
        seconds = f" / {stock['ms']['median'] / 1e3:.1f}" if "ms" in stock else ""
        line = [what, f"{mib(stock['peak'])} / {mib(stock['process'])}{seconds}"]
        converted = "convert" if "convert" in rows else "layers"
        planned = next((form for form in PLANNED if form in rows), "")
        for form in ("channels_last", converted, planned):
            line.append(_shares(rows[form], stock) if "peak" in rows.get(form, {}) else "")
        lines.append(line)
    head = ["model", "stock", "stock, channels_last", "converted", "planned, or in tiles"]
    return Section(SHORT, head, lines, "In short")


def _shares(row: Row, stock: Row) -> str:
    shares = [row[key] / stock[key] for key in ("peak", "process")]
    shares += [row["ratio"]["median"]] if row.get("ratio") else []
    return " / ".join(f"{share:.2f}" for share in shares)


def _line(row: Row, stock: Row) -> list[str]:
    line = [TITLES[row["form"]]]
    if "peak" not in row:
        return [*line, row["error"]]
    for key in ("peak", "process"):
        line += [mib(row[key]), f"{row[key] / stock[key]:.2f}"]
    if "error" in row:
        line += [f"{row['error'][key]:.1e}" for key in ("rms", "most")]
    if "ms" in row:
        ratio = row["ratio"] or {"median": 1, "least": 1, "most": 1}
        line += [spread(row["ms"], 0), spread(ratio)]
    return line
