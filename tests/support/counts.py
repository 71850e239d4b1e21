"""Bytes counted by torch's own means, beside which this package's counts are held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class _Saved:
    """What a hook gives to a node: as long as it lives, the node keeps the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(call: Callable[[], Tensor], apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages that autograd keeps for the result, each once, without those of `apart_from`."""
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        one = _Saved(tensor)
        saved.append(weakref.ref(one))
        return one

    call()  # what is made only once does not count
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        node: Any = call().grad_fn  # the graph lives on, the result does not
    gc.collect()
    tensors = [one.tensor for reference in saved if (one := reference()) is not None]
    own = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    del node
    return sum(size for address, size in storages.items() if address not in own)
