"""The ways in which bench.xray trains, and what one rank does in each: `train`, the same steps in every way.

A way is a mesh of ranks (axes "data", "stage", "spatial") and what is done to the model. All ways see the same global
batches and start with the same parameters. Batch norm's statistics are those of what one forward pass sees: a rank's
share of the batch under data parallelism, a micro-batch in a pipeline. `chunks` is in how many parts the batch falls by
that; one process that adds up gradients over as many chunks computes the same, and so is the way's reference.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native import _library
from patchconv_native.distributed import scatter, spatial
from patchconv_native.memory.timeline import STEP, timeline

from . import xray_model
from .xray_model import NETS, DenseBlock, DenseLayer

WATCHED = 2  # steps whose memory is counted; the others are timed
SETS = 2  # global batches, taken in turn
MOMENTUM = 0.9


@dataclass(frozen=True)
class Way:
    title: str
    axes: tuple[str, ...] = ()
    micro: int = 1
    """Micro-batches of a pipeline; in one process, chunks of the batch whose gradients are added up."""
    sync: bool = False
    """Batch norm over the ranks of axis "data"."""
    lean: bool = False
    checkpoints: bool = False
    shards: bool = False

    def mesh(self, ranks: int) -> dict[str, int] | None:
        """Size of each axis; None where there are too few ranks."""
        if not self.axes:
            return {}
        if ranks < 2 * len(self.axes):
            return None
        if len(self.axes) == 2:  # what is not data has two ranks
            return {self.axes[0]: ranks // 2, self.axes[1]: 2}
        return {self.axes[0]: 2 if self.axes == ("stage",) else ranks}

    def chunks(self, ranks: int) -> int:
        sizes = self.mesh(ranks) or {}
        return self.micro * (1 if self.sync else sizes.get("data", 1))


WAYS = {
    "one": Way("one process"),
    "one converted": Way("one process, `pc.convert`", lean=True),
    "checkpoint": Way("one process, `pc.checkpoint_modules` on dense layers", checkpoints=True),
    "data": Way("data parallel (DDP)", ("data",)),
    "data sync": Way("data parallel, batch norm over all ranks", ("data",), sync=True),
    "data converted": Way("data parallel, `pc.convert`", ("data",), lean=True),
    "fsdp": Way("data parallel, sharded (FSDP2)", ("data",), shards=True),
    "model": Way("model parallel, two stages, two micro-batches (1F1B)", ("stage",), micro=2),
    "model whole": Way("model parallel, two stages, the whole batch", ("stage",)),
    "both": Way("data x model parallel, two micro-batches", ("data", "stage"), micro=2),
    "both whole": Way(
        "data x model parallel, whole shares, batch norm over both", ("data", "stage"), sync=True
    ),
    "spatial": Way("spatial: strips of rows", ("spatial",)),
    "spatial lean": Way("spatial, `pc.convert`", ("spatial",), lean=True),
    "data spatial": Way("data x spatial", ("data", "spatial")),
}  # fmt: skip


def chunked(chunks: int) -> str:
    """The name of the reference that takes the batch in so many parts."""
    return "one" if chunks == 1 else f"one in {chunks}"


def way_of(name: str) -> Way:
    if name in WAYS:
        return WAYS[name]
    chunks = int(name.removeprefix("one in "))
    return Way(f"one process, gradients of {chunks} chunks added up", micro=chunks)


# ----------------------------------------------------------------------------------------------------------------------
# Memory of this rank


class Watch:
    """The peak within steps of what torch's allocator gave out to this process since the watch began."""

    def __init__(self, device: str) -> None:
        gc.collect()
        self.device = device
        if device == "cuda":
            self.before = torch.cuda.memory_allocated()
        else:
            self.census = _library.load().Census("cpu", False)
        self.peak = self.kept = 0

    def begin(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.kept = torch.cuda.memory_allocated() - self.before
        else:
            self.census.enter(STEP["forward"])

    def end(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - self.before)
        else:
            self.census.leave(STEP["forward"])

    def close(self) -> dict[str, int]:
        """The peak, and what was there as the last step that was watched began."""
        if self.device == "cpu":
            self.census.stop()
            steps = timeline(self.census.events(), 0, [], 1e-9, {}).phases
            self.peak, self.kept = max(step.peak for step in steps), steps[-1].before
        return {"peak": self.peak, "kept": self.kept}


# ----------------------------------------------------------------------------------------------------------------------
# What a way does to the model

Step = Callable[[Any, Tensor], Tensor | None]
"""Input and findings of this rank to its part of the loss, None where the loss is another rank's."""


def sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM)


def plain_step(model: nn.Module, rate: float, chunks: int) -> Step:
    optimizer = sgd(model.parameters(), rate)

    def step(x: Any, findings: Tensor) -> Tensor:
        optimizer.zero_grad()
        parts = zip(x.chunk(chunks), findings.chunk(chunks), strict=True) if chunks > 1 else [(x, findings)]
        total = torch.zeros((), device=findings.device)
        for pictures, found in parts:
            value = xray_model.loss(model(pictures), found) / chunks
            value.backward()
            total = total + value.detach()
        optimizer.step()
        return total

    return step


