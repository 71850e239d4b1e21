"""Volumes and signals on several ranks against one process, in float64: outputs, all gradients, all state."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import todays
from support.ranks import needs_gloo, run
from support.spatial_cases import Apply, Cases, each, mesh_of, whole
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc

pytestmark = needs_gloo
SHAPE, SIGNAL = (2, 4, 9, 8, 7), (2, 4, 23)


class Causal(nn.Module):
    """A layer of a video decoder: time is padded with the first frame."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.joined = nn.Conv3d(4, 4, 3, padding=(0, 1, 1)), nn.GroupNorm(2, 4), joined

    def forward(self, x: Tensor) -> Tensor:
        if self.joined:
            y = torch.cat([x[:, :, :1], x[:, :, :1], x], 2)
        else:
            y = F.pad(x, (0, 0, 0, 0, 2, 0), mode="replicate")
        return x + F.silu(self.norm(self.conv(y)))


def conv(k: Any = 3, **more: Any) -> nn.Conv3d:
    return nn.Conv3d(4, 4, k, **{"padding": k // 2, **more})


def apply(function: Any, *shapes: tuple[int, ...]) -> Any:
    return lambda: nn.Sequential(conv(), Apply(function, *shapes))


def halves(x: Tensor) -> Tensor:
    """Two of 5 frames, cut at different places."""
    return torch.cat([F.conv3d(x, whole(4, 4, 5, 1, 1)), F.max_pool3d(x, (2, 1, 1), ceil_mode=True)], 2)


VOLUMES: Cases = {
    "causal, padded": (lambda: nn.Sequential(Causal(False), Causal(False)), SHAPE),
    "causal, joined": (lambda: nn.Sequential(Causal(True), Causal(True)), SHAPE),
    "strided, dilated, even": (
        lambda: nn.Sequential(conv(stride=2), nn.Conv3d(4, 2, 2, padding=2, dilation=2, groups=2)), SHAPE),
    "halo wider than a part": (lambda: nn.Conv3d(4, 2, (7, 3, 5), padding=(3, 0, 2)), SHAPE),
    "reflect and circular": (
        lambda: nn.Sequential(conv(padding_mode="reflect"), conv(padding_mode="circular")), SHAPE),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose3d(4, 4, 3, 2, 1, 1), nn.ConvTranspose3d(4, 2, 2, 3)),
                   (1, 4, 4, 4, 5)),
    "pools": (lambda: nn.Sequential(conv(), nn.MaxPool3d(3, 1, 1), nn.AvgPool3d(2, 2, 1, True, False)), SHAPE),
    "adaptive pools": (lambda: nn.Sequential(conv(), nn.AdaptiveMaxPool3d((5, 3, 4)), nn.AdaptiveAvgPool3d((4, 2, 4))),
                       SHAPE),
    "pooled to one frame": (lambda: nn.Sequential(conv(), nn.AdaptiveAvgPool3d((1, 3, 4))), SHAPE),
    "the largest of each place": (lambda: nn.Sequential(conv(), nn.AdaptiveMaxPool3d((1, 3, 4))), SHAPE),
    "global pools": (lambda: nn.Sequential(conv(), nn.AdaptiveMaxPool3d(1), nn.Flatten(), nn.Linear(4, 2)), SHAPE),
    "norms": (lambda: nn.Sequential(nn.BatchNorm3d(4), conv(), nn.InstanceNorm3d(4), nn.GroupNorm(2, 4)), SHAPE),
    "trilinear": (lambda: nn.Sequential(conv(), nn.Upsample(scale_factor=(2, 1.5, 1), mode="trilinear"), conv()),
                  SHAPE),
    "nearest, area": (apply(lambda x: F.interpolate(F.interpolate(x, scale_factor=2), size=(7, 5, 6), mode="area")),
                      SHAPE),
    "neighbours": (apply(lambda x: x[:, :, 1:] * x[:, :, :-1]), SHAPE),
    "every second": (apply(lambda x: x[:, :, 1:-1:2] + x[:, :, ::2][:, :, 1:]), SHAPE),
    "the first frame": (apply(lambda x: x * x[:, :, :1] + x[:, :, 3:4].square()), SHAPE),
    "few frames": (apply(lambda x: torch.cat([x[:, :, -2:], x, x[:, :, 4:8:4]], 2)), SHAPE),
    "frames joined": (apply(halves), SHAPE),
    "frames of a parameter": (apply(lambda x, a: torch.cat([a, x, a, x * 2], 2), (2, 4, 3, 8, 7)), SHAPE),
    "columns joined": (apply(lambda x: torch.cat([x, x[..., :1]], 4)), SHAPE),
    "repeated": (apply(lambda x: x.repeat(1, 1, 2, 1, 1) + x.repeat_interleave(2, 2)), SHAPE),
    "a frame repeated": (apply(lambda x: torch.cat([x[:, :, :1].repeat(1, 1, 4, 1, 1), x], 2)), SHAPE),
    "dropout": (apply(lambda x: F.dropout3d(F.dropout(x, 0.3), 0.4)), SHAPE),
    "channels last": (lambda: nn.Sequential(
        conv(), nn.BatchNorm3d(4), Apply(lambda x: torch.cat([x[:, :, :1], x], 2)), conv()).to(
        memory_format=torch.channels_last_3d), SHAPE),
    "converted": (lambda: pc.convert(nn.Sequential(
        conv(), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2, 1), nn.ConvTranspose3d(4, 4, 2, 2), nn.Dropout3d(0.3),
        nn.Upsample(scale_factor=2), conv(5), nn.GroupNorm(2, 4), nn.SiLU())), (1, 4, 6, 5, 6)),
}  # fmt: skip

