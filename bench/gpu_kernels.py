"""Times of the memory-bound kernels on one device, for bench.gpu: a section per family, a row of the results per job.

Every job is timed three ways in turn: ours under pc.backend("native"), the operator of stock PyTorch that computes the
same, and a plain copy of the job's bytes (half of them read, half written). These bytes are the floor, the least that a
pass must read and write: ReLU forward reads and writes the tensor and writes an eighth of a byte per element. Ratios
are of medians: copy's time in units of ours is the share of the device's rate that is reached, stock's how much faster
we are. Both sides allocate their results in every call, except where the name says in place; the copy writes into
memory that exists. The norms are in bench/gpu_norms.py; a new family is one more entry in SECTIONS. Without a GPU the
same code times what computes there, which tests it and measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import gpu_norms, measure
from .cases import DTYPES, LAYOUTS, OURS, STOCK, backend
from .gpu_jobs import COPY, NEAR_COPY, OF_COPY, OF_STOCK, SIZES, Bound, Job
from .gpu_measure import Deadline, Save, Timer, guarded, in_time
from .measure import Spread

ops, aten = torch.ops.patchconv, torch.ops.aten
SECONDS = {"full": 0.03, "tiny": 0.0}  # of one of the two visits to a side
KINDS = {"relu": (0, 0.0, 0.0), "leaky_relu": (1, 0.01, 0.0), "relu6": (2, 0.0, 6.0), "hardsigmoid": (4, 0.0, 0.0)}

MASK_BACKWARD, MAX_POOL_FORWARD = {OF_COPY: 0.9, OF_STOCK: 1.35}, {OF_STOCK: 1.4}

# ----------------------------------------------------------------------------------------------------------------------
# Packed masks


def mask_forward(job: Job, device: str, in_place: bool = False) -> Bound:
    x, kind = job.tensor(device), KINDS[job.name.removesuffix(" in place")]

    def relu_in_place() -> tuple[()]:  # which makes no result
        torch.relu_(x)
        return ()

    stock: dict[str, Callable[[], Any]] = {
        "relu": lambda: torch.relu(x),
        "relu in place": relu_in_place,
        "leaky_relu": lambda: aten.leaky_relu(x, 0.01),
        "relu6": lambda: aten.relu6(x),
        "hardsigmoid": lambda: aten.hardsigmoid(x),
    }
    ours = ops._mask_forward_ if in_place else ops._mask_forward
    return Bound(2 * x.nbytes + x.numel() // 8, partial(ours, x, *kind), stock[job.name])


def mask_backward(job: Job, device: str) -> Bound:
    x, kind = job.tensor(device), KINDS[job.name]
    grad, bits, y = torch.randn_like(x), ops._mask_pack(x, *kind), torch.relu(x)
    inside, outside = 1 / 6 if job.name == "hardsigmoid" else 1.0, kind[1] if job.name == "leaky_relu" else 0.0
    stock: dict[str, Callable[[], Tensor]] = {
        "relu": lambda: aten.threshold_backward(grad, y, 0),
        "leaky_relu": lambda: aten.leaky_relu_backward(grad, x, 0.01, False),
        "relu6": lambda: aten.hardtanh_backward(grad, x, 0, 6),
        "hardsigmoid": lambda: aten.hardsigmoid_backward(grad, x),
    }
    ours = partial(ops._mask_backward, grad, bits, inside, outside)
    return Bound(2 * x.nbytes + bits.nbytes, ours, stock[job.name])


def masks(size: str) -> Iterator[Job]:
    for number in SIZES[size]:
        for dtype in DTYPES:
            yield Job("relu", "forward", dtype, number, mask_forward, targets=NEAR_COPY)
            yield Job("relu", "backward", dtype, number, mask_backward, targets=MASK_BACKWARD)
            in_place = partial(mask_forward, in_place=True)
            yield Job("relu in place", "forward", dtype, number, in_place, targets=NEAR_COPY)
    for name in list(KINDS)[1:]:  # the same kernels, with a little more arithmetic
        for dtype in DTYPES:
            yield Job(name, "forward", dtype, SIZES[size][0], mask_forward, targets=NEAR_COPY)
            yield Job(name, "backward", dtype, SIZES[size][0], mask_backward, targets=NEAR_COPY)


# ----------------------------------------------------------------------------------------------------------------------
# Max pools

WINDOWS = {"max pool 2x2": (2, 2, 0), "max pool 3x3 stride 2": (3, 2, 1)}  # kernel, stride, padding


def max_pool(job: Job, device: str) -> Bound:
    kernel, stride, padding = ([n, n] for n in WINDOWS[job.name])
    x = job.tensor(device)
    y, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding, [1, 1], False)
    window = (kernel, stride, padding, [1, 1])
    _, offsets = ops._max_pool(x, *window, list(y.shape[2:]))
    floor = x.nbytes + y.nbytes + offsets.nbytes
    if job.pass_ == "forward":
        return Bound(
            floor,
            lambda: ops._max_pool(x, *window, list(y.shape[2:])),
            lambda: aten.max_pool2d_with_indices(x, *window, False),
        )
    grad = torch.randn_like(y)
    return Bound(
        floor,
        lambda: ops._max_pool_backward(grad, offsets, list(x.shape), *window),
        lambda: aten.max_pool2d_with_indices_backward(grad, x, *window, False, indices),
    )


def pools(size: str) -> Iterator[Job]:
    for number in SIZES[size]:
        for name in WINDOWS:
            for layout in LAYOUTS:
                for dtype in DTYPES:
                    yield Job(name, "forward", dtype, number, max_pool, layout, MAX_POOL_FORWARD)
                    yield Job(name, "backward", dtype, number, max_pool, layout)


# ----------------------------------------------------------------------------------------------------------------------
# Dropout


def dropout_forward(job: Job, device: str) -> Bound:
    x = job.tensor(device)
    return Bound(2 * x.nbytes, lambda: ops.dropout(x, 0.5), lambda: aten.native_dropout(x, 0.5, True))


def dropout_backward(job: Job, device: str) -> Bound:
    grad = job.tensor(device)
    seed, kept = torch.tensor([2**62 + 1], device=device), torch.rand_like(grad) > 0.5
    return Bound(
        2 * grad.nbytes,
        lambda: ops._dropout(grad, seed, 0.5, 2.0, 0.0, 0.0),
        lambda: aten.native_dropout_backward(grad, kept, 2.0),
    )


def dropout(size: str) -> Iterator[Job]:
    for number in SIZES[size]:
        for dtype in DTYPES:
            yield Job("dropout", "forward", dtype, number, dropout_forward)
            yield Job("dropout", "backward", dtype, number, dropout_backward)


SECTIONS: dict[str, Callable[[str], Iterator[Job]]] = {
    "masks": masks, "norms": gpu_norms.norms, "pools": pools, "dropout": dropout,
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def copy_of(number: int, device: str) -> Callable[[], Tensor]:
    source = torch.ones(number // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def timed(job: Job, device: str, timer: Timer, seconds: float) -> dict[str, Any]:
    with backend("native", device), torch.no_grad():
        bound = job.bind(job, device)
        calls = {OURS: bound.ours, STOCK: bound.stock, COPY: copy_of(bound.floor, device)}
        samples: dict[str, list[float]] = {side: [] for side in calls}
        for _ in range(2):
            for side, call in calls.items():
                samples[side] += timer(call, seconds)
        workspace = {side: measure.peak_of(calls[side], device).workspace for side in (OURS, STOCK)}
    ms = {side: statistics.median(taken) for side, taken in samples.items()}
    ratios = {OF_COPY: round(ms[COPY] / ms[OURS], 2), OF_STOCK: round(ms[STOCK] / ms[OURS], 2)}
    return {
        "floor_bytes": bound.floor,
        "ms": {side: Spread.of(taken).facts(5) for side, taken in samples.items()},
        "calls": {side: len(taken) for side, taken in samples.items()},
        "gb_s": {side: round(bound.floor / time / 1e6, 1) for side, time in ms.items()},
        "workspace": workspace,
        "allowed": bound.allowed,
        **ratios,
        "met": {name: ratios[name] >= target for name, target in job.targets.items()},
    }


def measure_section(section: str, size: str, device: str, rows: list[Any], save: Save, left: Deadline) -> list[str]:
    """Fills `rows` with a section's times; returns the names of what there was no time for."""
    missing: list[str] = []
    timer = Timer(device)
    for job in in_time(SECTIONS[section](size), left, missing, lambda job: f"{section}: {job}"):
        row = job.facts | guarded(partial(timed, job, device, timer, SECONDS[size]), device)
        rows.append(row)
        outcome = row.get("error") or (
            f"{row['ms'][OURS]['median']:.4f} ms, {row['gb_s'][OURS]:.0f} GB/s, {row[OF_COPY]:.2f} of copy's rate, "
            f"stock {row[OF_STOCK]:.2f}"
        )
        print(f"{job!s:<64} {outcome}", flush=True)
        save()
    return missing
