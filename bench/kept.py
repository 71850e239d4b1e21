"""Bytes that a forward pass keeps for backward, counted in three ways: `python -m bench.kept` for a ResNet-18.

saved_bytes counts the tensors that pass through saved-tensor hooks, the inputs among them. held_bytes counts storages
that an operator returned in the pass and that are alive when only the graph is left, whoever holds them. heap_bytes
counts all that malloc gave out and did not get back, the graph's nodes included; it works on the CPU, with glibc. The
last two do not count what existed before the pass. All of them run the pass once before they count, so that what is
made only once (caches, thread pools, compiled kernels) does not count, and none counts an output that nothing else
holds.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from patchconv_native.memory.sizes import storage, tensors

from . import tables
from .measure import MIB

Pass = Callable[[], Any]
Storages = dict[int, tuple[StorageWeakRef, int]]
"""Address to a reference, which keeps the address but not the memory from being used again, and bytes."""


def _add(found: Storages, values: Iterable[Tensor], unless: Storages) -> None:
    for tensor in values:
        if (memory := storage(tensor)) is None:  # sparse, or a subclass without memory of its own
            continue
        reference = StorageWeakRef(memory)
        if reference.cdata not in found and reference.cdata not in unless:
            found[reference.cdata] = reference, memory.nbytes()


def _alive(found: Storages) -> int:
    """Bytes of those that still exist, at their present size."""
    memories = (torch.UntypedStorage._new_with_weak_ptr(address) for address in found)
    return sum(memory.nbytes() for memory in memories if memory is not None)


class _NewStorages(TorchDispatchMode):
    """The storages that operators return and that were not there before."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = Storages(), Storages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _add(self.old, tensors([args, kwargs or {}]), unless=self.new)
        result = func(*args, **(kwargs or {}))
        _add(self.new, tensors(result), unless=self.old)
        return result


def _graph(fn: Pass) -> list[Any]:
    """Runs the pass and lets go of all but what its outputs hang on."""
    nodes = [tensor.grad_fn for tensor in tensors(fn()) if tensor.grad_fn is not None]
    gc.collect()
    return nodes


class _Kept:
    """What a hook gives to a node: as long as it lives, the node keeps the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(fn: Pass, apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages that autograd saves in fn(), each once, without those of `apart_from`: model.parameters(),
    and model.buffers() too where running statistics, which are saved but cost nothing, shall not count.
    """
    own, seen = Storages(), Storages()
    _add(own, apart_from, unless={})
    kept: list[weakref.ref[_Kept]] = []

    def pack(tensor: Tensor) -> _Kept:
        holder = _Kept(tensor)
        kept.append(weakref.ref(holder))
        return holder

    _graph(fn)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        _nodes = _graph(fn)
    _add(seen, [holder.tensor for reference in kept if (holder := reference()) is not None], unless=own)
    return sum(size for _, size in seen.values())


def held_bytes(fn: Pass) -> int:
    """Bytes of the storages that operators returned in fn() and that its graph keeps alive."""
    _graph(fn)
    with _NewStorages() as found:
        _kept = _graph(fn)
    return _alive(found.new)


def heap_bytes(fn: Pass) -> int:
    """Bytes that malloc gave out in fn() and that its graph keeps. CPU, glibc 2.33 or later."""
    _graph(fn)
    before = _in_use()
    _kept = _graph(fn)
    return _in_use() - before


class _Mallinfo2(ctypes.Structure):
    _fields_ = [("values", ctypes.c_size_t * 10)]


def _in_use() -> int:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        raise OSError("this C library has no mallinfo2 (glibc has since 2.33): heap_bytes cannot measure here")
    mallinfo2.restype = _Mallinfo2
    values = mallinfo2().values
    return values[4] + values[7]  # hblkhd, in blocks mapped singly, and uordblks, in arenas


def table(passes: Mapping[str, tuple[Pass, nn.Module]]) -> str:
    """A Markdown table in MiB, a line for each pass and its model, and in brackets what it is of the first line's."""
    counts = [(saved_bytes(fn, model.parameters()), held_bytes(fn), heap_bytes(fn)) for fn, model in passes.values()]
    lines = []
    for name, row in zip(passes, counts, strict=True):
        shares = zip(row, counts[0], strict=True)
        lines.append([name, *(f"{n / MIB:.2f} ({n / max(1, first):.3f})" for n, first in shares)])
    return tables.table(["MiB", "saved by autograd", "held by the graph", "growth of the heap"], lines)


def main() -> int:
    import torchvision

    import patchconv_native as pc

    x = torch.randn(2, 3, 224, 224)
    stock, ours = torchvision.models.resnet18(), pc.convert(torchvision.models.resnet18())
    print(table({"ResNet-18, batch 2": (lambda: stock(x), stock), "converted": (lambda: ours(x), ours)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
