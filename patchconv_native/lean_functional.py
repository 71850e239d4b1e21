"""Activations, dropout, norms, pools and cheap arithmetic with the signatures of torch.nn.functional, keeping less for
backward than stock PyTorch does.

Values and gradients are stock's. What each of them keeps is told in README ("What a layer saves"). Arguments that this
package does not serve (`return_indices`, other dtypes and layouts, tensor subclasses, compilers) go to the stock
function whole, which gives the same result and keeps what it always kept. `lean()` and the converted layers call these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import _library
from .lean_resize import (  # noqa: F401
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    interpolate,
    max_pool1d,
    max_pool2d,
    max_pool3d,
    pad,
)

_library.load()
_ops = torch.ops.patchconv
_ours = _library.plain_eager


def _activation(name: str, stock: Callable[..., Tensor], defaults: Sequence[Any] = ()) -> Callable[..., Tensor]:
    """`stock(input, *numbers, inplace)` through the operator of this name, and of this name with an underscore."""
    forward = getattr(_ops, name).default
    in_place = getattr(_ops, f"{name}_").default if hasattr(_ops, f"{name}_") else None

    def function(input: Tensor, *numbers: Any, inplace: bool = False) -> Tensor:
        if not _ours(input) or (inplace and in_place is None):
            return stock(input, *numbers, inplace=inplace) if inplace else stock(input, *numbers)
        return (in_place if inplace else forward)(input, *numbers)  # type: ignore[misc]

    function.__name__ = name
    return function


_relu = _activation("relu", F.relu)
_leaky_relu = _activation("leaky_relu", F.leaky_relu)
_hardtanh = _activation("hardtanh", F.hardtanh)
_threshold = _activation("threshold", F.threshold)
_hardsigmoid = _activation("hardsigmoid", F.hardsigmoid)
_silu = _activation("silu", F.silu)
_hardswish = _activation("hardswish", F.hardswish)
_mish = _activation("mish", F.mish)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(input, 0). Keeps one bit an element."""
    return _relu(input, inplace=inplace)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """input where it is positive, else negative_slope * input. Keeps one bit an element."""
    return _leaky_relu(input, negative_slope, inplace=inplace)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """input between the limits. Keeps one bit an element. ValueError if min_val > max_val."""
    if min_val > max_val:
        raise ValueError(f"hardtanh: expected min_val to be at most max_val, got {min_val} and {max_val}")
    return _hardtanh(input, min_val, max_val, inplace=inplace)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """input between 0 and 6. Keeps one bit an element."""
    return _hardtanh(input, 0.0, 6.0, inplace=inplace)


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """input where it is above the threshold, else value. Keeps one bit an element."""
    return _threshold(input, threshold, value, inplace=inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """relu6(input + 3) / 6. Keeps one bit an element."""
    return _hardsigmoid(input, inplace=inplace)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """leaky_relu with a slope that is learned. Keeps its input; one bit an element if the slope is frozen."""
    return _ops.prelu.default(input, weight) if _ours(input, weight) else F.prelu(input, weight)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """input * sigmoid(input). Keeps its input."""
    return _silu(input, inplace=inplace)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """input * Phi(input). Keeps its input."""
    return _ops.gelu.default(input, approximate=approximate) if _ours(input) else F.gelu(input, approximate=approximate)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """input * hardsigmoid(input). Keeps its input."""
    return _hardswish(input, inplace=inplace)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """input * tanh(softplus(input)). Keeps its input."""
    return _mish(input, inplace=inplace)


def _elu(input: Tensor, alpha: float, scale: float, input_scale: float, inplace: bool) -> Tensor:
    return (_ops.elu_ if inplace else _ops.elu).default(input, alpha, scale, input_scale)


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """input where it is positive, else alpha * (exp(input) - 1). Keeps its input."""
    return _elu(input, alpha, 1, 1, inplace) if _ours(input) else F.elu(input, alpha, inplace)


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """A scaled elu: https://arxiv.org/abs/1706.02515. Keeps its input."""
    if not _ours(input):
        return F.selu(input, inplace)
    return _elu(input, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1, inplace)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """max(0, input) + min(0, alpha * (exp(input / alpha) - 1)). Keeps its input."""
    return _elu(input, alpha, 1, 1 / alpha, inplace) if _ours(input) and alpha != 0 else F.celu(input, alpha, inplace)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta * input)) / beta. Keeps its input."""
    return _ops.softplus.default(input, beta, threshold) if _ours(input) else F.softplus(input, beta, threshold)


def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-input)). Keeps its output, or what its input can be made of."""
    return _ops.sigmoid.default(input) if _ours(input) else torch.sigmoid(input)


