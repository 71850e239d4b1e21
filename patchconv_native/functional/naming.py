"""Names of functions that are made, one for each number of spatial dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def named(function: Function, name: str, doc: str) -> Function:
    """The function with a name and a docstring, for help() and pickle. It must be found by that name in its file."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function
