"""Activations called as functions, and `x + y`, write into an input that nobody reads again, in a module's own code."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .in_place import by_place
from .spent import is_large, is_spent_in, spent_operand

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
_NAMES = frozenset(function.__name__ for function in _ALL)


@functools.cache
def _is_served(forward: Callable[..., Any]) -> bool:
    """Whether some of its own code could write into an input."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return False
    steps = dis.get_instructions(code)
    return not _NAMES.isdisjoint(code.co_names) or any(step.opname.startswith("BINARY_") for step in steps)


def worth_a_look(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether the module was given a large tensor, and its own code could write into one."""
    return any(is_large(one) for one in args) and _is_served(type(module).forward)


class InPlaceFunctions(TorchFunctionMode):
    """For the code of a module without gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        result = None
        if func in _SUMS and len(args) == 2 and not options:
            sign, into = _SUMS[func]
            place = spent_operand(sign, args)
            if place is not None and (place == 0 or sign in _EITHER_WAY) and _is_like(args[place], args[1 - place]):
                result = into(args[place], args[1 - place])
        elif func in _ALL and len(args) == 1 and not options.get("inplace") and is_spent_in(func, args):
            result = _into(func, args[0], options)
        return func(*args, **options) if result is None else result


def _is_like(x: Tensor, other: Any) -> bool:
    """Whether the sum of the two has the shape, the strides and the dtype of x."""
    if type(other) in (int, float):
        return True
    if type(other) not in (Tensor, nn.Parameter) or other.layout != torch.strided or other.is_complex():
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
