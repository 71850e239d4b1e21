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
_OPTIONS = frozenset({"inplace", "negative_slope", "alpha", "approximate"})
_ARITHMETIC: dict[Any, tuple[str, Any]] = {
    Tensor.add: ("+", Tensor.add_),
    Tensor.sub: ("-", Tensor.sub_),
    Tensor.mul: ("*", Tensor.mul_),
    Tensor.div: ("/", Tensor.div_),
}
_SIGNS = frozenset(sign for sign, _ in _ARITHMETIC.values())
_NAMES = frozenset(function.__name__ for function in _ALL)
_EITHER_WAY = frozenset({"+", "*"})


@functools.lru_cache(maxsize=1024)  # not for ever: a forward may be made at run time and hold tensors
def _is_served(forward: Callable[..., Any]) -> bool:
    """Whether its own code calls one of the functions, or adds."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and (not _NAMES.isdisjoint(code.co_names) or computes(code, _SIGNS))


_KNOWN = nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.PixelShuffle, nn.PixelUnshuffle, nn.Flatten
"""Of torch.nn, besides the layers that were converted. Others (attention) compute otherwise inside of a mode."""


def worth_a_look(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether the module was given a large tensor, its own code could write into one, and its layers allow a mode."""
    if not any(is_large(one) for one in args) or not _is_served(type(module).forward):
        return False
    return all(not type(one).__module__.startswith("torch.nn.") or type(one) in _KNOWN for one in module.modules())


class InPlaceFunctions(TorchFunctionMode):
    """For a module's own code, without gradients. Layers inside of the module are called outside of the mode."""

    looks_at_nothing = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if torch.compiler.is_compiling() or not any(map(is_large, args)):
            return func(*args, **options)
        if func in _ARITHMETIC and len(args) == 2 and not options:
            sign, into = _ARITHMETIC[func]
            for place in spent_operands(sign, args):
                if _gives_like(sign, place, args[place], args[1 - place]):
                    return into(args[place], args[1 - place])
        plain = len(args) == 1 and options.keys() <= _OPTIONS and not options.get("inplace")
        if plain and func in _ALL and is_spent_in(func, args):
            return _into(func, args[0], options)
        return func(*args, **options)


def _gives_like(sign: str, place: int, x: Tensor, other: Any) -> bool:
    """Whether `x + other`, or `other + x` with x at place 1, can be computed in x: in its shape, strides and dtype."""
    if place == 1 and sign not in _EITHER_WAY:
        return False
    if type(other) in (int, float):
        return True
    if type(other) not in (*KINDS, nn.Parameter) or other.layout != torch.strided or other.is_complex():
        return False
    if other.device != x.device or torch.result_type(x, other) != x.dtype:
        return False
    if other.shape == x.shape:
        return other.stride() == x.stride()
    return place == 0 and other.dim() <= x.dim() and torch.broadcast_shapes(other.shape, x.shape) == x.shape


def _into(function: Any, input: Tensor, options: dict[str, Any]) -> Any:
    if function in _WITH_INPLACE:
        return function(input, **{**options, "inplace": True})
    if function in _METHODS:
        return _METHODS[function](input)
    return torch.ops.aten.gelu_(input, **options)


def leave() -> InPlaceFunctions | None:
    """Leaves the mode, if it is the innermost one."""
    depth = torch._C._len_torch_function_stack()
    if depth == 0 or type(torch._C._get_function_stack_at(depth - 1)) is not InPlaceFunctions:
        return None
    return torch._C._pop_torch_function_stack()


def enter_again(mode: InPlaceFunctions) -> None:
    torch._C._push_on_torch_function_stack(mode)
