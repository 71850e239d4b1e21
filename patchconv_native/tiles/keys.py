"""What a plan that is kept depends on: by what another call is told to be alike."""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import itertools
import logging
import re
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from .arguments import Arguments
from .arrays import share_memory
from .graph import autocast_of
from .plan import TilePlan
from .shared import strides_of


class _Unknown(Exception):
    """Something that may change without a trace."""


_PLAIN = {
    type(None), bool, int, str, bytes, complex, range, type(...), torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
}  # fmt: skip
_EMPTY = {dict, collections.OrderedDict, set, list, tuple}
_CODE = (
    nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType, type(functools.cache(len)),
    re.Pattern, logging.Logger, type(threading.Lock()), type(threading.RLock()), torch.jit.ScriptFunction,
    torch._ops.OperatorBase, torch._ops.OpOverloadPacket, torch.fx.Graph,
    *([torch.distributed.ProcessGroup] if torch.distributed.is_available() else []),
)  # fmt: skip
"""What is told by its identity alone."""
_OF_PYTHON = (object, types.SimpleNamespace)
"""The bases, not written in Python, of classes whose objects hold attributes and nothing else."""


class _Key:
    """What a recorded graph depends on, as numbers, names and classes: `parts`, equal for two calls that are alike.

    Objects are told by their ids, which others may get when they are gone: it holds while all of `things` live.
    """

    def __init__(self, module: nn.Module, arguments: Arguments, budget: int | None) -> None:
        self.parts: list[Any] = [budget, arguments.rest(), autocast_of(arguments.images[0].device.type)]
        self.things: list[Any] = []
        self._numbers: dict[int, int] = {}
        for image in arguments.images:
            self.parts.append((image.shape, image.dtype, strides_of(image), image.device))
        self.parts.append(arguments.shared)
        pairs = itertools.combinations(arguments.images, 2)
        self.parts.append(tuple([share_memory(one, other) for one, other in pairs]))  # the module may write into one
        asked = [getattr(part, "requires_grad", False) for part in arguments.parts()]
        self.parts.append((torch.is_grad_enabled(), *asked))
        for leaf in tree_leaves(arguments._given):
            if not isinstance(leaf, Tensor):
                self._add(leaf)
        self._add_module(module)

    def _add_module(self, module: nn.Module) -> None:
        """With all that is in it. Each module has a number, by which its parents tell it."""
        out, add = self.parts, self._add
        numbers, found = {id(module): 0}, [module]
        for part in found:  # it grows
            self._add_class(type(part))
            for name, value in part.__dict__.items():
                cls = value.__class__
                if cls in _PLAIN:
                    out += (name, cls, value)
                elif name == "_modules":
                    for key, child in value.items():
                        if child is not None and id(child) not in numbers:
                            numbers[id(child)] = len(found)
                            found.append(child)
                        out += (key, None if child is None else numbers[id(child)])
                elif cls in _EMPTY and not value:  # most hooks
                    out += (name, cls, 0)
                else:
                    out.append(name)
                    add(value)

    def _add_class(self, cls: type) -> None:
        self.parts.append(id(cls))
        self.things.append(cls)

    def _add(self, value: Any) -> None:
        """Its class first, which says how much follows."""
        cls = value.__class__
        if cls in _PLAIN:
            self.parts += (cls, value)
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, float):
            self.parts += (cls, value or str(value))  # -0.0 is not 0.0
        elif _is_code(type(value)):
            self.parts += ("code", id(value))
            self.things.append(value)
        elif isinstance(value, weakref.ref):
            self.parts.append(weakref.ref)
            self._add(value())
        elif id(value) in self._numbers:
            self.parts += ("as before", self._numbers[id(value)])
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._add_contents(value)

    def _add_tensor(self, value: Tensor) -> None:
        try:
            version = 0 if value.is_inference() else value._version
            place = id(value), value.data_ptr(), version
            self.parts += (Tensor, *place, value.dtype, value.shape, value.stride(), value.requires_grad)
        except RuntimeError as error:  # it has no memory of its own
            raise _Unknown from error
        self.things.append(value)

    def _add_contents(self, value: Any) -> None:
        cls: Any = type(value)
        self._add_class(cls)
        if isinstance(value, (int, str, complex)):  # flags and names
            self.parts.append(value)
        elif isinstance(value, (list, tuple, collections.deque)):
            self.parts.append(len(value))
            for one in value:
                self._add(one)
        elif isinstance(value, Mapping):
            self.parts.append(len(value))
            for key, one in value.items():
                self._add(key)
                self._add(one)
        elif isinstance(value, (set, frozenset)):
            self._add_set(value)
        elif isinstance(value, functools.partial):
            for one in (value.func, value.args, value.keywords):
                self._add(one)
        elif _is_scalar(cls):
            self.parts.append(value.tobytes())
        elif not _holds_attributes(cls):
            raise _Unknown
        else:
            if cls.__weakrefoffset__:  # of others, as SimpleNamespace, what they hold is all
                self.parts.append(id(value))
                self.things.append(value)
            for name in _slots(cls):
                self._add(getattr(value, name, ...))
            if cls.__dictoffset__:
                self._add(value.__dict__)

    def _add_set(self, values: Set[Any]) -> None:
        """In whatever order they come."""
        whole, each = self.parts, []
        for one in values:
            self.parts = []
            self._add(one)
            each.append(tuple(self.parts))
        self.parts = [*whole, frozenset(each)]


