"""Norms with their activation, and residual sums with ReLU, for bench.gpu_kernels: what is timed beside what.

Batch norm's forward passes are whole operators, with the moving of running statistics and, in eval mode, the copies
that are kept of them. The other forward passes are the pieces that they are made of, without autograd: the kernels and
what they allocate. Backward passes go through autograd on both sides, so that stock's is the one that belongs to its
forward pass, cuDNN's where it takes that. Parameters and statistics are float32; group norm's parameters have the
input's type, since stock's kernel on CUDA takes no other.

The floors: eval reads and writes. In training, statistics come first, so the tensor is read twice, and backward reads
tensor and gradient twice; but where what is read twice fits the level-2 cache, it comes from memory once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import patchconv_native as pc

from .cases import DTYPES, LAYOUTS
from .gpu_jobs import NEAR_COPY, NOT_SLOWER, NUMBERS, OF_STOCK, Bound, Job
from .measure import MIB

ops, lf = torch.ops.patchconv, pc.functional
SIZES = {"full": (256 * MIB, 1024 * MIB, MIB), "tiny": (MIB // 16,)}  # the most important first
SHAPES = {"full": ((1, 128, 512, 512), (1, 512, 64, 64), (1, 256, 256, 256)), "tiny": ((1, 64, 16, 16),)}
GROUPS, EPS, MOMENTUM = 32, 1e-5, 0.1
SILU = 2  # core/norm.h

# What is asked of the ratios: a pass over the tensor saved each time, on both sides at the memory's rate.
BATCH_NORM_EVAL = {OF_STOCK: 1.8}
GROUP_NORM_FORWARD, GROUP_NORM_BACKWARD = {OF_STOCK: 1.5}, {OF_STOCK: 1.3}


def cached(number: int, device: str) -> bool:
    """Whether so many bytes that were just read are read again without going to memory."""
    return device == "cuda" and number <= torch.cuda.get_device_properties(0).L2_cache_size


def sums(x: Tensor) -> int:
    """Bytes that the kernels may take for sums of parts: some numbers a channel for every 16 KiB at least."""
    return NUMBERS + x.nbytes // 32


def parameters(x: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Weight and bias of x's channels."""
    weight = torch.rand(x.shape[1], dtype=dtype, device=x.device) + 0.5
    return [weight, torch.randn_like(weight)]


def running(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of x's channels."""
    return torch.zeros(x.shape[1], device=x.device), torch.ones(x.shape[1], device=x.device)


def batch_norm_eval(job: Job, device: str) -> Bound:
    x = job.tensor(device)
    (w, b), (mean, var) = parameters(x), running(x)
    return Bound(
        2 * x.nbytes,
        lambda: lf.batch_norm_relu(x, mean, var, w, b),
        lambda: F.relu(F.batch_norm(x, mean, var, w, b)),
    )


def batch_norm_masked(job: Job, device: str) -> Bound:
    """The same where the input's gradient is wanted and the weights are frozen: with the bits that backward needs."""
    x = job.tensor(device)
    (w, b), (mean, var) = parameters(x), running(x)

    def ours() -> Any:
        return ops._normalize_masked(x, w, b, mean.clone(), var.clone(), EPS)

    return Bound(2 * x.nbytes + x.numel() // 8, ours, lambda: F.relu(F.batch_norm(x, mean, var, w, b)))


def batch_norm_training(job: Job, device: str) -> Bound:
    x = job.tensor(device)
    (w, b), statistics = parameters(x), (running(x), running(x))
    return Bound(
        (2 if cached(x.nbytes, device) else 3) * x.nbytes,
        lambda: lf.batch_norm_relu(x, *statistics[0], w, b, True, MOMENTUM, EPS),
        lambda: F.relu(F.batch_norm(x, *statistics[1], w, b, True, MOMENTUM, EPS)),
        sums(x),
    )


def backward(x: Tensor, ours: Tensor, stock: Tensor, leaves: list[Tensor], device: str) -> Bound:
    """Of two outputs of the same leaves: x and its parameters."""
    grads = [torch.randn_like(y) for y in (ours, stock)]
    grads[1].copy_(grads[0])  # each in the layout of its output
    again = partial(torch.autograd.grad, retain_graph=True)
    return Bound(
        (3 if cached(2 * x.nbytes, device) else 5) * x.nbytes,
        lambda: again(ours, leaves, grads[0]),
        lambda: again(stock, leaves, grads[1]),
        sums(x),
    )


def batch_norm_backward(job: Job, device: str) -> Bound:
    x = job.tensor(device)
    x, w, b = leaves = [t.requires_grad_() for t in (x, *parameters(x))]
    statistics = running(x), running(x)
    with torch.enable_grad():
        ours = lf.batch_norm_relu(x, *statistics[0], w, b, True, MOMENTUM, EPS)
        stock = F.relu(F.batch_norm(x, *statistics[1], w, b, True, MOMENTUM, EPS))
    return backward(x, ours, stock, leaves, device)


def group_norm_forward(job: Job, device: str) -> Bound:
    x = job.tensor(device)
    w, b = parameters(x, x.dtype)
    return Bound(
        (2 if cached(x.nbytes, device) else 3) * x.nbytes,
        lambda: ops._group_norm(x, w, b, GROUPS, EPS, SILU),
        lambda: F.silu(F.group_norm(x, GROUPS, w, b, EPS)),
        sums(x),
    )


def group_norm_backward(job: Job, device: str) -> Bound:
    x = job.tensor(device)
    x, w, b = leaves = [t.requires_grad_() for t in (x, *parameters(x, x.dtype))]
    with torch.enable_grad():
        ours = lf.group_norm_silu(x, GROUPS, w, b, EPS)
        stock = F.silu(F.group_norm(x, GROUPS, w, b, EPS))
    return backward(x, ours, stock, leaves, device)


def add_relu(job: Job, device: str) -> Bound:
    x = job.tensor(device)
    other = torch.randn_like(x)
    return Bound(
        3 * x.nbytes + x.numel() // 8,
        lambda: ops._add_mask_forward(x, other),
        lambda: F.relu(torch.add(x, other)),
    )


def norms(size: str) -> Iterator[Job]:
    for number in SIZES[size]:
        for dtype in DTYPES:
            for layout in LAYOUTS:
                rest: tuple[str, int] = (dtype, number)
                eval_ = "batch norm + ReLU, eval"
                yield Job(eval_, "forward", *rest, batch_norm_eval, layout, BATCH_NORM_EVAL)
                yield Job(f"{eval_}, mask", "forward", *rest, batch_norm_masked, layout, BATCH_NORM_EVAL)
                training = "batch norm + ReLU, training"
                yield Job(training, "forward", *rest, batch_norm_training, layout, NOT_SLOWER)
                yield Job(training, "backward", *rest, batch_norm_backward, layout, NOT_SLOWER)
            yield Job("add + ReLU", "forward", dtype, number, add_relu, targets=NEAR_COPY)
    for shape in SHAPES[size]:
        name = f"group norm + SiLU {'x'.join(map(str, shape))}"
        for dtype, of in DTYPES.items():
            number = torch.Size(shape).numel() * of.itemsize
            for layout in LAYOUTS:
                yield Job(name, "forward", dtype, number, group_norm_forward, layout, GROUP_NORM_FORWARD, shape)
                yield Job(name, "backward", dtype, number, group_norm_backward, layout, GROUP_NORM_BACKWARD, shape)
