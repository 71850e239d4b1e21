"""The table of rules: for each function of torch, what computes a part of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Rule = Callable[..., Any]

RULES: dict[Any, Rule] = {}


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Registers the rule of these functions. It gets their arguments, of which at least one is a SpatialTensor."""

    def register(serve: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, serve))
        return serve

    return register


def rules(make: Callable[[Any], Rule], functions: Iterable[Any]) -> None:
    """Registers make(function) as the rule of each of some functions."""
    RULES.update({function: make(function) for function in functions})


def name_of(function: Any) -> str:
    """For messages: an attribute's getter has the name of the attribute."""
    name = getattr(function, "__name__", None) or getattr(function, "name", None) or str(function)
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return str(name)


class NotServed(NotImplementedError):
    """A function that has no rule, or whose result on parts would not be exact."""

    advice = ""
    """What can be done instead, by the executor of the parts."""

    def __str__(self) -> str:
        return f"{super().__str__()}. {self.advice}" if self.advice else super().__str__()


def refuse(function: str, why: str, advice: str = "") -> NotServed:
    error = NotServed(f"{function}: not served on a SpatialTensor: {why}")
    error.advice = advice
    return error
