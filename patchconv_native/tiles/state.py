"""What may change while a module runs, besides its result: attributes of objects, and lists and mappings in them."""

from __future__ import annotations

import inspect
import logging
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_KINDS = (list, dict, OrderedDict, defaultdict, deque)


def is_container(value: Any) -> bool:
    """Whether it is a list or a mapping that torch takes apart and puts together (a pytree)."""
    return type(value) in _KINDS


def containers(value: Any) -> list[Any]:
    """The lists and mappings in a value, each before those that it holds."""
    found = []
    for leaf in tree_leaves(value, is_leaf=is_container):
        if is_container(leaf):
            found += [leaf, *containers(tuple(contents(leaf).values()))]
    return found


def contents(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def put(container: Any, values: dict[Any, Any]) -> None:
    """Gives a container these contents."""
    container.clear()
    if isinstance(container, dict):
        container.update(values)
    else:
        container.extend(values.values())


def same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return list(a) == list(b) and all(a[key] is b[key] for key in a)


class _Same:
    """In place of what a list or mapping held there before."""


SAME = _Same()


def change_of(now: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """What a container holds now, with SAME where it held that before."""
    return {key: SAME if before.get(key, SAME) is value else value for key, value in now.items()}


def change(container: Any, values: dict[Any, Any]) -> None:
    """Does to a container what `change_of` found."""
    old = contents(container)
    put(container, {key: old[key] if value is SAME else value for key, value in values.items()})


def objects(values: Any) -> list[Any]:
    """Of the leaves of a value those that have attributes, and are neither modules, tensors nor code."""
    others = (Tensor, nn.Module, type, types.ModuleType, logging.Logger)
    return [
        leaf for leaf in tree_leaves(values)
        if hasattr(leaf, "__dict__") and not isinstance(leaf, others) and (not callable(leaf) or _is_called(leaf))
    ]  # fmt: skip


def _is_called(value: Any) -> bool:
    """Whether it is an object of a class with a method __call__, and none of torch's."""
    return inspect.isfunction(type(value).__call__) and not is_of_torch(type(value))


def is_of_torch(code: Any) -> bool:
    """Of a function or a class."""
    return str(code.__module__).partition(".")[0] in ("torch", "numpy", __name__.partition(".")[0])


def modules_of(function: Any) -> list[nn.Module]:
    """The module itself; of a method its object; of a function those that it names."""
    if isinstance(function, nn.Module):
        return [function]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return [owner]
    if not inspect.isfunction(function):
        return []
    named = inspect.getclosurevars(function)
    values = [*named.nonlocals.values(), *named.globals.values()]
    found = [value if isinstance(value, nn.Module) else getattr(value, "__self__", None) for value in values]
    return [value for value in found if isinstance(value, nn.Module)]


_DEPTH = 3
_LOCKS = type(threading.Lock()), type(threading.RLock()), threading.Condition


def owners_of(function: Any, parts: list[nn.Module], others: Iterable[Any]) -> list[Any]:
    """The objects whose attributes a call may change: `parts`, its modules, the object that is called, `others`, and
    the objects in attributes of these. Not those that have a lock: other threads use them.
    """
    found = {id(part): part for part in parts}
    values = [*others, function, getattr(function, "__self__", None), *(list(vars(part).values()) for part in parts)]
    for _ in range(_DEPTH):
        inner = {id(one): one for one in objects(values) if id(one) not in found}
        inner = {key: one for key, one in inner.items() if not any(isinstance(x, _LOCKS) for x in vars(one).values())}
        found |= inner
        values = [list(vars(one).values()) for one in inner.values()]
    return list(found.values())


class Held:
    """What lists and mappings in `values` hold now, to be put back."""

    def __init__(self, values: Iterable[Any]) -> None:
        found = {id(container): container for value in values for container in containers((value,))}
        self._before = [(container, contents(container)) for container in found.values()]

    def values(self) -> list[Any]:
        return [value for _, before in self._before for value in before.values()]

    def changes(self) -> list[tuple[Any, dict[Any, Any]]]:
        """The containers that hold something else now, each with the change."""
        pairs = [(container, contents(container), before) for container, before in self._before]
        return [(container, change_of(now, before)) for container, now, before in pairs if not same(now, before)]

    def put_back(self) -> None:
        for container, before in self._before:
            if not same(contents(container), before):
                put(container, before)