def _by_class(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keeps results, and no class: a class that parametrize made holds its module."""
    known: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()

    def found(cls: Any) -> Any:
        if cls not in known:
            known[cls] = function(cls)
        return known[cls]

    return found


@_by_class
def _is_code(cls: Any) -> bool:
    return issubclass(cls, _CODE) or cls.__module__.startswith("torch._dynamo.")  # which is imported late


@_by_class
def _is_scalar(cls: type) -> bool:
    """Of numpy, which need not be there."""
    return any((base.__module__, base.__name__) == ("numpy", "generic") for base in cls.__mro__)


@_by_class
def _holds_attributes(cls: type) -> bool:
    """Whether objects of a class hold attributes and nothing else."""
    in_python = 1 << 9  # Py_TPFLAGS_HEAPTYPE
    others = [base for base in cls.__mro__ if not base.__flags__ & in_python or base.__module__ == "numpy"]
    return cls is not object and all(base in _OF_PYTHON for base in others)


@_by_class
def _slots(cls: type) -> list[str]:
    return [
        name for base in cls.__mro__ for name, one in vars(base).items() if isinstance(one, types.MemberDescriptorType)
    ]


class Kept(NamedTuple):
    """A plan, and what must be as it was for it to hold."""

    plan: TilePlan
    things: list[weakref.ref[Any]]
    digest: bytes

    def holds(self) -> bool:
        return all(thing() is not None for thing in self.things) and digest_of(self.plan.graph.fed) == self.digest


def digest_of(tensors: list[Tensor]) -> bytes | None:
    """Of the bytes in tensors: not every write into a tensor is counted in its version. None where there are none."""
    if not tensors:
        return b""
    digest = hashlib.blake2b()
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):  # it has no numbers
            continue
        try:
            there = tensor.detach().cpu().contiguous()
            address, size = there.data_ptr(), there.nbytes
        except (RuntimeError, NotImplementedError):  # it has no memory of its own
            return None
        if size and not address:
            return None
        digest.update(f"{there.dtype} {tuple(there.shape)} {size} ".encode())
        if size:
            digest.update(memoryview((ctypes.c_char * size).from_address(address)).cast("B"))
    return digest.digest()


def key_of(module: nn.Module, arguments: Arguments, budget: int | None) -> tuple[Any, list[Any]]:
    """The parts of a key and its things. The parts are None where one call cannot be told from another."""
    if arguments.rest() is None:
        return None, []
    try:
        key = _Key(module, arguments, budget)
        return tuple(key.parts), key.things
    except _Unknown:
        return None, []
