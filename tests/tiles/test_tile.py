"""`tile` against one call of the module: values, state, memory, and what is refused."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.modules import of_torchvision
from support.pairs import FULL, todays
from support.seeds import SWEEP_SEED
from support.spatial_chains import Gate, Residual, chain, differences, structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

CHAINS = 60 if FULL else 40


def image(*shape: int) -> Tensor:
    return structured(shape).float()


def as_exact_as_stock(module: nn.Module, x: Tensor, got: Tensor) -> None:
    """At most 1.5 times as far from float64 as stock is, with a little to spare for results of a few values."""
    with torch.no_grad():
        exact, stock = copy.deepcopy(module).double()(x.double()), module(x)
    scale = exact.abs().max()
    assert got.shape == stock.shape and got.dtype == stock.dtype and got.stride() == stock.stride()
    assert (got - exact).abs().max() <= 1.5 * (stock - exact).abs().max() + 1e-6 * scale


@pytest.mark.parametrize("seed", range(SWEEP_SEED, SWEEP_SEED + CHAINS))
@torch.no_grad()
def test_chains_of_layers_are_computed_as_in_one_call(seed: int) -> None:
    model, x = chain(seed, 1, "H")
    for layer in model.modules():
        if isinstance(layer, nn.Upsample) and layer.mode.startswith("nearest") and layer.scale_factor == 2.3:
            pytest.skip("in float64, torch's own kernels disagree on this factor")
    stock = copy.deepcopy(model)
    want = {"output": stock(x)}
    got = {"output": pc.tile(model, x, tile=random.Random(seed).choice([1, 2, 3, 5]))}
    want |= {f"state {name}": value for name, value in stock.state_dict().items()}
    got |= {f"state {name}": value for name, value in model.state_dict().items()}
    assert differences(got, want) == []


class UNet(nn.Module):
    """Blocks in ModuleLists, skips, an upsampling to the skip's shape."""

    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        widths = (8, 12, 16)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), norm(b), nn.ReLU(inplace=True))
            for a, b in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(nn.Conv2d(a + b, b, 3, padding=1) for a, b in ((16, 12), (12, 8)))
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for place, block in enumerate(self.down):
            x = block(x if place == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = F.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=False)
            x = F.silu(block(torch.cat([x, skip], 1)))
        return self.head(x)