def tanh(input: Tensor) -> Tensor:
    """Keeps its output, or what its input can be made of."""
    return _ops.tanh.default(input) if _ours(input) else torch.tanh(input)


def _probability(name: str, p: float) -> None:
    if p < 0.0 or p > 1.0:
        raise ValueError(f"{name}: expected p to be between 0 and 1, got {p}")


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes elements with probability p and scales the others by 1 / (1 - p). Keeps the seed of its mask."""
    _probability("dropout", p)
    if not training or p == 0 or not _ours(input):
        return F.dropout(input, p, training, inplace)
    return (_ops.dropout_ if inplace else _ops.dropout).default(input, p)


def _channel_dropout(
    name: str, op: Any, stock: Callable[..., Tensor], dims: int
) -> Callable[[Tensor, float, bool, bool], Tensor]:
    def function(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        _probability(name, p)
        # In place, or in the number of dimensions that stock warns of, stock does it: it keeps a number a channel.
        if not training or p == 0 or inplace or not _ours(input) or input.dim() not in (dims + 1, dims + 2):
            return stock(input, p, training, inplace)
        if input.dim() == dims + 2 or name == "dropout2d":
            return op(input, p)
        return op(input.unsqueeze(0), p).squeeze(0)

    function.__name__ = name
    function.__doc__ = f"torch.nn.functional.{name}. Keeps the seed of its mask."
    return function


dropout1d = _channel_dropout("dropout1d", _ops.feature_dropout.default, F.dropout1d, 1)
dropout2d = _channel_dropout("dropout2d", _ops.feature_dropout.default, F.dropout2d, 2)
dropout3d = _channel_dropout("dropout3d", _ops.feature_dropout.default, F.dropout3d, 3)


def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Dropout that keeps mean and variance of a selu: https://arxiv.org/abs/1706.02515. Keeps the seed of its mask."""
    _probability("alpha_dropout", p)
    if not training or p == 0 or inplace or not _ours(input):
        return F.alpha_dropout(input, p, training, inplace)
    return _ops.alpha_dropout.default(input, p)


def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """alpha_dropout of whole channels. Keeps the seed of its mask."""
    _probability("feature_alpha_dropout", p)
    if not training or p == 0 or inplace or not _ours(input) or input.dim() < 2:
        return F.feature_alpha_dropout(input, p, training, inplace)
    return _ops.feature_alpha_dropout.default(input, p)


