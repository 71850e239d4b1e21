"""What a module does to tensors that were there before it was recorded: what it writes into them, and what it computes
of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..spatial.forms import in_form
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


class Undo(TorchFunctionMode):
    """Keeps what tensors held that the module writes into, as batch norm into its counter; and notes of which tensors
    the module computes others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.fed: dict[int, Tensor] = {}
        """Those that were there before, or views of them."""
        self._made: set[int | None] = set()
        """The storages that were not there before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sets = func is _tensor.__setitem__
        first: Any = next(iter(in_form(func, args, kwargs)[0]), None)
        writes = type(first) in (Tensor, nn.Parameter) and (sets or writes_first(func, kwargs))
        if writes and _storage(first) not in self._made:
            self.before.setdefault(id(first), (first, first.detach().clone()))
        result = func(*args, **kwargs)
        self._note(name_of(func), _plain((args, kwargs)), _plain(first if sets else result))
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

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, before in reversed(self.before.values()):  # a view may have been written to before its base
            tensor.copy_(before)


def random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Where a module raises an error, as for images that are too small, torch would log one of its own beside it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
