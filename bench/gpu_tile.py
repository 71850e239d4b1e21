"""Whole networks on a GPU beside `pc.tile`, for bench.gpu: peak, time and error.

Every network is called as it is, by tiles chosen for speed, by tiles in a quarter and in a sixteenth of stock's own
peak, and by tiles of an image in the host's memory; one is trained too. Peaks are max_memory_allocated above
what was there before and the result; a form's first call plans, the time is the least of the later ones, on the host's
clock, to the end of the device's work. Errors are against the same network in float64, in units of stock's own. A
budget that is refused is a result, with the least that would do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from . import measure, tile
from .gpu_measure import Deadline, Save, guarded, in_time
from .measure import MIB

STOCK, TILES, QUARTER, LITTLE = "stock", "tile", "tile, 1/4 of stock's peak", "tile, 1/16 of stock's peak"
HOST = "tile, image in the host's memory"
SHARES = {QUARTER: 4, LITTLE: 16}
CALLS_TIMED = 3


@dataclass(frozen=True)
class Work:
    case: str  # of bench.tile
    side: int
    train: bool = False

    def __str__(self) -> str:
        return f"{self.case} {self.side}" + " training step" * self.train


def works(size: str) -> Iterator[Work]:
    """The most important first."""
    if size == "tiny":
        yield from (Work("unet", 32), Work("unet", 32, train=True))
        return
    yield from (Work("unet", 4096), Work("features", 8192), Work("decoder", 1024))
    yield from (Work("unet", 2048, train=True), Work("decoder", 2048))


def forms(work: Work) -> list[str]:
    return [STOCK, TILES, QUARTER, LITTLE] + [HOST] * (not work.train)


class Loss(nn.Module):
    """A network that ends in its loss, so that it is tiled to the scalar."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).square().mean()


def call_of(work: Work, form: str, device: str, stock: int) -> Callable[[], Tensor]:
    """The call of a form; stock: bytes of stock's peak."""
    model, x = tile.made(work.case, work.side)
    model = model.to(device).train(work.train)
    budget = max(1, stock // SHARES[form]) if form in SHARES else None
    x = x.pin_memory() if form == HOST and device == "cuda" else x.to(device)
    module = Loss(model) if work.train else model
    if form != STOCK:
        pc.tile_modules(module, "", budget)
    if work.train:
        return partial(_step, module, x)
    return torch.no_grad()(lambda: module(x))


def _step(module: nn.Module, x: Tensor) -> Tensor:
    module.zero_grad()
    loss = module(x)
    loss.backward()
    return loss.detach()


def _seconds(call: Callable[[], Any], device: str) -> float:
    def ended() -> None:
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    return measure.seconds_of(ended)


def _measured(work: Work, form: str, device: str, stock: int) -> dict[str, Any]:
    call = call_of(work, form, device, stock)
    try:
        first = _seconds(call, device)
    except pc.BudgetError as refused:
        return {"error": f"refused: at least {refused.least / MIB:.0f} MiB"}
    return {
        "peak": measure.peak_of(call, device).workspace,
        "first_seconds": first,
        "seconds": min(_seconds(call, device) for _ in range(CALLS_TIMED)),
        "budget": stock // SHARES[form] if form in SHARES else None,
    }


@torch.no_grad()
def errors(case: str, side: int, device: str) -> dict[str, float]:
    """Root mean square errors against float64: stock's, and of tiles in units of it."""
    model, x = tile.made(case, side)
    model, x = model.to(device).eval(), x.to(device)
    exact = copy.deepcopy(model).double()(x.double())

    def error(y: Tensor) -> float:
        return (y.double() - exact).square().mean().sqrt().item()

    stock = error(model(x))
    scale = exact.square().mean().sqrt().item()
    return {"stock": stock / scale, "tile": error(pc.tile(model, x, tile=max(1, side // 64))) / stock}


def measure_section(size: str, device: str, data: dict[str, Any], save: Save, left: Deadline) -> list[str]:
    """Fills `data` with rows and errors; returns the names of what there was no time for."""
    missing: list[str] = []
    rows = data["rows"] = []
    for work in in_time(works(size), left, missing, lambda work: f"networks: {work}"):
        stock = 0
        for form in in_time(forms(work), left, missing, f"networks: {work} {{}}".format):
            row: dict[str, Any] = {"case": work.case, "side": work.side, "train": work.train, "form": form}
            row |= guarded(partial(_measured, work, form, device, stock), device)
            stock = row.get("peak", 0) if form == STOCK else stock
            rows.append(row)
            outcome = row.get("error") or (
                f"{row['peak'] / MIB:.0f} MiB, {row['seconds']:.4f} s (first {row['first_seconds']:.2f})"
            )
            print(f"{work!s:<28} {form:<44} {outcome}", flush=True)
            save()
    side = tile.EXACT[size]
    names = dict.fromkeys(work.case for work in works(size))
    for case in in_time(names, left, missing, "networks: error of {}".format):
        data.setdefault("errors", {})[case] = found = guarded(partial(errors, case, side, device), device)
        print(f"{case:<28} error of stock and of tiles in units of it: {found}", flush=True)
    save()
    return missing
