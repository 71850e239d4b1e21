"""Batch norms in eval mode that become a part of the convolution before them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.tiles import choices, fold, strip_sizes


@pytest.fixture(autouse=True)
def _small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "_PLACES_A_WEIGHT", 0)
    monkeypatch.setattr(strip_sizes, "STRIP", 2**15)
    monkeypatch.setattr(choices, "THINNEST", 1)


def close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    several = isinstance(want, tuple)
    for a, b in zip(got if several else (got,), want if several else (want,), strict=True):
        assert type(a) is Tensor and a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def in_layout(x: Tensor, last: bool) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if last else x


def norm(channels: int, mean: float = 0, variance: float = 1, **more: Any) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels, **more).eval()
    assert made.running_mean is not None and made.running_var is not None
    made.running_mean.normal_().add_(mean)
    made.running_var.uniform_(0.5, 2).mul_(variance)
    if made.affine:
        made.weight.data.normal_()
        made.bias.data.normal_()
    return made


def graph_of(net: Callable[..., Any], x: Tensor) -> Any:
    return pc.tile_plan(net, x).graph


def folded(net: Callable[..., Any], x: Tensor) -> int:
    return sum(call.function is fold.conv_of_strips and call.args[-1] is not None for call in graph_of(net, x).calls)


FOLDED: dict[str, Callable[[], nn.Module]] = {
    "bias": lambda: nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), norm(6)),
    "no bias, groups": lambda: nn.Sequential(nn.Conv2d(4, 8, (2, 3), 3, groups=2, bias=False), norm(8, eps=0.1)),
    "no weights": lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, dilation=2), norm(4, affine=False)),
    "padding modes": lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), norm(6)),
    "converted": lambda: pc.convert(nn.Sequential(nn.Conv2d(4, 6, 3, padding="same"), norm(6))),
}


@pytest.mark.parametrize("name", FOLDED)
@torch.no_grad()
def test_norms_are_folded(name: str) -> None:
    torch.manual_seed(0)
    net, x = FOLDED[name]().eval().double(), structured((2, 4, 29, 23))
    before, want = copy.deepcopy(net.state_dict()), net(x)
    assert folded(net, x) == 1
    close(pc.tile(net, x), want)
    close(pc.tile(net, x, tile=5, dim=3), want)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize("mean", [0.0, 30.0, 1e4])
@pytest.mark.parametrize("variance", [1e-8, 1.0, 1e4])
@torch.no_grad()
def test_folding_is_as_exact_as_stock(mean: float, variance: float) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(8, 8, 3), norm(8, mean, variance), nn.ReLU()), structured((1, 8, 60, 60)).float()
    exact, stock = copy.deepcopy(net).double()(x.double()), net(x)
    assert folded(net, x) == 1
    assert (pc.tile(net, x) - exact).square().mean() <= 1.5**2 * (stock - exact).square().mean()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("channels", [8, 64])
@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (0.0, 1e4), (30.0, 1.0)])
@torch.no_grad()
def test_folded_convolutions_round_as_stock(mean: float, variance: float, channels: int, last: bool) -> None:
    """A shift that is large beside the products: added to each sum of them from the start, it makes these coarse."""
    torch.manual_seed(0)
    conv, last_norm = nn.Conv2d(channels, 8, 3), norm(8, mean, variance)
    x = in_layout(structured((1, channels, 60, 60)).float(), last)
    exact = copy.deepcopy(last_norm).double()(copy.deepcopy(conv).double()(x.double()))
    its = last_norm.running_mean, last_norm.running_var, last_norm.weight, last_norm.bias, last_norm.eps
    found = fold.conv_of_strips(x, conv.weight, conv.bias, torch.conv2d, (), {}, its)  # type: ignore[arg-type]
    stock = last_norm(conv(x))
    assert (found - exact).square().mean() <= 1.5**2 * (stock - exact).square().mean()


CONV, NORM = nn.Conv2d(4, 4, 3, padding=1).double(), norm(4).double()
IN_HALF = (CONV.weight.bfloat16(), NORM.running_mean, NORM.running_var)


def written(x: Tensor) -> Tensor:
    y = CONV(x)
    return NORM(y) + y.relu_()


NOT_FOLDED: dict[str, Callable[[Tensor], Any]] = {
    "returned": lambda x: (lambda y: (y, NORM(y)))(CONV(x)),
    "read twice": lambda x: (lambda y: NORM(y) + y)(CONV(x)),
    "two norms": lambda x: (lambda y: NORM(y) + NORM(y))(CONV(x)),
    "written": written,
    "statistics of the image": lambda x: F.batch_norm(CONV(x), None, None, training=True),
    "a transposed one": lambda x: NORM(F.conv_transpose2d(x, CONV.weight)),
}


@pytest.mark.parametrize("name", NOT_FOLDED)
@torch.no_grad()
def test_norms_that_must_stay(name: str) -> None:
    net, x = NOT_FOLDED[name], structured((2, 4, 29, 23))
    assert folded(net, x) == 0
    close(pc.tile(net, x), net(x))


@torch.no_grad()
def test_the_channels_of_an_image_without_a_batch_are_not_the_norms() -> None:
    torch.manual_seed(0)
    conv, last = nn.Conv2d(4, 6, 3, padding=1).double(), norm(6).double()

    def net(x: Tensor) -> Tensor:
        return F.batch_norm(conv(x), last.running_mean, last.running_var, last.weight, last.bias)

    x = structured((4, 6, 300))
    assert folded(net, x) == 0
    close(pc.tile(net, x), net(x))


@torch.no_grad()
def test_half_precision_is_not_folded() -> None:
    net, x = nn.Sequential(nn.Conv2d(4, 4, 3), norm(4)), structured((1, 4, 29, 23)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert folded(net, x) == 0
    assert folded(copy.deepcopy(net).bfloat16(), x.bfloat16()) == 0
    assert folded(net, x) == 1


@torch.no_grad()
def test_convolutions_and_norms_that_are_used_twice() -> None:
    def net(x: Tensor) -> tuple[Tensor, Tensor]:
        y = NORM(CONV(x))
        return NORM(CONV(y.relu())) + x, F.max_pool2d(NORM(y), 2)

    x = structured((1, 4, 29, 23))
    assert folded(net, x) == 2  # what is read several times is a norm's result, not a convolution's
    close(pc.tile(net, x), net(x))
