"""Rules for norms: statistics of the whole image, from each part's count, mean and squared deviations.

The mean of the parts' variances is not the whole's variance, so parts are merged by Chan, Golub and LeVeque, "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979), in float64. In backward, the two sums that the
input's gradient needs are summed over all parts.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .. import lean_functional
from ..lean import in_lean
from .axis import Executor, Executors, executors_of
from .operands import aligned, parameter, wrap
from .parts import alias, all_parts, all_sum, precise, shared, summed
from .rules import refuse, rule
from .tensor import SpatialTensor


def moments(x: Tensor, dims: Sequence[int], executors: Executors) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance over `dims` of all parts, with those dimensions kept at 1, and the count. No history."""
    x = x.detach()
    var, mean = torch.var_mean(x.to(precise(x.dtype)), list(dims), correction=0, keepdim=True)
    count = 1
    for d in dims:
        count *= x.size(d)
    found = torch.stack([mean.double(), var.double() * count, torch.full_like(mean, count, dtype=torch.float64)])
    means, squares, counts = all_parts(found, executors).unbind(1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return mean, squares / total, int(total.flatten()[0])


class _Normalized(Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, with moments of all parts over `dims`.

    Saves the part, the parameters and the moments. weight and bias, if given, have x's dimensions (1 where they
    broadcast), and get the gradient of all parts.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, count: int,
        dims: tuple[int, ...], eps: float, executors: Executors,
    ) -> Tensor:  # fmt: skip
        dtype = precise(x.dtype)
        rstd = (var + eps).rsqrt().to(dtype)
        mean = mean.to(dtype)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.given = count, dims, eps, executors
        y = (x - mean).mul_(rstd)
        if weight is not None:
            y.mul_(weight.to(dtype))
        if bias is not None:
            y.add_(bias.to(dtype))
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        count, dims, _, executors = ctx.given
        if torch.is_grad_enabled():
            return (*_recorded(grads[0], (x, weight, bias), ctx.needs_input_grad, *ctx.given), *[None] * 6)
        dtype = mean.dtype
        grad = grads[0].to(dtype)
        normed = (x - mean).mul_(rstd)
        given = weight if weight is not None else bias
        over = () if given is None else tuple(d for d in range(x.dim()) if given.size(d) == 1)
        sums = []
        if given is not None:
            sums = [(grad * normed).sum(over, keepdim=True), grad.sum(over, keepdim=True)]
        if over == dims:  # as in a batch norm: the parameters' gradients are what the input's needs too
            moved = [s if weight is None else s * weight for s in sums]
        else:
            scaled = grad if weight is None else grad * weight
            moved = [(scaled * normed).sum(dims, keepdim=True), scaled.sum(dims, keepdim=True)]
        sums = moved + sums
        flat = all_sum(torch.cat([s.flatten() for s in sums]), executors)
        found = [part.view_as(s) for part, s in zip(flat.split([s.numel() for s in sums]), sums, strict=True)]
        gx = None
        if ctx.needs_input_grad[0]:
            gx = grad * weight if weight is not None else grad.clone()
            gx = gx.sub_(found[1] / count).sub_(normed.mul_(found[0] / count)).mul_(rstd).to(x.dtype)
        gw = found[2].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        gb = found[3].to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        return gx, gw, gb, *[None] * 6


def _recorded(
    grad: Tensor, given: tuple[Any, ...], needed: Sequence[bool], count: int, dims: tuple[int, ...], eps: float,
    executors: Executors,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients that can be differentiated again: those of the same formula in torch's own functions."""
    x, weight, bias = given
    mean = summed(x.sum(dims, keepdim=True), executors) / count
    centred = x - shared(mean, executors)
    var = summed(centred.square().sum(dims, keepdim=True), executors) / count
    y = centred * shared((var + eps).rsqrt(), executors)
    if weight is not None:
        y = y * shared(weight, executors)
    if bias is not None:
        y = y + shared(bias, executors)
    wanted = [t for t, n in zip(given, needed, strict=False) if n and t is not None]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if n and t is not None else None for t, n in zip(given, needed, strict=False)]


