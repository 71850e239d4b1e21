"""Modules that each call one rule of patchconv_native.spatial, of one to three spatial dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import patchconv_native as pc

# Power pools of torch 2.11 give ones, and gradients of NaN, for an infinite power.
_TAKES_MOST = float(F.lp_pool1d(torch.tensor([[[2.0, 3.0]]]), float("inf"), 2)) == 3


class Apply(nn.Module):
    """A function, as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *images: Tensor) -> Tensor:
        return self.function(*images)


class BatchNorm(nn.BatchNorm2d):
    """One in training that does not count its calls, of which there are several for each tile."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1)


def centred(x: Tensor) -> Tensor:
    """Two values of all tiles in one call, of which the second rests on the first."""
    spatial = tuple(range(2, x.dim()))
    away = x - x.mean(spatial, keepdim=True)
    return F.relu(away) / away.square().mean(2, keepdim=True).sqrt()


def convolved(x: Tensor, transposed: bool) -> Tensor:
    """By what torch's functions call."""
    dims = x.dim() - 2
    weight = torch.linspace(-1, 1, 16 * 3**dims, dtype=x.dtype, device=x.device).view(4, 4, *[3] * dims)
    two, one, more = [2] * dims, [1] * dims, [int(transposed)] * dims
    return torch.convolution(x, weight, weight.flatten()[:4], two, one, one, transposed, more, 1)


Makers = dict[str, Callable[[], nn.Module]]
SHAPES = {1: (4, 23), 2: (4, 13, 11), 3: (4, 9, 8, 7)}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


WEIGHT = torch.linspace(-1, 1, 2 * 3 * 27).double().view(2, 3, 3, 3, 3)


def of(name: str, dims: int) -> Any:
    return getattr(nn, f"{name}{dims}d")


def windows(dims: int) -> Makers:
    """Convolutions and pools of so many dimensions. (1, 2, 3)[:dims]: another number for each dimension."""
    conv, transposed, max_pool, avg_pool = (of(name, dims) for name in ("Conv", "ConvTranspose", "MaxPool", "AvgPool"))

    def ours(*args: Any, **kwargs: Any) -> nn.Module:
        return getattr(pc, f"Conv{dims}d")(*args, **kwargs)

    return {
        "convolution": lambda: conv(4, 6, 3, padding=1),
        "kernel of 1, stride of 3": lambda: conv(4, 6, 1, 3, bias=False),
        "strided, dilated, grouped": lambda: conv(4, 6, (3, 2, 1)[:dims], (2, 1, 2)[:dims], (2, 1, 0)[:dims],
                                                  (2, 2, 1)[:dims], 2),
        "depthwise": lambda: conv(4, 8, 5, 2, 2, groups=4),
        "even kernel, same": lambda: conv(4, 3, (4, 3, 2)[:dims], padding="same", dilation=(1, 2, 1)[:dims]),
        "valid": lambda: conv(4, 3, (2, 3, 4)[:dims], padding="valid"),
        "two paddings a dimension": lambda: ours(4, 2, 3, padding=(3, 0, 1, 2, 0, 1)[: 2 * dims]),
        "reflect": lambda: ours(4, 2, 5, padding=2, padding_mode="reflect"),
        "circular": lambda: ours(4, 2, 3, padding=1, padding_mode="circular"),
        "replicate": lambda: ours(4, 2, 4, padding=(3, 2, 1)[:dims], padding_mode="replicate"),
        "padding wider than the image": lambda: conv(4, 2, 3, padding=(24, 14, 2)[:dims]),
        "kernel wider than a part": lambda: conv(4, 2, (9, 7, 5)[:dims], padding=(4, 3, 2)[:dims]),
        "transposed": lambda: transposed(4, 3, 3, 2, 1, 1),
        "transposed, dilated, grouped": lambda: transposed(4, 6, (4, 2, 3)[:dims], (3, 2, 1)[:dims], (2, 0, 1)[:dims],
                                                           0, 2, True, (1, 3, 2)[:dims]),
        "transposed with gaps": lambda: transposed(4, 3, 2, 4, output_padding=3),
        "max pool": lambda: max_pool(3, 2, 1, ceil_mode=True),
        "max pool, dilated": lambda: max_pool((3, 2, 3)[:dims], (1, 2, 1)[:dims], (1, 1, 0)[:dims], (3, 1, 2)[:dims]),
        "average pool": lambda: avg_pool(3, 2, 1, count_include_pad=False),
        "average pool, even": lambda: avg_pool(2),
        "average pool, to the ceiling": lambda: avg_pool((4, 3, 2)[:dims], (3, 2, 3)[:dims], 1, ceil_mode=True),
        "power pool": lambda: of("LPPool", dims)(2, 3, 2),
        "power pool, to the ceiling": lambda: of("LPPool", dims)(4, 3, ceil_mode=True),
        "called directly": lambda: Apply(lambda x: convolved(x, False)),
        "transposed, called directly": lambda: Apply(lambda x: convolved(x, True)),
        "adaptive pool": lambda: of("AdaptiveAvgPool", dims)((5, 7, 3)[:dims]),
        "adaptive pool of most": lambda: of("AdaptiveAvgPool", dims)((4, None, 2)[:dims]),
        "adaptive max pool": lambda: of("AdaptiveMaxPool", dims)((5, 7, 3)[:dims]),
    } | ({
        "power pool of most": lambda: of("LPPool", dims)(float("inf"), 2),
        "power pool of least": lambda: of("LPPool", dims)(-float("inf"), 2, 1),
    } if _TAKES_MOST else {})  # fmt: skip


