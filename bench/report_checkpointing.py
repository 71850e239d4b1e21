"""The table of what bench.checkpointing measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .tables import Section, mib, spread

TITLES = {
    "naive": "naive",
    "torch": "torch.utils.checkpoint",
    "ours": "pc.checkpoint",
    "lean": "pc.convert, no checkpoint",
    "ours + lean": "pc.checkpoint and pc.convert",
}


def sections(data: dict[str, Any]) -> Iterator[Section]:
    naive = data["rows"][0]
    base = sum(naive["ddp"]["peaks"])
    yield Section(
        f"DenseNet-BC-{data['depth']}, growth rate 12, {data['batch']} pictures of {data['side']}x{data['side']}, "
        "float32: forward, cross entropy, backward, SGD. A checkpoint is a bottleneck (concatenation, norm, ReLU, 1x1 "
        "convolution). Peaks of a step above what was resident before it. Times are medians (least to most) of "
        f"{naive['rounds']} rounds, and of {naive['ddp']['rounds']} on two processes with one thread and half of the "
        "pictures each. Errors after one step: distance of the bottlenecks' statistics from float64's in units of how "
        "far these moved; 0.9 is a second move.",
        [
            "form", "peak, MiB", "of naive's", "step, ms", "of naive's", "two ranks: peak of each, MiB", "of naive's",
            "step, ms", "of naive's", "error of running means", "of running variances", "batches counted",
            "gradients: naive's bits",
        ],
        [
            [
                TITLES[row["form"]], mib(row["peak"]), f"{row['peak'] / naive['peak']:.2f}", spread(row["ms"], 0),
                spread(row["ratio"]), " and ".join(map(mib, row["ddp"]["peaks"])),
                f"{sum(row['ddp']['peaks']) / base:.2f}", spread(row["ddp"]["ms"], 0), spread(row["ddp"]["ratio"]),
                f"{row['errors']['running_mean']:.1e}", f"{row['errors']['running_var']:.1e}",
                ", ".join(map(str, row["errors"]["batches"])), "yes" if row["errors"]["same_bits"] else "to rounding",
            ]
            for row in data["rows"]
        ],
    )  # fmt: skip