class _Corrected(Function):
    """x, as the input of a norm that takes its moments for constants: adds to the gradient what they would.

    The norm then is one whose output can be made again (batch norm in eval mode), and x is kept once. With h the
    gradient that comes, which has the norm's scale in it: h - mean(h) - normed * mean(h * normed), over all parts.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, count: int, dims: tuple[int, ...], executors: Executors
    ) -> Tensor:
        ctx.save_for_backward(x, mean, rstd)
        ctx.given = count, dims, executors
        return alias(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise refuse("create_graph=True", "norms of converted models on parts have no second derivative here")
        x, mean, rstd = ctx.saved_tensors
        count, dims, executors = ctx.given
        grad = grads[0].to(mean.dtype)
        normed = (x - mean).mul_(rstd)
        sums = torch.stack([grad.sum(dims, keepdim=True), (grad * normed).sum(dims, keepdim=True)])
        shift, scale = all_sum(sums, executors).div_(count).unbind(0)
        return (grad - normed.mul_(scale).add_(shift)).to(x.dtype), None, None, None, None, None


def _lean(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: tuple[int, ...], eps: float, executors: Executors,
    found: tuple[Tensor, Tensor, int],
) -> Tensor:  # fmt: skip
    """x: (N, C, ...), or (N, G, C / G, ...) with a mean for each sample and group; weight, bias: (C,)."""
    mean, var, count = found
    dtype = precise(x.dtype)
    mean, var = mean.to(dtype), var.to(dtype)
    given = _Corrected.apply(x, mean, (var + eps).rsqrt(), count, dims, executors) if x.requires_grad else x
    weight, bias = (None if t is None else shared(t, executors) for t in (weight, bias))
    if 0 in dims:
        return lean_functional.batch_norm(given, mean.flatten(), var.flatten(), weight, bias, False, 0.0, eps)
    # Every sample's channels as channels of one sample.
    flat = given.flatten(0, 2).unsqueeze(0)
    mean, var = (t.expand(*x.shape[:3], *t.shape[3:]).reshape(-1) for t in (mean, var))
    weight, bias = (None if t is None else t.repeat(x.size(0)) for t in (weight, bias))
    return lean_functional.batch_norm(flat, mean, var, weight, bias, False, 0.0, eps).view(x.shape)


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], dims: tuple[int, ...], eps: float,
    executors: Executors, found: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:  # fmt: skip
    """shape: of the parameters, for broadcasting against x."""
    found = found or moments(x, dims, executors)
    mean, var, count = found
    if in_lean() and torch.is_grad_enabled() and (0 in dims or (shape and (x.size(0) == 1 or x.is_contiguous()))):
        return _lean(x, weight, bias, dims, eps, executors, found)
    weight, bias = (None if t is None else t.view(shape) for t in (weight, bias))
    return _Normalized.apply(x, weight, bias, mean, var, count, dims, eps, executors)


def _check(function: str, x: Any) -> None:
    if not isinstance(x, SpatialTensor) or x.dim() < 3 or any(d < 2 for d in x.axes):
        raise refuse(function, "it takes (N, C, ...), cut along spatial dimensions")


@torch.no_grad()
def _update(running: Tensor | None, to: Tensor, momentum: float, executors: Executors) -> None:
    if running is not None and all(executor.updates_buffers for executor in executors):
        running.mul_(1 - momentum).add_(to.to(running.dtype).view_as(running), alpha=momentum)


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


def _batch_norm(
    x: Any, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    _check("batch_norm", x)
    local = x._local
    if not training:
        y = lean_functional.batch_norm(
            local, running_mean, running_var, parameter(weight, x), parameter(bias, x), False, momentum, eps
        )
        return SpatialTensor(y, x.axes)
    if x.size(0) == 0:  # nothing to take statistics of
        shape = [1, -1] + [1] * (x.dim() - 2)
        y = local if weight is None else local * parameter(weight, x).view(shape)
        return SpatialTensor(y if bias is None else y + parameter(bias, x).view(shape), x.axes)
    dims = (0, *range(2, x.dim()))
    wider = _wider.get()
    executors = executors_of(x.axes) if wider is None else (wider,)
    mean, var, count = found = moments(local, dims, executors)
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    _update(running_mean, mean, momentum, executors)
    _update(running_var, var * (count / (count - 1)), momentum, executors)
    shape = [1, -1] + [1] * (x.dim() - 2)
    if wider is None:
        return SpatialTensor(_normalize(local, weight, bias, shape, dims, eps, executors, found), x.axes)
    # The parameters' gradients are those of this image alone.
    y = _normalize(local, None, None, shape, dims, eps, executors, found)
    y = y if weight is None else y * parameter(weight, x).view(shape).to(y.dtype)
    return SpatialTensor(y if bias is None else y + parameter(bias, x).view(shape).to(y.dtype), x.axes)


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
def group_norm(
    input: Any, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    _check("group_norm", input)
    local = input._local
    if num_groups < 1 or input.size(1) % num_groups:
        raise RuntimeError(
            f"group_norm: expected the number of channels to be divisible by num_groups, got {input.size(1)} and "
            f"{num_groups}"
        )
    grouped = local.unflatten(1, (num_groups, -1))
    spatial = input.dim() - 2
    shape = [1, num_groups, -1, *[1] * spatial]
    y = _normalize(grouped, weight, bias, shape, tuple(range(2, 3 + spatial)), eps, executors_of(input.axes))
    return SpatialTensor(y.flatten(1, 2), input.axes)


@rule(torch.group_norm)
def _torch_group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Tensor:
    return group_norm(input, num_groups, weight, bias, eps)


@rule(F.instance_norm)
def instance_norm(
    input: Any, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    _check("instance_norm", input)
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    dims, executors = tuple(range(2, input.dim())), executors_of(input.axes)
    mean, var, count = moments(input._local, dims, executors)
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.shape}")
    _update(running_mean, mean.mean(0), momentum, executors)
    _update(running_var, var.mean(0) * (count / (count - 1)), momentum, executors)
    # As groups of one channel.
    grouped = input._local.unsqueeze(2)
    found = mean.unsqueeze(2), var.unsqueeze(2), count
    shape = [1, -1] + [1] * (input.dim() - 1)
    y = _normalize(grouped, weight, bias, shape, tuple(range(2, input.dim() + 1)), eps, executors, found)
    return SpatialTensor(y.squeeze(2), input.axes)


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
        y = lean_functional.layer_norm(
            input._local, normalized_shape, parameter(weight, input), parameter(bias, input), eps
        )
        return wrap(y, input.axes)
    if any(d < first for d in input.axes):
        raise refuse("layer_norm", "one of its cut dimensions is normalized over, and another one is not")
    dims = tuple(range(first, input.dim()))
    y = SpatialTensor(_normalize(input._local, None, None, (), dims, eps, executors_of(input.axes)), input.axes)
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
    return wrap(lean_functional.rms_norm(input._local, normalized_shape, parameter(weight, input), eps), input.axes)


@rule(F.normalize)
def normalize(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Tensor:
    if not isinstance(input, SpatialTensor) or dim % input.dim() in input.axes:
        raise refuse("normalize", "the dimension that it sums over is cut")
    return wrap(F.normalize(input._local, p, dim, eps), input.axes)
