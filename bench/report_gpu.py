"""Tables and the figure of what was measured on a GPU: bench.gpu with its parts, and bench.tune."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from .cases import OURS, STOCK
from .conv_cases import AT_MOST, AUTO, NATIVE
from .drawing import COLOURS, FLOOR, bars, canvas, foot, legend
from .gpu_jobs import COPY, OF_COPY, OF_STOCK
from .measure import GIB, MIB
from .tables import Row, Rows, Section, mib, spread, targets, verdict
from .tune_rules import Rule

NAMED = 20  # of what was not reached
FUSED = {"cudnn_convolution_relu": "#b56576", "cudnn front end": "#6d597a"}  # rivals of fused convolutions
KERNEL_TITLES = {OF_COPY: "share of copy's rate", OF_STOCK: "stock's time in units of ours"}
CONV_TITLES = {
    "of_rival": "fastest rival's time in units of ours, native", "auto_of_rival": "the same of ours, auto",
    "tflop_s": "TFLOP/s", "memory_mib": "MiB above the floor", "peak_gib": "GiB at the peak",
    "error": "error in units of stock's",
}  # fmt: skip


def gpu(data: Row) -> Iterator[Section]:
    for part, what in (("tests", "Tests"), ("large", "More than 2^31 elements")):
        if part in data:
            yield Section(f"{what}: {verdict(data[part]['passed'])} ({data[part]['summary']})")
    if "sanitizer" in data:
        yield Section(f"compute-sanitizer: {data['sanitizer']['summary']}")
    if "limits" in data:
        limits = data["limits"]
        yield Section(
            f"Device copy {limits['copy_gb_s']:.0f} GB/s, bf16 matrix product {limits['bf16_tflop_s']:.0f} "
            "TFLOP/s; the floor of a case is the larger of its bytes and its arithmetic at these rates."
        )
    for part, rows in data.get("kernels", {}).items():
        yield from kernels(part, rows)
    yield from convs(data.get("convs", {}))
    yield from networks(data.get("networks", {}))
    yield from steps(data.get("steps", []))
    for key, title, cell in (
        ("memory", "Peak above input, weight and result, MiB (of the first call, where larger)", _memory),
        ("speed", "Time, ms, median (least to most), level-2 cache flushed before every call", _time),
    ):
        if data.get(key):
            yield _variants(title, data[key], cell, floor=key == "speed")
    if data.get("missing"):
        missing = data["missing"]
        more = [f"and {len(missing) - NAMED} more, which the .json names"] if len(missing) > NAMED else []
        yield Section("Not reached in time: " + "; ".join([*missing[:NAMED], *more]))


def _variants(title: str, rows: Rows, cell: Callable[[Row], str], floor: bool) -> Section:
    """A line a case and pass, a column a variant."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["name"], row["pass"]), {})[row["variant"]] = row
    lines = []
    for case, found in cases.items():
        one = next(iter(found.values()))
        first = f"{one['floor_ms']:.2f}" if floor else f"{one['floor_bytes'] / GIB:.2f} GiB"
        lines.append([*case, first, *(cell(found[v]) if v in found else "" for v in variants)])
    return Section(head=["case", "pass", "floor", *variants], rows=lines, title=title)


def _memory(row: Row) -> str:
    if "error" in row:
        return row["error"]
    later, first = row["workspace"] / MIB, row["first_workspace"] / MIB
    return f"{later:.0f}" if first <= later + 1 else f"{later:.0f} ({first:.0f})"


def _time(row: Row) -> str:
    return row.get("error") or spread(row["ms"])


# ----------------------------------------------------------------------------------------------------------------------
# Memory-bound kernels (bench.gpu_kernels)


def kernel_label(row: Row) -> str:
    return f"{row['name']} {row['pass']} {row['dtype']} {row['layout']} {row['mib']:g} MiB"


def kernel_targets(rows: Rows) -> Section:
    return targets(
        rows, KERNEL_TITLES, lambda row: f"{row['name']} {row['pass']}", kernel_label, lambda row, name: row.get(name)
    )


