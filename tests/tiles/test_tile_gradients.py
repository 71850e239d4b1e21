"""Gradients through `tile`, against the module's own, in float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL
from support.spatial_chains import structured
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

import patchconv_native as pc
from patchconv_native.tiles.backward import Backward

TIGHT = 1e-9
"""Of the largest gradient."""


def conv(a: int, b: int, k: int = 3, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(a, b, k, padding=k // 2, **more)


class Function(nn.Module):
    """A function of the image and of the modules in it."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *images: Tensor) -> Any:
        return self.function(*self.parts, *images)


class UNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(conv(a, b), norm(b), nn.ReLU(inplace=True))

        self.first, self.middle, self.last = block(2, 4), block(4, 8), block(8, 4)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        up = self.up(self.middle(F.max_pool2d(first, 2)))
        up = F.pad(up, [0, first.size(3) - up.size(3), 0, first.size(2) - up.size(2)])
        return self.out(self.last(torch.cat([first, up], 1)))


class Attention(nn.Module):
    """Over all places, in the middle of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.qkv, self.last = (
            conv(2, 4, stride=2),
            nn.GroupNorm(2, 4),
            conv(4, 12, 1),
            conv(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return self.last(x + y.transpose(1, 2).unflatten(2, x.shape[2:]))


class Squeezed(nn.Module):
    """Squeeze and excitation, by means and by maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.last = conv(2, 4), nn.Linear(8, 4), conv(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        means, maxima = F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1)
        scale = torch.sigmoid(self.mix(torch.cat([means, maxima], 1).flatten(1)))
        return self.last(x * scale[:, :, None, None]) + x.amax((2, 3), keepdim=True).mean()


