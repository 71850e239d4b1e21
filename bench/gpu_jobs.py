"""What bench.gpu times of the memory-bound kernels: a job, which is a row of the results, and a job on its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cases import DTYPES, LAYOUTS
from .measure import MIB

SIZES = {"full": (256 * MIB, 16 * MIB, 1024 * MIB, MIB), "tiny": (MIB // 16,)}  # the most important first

COPY, OF_COPY, OF_STOCK = "copy", "of_copy", "of_stock"  # the third side, and the names of the ratios
NUMBERS = 1 << 16  # bytes of a call's few numbers, in the allocator's blocks: a seed, what a channel has

# What is asked of the ratios, rounded to hundredths.
NOT_SLOWER = {OF_STOCK: 1.0}
NEAR_COPY = {OF_COPY: 0.9, OF_STOCK: 1.0}


@dataclass
class Bound:
    """A job on its device: the bytes that it must move, and the calls that do it. `allowed`: the bytes that ours may
    allocate besides its results."""

    floor: int
    ours: Callable[[], Any]
    stock: Callable[[], Any]
    allowed: int = NUMBERS


@dataclass(frozen=True)
class Job:
    name: str
    pass_: str
    dtype: str
    bytes: int  # of the tensor that the layer is applied to
    bind: Callable[[Job, str], Bound]
    layout: str = "dense"  # any, where memory order is all that counts
    targets: dict[str, float] = field(default_factory=lambda: NOT_SLOWER)
    shape: tuple[int, ...] | None = None  # None: (N, 64, side, side) of these bytes

    @property
    def facts(self) -> dict[str, Any]:
        of = {"name": self.name, "pass": self.pass_, "dtype": self.dtype, "layout": self.layout}
        return of | {"mib": self.bytes / MIB, "targets": self.targets}

    def __str__(self) -> str:
        return f"{self.name} {self.pass_} {self.dtype} {self.layout} {self.bytes / MIB:g} MiB"

    def tensor(self, device: str) -> Tensor:
        """Noise of the job's shape, in its layout."""
        dtype, shape = DTYPES[self.dtype], self.shape
        if shape is None:
            side = next(side for side, least in ((256, 16 * MIB), (64, MIB), (8, 0)) if self.bytes >= least)
            shape = max(1, self.bytes // (64 * side * side * dtype.itemsize)), 64, side, side
        x = torch.randn(shape, dtype=dtype, device=device)
        return x.contiguous(memory_format=LAYOUTS.get(self.layout, torch.contiguous_format))
