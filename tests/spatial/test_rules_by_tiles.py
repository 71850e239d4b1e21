"""The rules of patchconv_native.spatial, run by an executor that has no ranks, against the call on the whole image."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from support.tiles import by_tiles
from torch import Tensor, nn

import patchconv_native as pc


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
        "power pool of most": lambda: of("LPPool", dims)(float("inf"), 2),
        "power pool of least": lambda: of("LPPool", dims)(-float("inf"), 2, 1),
        "called directly": lambda: Apply(lambda x: convolved(x, False)),
        "transposed, called directly": lambda: Apply(lambda x: convolved(x, True)),
        "adaptive pool": lambda: of("AdaptiveAvgPool", dims)((5, 7, 3)[:dims]),
        "adaptive pool of most": lambda: of("AdaptiveAvgPool", dims)((4, None, 2)[:dims]),
        "adaptive max pool": lambda: of("AdaptiveMaxPool", dims)((5, 7, 3)[:dims]),
    }  # fmt: skip


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

# Of each number of dimensions: how many images, and where each dimension is cut, as parts of its size.
HALF, UNEVEN, ENDS = (0.5,), (0.1, 0.2, 0.7), (0.1, 0.9)
CUTS: dict[int, list[tuple[int, tuple[tuple[float, ...], ...]]]] = {
    1: [(1, (HALF,)), (3, (UNEVEN,))],
    2: [(1, (HALF, ())), (3, (UNEVEN, (0.4,))), (1, ((), ENDS))],
    3: [(1, (HALF, (), ())), (2, (UNEVEN, (), ())), (1, ((), (0.4,), ENDS)), (2, (HALF, (0.7,), (0.3,)))],
}


def cuts_of(size: int, fractions: tuple[float, ...]) -> list[int]:
    return sorted({0, *(round(size * f) for f in fractions), size})


def check(
    make: Callable[[], nn.Module], batch: int, cut: tuple[tuple[float, ...], ...], on_input: bool = False, more: int = 0
) -> None:
    """on_input: the tiles are the image's, since the result has none. more: images, of which the second is one row."""
    torch.manual_seed(3)
    whole, images = make().double(), [structured((batch, *SHAPES[len(cut)]))]
    images += [images[0] * 2 + 1, images[0][:, :, 3:4]][:more]
    tiled = copy.deepcopy(whole)
    with torch.no_grad():
        want = whole(*images)
    shape = images[0].shape if on_input else want.shape
    got = by_tiles(tiled, images, {d: cuts_of(shape[d], parts) for d, parts in enumerate(cut, 2) if parts})
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    for (key, a), b in zip(tiled.state_dict().items(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    "name, cut", [(name, cut) for name, (_, dims) in CALLS.items() for cut in range(len(CUTS[dims]))]
)
def test_a_rule_by_tiles(name: str, cut: int) -> None:
    make, dims = CALLS[name]
    check(make, *CUTS[dims][cut])


# Of an image, another one, and one of a single row (frame).
OF_SEVERAL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "the row before": lambda x, y, row: torch.cat([row, x], 2),
    "the row twice before, and after": lambda x, y, row: torch.cat([row, row, x, row], 2),
    "one after the other": lambda x, y, row: torch.cat([x, y], 2),
    "one after the other, from the end": lambda x, y, row: torch.concat([y, x], dim=-1),
    "itself": lambda x, y, row: torch.cat((x, y, x), 2),
    "with a plain tensor": lambda x, y, row: torch.cat([x.new_full((*x.shape[:2], 5, *x.shape[3:]), 0.5), x], 2),
    "channels": lambda x, y, row: torch.cat([x, y], 1),
    "stacked": lambda x, y, row: torch.stack([x, y], -1),
    "less the row": lambda x, y, row: y - row,
    "the row less": lambda x, y, row: torch.sub(row, y),
    "where": lambda x, y, row: torch.where(x > 1, row, y),
    "repeated": lambda x, y, row: y.repeat(1, 2, 3, *[1] * (x.dim() - 3)),
    "the row repeated": lambda x, y, row: row.repeat(1, 1, 7, *[1] * (x.dim() - 3)),
    "the row expanded": lambda x, y, row: row.expand(-1, -1, 7, *[-1] * (x.dim() - 3)),
}


