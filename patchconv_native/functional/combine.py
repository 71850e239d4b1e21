"""Sums, products, gated halves, concatenations and linear layers. A later layer that needs such a result in backward
makes it again from its operands, unless it is a linear layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._library import plain_eager

__all__ = ["add", "add_", "add_relu", "cat", "glu", "linear", "mul"]

_ops = torch.ops.patchconv


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat. A layer that needs the result in backward saves the parts, and a part of several results once."""
    return _ops.cat.default(tensors, dim) if tensors and plain_eager(*tensors) else torch.cat(list(tensors), dim)


def add(input: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """torch.add: input + alpha * other. A layer that needs the result in backward makes it again, where the operands
    are saved or can be made again.
    """
    if not plain_eager(input, other) or other is None:
        return torch.add(input, other, alpha=alpha)
    return _ops.add.default(input, other, alpha=alpha)


def add_relu(input: Tensor, other: Tensor) -> Tensor:
    """relu(input + other), the end of a residual block. Saves one bit an element, and not the sum."""
    if not plain_eager(input, other) or not isinstance(other, Tensor):
        return F.relu(torch.add(input, other))
    return _ops.add_relu.default(input, other)


def add_(input: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """`add` in place of input: input.add_(other, alpha=alpha)."""
    if not plain_eager(input, other) or other is None:
        return input.add_(other, alpha=alpha)
    return _ops.add_.default(input, other, alpha=alpha)


def mul(input: Tensor, other: Any) -> Tensor:
    """torch.mul. Saves those operands that cannot be made again."""
    if not plain_eager(input, other) or other is None:
        return torch.mul(input, other)
    return _ops.mul.default(input, other)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """torch.nn.functional.glu. Saves its input if that cannot be made again. A layer that needs the result in backward
    makes it again.
    """
    return _ops.glu.default(input, dim) if plain_eager(input) and input.dim() > 0 else F.glu(input, dim)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear. Saves its input only if the weight is trained and the input cannot be made again."""
    if not plain_eager(input, weight, bias) or (bias is not None and bias.dim() > 1):
        return F.linear(input, weight, bias)
    return _ops.linear.default(input, weight, bias)
