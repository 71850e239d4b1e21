"""The tables and the figure of what bench.article measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .tables import Rows, Section, mib, spread

TITLES = {
    "baseline": "baseline",
    "checkpoints, torch": "3 checkpoints, torch",
    "checkpoints, ours": "3 checkpoints, pc",
    "mixed": "mixed precision",
    "checkpoints, torch + mixed": "3 checkpoints, torch, and mixed",
    "checkpoints, ours + mixed": "3 checkpoints, pc, and mixed",
    "converted": "`pc.convert`",
    "converted + mixed": "converted, mixed",
    "all but micro-batches": "converted, 3 checkpoints, mixed",
    "all": "all: converted, micro-batches, checkpoints, mixed",
    "planned, exact": "`pc.plan`, least peak in float32",
    "planned": "`pc.plan`, least peak",
    "planned, in a budget": "mixed, `pc.plan` for 0.2 of the baseline",
}
# Runs over each other: no more than the figure has colours.
DRAWN = {
    "baseline": "baseline",
    "checkpoints, torch": "3 checkpoints (torch)",
    "mixed": "mixed precision",
    "checkpoints, torch + mixed": "3 checkpoints (torch), mixed",
    "converted": "converted",
    "all but micro-batches": "all but micro-batches",
    "all": "all together",
}


def sections(data: dict[str, Any]) -> Iterator[Section]:
    rows = data["rows"]
    head = ["form", "peak, MiB", "of the baseline", f"at most {data['target']}", "kept for backward, MiB", "peak at"]
    yield Section(
        _predicted(data),
        head,
        [
            [
                TITLES[row["form"]], mib(row["peak"]), f"{row['ratio']:.3f}", "met" if row["met"] else "NOT MET",
                mib(row["saved"]), _where(row["at"]),
            ]
            for row in rows
        ],
        f"Predicted: batch {data['batch']}, {data['side']}x{data['side']}",
    )  # fmt: skip
    for device in dict.fromkeys(row["device"] for row in data["measured"]):
        found = [row for row in data["measured"] if row["device"] == device]
        yield Section(
            _measured(data, found, device),
            [
                "form", "peak, MiB", "of the baseline", "predicted, of measured", "kept for backward, MiB", "peak at",
                "step alone, MiB", "by the process", "step, ms", "of the baseline's",
            ],
            [
                [
                    TITLES[row["form"]], mib(row["peak"]), f"{row['ratio']:.3f}", f"{row['of_prediction']:.3f}",
                    mib(row["saved"]), _where(row["at"]), mib(row["above"]), mib(row["resident"]),
                    spread(row["ms"], 0), spread(row["time"]),
                ]
                for row in found
            ],
            f"Measured: batch {found[0]['batch']}, {device}",
        )  # fmt: skip


def _predicted(data: dict[str, Any]) -> str:
    rows = {row["form"]: row for row in data["rows"]}
    least = min(data["rows"], key=lambda row: row["peak"])
    held = ", ".join(
        f"{mib(count)} MiB of {module or 'the step'} ({operator})" for module, operator, count in rows["all"]["held"]
    )
    met = [TITLES[row["form"]] for row in data["rows"] if row["met"]]
    chunks = ", ".join(f"{name} in {count}" for name, count in data["microbatches"].items())
    text = (
        f"A training step of {'ResNet-18' if data['blocks'] == 2 else 'a smaller ResNet'}: forward, cross entropy, "
        f"backward, SGD without momentum; {data['chunks']} chunks over a chain of layers, blocks as units; mixed "
        f"precision is autocast to bfloat16. Fake tensors, device {data['device']}: nothing is computed. Peaks hold "
        f"parameters, gradients and inputs. Target: at most {data['target']} of the baseline; the article reached "
        f"{data['article']}. "
    )
    text += f"Met by: {', '.join(met)}. " if met else f"No form meets it; the least is {least['ratio']:.3f}. "
    text += (
        f"The planner's least peak without tiles: {data['strategies']['any']}; in float32: "
        f"{data['strategies']['exact']}; for {data['article']} of the baseline, in mixed precision: "
        f"{data['strategies']['budget']}. Alive at the peak of all together: {held}.\n\n"
        "All together takes micro-batches (`pc.microbatch`: batch norm over the whole batch, activations of a chunk) "
        f"for the stem (convolution, norm, ReLU and pool as one stage) and for blocks: {chunks} chunks, or one a "
        f"sample where there are fewer; what follows the stem is {data['segments']} segments, all but the last "
        "checkpointed."
    )
    at = rows["all but micro-batches"]["at"]["module"]
    if at.removeprefix("layers.") in data["stem"]:
        text += (
            f" Without them the peak is in the stem at full batch (`{at}`), whose tensors in backward are all in the "
            "stem's resolution. Checkpoints do not help there: a batch norm in training needs the whole batch, and "
            "what it needs in backward must be there, made again or kept."
        )
    return text


def _measured(data: dict[str, Any], rows: Rows, device: str) -> str:
    # Of tiles, what their plan keeps free is predicted too.
    off = [abs(row["of_prediction"] - 1) for row in rows if row["form"] != "planned, in a budget"]
    fresh = "each form in a process of its own" if data["size"] != "tiny" else "all forms in one process"
    text = (
        f"The second step of each form, {fresh}; predictions are of the same step, off by at most {max(off):.1%} (but "
        "for tiles, where they hold what the plan keeps free too). "
        '"Step alone" is the peak above what was there before it; beside it what the '
        f"{'allocator' if device == 'cuda' else 'kernel'} says of the process, in a step that nobody watches. Times "
        f"are medians (least to most) of {rows[0]['rounds']} rounds. The planner, at this batch: the least without "
        f"tiles {data['strategies'][f'any, {device}']}; in float32 {data['strategies'][f'exact, {device}']}; for "
        f"{data['article']} of the baseline, in mixed precision, {data['strategies'][f'budget, {device}']}."
    )
    every = next(row for row in rows if row["form"] == "all")["time"]
    without = next(row for row in rows if row["form"] == "all but micro-batches")["time"]
    text += (
        f" What micro-batches cost here: all together took {every['median']:.2f} of the baseline's time, without them "
        f"{without['median']:.2f}."
    )
    if "load_timing" in data:
        text += f" Load at the timing: {data['load_timing']}."
    if device == "cpu":
        text += (
            " For the process's count large blocks were given back to the system at once (mallopt); with the C "
            f"library's heap as it comes the baseline's was {mib(data['heap'])} MiB: holes in the heap are no "
            "tensor's, and in no trace. Where the process counts less, memory may have been asked for and not "
            "written to: not established."
        )
    slow = next(row for row in rows if row["form"] == "mixed")["time"]
    if device == "cpu" and slow["median"] > 1:
        text += f" Autocast to bfloat16 is slower than float32 on this CPU: {slow['median']:.2f} of its time."
    return text


def figure(data: dict[str, Any]) -> Any:
    """The forms over each other."""
    from patchconv_native.memory import MemoryReport, compare

    logs = {row["form"]: MemoryReport.from_dict(json.loads(row["log"])) for row in data["rows"]}
    return compare({title: logs[form] for form, title in DRAWN.items()}).plot()


def _where(at: dict[str, str]) -> str:
    return ", ".join(f"`{word}`" if i != 1 else word for i, word in enumerate(at.values()) if word)
