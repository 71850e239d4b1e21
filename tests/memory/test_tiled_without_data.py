"""memory.trace(fake=True) of tiled models: what their plans predict, beside what a real step takes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import patchconv_native as pc


class Net(nn.Module):
    """Layers before, inside and behind a part that is tiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.inner = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("part", ["", "inner"])
def test_a_tiled_model_is_predicted(part: str, train: bool) -> None:
    model, x = Net(), torch.randn(2, 8, 96, 80)
    stock = pc.memory.trace(copy.deepcopy(model), x, train=train, fake=True).peak
    pc.tile_modules(model, part, "768KiB")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    meta = pc.memory.trace(model, x.to("meta"), train=train, fake=True).peak
    fake = pc.memory.trace(model, x, train=train, fake=True).peak
    torch.testing.assert_close(dict(model.state_dict()), before)
    real = pc.memory.trace(copy.deepcopy(model), x, train=train).peak
    assert fake == meta < 0.95 * stock
    assert 0.9 * real <= fake <= 1.15 * real


@pytest.mark.parametrize("train", [True, False])
def test_calls_of_tile_are_predicted(train: bool) -> None:
    """Planning is not of the step: values without data of its own are not counted."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) * 3)

        def forward(self, x: Tensor) -> Tensor:
            return pc.tile(self.inner, x, budget="768KiB")

    model, x = Net(), torch.randn(2, 8, 96, 80)
    real, fake = (pc.memory.trace(copy.deepcopy(model), x, train=train, fake=fake).peak for fake in (False, True))
    assert 0.9 * real <= fake <= 1.15 * real
