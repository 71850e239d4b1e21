"""Random generators that a module may draw from: Python's, numpy's, torch's, and those that it holds itself."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_tensor: Any = Tensor
DRAW_INTO = {
    _tensor.normal_, _tensor.uniform_, _tensor.exponential_, _tensor.cauchy_, _tensor.log_normal_, _tensor.geometric_,
    _tensor.random_,
}  # fmt: skip
DRAW = {torch.rand_like, torch.randn_like, torch.randint_like} | DRAW_INTO
"""They draw at once where a module is recorded, as torch.randn(x.shape) does: of a value they read the shape."""


def draw(function: Callable[..., Tensor], fake: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a function of DRAW draws for a value like `fake`."""
    like = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return function(like, *args, **kwargs)


class _Source(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    before: Any


def _source(read: Callable[[], Any], write: Callable[[Any], Any]) -> _Source:
    return _Source(read, write, read())


def _of_torch(get: Callable[[], Tensor], put: Callable[[Tensor], Any]) -> _Source:
    """Its states are tensors. They are kept as bytes, which do not count as torch's memory."""

    def read() -> bytes:
        state = get()
        return ctypes.string_at(state.data_ptr(), state.nbytes)

    return _source(read, lambda state: put(torch.frombuffer(bytearray(state), dtype=torch.uint8)))


def _bits(generator: Any) -> _Source:
    """Of numpy's kind, which has a property."""
    return _source(lambda: generator.state, lambda state: setattr(generator, "state", state))


def moved(sources: Iterable[_Source]) -> bool:
    """Whether one is not as it was when it was noted."""
    return any(pickle.dumps(source.read()) != pickle.dumps(source.before) for source in sources)


@contextlib.contextmanager
def as_noted(sources: Sequence[_Source]) -> Iterator[None]:
    """Generators are as they were when they were noted, and afterwards as they are now."""
    now = [source.read() for source in sources]
    for source in sources:
        source.write(source.before)
    try:
        yield
    finally:
        for source, state in zip(sources, now, strict=True):
            source.write(state)


class Draws:
    """The states of generators now, to be put back: the default ones, and those among `values`."""

    def __init__(self, device: torch.device, values: Iterable[Any]) -> None:
        self._noted: dict[int, Any] = {}
        self._sources = default_sources(device)
        self._sources.append(_source(random.getstate, random.setstate))
        self._numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        if self._numpy is not None:
            self._sources.append(_source(self._numpy.get_state, self._numpy.set_state))
        for value in values:
            self.note(value)

    def note(self, value: Any) -> None:
        """Of something that is no generator: nothing."""
        if id(value) in self._noted:
            return
        numpy = self._numpy
        found = None
        if isinstance(value, torch.Generator):
            found = _of_generator(value)
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            found = _source(value.getstate, value.setstate)
        elif numpy is not None and isinstance(value, numpy.RandomState):
            found = _source(value.get_state, value.set_state)
        elif numpy is not None and isinstance(value, (numpy.Generator, numpy.BitGenerator)):
            found = _bits(value if isinstance(value, numpy.BitGenerator) else value.bit_generator)
        if found is not None:
            self._noted[id(value)] = value
            self._sources.append(found)

    def moved(self) -> bool:
        return moved(self._sources)

    def put_back(self) -> None:
        for source in self._sources:
            source.write(source.before)


def _of_generator(generator: torch.Generator) -> _Source:
    return _of_torch(generator.get_state, generator.set_state)


def sources_of(device: torch.device, arguments: Iterable[Any]) -> list[_Source]:
    """Those of torch's generators from which a call with these arguments may draw."""
    given = [_of_generator(one) for one in arguments if isinstance(one, torch.Generator)]
    return default_sources(device) + given


def default_sources(device: torch.device) -> list[_Source]:
    """torch's own generators, from which calls draw."""
    found = [_of_torch(torch.get_rng_state, torch.set_rng_state)]
    if device.type == "cuda":
        cuda = torch.cuda
        found.append(_of_torch(lambda: cuda.get_rng_state(device), lambda state: cuda.set_rng_state(state, device)))
    return found
