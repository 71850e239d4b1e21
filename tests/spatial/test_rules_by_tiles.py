"""The rules of patchconv_native.spatial, run by an executor that has no ranks, against the call on the whole image."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from support.tiles import by_tiles
from torch import Tensor, nn

import patchconv_native as pc


class BatchNorm(nn.BatchNorm2d):
    """One in training that does not count its calls, of which there are several for each tile."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1)


class Centred(nn.Module):
    """Two values of all tiles in one call, of which the second rests on the first."""

    def forward(self, x: Tensor) -> Tensor:
        away = x - x.mean((2, 3), keepdim=True)
        return F.relu(away) / away.square().mean(2, keepdim=True).sqrt()


CALLS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "strided, dilated, grouped": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), dilation=2, groups=2),
    "convolution, reflect": lambda: pc.Conv2d(4, 2, 5, padding=2, padding_mode="reflect"),
    "convolution, circular": lambda: pc.Conv2d(4, 2, 3, padding=1, padding_mode="circular"),
    "padding wider than the image": lambda: nn.Conv2d(4, 2, 3, padding=14),
    "transposed": lambda: nn.ConvTranspose2d(4, 3, 3, 2, 1, 1),
    "max pool": lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "average pool": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d((5, 7)),
    "global pool": lambda: nn.AdaptiveAvgPool2d(1),
    "batch norm": BatchNorm,
    "batch norm, evaluated": lambda: nn.BatchNorm2d(4).eval(),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "nearest": lambda: nn.Upsample(scale_factor=1.7),
    "bilinear": lambda: nn.Upsample(size=(20, 9), mode="bilinear"),
    "bicubic to corners": lambda: nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True),
    "padding": lambda: nn.ReflectionPad2d((3, 2, 1, 4)),
    "crop": lambda: nn.ZeroPad2d((-1, -2, -3, 2)),
    "activation": nn.SiLU,
    "sums over tiles": Centred,
}


def cuts_of(size: int, fractions: tuple[float, ...]) -> list[int]:
    return sorted({0, *(round(size * f) for f in fractions), size})


@pytest.mark.parametrize("batch, rows, columns", [(1, (0.5,), ()), (3, (0.1, 0.2, 0.7), (0.4,)), (1, (), (0.1, 0.9))])
@pytest.mark.parametrize("name", CALLS)
def test_a_rule_by_tiles(name: str, batch: int, rows: tuple[float, ...], columns: tuple[float, ...]) -> None:
    torch.manual_seed(3)
    whole = CALLS[name]().double()
    tiled, image = copy.deepcopy(whole), structured((batch, 4, 13, 11))
    with torch.no_grad():
        want = whole(image)
    cut = image if name == "global pool" else want
    cuts = {d: cuts_of(cut.size(d), parts) for d, parts in ((2, rows), (3, columns)) if parts}
    got = by_tiles(tiled, image, cuts)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    for (key, a), b in zip(tiled.state_dict().items(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")
