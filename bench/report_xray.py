"""The tables and the figure of what bench.xray measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .drawing import COLOURS, bare, bars, canvas, foot
from .measure import MIB
from .tables import Row, Section, mib, spread, verdict

GROUPS = ("#1f6fb4", "#e0a030", "#b56576", "#6d597a")  # a colour for each number of chunks
MARKERS = "os^vD<>Pp*Xhd"


def sections(data: dict[str, Any]) -> Iterator[Section]:
    rows = data["rows"]
    one, batch = rows[0], data["batch"]
    yield Section(
        _losses(data),
        [
            "way", "", "ranks", "batch norm sees", "loss, first and last step", "reference", "farthest from it",
            f"at most {data['tolerance']:.0e}", "farthest from one's",
        ],
        [
            [
                f"`{row['way']}`", row["title"], str(row["ranks"]), f"{batch // row['chunks']} of {batch}",
                f"{row['losses'][0]:.6f}, {row['losses'][-1]:.6f}", f"`{row['reference']}`", f"{row['off']:.1e}",
                verdict(row["coincides"]), f"{row['off_one']:.1e}",
            ]
            for row in rows
        ],
        "Losses",
    )  # fmt: skip
    yield Section(
        _memory(data),
        [
            "way", "processes x threads", "peak of each rank, MiB", "largest, of one's", "there between steps, MiB",
            "step, s", "of one's", f"largest side, {_mib(data['budget'])} MiB a rank", "of one's", "load",
        ],
        [
            [
                f"`{row['way']}`", f"{row['ranks']} x {row['threads']}", ", ".join(_mib(peak) for peak in row["peaks"]),
                f"{_share(row, one):.2f}", _mib(max(row["kept"])), spread(row["seconds"]),
                f"{_time(row, one):.2f}", str(row["largest"] or "none"),
                f"{row['largest'] / one['largest']:.2f}" if one["largest"] else "", str(row["load"]),
            ]
            for row in rows
        ],
        "Memory and time",
    )  # fmt: skip


def _losses(data: dict[str, Any]) -> str:
    rows = data["rows"]
    seen = (data["steps"] - 1) % data["sets"]
    moved = max(abs(row["losses"][-1] / row["losses"][seen] - 1) for row in rows)
    side = data["side"]
    text = (
        f"DenseNet-{data['depth']}, {data['batch']} drawn radiographs of {side}x{side} in a global batch, "
        f"{data['sets']} batches in turn, {data['steps']} steps of SGD (rate {data['rate']}, momentum), "
        f"{data['dtype']}, {data['ranks']} ranks over {data['backend']}. All ways start alike and see the same "
        "batches. Batch norm takes its statistics from what one forward pass sees: a rank's share of the batch under "
        "data parallelism, a micro-batch in a pipeline. Such a way cannot have the losses of one process with the "
        "whole batch; its reference is one process that adds up gradients over as many chunks. With batch norm over "
        "all ranks, or the whole batch in one micro-batch, the reference is `one` itself. "
    )
    far = [row for row in rows if not row["coincides"]]
    text += (
        f"Not within {data['tolerance']:.0e} of their references: {_names(far)}. " if far
        else f"All {len(rows)} are within {data['tolerance']:.0e} of their references. "
    )  # fmt: skip
    parts = [row for row in rows if row["chunks"] > 1 and not row["way"].startswith("one")]
    if parts:
        least, most = min(row["off_one"] for row in parts), max(row["off_one"] for row in parts)
        text += f"Those whose batch norm sees less ({_names(parts)}) are {least:.1e} to {most:.1e} from `one`. "
    text += f"Training moves a loss by up to {moved:.1e} from the first time that its batch is seen."
    if data["left_out"]:
        text += " Not run: " + "; ".join(f"`{name}` ({why})" for name, why in data["left_out"].items()) + "."
    return text


def _memory(data: dict[str, Any]) -> str:
    rows, one = data["rows"], data["rows"][0]
    ways = [row for row in rows if not row["way"].startswith("one in")]
    least, slow = min(ways, key=lambda row: max(row["peaks"])), max(ways, key=lambda row: _time(row, one))
    rounds = data["steps"] - data["watched"]
    low, high = one["by_side"][0][0], one["by_side"][-1][0]
    cores = "" if "gpu" in data["hardware"] else ", and share its cores"
    text = (
        f"Peaks: the most that torch's allocator had given out at a time within the first {data['watched']} steps, "
        "from the empty process on: parameters, gradients, momentum, communication's buckets, this rank's input and "
        "all else; not what libraries take from the system by themselves. Times are medians (least to most) of "
        f"{rounds} later step{'s' if rounds != 1 else ''}, of the slowest rank; all processes are on the one machine"
        f"{cores}. Largest side: extrapolated, not run, from peaks measured at {low} and {high} (a constant and a "
        "multiple of the pixels), a multiple of 32. "
    )
    checks = [row for row in rows if row.get("predicted")]
    if checks:
        here = [row["predicted"] / max(row["peaks"]) for row in checks]
        text += f"Predictions with fake tensors, of ways that have one process: {_range(here)} of the peak at {high}"
        there = [row["predicted_largest"] / data["budget"] for row in checks if row.get("predicted_largest")]
        text += f", and {_range(there)} of the budget at the largest side. " if there else ". "
    text += f"The least peak is that of `{least['way']}`, {_share(least, one):.2f} of one's. "
    above = [row for row in ways if _share(row, one) >= 1 and row is not one]
    if above:
        text += f"No less than one process on some rank: {_names(above)}. "
    if slow is not one:
        text += f"The slowest is `{slow['way']}`, {_time(slow, one):.2f} of one's time. "
    fast = [row for row in ways if _time(row, one) < 1]
    return text + (f"Faster than one process: {_names(fast)}." if fast else "None is faster than one process.")


def figure(data: dict[str, Any]) -> Any:
    """Losses, those that should coincide in one colour; and the peak of each rank."""
    rows = data["rows"]
    made, ((left, right),) = canvas(1, 2, 12.5, 1.6 + 0.42 * max(8, len(rows)))
    colours = dict(zip(sorted({row["chunks"] for row in rows}), GROUPS * 4, strict=False))
    for i, row in enumerate(rows):
        # Curves lie on each other: the marks of a step stand side by side.
        beside = 0.9 * ((i + 0.5) / len(rows) - 0.5)
        left.plot(
            [step + beside for step in range(1, len(row["losses"]) + 1)], row["losses"], color=colours[row["chunks"]],
            lw=0, marker=MARKERS[i % len(MARKERS)], ms=3.5, label=f"{row['way']} ({data['batch'] // row['chunks']})",
        )  # fmt: skip
    left.set_xlabel("step; ways side by side, in the order of the bars", fontsize=8)
    left.set_ylabel("loss of the global batch", fontsize=8)
    left.set_xticks(range(1, data["steps"] + 1))
    left.set_title("(n): batch norm sees n pictures; a step's marks of a colour should be level", fontsize=9)
    left.legend(fontsize=6.5, frameon=False, ncols=2)
    for place, row in enumerate(rows):
        high = 0.8 / len(row["peaks"])
        for i, peak in enumerate(row["peaks"]):
            right.barh(place - 0.4 + high * (i + 0.5), peak / MIB, high * 0.9, color=colours[row["chunks"]])
        top = max(row["peaks"]) / MIB
        right.text(top, place, f" {top:.0f} MiB, {_share(row, rows[0]):.2f}", va="center", fontsize=6.5)
    right.axvline(max(rows[0]["peaks"]) / MIB, color=COLOURS["stock"], lw=1, ls=":")
    label = "peak of each rank, MiB; in numbers the largest, and what it is of one's"
    bars(right, [row["way"] for row in rows], label, 1.15)
    right.set_title(f"DenseNet-{data['depth']}, {data['batch']} x {data['side']}x{data['side']}", fontsize=9)
    left.tick_params(labelsize=7)
    bare(left)
    foot(made, data)
    return made


def _share(row: Row, one: Row) -> float:
    return max(row["peaks"]) / max(one["peaks"])


def _time(row: Row, one: Row) -> float:
    return row["seconds"]["median"] / one["seconds"]["median"]


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{row['way']}`" for row in rows)


def _range(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def _mib(count: int) -> str:
    return mib(count, 0 if count >= 100 * MIB else 1)
