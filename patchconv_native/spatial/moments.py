"""Statistics of the whole image, and what is normalized by them.

The mean of the parts' variances is not the whole's variance, so parts are merged by Chan, Golub and LeVeque, "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979), in float64. In backward, the two sums that the
input's gradient needs are summed over all parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .. import functional
from ..lean import in_lean
from .axis import Executors
from .layout import layout
from .parts import alias, all_parts, all_sum, precise, shared, summed
from .rules import refuse

_ops = torch.ops.patchconv
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MOST_ROWS = 4096
"""Of more, as of a layer norm of every place, the numbers of each are kept in too much memory."""


class Moments(NamedTuple):
    """Of all parts. Without autograd history, but for those of an executor that links."""

    mean: Tensor
    var: Tensor
    """Biased."""
    number: int
    """Of values that each mean is taken over."""


def moments(x: Tensor, dims: Sequence[int], executors: Executors, number: int | None = None) -> Moments:
    """Over these dimensions of all parts; they are kept, with size 1. number: of values that each mean is taken over,
    where that is known.
    """

    def of_part() -> Tensor:
        mean, var = _of_values(x.detach(), list(dims))
        count = math.prod(x.size(d) for d in dims)
        return torch.stack([mean.double(), var.double() * count, torch.full_like(mean, count, dtype=torch.float64)])

    means, squares, counts = all_parts(of_part, executors).unbind(1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    var = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / total
    link = executors[0].link if executors else None
    if link is not None:
        constant, all_counts = mean, total
        mean, var = link(torch.stack([mean, var]), lambda: _Added.apply(x, constant, all_counts)).unbind(0)
    return Moments(mean, var, int(total.flatten()[0]) if number is None else number)


def _of_values(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance, with the dimensions kept. On a CPU torch.var_mean takes several times as long."""
    channels = _by_channel(x, dims)
    if channels is None:
        var, mean = torch.var_mean(x.to(precise(x.dtype)), dims, correction=0, keepdim=True)
        return mean, var
    kept = [1 if d in dims else n for d, n in enumerate(x.shape)]
    mean, var = _ops._batch_statistics(channels, None, None, 0.0)
    return mean.view(kept), var.view(kept)


def _by_channel(x: Tensor, dims: list[int]) -> Tensor | None:
    """x as (N, C, ...), where the statistics are those of its channels, and nothing has to be copied for that."""
    if x.device.type != "cpu" or x.dtype not in _DTYPES or x.dim() < 3 or x.numel() == 0:
        return None
    if dims == [0, *range(2, x.dim())]:
        whole = layout(x)
        return x if x.is_contiguous(memory_format=whole) else None
    first, last = x.shape[: dims[0]], x.shape[dims[0] :]
    rows = math.prod(first)
    if dims == list(range(x.dim() - len(last), x.dim())) and x.is_contiguous() and rows <= MOST_ROWS:
        return x.view(1, rows, -1)
    return None


