"""Tables and the figure of what bench.lean, bench.lean_error and bench.lean_speed measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .drawing import COLOURS, FLOOR, bars, canvas, foot, legend
from .tables import Row, Section, mib, spread, verdict

LEAN_COLOURS = {"memsave": "#e0a030", "layers": "#7fb2dc", "convert": "#1f6fb4"}
NAMES = {"memsave": "memsave_torch", "layers": "convert(model, functional=False)", "convert": "convert(model)"}
WAYS = {
    "held": "MiB alive with the graph after the forward pass",
    "forward": "Peak of the forward pass, MiB above what was there before",
    "step": "Peak of forward and backward, gradients of parameters included, MiB above what was there before",
}


def lean(data: Row) -> Iterator[Section]:
    yield Section(
        f"Batch 2, {data['side']} squared, all trained. MiB alive with the graph; the rest in units of stock's.",
        ["model", "stock MiB", "layers alone", "convert", "by hooks: layers alone", "convert", "floor",
         "<= 1.03 floors"],
        [[row["model"], _stock(row), _share(row, "layers"), _share(row, "convert"), _share(row, "layers", "saved"),
          _share(row, "convert", "saved"), row["floor"], _floor_met(row)] for row in data["floors"]],
    )  # fmt: skip
    cases = data["cases"]
    sides = [side for side in LEAN_COLOURS if all(side in row for row in cases)]
    for way, title in WAYS.items() if cases else ():
        yield Section(
            f"The cases of memsave's paper, by what is trained. {title}; the rest in units of stock's.",
            ["model", "batch", "trained", "stock MiB", *sides],
            [[row["model"], row["batch"], row["case"], _stock(row, way), *(_share(row, side, way) for side in sides)]
             for row in cases],
        )  # fmt: skip
    if data["toy"]:
        yield Section(
            "Ten convolutions, the fourth trained: peak of a step above its input, MiB.",
            list(data["toy"]),
            [[form.get("error") or mib(form["peak"]) for form in data["toy"].values()]],
        )


def _stock(row: Row, way: str = "held") -> str:
    return row["stock"].get("error") or mib(row["stock"][way], 1)


def _share(row: Row, form: str, way: str = "held") -> str:
    if any("error" in row[side] for side in ("stock", form)):
        return str(row[form].get("error", row["stock"].get("error")))
    return f"{row[form][way] / max(1, row['stock'][way]):.3f}"


def _floor_met(row: Row) -> str:
    if any("error" in row[form] for form in ("stock", "layers", "convert")):
        return ""
    least = min(row[form]["held"] for form in ("layers", "convert"))
    return verdict(least <= 1.03 * row["floor"] * row["stock"]["held"])


def lean_figure(data: Row) -> Any:
    """Bars of what training keeps, in units of stock's: models, and the cases of memsave's paper."""
    panels = [([(row["model"], row) for row in data["floors"]], "everything trained, batch 2", True)]
    cases = [row for row in data["cases"] if row["batch"] == max(r["batch"] for r in data["cases"])]
    if cases:
        named = [(f"{row['model']}\n{row['case']}", row) for row in cases]
        panels.append((named, f"memsave's cases, batch {cases[0]['batch']}", False))
    longest = max(len(rows) for rows, _, _ in panels)
    figure, axes = canvas(1, len(panels), 5.2 * len(panels), 1.2 + 0.52 * longest)
    for ax, (rows, title, floors) in zip(axes[0], panels, strict=True):
        for place, (_, row) in enumerate(rows):
            sides = [side for side in LEAN_COLOURS if side in row and "error" not in row[side]]
            for line, side in enumerate(sides):
                value = row[side]["held"] / row["stock"]["held"]
                at = place + (line - (len(sides) - 1) / 2) * 0.28
                ax.barh(at, value, 0.26, color=LEAN_COLOURS[side])
                # Not on the line of the floor: behind it.
                behind = floors and value - 0.01 < row["floor"] < value + 0.08
                ax.text(max(value, row["floor"]) if behind else value, at, f" {value:.2f}", va="center", fontsize=6)
            if floors:
                ax.plot([row["floor"]] * 2, [place - 0.42, place + 0.42], color=FLOOR, lw=1.1)
        ax.axvline(1, color=COLOURS["stock"], lw=1, ls=":")
        ax.set_title(title, fontsize=9)
        line_is = " (line: the floor aimed at)" if floors else ""
        bars(ax, [name for name, _ in rows], f"bytes kept for backward / stock's{line_is}")
    used = [side for side in LEAN_COLOURS if any(side in row for rows, _, _ in panels for _, row in rows)]
    legend(figure, {NAMES[side]: LEAN_COLOURS[side] for side in used})
    foot(figure, data)
    return figure


def lean_error(data: Row) -> Iterator[Section]:
    lines = []
    for row in data["rows"]:
        cells = [row["model"], f"{row['median']['stock']:.2e}"]
        for form in ("layers", "convert"):
            each = zip(row["errors"][form], row["errors"]["stock"], strict=True)
            ratio = row["median"][form] / row["median"]["stock"]
            cells.append(f"{ratio:.2f} ({', '.join(f'{a / b:.2f}' for a, b in each)})")
        lines.append([*cells, verdict(row["met"]), "yes" if row["same_without_recompute"] else "NO"])
    yield Section(
        "Error of all parameters' gradients, relative to stock's in float64: median of the pictures, and in units of "
        "stock's in float32 (each picture's).",
        ["model", "stock", "layers alone", "convert", f"<= {data['target']}",
         "same bits without recompute"],
        lines,
    )  # fmt: skip


def lean_speed(data: Row) -> Iterator[Section]:
    yield Section(
        "Training steps: median (least to most) of paired rounds, and in units of stock's time.",
        ["model", "batch", "layout", "stock ms", "layers alone", f"<= {data['target']}", "convert", "",
         "rounds"],
        [[row["model"], row["batch"], row["layout"], spread(row["ms"]["stock"], 0), spread(row["ratio"]["layers"], 3),
          verdict(row["met"]["layers"]), spread(row["ratio"]["convert"], 3), verdict(row["met"]["convert"]),
          row["rounds"]] for row in data["steps"]],
    )  # fmt: skip
    yield Section(
        "ReLU with a packed mask, GB moved a second; the copy is `clone()` of the same tensor, or `copy_`.",
        ["pass", "MiB", "copy", "ours", "stock", "ours / copy", f">= {data['rate']}"],
        [[row["pass"], row["mib"], *(row["gb_s"][side] for side in ("copy", "ours", "stock")), row["rate"],
          verdict(row["met"])] for row in data["relu"]],
    )  # fmt: skip
