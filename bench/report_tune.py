"""Tables of what bench.tune measured: ratios of every class, and the rules that came of them."""

from __future__ import annotations

from typing import Any

from .tune_rules import Rule

RATIOS_HEAD = ["pass", "dtype", "layout", "kernel", "stride", "channels"]
RULES_HEAD = ["pass", "dtype", "layout", "groups", "sources", "outputs", "taps", "stride", "places"]


def ratios(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and lines: cuDNN's time in units of ours, a line a convolution, a column a size."""
    sizes = sorted({(row["images"], row["side"]) for row in rows}, key=lambda size: size[0] * size[1] ** 2)
    lines: dict[tuple[str, ...], dict[tuple[int, int], str]] = {}
    for row in rows:
        ends = f"{row['groups']} depthwise" if row["groups"] > 1 else f"{row['sources']}->{row['outputs']}"
        key = (row["pass_"], row["dtype"], row["layout"], str(row["kernel"]), str(row["stride"]), ends)
        lines.setdefault(key, {})[row["images"], row["side"]] = cell(row)
    head = [*RATIOS_HEAD, *(f"{images}x{side}x{side}" for images, side in sizes)]
    return head, [[*key, *(cells.get(size, "") for size in sizes)] for key, cells in lines.items()]


def cell(row: dict[str, Any]) -> str:
    if "ms" in row:
        return f"{row['ratio']:.2f}"
    return row.get("error") or row.get("said") or "no time"


def rules(found: list[Rule]) -> list[list[str]]:
    """A line a rule, under RULES_HEAD: what a convolution must be for the project's kernel to be taken."""
    lines = []
    for rule in found:
        words = [rule.get(key, "any") for key in RULES_HEAD[:3]]
        lines.append([*words, *(_range(rule[key]) for key in RULES_HEAD[3:])])
    return lines


def _range(ends: list[int | None]) -> str:
    least, most = ends
    if most is None:
        return f"{least} and more"
    return str(least) if least == most else f"{least} to {most}"
