"""`tile` on models of torchvision, timm and diffusers, and on small ones of our own, against one call of the module.

PATCHCONV_ALL_MODELS=1 takes all of model_zoo.py: what `tile` does not serve is refused by name, and nothing is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import model_zoo
from support.model_zoo import Case
from support.spatial_chains import structured
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import patchconv_native as pc

ALL = os.environ.get("PATCHCONV_ALL_MODELS", "0") == "1"


def conv(a: int, b: int, k: int = 3, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(a, b, k, padding=k // 2, **more)


class Dense(nn.Module):
    """The dense block of RRDB, with activations in place and a scaled skip."""

    def __init__(self, width: int = 8, more: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv(width + k * more, more) for k in range(3))
        self.last = conv(width + 3 * more, width)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(F.leaky_relu(layer(torch.cat(found, 1)), 0.2, inplace=True))
        return self.last(torch.cat(found, 1)) * 0.2 + x


class Attention(nn.Module):
    """CBAM: over channels by global pools, over places by the channels' mean and maximum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Conv2d(width, 2, 1), nn.ReLU(), nn.Conv2d(2, width, 1))
        self.places = conv(2, 1, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.sigmoid(self.mix(F.adaptive_avg_pool2d(x, 1)) + self.mix(F.adaptive_max_pool2d(x, 1)))
        return x * self.places(torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)).sigmoid()


class Restorer(nn.Module):
    """Pads to a multiple, halves by blurring, doubles by a shuffle, crops, and returns more than one thing."""

    blur: Tensor

    def __init__(self) -> None:
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("blur", (row[:, None] * row / 16).repeat(8, 1, 1, 1))
        self.head, self.body = conv(4, 8), nn.Sequential(Dense(), Attention(8), Dense())
        self.tail = nn.Sequential(conv(8, 12), nn.PixelShuffle(2))
        self.norm = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x: Tensor) -> dict[str, Any]:
        height, width = x.shape[-2:]
        mean = x.mean((2, 3), keepdim=True)
        y = F.pad(x - mean, (0, -width % 4, 0, -height % 4), mode="reflect")
        y = self.head(torch.cat([y, torch.zeros_like(y[:, :1])], 1))
        y = F.conv2d(F.pad(y, (1, 1, 1, 1), mode="replicate"), self.blur, stride=2, groups=8)
        features = self.norm(self.body(y))
        y = self.tail(features)
        y += 1
        return {"image": y[..., :height, :width] + mean, "features": (features[:, ::2], features[:, :, 1:-1])}


