"""Checkpoints under DistributedDataParallel over gloo: two processes end where one process without any does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import needs_gloo, run
from torch import Tensor, nn

import patchconv_native as pc

pytestmark = needs_gloo

STEPS = 3


class Net(nn.Module):
    """Two blocks, and one that is not used."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3)
        self.first = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.second = nn.Sequential(nn.BatchNorm2d(4, momentum=None), nn.Tanh(), nn.Conv2d(4, 4, 3))
        if unused:
            self.unused = nn.Linear(3, 3)
        self.run: Any = lambda fn, x: fn(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.second, self.run(self.first, self.stem(x)))


def batch(step: int) -> Tensor:
    """Both halves alike, so that batch norms see in a half what they see in all of it (but for the variance's n-1)."""
    half = torch.randn(2, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return torch.cat([half, half])


def train(model: nn.Module, rank: int, world: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step).chunk(world)[rank]).square().mean().backward()
        optimizer.step()


def trained(rank: int, world: int, way: str, options: dict[str, bool]) -> dict[str, Tensor]:
    model = Net(options.get("find_unused_parameters", False)).double()
    if way == "modules":
        pc.checkpoint_modules(pc.convert(model, functional=True), ("first", "second"))
    else:
        model.run = pc.checkpoint
    train(nn.parallel.DistributedDataParallel(model, **options), rank, world)
    return model.state_dict()


@pytest.mark.parametrize("way", ["function", "modules"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "find_unused_parameters": True},
        {"broadcast_buffers": False},
    ],
    ids=["plain", "find_unused_parameters", "static_graph", "static_graph, unused", "own buffers"],
)
def test_two_processes_train_as_one(way, options):
    alone = Net(options.get("find_unused_parameters", False)).double()
    half = Net(options.get("find_unused_parameters", False)).double()
    train(alone, 0, 1)
    train(half, 0, 2)
    # Running variances are those of one half, which a single process with that half has too.
    expected = {**alone.state_dict(), **dict(half.named_buffers())}
    assert int(expected["first.0.num_batches_tracked"]) == STEPS
    for found in run(2, trained, way, options):
        assert list(found) == list(alone.state_dict())
        for key, want in expected.items():
            torch.testing.assert_close(found[key], want, msg=lambda text, key=key: f"{key}: {text}")