def pipeline_step(model: nn.Module, rate: float, way: Way, mesh: Any, device: str) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    place = mesh.get_local_rank("stage")
    stage = PipelineStage(model, place, 2, torch.device(device), group=mesh.get_group("stage"))
    kind = Schedule1F1B if way.micro >= 2 else ScheduleGPipe  # the former wants as many micro-batches as stages
    schedule = kind(stage, way.micro, loss_fn=xray_model.loss)
    optimizer = sgd(model.parameters(), rate)

    def step(x: Any, findings: Tensor) -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=findings, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def prepared(way: Way, job: dict[str, Any], mesh: Any, device: str) -> Step:
    whole = xray_model.network(NETS[job["net"]]).to(device, getattr(torch, job["dtype"]))
    model: nn.Module = xray_model.stages(whole)[mesh.get_local_rank("stage")] if "stage" in way.axes else whole
    del whole
    gc.collect()  # the other stage goes
    if way.lean:
        pc.convert(model)
    if way.checkpoints:
        pc.checkpoint_modules(model, DenseLayer)
    if way.sync:
        model = xray_model.synced(model, mesh.get_group("data"), device)
    if "spatial" in way.axes:
        model = spatial(model, mesh["spatial"], dims="H")
    if way.shards:
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            if isinstance(module, DenseBlock):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif "data" in way.axes:
        # Of a module whose forward runs several times before its backward does, DDP counts parameters twice as it
        # rebuilds its buckets, and fails; where it looks for unused ones it does not rebuild them.
        model = nn.parallel.DistributedDataParallel(
            model, process_group=mesh.get_group("data"), find_unused_parameters="stage" in way.axes
        )
    if "stage" in way.axes:
        return pipeline_step(model, job["rate"], way, mesh, device)
    return plain_step(model, job["rate"], way.micro)


def batch_of(way: Way, job: dict[str, Any], mesh: Any, number: int, device: str) -> tuple[Any, Tensor]:
    """This rank's part of a global batch. Of the pictures no more than that is held."""
    share, place = job["batch"], 0
    if "data" in way.axes:
        share, place = share // mesh["data"].size(), mesh.get_local_rank("data")
    first = number % SETS * job["batch"] + place * share
    pictures, findings = xray_model.radiographs(first, share, job["side"])
    x: Any = None
    if "stage" not in way.axes or mesh.get_local_rank("stage") == 0:
        x = xray_model.to_input(pictures, getattr(torch, job["dtype"]), device)
    if "spatial" in way.axes:
        x = scatter(x, mesh["spatial"], dims="H")
    return x, findings.to(device)


def train_all(jobs: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """What this rank finds, job for job; None where it takes no part. A job: way, ranks, net, batch, rate, dtype, and
    `runs`, pairs of side and steps. In a process group of at least so many ranks.
    """
    return [train(job) for job in jobs]


def train(job: dict[str, Any]) -> dict[str, Any] | None:
    way, device = way_of(job["way"]), "cuda" if torch.cuda.is_available() else "cpu"
    sizes, mesh = way.mesh(job["ranks"]), None
    if sizes is None or job["batch"] % (way.micro * sizes.get("data", 1)):
        raise ValueError(f"{job['way']}: {job['ranks']} ranks and batch {job['batch']} do not suit it")
    if sizes:
        mesh = dist.init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if mesh.get_coordinate() is None:
            return None
    elif dist.is_initialized() and dist.get_rank() > 0:
        return None
    return {"runs": [trained(way, job | {"side": side, "steps": steps}, mesh, device) for side, steps in job["runs"]]}


def trained(way: Way, job: dict[str, Any], mesh: Any, device: str) -> dict[str, Any]:
    groups = [] if mesh is None else [mesh.get_group(axis) for axis in mesh.mesh_dim_names]
    watch: Watch | None = Watch(device)
    step = prepared(way, job, mesh, device)
    memory: dict[str, int] = {}
    losses: list[float] = []
    seconds: list[float] = []
    for number in range(job["steps"]):
        x, findings = batch_of(way, job, mesh, number, device)
        gc.collect()
        for group in groups:
            dist.barrier(group)
        if watch is not None:
            watch.begin()
        start = time.perf_counter()
        value = step(x, findings)
        if device == "cuda":
            torch.cuda.synchronize()
        if watch is None:
            seconds.append(time.perf_counter() - start)
        else:
            watch.end()
        if value is not None:
            losses.append(value.item())
        del x
        if watch is not None and number + 1 == min(WATCHED, job["steps"]):
            memory, watch = watch.close(), None
    return memory | {"losses": losses, "seconds": seconds, "threads": torch.get_num_threads()}


def merged(job: dict[str, Any], ranks: list[dict[str, Any] | None]) -> dict[str, Any]:
    """The row of a way, of what its ranks found: of the last run, and peaks of all."""
    there = [rank["runs"][-1] for rank in ranks if rank is not None]
    having = [run["losses"] for run in there if run["losses"]]
    # A step is over when all ranks are.
    steps = [max(pair) for pair in zip(*(run["seconds"] for run in there), strict=True)]
    way = way_of(job["way"])
    by_side = {side: max(rank["runs"][i]["peak"] for rank in ranks if rank) for i, (side, _) in enumerate(job["runs"])}
    return {
        "way": job["way"], "title": way.title, "ranks": len(there), "mesh": way.mesh(job["ranks"]),
        "chunks": way.chunks(job["ranks"]), "threads": there[0]["threads"], "peaks": [run["peak"] for run in there],
        "kept": [run["kept"] for run in there], "by_side": sorted(by_side.items()),
        "losses": [statistics.fmean(values) for values in zip(*having, strict=True)],
        "seconds": {"median": statistics.median(steps), "least": min(steps), "most": max(steps)},
    }  # fmt: skip
