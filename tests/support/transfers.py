"""What tests of copies beside strips share: networks, an array that tells what was asked of it, the CPU as a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from patchconv_native.tiles import planning, transfers
from patchconv_native.tiles.arguments import Arguments
from patchconv_native.tiles.plan import TilePlan
from patchconv_native.tiles.planning import plan_call

from .pairs import FULL
from .seeds import SWEEP_SEED
from .spatial_chains import Gate
from .streams import Streams

ORDERS = [None, *range(SWEEP_SEED, SWEEP_SEED + (6 if FULL else 1))]
"""Copies as late as can be, and at random times."""
Device = Callable[[int | None], Streams]


def as_a_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Makes the CPU a device of its own, with streams that keep to an order."""
    monkeypatch.setattr(transfers, "SERVED", {"cpu"})
    monkeypatch.setattr(planning, "check_store", lambda *given: None)

    def make(order: int | None) -> Streams:
        streams = Streams(order)
        monkeypatch.setattr(transfers, "device_copies", lambda device: streams)
        return streams

    return make


def alike(got: Any, want: Any) -> bool:
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    return bool(pairs) and all(
        a.shape == b.shape and bool((torch.as_tensor(a) - b).abs().max() <= 1e-9 * b.abs().max() + 1e-300)
        for a, b in pairs
    )


def planned(module: Any, x: Any, **more: Any) -> TilePlan:
    arguments = Arguments(x if isinstance(x, tuple) else (x,), arrays=True, dim=more.pop("dim", 2))
    return plan_call("tile", module, module, arguments, more.pop("budget", None), **more)


class Strict:
    """An array-like that can do nothing but what is asked of one, and tells which rows it was asked for."""

    def __init__(self, data: Any) -> None:
        self.data, self.shape, self.dtype = data, data.shape, data.dtype
        self.read: list[int] = []
        self.written: list[int] = []
        self.fail_at = 10**9

    def _check(self) -> None:
        if len(self.read) + len(self.written) > self.fail_at:
            raise OSError("no disk")

    def __getitem__(self, where: Any) -> Any:
        self.read.append(where[2].stop)
        self._check()
        return self.data[where]

    def __setitem__(self, where: Any, rows: Any) -> None:
        self.written.append(where[2].stop)
        self._check()
        self.data[where] = rows


def norms(width: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.InstanceNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1),
        nn.GroupNorm(2, width), nn.SiLU(), Gate(width), nn.Conv2d(width, 2, 3, padding=1),
    )  # fmt: skip


class Twice(nn.Module):
    """Reads its image in several places of a strip, in parts of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.down, self.last = nn.Conv2d(3, 3, 7, padding=3), nn.Conv2d(3, 3, 3, 2, 1), nn.Conv2d(6, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.wide(x)) + x
        small = F.interpolate(self.down(y), size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.last(torch.cat([y * x.mean((2, 3), keepdim=True), small - x], 1))


class Attention(nn.Module):
    """Each place with all others, and a skip past it: read whole by one call, and by strips later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, 2, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        places = x.flatten(2).transpose(1, 2).unsqueeze(1)  # one head
        mixed = F.scaled_dot_product_attention(places, places, places)
        return self.last(x + mixed.squeeze(1).transpose(1, 2).reshape(x.shape))