def _needs_more_than_one(name: str, values: int, shape: Sequence[int]) -> None:
    if values == 1:
        raise ValueError(f"{name}: expected more than 1 value per channel when training, got input size {tuple(shape)}")


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.batch_norm: input (N, C, ...). Keeps its input; in eval mode only if `weight` is trained."""
    if not _ours(input, running_mean, running_var, weight, bias) or input.dim() < 2:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        _needs_more_than_one("batch_norm", input.numel() // max(1, input.shape[1]), input.shape)
    return _ops.batch_norm.default(input, weight, bias, running_mean, running_var, training, momentum, eps)


def batch_norm_relu(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """relu(batch_norm(input, ...)), input (N, C, ...), without the tensor in between. Keeps its input and no mask,
    since the input tells where the result is 0; in eval mode with a frozen `weight` one bit an element and no input.
    """
    if not _ours(input, running_mean, running_var, weight, bias) or input.dim() < 2:
        return F.relu(F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps))
    if training:
        _needs_more_than_one("batch_norm_relu", input.numel() // max(1, input.shape[1]), input.shape)
    return _ops.batch_norm_relu.default(input, weight, bias, running_mean, running_var, training, momentum, eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.instance_norm: input (N, C, ...). Keeps its input."""
    if not _ours(input, running_mean, running_var, weight, bias) or input.dim() < 3:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if use_input_stats:
        _needs_more_than_one("instance_norm", math.prod(input.shape[2:]), input.shape)
    return _ops.instance_norm.default(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """torch.nn.functional.group_norm: input (N, C, ...). Keeps its input, mean and deviation of each group."""
    if not _ours(input, weight, bias) or input.dim() < 2:
        return F.group_norm(input, num_groups, weight, bias, eps)
    _needs_more_than_one("group_norm", input.numel() // max(1, num_groups), input.shape)
    return _ops.group_norm.default(input, num_groups, weight, bias, eps)


def group_norm_silu(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """silu(group_norm(input, ...)), input (N, C, ...), without the tensor in between. Keeps what group_norm keeps."""
    if not _ours(input, weight, bias) or input.dim() < 2:
        return F.silu(F.group_norm(input, num_groups, weight, bias, eps))
    _needs_more_than_one("group_norm_silu", input.numel() // max(1, num_groups), input.shape)
    return _ops.group_norm_silu.default(input, num_groups, weight, bias, eps)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.layer_norm: input (..., *normalized_shape). Keeps its input, and two numbers a row."""
    if not _ours(input, weight, bias):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return _ops.layer_norm.default(input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """torch.nn.functional.rms_norm: input (..., *normalized_shape). Keeps its input."""
    if not _ours(input, weight):
        return F.rms_norm(input, normalized_shape, weight, eps)
    return _ops.rms_norm.default(input, normalized_shape, weight, eps)


def local_response_norm(input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """torch.nn.functional.local_response_norm, recorded anew in backward: keeps its input, where stock keeps five."""
    transformed = torch._C._functorch.maybe_current_level() is not None  # torch.func knows no checkpointing
    if not _ours(input) or transformed or not (torch.is_grad_enabled() and input.requires_grad):
        return F.local_response_norm(input, size, alpha, beta, k)
    return checkpoint(F.local_response_norm, input, size, alpha, beta, k, use_reentrant=False, preserve_rng_state=False)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat. Where its output is needed in backward, its parts are kept, and each but once."""
    return _ops.cat.default(tensors, dim) if tensors and _ours(*tensors) else torch.cat(list(tensors), dim)


def add(input: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """torch.add. Where its output is needed in backward, it is made again from operands that can be had."""
    if not _ours(input, other) or other is None:
        return torch.add(input, other, alpha=alpha)
    return _ops.add.default(input, other, alpha=alpha)


def add_relu(input: Tensor, other: Tensor) -> Tensor:
    """relu(input + other), the end of a residual block. Keeps one bit an element, and not the sum."""
    if not _ours(input, other) or not isinstance(other, Tensor):
        return F.relu(torch.add(input, other))
    return _ops.add_relu.default(input, other)


def add_(input: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """input.add_(other), as `add`."""
    if not _ours(input, other) or other is None:
        return input.add_(other, alpha=alpha)
    return _ops.add_.default(input, other, alpha=alpha)


def mul(input: Tensor, other: Any) -> Tensor:
    """torch.mul. Keeps operands as far as they cannot be made again."""
    return _ops.mul.default(input, other) if _ours(input, other) and other is not None else torch.mul(input, other)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear. Keeps its input only if the weight is trained and it cannot be made again."""
    return _ops.linear.default(input, weight, bias) if _ours(input, weight, bias) else F.linear(input, weight, bias)