class OfTokens(nn.Module):
    """The second half of SegFormer's block: a depthwise convolution on a view of tokens, whose strides are odd."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(channels, inner), nn.Linear(inner, channels)
        self.mix = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)

    def forward(self, x: Tensor) -> Tensor:
        n, _, high, wide = x.shape
        y = self.first(x.flatten(2).transpose(1, 2)).transpose(1, 2).view(n, -1, high, wide)
        y = F.gelu(self.mix(y).flatten(2).transpose(1, 2))
        return x + self.last(y).transpose(1, 2).view(x.shape)


def resnet_features() -> nn.Module:
    net = of_torchvision("resnet18")
    return nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)


def decoder() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 64), layers_per_block=1, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
    ).decoder  # fmt: skip


# Name: the model, an image, and a budget that is well under what stock takes.
MODELS = {
    "resnet18 features": (resnet_features, (1, 3, 515, 259), "3MiB"),
    "resnet18": (lambda: of_torchvision("resnet18"), (2, 3, 383, 257), "15MiB"),
    "U-Net": (UNet, (3, 3, 261, 130), "3MiB"),
    "U-Net, instance norm": (lambda: UNet(nn.InstanceNorm2d), (1, 3, 260, 131), "3MiB"),
    "MobileNetV2": (lambda: of_torchvision("mobilenet_v2").features, (1, 3, 331, 257), "4MiB"),
    "gates": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Gate(8), Residual(nn.Conv2d(8, 8, 3, padding=1)), Gate(8)),
        (1, 3, 401, 123),
        "2MiB",
    ),
    "decoder": (decoder, (1, 4, 48, 40), "5MiB"),
    "tokens": (lambda: OfTokens(16, 64), (1, 16, 203, 150), "4MiB"),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tensor, str]:
    make, shape, budget = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):  # statistics that do something
            part.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr,operator]
            part.running_var.uniform_(0.5, 2)  # type: ignore[union-attr,operator]
    return model, image(*shape), budget


@pytest.mark.parametrize(("name", "converted"), todays(itertools.product(MODELS, [False, True])))
@torch.no_grad()
def test_whole_models_keep_their_budget_and_the_numbers(name: str, converted: bool) -> None:
    model, x, budget = made(name)
    stock_peak = allocated_peak(lambda: model(x))
    if converted:
        pc.convert(model)
    found: list[Tensor] = []
    peak = allocated_peak(lambda: found.append(pc.tile(model, x, budget=budget))) - found[0].nbytes
    room = int(budget.removesuffix("MiB")) * 2**20
    assert peak <= room < stock_peak
    as_exact_as_stock(model, x, found[0])


@pytest.mark.parametrize("name", ["gates", *["U-Net, instance norm", "resnet18 features"] * FULL])
@torch.no_grad()
def test_the_least_budget_is_kept_and_less_is_refused(name: str) -> None:
    model, x, _ = made(name)
    with pytest.raises(pc.BudgetError, match=r"the least that was found is .* bytes\)") as refused:
        pc.tile(model, x, budget=1)
    least = refused.value.least
    found: list[Tensor] = []
    assert allocated_peak(lambda: found.append(pc.tile(model, x, budget=least))) - found[0].nbytes <= least
    as_exact_as_stock(model, x, found[0])
    with pytest.raises(pc.BudgetError):
        pc.tile(model, x, budget=least - 1)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_predicted_peaks_are_the_real_ones(name: str) -> None:
    model, x, _ = made(name)
    plan = pc.tile_plan(model, x.to("meta"))
    found: list[Tensor] = []
    peak = allocated_peak(lambda: found.append(pc.tile(model, x))) - found[0].nbytes
    assert peak <= plan.needs and plan.peak <= 1.35 * peak
    assert "strips" in str(plan)


def test_a_plan_leaves_nothing_at_the_parameters() -> None:
    model, x, _ = made("gates")
    for _ in range(2):
        pc.tile_plan(model, x)
    gc.collect()
    assert sum(weakref.getweakrefcount(p.untyped_storage()) for p in model.parameters()) == 0


@torch.no_grad()
def test_layouts_and_dtypes_are_those_of_one_call() -> None:
    model, x, _ = made("U-Net")
    last = x.contiguous(memory_format=torch.channels_last)
    as_exact_as_stock(model.to(memory_format=torch.channels_last), last, pc.tile(model, last, tile=16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = model(last), pc.tile(model, last, tile=16)
    assert got.dtype == want.dtype == torch.bfloat16
    exact = model(last)
    assert (got.float() - exact).abs().max() <= 1.5 * (want.float() - exact).abs().max()
    half, y = copy.deepcopy(model).bfloat16(), last.bfloat16()
    got = pc.tile(half, y, tile=16)
    assert got.dtype == torch.bfloat16
    assert (got.float() - exact).abs().max() <= 1.5 * (half(y).float() - exact).abs().max()


@pytest.mark.parametrize("store", ["device", "file"])
@torch.no_grad()
def test_float16_under_an_autocast_of_bfloat16(store: str, tmp_path: Path) -> None:
    """There torch.cat takes no float16; what joins rows does."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1)), image(1, 3, 32, 24).half()

    def call(x: Tensor) -> Tensor:
        y = F.adaptive_max_pool2d(x, 9) - x.amax((2, 3), keepdim=True)
        return model(x).amax() + F.max_pool2d(y, 3, 1, 1)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = call(x)
        got = pc.tile(call, x, tile=4, store=store if store == "device" else tmp_path)
    assert got.dtype == want.dtype and torch.allclose(got.float(), want.float(), atol=0.03)


