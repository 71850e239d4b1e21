"""Rules for norms. They take the statistics of the whole image (`moments`)."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .axis import Executor, Executors, executors_of
from .layout import with_usual_strides
from .moments import Moments, moments, normalize
from .operands import aligned, parameter, wrap
from .rules import refuse, rule
from .tensor import SpatialTensor
from .windows import by_sample


def _check(function: str, x: Any) -> None:
    if not isinstance(x, SpatialTensor) or x.dim() < 2 or 1 in x.axes:
        raise refuse(function, "it takes (N, C, ...), cut along spatial dimensions or the batch")


@torch.no_grad()
def _update(running: Tensor | None, to: Tensor, momentum: float, executors: Executors) -> None:
    if running is not None and all(executor.updates_buffers for executor in executors):
        running.mul_(1 - momentum).add_(to.to(running.dtype).view_as(running), alpha=momentum)


TRACKING = {F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm}
"""Functions that move running statistics."""


_wider: contextvars.ContextVar[Executor | None] = contextvars.ContextVar(
    "executor over whose parts batch norms take statistics", default=None
)


@contextlib.contextmanager
def statistics_over(executor: Executor) -> Iterator[None]:
    """Batch norms inside take the statistics of all parts of an executor: those of the image, and of other images."""
    token = _wider.set(executor)
    try:
        yield
    finally:
        _wider.reset(token)


def _broadcast(x: Tensor) -> list[int]:
    """What a parameter for each channel is viewed as."""
    return [1, -1] + [1] * (x.dim() - 2)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, x: SpatialTensor) -> Tensor:
    """y * weight + bias of a part, in the dtype of y."""
    weight, bias = (None if p is None else parameter(p, x).view(_broadcast(x)).to(y.dtype) for p in (weight, bias))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _batch_norm(
    x: Any, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    _check("batch_norm", x)
    local = x._local
    if not training:
        y = functional.batch_norm(
            local, running_mean, running_var, parameter(weight, x), parameter(bias, x), False, momentum, eps
        )
        return SpatialTensor(y, x.axes)
    if x.size(0) == 0:  # nothing to take statistics of
        return SpatialTensor(_affine(local, weight, bias, x), x.axes)
    dims = (0, *range(2, x.dim()))
    wider = _wider.get()
    executors = executors_of(x.axes) if wider is None else (wider,)
    number = x.numel() // x.size(1) if wider is None else None
    mean, var, count = found = moments(local, dims, executors, number)
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    _update(running_mean, mean, momentum, executors)
    _update(running_var, var * (count / (count - 1)), momentum, executors)
    shape = _broadcast(x)
    if wider is None:
        return SpatialTensor(normalize(local, weight, bias, shape, dims, eps, executors, found), x.axes)
    # The gradients of weight and bias are summed over this image alone.
    y = normalize(local, None, None, shape, dims, eps, executors, found)
    return SpatialTensor(_affine(y, weight, bias, x), x.axes)


@rule(F.batch_norm)
def batch_norm(
    input: Any, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@rule(torch.batch_norm)
def _torch_batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
    eps: float, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@rule(F.group_norm)
@by_sample()
def group_norm(
    input: Any, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    _check("group_norm", input)
    local = input._local
    if not input.axes:
        return SpatialTensor(functional.group_norm(local, num_groups, weight, bias, eps), {})
    if num_groups < 1 or input.size(1) % num_groups:
        raise RuntimeError(
            f"group_norm: expected the number of channels to be divisible by num_groups, got {input.size(1)} and "
            f"{num_groups}"
        )
    grouped = local.unflatten(1, (num_groups, -1))
    spatial = input.dim() - 2
    shape = [1, num_groups, -1, *[1] * spatial]
    dims, executors = tuple(range(2, 3 + spatial)), executors_of(input.axes)
    found = moments(grouped, dims, executors, math.prod(input.shape[1:]) // num_groups)
    y = normalize(grouped, weight, bias, shape, dims, eps, executors, found)
    return SpatialTensor(with_usual_strides(y.flatten(1, 2)), input.axes)


@rule(torch.group_norm)
def _torch_group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Tensor:
    return group_norm(input, num_groups, weight, bias, eps)


@rule(F.instance_norm)
@by_sample()
def instance_norm(
    input: Any, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    _check("instance_norm", input)
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps).contiguous()
    if not input.axes:
        if running_mean is not None or running_var is not None:
            raise refuse("instance_norm", "the batch is cut, and running statistics are means over it")
        y = functional.instance_norm(input._local, None, None, weight, bias, True, momentum, eps)
        return SpatialTensor(y, {})
    dims, executors = tuple(range(2, input.dim())), executors_of(input.axes)
    mean, var, count = moments(input._local, dims, executors, math.prod(input.shape[2:]))
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.shape}")
    _update(running_mean, mean.mean(0), momentum, executors)
    _update(running_var, var.mean(0) * (count / (count - 1)), momentum, executors)
    # As groups of one channel.
    grouped = input._local.unsqueeze(2)
    found = Moments(mean.unsqueeze(2), var.unsqueeze(2), count)
    y = normalize(grouped, weight, bias, _broadcast(grouped), tuple(range(2, grouped.dim())), eps, executors, found)
    return SpatialTensor(y.squeeze(2).contiguous(), input.axes)  # as torch's, also of an input in channels_last


@rule(torch.instance_norm)
def _torch_instance_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool, momentum: float,
    eps: float, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@rule(F.layer_norm)
def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    first = input.dim() - len(normalized_shape)
    if list(input.shape[first:]) != list(normalized_shape):
        raise RuntimeError(
            f"layer_norm: expected normalized_shape to be the input's last sizes, got {list(normalized_shape)} and "
            f"{list(input.shape)}"
        )
    if not isinstance(input, SpatialTensor):
        raise refuse("layer_norm", "its input is a plain tensor")
    if all(d < first for d in input.axes):
        y = functional.layer_norm(input._local, normalized_shape, parameter(weight, input), parameter(bias, input), eps)
        return wrap(y, input.axes)
    if any(d < first for d in input.axes):
        raise refuse("layer_norm", "one of its cut dimensions is normalized over, and another one is not")
    dims = tuple(range(first, input.dim()))
    executors = executors_of(input.axes)
    found = moments(input._local, dims, executors, math.prod(normalized_shape))
    y = SpatialTensor(normalize(input._local, None, None, (), dims, eps, executors, found), input.axes)
    if weight is not None:
        (local, w), axes = aligned("layer_norm", (y, weight))
        y = SpatialTensor(local * w.to(local.dtype), axes)
    if bias is not None:
        (local, b), axes = aligned("layer_norm", (y, bias))
        y = SpatialTensor(local + b.to(local.dtype), axes)
    return y


@rule(torch.layer_norm)
def _torch_layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    return layer_norm(input, normalized_shape, weight, bias, eps)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if not isinstance(input, SpatialTensor) or any(d >= input.dim() - len(normalized_shape) for d in input.axes):
        raise refuse("rms_norm", "a dimension that it normalizes over is cut")
    return wrap(functional.rms_norm(input._local, normalized_shape, parameter(weight, input), eps), input.axes)


@rule(F.normalize)
def _normalize(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Tensor:
    if not isinstance(input, SpatialTensor) or not isinstance(dim, int):
        raise refuse("normalize", "it takes a SpatialTensor and one dimension")
    if dim % input.dim() in input.axes:
        return input / torch.norm(input, p, dim, keepdim=True).clamp_min(eps)
    return wrap(F.normalize(input._local, p, dim, eps), input.axes)
