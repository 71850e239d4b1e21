"""What a forward pass keeps for backward, counted in three ways: `python -m bench.census` compares a ResNet-18.

saved_bytes sees what autograd saves, where it saves it: the tensors that pass through saved-tensor hooks, the pass's
own inputs included. held_bytes sees what stays alive, whoever holds it: every storage that an operator returned in the
pass and that lives on when all is gone but the graph. heap_bytes sees all that malloc gave out and did not get back,
also what an operator made below every Python mode; it is for the CPU, with glibc, and knows nothing of storages.
The last two do not count what existed before the pass. All three run the pass once unseen, so that what is made only
once (caches, thread pools, compiled kernels) counts for nobody, and none counts an output that nothing else holds.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from . import report
from .measure import MIB

Pass = Callable[[], Any]


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in what a model returns, or an operator takes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors(vars(value))


def _reference(tensor: Tensor) -> StorageWeakRef | None:
    """Keeps the storage's address from being used again, but not its memory."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass without memory of its own
        return None


class _Storages:
    """A set of storages, held weakly."""

    def __init__(self, values: Iterable[Tensor] = ()) -> None:
        self.references: dict[int, StorageWeakRef] = {}
        self.sizes: dict[int, int] = {}
        for tensor in values:
            self.add(tensor)

    def add(self, tensor: Tensor, unless: _Storages | None = None) -> None:
        made = _reference(tensor)
        if made is None or made.cdata in self.sizes or (unless is not None and made.cdata in unless.sizes):
            return
        self.references[made.cdata] = made
        self.sizes[made.cdata] = tensor.untyped_storage().nbytes()

    def alive(self) -> int:
        """Bytes of those that still exist, at their present size."""
        total = 0
        for cdata in self.references:
            storage = torch.UntypedStorage._new_with_weak_ptr(cdata)
            total += 0 if storage is None else storage.nbytes()
        return total


class _Census(TorchDispatchMode):
    """Every storage that an operator returns and that was not there before."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = _Storages(), _Storages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors([args, kwargs or {}]):
            self.old.add(tensor, unless=self.new)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            self.new.add(tensor, unless=self.old)
        return result


def _graph(fn: Pass) -> list[Any]:
    """Runs the pass; what its outputs hang on, without the outputs."""
    nodes = [tensor.grad_fn for tensor in tensors(fn()) if tensor.grad_fn is not None]
    gc.collect()
    return nodes


def saved_bytes(fn: Pass, apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages that autograd saves in fn(), each once, without those of `apart_from`: model.parameters(),
    and model.buffers() where saved running statistics shall not count.
    """
    _graph(fn)
    own, seen = _Storages(apart_from), _Storages()

    def pack(tensor: Tensor) -> Tensor:
        seen.add(tensor, unless=own)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _graph(fn)
    return sum(seen.sizes.values())


def held_bytes(fn: Pass) -> int:
    """Bytes of the storages that operators returned in fn() and that its graph keeps alive."""
    _graph(fn)
    with _Census() as census:
        nodes = _graph(fn)
    total = census.new.alive()
    del nodes
    return total


def heap_bytes(fn: Pass) -> int:
    """Bytes that malloc gave out in fn() and that its graph keeps. CPU, glibc 2.33 or later."""
    _graph(fn)
    before = _in_use()
    nodes = _graph(fn)
    after = _in_use()
    del nodes
    return after - before


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def _in_use() -> int:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        raise OSError("this C library has no mallinfo2 (glibc has since 2.33): heap_bytes cannot measure here")
    mallinfo2.restype = _Mallinfo2
    now = mallinfo2()
    return now.uordblks + now.hblkhd


def counted(fn: Pass, model: nn.Module) -> list[int]:
    return [saved_bytes(fn, model.parameters()), held_bytes(fn), heap_bytes(fn)]


def table(passes: Mapping[str, tuple[Pass, nn.Module]]) -> str:
    """A Markdown table in MiB: a line for each pass, and in brackets what it is of the first one's."""
    counts = [counted(fn, model) for fn, model in passes.values()]
    lines = [
        [name, *(f"{n / MIB:.2f} ({n / max(1, first):.3f})" for n, first in zip(row, counts[0], strict=True))]
        for name, row in zip(passes, counts, strict=True)
    ]
    return report.table(["", "saved by autograd, MiB", "held by the graph, MiB", "growth of the heap, MiB"], lines)


def main() -> int:
    import copy

    import torchvision

    import patchconv_native as pc

    torch.manual_seed(0)
    stock = torchvision.models.resnet18()
    ours = pc.convert(copy.deepcopy(stock))
    x = torch.randn(2, 3, 224, 224)
    print(table({"ResNet-18, batch 2": (lambda: stock(x), stock), "converted": (lambda: ours(x), ours)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
