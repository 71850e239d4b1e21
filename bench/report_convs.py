"""Tables of what bench.conv_gpu measured: targets and whether they are met, each rival's wins and losses, every row."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from .measure import MIB

Rows = list[dict[str, Any]]
NATIVE, AUTO = "ours, native", "ours, auto"
STOCK = "stock"
TITLES = {
    "of_rival": "fastest rival's time in units of ours, native", "auto_of_rival": "the same of ours, auto",
    "tflop_s": "TFLOP/s", "memory_mib": "MiB above the floor", "peak_gib": "GiB at the peak",
    "error": "error in units of stock's",
}  # fmt: skip
AT_MOST = ("memory_mib", "peak_gib", "error")
VERDICTS_HEAD = ["pass", "figure", "target", "rows that meet it", "furthest from it", ""]
RIVALS_HEAD = ["pass", "rival", "dtype", "layout", "rows", "we are faster", "we are slower", "ratio, median", "least",
               "most"]  # fmt: skip
ROWS_HEAD = ["case", "from", "dtype", "layout", "pass", "floor ms"]
FACTS_HEAD = ["fastest rival", "its time in units of native", "of auto", "TFLOP/s", "share of the roofline",
              "MiB above the floor", "stock MiB", "error in units of stock's", "path native", "path auto",
              "targets not met"]  # fmt: skip


def label(row: dict[str, Any]) -> str:
    return f"{row['name']} {row['dtype']} {row['layout']}"


def verdicts(rows: Rows) -> list[list[str]]:
    """For every target of a pass: how many rows meet it, and the row that is furthest from it."""
    groups: dict[tuple[str, str, float], Rows] = {}
    for row in rows:
        for name, bound in row.get("targets", {}).items():
            groups.setdefault((row["pass"], name, bound), []).append(row)
    lines = []
    for (pass_, name, bound), members in groups.items():
        met = sum(row["met"][name] for row in members)
        known = [row for row in members if name in row["figures"]]
        choose = max if name in AT_MOST else min
        worst = choose(known, key=lambda row: row["figures"][name], default=None)
        said = f"{worst['figures'][name]:.2f} ({label(worst)})" if worst else "no figure"
        sign = "<=" if name in AT_MOST else ">="
        lines.append([pass_, TITLES[name], f"{sign} {bound:g}", f"{met} of {len(members)}", said,
                      "met" if met == len(members) else "NOT MET"])  # fmt: skip
    failed = [row for row in rows if "error" in row]
    if failed:
        lines.append(["", "rows without a measurement", "0", "", f"{label(failed[0])}: {failed[0]['error']}",
                      f"{len(failed)} NOT MET"])  # fmt: skip
    return lines


def _ms(row: dict[str, Any], side: str) -> float | None:
    found = row.get("sides", {}).get(side, {})
    return found["ms"]["median"] if "ms" in found else None


def rivals(rows: Rows) -> list[list[str]]:
    """Every rival against the project's kernels, in its own line, wherever both were timed."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    absent: dict[tuple[str, str, str, str], str] = {}
    for row in rows:
        ours = _ms(row, NATIVE)
        for side, found in row.get("sides", {}).items():
            if side in (NATIVE, AUTO):
                continue
            key, theirs = (row["pass"], side, row["dtype"], row["layout"]), _ms(row, side)
            ratios = groups.setdefault(key, [])
            if ours and theirs:
                ratios.append(theirs / ours)
            else:
                absent.setdefault(key, found.get("error", "ours was not timed"))
    lines = []
    for key, ratios in groups.items():
        if not ratios:
            lines.append([*key, "0", absent[key], *[""] * 4])
            continue
        faster, slower = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
        ends = (statistics.median(ratios), min(ratios), max(ratios))
        lines.append([*key, str(len(ratios)), str(faster), str(slower), *(f"{r:.2f}" for r in ends)])
    return lines


def sides_of(rows: Rows) -> list[str]:
    return list(dict.fromkeys(side for row in rows for side in row.get("sides", {})))


def lines_of(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Head and a line a row."""
    sides = sides_of(rows)
    head = [*ROWS_HEAD, *(f"{side} ms" for side in sides), *FACTS_HEAD]
    lines = []
    for row in rows:
        floor = f"{row['floor_ms']:.3f}" if "floor_ms" in row else ""
        line = [row["name"], row["source"], row["dtype"], row["layout"], row["pass"], floor]
        if "error" in row:
            lines.append([*line, row["error"], *[""] * (len(head) - len(line) - 1)])
            continue
        lines.append([*line, *(_cell(row["sides"].get(side)) for side in sides), *_facts(row)])
    return head, lines


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "error" in found:
        return found["error"]
    ms = found["ms"]
    return f"{ms['median']:.3f} ({ms['least']:.3f} to {ms['most']:.3f})"


def _facts(row: dict[str, Any]) -> list[str]:
    figures, native = row["figures"], row["sides"][NATIVE]
    stock = row["sides"].get(STOCK, {})
    return [
        row["fastest_rival"] or "none",
        *(f"{figures[name]:.2f}" if name in figures else "" for name in ("of_rival", "auto_of_rival")),
        f"{native['tflop_s']:.0f}" if "tflop_s" in native else "",
        f"{native['of_roofline']:.2f}" if "of_roofline" in native else "",
        f"{figures['memory_mib']:.1f}" if "memory_mib" in figures else "",
        f"{stock['workspace'] / MIB:.1f}" if "workspace" in stock else "",
        f"{figures['error']:.3f}" if "error" in figures else "",
        *(_path(row["sides"][side]) for side in (NATIVE, AUTO)),
        ", ".join(TITLES[name] for name, met in row["met"].items() if not met),
    ]


def _path(found: dict[str, Any]) -> str:
    return f"{found['path']}, {found['kernel']}" if "kernel" in found else str(found.get("path", ""))


def tables(data: dict[str, Any]) -> Iterator[tuple[str, str, Sequence[str], Sequence[Sequence[str]]]]:
    """(title, text, head, lines) of every table."""
    rows, probes = data.get("rows", []), data.get("probes", [])
    if rows:
        yield (
            "Convolutions: targets",
            "Forward with bias and ReLU, by one call; gradients of the convolution alone. A figure that is missing is "
            "not met.",
            VERDICTS_HEAD, verdicts(rows),
        )  # fmt: skip
        yield (
            "Convolutions: rivals",
            "A rival's time in units of ours, native, on the same tensors in the same layout: below 1 it is faster.",
            RIVALS_HEAD, rivals(rows),
        )  # fmt: skip
        yield (
            "Convolutions: time, memory, error",
            "Median (least to most), level-2 cache flushed before every call. The floor is an H100's: 798 TFLOP/s in "
            "bfloat16, half of it in TF32, 3.0 TB/s.",
            *lines_of(rows),
        )
    if probes:
        lines = [[row["name"], str(row["elements"]), row.get("error") or row["wrong"] or f"{row['worst']:.3f}"]
                 for row in probes]  # fmt: skip
        yield (
            "Convolutions: large tensors",
            "Forward and both gradients against float64 at probed places, bfloat16, in units of the bound.",
            ["elements past", "elements", "largest error"], lines,
        )  # fmt: skip