def kernels(part: str, rows: Rows) -> Iterator[Section]:
    met = kernel_targets(rows)
    yield Section("The floor's bytes are counted on all sides; the copy moves as many.", met.head, met.rows,
                  f"{part.capitalize()}: time, level-2 cache flushed before every call")  # fmt: skip
    head = ["layer", "pass", "dtype", "layout", "MiB", "ours ms", "stock ms", "copy ms", "ours GB/s", "copy GB/s",
            *KERNEL_TITLES.values(), "ours allocates besides its results, MiB", "stock MiB"]  # fmt: skip
    lines = []
    for row in rows:
        line = [row["name"], row["pass"], row["dtype"], row["layout"], f"{row['mib']:g}"]
        if "error" in row:
            lines.append([*line, row["error"], *[""] * (len(head) - len(line) - 1)])
            continue
        line += [f"{row['ms'][side]['median']:.4f}" for side in (OURS, STOCK, COPY)]
        line += [f"{row['gb_s'][side]:.0f}" for side in (OURS, COPY)]
        line += [f"{row[name]:.2f} {verdict(row['met'][name]) if name in row['met'] else ''}".strip()
                 for name in KERNEL_TITLES]  # fmt: skip
        lines.append([*line, *(mib(row["workspace"][side], 1) for side in (OURS, STOCK))])
    yield Section(allocations(rows), head, lines)


def allocations(rows: Rows) -> str:
    """Which rows allocate more besides their results than their kernels have a use for. Most likely these are
    temporaries of stock operators."""
    measured = [row for row in rows if "error" not in row]
    beyond = [row for row in measured if row["workspace"][OURS] > row["allowed"]]
    lines = [f"Of {len(measured)} rows {len(beyond)} allocate more than they may besides their results"]
    for row in beyond:
        lines.append(f"{kernel_label(row)}: {mib(row['workspace'][OURS], 2)} MiB instead of {mib(row['allowed'], 2)}")
    return "; ".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# Convolutions and their rivals (bench.conv_gpu)


def conv_targets(rows: Rows) -> Section:
    return targets(
        rows, CONV_TITLES, lambda row: row["pass"], lambda row: f"{row['name']} {row['dtype']} {row['layout']}",
        lambda row, name: row.get("figures", {}).get(name), AT_MOST,
    )  # fmt: skip


def convs(data: Row) -> Iterator[Section]:
    rows, probes = data.get("rows", []), data.get("probes", [])
    if rows:
        met = conv_targets(rows)
        yield Section(
            "Forward with bias and ReLU, by one call; gradients of the convolution alone. A figure that is missing is "
            "not met.",
            met.head, met.rows, "Convolutions: targets",
        )  # fmt: skip
        yield Section(
            "A rival's time in units of ours, native, on the same tensors in the same layout: below 1 it is faster.",
            ["pass", "rival", "dtype", "layout", "rows", "we are faster", "we are slower", "ratio, median", "least",
             "most"],
            rivals(rows), "Convolutions: rivals",
        )  # fmt: skip
        yield _conv_rows(rows)
    if probes:
        yield Section(
            "Forward and both gradients against float64 at probed places, bfloat16, in units of the bound.",
            ["elements past", "elements", "largest error"],
            [[row["name"], row["elements"], row.get("error") or row["wrong"] or f"{row['worst']:.3f}"]
             for row in probes],
            "Convolutions: large tensors",
        )  # fmt: skip


def rivals(rows: Rows) -> list[list[object]]:
    """Every rival against the project's kernels, in its own line, wherever both were timed."""
    ratios: dict[tuple[str, str, str, str], list[float]] = {}
    absent: dict[tuple[str, str, str, str], str] = {}
    for row in rows:
        sides = row.get("sides", {})
        for side, found in sides.items():
            if side in (NATIVE, AUTO):
                continue
            key = (row["pass"], side, row["dtype"], row["layout"])
            timed = ratios.setdefault(key, [])
            if "ms" in found and "ms" in sides[NATIVE]:
                timed.append(found["ms"]["median"] / sides[NATIVE]["ms"]["median"])
            else:
                absent.setdefault(key, found.get("error", "ours was not timed"))
    lines: list[list[object]] = []
    for key, timed in ratios.items():
        if not timed:
            lines.append([*key, 0, absent[key], *[""] * 4])
            continue
        ends = (statistics.median(timed), min(timed), max(timed))
        counts = len(timed), sum(r > 1 for r in timed), sum(r < 1 for r in timed)
        lines.append([*key, *counts, *(f"{r:.2f}" for r in ends)])
    return lines


