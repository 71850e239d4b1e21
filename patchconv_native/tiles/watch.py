"""What a module does to tensors that were there before it was recorded: what it writes into them, and what it computes
of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..spatial.rules import NotServed, name_of
from ..spatial.shapes import put_back, set_item
from .draws import Draws
from .filled import COPIES, FACTORIES, Filled

_tensor: Any = Tensor
ON_PIXELS = {
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__", "nonzero",
    "equal", "allclose",
}  # fmt: skip
_SET_DATA = _tensor.data.__set__
_READS = {"tolist"}
_GIVES = {"numpy", "__array__", "__dlpack__", *_READS}
"""They give a tensor's numbers away, past torch's operators. What is not in _READS shares its memory."""


def writes_first(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into its first argument."""
    name = name_of(function)
    if function in (set_item, put_back) or kwargs.get("inplace"):
        return True
    if name.startswith("__"):  # __iadd__ is that of __add__
        return name.startswith("__i") and hasattr(Tensor, "__" + name[3:])
    return name.endswith("_")


def storage_of(tensor: Tensor) -> int | None:
    """None for a tensor that has none, as a sparse one."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Which numbers it shows."""
    storage = storage_of(tensor)
    if storage is None or tensor.layout != torch.strided:
        return (id(tensor),)
    return storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _plain(values: Any) -> list[Tensor]:
    """The tensors that are not recorded."""
    return [one for one in tree_leaves(values) if isinstance(one, Tensor) and not hasattr(one, "_recorder")]


_writes: dict[Any, list[tuple[int, str]]] = {}


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among an operator's arguments that it writes into, as its schema says. It does not say so of running
    statistics.
    """
    if func not in _writes:
        given = enumerate(func._schema.arguments)
        _writes[func] = [
            (place, one.name) for place, one in given
            if (one.alias_info and one.alias_info.is_write) or one.name.startswith("running_")
        ]  # fmt: skip
    found = (args[place] if place < len(args) else kwargs.get(name) for place, name in _writes[func])
    return _plain(list(found))


def _nothing(tensors: list[Tensor]) -> None:
    pass


class Watch(TorchDispatchMode):
    """Keeps what tensors held that the module writes into, as batch norm into its counter; and notes of which tensors
    the module computes others. It sees every operator with numbers, and `numpy` by way of a mode for functions.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws, self.drew = draws, False
        self.fed: dict[Any, Tensor] = {}
        """Those that were there before, or views of them."""
        self.before_read: Callable[[list[Tensor]], None] = _nothing
        """Called with tensors whose numbers are about to be read."""
        self.before_write = self.before_read
        self._kept: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}
        """Tensors that were there before, the same memory, and what it held."""
        self.wrote, self._off = False, False
        self._made: set[int | None] = set()
        """The storages that were not there before."""
        self.filled = Filled()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Once. What it calls is let go of then."""
        try:
            with self, _Functions(self):
                yield
        finally:
            self.before_read = self.before_write = _nothing
            self.filled.of_images = {}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """For calls on values that have no data."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                self.draws.note(leaf)
        self.drew |= torch.Tag.nondeterministic_seeded in func.tags
        given, into = _plain((args, kwargs)), written(func, args, kwargs)
        if into:
            self.before_write(into)
            self.wrote |= self.keep(into)
        if not func.is_view:
            self.before_read(given)
        result = func(*args, **kwargs)
        self._note(func, given, into + _plain(result))
        return result

    def _note(self, func: Any, given: list[Tensor], results: list[Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        of_given, into = set(map(storage_of, given)), set(map(storage_of, results))
        if name == "lift_fresh":  # torch.tensor has made it
            of_given = set()
        elif not (func.is_view or name.endswith("_like") or name.startswith("new_")):  # these read a shape
            self.feeds([one for one in given if storage_of(one) not in into - {None}])
        self._made |= into - of_given - {None}

    def made_of(self, tensors: Iterable[Tensor]) -> list[int]:
        """Of the storages of tensors those that were not there before, in bytes."""
        found = {key: one for one in tensors if (key := storage_of(one)) in self._made}
        return [one.untyped_storage().nbytes() for one in found.values()]

    def feeds(self, tensors: list[Tensor]) -> None:
        for one in tensors:
            if storage_of(one) not in self._made:
                self.fed.setdefault(_memory(one), one if one.is_leaf else one.detach())

    def keep(self, tensors: list[Tensor]) -> bool:
        """What they hold. Whether there are some that were there before."""
        there = [tensor for tensor in tensors if storage_of(tensor) not in self._made]
        for tensor in there:
            if _memory(tensor) not in self._kept:
                self._kept[_memory(tensor)] = tensor, tensor.detach(), tensor.detach().clone()
        return bool(there)

    def held(self) -> int:
        """Bytes of what is kept."""
        return sum(before.nbytes for _, _, before in self._kept.values())

    def changed(self) -> bool:
        return self.wrote or any(not torch.equal(alias, before) for _, alias, before in self._kept.values())

    def put_back(self) -> None:
        with torch.inference_mode():  # some tensors can be written to in it alone
            for tensor, alias, before in reversed(self._kept.values()):  # some overlap
                alias.copy_(before)
                if _memory(tensor) != _memory(alias) and tensor.layout == torch.strided:
                    tensor.data = alias


class _Functions(TorchFunctionMode):
    """For a watch: what gives away a tensor's numbers without an operator. What the module does to tensors made
    in inference mode is done in that mode; all else is recorded outside of it.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sets, name = func == _SET_DATA, name_of(func)
        if sets or name in _GIVES:
            tensors = _plain(args[0])
            self._watch.before_read(tensors)
            if name not in _READS:
                self._watch.before_write(tensors)
                self._watch.wrote |= self._watch.keep(tensors) and sets
            if not sets:
                self._watch.feeds(tensors)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        plain = _plain(given)
        if len(plain) == len(given) and any(one.is_inference() for one in plain):
            with torch.inference_mode():  # they can be written to in it alone
                return func(*args, **(kwargs or {}))
        number = self._watch.filled.next() if func in FACTORIES else None
        found = func(*args, **(kwargs or {}))
        has_numbers = isinstance(found, Tensor) and len(_plain(found)) == 1
        if number is None and name in COPIES and has_numbers and plain:
            self._watch.filled.copied(storage_of(plain[0]), storage_of(found))
        if number is None or not has_numbers or len(plain) != len(given):
            return found
        return self._watch.filled.given(number, found, storage_of(found), "empty" in name)


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Where a module raises an error, as for images that are too small, torch would log one of its own beside it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def names_torchscript() -> Iterator[None]:
    """With gradients, TorchScript's interpreter fails on values without data, and does not say why."""
    try:
        yield
    except RuntimeError as error:
        if "TorchScript interpreter" in str(error) and str(error).rstrip().endswith("RuntimeError:"):
            what = "a function or module of TorchScript is not served with gradients: give what it was made from"
            raise NotServed(f"tile: {what}") from error
        raise