@pytest.mark.parametrize("inside", [False, True])
@torch.no_grad()
def test_autocast_keeps_no_fake_casts_of_parameters(inside: bool) -> None:
    """Autocast keeps its casts until its block ends: those that planning makes have no numbers."""
    conv, x = nn.Conv2d(3, 4, 3), image(1, 3, 20, 16)

    def under(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return conv(x)

    call = under if inside else conv
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = pc.tile(call, x, tile=4), call(x), pc.tile(call, x, tile=4, out=torch.empty(1, 4, 18, 14).bfloat16())
    want = conv.bfloat16()(x.bfloat16())
    for got in results:
        assert type(got) is Tensor and torch.equal(got, want)
    assert torch.is_autocast_cache_enabled()


class Pyramid(nn.Module):
    """Two images and a flag in; a dictionary of several sizes, a global value and the shape out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x: Tensor, guide: Tensor, scale: float, double: bool = False) -> dict[str, Any]:
        fine = self.first(x) * scale + F.avg_pool2d(guide, 2)
        coarse = self.second(F.relu(fine, inplace=True))
        rows = x.shape[-2]
        return {"fine": fine, "coarse": coarse * 2 if double else coarse, "mean": coarse.mean((2, 3)) * rows, "n": rows}


@torch.no_grad()
def test_several_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    net, x, guide = Pyramid().eval(), image(2, 3, 40, 22), image(2, 4, 40, 22)
    want, got = net(x, guide, 0.5, True), pc.tile(net, (x, guide, 0.5, True), tile=3)
    assert got.keys() == want.keys() and got["n"] == want["n"] == 40
    for name in ("fine", "coarse", "mean"):
        torch.testing.assert_close(got[name], want[name])
    function = pc.tile(lambda a: net(a, guide, 0.5)["coarse"], x, tile=2)
    torch.testing.assert_close(function, net(x, guide, 0.5)["coarse"])


@torch.no_grad()
def test_batch_norm_in_training_takes_the_whole_images_statistics_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.BatchNorm2d(6))
    stock, x = copy.deepcopy(net), image(2, 3, 37, 20)
    torch.testing.assert_close(pc.tile(net, x, tile=4), stock(x), rtol=1e-4, atol=1e-5)
    before = copy.deepcopy(net.state_dict())
    pc.tile_plan(net, x)
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value)
        assert torch.equal(net.state_dict()[name], before[name])


class Placed(nn.Module):
    """An activation of what is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 3, 21, 10))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.place.expand_as(x)) + x


@torch.no_grad()
def test_parameters_are_not_written_over() -> None:
    net, x = Placed(), image(1, 3, 21, 10)
    before = net.place.clone()
    torch.testing.assert_close(pc.tile(net, x, tile=4), net(x))
    assert torch.equal(net.place, before)


@torch.no_grad()
def test_progress_counts_strips() -> None:
    seen: list[tuple[int, int]] = []
    pc.tile(nn.GroupNorm(1, 3), image(1, 3, 20, 8), tile=5, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(k, 8) for k in range(1, 9)]


# ----------------------------------------------------------------------------------------------------------------------
# What is refused, before anything is computed or changed.


class OnPixels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.mean() > 0 else -x


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return torch.add(x, 1, out=y)


class WritesByAView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.diagonal(dim1=2, dim2=3).add_(1)  # no box of y
        return y


class Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.gradient(self.norm(x), dim=2)[0]


REFUSED = {
    "pixels": (OnPixels(), r"__bool__ \(in inner\) is not served: .* depend on the values of pixels"),
    "writes": (Writes(), r"add \(in inner\) is not served: it writes into"),
    "a view": (WritesByAView(), r"result is not served: it reads a tensor that add_ in inner has written to by way of"),
    "no rule": (Slopes(), r"gradient in inner is not served: it has no rule"),
    "dropout": (nn.AlphaDropout(0.5), "alpha_dropout in inner is not served: it has no rule"),
    "channels": (
        nn.Dropout1d(0.5),
        r"dropout1d \(in inner\) is not served: expected input to be \(N, C, ...\) of float",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_is_not_served_is_named_and_nothing_changes(name: str) -> None:
    inner, text = REFUSED[name]
    net = Named(inner)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(pc.NotServed, match=text):
        pc.tile(net, image(1, 3, 12, 10))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize(("given", "text"), [
    ({"budget": "much"}, "tile: budget: expected a number of bytes"),
    ({"tile": 0}, "tile: expected tile to be a positive number of rows, or a tuple of several, got 0"),
    ({"store": "tape"}, "tile: expected store to be"),
])  # fmt: skip
@torch.no_grad()
def test_arguments_are_checked(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pc.tile(nn.ReLU(), image(1, 3, 12, 10), **given)


@torch.no_grad()
def test_inputs_are_checked() -> None:
    with pytest.raises(ValueError, match="expected x to have 3 dimensions or more"):
        pc.tile(nn.ReLU(), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="expected images with elements"):
        pc.tile(nn.ReLU(), torch.zeros(0, 3, 4, 4))
