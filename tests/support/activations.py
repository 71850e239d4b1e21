"""One row for each activation: from it, its layer, torch's function, and its operators are tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    layer: type[nn.Module]
    function: Callable[..., Tensor]
    """torch's, of a tensor and the layer's arguments."""
    arguments: tuple[tuple[Any, ...], ...] = ((),)
    """Those that the layer is made with, several times."""
    operator: bool = True
    """Whether there is an operator of this name, which takes the first of these arguments."""
    in_place: bool = True


ROWS = {
    # One bit an element.
    "relu": Row(nn.ReLU, F.relu),
    "relu6": Row(nn.ReLU6, F.relu6, operator=False),
    "leaky_relu": Row(nn.LeakyReLU, F.leaky_relu, ((0.2,), (0.0,), ())),
    "hardtanh": Row(nn.Hardtanh, F.hardtanh, ((-0.5, 0.5), (), (-0.5, 0.25))),
    "threshold": Row(nn.Threshold, F.threshold, ((0.1, 2.0), (0.1, 0.0), (0.1, 7.0), (-0.3, -2.0))),
    "hardsigmoid": Row(nn.Hardsigmoid, F.hardsigmoid),
    "softshrink": Row(nn.Softshrink, F.softshrink, ((0.1,), (), (0.0,)), in_place=False),
    "hardshrink": Row(nn.Hardshrink, F.hardshrink, ((0.1,), (), (0.0,), (-0.1,)), in_place=False),
    # The input.
    "silu": Row(nn.SiLU, F.silu),
    "gelu": Row(nn.GELU, lambda x, approximate="none": F.gelu(x, approximate=approximate), ((), ("tanh",)),
                in_place=False),
    "hardswish": Row(nn.Hardswish, F.hardswish),
    "mish": Row(nn.Mish, F.mish),
    "elu": Row(nn.ELU, F.elu, ((0.7,), (), (0.3,))),
    "selu": Row(nn.SELU, F.selu, operator=False),
    "celu": Row(nn.CELU, F.celu, ((0.5,), ()), operator=False),
    "softplus": Row(nn.Softplus, F.softplus, ((2.0, 3.0), ()), in_place=False),
    "logsigmoid": Row(nn.LogSigmoid, F.logsigmoid, in_place=False),
    # The output.
    "sigmoid": Row(nn.Sigmoid, F.sigmoid, in_place=False),
    "tanh": Row(nn.Tanh, F.tanh, in_place=False),
}  # fmt: skip