class _Added(Function):
    """What a part adds to the mean and to the variance of all parts: zeros, of which only the gradient counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean, total)
        return mean.new_zeros((2, *mean.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, mean, total = ctx.saved_tensors
        dtype = precise(x.dtype)
        by_mean, by_var = (grads[0] / total).to(dtype).unbind(0)
        gx = (x - mean.to(dtype)).mul_(2 * by_var).add_(by_mean)
        return gx.to(x.dtype), None, None


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
            return (
                *_gradients_with_history(grads[0], (x, weight, bias), ctx.needs_input_grad, *ctx.given),
                *[None] * 6,
            )
        dtype = mean.dtype
        grad = grads[0].to(dtype)
        normed = (x - mean).mul_(rstd)
        given = weight if weight is not None else bias
        over = () if given is None else tuple(d for d in range(x.dim()) if given.size(d) == 1)
        sums = []
        if given is not None:
            sums = [(grad * normed).sum(over, keepdim=True), grad.sum(over, keepdim=True)]
        if over == dims:  # as in a batch norm: the input's gradient needs the same sums as the parameters'
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


def _gradients_with_history(
    grad: Tensor, given: tuple[Any, ...], needed: Sequence[bool], count: int, dims: tuple[int, ...], eps: float,
    executors: Executors,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients that can be differentiated again: autograd's own, of the same formula."""
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
    """x unchanged, for a norm that treats the moments as constants. In backward, adds what the moments contribute.

    So the norm can be batch norm in eval mode, whose output is computed again in backward, and x is saved only once.
    With h the gradient that arrives, already multiplied by the norm's scale, the gradient of x is
    h - mean(h) - normed * mean(h * normed), with means over all parts.
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
            why = "norms of converted models on parts have no second derivative here"
            raise refuse("create_graph=True", why, ctx.given[-1][0].advice)
        x, mean, rstd = ctx.saved_tensors
        count, dims, executors = ctx.given
        grad = grads[0].to(mean.dtype)
        normed = (x - mean).mul_(rstd)
        sums = torch.stack([grad.sum(dims, keepdim=True), (grad * normed).sum(dims, keepdim=True)])
        shift, scale = all_sum(sums, executors).div_(count).unbind(0)
        return (grad - normed.mul_(scale).add_(shift)).to(x.dtype), None, None, None, None, None


def _normalize_lean(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: tuple[int, ...], eps: float, executors: Executors,
    found: Moments,
) -> Tensor:  # fmt: skip
    """As a batch norm in eval mode, whose output is not kept for backward.

    x: (N, C, ...), or (N, G, C / G, ...) with a mean for each sample and group; weight, bias: (C,).
    """
    dtype = precise(x.dtype)
    mean, var = found.mean.to(dtype), found.var.to(dtype)
    given = _Corrected.apply(x, mean, (var + eps).rsqrt(), found.number, dims, executors) if x.requires_grad else x
    weight, bias = (None if t is None else shared(t, executors) for t in (weight, bias))
    if 0 in dims:
        return functional.batch_norm(given, mean.flatten(), var.flatten(), weight, bias, False, 0.0, eps)
    # The channels of all samples, as the channels of one.
    flat = given.flatten(0, 2).unsqueeze(0)
    mean, var = (t.expand(*x.shape[:3], *t.shape[3:]).reshape(-1) for t in (mean, var))
    weight, bias = (None if t is None else t.repeat(x.size(0)) for t in (weight, bias))
    return functional.batch_norm(flat, mean, var, weight, bias, False, 0.0, eps).view(x.shape)


def _any_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, found: Moments) -> Tensor:
    """Without gradients: one pass, with a factor and a summand for each channel, as torch's own norms compute.

    weight, bias: of x's dimensions, 1 where they broadcast.
    """
    scale, shift = (found.var + eps).rsqrt(), found.mean
    if weight is not None:
        scale = scale * weight.double()
    shift = -shift * scale
    if bias is not None:
        shift = shift + bias.double()
    dtype = precise(x.dtype)
    given = x.to(dtype)
    y = torch.empty_like(given)  # addcmul alone would give one row in channels_last in NCHW
    return torch.addcmul(shift.to(dtype), given, scale.to(dtype), out=y).to(x.dtype)


class _Placed(Function):
    """As `_scaled`, with the gradients of one part: of the moments too, which are the same for every part."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, mean, var)
        ctx.eps = eps
        return _scaled(x, weight, bias, eps, Moments(mean, var, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, var = ctx.saved_tensors
        needs, dtype = ctx.needs_input_grad, precise(x.dtype)
        rstd, grad = (var + ctx.eps).rsqrt(), grads[0].to(dtype)
        scale = rstd if weight is None else rstd * weight.double()
        size = torch.broadcast_shapes(scale.shape, () if bias is None else bias.shape)

        def added(t: Tensor) -> Tensor:
            t = t.sum_to_size(size)
            return t if size == x.shape else t.double()  # a number for each place stays as it is

        scale = scale.to(dtype) if size == x.shape else scale
        found: list[Tensor | None] = [None] * 6
        if needs[2] or needs[3]:
            summed = added(grad)
            found[2] = summed.sum_to_size(bias.shape).to(bias.dtype) if needs[2] else None
            found[3] = -(summed * scale).sum_to_size(mean.shape).double() if needs[3] else None
        if needs[1] or needs[4]:
            summed = added((x - mean.to(dtype)).mul_(grad))
            found[1] = (summed * rstd.to(summed.dtype)).sum_to_size(weight.shape).to(weight.dtype) if needs[1] else None
            found[4] = (summed * scale).sum_to_size(var.shape).double() * rstd.square() * -0.5 if needs[4] else None
        if needs[0]:
            found[0] = (grad * scale.to(dtype)).to(x.dtype)
        return tuple(found)


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], dims: tuple[int, ...], eps: float,
    executors: Executors, found: Moments,
) -> Tensor:  # fmt: skip
    """(x - mean) / sqrt(var + eps) * weight + bias, with the moments of all parts over `dims`.

    weight, bias: the same for every part; `shape` is what they are viewed as, to broadcast against x.
    """
    if torch.is_grad_enabled() and executors and executors[0].link is not None:
        weight, bias = (None if t is None else t.view(shape) for t in (weight, bias))
        return _Placed.apply(x, weight, bias, found.mean, found.var, eps)
    if not (torch.is_grad_enabled() and (x.requires_grad or _any_grad(weight, bias))):
        weight, bias = (None if t is None else t.view(shape) for t in (weight, bias))
        return _scaled(x, weight, bias, eps, found)
    if in_lean() and torch.is_grad_enabled() and (0 in dims or (shape and (x.size(0) == 1 or x.is_contiguous()))):
        return _normalize_lean(x, weight, bias, dims, eps, executors, found)
    weight, bias = (None if t is None else t.view(shape) for t in (weight, bias))
    return _Normalized.apply(x, weight, bias, *found, dims, eps, executors)
