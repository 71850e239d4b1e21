"""Spatial parallelism: what one image costs each of several ranks, and what travels between them.

On 1, 2 and 4 ranks (gloo on CPUs, NCCL where there are GPUs): the peak of a training step and of a forward pass beside
the same on one process; the bytes of images that are sent beside the least that the geometry asks for, counted on its
own; a timeline of one forward pass, with what is computed while messages travel; and a model, no measurement, of 8 to
64 GPUs from the rates that are given in it. `python -m bench.spatial [--size full|small|tiny]`.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

from . import measure, report
from .cases import LAYOUTS
from .launch import launch

# Side of the image, channels, rounds of timing.
SIZES = {"full": (512, 32, 1), "small": (256, 16, 1), "tiny": (64, 8, 1)}
RANKS = (1, 2, 4)
TARGET = 1.1


class UNet(nn.Module):
    """Two levels down and up: strided convolutions, batch norm, transposed convolutions, skips."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels

        def block(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            )  # fmt: skip

        self.first, self.second, self.third = block(3, c), block(c, 2 * c), block(2 * c, 4 * c)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.join2, self.join1 = block(4 * c, 2 * c), block(2 * c, c)
        self.last = nn.Conv2d(c, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        y = self.up2(self.third(F.max_pool2d(b, 2)))
        y = self.up1(self.join2(torch.cat([y, b], 1)))
        return self.last(self.join1(torch.cat([y, a], 1)))


def chain(channels: int) -> nn.Sequential:
    """A plain chain, of which little is alive at once."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)]
    return nn.Sequential(*layers)


NETWORKS: dict[str, Any] = {"U-Net": UNet, "chain": chain}


def picture(side: int) -> Tensor:
    """Slopes and stripes: no two ranks see the like."""
    rows, columns = torch.linspace(0, 9, side).view(-1, 1), torch.linspace(-2, 1, side)
    return torch.stack([rows.sin() + columns, columns.square() + rows, (rows * 7).cos() * columns])[None]


def made(job: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The model, and this rank's input."""
    torch.manual_seed(0)
    model = NETWORKS[job["network"]](job["channels"]).to(memory_format=LAYOUTS[job["layout"]])
    if job["lean"]:
        pc.convert(model)
    x = picture(job["side"]).to(memory_format=LAYOUTS[job["layout"]])
    if job["ranks"] == 1:
        return model, x
    mesh = dist.init_device_mesh("cpu", (job["ranks"],))
    return pc.distributed.spatial(model, mesh), pc.distributed.scatter(x, mesh)


def step(model: nn.Module, x: Any, train: bool) -> None:
    if not train:
        with torch.no_grad():
            model(x)
        return
    model(x).square().mean().backward()


def peaks(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each job: peak above the model and its gradients, seconds of a step, and what was sent."""
    found = []
    for job in jobs:
        model, x = made(job)
        step(model, x, job["train"])  # what is set up once is there, gradients too
        peak = allocated_peak(functools.partial(step, model, x, job["train"]))
        with pc.distributed.Traffic() as traffic:
            step(model, x, job["train"])
        seconds = []
        for _ in range(job["rounds"]):
            if job["ranks"] > 1:
                dist.barrier()
            start = time.perf_counter()
            step(model, x, job["train"])
            seconds.append(time.perf_counter() - start)
        found.append({"peak": peak, "seconds": statistics.median(seconds), "messages": traffic.messages,
                      "sent": traffic.bytes, "reduced": traffic.reduced})  # fmt: skip
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What the geometry asks for, counted on its own: of every layer that reads neighbours, the rows that a rank's outputs
# read and that it does not hold.


def least_bytes(job: dict[str, Any]) -> list[int]:
    """Sent by each rank in a forward pass of this network, even parts, 4 bytes an element; in a training step twice
    that, since a gradient comes back for every row but the image's own, which has none. For networks of 3x3
    convolutions with padding 1 and parts that pools and transposed convolutions divide evenly: these need no neighbours
    then.
    """
    torch.manual_seed(0)
    model, ranks = NETWORKS[job["network"]](job["channels"]), job["ranks"]
    total = [0] * ranks

    def note(module: Any, inputs: tuple[Any, ...]) -> None:
        _, channels, height, width = inputs[0].shape
        if module.kernel_size[0] == 3:
            if height % ranks:
                raise ValueError(f"expected the height to be a multiple of {ranks}, got {height}")
            for rank in range(ranks):
                passes = 2 if job["train"] and channels != 3 else 1
                total[rank] += passes * ((rank > 0) + (rank < ranks - 1)) * channels * width * 4

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(note)
    with torch.device("meta"):
        model.to("meta")(torch.empty(1, 3, job["side"], job["side"]))
    return total


def timelines(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a forward pass: when messages were posted, waited for and there, in seconds since its begin."""
    found = []
    for job in jobs:
        model, x = made(job)
        step(model, x, job["train"])
        dist.barrier()
        with pc.distributed.Traffic() as traffic:
            start = time.perf_counter()
            step(model, x, job["train"])
            end = time.perf_counter()
        events = [{name: moment - start for name, moment in event.items()} for event in traffic.transfers]
        found.append({"events": events, "seconds": end - start})
    return found


# ----------------------------------------------------------------------------------------------------------------------
# A model of many GPUs.

# What it is made of: H100's measured matrix rate in bfloat16 and memory rate, the share of the matrix rate that
# convolutions are taken to reach, and nominal link rates a direction and GPU.
RATES = {"matrix": 798e12, "memory": 3.0e12, "share": 0.6, "NVLink": 450e9, "InfiniBand": 50e9, "latency": 15e-6}


def modelled(channels: int, side: int, gpus: int) -> dict[str, float]:
    """Seconds of a forward pass of the U-Net over a square image in bfloat16, on GPUs in groups of 8: a layer takes the
    longer of its arithmetic and its traffic, on 1/GPUs of the image; a halo travels while the part that needs none is
    computed, and what is left of it is waited for. Norms' sums are a latency for each doubling of ranks.
    """
    model = UNet(channels)
    total = waited = 0.0
    link = RATES["NVLink"] if gpus <= 8 else RATES["InfiniBand"]

    def note(module: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        nonlocal total, waited
        read, written = inputs[0].numel() * 2 / gpus, output.numel() * 2 / gpus
        seconds = (read + written) / RATES["memory"]
        if isinstance(module, nn.BatchNorm2d):
            # Read twice; two rounds of messages where there are neighbours.
            total += seconds + read / RATES["memory"]
            if gpus > 1:
                waited += RATES["latency"] * (gpus - 1).bit_length()
            return
        weight = module.weight
        flops = 2 * weight.numel() * (output.numel() if isinstance(module, nn.Conv2d) else inputs[0].numel())
        flops /= output.size(1) if isinstance(module, nn.Conv2d) else inputs[0].size(1)
        seconds = max(seconds, flops / gpus / (RATES["matrix"] * RATES["share"]))
        total += seconds
        if gpus > 1 and weight.size(2) == 3:
            halo = inputs[0].size(1) * inputs[0].size(3) * 2 / link + RATES["latency"]
            rows = output.size(2) / gpus
            waited += max(0.0, halo - seconds * max(0.0, 1 - 2 / rows))

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d)):
            module.register_forward_hook(note)
    with torch.device("meta"):
        model.to("meta")(torch.empty(1, 3, side, side))
    return {"computed": total, "waited": waited, "seconds": total + waited}


# ----------------------------------------------------------------------------------------------------------------------


def measure_all(size: str) -> dict[str, Any]:
    side, channels, rounds = SIZES[size]
    base = {"side": side, "channels": channels, "rounds": rounds}
    forms = [
        base | {"network": network, "layout": layout, "lean": lean, "train": train}
        for network in NETWORKS for layout in LAYOUTS for train in (True, False) for lean in (False, True)
        if train or not lean
    ]  # fmt: skip
    rows: list[dict[str, Any]] = [dict(form, of={}) for form in forms]
    for ranks in RANKS:
        jobs = [form | {"ranks": ranks} for form in forms]
        results: Any = launch(jobs, ranks, 300.0, "bench.spatial:peaks")
        for i, row in enumerate(rows):
            each = [result[i] for result in results]
            row["of"][str(ranks)] = {
                "peak": max(one["peak"] for one in each), "seconds": max(one["seconds"] for one in each),
                "messages": sum(one["messages"] for one in each), "reduced": sum(one["reduced"] for one in each),
                "sent": [one["sent"] for one in each], "least": least_bytes(jobs[i]),
            }  # fmt: skip
    shown = base | {"network": "U-Net", "layout": "channels_last", "lean": True, "train": False, "ranks": 2}
    lines = [result[0] for result in launch([shown], 2, 300.0, "bench.spatial:timelines")]
    data = measure.report_head("spatial", size)
    data |= {"base": base, "rows": rows, "target": TARGET, "timeline": lines, "rates": RATES}
    sides = (4096, 16384)
    data["model"] = [
        {"side": s, "gpus": gpus} | modelled(64, s, gpus) for s in sides for gpus in (1, 8, 16, 32, 64)
    ]  # fmt: skip
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
