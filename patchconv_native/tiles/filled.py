"""Tensors of one number that a module makes, as by torch.zeros. They have numbers, and are constants, unless something
that follows from an image is written into them: then they are values too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_tensor: Any = Tensor
FACTORIES = {
    torch.zeros, torch.ones, torch.empty, torch.full, torch.zeros_like, torch.ones_like, torch.empty_like,
    torch.full_like, _tensor.new_zeros, _tensor.new_ones, _tensor.new_empty, _tensor.new_full,
}  # fmt: skip

COPIES = {"to", "type", "type_as", "double", "float", "half", "bfloat16", "cuda", "cpu", "clone", "contiguous"}
"""Functions whose results are followed as what they copy."""


class OfImages(BaseException):
    """The call of FACTORIES of this number has made such a value: the module is recorded again, from its beginning."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Filled:
    """The calls of FACTORIES in one recording."""

    def __init__(self) -> None:
        self._calls = 0
        self._numbers: dict[Any, int] = {}
        """By the storages of results."""
        self.of_images: dict[int, Callable[[Tensor, bool], Any]] = {}
        """By the numbers of calls whose results are values, what makes the value."""

    def next(self) -> int:
        """The number of a call, whatever it is given: when a module is recorded again, it may be given a value."""
        self._calls += 1
        return self._calls - 1

    def given(self, number: int, made: Tensor, storage: Any, empty: bool) -> Any:
        """What the module gets in place of a result with numbers. empty: they are any."""
        if number in self.of_images:
            return self.of_images[number](made, empty)
        self._numbers[storage] = number
        return made

    def copied(self, storage: Any, copy: Any) -> None:
        """A copy of what a call has made is followed as that is."""
        if storage in self._numbers:
            self._numbers[copy] = self._numbers[storage]

    def check(self, storage: Any) -> None:
        """Where something that follows from an image is written into a tensor. Raises OfImages."""
        number = self._numbers.get(storage)
        if number is not None and number not in self.of_images:
            raise OfImages(number)


def number_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of x.new_zeros(shape) or its like fills with. None: of another call, or not known."""
    if kwargs.get("requires_grad"):
        return None
    if function is _tensor.new_full:
        number = kwargs.get("fill_value", args[2] if len(args) > 2 else None)
        return number if isinstance(number, (int, float)) else None
    return {_tensor.new_zeros: 0, _tensor.new_ones: 1, _tensor.new_empty: 0}.get(function)


def value_like(call: Callable[..., Any], values: Iterable[Any], made: Tensor, number: Any) -> Any:
    """A value of this number in place of a tensor, cut like one of its size among `values`. None: there is no such."""
    size = made.shape[:1] + made.shape[2:]
    for like in (one for one in values if one.dim() > 2 and one.shape[:1] + one.shape[2:] == size):
        if like.device == made.device and made.numel():
            rest = {"dtype": made.dtype, "memory_format": torch.contiguous_format}
            with torch.no_grad():
                one = call(torch.full_like, (like[:, :1], number), rest)
                return call(Tensor.repeat, (one, 1, made.size(1), *[1] * (made.dim() - 2)), {})
    return None
