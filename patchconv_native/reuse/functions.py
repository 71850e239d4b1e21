"""Activations called as functions, and `x + y`, write into an input that nobody reads again, in a module's own code."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from .in_place import by_place
from .spent import KINDS, is_large, is_spent_in, spent_operands

_LEAST = 1 << 16
"""Bytes of a module's input: with few channels it is much smaller than what is made of it."""

_METHODS = {torch.relu: torch.relu_, torch.sigmoid: torch.sigmoid_, torch.tanh: torch.tanh_}
"""Functions, and those that write into their input."""
_WITH_INPLACE = frozenset({
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.silu, F.hardswish, F.hardsigmoid, F.mish,
})  # fmt: skip
"""These have an argument `inplace`."""
_BY_PIECE = frozenset({F.gelu, F.softplus, F.logsigmoid})
_ALL = {*_METHODS, *_WITH_INPLACE, *_BY_PIECE}
_SUMS: dict[Any, tuple[str, Any]] = {
    Tensor.add: ("+", Tensor.add_),
    Tensor.sub: ("-", Tensor.sub_),
    Tensor.mul: ("*", Tensor.mul_),
    Tensor.div: ("/", Tensor.div_),
}
_EITHER_WAY = frozenset({"+", "*"})


def worth_a_look(args: tuple[Any, ...]) -> bool:
    """Whether a module's code was given a tensor of which it may make large ones, and is not looked at already."""
    return any(is_large(one, _LEAST) for one in args) and not isinstance(_get_current_function_mode(), InPlaceFunctions)


class InPlaceFunctions(TorchFunctionMode):
    """For the code of a module without gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        result = None
        if not any(map(is_large, args)):
            pass
        elif func in _SUMS and len(args) == 2 and not options:
            sign, into = _SUMS[func]
            for place in spent_operands(sign, args):
                if (place == 0 or sign in _EITHER_WAY) and _is_like(args[place], args[1 - place]):
                    return into(args[place], args[1 - place])
        elif func in _ALL and len(args) == 1 and not options.get("inplace") and is_spent_in(func, args):
            result = _into(func, args[0], options)
        return func(*args, **options) if result is None else result


def _is_like(x: Tensor, other: Any) -> bool:
    """Whether the sum of the two has the shape, the strides and the dtype of x."""
    if type(other) in (int, float):
        return True
    if type(other) not in (*KINDS, nn.Parameter) or other.layout != torch.strided or other.is_complex():
        return False
    if other.device != x.device or torch.result_type(x, other) != x.dtype:
        return False
    if other.shape == x.shape:
        return other.stride() == x.stride()
    return other.dim() <= x.dim() and torch.broadcast_shapes(other.shape, x.shape) == x.shape


def _into(function: Any, input: Tensor, options: dict[str, Any]) -> Any:
    if function in _WITH_INPLACE:
        return function(input, **{**options, "inplace": True})
    if function in _METHODS:
        return _METHODS[function](input)
    return by_place(function, input, **options)
