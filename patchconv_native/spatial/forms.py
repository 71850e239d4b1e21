"""The one form of a call that rules are written for.

torch takes an argument by its place or by its name, some under the names that NumPy has for them, and sizes one by one.
Here what a function needs stands in its place, the tensor first, and the rest has torch's name; sizes are one tuple.
The names are those of torch's own schemas. Functions that torch has in Python hand themselves on in such a form.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from .rules import RULES

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_OTHER_NAMES = {
    "input": "self", "x": "self", "a": "self", "x1": "self", "x2": "other", "tensor": "other", "axis": "dim",
    "keepdims": "keepdim",
}  # fmt: skip
"""Names that torch takes, and the schemas' names for the same."""


@dataclass(frozen=True)
class _Overload:
    """Of one of the ways to call a function."""

    places: tuple[str, ...]
    """The arguments that can be given by place."""
    needed: frozenset[str]
    names: frozenset[str]
    one_by_one: bool
    """Whether the numbers of its only argument besides the tensor may be given one by one."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """In its form; None where these are not its arguments."""
        if self.one_by_one and len(args) > 1 and all(isinstance(n, Integral) for n in args[1:]):
            args = args[0], tuple(args[1:])
        named = {key if key in self.names else _OTHER_NAMES.get(key, key): value for key, value in kwargs.items()}
        placed = self.places[: len(args)]
        fits = self.needed.difference(placed) <= named.keys() <= self.names.difference(placed)
        if len(args) > len(self.places) or not fits:
            return None
        for name in self.places[len(args) :]:
            if name not in self.needed:
                break
            args = *args, named.pop(name)
        return args, named


def _operator(function: Any) -> str | None:
    """The name of the operator that a function of torch is; None for one that is written in Python."""
    if isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        return f"aten::{function.__name__}"
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name
    return function._qualified_op_name if isinstance(function, torch._ops.OpOverloadPacket) else None


@functools.cache
def function_of(overload: torch._ops.OpOverload) -> Any:
    """The function of torch that has a rule and is this operator, as TorchScript and torch.export call it; the operator
    itself, where there is none.
    """
    name = overload._schema.name
    if overload in RULES or not name.startswith("aten::"):
        return overload
    in_python: Any = getattr(torch.nn.functional, name.removeprefix("aten::"), None)
    if in_python in RULES and not isinstance(in_python, types.BuiltinFunctionType):
        wanted = ["input", *(one.name for one in overload._schema.arguments[1:])]
        taken = list(inspect.signature(in_python).parameters)
        if overload._schema.arguments[0].name == "self" and taken[: len(wanted)] == wanted:  # losses take others
            return in_python
    return next((function for function in RULES if _operator(function) == name), overload)


@functools.cache
def _overloads(operator: str) -> Sequence[_Overload]:
    found = []
    for schema in torch._C._jit_get_schemas_for_operator(operator):
        of_tensors = any("Tensor" in str(one.type) for one in schema.arguments)
        if not of_tensors or any(one.is_out for one in schema.arguments):
            continue
        places = [one for one in schema.arguments if not one.kwarg_only]
        needed = [one.name for one in schema.arguments if not one.has_default_value()]
        one_by_one = len(places) == 2 and str(places[1].type) == "List[int]"
        found.append(_Overload(
            tuple(one.name for one in places), frozenset(needed), frozenset(one.name for one in schema.arguments),
            one_by_one,
        ))  # fmt: skip
    return found


def in_form(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call in the form that rules take; as they are where torch would not take them."""
    if "out" in kwargs and kwargs["out"] is None:
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    if not kwargs and (len(args) < 2 or not isinstance(args[1], Integral)):
        return args, kwargs
    operator = _operator(function)
    for overload in _overloads(operator) if operator else ():
        found = overload.arguments(args, kwargs)
        if found is not None:
            return found
    return args, kwargs