class LastNorm(nn.Module):
    """Over the channels of each place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def shared() -> nn.Module:
    one = conv(3, 3)
    return nn.Sequential(conv(2, 3), one, nn.ReLU(), one, nn.BatchNorm2d(3), one)


def frozen() -> nn.Module:
    net = nn.Sequential(conv(2, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4), nn.BatchNorm2d(4), conv(4, 2))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(("0", "4")))
    return net


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(conv(2, 3)), nn.Tanh(), conv(3, 2))


def stopped(first: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
    y = first(x)
    with torch.no_grad():
        gate = first(x).sigmoid()
    return last(y * gate + y.detach())


def standardized(first: nn.Module, x: Tensor) -> Tensor:
    y = first(x)
    return (y - y.mean((2, 3), keepdim=True)) / (y.std((0, 2, 3), keepdim=True) + torch.linalg.vector_norm(y))


def written(first: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
    y = first(x)
    y += x.mean(1, keepdim=True)
    y.mul_(2).clamp_(-1, 1)
    return last(y).relu_()


def two_results(first: nn.Module, last: nn.Module, x: Tensor) -> dict[str, Any]:
    y = first(x)
    return {"image": y, "rest": [last(y), last(y).mean((2, 3))], "number": 3}


SMALL: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(conv(2, 3), nn.ReLU(), conv(3, 3, 5), nn.Sigmoid(), conv(3, 2, 1)),
    "strides": lambda: nn.Sequential(conv(2, 3, stride=2), nn.GELU(), conv(3, 4, 5, stride=3), conv(4, 2)),
    "dilated": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, dilation=3, padding=3), nn.ELU(), nn.Conv2d(3, 2, 3, 2, 0, 2)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(3, 2, 3, 3)),
    "padding modes": lambda: nn.Sequential(
        conv(2, 3, padding_mode="circular"), conv(3, 3, padding_mode="reflect"), nn.ReplicationPad2d(2), conv(3, 2, 5)
    ),
    "pools": lambda: nn.Sequential(
        conv(2, 3), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True), conv(3, 3), nn.AdaptiveAvgPool2d(3)
    ),
    "resized": lambda: nn.Sequential(
        conv(2, 4), nn.Upsample(scale_factor=2, mode="bilinear"), conv(4, 4), nn.PixelShuffle(2), nn.AvgPool2d(2)
    ),
    "unet in training": lambda: UNet(nn.BatchNorm2d),
    "unet in eval": lambda: UNet(nn.BatchNorm2d).eval(),
    "group norms": lambda: UNet(lambda c: nn.GroupNorm(2, c)),
    "instance norms": lambda: UNet(lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True)),
    "norms of places": lambda: nn.Sequential(conv(2, 4), LastNorm(4), nn.Hardswish(), conv(4, 2), LastNorm(2)),
    "squeezed": Squeezed,
    "attention": Attention,
    "shared": shared,
    "frozen": frozen,
    "weight norm": weight_normed,
    "without gradients in between": lambda: Function(stopped, conv(2, 2), conv(2, 3)),
    "standardized": lambda: Function(standardized, conv(2, 3)),
    "in place": lambda: Function(written, conv(2, 3), conv(3, 2)),
    "two results": lambda: Function(two_results, nn.Sequential(conv(2, 3), nn.BatchNorm2d(3)), conv(3, 2)),
    "a vector": lambda: nn.Sequential(
        conv(2, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ),
}
SIZES = [(1, (26, 19)), (3, (17, 24))]
TILES: list[Any] = [2, 7, (5, 6), 64]


def images(count: int, batch: int, size: Sequence[int]) -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randn(batch, 2, *size, dtype=torch.float64, generator=made).requires_grad_() for _ in range(count)]


def loss(result: Any) -> Tensor:
    """That is different at each place."""
    total = torch.zeros((), dtype=torch.float64)
    for number, y in enumerate(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
        made = torch.Generator().manual_seed(5 + number)
        total = total + (y * torch.randn(y.shape, dtype=torch.float64, generator=made)).sum() + y.square().mean()
    return total


def graded(net: nn.Module, given: Sequence[Tensor], call: Callable[..., Any]) -> tuple[Any, list[Tensor | None]]:
    """The result, and the gradients of the images and of the parameters."""
    leaves = [*given, *net.parameters()]
    for leaf in leaves:
        leaf.grad = None
    result = call(*given)
    loss(result).backward()
    return result, [leaf.grad for leaf in leaves]


def assert_alike(found: Any, expected: Any, within: float = TIGHT) -> None:
    found, expected = tree_leaves(found), tree_leaves(expected)
    assert len(found) == len(expected)
    most = max(float(b.detach().abs().max()) for b in expected if isinstance(b, Tensor) and b.numel())
    for a, b in zip(found, expected, strict=True):
        assert isinstance(a, Tensor) == isinstance(b, Tensor)
        if isinstance(b, Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.isfinite(a).all() and float((a - b).detach().abs().max()) <= within * most
        else:
            assert a == b


def compare(make: Callable[[], nn.Module], given: Sequence[Tensor], **more: Any) -> None:
    torch.manual_seed(0)
    net = make().double()
    stock = copy.deepcopy(net)
    results, expected = graded(stock, given, stock)
    found, gradients = graded(net, given, lambda *x: pc.tile(net, x, **more))
    assert_alike(found, results)
    assert_alike(gradients, expected)
    for (name, buffer), old in zip(net.named_buffers(), stock.buffers(), strict=True):
        assert torch.allclose(buffer, old, rtol=1e-9), name


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("batch", "size"), SIZES if FULL else SIZES[1:])
def test_gradients_are_those_of_one_call(name: str, batch: int, size: tuple[int, int]) -> None:
    for tile in TILES:
        compare(SMALL[name], images(1, batch, size), tile=tile)
    compare(SMALL[name], images(1, 4 - batch, size), tile=3, dim=3)


def test_of_two_images() -> None:
    def both(first: nn.Module, second: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return first(x) * second(y).mean((2, 3), keepdim=True) + second(first(x) - y)

    for tile in TILES:
        compare(
            lambda: Function(both, conv(2, 2), nn.Sequential(conv(2, 2), nn.BatchNorm2d(2))),
            images(2, 2, (13, 11)),
            tile=tile,
        )


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    made = [nn.Conv1d, nn.Conv3d][dims == 3], [nn.BatchNorm1d, nn.BatchNorm3d][dims == 3]
    size = (31,) if dims == 1 else (7, 9, 8)
    net = lambda: nn.Sequential(made[0](2, 3, 3, padding=1), made[1](3), nn.ReLU(), made[0](3, 2, 3, 2, 1))  # noqa: E731
    for tile in (3, (4,) if dims == 1 else (3, 2, 4)):
        compare(net, images(1, 2, size), tile=tile)


@pytest.mark.parametrize("function", [
    lambda x: torch.complex(x, x * 2).exp().abs(),
    lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=2) * 0.5j, n=x.size(2), dim=2),
])  # fmt: skip
def test_gradients_by_way_of_complex_numbers(function: Any) -> None:
    x = torch.linspace(-2, 1, 2 * 4 * 13 * 6).double().sin().view(2, 4, 13, 6).requires_grad_()
    (want,) = torch.autograd.grad(function(x).square().sum(), x)
    (got,) = torch.autograd.grad(pc.tile(function, x, tile=3).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("function", [
    lambda x, weight: (x * weight)[:, :, 3:3],
    lambda x, weight: x[:, :, 5:2].sum() + 0 * weight,
    lambda x, weight: F.pad(x * weight, (0, 0, -6, -7)).relu() + 1,
    lambda x, weight: (x.narrow(2, 3, 0).sum(), weight * x.detach()[:, :, 3:3]),
], ids=["rows", "their sum", "cropped", "others"])  # fmt: skip
def test_gradients_by_way_of_nothing(function: Any) -> None:
    """They are zeros, and there."""
    x, weight = structured((2, 3, 13, 6)).double().requires_grad_(), torch.ones(()).double().requires_grad_()
    for one in (0, 1):
        of = [tree_leaves(call(x))[-one] for call in (
            lambda x: function(x, weight), lambda x: pc.tile(lambda x: function(x, weight), x, tile=3),
        )]  # fmt: skip
        wanted, found = (torch.autograd.grad(y.sum(), (x, weight), allow_unused=True) for y in of)
        torch.testing.assert_close(found, wanted)
        assert of[0].shape == of[1].shape


def test_tiles_that_read_all_of_a_value_make_no_views_of_it() -> None:
    """A view's backward writes zeros as large as the whole, and its gradient into them."""
    net, x = nn.Sequential(conv(3, 8, 1), nn.ReLU(), conv(8, 4, 1)), structured((1, 3, 40, 24))
    y = pc.tile(net.double(), x.requires_grad_(), tile=8)
    with torch.autograd.profiler.profile() as seen:
        y.sum().backward()
    made = [event.name for event in seen.function_events]
    assert made.count("aten::convolution_backward") == 10
    assert not made.count("aten::slice_backward")


