"""Models of torchvision on two ranks against one process, in float64: outputs, gradients and running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.pairs import FULL
from support.ranks import needs_gloo, run
from support.spatial_cases import compare, mesh_of
from support.spatial_chains import structured
from torch import Tensor, nn

pytest.importorskip("torchvision")
pytestmark = needs_gloo


class Out(nn.Module):
    """The head of a segmentation model's outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)["out"]


class UNet(nn.Module):
    """Two levels, transposed convolutions up, joined along the channels after a crop."""

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU(),
            )  # fmt: skip

        self.down = nn.ModuleList([block(3, 4), block(4, 8)])
        self.bottom = block(8, 8)
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.join = nn.ModuleList([block(16, 8), block(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            kept.append(down(x))
            x = nn.functional.max_pool2d(kept[-1], 2, ceil_mode=True)
        x = self.bottom(x)
        for up, join, skip in zip(self.up, self.join, reversed(kept), strict=True):
            x = up(x)[..., : skip.shape[-2], : skip.shape[-1]]
            x = join(torch.cat([skip, x], 1))
        return x


def make(name: str) -> nn.Module:
    import torchvision

    models = torchvision.models
    if name == "unet":
        return UNet()
    if name == "densenet":
        return models.DenseNet(4, (2, 2), 8, drop_rate=0.2, num_classes=5)
    if name == "fcn_resnet50":
        return Out(models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=3))
    if name in ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"):
        return Out(getattr(models.segmentation, name)(weights=None, weights_backbone=None, num_classes=3))
    if name == "googlenet":
        return models.googlenet(weights=None, aux_logits=False, init_weights=False, num_classes=5)
    return getattr(models, name)(weights=None, num_classes=5)


NAMES = """
    resnet18 mobilenet_v3_small convnext_tiny efficientnet_b0 regnet_y_400mf shufflenet_v2_x0_5 squeezenet1_1
    lraspp_mobilenet_v3_large deeplabv3_mobilenet_v3_large
"""
MODELS = {"unet": 37, "densenet": 67, **dict.fromkeys(NAMES.split(), 65)}  # and their images' heights


def both(rank: int, world: int, names: list[str], tile: Any = None) -> dict[str, list[str]]:
    """What differs in training and in eval mode. tile: as of `compare`."""
    mesh, found = mesh_of(world, (world,)), {}
    for name in names:
        torch.manual_seed(1)
        model = make(name).double()
        size = MODELS[name]
        image = structured((2, 3, size, size - 8)) / 10
        found[name] = []
        for train in (True, False):
            try:
                wrong = compare(model.train(train), image, mesh, "H", 1e-7, tile=tile)
                found[name] += [f"train={train}: {text}" for text in wrong]
            except Exception as error:
                found[name].append(f"train={train}: {type(error).__name__}: {error}")
    return found


QUICK = ("unet", "densenet", "mobilenet_v3_small", "lraspp_mobilenet_v3_large")


@pytest.mark.parametrize("name", MODELS if FULL else QUICK)
def test_model_equals_one_process(name: str) -> None:
    results = run(2, both, [name], timeout=120)
    wrong = [f"rank {rank}: {text}" for rank, found in enumerate(results) for text in found[name]]
    assert not wrong, wrong
