"""Turns a results file into Markdown tables and figures: `python -m bench.report [FILE.json ...]`.

Without files, every one in bench/results. FILE.json gets FILE.md beside it and, where a picture says more
than a table, FILE.png. Scripts call `render` themselves; calling it again changes nothing but the look.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import (
    drawing,
    measure,
    report_article,
    report_checkpointing,
    report_convs,
    report_from_disk,
    report_gpu,
    report_kernels,
    report_lean,
    report_megapixels,
    report_memory,
    report_spatial,
    report_tile,
    report_tile_ranks,
    report_tile_training,
    report_whole_models,
    report_xray,
    tables,
)


@dataclass(frozen=True)
class Report:
    """How the results of a script are shown. {gpu} in the title is the device's name."""

    title: str
    sections: Callable[[dict[str, Any]], Iterator[tables.Section]]
    figure: Callable[[dict[str, Any]], Any] = lambda data: None  # None while there is no data


REPORTS = {
    "conv_memory": Report(
        "Memory of a convolution on the CPU", report_convs.conv_memory, report_convs.conv_memory_figure
    ),
    "conv_speed": Report("Time of a convolution on the CPU", report_convs.conv_speed, report_convs.conv_speed_figure),
    "overhead": Report("What a call adds that needs no split", report_convs.overhead),
    "padding": Report("Wide zero padding on the CPU, float32", report_convs.padding, report_convs.padding_figure),
    "half": Report("Half precision on the CPU", report_convs.half),
    "resnet": Report("ResNet-18, converted, on the CPU", report_convs.resnet),
    "lean": Report("What training keeps for backward", report_lean.lean, report_lean.lean_figure),
    "lean_error": Report("How exact the gradients of converted models are", report_lean.lean_error),
    "lean_speed": Report("What saving less costs in time on the CPU", report_lean.lean_speed),
    "checkpointing": Report("Checkpoints in training, on the CPU", report_checkpointing.sections),
    "article": Report(
        "The memory log of a ResNet-18, and a smaller peak", report_article.sections, report_article.figure
    ),
    "whole_models": Report("Whole models: memory of a call", report_whole_models.sections),
    "tile": Report("Whole networks strip by strip", report_tile.sections, report_tile.figure),
    "tile_speed": Report("Strips beside one call: time", report_tile.speed),
    "lightstream": Report("Features of a large image by lightstream and by pc.tile", report_tile.lightstream),
    "tile_training": Report("Training steps tile by tile", report_tile_training.sections, report_tile_training.figure),
    "megapixels": Report("Training on 50 megapixels", report_megapixels.sections, report_megapixels.figure),
    "tile_ranks": Report("Tiles inside of ranks", report_tile_ranks.sections),
    "from_disk": Report("A gigapixel image from a file into a file", report_from_disk.sections),
    "memory_trace": Report("Traces, predictions and plans, on the CPU", report_memory.sections),
    "spatial": Report("One image on several ranks", report_spatial.sections, report_spatial.figure),
    "xray": Report("A DenseNet on large pictures, on several ranks", report_xray.sections, report_xray.figure),
    "kernel_counts": Report("What CUDA kernels do, counted without a GPU", report_kernels.sections),
    "gpu": Report("{gpu}: checks, memory and time", report_gpu.gpu, report_gpu.gpu_figure),
    "tune": Report("{gpu}: own convolution kernels beside cuDNN", report_gpu.tune),
}


def markdown(data: dict[str, Any]) -> str:
    report = REPORTS[data["bench"]]
    title = report.title.format(gpu=data["hardware"].get("gpu", "no GPU"))
    return tables.document(data, title, report.sections(data))


def render(path: Path) -> list[Path]:
    """Writes the Markdown and the figure of a results file beside it; returns what was written."""
    data = json.loads(path.read_text())
    written, text = [path.with_suffix(".md")], markdown(data)
    figure = REPORTS[data["bench"]].figure(data)
    if figure is not None:
        written.append(path.with_suffix(".png"))
        drawing.save(figure, written[1])
        text += f"\n![{data['bench']}]({written[1].name})\n"
    written[0].write_text(text)
    return written


def store(data: dict[str, Any], arguments: argparse.Namespace, name: str | None = None) -> list[Path]:
    """Writes the results where the options of `measure.parser` say, and renders them."""
    return render(measure.write_results(data, measure.folder(arguments), name))


def script(doc: str | None, measure_all: Callable[[str], dict[str, Any]], argv: list[str] | None = None) -> int:
    """The main function of a script that has no options of its own: measures, stores and renders."""
    arguments = measure.parser(doc).parse_args(argv)
    store(measure_all(arguments.size), arguments)
    return 0


def main(argv: list[str] | None = None) -> int:
    chosen = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    paths = chosen or sorted(measure.RESULTS.glob("*.json"))
    if not paths:
        print(f"no results in {measure.RESULTS}", file=sys.stderr)
        return 1
    for path in paths:
        print(" ".join(map(str, render(path))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
