"""Activations called as functions, and `x + y`, write into an input that nobody reads again, in a module's own code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .callers import computes
from .spent import KINDS, is_large, is_spent_in, spent_operands

_METHODS = {torch.relu: torch.relu_, torch.sigmoid: torch.sigmoid_, torch.tanh: torch.tanh_}
"""Functions, and those that write into their input."""
_WITH_INPLACE = frozenset({
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.silu, F.hardswish, F.hardsigmoid, F.mish,
})  # fmt: skip
"""These have an argument `inplace`."""
_ALL = {*_METHODS, *_WITH_INPLACE, F.gelu}
_SUMS: dict[Any, tuple[str, Any]] = {
    Tensor.add: ("+", Tensor.add_),
    Tensor.sub: ("-", Tensor.sub_),
    Tensor.mul: ("*", Tensor.mul_),
    Tensor.div: ("/", Tensor.div_),
}
_SIGNS = frozenset(sign for sign, _ in _SUMS.values())
_NAMES = frozenset(function.__name__ for function in _ALL)
_EITHER_WAY = frozenset({"+", "*"})


@functools.cache
def _is_served(forward: Callable[..., Any]) -> bool:
    """Whether its own code calls one of the functions, or adds."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and (not _NAMES.isdisjoint(code.co_names) or computes(code, _SIGNS))


def worth_a_look(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether the module was given a large tensor, and its own code could write into one."""
    return any(is_large(one) for one in args) and _is_served(type(module).forward)


class InPlaceFunctions(TorchFunctionMode):
    """For a module's own code, without gradients. Layers inside of the module are called outside of the mode."""

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
    return torch.ops.aten.gelu_(input, **options)


def left() -> InPlaceFunctions | None:
    """Leaves the mode, if it is the innermost one."""
    depth = torch._C._len_torch_function_stack()
    if depth == 0 or type(torch._C._get_function_stack_at(depth - 1)) is not InPlaceFunctions:
        return None
    return torch._C._pop_torch_function_stack()


def entered_again(mode: InPlaceFunctions) -> None:
    torch._C._push_on_torch_function_stack(mode)