@pytest.mark.parametrize("batch, cut", [*CUTS[3][:2], CUTS[3][3], CUTS[1][1]])
@pytest.mark.parametrize("name", OF_SEVERAL)
def test_a_rule_of_several_images(name: str, batch: int, cut: tuple[tuple[float, ...], ...]) -> None:
    check(lambda: Apply(OF_SEVERAL[name]), batch, cut, more=2)


MATRIX = torch.linspace(-1, 2, 16).double().view(4, 4)


def attend(query: Tensor, others: Tensor | None = None) -> Tensor:
    others = query if others is None else others.to(query.device)
    return F.scaled_dot_product_attention(query, others, others)


def overwritten(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3] = x[:, :2]
    y[..., 3] = 7.0
    y[:, 0, :, :2] = x[:, 1, :, 1:3]
    return y


# Of an image of this shape, cut along dimension 2 of the result.
OF_A_SHAPE: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "rows of three": ((2, 4, 15, 5), lambda x: x.view(2, 4, 5, 3, 5)),
    "windows": ((2, 4, 12, 8), lambda x: x.unflatten(2, (-1, 2))),
    "rows of the columns": ((2, 4, 60), lambda x: x.reshape(2, 4, 12, 5)),
    "channels by number": ((2, 4, 13, 5), lambda x: x[:, [3, 0, 0]]),
    "chosen channels": ((2, 4, 13, 5), lambda x: x.index_select(1, torch.tensor([2, 0], device=x.device))),
    "sorted channels": ((2, 4, 13, 5), lambda x: x.sort(1, descending=True)[0]),
    "the largest columns": ((2, 4, 13, 5), lambda x: x.topk(2).values),
    "mixed channels": ((2, 4, 13, 5), lambda x: torch.einsum("nchw,cd->ndhw", x, MATRIX.to(x.device))),
    "weighed rows": ((2, 4, 13, 5), lambda x: torch.einsum("nchw,ndhw->nchd", x, x)),
    "times a matrix": ((2, 4, 13, 4), lambda x: x @ MATRIX.to(x.device)),
    "a matrix times it": ((4, 4, 13), lambda x: MATRIX.to(x.device) @ x),
    "products of channels": ((2, 4, 13), lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x),
    "attention within rows": ((2, 4, 13, 5), lambda x: attend(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
    "attention to others": ((2, 4, 13, 4), lambda x: attend(x, MATRIX.expand(2, 4, 4, 4))),
    "variance and mean": ((2, 4, 13, 5), lambda x: torch.sub(*torch.var_mean(x, (2, 3), keepdim=True)) + x),
    "deviation and mean": ((2, 4, 13, 5), lambda x: torch.sub(*torch.std_mean(x, 2, keepdim=True)) * x),
    "unit columns": ((2, 4, 13, 5), lambda x: F.normalize(x, dim=2)),
    "complex numbers": ((2, 4, 13, 2), lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j)),
    "written channels and columns": ((2, 4, 13, 5), overwritten),
}


@pytest.mark.parametrize("fractions", [HALF, UNEVEN])
@pytest.mark.parametrize("name", OF_A_SHAPE)
def test_a_rule_of_an_image_of_a_shape(name: str, fractions: tuple[float, ...]) -> None:
    shape, function = OF_A_SHAPE[name]
    torch.manual_seed(3)
    x = structured(shape)
    want = function(x)
    got = by_tiles(Apply(function), [x], {2: cuts_of(want.size(2), fractions)})
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("function", [
    lambda x: x @ x.transpose(2, 3),
    lambda x: torch.einsum("nchw,nciw->nchi", x, x),
    lambda x: attend(x),
    lambda x: x.reshape(2, -1, 5),
    lambda x: x.topk(2, 2),
    lambda x: x[:, :, [1, 0]],
    lambda x: x.__setitem__((slice(None), slice(None), 1), 0.0),
])  # fmt: skip
def test_what_mixes_all_places_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(pc.NotServed):
        by_tiles(Apply(function), [structured((2, 4, 13, 5))], {2: (0, 5, 13)})


@pytest.mark.parametrize("name, cut", [(name, cut) for name in GLOBAL for cut in range(len(CUTS[int(name[-2])]))])
def test_a_global_pool(name: str, cut: int) -> None:
    check(GLOBAL[name], *CUTS[int(name[-2])][cut], on_input=True)