class Tokens(nn.Module):
    """Windows with attention within each, layer norms over channels, and tokens with attention of channels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.cut, self.norm = nn.Conv2d(3, width, 2, 2), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.cut(x).permute(0, 2, 3, 1))
        n, h, w, c = y.shape
        windows = y.view(n, h // 4, 4, w // 4, 4, c).transpose(2, 3).reshape(n, h // 4, w // 4, 16, c)
        y = F.scaled_dot_product_attention(*self.qkv(windows).chunk(3, -1))
        y = y.view(n, h // 4, w // 4, 4, 4, c).transpose(2, 3).reshape(n, h * w, c)
        q, k, v = self.qkv(y).reshape(n, -1, 3, c).permute(2, 0, 3, 1)
        y = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.transpose(1, 2)).transpose(1, 2).reshape(n, c, h, w)


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "restorer": (Restorer, (2, 3, 45, 38)),
    "tokens": (Tokens, (2, 3, 48, 40)),
}

ODD = (1, 3, 99, 71)
QUICK: dict[str, tuple[int, ...] | None] = {
    "torchvision/resnet18": ODD,
    "torchvision/densenet121": ODD,
    "torchvision/shufflenet_v2_x0_5": ODD,
    "torchvision/mobilenet_v3_small": (3, 3, 67, 45),
    "torchvision/convnext_tiny": ODD,
    "torchvision/lraspp_mobilenet_v3_large": (1, 3, 67, 45),
    "torchvision/swin_t": None,
    "timm/convnextv2_atto": ODD,
    "timm/tf_efficientnet_b0": ODD,
    "timm/cs3darknet_focus_s": None,
    "timm/edgenext_xx_small": None,
    "diffusers/AutoencoderKL": None,
    "diffusers/UNet2DModel": None,
}
"""Of each of these the shape of its image; None: as model_zoo.py has it."""

_TIMM = [*model_zoo.TIMM.values(), *model_zoo.TIMM_MORE]
EVERY = {
    case.name: case
    for case in (*model_zoo.TORCHVISION, *map(model_zoo.timm_case, _TIMM), *model_zoo.DIFFUSERS)
    if not case.no_double and not case.discrete
}

IN_FLOAT32 = {"timm/efficientvit_b0"}
"""Models that compute a part in float32, whatever their dtype."""


def set_up(model: nn.Module) -> nn.Module:
    """In float64, with statistics and layer scales that do something."""
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
            part.running_mean.uniform_(-0.5, 0.5)
            part.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    for name, value in model.named_parameters():
        if name.endswith(("gamma", "layer_scale", "alpha", "gain")):
            value.data.uniform_(0.5, 1)
    return model.eval().double()


def as_one_call(model: nn.Module, arguments: tuple[Any, ...], rows: int, tolerance: float = 1e-9) -> None:
    want, got = model(*arguments), pc.tile(model, arguments, tile=rows)
    assert type(got) is type(want)
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    assert pairs
    for a, b in pairs:
        if isinstance(b, Tensor):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert b.isfinite().all() and (a - b).abs().max() <= tolerance * b.abs().max()
        else:
            assert a == b


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_models_of_our_own(name: str, converted: bool) -> None:
    make, shape = OWN[name]
    torch.manual_seed(0)
    model = set_up(make())
    if converted:
        pc.convert(model)
    as_one_call(model, (structured(shape),), 3)


def built(case: Case, quick: bool, shape: tuple[int, ...] | None) -> tuple[nn.Module, tuple[Any, ...]]:
    pytest.importorskip(case.name.partition("/")[0], exc_type=Exception)
    torch.manual_seed(0)
    model = (model_zoo.SMALL.get(case.name, case.make) if quick else case.make)()
    if quick:
        model_zoo.shorten(model)
    inputs = case.inputs() if shape is None else (structured(shape),)
    doubles = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    return set_up(model), doubles


@pytest.mark.parametrize("name", QUICK)
@torch.no_grad()
def test_models_of_libraries(name: str) -> None:
    as_one_call(*built(EVERY[name], True, QUICK[name]), 2)


@pytest.mark.skipif(not ALL, reason="PATCHCONV_ALL_MODELS=1 sweeps over torchvision, timm and diffusers")
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_every_model_is_right_or_refused(name: str) -> None:
    model, arguments = built(EVERY[name], False, None)
    if not isinstance(arguments[0], Tensor):
        pytest.skip("takes no image")
    try:
        as_one_call(model, arguments, 2, 1e-6 if name in IN_FLOAT32 else 1e-9)
    except pc.NotServed as error:
        pytest.skip(str(error))


FEATURES = model_zoo.words("""
    resnet10t resnetv2_18 seresnet18 resnetblur18 ecaresnet26t skresnet18 regnetx_002 regnety_002 efficientnet_b0
    tf_efficientnetv2_b0 mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small convnext_atto convnextv2_atto
    densenet121 res2next50 resnest14d vovnet39a ghostnet_050 ghostnetv2_100 rexnet_100 nfnet_l0 nf_regnet_b0 cspresnet50
    cs3darknet_focus_s darknet53 selecsls42 legacy_xception xception41p repvgg_a0 mobileone_s1 fastvit_t8
    edgenext_xx_small poolformer_s12 inception_next_atto lcnet_035 hardcorenas_b mnasnet_050 fbnetc_100 mixnet_s
    hgnetv2_b0 dpn48b gernet_s repghostnet_050 repvit_m1 starnet_s050 mambaout_femto swiftformer_xs pvt_v2_b0
    focalnet_tiny_srf efficientvit_b0 efficientvit_m0 shvit_s1 fasternet_t0 lcnetv2_small mobilevit_xxs convformer_s18
    nextvit_small rdnet_tiny vgg11 davit_tiny gcresnext26ts resnetrs50 cspnext_tiny sequencer2d_s efficientvim_m1
""")
"""Of timm: a member of each family that takes images of odd sizes."""
FEATURES_AT: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("hrnet_w18_small", "dla34", "dla46x_c", "csatv2", "lowformer_b0"), (1, 3, 96, 64)),
    **dict.fromkeys(("inception_v3", "inception_v4", "inception_resnet_v2"), (1, 3, 139, 107)),
    "tresnet_m": (1, 3, 100, 72), "efficientformer_l1": (1, 3, 224, 224),
}  # fmt: skip
QUICK_FEATURES = ("resnet10t",)


@pytest.mark.parametrize("name", [*FEATURES, *FEATURES_AT] if ALL else QUICK_FEATURES)
@torch.no_grad()
def test_features_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm", exc_type=Exception)
    torch.manual_seed(0)
    model = set_up(timm.create_model(name, pretrained=False, features_only=True))
    tolerance = 1e-6 if f"timm/{name}" in IN_FLOAT32 else 1e-9
    as_one_call(model, (structured(FEATURES_AT.get(name, ODD)),), 2, tolerance)
