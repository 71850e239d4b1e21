"""Turns a results file into Markdown tables and figures: `python -m bench.report [FILE.json ...]`.

Without files, every one in bench/results. FILE.json gets FILE.md beside it and, where a picture says more
than a table, FILE.png. Scripts call `render` themselves; calling it again changes nothing but the look.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from . import (
    figures,
    measure,
    report_article,
    report_checkpointing,
    report_convs,
    report_kernels,
    report_memory,
    report_spatial,
    report_tune,
    report_whole_models,
    report_xray,
)
from .measure import GIB, MIB, RESULTS

Rows = list[dict[str, Any]]


def verdict(met: bool) -> str:
    return "pass" if met else "FAIL"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine(info: dict[str, Any]) -> str:
    """One line that names the hardware and the software."""
    parts = [
        f"{info['cpu']}, {info['cores']} cores ({info['threads']} threads, {info['isa']}), {info['memory_gib']} GiB",
        f"torch {info['torch']}, oneDNN {info['onednn']}, patchconv_native {info['patchconv_native']}, "
        f"patch_conv {info['patch_conv'] or 'not installed'}",
    ]
    if "gpu" in info:
        gpu = f"{info['gpu']} ({info['gpu_memory_gib']} GiB, sm_{info['capability'].replace('.', '')})"
        parts.insert(0, f"{gpu}, CUDA {info['cuda']}, cuDNN {info['cudnn']}, driver {info['driver']}")
    return "; ".join(parts)


def heading(data: dict[str, Any], title: str) -> str:
    notes = f"Measured {data['date']} on {machine(data['hardware'])}. Load before: {data['load']}."
    if data["size"] != "full":
        notes += f" **Size {data['size']}: a trial of the script, not a measurement.**"
    return f"# {title}\n\n{notes}\n"


def spread(value: dict[str, float], digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['least']:.{digits}f} to {value['most']:.{digits}f})"


def conv_memory(data: dict[str, Any]) -> str:
    groups: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        groups.setdefault((row["name"], row["layout"], row["pass"]), {})[row["implementation"]] = row
    lines = []
    for (name, layout, pass_), sides in groups.items():
        one = next(iter(sides.values()))
        ours = sides.get("ours", {})
        lines.append(
            [
                name, layout, pass_, f"{one['input_bytes'] / GIB:.2f}",
                *[workspace(sides.get(side)) for side in ("stock", "patch_conv", "ours")],
                f"{ours['tiles']} ({ours['path']})" if "tiles" in ours else "",
                verdict(ours["pass_bound"]) if "pass_bound" in ours else "",
            ]
        )  # fmt: skip
    head = [
        "case",
        "layout",
        "pass",
        "input GiB",
        "stock",
        "patch_conv",
        "ours",
        "tiles",
        f"<= {data['bound'] // MIB} MiB",
    ]
    text = "Peak above input, weight and result, MiB. dgrad, wgrad: gradient of the input, of the weight."
    return f"{heading(data, 'Memory of a convolution on the CPU')}\n{text}\n\n{table(head, lines)}\n"


def workspace(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return row.get("error") or f"{row['workspace'] / MIB:.1f}"


def conv_speed(data: dict[str, Any]) -> str:
    lines = []
    for row in data["rows"]:
        for side, target in row["targets"].items():
            lines.append(
                [
                    row["name"], row["layout"], row["pass"], spread(row["ms"]["stock"], 0), side,
                    spread(row["ms"][side], 0), spread(row["ratio"][side]), f"<= {target:.2f}",
                    verdict(row["met"][side]), row["paths"][side],
                ]
            )  # fmt: skip
    head = ["case", "layout", "pass", "stock ms", "side", "ms", "ratio", "target", "", "path"]
    text = "Median (least to most) of paired rounds; ratio: ours in units of stock's time, round by round."
    return f"{heading(data, 'Time of a convolution on the CPU')}\n{text}\n\n{table(head, lines)}\n"


def overhead(data: dict[str, Any]) -> str:
    lines = [
        [
            row["name"], row["mode"], spread(row["us"]["stock"]), spread(row["us"]["ours"]),
            f"{row['added']['median']:.2f}", f"{row['added_least']:.2f}",
            verdict(row["met"]) if "met" in row else "",
        ]
        for row in data["rows"]
    ]  # fmt: skip
    head = [
        "module",
        "mode",
        "stock us",
        "ours us",
        "added",
        "added, of the least",
        f"<= {data['target']:.0f} us",
    ]
    return f"{heading(data, 'What a call adds that needs no split')}\n{table(head, lines)}\n"


def padding(data: dict[str, Any]) -> str:
    text = (
        "Stock's time in units of ours: above 1, stock is slower. A cell marked t was computed in tiles; the "
        "others were handed to stock.\n"
    )
    parts = [heading(data, "Wide zero padding on the CPU, float32"), text]
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in data["rows"]:
        groups.setdefault((row["direction"], row["threads"], row["large"], row["channels"]), []).append(row)
    for (direction, threads, large, channels), rows in groups.items():
        widths = sorted({r["padding"] for r in rows})
        cells = {(r["kernel"], r["padding"]): r for r in rows}
        kernels = sorted({r["kernel"] for r in rows})
        lines = [[k, *[_padding_cell(cells.get((k, w))) for w in widths]] for k in kernels]
        used = "one thread" if threads == 1 else f"{threads or data['hardware']['threads']} threads"
        size = f", {rows[0]['side']} squared" if large else ""
        parts.append(f"C={channels} to {data['outputs']}, padding of {direction}, {used}{size}\n")
        parts.append(table(["kernel", *map(str, widths)], lines) + "\n")
    if data["missing"]:
        parts.append(f"{data['missing']} cells were not reached in time.\n")
    return "\n".join(parts)


def _padding_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['stock_over_ours']['median']:.3g}{' t' if row['path'] == 'tiled' else ''}"


def half(data: dict[str, Any]) -> str:
    text = "Stock's time in units of ours: above 1, stock is slower. 3x3, padding 1.\n"
    lines = [
        [
            row["dtype"], "yes" if row["native"] else "no", row["name"], row["pass"], f"{row['ms']['stock']:.3f}",
            f"{row['ms']['ours']:.3f}", row["path"], spread(row["stock_over_ours"]), row["rounds"],
        ]
        for row in data["rows"]
    ]  # fmt: skip
    head = ["dtype", "multiplied by the processor", "case", "pass", "stock ms", "ours ms", "our path", "stock / ours",
            "rounds"]  # fmt: skip
    return f"{heading(data, 'Half precision on the CPU')}\n{text}\n{table(head, lines)}\n"


def resnet(data: dict[str, Any]) -> str:
    lines = [
        [
            row["mode"], row["batch"], spread(row["ms"]["stock"]), spread(row["ms"]["ours"]),
            f"{row['ratio']['ours']['median']:.4f}",
            f"{row['ms']['ours']['least'] / row['ms']['stock']['least']:.4f}",
            row["rounds"], verdict(row["met"]),
        ]
        for row in data["rows"]
    ]  # fmt: skip
    head = ["mode", "batch", "stock ms", "ours ms", "ratio, median of pairs", "ratio of the least", "rounds",
            f"<= {data['target']}"]  # fmt: skip
    return f"{heading(data, 'ResNet-18, converted, on the CPU')}\n{table(head, lines)}\n"


def lean(data: dict[str, Any]) -> str:
    parts = [heading(data, "What training keeps for backward")]

    def share(row: dict[str, Any], form: str, way: str = "held") -> str:
        if any("error" in row[side] for side in ("stock", form)):
            return str(row[form].get("error", row["stock"].get("error")))
        return f"{row[form][way] / max(1, row['stock'][way]):.3f}"

    def stock(row: dict[str, Any], way: str = "held") -> str:
        return row["stock"].get("error") or f"{row['stock'][way] / MIB:.1f}"

    def met(row: dict[str, Any]) -> str:
        if any("error" in row[form] for form in ("stock", "convert", "functional")):
            return ""
        least = min(row[form]["held"] for form in ("convert", "functional"))
        return verdict(least <= 1.03 * row["floor"] * row["stock"]["held"])

    parts.append(
        f"Batch 2, {data['side']} squared, all trained. MiB alive with the graph; the rest in units of stock's.\n"
    )
    parts.append(table(
        ["model", "stock MiB", "convert", "convert(functional=True)", "by hooks: convert", "functional", "floor",
         "<= 1.03 floors"],
        [[row["model"], stock(row), share(row, "convert"), share(row, "functional"), share(row, "convert", "saved"),
          share(row, "functional", "saved"), row["floor"], met(row)] for row in data["floors"]],
    ))  # fmt: skip
    sides = [side for side in ("memsave", "convert", "functional") if all(side in row for row in data["cases"])]
    for way, title in (
        ("held", "MiB alive with the graph after the forward pass"),
        ("forward", "Peak of the forward pass, MiB above what was there before"),
        ("step", "Peak of forward and backward, gradients of parameters included, MiB above what was there before"),
    ):
        if not data["cases"]:
            break
        parts.append(f"\nThe cases of memsave's paper, by what is trained. {title}; the rest in units of stock's.\n")
        parts.append(table(
            ["model", "batch", "trained", "stock MiB", *sides],
            [[row["model"], row["batch"], row["case"], stock(row, way), *[share(row, side, way) for side in sides]]
             for row in data["cases"]],
        ))  # fmt: skip
    if data["toy"]:
        cells = [data["toy"][form].get("error") or f"{data['toy'][form]['peak'] / MIB:.0f}" for form in data["toy"]]
        parts.append("\nTen convolutions, the fourth trained: peak of a step above its input, MiB.\n")
        parts.append(table(list(data["toy"]), [cells]))
    return "\n".join(parts) + "\n"


def lean_error(data: dict[str, Any]) -> str:
    text = (
        "Error of all parameters' gradients, relative to stock's in float64: median of the pictures, and in units of "
        "stock's in float32 (each picture's).\n"
    )
    lines = []
    for row in data["rows"]:
        cells = [row["model"], f"{row['median']['stock']:.2e}"]
        for form in ("convert", "functional"):
            each = zip(row["errors"][form], row["errors"]["stock"], strict=True)
            cells.append(
                f"{row['median'][form] / row['median']['stock']:.2f} ({', '.join(f'{a / b:.2f}' for a, b in each)})"
            )
        lines.append([*cells, verdict(row["met"]), "yes" if row["same_without_recompute"] else "NO"])
    head = [
        "model",
        "stock",
        "convert",
        "convert(functional=True)",
        f"<= {data['target']}",
        "same bits without recompute",
    ]
    return f"{heading(data, 'How exact the gradients of converted models are')}\n{text}\n{table(head, lines)}\n"


def lean_speed(data: dict[str, Any]) -> str:
    parts = [heading(data, "What saving less costs in time on the CPU")]
    parts.append("Training steps: median (least to most) of paired rounds, and in units of stock's time.\n")
    parts.append(table(
        ["model", "batch", "layout", "stock ms", "convert", f"<= {data['target']}", "convert(functional=True)", "",
         "rounds"],
        [[row["model"], row["batch"], row["layout"], spread(row["ms"]["stock"], 0), spread(row["ratio"]["convert"], 3),
          verdict(row["met"]["convert"]), spread(row["ratio"]["functional"], 3), verdict(row["met"]["functional"]),
          row["rounds"]] for row in data["steps"]],
    ))  # fmt: skip
    parts.append(
        "\nReLU with a packed mask, GB moved a second; the copy is `clone()` of the same tensor, or `copy_`.\n"
    )
    parts.append(table(
        ["pass", "MiB", "copy", "ours", "stock", "ours / copy", f">= {data['rate']}"],
        [[row["pass"], row["mib"], *[row["gb_s"][side] for side in ("copy", "ours", "stock")], row["rate"],
          verdict(row["met"])] for row in data["relu"]],
    ))  # fmt: skip
    return "\n".join(parts) + "\n"


def checkpointing(data: dict[str, Any]) -> str:
    parts = heading(data, "Checkpoints in training, on the CPU"), report_checkpointing.text(data)
    return "\n".join([*parts, table(report_checkpointing.HEAD, report_checkpointing.lines(data["rows"])), ""])


def _in_sections(data: dict[str, Any], title: str, sections: Callable[..., Iterable[tuple[Any, ...]]]) -> str:
    parts = [f"## {name}\n\n{text}\n\n{table(head, lines)}\n" for name, text, head, lines in sections(data)]
    return "\n".join([heading(data, title), *parts])


def whole_models(data: dict[str, Any]) -> str:
    tables = _in_sections(data, "Whole models: memory of a call", report_whole_models.sections)
    first, _, rest = tables.partition("\n## ")
    return f"{first}\n{report_whole_models.TEXT}\n## {rest}"


def article(data: dict[str, Any]) -> str:
    return _in_sections(data, "The memory log of a ResNet-18, and a smaller peak", report_article.sections)


def memory_trace(data: dict[str, Any]) -> str:
    return _in_sections(data, "Traces, predictions and plans, on the CPU", report_memory.sections)


def xray(data: dict[str, Any]) -> str:
    return _in_sections(data, "A DenseNet on large pictures, on several ranks", report_xray.sections)


def spatial(data: dict[str, Any]) -> str:
    return _in_sections(data, "One image on several ranks", report_spatial.sections)


def tune(data: dict[str, Any]) -> str:
    parts = [heading(data, f"{data['hardware'].get('gpu', 'no GPU')}: own convolution kernels beside cuDNN")]
    parts.append("cuDNN's time in row strips in units of ours, medians of turns: above 1, ours is faster.\n")
    parts.append(table(*report_tune.ratios(data["rows"])) + "\n")
    parts.append(f"## Rules\n\n{len(data['rules'])} rules take the project's kernel:\n")
    parts.append(table(report_tune.RULES_HEAD, report_tune.rules(data["rules"])) + "\n")
    if data["missing"]:
        parts.append("Not reached in time, so never taken: " + "; ".join(data["missing"]) + "\n")
    return "\n".join(parts)


def gpu(data: dict[str, Any]) -> str:
    parts = [heading(data, f"{data['hardware'].get('gpu', 'no GPU')}: checks, memory and time")]
    if "tests" in data:
        tests = data["tests"]
        parts.append(f"Tests: {verdict(tests['passed'])} ({tests['summary']})\n")
    if "correct" in data:
        correct = data["correct"]
        parts.append(
            f"Operators against float64: {correct['checked']} checks, {len(correct['failures'])} failures; "
            f"largest error in units of the bound {correct['worst']:.3f}\n"
        )
        parts.extend(f"- {failure}\n" for failure in correct["failures"])
    if "sanitizer" in data:
        parts.append(f"compute-sanitizer: {data['sanitizer']['summary']}\n")
    if "limits" in data:
        limits = data["limits"]
        parts.append(
            f"Device copy {limits['copy_gb_s']:.0f} GB/s, bf16 matrix product {limits['bf16_tflop_s']:.0f} "
            "TFLOP/s; the floor of a case is the larger of its bytes and its arithmetic at these rates.\n"
        )
    for section, rows in data.get("kernels", {}).items():
        parts.append(f"## {section.capitalize()}: time, level-2 cache flushed before every call\n")
        parts.append("The floor's bytes are counted on all sides; the copy moves as many.\n")
        parts.append(table(report_kernels.VERDICTS_HEAD, report_kernels.verdicts(rows)) + "\n")
        parts.append(report_kernels.allocations(rows) + "\n")
        parts.append(table(report_kernels.ROWS_HEAD, report_kernels.lines_of(rows)) + "\n")
    for title, text, head, lines in report_convs.tables(data.get("convs", {})):
        parts.append(f"## {title}\n\n{text}\n\n{table(head, lines)}\n")
    for key, title, cell in (
        ("memory", "Peak above input, weight and result, MiB (of the first call, where larger)", _gpu_memory),
        ("speed", "Time, ms, median (least to most), level-2 cache flushed before every call", _gpu_time),
    ):
        if data.get(key):
            parts.append(f"## {title}\n")
            parts.append(_gpu_table(data[key], cell, floor=key == "speed"))
    if data.get("missing"):
        parts.append("Not reached in time: " + "; ".join(data["missing"]) + "\n")
    return "\n".join(parts)


def _gpu_table(rows: Rows, cell: Callable[[dict[str, Any]], str], floor: bool) -> str:
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["name"], row["pass"]), {})[row["variant"]] = row
    lines = []
    for (name, pass_), found in cases.items():
        one = next(iter(found.values()))
        first = f"{one['floor_ms']:.2f}" if floor else f"{one['floor_bytes'] / GIB:.2f} GiB"
        lines.append([name, pass_, first, *[cell(found[v]) if v in found else "" for v in variants]])
    return table(["case", "pass", "floor", *variants], lines) + "\n"


def _gpu_memory(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    later, first = row["workspace"] / MIB, row["first_workspace"] / MIB
    return f"{later:.0f}" if first <= later + 1 else f"{later:.0f} ({first:.0f})"


def _gpu_time(row: dict[str, Any]) -> str:
    return row.get("error") or spread(row["ms"])


RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "conv_memory": conv_memory,
    "conv_speed": conv_speed,
    "overhead": overhead,
    "padding": padding,
    "half": half,
    "resnet": resnet,
    "lean": lean,
    "lean_error": lean_error,
    "lean_speed": lean_speed,
    "checkpointing": checkpointing,
    "article": article,
    "whole_models": whole_models,
    "memory_trace": memory_trace,
    "spatial": spatial,
    "xray": xray,
    "gpu": gpu,
    "tune": tune,
}


def render(path: Path) -> list[Path]:
    """Writes the Markdown and the figure of a results file beside it; returns what was written."""
    data = json.loads(path.read_text())
    markdown = path.with_suffix(".md")
    text = RENDERERS[data["bench"]](data)
    picture = figures.draw(data, path.with_suffix(".png"))
    if picture is not None:
        text += f"\n![{data['bench']}]({picture.name})\n"
    markdown.write_text(text)
    return [markdown] if picture is None else [markdown, picture]


def script(doc: str | None, measure_all: Callable[[str], dict[str, Any]], argv: list[str] | None = None) -> int:
    """The main function of a script that has no options of its own: measures, stores and renders."""
    arguments = measure.parser(doc).parse_args(argv)
    render(measure.write_results(measure_all(arguments.size), measure.folder(arguments)))
    return 0


def main(argv: list[str] | None = None) -> int:
    chosen = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    paths = chosen or sorted(RESULTS.glob("*.json"))
    if not paths:
        print(f"no results in {RESULTS}", file=sys.stderr)
        return 1
    for path in paths:
        print(" ".join(map(str, render(path))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
