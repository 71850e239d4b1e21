"""Dropout. What is saved for backward is the seed of the mask, from which backward makes the mask again."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._library import plain_eager
from .naming import named

__all__ = ["alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"]

_ops = torch.ops.patchconv


def _check_probability(name: str, p: float) -> None:
    if p < 0.0 or p > 1.0:
        raise ValueError(f"{name}: expected p to be between 0 and 1, got {p}")


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes elements with probability p and multiplies the others by 1 / (1 - p). Saves the seed of its mask."""
    _check_probability("dropout", p)
    if not training or p == 0 or not plain_eager(input):
        return F.dropout(input, p, training, inplace)
    return (_ops.dropout_ if inplace else _ops.dropout).default(input, p)


def _channel_dropout(dims: int) -> Callable[[Tensor, float, bool, bool], Tensor]:
    name = f"dropout{dims}d"
    op, stock = _ops.feature_dropout.default, getattr(F, name)

    def function(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        _check_probability(name, p)
        # Stock serves what is in place (it saves one number a channel), and warns of other numbers of dimensions.
        images = input.dim() == dims + 2 or (input.dim() == dims + 1 and dims != 2)
        if not training or p == 0 or inplace or not plain_eager(input) or not images:
            return stock(input, p, training, inplace)
        return op(input, p) if input.dim() == dims + 2 else op(input.unsqueeze(0), p).squeeze(0)

    return named(function, name, f"torch.nn.functional.{name}: dropout of whole channels. Saves the seed of its mask.")


dropout1d, dropout2d, dropout3d = (_channel_dropout(dims) for dims in (1, 2, 3))


def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Dropout that keeps selu's mean and variance (https://arxiv.org/abs/1706.02515). Saves the seed of its mask."""
    _check_probability("alpha_dropout", p)
    if not training or p == 0 or inplace or not plain_eager(input):
        return F.alpha_dropout(input, p, training, inplace)
    return _ops.alpha_dropout.default(input, p)


def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """alpha_dropout of whole channels. Saves the seed of its mask."""
    _check_probability("feature_alpha_dropout", p)
    if not training or p == 0 or inplace or not plain_eager(input) or input.dim() < 2:
        return F.feature_alpha_dropout(input, p, training, inplace)
    return _ops.feature_alpha_dropout.default(input, p)
