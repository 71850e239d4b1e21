"""What rows of images are read from, and what rows of a result are written to: tensors and array-likes.

An array-like has a shape, a dtype of numpy's and slices: numpy.ndarray, numpy.memmap, arrays of zarr, h5py datasets.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..spatial import Range, SpatialTensor
from .graph import Graph, Ref, refs
from .shared import strides_of

STEP = 4 * 1024 * 1024
"""Bytes that are copied at a time from an image that is a result as it is."""


def is_array(x: Any) -> bool:
    """Whether x is an array-like, and no tensor."""
    return not isinstance(x, Tensor) and all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__"))


def on_host(x: Any) -> bool:
    """Whether an image is in the host's memory or in a file."""
    return not isinstance(x, Tensor) or x.device.type == "cpu"


def dtype_of(owner: str, name: str, x: Any) -> torch.dtype:
    """Of an array-like, as torch's dtype."""
    import numpy

    try:
        return torch.from_numpy(numpy.empty(0, numpy.dtype(x.dtype).newbyteorder("="))).dtype
    except TypeError:
        raise ValueError(
            f"{owner}: expected {name} to have a dtype that numpy and torch both have, got {x.dtype} (numpy has no "
            "bfloat16: give a tensor instead)"
        ) from None


class Source:
    """Rows are read from it, onto a device."""

    def __init__(self, owner: str, x: Any, device: torch.device) -> None:
        self.x, self.device = x, device
        self.shape = torch.Size(int(n) for n in x.shape)
        self.dtype: torch.dtype = x.dtype if isinstance(x, Tensor) else dtype_of(owner, "x", x)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the image on the device: an array-like's order in memory does not matter."""
        if isinstance(self.x, Tensor):
            return strides_of(self.x)
        return tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))

    @property
    def copies(self) -> int:
        """How many copies of the rows there are on the device while they are read."""
        if isinstance(self.x, Tensor):
            return int(not self.x.is_meta and self.x.device != self.device)
        return 1 if self.device.type != "cpu" or _is_numpy(self.x) else 2

    def read(self, where: Mapping[int, Range]) -> Tensor:
        """where: ranges along some dimensions."""
        place = tuple(slice(*where.get(d, (0, size))) for d, size in enumerate(self.shape))
        if isinstance(self.x, Tensor):
            return self.x[place].to(self.device)
        rows = torch.empty([one.stop - one.start for one in place], dtype=self.dtype)
        self.fill(where, rows)
        return rows.to(self.device)

    def fill(self, where: Mapping[int, Range], rows: Tensor) -> None:
        """Reads into rows in the host's memory."""
        place = tuple(slice(*where.get(d, (0, size))) for d, size in enumerate(self.shape))
        if isinstance(self.x, Tensor):
            rows.copy_(self.x[place])
        else:
            rows.numpy()[...] = self.x[place]
            _release_pages(self.x)

    def all(self) -> Tensor:
        return self.x if isinstance(self.x, Tensor) else self.read({})


class Sink:
    """Rows are written to it."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def write(self, where: Mapping[int, Range], rows: Tensor) -> None:
        """where: ranges along some dimensions."""
        place = tuple(slice(*where.get(d, (0, size))) for d, size in enumerate(self.x.shape))
        if isinstance(self.x, Tensor):
            self.x[place].copy_(rows)
        elif rows.numel():
            self.x[place] = rows.numpy(force=True)
            _release_pages(self.x)

    def put(self, where: Mapping[int, Range], rows: Tensor) -> None:
        """As `write`, of rows whose memory is used again: an array-like may keep what it is given."""
        self.write(where, rows if isinstance(self.x, Tensor) or _is_numpy(self.x) else rows.clone())

    def flush(self) -> None:
        """So that what was written outlives this process and this machine, where it is in a file."""
        flush = getattr(self.x, "flush", None)
        if flush is not None:
            flush()

    def write_all(self, value: Tensor | Source) -> None:
        if isinstance(value, Source):
            size, row = value.shape[2], math.prod(value.shape) * value.dtype.itemsize // value.shape[2]
            step = max(1, STEP // max(row, 1))
            for low in range(0, size, step):
                high = min(low + step, size)
                self.write({2: (low, high)}, value.read({2: (low, high)}))
        elif isinstance(self.x, Tensor):
            self.x.copy_(value)
        else:
            self.x[...] = value.numpy(force=True)


def _is_numpy(x: Any) -> bool:
    import numpy

    return isinstance(x, numpy.ndarray)


def _release_pages(x: Any) -> None:
    """Unmaps the pages of a numpy.memmap that were touched: they count for the process. The file keeps its values."""
    import numpy

    if not isinstance(x, numpy.memmap) or x.mode == "c":  # changes to a copy of the pages are nowhere else
        return
    base: Any = x
    while isinstance(base, numpy.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def check_out(owner: str, out: Any, graph: Graph, images: list[Any]) -> None:
    """ValueError where the module's result cannot be written into `out`."""
    if not isinstance(graph.result, Ref):
        what = type(graph.result).__name__
        raise ValueError(f"{owner}: out: expected a module whose result is one tensor, got one that returns {what}")
    if graph.changed:
        raise ValueError(f"{owner}: out: expected a module that changes no list or mapping that it is given")
    if refs([change for _, change in graph.kept]):
        raise ValueError(f"{owner}: out: expected a module that keeps no tensor for its next call")
    fake: FakeTensor = graph.fakes[graph.result.index]
    if not isinstance(out, Tensor) and not (is_array(out) and hasattr(out, "__setitem__")):
        raise ValueError(f"{owner}: expected out to be a tensor or an array-like, got {type(out).__name__}")
    if tuple(out.shape) != tuple(fake.shape):
        raise ValueError(f"{owner}: expected out to have the shape {tuple(fake.shape)}, got {tuple(out.shape)}")
    dtype = out.dtype if isinstance(out, Tensor) else dtype_of(owner, "out", out)
    if dtype != fake.dtype:
        hint = ""
        if fake.dtype == torch.bfloat16 and not isinstance(out, Tensor):
            hint = "; numpy has no bfloat16: give a tensor, or a module that ends with .float()"
        raise ValueError(f"{owner}: expected out to have the dtype {fake.dtype}, got {dtype}{hint}")
    if not isinstance(out, Tensor) and _is_numpy(out) and not out.flags.writeable:
        raise ValueError(f"{owner}: expected out to be an array that can be written, got one that is read-only")
    if isinstance(out, Tensor) and any(n > 1 and not step for n, step in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"{owner}: expected out to have memory for each of its elements, got an expanded tensor")
    if any(share_memory(out, image) for image in images):
        raise ValueError(f"{owner}: expected out to have memory of its own, got that of x")


def share_memory(a: Any, b: Any) -> bool:
    """Whether two tensors or arrays of numpy's may lie in the same memory."""
    a, b = (x.to_local() if isinstance(x, SpatialTensor) else x for x in (a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not b.is_meta and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    if isinstance(a, Tensor) or isinstance(b, Tensor) or not (_is_numpy(a) and _is_numpy(b)):
        return a is b
    import numpy

    return numpy.may_share_memory(a, b)
