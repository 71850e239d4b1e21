"""Whole networks strip by strip: peak memory and time as the image grows, and how exact the result is.

ResNet-18's and MobileNetV2's features, a U-Net and a diffusers decoder, in NCHW, without gradients: stock as long as it
fits (its peak is predicted beyond that), `pc.tile` without a budget, with one and with files, and diffusers' own
tiling. Each form runs in a process of its own; the largest images once, with a budget. Errors are against the same
network in float64, in units of stock's own.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

from . import measure, report, whole_models
from .measure import GIB, MIB

MODELS = {"ResNet-18 features": "features", "MobileNetV2 features": "mobilenet", "U-Net": "unet", "decoder": "decoder"}
SIDES = {"full": (1024, 2048, 4096, 20000), "tiny": (64, 128)}
DECODED = {"full": (512, 1024, 2048, 4096), "tiny": (64, 128)}
"""Sides of the decoder's picture."""
BUDGETS = {"features": "64MiB", "mobilenet": "64MiB", "unet": "192MiB", "decoder": "768MiB"}
FILES = "tile, files"
"""Without a budget; values between sweeps are in files."""
EXACT = {"full": 512, "tiny": 64}
"""The side at which errors are taken: float64 is slow."""
STOCK_FITS = 9 * GIB
ONCE = dict.fromkeys(MODELS.values(), 100e6) | {"decoder": 10e6}
"""Images with more pixels than this are computed once, in the form that takes the least."""
CALLS_TIMED = 3
ENOUGH = 30.0
"""After this many seconds no further call is timed."""


def sides(case: str, size: str) -> tuple[int, ...]:
    return DECODED[size] if case == "decoder" else SIDES[size]


def made(case: str, side: int) -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(0)
    model = whole_models.CASES[case].model(side).eval()
    x = torch.randn(1, 4, side // 8, side // 8) if case == "decoder" else torch.randn(1, 3, side, side)
    return model, x


def predicted(case: str, side: int) -> dict[str, Any]:
    """Stock's peak above the parameters, the input and the result."""
    model, x = made(case, side)
    fixed = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    with torch.no_grad():
        found = pc.memory.trace(model, x, train=False, fake=True)
    result = pc.tile_plan(model, x, tile=1).graph
    return {"peak": found.peak - fixed - sum(result.fakes[v].nbytes for v in result.results)}


@torch.no_grad()
def called(case: str, form: str, side: int) -> dict[str, Any]:
    """Peak of one call, then the time of several; of a large image, the time of that one."""
    model, x = made(case, side)
    if form == "diffusers' tiling":
        model.vae.enable_tiling()  # type: ignore[union-attr, operator]
    if form == FILES:
        with tempfile.TemporaryDirectory() as folder:
            return measured(lambda: pc.tile(model, x, store=folder), once(case, side))
    if form.startswith("tile"):
        pc.tile_modules(model, "", form.partition(", ")[2] or None)
    return measured(lambda: model(x), once(case, side))


def once(case: str, side: int) -> bool:
    """Whether there is time for one call only."""
    return side**2 > ONCE[case]


def measured(call: Callable[[], Tensor], once: bool) -> dict[str, Any]:
    results: list[Tensor] = []
    peaks: list[int] = []
    seconds: list[float] = []

    def counted() -> Tensor:
        seconds.append(measure.seconds_of(lambda: peaks.append(allocated_peak(lambda: results.append(call())))))
        return results[0]

    process = measure.peak_of(counted)
    results.clear()
    if not once:
        seconds.clear()
        while len(seconds) < CALLS_TIMED and sum(seconds) < ENOUGH:
            seconds.append(measure.seconds_of(call))
    return {"peak": peaks[0] - process.result, "process": process.workspace, "seconds": min(seconds)}


@torch.no_grad()
def errors(case: str, side: int) -> dict[str, float]:
    """Root mean square errors against float64, in units of stock's."""
    model, x = made(case, side)
    exact = copy.deepcopy(model).double()(x.double())

    def error(y: Tensor) -> float:
        return (y.double() - exact).square().mean().sqrt().item()

    stock = error(model(x))
    found = {"tile": error(pc.tile(model, x, tile=max(1, side // 64)))}
    found["stock in channels_last"] = error(model(x.contiguous(memory_format=torch.channels_last)))
    if case == "decoder":
        model.vae.enable_tiling()  # type: ignore[union-attr, operator]
        found["diffusers' tiling"] = error(model(x))
    return {form: value / stock for form, value in found.items()}


def row(case: str, form: str, side: int, stock: int) -> dict[str, Any]:
    """stock: its predicted peak."""
    if form == "stock" and stock > STOCK_FITS:
        found: dict[str, Any] = {"peak": stock, "predicted": True}
    else:
        found = measure.in_fresh_process("bench.tile:called", 3600, case=case, form=form, side=side)
    print(f"{case:<10} {side:>6} {form:<20} {found}", flush=True)
    return {"case": case, "form": form, "side": side} | found


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__, ("full", "tiny"))
    parser.add_argument("--only", nargs="+", choices=list(MODELS.values()), default=list(MODELS.values()))
    arguments = parser.parse_args(argv)
    size = arguments.size
    data = measure.report_head("tile", size) | {"fits": STOCK_FITS, "rows": [], "errors": {}}
    for case in arguments.only:
        least = FILES if case == "decoder" else f"tile, {BUDGETS[case]}"
        forms = ["stock", "tile", f"tile, {BUDGETS[case]}"] + [FILES, "diffusers' tiling"] * (case == "decoder")
        for side in sides(case, size):
            stock = measure.in_fresh_process("bench.tile:predicted", 600, case=case, side=side)["peak"]
            run = [forms[0], least] if once(case, side) else forms
            data["rows"] += [row(case, form, side, stock) for form in run]
            report.store(data, arguments)
        data["errors"][case] = measure.in_fresh_process("bench.tile:errors", 3600, case=case, side=EXACT[size])
        report.store(data, arguments)
    print(f"stock's peaks above {STOCK_FITS / MIB:.0f} MiB are predictions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