def others(dims: int) -> Makers:
    """Norms, resizing, padding, shapes."""

    def resized(**how: Any) -> Callable[[], nn.Module]:
        return lambda: nn.Upsample(**how)

    return {
        "batch norm": BatchNorm,
        "batch norm, evaluated": lambda: of("BatchNorm", dims)(4).eval(),
        "group norm": lambda: nn.GroupNorm(2, 4),
        "instance norm": lambda: of("InstanceNorm", dims)(4, affine=True, track_running_stats=True),
        "nearest": resized(scale_factor=1.7),
        "nearest to a size": resized(size=(31, 9, 4)[:dims]),
        "nearest-exact": resized(scale_factor=(0.6, 2.0, 1.3)[:dims], mode="nearest-exact"),
        "linear": resized(size=(20, 9, 12)[:dims], mode=LINEAR[dims]),
        "linear by a factor": resized(scale_factor=(2.3, 1.0, 0.7)[:dims], mode=LINEAR[dims]),
        "linear to corners": resized(scale_factor=2, mode=LINEAR[dims], align_corners=True),
        "linear, the factor again": lambda: Apply(
            lambda x: F.interpolate(x, scale_factor=1.3, mode=LINEAR[dims], recompute_scale_factor=True)
        ),
        "area": lambda: Apply(lambda x: F.interpolate(x, scale_factor=0.6, mode="area")),
        "constant": lambda: Apply(lambda x: F.pad(x, (3, 2, 1, 4, 0, 2)[: 2 * dims], value=1.5)),
        "reflection": lambda: of("ReflectionPad", dims)((3, 2, 1, 4, 5, 0)[: 2 * dims]),
        "replication": lambda: of("ReplicationPad", dims)((0, 9, 30, 1, 2, 0)[: 2 * dims]),
        "replication before alone": lambda: of("ReplicationPad", dims)([0] * (2 * dims - 2) + [2, 0]),
        "around": lambda: of("CircularPad", dims)((3, 2, 1, 4, 5, 0)[: 2 * dims]),
        "crop": lambda: Apply(lambda x: F.pad(x, (-1, -2, -3, 2, 1, -4)[: 2 * dims])),
        "slices": lambda: Apply(lambda x: x[(..., *[slice(2, -1)] * dims)]),
        "all but the first": lambda: Apply(lambda x: x[:, :, 1:]),
        "all but the last": lambda: Apply(lambda x: x[:, :, :-1]),
        "every second": lambda: Apply(lambda x: x[:, :, ::2]),
        "every third, from the second": lambda: Apply(lambda x: x[..., 1::3]),
        "differences": lambda: Apply(lambda x: x.diff(dim=2)),
        "differences of differences": lambda: Apply(lambda x: torch.diff(x, 3) * 2),
        "activation": nn.SiLU,
        "sums over tiles": lambda: Apply(centred),
    }


CALLS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    f"{name}, {dims}-d": (make, dims) for dims in SHAPES for name, make in (windows(dims) | others(dims)).items()
}
CALLS |= {
    "bicubic to corners": (lambda: nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True), 2),
    "volume without a batch": (lambda: Apply(lambda x: F.conv3d(x, WEIGHT[:, : x.size(0)].to(x.device), padding=1)), 2),
}
GLOBAL: Makers = {
    f"{name}{dims}d": lambda name=name, dims=dims: of(name, dims)(1)
    for name in ("AdaptiveAvgPool", "AdaptiveMaxPool") for dims in SHAPES
}  # fmt: skip
