"""Bytes of tensors. A storage counts once, however many tensors share it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a structure of mappings, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors([getattr(value, field.name, None) for field in dataclasses.fields(value)])


def storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage. None for tensors without one (sparse tensors, some subclasses)."""
    try:
        found = tensor.untyped_storage()
        found.nbytes()
        return found
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def storages(values: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of every storage, by its address."""
    found = {}
    for tensor in values:
        memory = storage(tensor)
        if memory is not None:
            found[memory._cdata] = memory.nbytes()
    return found


def total(values: Iterable[Tensor], known: set[int] | None = None) -> int:
    """Bytes of all storages that are not in `known`. They are added to it."""
    known = set() if known is None else known
    new = {key: size for key, size in storages(values).items() if key not in known}
    known.update(new)
    return sum(new.values())
