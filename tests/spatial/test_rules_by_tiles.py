"""The rules of patchconv_native.spatial, run by an executor that has no ranks, against the call on the whole image."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.rule_cases import CALLS, GLOBAL, SHAPES, Apply
from support.spatial_chains import structured
from support.tiles import by_tiles
from torch import Tensor, nn

import patchconv_native as pc

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
