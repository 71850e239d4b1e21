"""Tables of what bench.gpu_kernels measured: every target and whether it is met, and every row."""

from __future__ import annotations

from typing import Any

from .measure import MIB

Rows = list[dict[str, Any]]
OURS, STOCK, COPY = "ours", "stock", "copy"
OF_COPY, OF_STOCK = "of_copy", "of_stock"
TITLES = {OF_COPY: "share of copy's rate", OF_STOCK: "stock's time in units of ours"}
VERDICTS_HEAD = ["layer and pass", "ratio", "target", "rows that meet it", "least", ""]
ROWS_HEAD = ["layer", "pass", "dtype", "layout", "MiB", "ours ms", "stock ms", "copy ms", "ours GB/s", "copy GB/s",
             TITLES[OF_COPY], TITLES[OF_STOCK], "ours allocates besides its results, MiB", "stock MiB"]  # fmt: skip


def verdicts(rows: Rows) -> list[list[str]]:
    """For every target of a pass: how many rows meet it, and the row that is furthest from it."""
    groups: dict[tuple[str, str, str, float], Rows] = {}
    for row in rows:
        for name, target in row["targets"].items():
            groups.setdefault((row["name"], row["pass"], name, target), []).append(row)
    lines = []
    for (layer, pass_, name, target), members in groups.items():
        measured = [row for row in members if "error" not in row]
        met = sum(row["met"][name] for row in measured)
        worst = min(measured, key=lambda row: row[name], default=None)
        least = f"{worst[name]:.2f} ({worst['dtype']}, {worst['layout']}, {worst['mib']:g} MiB)" if worst else "none"
        lines.append([f"{layer} {pass_}", TITLES[name], f">= {target:.2f}", f"{met} of {len(members)}", least,
                      "met" if met == len(members) else "NOT MET"])  # fmt: skip
    return lines


def allocations(rows: Rows) -> str:
    """Which rows allocate more besides their results than their kernels have a use for: stock operators' temporaries,
    in all likelihood."""
    measured = [row for row in rows if "error" not in row]
    beyond = [row for row in measured if row["workspace"][OURS] > row["allowed"]]
    said = f"Of {len(measured)} rows {len(beyond)} allocate more than they may besides their results"
    return "; ".join([said, *(
        f"{row['name']} {row['pass']} {row['dtype']} {row['layout']} {row['mib']:g} MiB: "
        f"{row['workspace'][OURS] / MIB:.2f} MiB instead of {row['allowed'] / MIB:.2f}" for row in beyond
    )])  # fmt: skip


def lines_of(rows: Rows) -> list[list[str]]:
    """One line a row, under ROWS_HEAD."""
    lines = []
    for row in rows:
        line = [row["name"], row["pass"], row["dtype"], row["layout"], f"{row['mib']:g}"]
        if "error" in row:
            lines.append([*line, row["error"], *[""] * (len(ROWS_HEAD) - len(line) - 1)])
            continue
        line += [f"{row['ms'][side]['median']:.4f}" for side in (OURS, STOCK, COPY)]
        line += [f"{row['gb_s'][side]:.0f}" for side in (OURS, COPY)]
        for name in (OF_COPY, OF_STOCK):
            mark = "" if name not in row["met"] else " met" if row["met"][name] else " NOT MET"
            line.append(f"{row[name]:.2f}{mark}")
        lines.append([*line, *[f"{row['workspace'][side] / MIB:.1f}" for side in (OURS, STOCK)]])
    return lines
