"""The tables of what bench.memory_trace measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .tables import Rows, Section, mib, spread, verdict

FORMS = {"stock": "stock", "layers": "`convert(functional=False)`", "convert": "`convert`"}


def sections(data: dict[str, Any]) -> Iterator[Section]:
    target = data["targets"]["overhead"]
    yield Section(
        f"A step (forward, sum, backward) at {data['side']}x{data['side']}, float32, NCHW, watched by `memory.trace` "
        "and bare, in turn: time of the watched step on the trace's clock, and of the whole call, which also copies "
        "buffers, collects garbage before the step and makes the report after it. Medians (least to most). Target: at "
        f"most {target:.0%} added to the step. Load after it: {data['load_after']}.",
        [
            "model", "batch", "rounds", "changes of memory", "bare step, ms", "watched, of bare", "of least times",
            f"at most {1 + target:.2f}", "the whole call, of bare", "the call's own, ms",
        ],
        [
            [
                row["model"], str(row["batch"]), str(row["rounds"]), str(row["events"]), spread(row["ms"]["bare"], 0),
                spread(row["ratio"]["watched"], 3), f"{row['least']:.3f}", verdict(row["met"]),
                spread(row["ratio"]["call"], 2),
                f"{row['ms']['call']['median'] - row['ms']['watched']['median']:.0f}",
            ]
            for row in data["rows"]
        ],
        "What watching costs",
    )  # fmt: skip
    yield _predictions(data)
    yield _convolutions(data)
    yield Section(
        "`pc.plan` for a budget in units of the peak that is predicted for the model as it is; time is of a step, in "
        "units of that of the model as it is, estimated by the plan and measured in turn. A plan keeps 3 % below its "
        "budget. Where nothing fits, the plan with the least peak was taken.",
        [
            "model", "batch", "budget, MiB", "of stock", "plan", "predicted, MiB", "measured", "predicted, of measured",
            "within the budget", "time, estimated", "measured", "search, s",
        ],
        [
            [
                row["model"], str(row["batch"]), mib(row["budget"]), f"{row['share']:.2f}", row["plan"],
                mib(row["predicted"]), mib(row["peak"]), f"{row['predicted'] / row['peak']:.3f}",
                ("yes" if row["kept"] else "NO") if row["fits"] else "nothing fits", f"{row['estimated']:.2f}",
                spread(row["ratio"]["plan"], 2), f"{row['search']:.0f}",
            ]
            for row in data["plans"]
        ],
        "Plans",
    )  # fmt: skip


def _predictions(data: dict[str, Any]) -> Section:
    rows, target = data["predictions"], data["targets"]["prediction"]
    off = sorted(abs(row["ratio"] - 1) for row in rows)
    over = [row for row in rows if abs(row["ratio"] - 1) > target]
    low, high = min(row["ratio"] for row in rows), max(row["ratio"] for row in rows)
    other = sum(not row["same_saved"] for row in rows)
    text = (
        f"The peak of a step with fake tensors in units of the measured one, batch {data['batch']}: {len(rows)} cases, "
        f"{low:.3f} to {high:.3f}, off by {statistics.median(off):.2%} in the median, {off[-1]:.2%} at worst; "
        f"{len(over)} by more than the target of {target:.0%}"
    )
    text += f" ({_cases(over)}). " if over else ". "
    text += "Bytes kept for backward were predicted " + (
        "all to the byte." if not other else f"wrong in {other} cases."
    )
    cases = list(dict.fromkeys((row["form"], row["layout"]) for row in rows))
    models: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        models.setdefault(row["model"], {})[row["form"], row["layout"]] = row["ratio"]
    lines = []
    for name, found in models.items():
        away = [abs(ratio - 1) for ratio in found.values()]
        cells = [f"{found[case]:.3f}" for case in cases]
        lines.append([name, *cells, f"{statistics.median(away):.2%}", f"{max(away):.2%}"])
    heads = [f"{FORMS[form]}, {layout}" for form, layout in cases]
    return Section(text, ["model", *heads, "median deviation", "worst"], lines, "Predictions")


def _convolutions(data: dict[str, Any]) -> Section:
    rows, target = data["convolutions"], data["targets"]["prediction"]
    ratios = [row["ratio"] for row in rows]
    off = sorted(rows, key=lambda row: abs(row["ratio"] - 1), reverse=True)
    over = [row for row in off if abs(row["ratio"] - 1) > target]
    text = (
        f"A training step of one convolution, drawn by lot, predicted in units of measured (parameters and input "
        f"included): {len(rows)} cases, {min(ratios):.3f} to {max(ratios):.3f}, off by "
        f"{statistics.median(abs(ratio - 1) for ratio in ratios):.2%} in the median; {len(over)} by more than the "
        f"target of {target:.0%}. "
    )
    text += "These:" if over else "The farthest off:"
    names = list(rows[0])[:-3]
    lines = [
        [*(str(row[name]) for name in names), mib(row["peak"], 2), f"{row['ratio']:.3f}"] for row in over or off[:3]
    ]
    return Section(text, [*names, "measured, MiB", "predicted, of measured"], lines, "Predictions of one convolution")


def _cases(rows: Rows) -> str:
    return "; ".join(f"{row['model']}, {row['form']}, {row['layout']}: {row['ratio']:.3f}" for row in rows)
