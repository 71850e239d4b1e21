"""The tables and the figure of what bench.spatial measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .drawing import bare, canvas, foot
from .tables import Section, mib, verdict

COLOURS = {"1": "#8d99a6", "2": "#7fb2dc", "4": "#1f6fb4"}


def _name(row: dict[str, Any]) -> str:
    return f"{row['network']}, {row['layout']}, {'training' if row['train'] else 'forward'}" + (
        ", converted" if row["lean"] else ""
    )


def share(row: dict[str, Any], ranks: str) -> float:
    """Peak of a rank, in units of 1/ranks of one process's."""
    return float(row["of"][ranks]["peak"] * int(ranks) / row["of"]["1"]["peak"])


def sections(data: dict[str, Any]) -> Iterator[Section]:
    base, rows, target = data["base"], data["rows"], data["target"]
    met = sum(share(row, ranks) <= target for row in rows for ranks in ("2", "4"))
    yield Section(
        f"An image of {base['side']}x{base['side']}, {base['channels']} channels, float32, parts of rows. The most "
        "that the second step allocates above the model, its gradients and the input; the largest rank's. In units of "
        f"1/ranks of one process's; at most {target} is wanted: {met} of {2 * len(rows)} meet it. Above 1 is what does "
        "not shrink with the part: halos, weights' workspaces, and a copy of a convolution's input with its halo.",
        ["network", "1 rank, MiB", "2 ranks, MiB", "x 2", "4 ranks, MiB", "x 4", f"at most {target}"],
        [
            [_name(row), *_peaks(row), verdict(all(share(row, ranks) <= target for ranks in ("2", "4")))]
            for row in rows
        ],
        "Peak memory of a rank",
    )  # fmt: skip
    exact = all(row["of"][ranks]["sent"] == row["of"][ranks]["least"] for row in rows for ranks in ("2", "4"))
    yield Section(
        "Bytes of images that all ranks send in a step, and the least that the geometry asks for: rows that outputs "
        "read and their rank does not hold, counted layer by layer apart from the package's own plan; in training once "
        "forward and once, as gradients, back (but for the image itself, which has none). "
        + ("The two are the same on every rank. " if exact else "THE TWO DIFFER. ")
        + "Besides, what is summed or merged over ranks (statistics, gradients of parameters). Times are of processes "
        "that share one machine's cores and say nothing of speed on several.",
        ["network", "ranks", "messages", "sent, KiB", "least, KiB", "summed, KiB", "step, s", "on one, s"],
        [
            [
                _name(row), ranks, str(found["messages"]), f"{sum(found['sent']) / 1024:.1f}",
                f"{sum(found['least']) / 1024:.1f}", f"{found['reduced'] / 1024:.1f}", f"{found['seconds']:.2f}",
                f"{row['of']['1']['seconds']:.2f}",
            ]
            for row in rows for ranks in ("2", "4") if (found := row["of"][ranks])
        ],
        "What is sent",
    )  # fmt: skip
    rates = data["rates"]
    yield Section(
        "NOT MEASURED: a model of a forward pass of the U-Net, 64 channels, bfloat16. A layer takes the longer of its "
        f"arithmetic ({rates['matrix'] / 1e12:.0f} TFLOP/s, of which {rates['share']:.0%}) and its traffic "
        f"({rates['memory'] / 1e12:.1f} TB/s) on 1/GPUs of the image; halos travel meanwhile at "
        f"{rates['NVLink'] / 1e9:.0f} GB/s (up to 8 GPUs) or {rates['InfiniBand'] / 1e9:.0f} GB/s with "
        f"{rates['latency'] * 1e6:.0f} us a message. The matrix and memory rates were measured on an H100; link rates "
        "are nominal, the share and the latency assumed.",
        ["side", "GPUs", "computed, ms", "waited, ms", "speedup", "efficiency"],
        [
            [
                str(row["side"]), str(row["gpus"]), f"{row['computed'] * 1e3:.2f}", f"{row['waited'] * 1e3:.2f}",
                f"{one['seconds'] / row['seconds']:.1f}", f"{one['seconds'] / row['seconds'] / row['gpus']:.2f}",
            ]
            for row in data["model"]
            if (one := next(r for r in data["model"] if r["side"] == row["side"] and r["gpus"] == 1))
        ],
        "A model of many GPUs",
    )  # fmt: skip


def _peaks(row: dict[str, Any]) -> list[str]:
    cells = [mib(row["of"]["1"]["peak"], 1)]
    for ranks in ("2", "4"):
        cells += [mib(row["of"][ranks]["peak"], 1), f"{share(row, ranks):.2f}"]
    return cells


def figure(data: dict[str, Any]) -> Any:
    """Peaks in units of 1/ranks; a timeline of messages of one forward pass on two ranks; the model's speedups."""
    drawn, places = canvas(3, 1, 8, 11)
    peaks, line, model = places[:, 0]
    rows = data["rows"]
    for n, ranks in enumerate(("2", "4")):
        peaks.barh([i + 0.4 * n for i in range(len(rows))], [share(row, ranks) for row in rows], 0.36,
                   color=COLOURS[ranks], label=f"{ranks} ranks")  # fmt: skip
    peaks.axvline(1, color="#222222", linewidth=0.8)
    peaks.axvline(data["target"], color="#b56576", linewidth=0.8, linestyle="--")
    peaks.set_yticks([i + 0.2 for i in range(len(rows))], [_name(row) for row in rows], fontsize=7)
    peaks.invert_yaxis()
    peaks.set_xlabel(f"peak of a rank, x ranks / one process's (dashed: {data['target']})", fontsize=8)
    peaks.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
    for rank, one in enumerate(data["timeline"]):
        for n, event in enumerate(one["events"]):
            y = rank + 0.8 * n / max(1, len(one["events"]))
            line.plot([event["posted"], event["waited"]], [y, y], color="#1f6fb4", linewidth=2.5,
                      label="travels, computing goes on" if rank == n == 0 else None)  # fmt: skip
            line.plot([event["waited"], event["there"]], [y, y], color="#b56576", linewidth=2.5,
                      label="waited for" if rank == n == 0 else None)  # fmt: skip
    line.set_yticks([0.4, 1.4], ["rank 0", "rank 1"])
    line.set_xlabel("seconds of a forward pass, each exchange on its own height", fontsize=8)
    line.set_title("halos of the U-Net, converted, channels_last", fontsize=9)
    line.legend(fontsize=7, frameon=False)
    for side, colour in zip(sorted({row["side"] for row in data["model"]}), ("#e0a030", "#1f6fb4"), strict=True):
        mine = [row for row in data["model"] if row["side"] == side]
        model.plot([row["gpus"] for row in mine], [mine[0]["seconds"] / row["seconds"] for row in mine], "o-",
                   color=colour, label=f"{side}x{side}")  # fmt: skip
    most = max(row["gpus"] for row in data["model"])
    model.plot([1, most], [1, most], color="#222222", linewidth=0.8, linestyle=":")
    model.set_xlabel("GPUs", fontsize=8)
    model.set_ylabel("speedup", fontsize=8)
    model.set_title("a model, not measured", fontsize=9)
    model.legend(fontsize=7, frameon=False)
    for axes in (peaks, line, model):
        axes.tick_params(labelsize=8)
        bare(axes)
    foot(drawn, data)
    return drawn
