"""Time of one convolution on the CPU against stock: float32, 64 to 64 channels, both layouts, all passes.

Each case runs stock and ours in turn: automatic splits in both layouts, and in channels_last also 16 splits
forced. Passes: forward; gradient of the input; gradient of the weight; all three gradients together. Targets,
as the median ratio of paired rounds: channels_last at most 1.05 (stock needs no workspace there, so automatic
may split nothing), 16 forced splits at most 1.25, NCHW at most 1.0. They are printed beside what was
measured, and asserted nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import cases, measure, report, tables
from .cases import OURS, PASSES, STOCK, Case

AUTO, FORCED = "ours", "ours, splits=16"
TARGETS = {("NCHW", AUTO): 1.0, ("channels_last", AUTO): 1.05, ("channels_last", FORCED): 1.25}
SECONDS = {"full": 22.0, "small": 3.0, "tiny": 0.2}  # a case and pass, at most, if its three rounds take less


def time_case(case: Case, pass_: str, budget: float) -> dict[str, Any]:
    import patchconv_native as pc

    x, grad = case.input(), case.gradient()
    sides: dict[str, Any] = {STOCK: case.module(STOCK), AUTO: case.module(OURS)}
    if case.layout == "channels_last":
        sides[FORCED] = case.module(OURS, splits=16)
    calls: dict[str, Callable[[], Any]] = {
        side: cases.prepare_with(module, x, lambda: grad, pass_) for side, module in sides.items()
    }
    paths = {}
    for side in list(calls)[1:]:
        with pc.record_paths() as records:
            calls[side]()
        paths[side] = ", ".join(f"{r['pass']} {_path(r)}" for r in records)
    timed = measure.paired(calls, budget)
    targets = {side: TARGETS[case.layout, side] for side in paths}
    facts = timed.facts(STOCK)
    met = {side: facts["ratio"][side]["median"] <= target for side, target in targets.items()}
    return case.facts() | {"name": case.name, "pass": pass_, "paths": paths, "targets": targets, "met": met} | facts


def _path(record: dict[str, Any]) -> str:
    return "stock" if record["path"] == "stock" else f"{record['count']} tiles"


def measure_all(size: str, large_kernel: bool, passes: tuple[str, ...], budget: float | None) -> dict[str, Any]:
    data = measure.report_head("conv_speed", size) | {"rows": []}
    wanted = cases.SPEED[size] + (cases.SPEED_LARGE_KERNEL[size] if large_kernel else [])
    for case in wanted:
        for layout in cases.LAYOUTS:
            for pass_ in passes:
                row = time_case(case.with_(layout=layout), pass_, budget or SECONDS[size])
                data["rows"].append(row)
                print(_line(row), flush=True)
    return data


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['name']:<32} {row['layout']:<13} {row['pass']:<8} stock {row['ms'][STOCK]['median']:8.1f} ms"]
    for side, target in row["targets"].items():
        ratio = row["ratio"][side]
        parts.append(
            f"{side} {ratio['median']:.3f} [{ratio['least']:.2f}, {ratio['most']:.2f}] "
            f"(target {target:.2f}: {tables.verdict(row['met'][side])}; {row['paths'][side]})"
        )
    return "  ".join(parts) + f"  {row['rounds']} rounds"


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__)
    parser.add_argument("--large-kernel", action="store_true", help="also a 7x7 kernel")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--budget", type=float, help="seconds a case, layout and pass")
    arguments = parser.parse_args(argv)
    data = measure_all(arguments.size, arguments.large_kernel, tuple(arguments.passes), arguments.budget)
    report.store(data, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
