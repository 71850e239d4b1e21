"""Calls of a torch.autograd.Function, which has a backward pass of its own: with gradients each is one call of the
graph, on whole values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .recorded import Recorded
from .watch import storage_of, written

_PLAIN = (Tensor, str, int, float, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Not functions and modules, in which there may be parameters."""


class OwnBackward:
    """A function of torch's kind, in place of `kind.apply`. One for each class: see `of_class`."""

    def __init__(self, kind: type[Function]) -> None:
        self._kind, self.__name__ = kind, kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.apply(*args, **kwargs)

    def of_fakes(self, *args: Any, **kwargs: Any) -> Any:
        """The same of values without data. NotImplementedError where it could not be computed a second time."""
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, _PLAIN):
                raise NotImplementedError(f"an autograd.Function that is given a {type(leaf).__name__}")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [one._version for one in given]
        with _Checked():
            found = self._kind.apply(*args, **kwargs)
        memory = set(map(storage_of, given))
        if versions != [one._version for one in given] or any(
            storage_of(one) in memory for one in tree_leaves(found) if isinstance(one, Tensor)
        ):
            raise NotImplementedError("an autograd.Function that writes into its arguments, or returns them")
        return found


def of_class(kind: type[Function]) -> OwnBackward:
    """Kept by the class itself: one that is made in a forward lives no longer for it."""
    name = "_patchconv_own_backward"
    if name not in vars(kind):
        setattr(kind, name, OwnBackward(kind))
    return vars(kind)[name]


class _Checked(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError("an autograd.Function that draws random numbers")
        if not all(isinstance(one, FakeTensor) for one in written(func, args, kwargs)):
            raise NotImplementedError("an autograd.Function that writes into a tensor which it is not given")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded(call: Callable[..., Any]) -> Iterator[None]:
    """Has `Function.apply` hand recorded values to `call`, with a function and its arguments."""
    before: Any = Function.__dict__["apply"]

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(leaf, Recorded) for leaf in tree_leaves((args, kwargs))):
            return call(of_class(kind), args, kwargs)
        return before.__get__(None, kind)(*args, **kwargs)

    function: Any = Function
    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = before
