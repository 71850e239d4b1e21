"""Random networks with skips, additions and concatenations: `tile` gives what one call gives, and keeps each budget."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL
from support.seeds import SWEEP_SEED
from support.spatial_chains import Gate, structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

SEEDS = range(SWEEP_SEED, SWEEP_SEED + 40) if FULL else range(2, 4)
KINDS = "conv conv conv mode depthwise point dilated act act batch group instance layer max avg strided up add cat gate"


class LayerNorm(nn.LayerNorm):
    """Over the channels of each place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pair(nn.Module):
    """An image joined to an earlier one, which is brought to its size and its channels."""

    def __init__(self, kind: str, channels: int, earlier: int) -> None:
        super().__init__()
        self.kind, self.fit = kind, nn.Conv2d(earlier, channels, 1)

    def forward(self, x: Tensor, earlier: Tensor) -> Tensor:
        if earlier.shape[2:] != x.shape[2:]:
            earlier = F.interpolate(earlier, size=x.shape[2:], mode="bilinear")
        return torch.cat((x, earlier), 1) if self.kind == "cat" else x + self.fit(earlier)


class Net(nn.Module):
    """Layers of which each reads the one before it, and some an earlier one too."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        channels = [rng.choice([3, 8])]
        halvings, earlier, layers = 0, [], []
        for _ in range(rng.randint(5, 14)):
            c, kind, place = channels[-1], rng.choice(KINDS.split()), rng.randrange(len(channels))
            if kind in ("max", "avg", "strided"):
                halvings += 1
                kind = kind if halvings < 3 else "conv"
            made = self.layer(kind, c, rng) if kind not in ("add", "cat") else Pair(kind, c, channels[place])
            layers.append(made)
            earlier.append(place if isinstance(made, Pair) else None)
            own = getattr(made, "out_channels", c)
            channels.append(c + channels[place] if kind == "cat" else own)
        self.layers, self.earlier, self.channels = nn.ModuleList(layers), earlier, channels[0]

    @staticmethod
    def layer(kind: str, c: int, rng: random.Random) -> nn.Module:
        wide = rng.choice([4, 8, 12, 16, 32])
        kernel = rng.choice([3, 3, 5, 7, (3, 5)])
        pads = tuple(k // 2 for k in ((kernel, kernel) if isinstance(kernel, int) else kernel))
        groups = rng.choice([g for g in (1, 2, 4, c) if c % g == 0])
        return {
            "conv": lambda: nn.Conv2d(c, wide, kernel, padding=pads),
            "mode": lambda: nn.Conv2d(
                c, wide, kernel, padding=pads, padding_mode=rng.choice(["reflect", "replicate", "circular"])
            ),
            "depthwise": lambda: nn.Conv2d(c, c, kernel, padding=pads, groups=c),
            "point": lambda: nn.Conv2d(c, wide, 1),
            "dilated": lambda: nn.Conv2d(c, wide, 3, padding=2, dilation=2),
            "act": lambda: rng.choice([nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.PReLU])(),
            "batch": lambda: nn.BatchNorm2d(c), "group": lambda: nn.GroupNorm(groups, c),
            "instance": lambda: nn.InstanceNorm2d(c, affine=True), "layer": lambda: LayerNorm(c),
            "max": lambda: nn.MaxPool2d(3, 2, 1), "avg": lambda: nn.AvgPool2d(2, ceil_mode=True),
            "strided": lambda: nn.Conv2d(c, wide, 3, 2, 1), "gate": lambda: Gate(c),
            "up": lambda: nn.Upsample(scale_factor=2, mode=rng.choice(["nearest", "bilinear"])),
        }[kind]()  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, place in zip(self.layers, self.earlier, strict=True):
            values.append(layer(values[-1]) if place is None else layer(values[-1], values[place]))
        return values[-1]


def least(net: nn.Module, x: Tensor) -> int:
    with pytest.raises(pc.BudgetError) as caught:
        pc.tile_plan(net, x, budget=1)
    return caught.value.least


@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_random_networks(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    net = Net(rng).train(rng.random() < 0.3)
    x = structured((rng.choice([1, 1, 3]), net.channels, rng.randint(120, 240), rng.randint(120, 240))).float()
    if rng.random() < 0.3:
        x = x.contiguous(memory_format=torch.channels_last)
    exact, stock = copy.deepcopy(net).double()(x.double()), copy.deepcopy(net)(x)
    below, above = least(net, x), pc.tile_plan(net, x).needs
    for budget in {below, (below + max(above, below)) // 2, None}:
        results: list[Tensor] = []
        model = copy.deepcopy(net)
        peak = allocated_peak(lambda budget=budget, model=model, to=results: to.append(pc.tile(model, x, budget)))
        error, theirs = results[0] - exact, stock - exact
        assert error.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt() + 1e-7 * exact.abs().max()
        assert error.abs().max() <= 3 * theirs.abs().max() + 1e-6 * exact.abs().max()  # of one element, by chance
        if torch.backends.cpu.get_cpu_capability() == "AVX512":  # where oneDNN's workspace is known
            assert peak - results[0].nbytes <= (above if budget is None else budget)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt(),
        lambda x: torch.cat(torch.var_mean(x, (2, 3))),
        lambda x: x.std((1, 2, 3)),
    ],
    ids=["normalized", "var_mean", "std"],
)
@torch.no_grad()
def test_the_second_of_two_numbers_of_the_image_counts(call):
    """A variance asks for the mean, and then for squares, which take a copy of the strip."""
    x = structured((1, 4, 200, 100))
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(call, x, budget=1)
    budget = max(refused.value.least, 32 * 1024)  # what is a few numbers a strip has no margin below
    found = []
    assert allocated_peak(lambda: found.append(pc.tile(call, x, budget=budget))) - found[0].nbytes <= budget
    torch.testing.assert_close(found[0], call(x))