SIGNALS: Cases = {
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(4, 4, 9, 2, 4), nn.ConvTranspose1d(4, 4, 4, 3, 1, 1)), SIGNAL),
    "reflect": (lambda: nn.Conv1d(4, 4, 7, padding=3, dilation=1, padding_mode="reflect"), SIGNAL),
    "pools": (lambda: nn.Sequential(nn.Conv1d(4, 4, 2), nn.MaxPool1d(3, 2, 1), nn.AvgPool1d(2, 1, 1)), SIGNAL),
    "adaptive pools": (lambda: nn.Sequential(nn.Conv1d(4, 4, 2), nn.AdaptiveMaxPool1d(9), nn.AdaptiveAvgPool1d(5)),
                       SIGNAL),
    "global pools": (lambda: Apply(lambda x: F.adaptive_max_pool1d(x, 1) + F.adaptive_avg_pool1d(x * x, 1)), SIGNAL),
    "norms": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3), nn.InstanceNorm1d(4), nn.GroupNorm(1, 4)),
              SIGNAL),
    "linear": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.Upsample(scale_factor=1.7, mode="linear")), SIGNAL),
    "dropout": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.Dropout1d(0.4)), SIGNAL),
    "joined": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), Apply(lambda x: torch.cat([x[..., :1], x[..., 1:]], -1))),
               SIGNAL),
}  # fmt: skip

# Ranks, dims, shape of the mesh.
MESHES = {
    "2 of depth": (2, "D", (2,)),
    "3 of depth": (3, "D", (3,)),
    "2x2": (4, "DW", (2, 2)),
    "length": (3, "L", (3,)),
}


def in_pieces(*arguments: Any) -> Any:
    """Convolutions are computed in pieces while halos travel, as those of large images."""
    from patchconv_native.spatial import convs

    convs.IN_PIECES_FROM = 0
    return each(*arguments)


@functools.cache
def results(cases: str, mesh: str) -> list[dict[str, list[str]]]:
    world, dims, shape = MESHES[mesh]
    return run(world, in_pieces, f"test_spatial_volumes:{cases}", shape, dims, list(globals()[cases]), timeout=150)


@pytest.mark.parametrize("mesh", todays(["2 of depth", "3 of depth", "2x2"], 3))
@pytest.mark.parametrize("name", VOLUMES)
def test_volumes(mesh: str, name: str) -> None:
    found = [(rank, result[name]) for rank, result in enumerate(results("VOLUMES", mesh)) if result[name]]
    assert not found


@pytest.mark.parametrize("name", SIGNALS)
def test_signals(name: str) -> None:
    found = [(rank, result[name]) for rank, result in enumerate(results("SIGNALS", "length")) if result[name]]
    assert not found


def moved(rank: int, world: int) -> list[str]:
    import patchconv_native.distributed as pd

    found, mesh = [], mesh_of(world, (world,))
    for dims, shape in (("D", SHAPE), ("H", SHAPE), ("W", SHAPE[1:]), ("D", SHAPE[1:]), ("L", SIGNAL), ("L", (3, 8))):
        image = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        x = pd.scatter(image, mesh, dims)
        d = len(shape) - {"D": 3, "H": 2, "W": 1, "L": 1}[dims]
        if list(x.axes) != [d] or x.axes[d].name != dims or not torch.equal(pd.gather(x), image):
            found.append(f"{dims} of {shape}")
        if not torch.equal(pd.from_dtensor(pd.to_dtensor(x, mesh), dims).to_local(), x.to_local()):
            found.append(f"{dims} of {shape}, over a DTensor")
    for dims, shape in (("D", (2, 4, 9)), ("L", SHAPE), ("WD", SHAPE), ("", SHAPE), ("D", (1, 1, 1, 8, 8))):
        try:
            pd.scatter(torch.ones(shape), mesh, dims)
            found.append(f"{dims!r} of {shape} was taken")
        except ValueError as error:
            if "expected" not in str(error):
                found.append(str(error))
    model = pd.spatial(nn.Conv3d(4, 4, 3), mesh, "D")
    if list(model(structured(SHAPE).float()).axes) != [2]:
        found.append("a whole volume")
    return found


def test_volumes_are_scattered_and_gathered() -> None:
    assert run(2, moved, timeout=60) == [[], []]
