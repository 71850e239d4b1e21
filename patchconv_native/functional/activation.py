"""Activations. They save for backward one bit an element, or a tensor that its producer may be able to make again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._library import plain_eager

__all__ = [
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish",
    "prelu", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink", "tanh", "threshold",
]  # fmt: skip

_ops = torch.ops.patchconv


def _served(input: Tensor, *numbers: Any) -> bool:
    """Not numbers that are tensors, as stock takes them."""
    return plain_eager(input) and not any(isinstance(number, Tensor) for number in numbers)


def _activation(name: str, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """function(input, *numbers, inplace): the operators `name` and `name_`, or `stock` for what they do not serve."""
    forward = getattr(_ops, name).default
    in_place = getattr(_ops, f"{name}_").default if hasattr(_ops, f"{name}_") else None

    def function(input: Tensor, *numbers: Any, inplace: bool = False) -> Tensor:
        if not _served(input, *numbers) or (inplace and in_place is None):
            return stock(input, *numbers, inplace=inplace) if inplace else stock(input, *numbers)
        return (in_place if inplace else forward)(input, *numbers)  # type: ignore[misc]

    function.__name__ = name
    return function


_relu = _activation("relu", F.relu)
_leaky_relu = _activation("leaky_relu", F.leaky_relu)
_hardtanh = _activation("hardtanh", F.hardtanh)
_threshold = _activation("threshold", F.threshold)
_hardsigmoid = _activation("hardsigmoid", F.hardsigmoid)
_softshrink = _activation("softshrink", F.softshrink)
_hardshrink = _activation("hardshrink", F.hardshrink)
_logsigmoid = _activation("logsigmoid", F.logsigmoid)
_silu = _activation("silu", F.silu)
_hardswish = _activation("hardswish", F.hardswish)
_mish = _activation("mish", F.mish)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(input, 0). Saves one bit an element."""
    return _relu(input, inplace=inplace)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """input where it is positive, else negative_slope * input. Saves one bit an element."""
    return _leaky_relu(input, negative_slope, inplace=inplace)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """input limited to [min_val, max_val]. Saves one bit an element. ValueError if min_val > max_val."""
    if min_val > max_val:
        raise ValueError(f"hardtanh: expected min_val to be at most max_val, got {min_val} and {max_val}")
    return _hardtanh(input, min_val, max_val, inplace=inplace)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """input limited to [0, 6]. Saves one bit an element."""
    return _hardtanh(input, 0.0, 6.0, inplace=inplace)


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """input where it is above the threshold, else value. Saves one bit an element."""
    return _threshold(input, threshold, value, inplace=inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """relu6(input + 3) / 6. Saves one bit an element."""
    return _hardsigmoid(input, inplace=inplace)


def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """input moved by lambd toward 0, and 0 where it is in [-lambd, lambd]. Saves one bit an element."""
    return _softshrink(input, lambd)


def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """input, and 0 where it is in [-lambd, lambd]. Saves one bit an element."""
    return _hardshrink(input, lambd)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """leaky_relu with learned slopes, one or one a channel. Saves its input; one bit an element if they are frozen."""
    return _ops.prelu.default(input, weight) if plain_eager(input, weight) else F.prelu(input, weight)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """input * sigmoid(input). Saves its input."""
    return _silu(input, inplace=inplace)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """input * Phi(input), Phi the normal distribution; approximate: "none" or "tanh". Saves its input."""
    if not plain_eager(input):
        return F.gelu(input, approximate=approximate)
    return _ops.gelu.default(input, approximate=approximate)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """input * hardsigmoid(input). Saves its input."""
    return _hardswish(input, inplace=inplace)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """input * tanh(softplus(input)). Saves its input."""
    return _mish(input, inplace=inplace)


def _elu(input: Tensor, alpha: float, scale: float, input_scale: float, inplace: bool) -> Tensor:
    return (_ops.elu_ if inplace else _ops.elu).default(input, alpha, scale, input_scale)


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """input where it is positive, else alpha * (exp(input) - 1). Saves its input."""
    return _elu(input, alpha, 1, 1, inplace) if _served(input, alpha) else F.elu(input, alpha, inplace)


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """A scaled elu (https://arxiv.org/abs/1706.02515). Saves its input."""
    if not plain_eager(input):
        return F.selu(input, inplace)
    return _elu(input, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1, inplace)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """max(0, input) + min(0, alpha * (exp(input / alpha) - 1)). Saves its input."""
    if not _served(input, alpha) or alpha == 0:
        return F.celu(input, alpha, inplace)
    return _elu(input, alpha, 1, 1 / alpha, inplace)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta * input)) / beta, and input where beta * input > threshold. Saves its input."""
    served = _served(input, beta, threshold)
    return _ops.softplus.default(input, beta, threshold) if served else F.softplus(input, beta, threshold)


def logsigmoid(input: Tensor) -> Tensor:
    """log(sigmoid(input)). Saves its input."""
    return _logsigmoid(input)


def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-input)). Saves its output, unless its input can be made again."""
    return _ops.sigmoid.default(input) if plain_eager(input) else torch.sigmoid(input)


def tanh(input: Tensor) -> Tensor:
    """The hyperbolic tangent. Saves its output, unless its input can be made again."""
    return _ops.tanh.default(input) if plain_eager(input) else torch.tanh(input)


# What an activation saves for backward -> torch's layers of it, which conversion replaces (../layers.py).
STOCK_LAYERS: dict[str, tuple[type[nn.Module], ...]] = {
    "one bit an element": (
        nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Threshold, nn.Hardsigmoid, nn.Softshrink, nn.Hardshrink,
    ),
    "its input, if the layer before it cannot make it again": (
        nn.PReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Softplus,
        nn.LogSigmoid,
    ),
    "its output, if its input cannot be made again": (nn.Sigmoid, nn.Tanh),
}  # fmt: skip
