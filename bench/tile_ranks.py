"""Tiles inside of ranks: training steps on one image of which each of two ranks has half, in a budget a rank.

The U-Net of bench.tile_training, with batch norm in training and with frozen norms, batch 1, NCHW: one step (forward,
loss, backward) of stock on one process, and on two ranks (gloo) of `distributed.spatial`, of the same converted, and of
`pc.tile_modules` in a half and in a quarter of what a rank of `spatial` takes. Each form runs in processes of its own.
Losses are compared with stock's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

from . import measure, report, tile_training
from .launch import launch

CASES = ("unet", "frozen")
SIDES = {"full": (768,), "tiny": (192,)}
RANKS = 2
FORMS = ("spatial", "spatial, converted", "tile, 1/2", "tile, 1/4")
STEPS_TIMED = 3


def steps(job: dict[str, Any]) -> dict[str, Any]:
    """The peak of a step above parameters, gradients and images, the time of others, and the loss."""
    model, (x, target) = tile_training.made(job["case"], job["side"])
    images: tuple[Any, ...] = (x, target)
    if job["form"].endswith("converted"):
        pc.convert(model)
    if job["ranks"] > 1:
        mesh = dist.init_device_mesh("cpu", (job["ranks"],))
        pc.distributed.spatial(model, mesh)
        parted = target if job["form"].startswith("tile") else pc.distributed.scatter(target[:, None], mesh)[:, 0]
        images = pc.distributed.scatter(x, mesh), parted
    if job["form"].startswith("tile"):
        pc.tile_modules(model, "", job["budget"])  # plans in the first step

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(*images)
        loss.backward()
        found: Tensor = loss.detach()
        return found

    first = measure.seconds_of(step)
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    peak = allocated_peak(lambda: losses.append(step()))
    given = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None) + losses[0].nbytes
    seconds = []
    for _ in range(STEPS_TIMED):
        if job["ranks"] > 1:
            dist.barrier()
        seconds.append(measure.seconds_of(step))
    return {"peak": peak - given, "seconds": min(seconds), "first": first, "loss": losses[0].item()}


def every(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [steps(job) for job in jobs]


def rows_of(case: str, side: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for form in ("stock", *FORMS):
        job: dict[str, Any] = {"case": case, "side": side, "form": form, "ranks": 1 if form == "stock" else RANKS}
        if "/" in form:
            spatial = next(row for row in rows if row["form"] == "spatial")
            job["budget"] = spatial["peak"] // int(form[-1])
        found = [one[0] for one in launch([job], job["ranks"], 600.0, "bench.tile_ranks:every")]
        most = {name: max(one[name] for one in found if one) for name in ("peak", "seconds", "first")}
        rows.append(job | most | {"losses": [one["loss"] for one in found if one]})
        print(rows[-1], flush=True)
    return rows


def measure_all(size: str) -> dict[str, Any]:
    data = measure.report_head("tile_ranks", size)
    data["threads"] = torch.get_num_threads()
    data["rows"] = [row for case in CASES for side in SIDES[size] for row in rows_of(case, side)]
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
