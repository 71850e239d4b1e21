"""The table of what bench.checkpointing measured."""

from __future__ import annotations

from typing import Any

from .measure import MIB

TITLES = {
    "naive": "naive",
    "torch": "torch.utils.checkpoint",
    "ours": "pc.checkpoint",
    "lean": "pc.convert(functional=True), no checkpoint",
    "ours + lean": "pc.checkpoint and pc.convert(functional=True)",
}
HEAD = [
    "form", "peak, MiB", "of naive's", "step, ms", "of naive's", "two ranks: peak of each, MiB", "of naive's",
    "step, ms", "of naive's", "error of running means", "of running variances", "batches counted",
    "gradients: naive's bits",
]  # fmt: skip


def text(data: dict[str, Any]) -> str:
    one, two = data["rows"][0]["rounds"], data["rows"][0]["ddp"]["rounds"]
    return (
        f"DenseNet-BC-{data['depth']}, growth rate 12, {data['batch']} pictures of {data['side']}x{data['side']}, "
        "float32: forward, cross entropy, backward, SGD. A checkpoint is a bottleneck (concatenation, norm, ReLU, 1x1 "
        "convolution). Peaks of a step above what was resident before it. Times are medians (least to most) of "
        f"{one} rounds, and of {two} on two processes with one thread and half of the pictures each. Errors after "
        "one step: distance of the bottlenecks' statistics from float64's in units of how far these moved; 0.9 is a "
        "second move.\n"
    )


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    naive = rows[0]
    base = sum(naive["ddp"]["peaks"])
    return [
        [
            TITLES[row["form"]], f"{row['peak'] / MIB:.0f}", f"{row['peak'] / naive['peak']:.2f}", _ms(row["ms"]),
            _ratio(row["ratio"]), " and ".join(f"{peak / MIB:.0f}" for peak in row["ddp"]["peaks"]),
            f"{sum(row['ddp']['peaks']) / base:.2f}", _ms(row["ddp"]["ms"]), _ratio(row["ddp"]["ratio"]),
            f"{row['errors']['running_mean']:.1e}", f"{row['errors']['running_var']:.1e}",
            ", ".join(map(str, row["errors"]["batches"])), "yes" if row["errors"]["same_bits"] else "to rounding",
        ]
        for row in rows
    ]  # fmt: skip


def _ms(value: dict[str, float]) -> str:
    return f"{value['median']:.0f} ({value['least']:.0f} to {value['most']:.0f})"


def _ratio(value: dict[str, float] | None) -> str:
    return "1" if value is None else f"{value['median']:.2f} ({value['least']:.2f} to {value['most']:.2f})"
