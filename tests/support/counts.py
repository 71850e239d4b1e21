"""Saved tensors, bytes and operators counted by torch's own means."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode


class Hooked(saved_tensors_hooks):
    """Counts what goes through the saved-tensor hooks in its block, and changes nothing."""

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)
        self.packed: list[Tensor] = []
        self.unpacked = 0

    def __enter__(self) -> Hooked:
        super().__enter__()
        return self

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed.append(tensor)
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        self.unpacked += 1
        return tensor


class OperatorsSeen(TorchDispatchMode):
    """What `look` makes of the names and arguments of this package's operators that run."""

    def __init__(self, look: Callable[[str, tuple[Any, ...]], Any]) -> None:
        super().__init__()
        self.look, self.found = look, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "patchconv":
            self.found.append(self.look(func._opname, args))
        return func(*args, **(kwargs or {}))


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
    with saved_tensors_hooks(pack, lambda one: one.tensor):
        node: Any = call().grad_fn  # the graph lives on, the result does not
    gc.collect()
    tensors = [one.tensor for reference in saved if (one := reference()) is not None]
    own = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    del node
    return sum(size for address, size in storages.items() if address not in own)