def test_what_is_all_of_an_axis_is_padded_without_a_copy() -> None:
    net, x = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 4)).double(), structured((1, 3, 40, 24)).requires_grad_()
    y = pc.tile(net, x, tile=(40, 24))
    with torch.autograd.profiler.profile() as seen:
        y.sum().backward()
    made = [event.name for event in seen.function_events]
    assert made.count("patchconv::_convolution_backward") == 2 and not made.count("aten::cat")


@pytest.mark.parametrize("tile", [(40, 24), (10, 24)])
def test_what_a_backward_pass_does_not_compute_again(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions whose results were stored, for norms in training: these are asked for their sums as they are."""
    norms = [layer for _ in range(3) for layer in (conv(8, 8), nn.BatchNorm2d(8), nn.ReLU())]
    net, x = nn.Sequential(conv(3, 8), *norms).double(), structured((1, 3, 40, 24)).requires_grad_()

    def backward() -> tuple[int, list[Any]]:
        """The convolutions that it computes, and the gradients."""
        y = pc.tile(net, x, tile=tile)
        with torch.autograd.profiler.profile() as seen:
            found = torch.autograd.grad(loss(y), [x, *net.parameters()])
        return [event.name for event in seen.function_events].count("patchconv::_convolution"), list(found)

    count, found = backward()
    tiles = 40 // tile[0]
    assert count == tiles  # the first one, whose result is not stored
    monkeypatch.setattr(Backward, "_ask_stored", lambda self, number: None)
    count, expected = backward()
    assert count == 4 * tiles
    assert_alike(found, expected)


def test_the_backward_pass_has_the_settings_of_the_forward_pass() -> None:
    net, x = pc.Conv2d(4, 4, 3, padding=1), torch.randn(1, 4, 64, 32)

    def tiles_of_backward(*settings: Any) -> int:
        with contextlib.ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting)
            y = pc.tile(net, x, tile=16)
        before = pc.settings.all_settings()
        with pc.record_paths() as paths:
            y.sum().backward()
        assert pc.settings.all_settings() == before
        return max(one["count"] for one in paths)

    assert tiles_of_backward(pc.workspace_limit(4096)) > tiles_of_backward()


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm])
def test_made_weights_in_steps_without_an_update(norm: Callable[[nn.Module], nn.Module]) -> None:
    """Each step goes back through the making of the weights."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), norm(nn.Conv2d(8, 8, 3)), nn.Softplus(), nn.Conv2d(8, 2, 3)).double()

    module, tiled = made(), pc.tile_modules(made(), "", "350KiB")
    for _ in range(3):
        x = torch.randn(1, 3, 40, 40, dtype=torch.float64)
        for one in (module, tiled):
            one(x).square().sum().backward()
    for p, q in zip(module.parameters(), tiled.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d, lambda c: nn.GroupNorm(2, c), lambda c: nn.InstanceNorm2d(c, affine=True)]
)
def test_gradients_that_are_views_of_one(norm: Callable[[int], nn.Module]) -> None:
    """Of a tile of one place, the biases' gradients are what the sum's gradient is: autograd keeps it for both."""
    torch.manual_seed(0)
    one, other = (nn.Sequential(conv(2, 4, bias=False), norm(4)) for _ in range(2))
    module = Function(lambda one, other, x: torch.relu(one(x) + other(x)), one, other).double()
    x, weight = structured((1, 2, 5, 4)), torch.randn(1, 4, 5, 4, dtype=torch.float64)
    kept = weight.clone()
    got, want = (
        torch.autograd.grad((call(x) * weight).sum(), [*module.parameters()])
        for call in (lambda x: pc.tile(module, x, tile=(1, 1)), module)
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    assert torch.equal(weight, kept)
