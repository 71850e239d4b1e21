"""What a module may change besides attributes: what the functions that it runs name (variables of functions around
them, defaults, global variables), attributes of classes, arrays.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..spatial import NotServed
from .state import Held, is_of_torch, objects, same

_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_LARGE = 2**26
"""Bytes of an array that is not copied."""


def functions_of(function: Any, parts: Iterable[nn.Module], values: Iterable[Any]) -> list[types.FunctionType]:
    """The functions in Python that a call runs, as far as names tell: the function or the forwards of modules, those in
    `values`, and what these name. Those of torch are left out.
    """
    value: Any
    todo: list[tuple[Any, Any]] = [(one, None) for one in (function, *values) if callable(one)]
    classes = {type(part): None for part in parts}
    todo += [(vars(base).get("forward"), cls) for cls in classes for base in cls.__mro__]
    found: dict[int, types.FunctionType] = {}
    while todo:
        value, owner = todo.pop()
        value = value.func if isinstance(value, functools.partial) else value
        if callable(value) and not isinstance(value, nn.Module) and objects([value]):
            value = value.__call__
        if inspect.ismethod(value):
            value, owner = value.__func__, type(value.__self__)
        value = inspect.unwrap(value) if callable(value) else value
        if inspect.isfunction(value) and id(value) not in found and not is_of_torch(value):
            found[id(value)] = value
            todo += [(one, None) for one in named_by(value)]
            todo += [(getattr(owner, name, None), owner) for name in _names(value.__code__)] if owner else []
    return list(found.values())


def _names(code: types.CodeType) -> list[str]:
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return [*code.co_names, *(name for one in inner for name in _names(one))]


def _cells(function: types.FunctionType) -> list[types.CellType]:
    """Those that are not empty."""
    return [cell for cell in function.__closure__ or () if cell != types.CellType()]


def _globals(function: types.FunctionType) -> list[tuple[dict[str, Any], str, Any]]:
    known = function.__globals__
    return [(known, name, known[name]) for name in _names(function.__code__) if name in known]


def check_iterators(owners: Iterable[Any], functions: Iterable[types.FunctionType]) -> None:
    """NotServed for an attribute that functions name and that is an iterator: what `next` has taken out of it cannot be
    put back. One that is written in Python has attributes, which can.
    """
    names = {name for function in functions for name in _names(function.__code__)}
    for owner in owners:
        for name, value in vars(owner).items():
            if name in names and isinstance(value, Iterator) and not hasattr(value, "__dict__"):
                where = f"{type(owner).__name__}.{name}"
                raise NotServed(f"tile: an iterator in an attribute, {where}, is not served: it cannot be put back")


def named_by(function: types.FunctionType) -> list[Any]:
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    cells = [cell.cell_contents for cell in _cells(function)]
    return [*cells, *defaults, *(value for _, _, value in _globals(function))]


class Elsewhere:
    """What functions name, attributes of the classes of `owners`, and the arrays, sets and gradients of tensors in all
    that and in `values`, to be put back.
    """

    def __init__(self, functions: list[types.FunctionType], owners: list[Any], values: list[Any]) -> None:
        named = [value for function in functions for value in named_by(function)]
        classes = {cls: None for owner in owners for cls in type(owner).__mro__ if not is_of_torch(cls)}
        self._classes = [(cls, dict(vars(cls))) for cls in classes if cls.__flags__ & _IN_PYTHON]
        self._held = Held([*map(vars, objects(named)), named, *(list(one.values()) for _, one in self._classes)])
        self._cells = [(cell, cell.cell_contents) for function in functions for cell in _cells(function)]
        self._globals = [one for function in functions for one in _globals(function)]
        self.values = list({id(one): one for one in (*values, *self._held.values())}.values())
        tensors = [one for one in self.values if isinstance(one, Tensor)]
        self._gradients = [(one, one.requires_grad, one.grad) for one in tensors if one.is_leaf]
        self._copies = [(one, one.copy()) for one in self.values if _is_copied(one)]

    def changed(self) -> bool:
        return (
            bool(self._held.changes())
            or any(cell.cell_contents is not before for cell, before in self._cells)
            or any(known.get(name) is not before for known, name, before in self._globals)
            or any(not _alike(one, before) for one, before in self._copies)
            or any(not same(dict(vars(cls)), before) for cls, before in self._classes)
            or any(one.requires_grad != asked or one.grad is not before for one, asked, before in self._gradients)
        )

    def put_back(self) -> None:
        self._held.put_back()
        for cell, before in self._cells:
            cell.cell_contents = before
        for known, name, before in self._globals:
            if known.get(name) is not before:
                known[name] = before
        for cls, before in self._classes:
            for name in {**vars(cls), **before}:
                if name not in before:
                    delattr(cls, name)
                elif vars(cls).get(name) is not before[name]:
                    setattr(cls, name, before[name])
        for one, asked, before in self._gradients:
            if one.requires_grad != asked or one.grad is not before:
                one.requires_grad_(asked).grad = before
        for one, before in self._copies:
            if isinstance(one, set):
                one.clear()
                one.update(before)
            elif not _alike(one, before):
                one[:] = before


def _is_copied(value: Any) -> bool:
    array: Any = getattr(sys.modules.get("numpy"), "ndarray", ())
    if isinstance(value, array):
        return bool(value.ndim and value.flags.writeable and value.nbytes <= _LARGE and not value.dtype.hasobject)
    return isinstance(value, (set, bytearray))


def _alike(one: Any, other: Any) -> bool:
    return bool(one == other) if isinstance(one, (set, bytearray)) else one.tobytes() == other.tobytes()
