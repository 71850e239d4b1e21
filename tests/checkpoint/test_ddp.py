"""DistributedDataParallel over gloo: two processes, half of the batch each, end where one process with all of it does.
Of a model converted to tiles and functional code, and of one with checkpoints.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import needs_gloo, run
from torch import Tensor, nn

import patchconv_native as pc

pytestmark = needs_gloo
STEPS = 3


class Block(nn.Module):
    """A residual block, of layers and of functional code, whose activations are made again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(nn.functional.silu(self.norm(x)))


def of_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), Block(), nn.Hardswish(),
        nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False), nn.MaxPool2d(2, 1), nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(6, 2, 2, stride=2),
    ).double()  # fmt: skip


class Checkpointed(nn.Module):
    """Two blocks with batch norm, and one that is not used."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3)
        self.first = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.second = nn.Sequential(nn.BatchNorm2d(4, momentum=None), nn.Tanh(), nn.Conv2d(4, 4, 3))
        if unused:
            self.unused = nn.Linear(3, 3)
        self.run: Any = lambda fn, x: fn(x)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.second, self.run(self.first, self.stem(x)))


def train(model: nn.Module, rank: int, world: int, alike: bool) -> dict[str, Tensor]:
    """alike: with both halves the same, so that batch norms see in a half what they see in all of it (but for the
    variance's n-1). The mean over the shares is the mean over the batch: gradients are averaged between processes.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        batch = torch.randn(4, 3, 9, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model((batch[:2].repeat(2, 1, 1, 1) if alike else batch).chunk(world)[rank]).square().mean().backward()
        optimizer.step()
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def converted(rank: int, world: int, options: dict[str, bool]) -> dict[str, Tensor]:
    model = pc.convert(of_layers(), splits=2)
    assert pc.convert_report(model).converted.keys() >= {"1", "2", "2.norm", "5", "6"}
    with pc.record_paths() as records:
        state = train(nn.parallel.DistributedDataParallel(model, **options), rank, world, False)
    assert records and {r["path"] for r in records} == {"tiled"}
    return state


@pytest.mark.parametrize("option", ["", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_two_processes_train_as_one(option):
    expected = train(of_layers(), 0, 1, False)
    for found in run(2, converted, {option: True} if option else {}):
        torch.testing.assert_close(found, expected)


def checkpointed(rank: int, world: int, way: str, options: dict[str, bool]) -> dict[str, Tensor]:
    model = Checkpointed(options.get("find_unused_parameters", False))
    if way == "modules":
        pc.checkpoint_modules(pc.convert(model), ("first", "second"))
    else:
        model.run = pc.checkpoint
    return train(nn.parallel.DistributedDataParallel(model, **options), rank, world, True)


@pytest.mark.parametrize("way", ["function", "modules"])
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"broadcast_buffers": False},
     {"static_graph": True, "find_unused_parameters": True}],
    ids=lambda options: " ".join(options) or "plain",
)  # fmt: skip
def test_two_processes_with_checkpoints_train_as_one(way, options):
    unused = options.get("find_unused_parameters", False)
    expected = train(Checkpointed(unused), 0, 1, True)
    # Running variances are those of one half, which a single process with that half has too.
    half = Checkpointed(unused)
    train(half, 0, 2, True)
    expected |= dict(half.named_buffers())
    assert int(expected["first.0.num_batches_tracked"]) == STEPS
    for found in run(2, checkpointed, way, options):
        torch.testing.assert_close(found, expected)