def _conv_rows(rows: Rows) -> Section:
    sides = list(dict.fromkeys(side for row in rows for side in row.get("sides", {})))
    facts = ["fastest rival", "its time in units of native", "of auto", "TFLOP/s", "share of the roofline",
             "MiB above the floor", "stock MiB", "error in units of stock's", "path native", "path auto",
             "targets not met"]  # fmt: skip
    head = ["case", "from", "dtype", "layout", "pass", "floor ms", *(f"{side} ms" for side in sides), *facts]
    lines = []
    for row in rows:
        line = [*(row[key] for key in ("name", "source", "dtype", "layout", "pass")), _number(row, "floor_ms", 3)]
        if "error" in row:
            lines.append([*line, row["error"], *[""] * (len(head) - len(line) - 1)])
            continue
        times = [row["sides"].get(side, {}) for side in sides]
        cells = [spread(found["ms"], 3) if "ms" in found else found.get("error", "") for found in times]
        lines.append([*line, *cells, *_conv_facts(row)])
    return Section(
        "Median (least to most), level-2 cache flushed before every call. The floor is an H100's: 798 TFLOP/s in "
        "bfloat16, half of it in TF32, 3.0 TB/s.",
        head, lines, "Convolutions: time, memory, error",
    )  # fmt: skip


def _number(found: Row, name: str, digits: int) -> str:
    return f"{found[name]:.{digits}f}" if name in found else ""


def _conv_facts(row: Row) -> list[str]:
    figures, native, stock = row["figures"], row["sides"][NATIVE], row["sides"].get(STOCK, {})
    return [
        row["fastest_rival"] or "none", _number(figures, "of_rival", 2), _number(figures, "auto_of_rival", 2),
        _number(native, "tflop_s", 0), _number(native, "of_roofline", 2), _number(figures, "memory_mib", 1),
        mib(stock["workspace"], 1) if "workspace" in stock else "", _number(figures, "error", 3),
        *(", ".join(found[key] for key in ("path", "kernel") if found.get(key))
          for found in (native, row["sides"][AUTO])),
        ", ".join(CONV_TITLES[name] for name, met in row["met"].items() if not met),
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Whole networks by tiles (bench.gpu_tile)


def networks(data: Row) -> Iterator[Section]:
    rows = data.get("rows", [])
    stock = {(row["case"], row["side"], row["train"]): row for row in rows if row["form"] == "stock"}
    lines: list[list[object]] = []
    for row in rows:
        line = [row["case"] + ", training step" * row["train"], row["side"], row["form"]]
        if "error" in row:
            lines.append([*line, row["error"], "", "", ""])
            continue
        base = stock[row["case"], row["side"], row["train"]].get("seconds")
        ratio = f"{row['seconds'] / base:.2f}" if base else ""
        budget = mib(row["budget"]) if row["budget"] else ""
        lines.append([*line, mib(row["peak"]), budget, f"{row['seconds']:.4f}", ratio])
    if rows:
        head = ["network", "side", "form", "peak, MiB", "budget, MiB", "seconds", "in units of stock's"]
        what = "Peak above parameters, input and result; the first call, which plans, is not timed."
        yield Section(what, head, lines, "Whole networks, float32")
    if data.get("errors"):
        found = [[case, one.get("error") or f"{one['stock']:.2e}", f"{one['tile']:.3f}" if "tile" in one else ""]
                 for case, one in data["errors"].items()]  # fmt: skip
        head = ["network", "stock, relative", "tiles in units of it"]
        yield Section("Root mean square against float64.", head, found)


def steps(rows: Rows) -> Iterator[Section]:
    if not rows:
        return
    head = ["model", "input", "autocast", "form", "peak, MiB", "of stock's", "predicted, MiB", "time, ms", "of stock's"]
    stock = {(row["model"], row["amp"]): row for row in rows if row["form"] == "stock"}
    lines: list[list[object]] = []
    for row in rows:
        line = [row["model"], "x".join(map(str, row["shape"])), row["amp"] or "", row["form"]]
        if "error" in row:
            lines.append([*line, row["error"], "", "", "", ""])
            continue
        base = stock[row["model"], row["amp"]].get("peak")
        share, ratio = f"{row['peak'] / base:.2f}" if base else "", row["of_stock"]
        line += [mib(row["peak"]), share, mib(row["predicted"]), f"{row['ms']['median']:.1f}"]
        lines.append([*line, f"{ratio['median']:.2f}" if ratio else ""])
    yield Section("Peak: all that torch's allocator holds in a step, weights and pictures included.", head, lines,
                  "Training steps of whole models")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The rules of bench.tune


def tune(data: Row) -> Iterator[Section]:
    yield ratios(data["rows"])
    yield Section(f"{len(data['rules'])} rules take the project's kernel:", RULE, rules(data["rules"]), "Rules")
    if data["missing"]:
        yield Section("Not reached in time, so never taken: " + "; ".join(data["missing"]))


def ratios(rows: Rows) -> Section:
    """cuDNN's time in units of ours, a line a convolution, a column a size."""
    sizes = sorted({(row["images"], row["side"]) for row in rows}, key=lambda size: size[0] * size[1] ** 2)
    lines: dict[tuple[str, ...], dict[tuple[int, int], str]] = {}
    for row in rows:
        ends = f"{row['groups']} depthwise" if row["groups"] > 1 else f"{row['sources']}->{row['outputs']}"
        key = (row["pass_"], row["dtype"], row["layout"], str(row["kernel"]), str(row["stride"]), ends)
        lines.setdefault(key, {})[row["images"], row["side"]] = _ratio(row)
    return Section(
        "cuDNN's time in row strips in units of ours, medians of turns: above 1, ours is faster.",
        ["pass", "dtype", "layout", "kernel", "stride", "channels", *(f"{n}x{side}x{side}" for n, side in sizes)],
        [[*key, *(cells.get(size, "") for size in sizes)] for key, cells in lines.items()],
    )


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.2f}" if "ms" in row else row.get("error") or row.get("refused") or "no time"


