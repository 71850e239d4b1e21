"""A model and its input go with the last name for them: nothing keeps them until the next garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchconv_native as pc

Call = Callable[[nn.Module, Tensor], Any]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 1),
    )  # fmt: skip


def evaluated(call: Call) -> Call:
    return torch.no_grad()(lambda model, x: call(model.eval(), x))


def trained(call: Call) -> Call:
    return lambda model, x: call(model, x).sum().backward()


def refused(model: nn.Module, x: Tensor) -> None:
    try:
        pc.tile(model, x, budget="1KiB")
    except pc.BudgetError:  # not pytest.raises, which keeps the error, and with it the caller's frame
        return
    raise AssertionError("not refused")


CALLS: dict[str, Call] = {
    "tile": evaluated(lambda model, x: pc.tile(model, x, budget="512KiB")),
    "tiles of both dimensions": evaluated(lambda model, x: pc.tile(model, x, tile=(16, 16))),
    "a refused budget": refused,
    "tile, training": trained(lambda model, x: pc.tile(model, x, budget="1MiB")),
    "tile without backward": lambda model, x: pc.tile(model, x, budget="1MiB"),
    "tile_modules": trained(lambda model, x: pc.tile_modules(model, {"": "1MiB"})(x)),
    "tile_plan": lambda model, x: pc.tile_plan(model, x, budget="1MiB"),
    "plan": lambda model, x: pc.plan(model, x, budget="2MiB"),
    "max_batch": lambda model, x: pc.max_batch(model, x, budget="8MiB"),
    "trace": lambda model, x: pc.memory.trace(model, x),
    "microbatch": trained(lambda model, x: pc.microbatch(model, x, chunks=2)),
    "checkpoint": trained(lambda model, x: pc.checkpoint(model, x)),
    "convert": trained(lambda model, x: pc.convert(model)(x)),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_keeps_a_model_alive(name: str) -> None:
    def kept() -> list[weakref.ref[Tensor]]:
        model, x = network(), torch.rand(2, 3, 64, 64)
        given = [weakref.ref(value) for value in (*model.parameters(), *model.buffers(), x)]
        CALLS[name](model, x)
        return given

    kept()  # what a first call sets up is not counted
    gc.collect()
    gc.disable()
    try:
        assert not [value for value in kept() if value() is not None]
    finally:
        gc.enable()
