"""The table and the figure of what bench.megapixels measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .drawing import COLOURS, bare, canvas, foot
from .measure import GIB
from .tables import Row, Section, mib


def sections(data: Row) -> Iterator[Section]:
    losses, seconds = data["losses"], data["seconds"]
    process, libraries, later = data["process"], data["libraries"], statistics.median(seconds[1:])
    yield Section(
        f"`examples/train_megapixels.py` on images of {data['side']}x{data['side']}, {data['side'] ** 2 / 1e6:.0f} "
        f"megapixels, each a new one, with a budget of {data['budget']}. The process held {mib(process)} MiB at most, "
        f"of which it holds {mib(libraries)} with tiny images too; {mib(process - libraries)} MiB are images and what "
        f"training takes. One step of stock needs {mib(data['stock'])} MiB above images and parameters (predicted). "
        f"The first step, with planning, took {seconds[0]:.0f} s, the others {later:.0f} (median)."
    )
    yield Section(
        "Another image, where its discs are, and what the network says of it then:\n\n![discs](megapixels_discs.jpg)",
        ["step", "loss", "seconds"],
        [[str(k), f"{loss:.4f}", f"{t:.1f}"] for k, (loss, t) in enumerate(zip(losses, seconds, strict=True))],
    )


def figure(data: Row) -> Any:
    drawn, places = canvas(1, 1, 6, 3.2)
    axes = places[0][0]
    axes.plot(data["losses"], marker="o", markersize=4, color=COLOURS["ours"])
    axes.set_yscale("log")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("cross entropy", fontsize=8)
    axes.set_xticks(range(0, len(data["losses"]), 5))
    axes.tick_params(labelsize=7)
    grown = (data["process"] - data["libraries"]) / GIB
    title = f"{data['side'] ** 2 / 1e6:.0f} megapixels a step; the process grew by {grown:.2f} GiB"
    axes.set_title(title, fontsize=9)
    bare(axes)
    foot(drawn, data)
    return drawn
