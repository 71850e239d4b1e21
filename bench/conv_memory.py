"""Peak memory of one convolution pass above input, weight and result, on the CPU: stock, patch_conv, ours.

Inputs of 1 GiB and more, both layouts, kernels 3 and 7; forward pass, gradient of the input, gradient of the
weight. Every number comes from a process of its own. Before the measured call that process has made a small
call of the same kind, so that loading code is not counted. Our bound is 96 MiB, whatever the size. The
largest case takes 11 GiB.

patch_conv splits from 2^30 input elements on (4 GiB in float32) and calls stock below; its splitting is
measured on one case of that size. It computes in NCHW.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from patchconv_native.demo.measure import available_memory

from . import cases, measure, report, tables
from .cases import OURS, PATCH_CONV, STOCK, Case

BOUND = 96 * measure.MIB


def one(case: dict[str, Any], implementation: str, pass_: str) -> dict[str, Any]:
    """One measurement, in the process that calls this."""
    measured = Case(**case)
    small = measured.with_(height=32, width=32)
    cases.prepare(small, small.module(implementation), pass_)()
    call = cases.prepare(measured, measured.module(implementation), pass_)
    start = time.perf_counter()
    peak = measure.peak_of(call)
    taken = {"path": "stock"}
    if implementation == OURS:
        import patchconv_native as pc

        taken = pc.last_path()
    return {
        "workspace": peak.workspace,
        "result": peak.result,
        "seconds": round(time.perf_counter() - start, 3),
        "path": taken["path"],
        "tiles": taken.get("count", 1),
    }


def plan(size: str) -> list[tuple[Case, str, str]]:
    """(case, pass, implementation) of every measurement."""
    layouts = list(cases.LAYOUTS)[: 1 if size == "tiny" else 2]
    both = [case.with_(layout=layout) for case in cases.MEMORY[size] for layout in layouts]
    passes = ("fprop",) if size == "tiny" else ("fprop", "dgrad", "wgrad")
    wanted = [(case, pass_, side) for case in both for pass_ in passes for side in (STOCK, OURS)]
    third = cases.PATCH_CONV_MEMORY[size] or cases.MEMORY[size][:1]
    sides = (STOCK, PATCH_CONV, OURS) if cases.PATCH_CONV_MEMORY[size] else (PATCH_CONV,)
    return wanted + [(case, "fprop", side) for case in third for side in sides]


def measure_all(size: str) -> dict[str, Any]:
    data = measure.report_head("conv_memory", size) | {"bound": BOUND, "rows": []}
    for case, pass_, implementation in plan(size):
        row: dict[str, Any] = case.facts() | {
            "name": case.name,
            "pass": pass_,
            "implementation": implementation,
        }
        row |= {"input_bytes": case.input_bytes, "output_bytes": case.output_bytes}
        if implementation == PATCH_CONV and measure.installed("patch_conv") is None:
            row["error"] = "not installed"
        elif (need := case.bytes * 3) > available_memory("cpu"):
            row["error"] = f"not run: up to {need / measure.GIB:.0f} GiB were not available"
        else:
            row |= measure.in_fresh_process(
                "bench.conv_memory:one", case=case.facts(), implementation=implementation, pass_=pass_
            )
        if implementation == OURS and "workspace" in row:
            row["pass_bound"] = row["workspace"] <= BOUND
        data["rows"].append(row)
        print(_line(row), flush=True)
    return data


def _line(row: dict[str, Any]) -> str:
    head = f"{row['name']:<36} {row['layout']:<14} {row['pass']:<6} {row['implementation']:<11}"
    if "error" in row:
        return f"{head} {row['error']}"
    verdict = f"  bound {BOUND // measure.MIB} MiB: {tables.verdict(row['pass_bound'])}" if "pass_bound" in row else ""
    tiles = f"{row['tiles']} tiles" if row["path"] == "tiled" else "stock"
    return f"{head} {row['workspace'] / measure.MIB:8.1f} MiB  {row['seconds']:7.2f} s  {tiles}{verdict}"


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
