"""The tables and the figure of what bench.tile_training measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .drawing import COLOURS, bare, canvas, foot, megapixels
from .measure import MIB
from .tables import Row, Section, measured_elsewhere, mib, verdict

TITLES = {
    "unet": "U-Net, batch norm in training", "frozen": "U-Net, norms frozen", "resnet": "ResNet-18 with its head",
    "decoder": "AutoencoderKL decoder with a pixel loss",
}  # fmt: skip
TARGETS = {"unet": 3.0, "frozen": 1.5}
"""Time in units of stock's, as set before it was measured."""
TEXT = (
    "One training step (forward, loss, backward), float32, NCHW, batch 1, random weights. Peak: the most that torch "
    "allocates in a step above the images, the parameters, their gradients and the loss. Process: how far the "
    "process's resident memory grew in another one, without the gradients. Time: the least of two steps, each form in "
    "a process of its own. Planning, of which the seconds are given, is done once, in a step before these. Of images "
    "above 3 megapixels there is one step, with planning and the counting of memory in it. (p): predicted, since stock "
    "does not fit. busy: other work ran on the machine meanwhile; alone it takes less time. Target: of the time, as "
    "set before it was measured."
)


def sections(data: Row) -> Iterator[Section]:
    yield Section(TEXT)
    for case in dict.fromkeys(row["case"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["case"] == case]
        error, notes = data["errors"].get(case, {}).get("tile"), [measured_elsewhere(data, case)]
        if error is not None:
            notes.append(f"Gradients in a third of stock's peak, in float64: at most {error:.1e} of each from stock's.")
        yield Section(
            "\n\n".join(filter(None, notes)),
            ["megapixels", "form", "peak, MiB", "peak, of stock's", "process, MiB", "seconds", "planning",
             "time, of stock's", "target"],
            [_line(row, next((one for one in rows if one["form"] == "stock" and one["side"] == row["side"]), {}))
             for row in rows],
            TITLES[case],
        )  # fmt: skip
    if "curves" in data:
        ends = ", ".join(f"{form} {losses[-1]:.4f}" for form, losses in data["curves"].items())
        off = max(abs(a - b) for a, b in zip(*data["curves"].values(), strict=True))
        count = len(next(iter(data["curves"].values())))
        yield Section(f"Losses after {count} steps of the U-Net on made-up images: {ends}; at most {off:.2g} apart.")


def _line(row: Row, stock: Row) -> list[str]:
    line = [f"{row['side'] ** 2 / 1e6:.2f}", row["form"] + ", busy" * row.get("busy", False)]
    if "peak" not in row:
        return [*line, row["error"], "", "", "", "", "", ""]
    line += [mib(row["peak"]) + " (p)" * row.get("predicted", False)]
    line += [f"{row['peak'] / stock['peak']:.2f}" if stock else ""]
    line += [mib(row["process"]) if "process" in row else ""]
    seconds, planning = row.get("seconds"), row.get("planning")
    of = seconds / stock["seconds"] if seconds and stock.get("seconds") else None
    wanted, target = TARGETS.get(row["case"]), ""
    if wanted is not None and "/" in row["form"] and of is not None:
        target = f"{wanted} ({verdict(of <= wanted)})"
    return [
        *line, f"{seconds:.2f}" if seconds else "", f"{planning:.1f}" if planning else "",
        "" if of is None else f"{of:.2f}", target,
    ]  # fmt: skip


def figure(data: Row) -> Any:
    """Peaks against megapixels, a panel a network, and the losses. None of a single size."""
    if "curves" not in data and len({row["side"] for row in data["rows"]}) < 2:
        return None
    cases = list(dict.fromkeys(row["case"] for row in data["rows"]))
    panels = len(cases) + ("curves" in data)
    drawn, places = canvas(1, panels, 4 * panels, 3.6)
    for axes, case in zip(places[0], cases, strict=False):
        rows = [row for row in data["rows"] if row["case"] == case and "peak" in row]
        for number, form in enumerate(dict.fromkeys(row["form"] for row in rows)):
            mine = [row for row in rows if row["form"] == form]
            axes.plot(
                [row["side"] ** 2 / 1e6 for row in mine], [row["peak"] / MIB for row in mine], marker="o", markersize=4,
                linestyle=["-", ":", "--", "-.", "-", ":"][number % 6], label=form,
                color=COLOURS["ours" if form.startswith("tile") else "stock"],
            )  # fmt: skip
        axes.set_yscale("log")
        megapixels(axes, [row["side"] ** 2 / 1e6 for row in rows])
        axes.set_title(TITLES[case], fontsize=9)
        axes.legend(fontsize=7, frameon=False)
        bare(axes)
    places[0][0].set_ylabel("peak of a step, MiB", fontsize=8)
    if "curves" in data:
        for form, losses in data["curves"].items():
            axes = places[0][-1]
            axes.plot(
                losses, label=form, color=COLOURS["stock" if form == "stock" else "ours"],
                linestyle="-" if form == "stock" else ":",
            )  # fmt: skip
        axes.set_title("Loss of the U-Net, step by step", fontsize=9)
        axes.legend(fontsize=7, frameon=False)
        bare(axes)
    foot(drawn, data)
    return drawn
