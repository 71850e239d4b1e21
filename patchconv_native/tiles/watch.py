"""What a module does to tensors that were there before it was recorded: what it writes into them, and what it computes
of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..spatial.rules import name_of
from ..spatial.shapes import set_item

_tensor: Any = Tensor
ON_PIXELS = {
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__", "nonzero",
    "equal", "allclose",
}  # fmt: skip
_TAKES_NUMBERS = ON_PIXELS | {"is_nonzero", "__complex__"}
"""They give Python numbers that are in a tensor."""


def writes_first(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into its first argument."""
    name = name_of(function)
    if function is set_item or kwargs.get("inplace"):
        return True
    if name.startswith("__"):  # __iadd__ is that of __add__
        return name.startswith("__i") and hasattr(Tensor, "__" + name[3:])
    return name.endswith("_")


def _storage(tensor: Tensor) -> int | None:
    """None for a tensor that has none, as a sparse one."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _plain(values: Any) -> list[Tensor]:
    """The tensors that are not recorded."""
    return [one for one in tree_leaves(values) if isinstance(one, Tensor) and not hasattr(one, "_recorder")]


_SHARES = {"from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack"}
"""Their results may lie in memory that was there before."""
_SHOWS = {"numpy", "__array__", "__dlpack__"}
"""They let others write into a tensor's memory."""
_WITHOUT_SAYING = {torch.ops.aten.native_batch_norm.default: (3, 4)}
"""Operators that write into arguments of which their schemas do not say so."""


@functools.cache
def _written_places(function: Any) -> list[tuple[int, str]]:
    """Of an operator, the arguments that it writes into."""
    arguments = function._schema.arguments
    say = {place for place, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write}
    return [(place, arguments[place].name) for place in sorted(say.union(_WITHOUT_SAYING.get(function, ())))]


class _Operators(TorchDispatchMode):
    """Tells of the tensors that operators write into, before they do, and of the memory that they make."""

    def __init__(self, writes: Callable[[Tensor], None], made: set[int | None]) -> None:
        super().__init__()
        self._writes, self._made = writes, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in _written_places(func):
            for one in _real(args[place] if place < len(args) else kwargs.get(name)):
                self._writes(one)
        result = func(*args, **kwargs)
        if not func.is_view:
            self._made |= set(map(_storage, _real(result))) - set(map(_storage, _real((args, kwargs)))) - {None}
        return result


def _real(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor) and not isinstance(one, FakeTensor)]


class Undo(TorchFunctionMode):
    """Keeps what tensors held that the module writes into, as batch norm into its counter; and notes of which tensors
    the module computes others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fed: dict[int, Tensor] = {}
        """Those that were there before, or views of them."""
        self._made: set[int | None] = set()
        """The storages that were not there before."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._shown: dict[int, tuple[Tensor, Tensor]] = {}
        self._assigned: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with _Operators(lambda tensor: self._keep(tensor, self._before), self._made), self:
            yield

    def _keep(self, tensor: Tensor, into: dict[int, tuple[Tensor, Tensor]]) -> None:
        if _storage(tensor) not in self._made:
            into.setdefault(id(tensor), (tensor, tensor.detach().clone()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        given = _plain((args, kwargs))
        if name in _SHOWS:
            self._keep(given[0], self._shown)
        if given and func == _tensor.data.__set__:
            self._assigned.append((given[0], given[0].data))
        result = func(*args, **kwargs)
        if name not in _SHARES:
            self._note(name, given, _plain(args[0] if func is _tensor.__setitem__ else result))
        return result

    def _note(self, name: str, given: list[Tensor], results: list[Tensor]) -> None:
        if name == "__get__" or not (results or name in _TAKES_NUMBERS):
            return  # an attribute, such as its shape; or a value that is recorded
        of_given, into = set(map(_storage, given)), set(map(_storage, results))
        if not name.endswith("_like") and (not name.startswith("new_") or name == "new_tensor"):  # those read a shape
            known = self._made | (into - {None})
            self.fed.update({id(one): one for one in given if _storage(one) not in known})
        self._made |= into - of_given - {None}

    def made_of(self, tensors: Iterable[Tensor]) -> list[int]:
        """Of the storages of tensors those that were not there before, in bytes."""
        found = {key: one for one in tensors if (key := _storage(one)) in self._made}
        return [one.untyped_storage().nbytes() for one in found.values()]

    @property
    def wrote(self) -> bool:
        """Whether the module wrote into a tensor that was there before."""
        shown = any(not torch.equal(tensor, before) for tensor, before in self._shown.values())
        return bool(self._before or self._assigned or shown)

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, data in reversed(self._assigned):
            tensor.data = data
        for tensor, before in reversed((self._shown | self._before).values()):  # a view may come before its base
            tensor.copy_(before)


class RandomStates:
    """The states of random generators: torch's and Python's own, NumPy's, and those that objects hold."""

    def __init__(self, device: torch.device, values: Iterable[Any]) -> None:
        pairs: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate),
        ]  # fmt: skip
        if device.type == "cuda":
            pairs.append((lambda: torch.cuda.get_rng_state(device), lambda s: torch.cuda.set_rng_state(s, device)))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            pairs.append((numpy.random.get_state, numpy.random.set_state))
        for one in {id(value): value for value in values}.values():
            if isinstance(one, torch.Generator) or (numpy is not None and isinstance(one, numpy.random.RandomState)):
                pairs.append((one.get_state, one.set_state))
            elif isinstance(one, random.Random):
                pairs.append((one.getstate, one.setstate))
            elif numpy is not None and isinstance(one, numpy.random.Generator):
                bits = one.bit_generator
                pairs.append((functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")))
        self._before = [(get, put, _as_bytes(get())) for get, put in pairs]

    @property
    def moved(self) -> bool:
        return any(_as_bytes(get()) != before for get, _, before in self._before)

    def put_back(self) -> None:
        for get, put, before in self._before:
            if _as_bytes(get()) != before:
                put(_from_bytes(before))


def _as_bytes(state: Any) -> tuple[bool, bytes]:
    """Out of torch's memory, which is counted. Whether it is a tensor, and its bytes."""
    if isinstance(state, Tensor):
        return True, ctypes.string_at(state.data_ptr(), state.nbytes)
    return False, pickle.dumps(state)


def _from_bytes(state: tuple[bool, bytes]) -> Any:
    of_tensor, there = state
    return torch.frombuffer(bytearray(there), dtype=torch.uint8) if of_tensor else pickle.loads(there)


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Where a module raises an error, as for images that are too small, torch would log one of its own beside it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
