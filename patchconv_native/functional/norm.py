"""Norms, alone and with the activation that often follows. They save their input, if it cannot be made again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._library import plain_eager

__all__ = [
    "batch_norm", "batch_norm_relu", "group_norm", "group_norm_silu", "instance_norm", "layer_norm",
    "local_response_norm", "rms_norm",
]  # fmt: skip

_ops = torch.ops.patchconv


def _check_several_values(name: str, values: int, shape: Sequence[int]) -> None:
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
    """torch.nn.functional.batch_norm: input (N, C, ...). Saves its input; in eval mode only if `weight` is trained."""
    # Stock refuses an eps that is not positive, or computes with it.
    if not plain_eager(input, running_mean, running_var, weight, bias) or input.dim() < 2 or eps <= 0:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        _check_several_values("batch_norm", input.numel() // max(1, input.shape[1]), input.shape)
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
    """relu(batch_norm(input, ...)), input (N, C, ...), without the tensor in between.

    Saves its input and no mask, since the input tells where the result is 0. In eval mode with a frozen `weight` it
    saves one bit an element, and not the input.
    """
    if not plain_eager(input, running_mean, running_var, weight, bias) or input.dim() < 2 or eps <= 0:
        return F.relu(F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps))
    if training:
        _check_several_values("batch_norm_relu", input.numel() // max(1, input.shape[1]), input.shape)
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
    """torch.nn.functional.instance_norm: input (N, C, ...). Saves its input."""
    if not plain_eager(input, running_mean, running_var, weight, bias) or input.dim() < 3:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if use_input_stats:
        _check_several_values("instance_norm", math.prod(input.shape[2:]), input.shape)
    return _ops.instance_norm.default(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """torch.nn.functional.group_norm: input (N, C, ...). Saves its input, and two numbers a group."""
    if not plain_eager(input, weight, bias) or input.dim() < 2:
        return F.group_norm(input, num_groups, weight, bias, eps)
    _check_several_values("group_norm", input.numel() // max(1, num_groups), input.shape)
    return _ops.group_norm.default(input, num_groups, weight, bias, eps)


def group_norm_silu(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """silu(group_norm(input, ...)), input (N, C, ...), without the tensor in between. Saves what group_norm saves."""
    if not plain_eager(input, weight, bias) or input.dim() < 2:
        return F.silu(F.group_norm(input, num_groups, weight, bias, eps))
    _check_several_values("group_norm_silu", input.numel() // max(1, num_groups), input.shape)
    return _ops.group_norm_silu.default(input, num_groups, weight, bias, eps)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.layer_norm: input (..., *normalized_shape). Saves its input, and two numbers a row."""
    if not plain_eager(input, weight, bias):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return _ops.layer_norm.default(input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """torch.nn.functional.rms_norm: input (..., *normalized_shape). Saves its input."""
    if not plain_eager(input, weight):
        return F.rms_norm(input, normalized_shape, weight, eps)
    return _ops.rms_norm.default(input, normalized_shape, weight, eps)


def local_response_norm(input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """torch.nn.functional.local_response_norm, as a checkpoint. Saves its input, where stock saves five tensors."""
    transformed = torch._C._functorch.maybe_current_level() is not None  # torch.func does not serve checkpoints
    if not plain_eager(input) or transformed or not (torch.is_grad_enabled() and input.requires_grad):
        return F.local_response_norm(input, size, alpha, beta, k)
    return checkpoint(F.local_response_norm, input, size, alpha, beta, k, use_reentrant=False, preserve_rng_state=False)
