"""DistributedDataParallel over gloo: two processes, half of the batch each, end where one process with all of
it does.
"""

from __future__ import annotations

import pytest
import torch
from support.ranks import needs_gloo, run
from torch import nn

import patchconv_native as pc

pytestmark = needs_gloo

STEPS = 3


class Block(nn.Module):
    """A residual block, of layers and of functional code, whose activations are made again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(nn.functional.silu(self.norm(x)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        Block(),
        nn.Hardswish(),
        nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False),
        nn.MaxPool2d(2, 1),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(6, 2, 2, stride=2),
    ).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, rank: int, world: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        share = batch(step).chunk(world)[rank]
        optimizer.zero_grad()
        # The mean over the shares is the mean over the batch: gradients are averaged between processes.
        model(share).square().mean().backward()
        optimizer.step()


def trained(rank: int, world: int, options: dict[str, bool]) -> dict[str, torch.Tensor]:
    model = pc.convert(network(), splits=2, functional=True)
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    with pc.record_paths() as records:
        train(wrapped, rank, world)
    assert pc.convert_report(model).converted.keys() >= {"1", "2", "2.norm", "5", "6"}
    assert records and {r["path"] for r in records} == {"tiled"}
    return model.state_dict()


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=["plain", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"],
)
def test_two_processes_train_as_one(options):
    alone = network()
    train(alone, 0, 1)
    expected = alone.state_dict()
    for found in run(2, trained, options):
        assert list(found) == list(expected)
        for key, want in expected.items():
            torch.testing.assert_close(found[key], want, msg=lambda text, key=key: f"{key}: {text}")