RULE = ["pass", "dtype", "layout", "groups", "sources", "outputs", "taps", "stride", "places"]


def rules(found: list[Rule]) -> list[list[str]]:
    """A line a rule, under RULE: what a convolution must be for the project's kernel to be taken."""
    return [[*(rule.get(key, "any") for key in RULE[:3]), *(_range(rule[key]) for key in RULE[3:])] for rule in found]


def _range(ends: list[int | None]) -> str:
    least, most = ends
    if most is None:
        return f"{least} and more"
    return str(least) if least == most else f"{least} to {most}"


# ----------------------------------------------------------------------------------------------------------------------
# The figure


def fused_bars(rows: Rows, most: int = 8) -> Rows:
    """A bar for each timed side, of the forward passes of the first cases."""
    chosen = [row for row in rows if row["pass"] == "fprop" and "sides" in row]
    cases = list(dict.fromkeys((row["name"], row["dtype"]) for row in chosen))[:most]
    return [
        {"name": f"{row['name']} {row['dtype']}", "variant": f"{side} {row['layout']}", "layout": row["layout"],
         "implementation": side.partition(",")[0], "floor_ms": row.get("floor_ms"), "ms": found["ms"]}
        for row in chosen if (row["name"], row["dtype"]) in cases
        for side, found in row["sides"].items() if "ms" in found
    ]  # fmt: skip


def gpu_figure(data: Row) -> Any:
    """Memory at the peak and time of the forward pass, each case a group of bars; and of fused convolutions."""
    fused = fused_bars(data.get("convs", {}).get("rows", []))
    panels = {
        "GiB at the peak": [row for row in data.get("memory", []) if row["pass"] == "fprop"],
        "ms": [row for row in data.get("speed", []) if row["pass"] == "fprop"],
        "ms, with bias and ReLU in one call": fused,
    }
    panels = {label: rows for label, rows in panels.items() if rows}
    if not panels:
        return None
    longest = max(len({row["name"] for row in rows}) for rows in panels.values())
    figure, axes = canvas(1, len(panels), 7.5 * len(panels), 1.6 + 0.95 * longest)
    for ax, (label, rows) in zip(axes[0], panels.items(), strict=True):
        names, variants = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "variant"))
        step = 0.84 / len(variants)
        for row in rows:
            place = names.index(row["name"])
            at = place - 0.42 + step * (variants.index(row["variant"]) + 0.5)
            if "error" in row:
                text = f" {row['variant']}: {row['error'][:40]}"
                ax.text(0, at, text, va="center", fontsize=5, color="#c0392b")
                continue
            memory = label.startswith("GiB")
            floor = row["floor_bytes"] / GIB if memory else row["floor_ms"]
            value = floor + row["workspace"] / GIB if memory else row["ms"]["median"]
            shade = 1.0 if row["layout"] == "NCHW" else 0.65
            ax.barh(at, value, step * 0.9, color=(COLOURS | FUSED)[row["implementation"]], alpha=shade)
            ax.text(value, at, f" {row['variant']} {value:.2f}", va="center", fontsize=5)
            if floor is not None:  # None: the GPU is no H100
                ax.plot([floor, floor], [place - 0.45, place + 0.45], color=FLOOR, lw=1)
        bars(ax, names, label, 1.15)
    legend(figure, COLOURS | (FUSED if fused else {}), "floor (paler: channels_last)")
    foot(figure, data)
    return figure
