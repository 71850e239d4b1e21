"""The tables of what bench.tile_ranks measured."""

from __future__ import annotations

from collections.abc import Iterator

from .report_tile_training import TITLES
from .tables import Row, Section, mib, verdict

TEXT = (
    "One training step (forward, loss, backward), float32, NCHW, batch 1, random weights: stock's on one process, "
    "which has all cores, the others' on two ranks, each of which has half of the image's rows and half of the cores. "
    "Peak: the most that torch allocates in a step above the image, the parameters, their gradients and the loss; "
    "the largest rank's. Budget: of each rank, a half or a quarter of the peak of `spatial`. Time: the least of three "
    "steps, the slowest rank's. First: the first step, with planning."
)


def sections(data: Row) -> Iterator[Section]:
    yield Section(TEXT)
    for case in dict.fromkeys(row["case"] for row in data["rows"]):
        lines, apart = [], 0.0
        rows = [row for row in data["rows"] if row["case"] == case]
        for row in rows:
            stock, spatial = (
                next(one for one in rows if one["form"] == form and one["side"] == row["side"])
                for form in ("stock", "spatial")
            )
            apart = max(apart, *(abs(loss - stock["losses"][0]) for loss in row["losses"]))
            budget = row.get("budget")
            lines.append([
                f"{row['side']}x{row['side']}", row["form"], mib(row["peak"], 1),
                f"{row['peak'] / spatial['peak']:.2f}",
                f"{mib(budget, 1)} ({verdict(row['peak'] <= budget)})" if budget else "",
                f"{row['seconds']:.2f}", f"{row['seconds'] / spatial['seconds']:.2f}", f"{row['first']:.1f}",
            ])  # fmt: skip
        head = ["image", "form", "peak, MiB", "of spatial's", "budget, MiB", "time, s", "of spatial's", "first, s"]
        yield Section(f"Losses are at most {apart:.1e} from stock's.", head, lines, TITLES[case])
