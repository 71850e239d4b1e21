"""`tile` on networks that people own: U-Nets of medical images, super-resolution, decoders of videos with caches.

PATCHCONV_ALL_MODELS=1 takes more of MONAI's networks and of diffusers' decoders.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import patchconv_native as pc
from patchconv_native.tiles import choices, strip_sizes

ALL = os.environ.get("PATCHCONV_ALL_MODELS", "0") == "1"


def error(got: Any, want: Any) -> float:
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    assert pairs and all(a.shape == b.shape and type(a) is Tensor for a, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


class Block(nn.Sequential):
    def __init__(self, dims: int, a: int, b: int, stride: int, batch: bool) -> None:
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        norm = ((nn.InstanceNorm2d, nn.InstanceNorm3d), (nn.BatchNorm2d, nn.BatchNorm3d))[batch][dims - 2]
        super().__init__(
            conv(a, b, 3, stride, 1), norm(b, affine=True), nn.LeakyReLU(0.01, inplace=True),
            conv(b, b, 3, 1, 1), norm(b, affine=True), nn.LeakyReLU(0.01, inplace=True),
        )  # fmt: skip


class Segmenter(nn.Module):
    """As nnU-Net: strided convolutions down, transposed ones up, a result of each resolution in training."""

    def __init__(self, dims: int, batch: bool) -> None:
        super().__init__()
        widths = (4, 6, 8)
        up, conv = ((nn.ConvTranspose2d, nn.Conv2d), (nn.ConvTranspose3d, nn.Conv3d))[dims - 2]
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.down = nn.ModuleList(
            Block(dims, a, b, 2 if a > 1 else 1, batch) for a, b in zip((1, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(up(a, b, 2, 2, bias=False) for a, b in pairs)
        self.merge = nn.ModuleList(Block(dims, 2 * b, b, 1, batch) for _, b in pairs)
        self.heads = nn.ModuleList(conv(b, 2, 1) for _, b in pairs)

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        size, skips = x.shape[2:], []
        x = F.pad(x, [n for side in reversed(size) for n in (0, -side % 4)])
        for block in self.down:
            x = block(x)
            skips.append(x)
        found = []
        for up, merge, head, skip in zip(self.up, self.merge, self.heads, skips[-2::-1], strict=True):
            x = merge(torch.cat((up(x), skip), 1))
            found.append(head(x))
        found[-1] = found[-1][(..., *map(slice, size))]
        return found[::-1] if self.training else found[-1].softmax(1)


class Upscaler(nn.Module):
    """As EDSR and RRDB: scaled residual and dense blocks, a shuffle, nearest upsampling before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.a, self.b = nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(6, 4, 3, 1, 1), nn.Conv2d(10, 6, 3, 1, 1)
        self.up, self.norm = nn.Conv2d(6, 24, 3, 1, 1), nn.BatchNorm2d(6)
        self.tail = nn.Sequential(nn.Conv2d(6, 6, 3, 1, 1), nn.PReLU(6), nn.Conv2d(6, 3, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.new_tensor([0.4, 0.5, 0.3]).view(1, 3, 1, 1)
        first = y = self.head(x - mean)
        for _ in range(2):
            y = self.b(torch.cat((y, F.leaky_relu(self.a(y), 0.2)), 1)) * 0.2 + y
        y = F.pixel_shuffle(self.up(self.norm(y) + first), 2)
        y = self.tail(F.interpolate(y, scale_factor=2, mode="nearest"))
        return (y + F.interpolate(x, scale_factor=4, mode="bicubic")).clamp(-9, 9) + mean


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "volumes, instance norm": (lambda: Segmenter(3, False), (1, 1, 11, 9, 14)),
    "volumes, batch norm": (lambda: Segmenter(3, True), (2, 1, 9, 6, 11)),
    "images, instance norm": (lambda: Segmenter(2, False), (3, 1, 61, 47)),
    "upscaler": (Upscaler, (3, 3, 23, 17)),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_networks_give_what_one_call_gives(name: str, training: bool) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    net, x = make().double().train(training), structured(shape)
    stock = copy.deepcopy(net)
    want = stock(x)
    assert error(pc.tile(net, x, tile=3), want) < 1e-9
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value, rtol=1e-9, atol=1e-12)
    assert error(pc.tile(copy.deepcopy(stock), x, tile=4, dim=3), stock(x)) < 1e-9


# ----------------------------------------------------------------------------------------------------------------------
# Of MONAI: the class, its numbers, and the shape of its image, whose sizes it can halve as often as it does.

DEEP: dict[str, Any] = {
    "in_channels": 1, "out_channels": 2, "kernel_size": (3, 3, 3, 3), "strides": (1, 2, 2, 2),
    "upsample_kernel_size": (2, 2, 2), "filters": (4, 6, 8, 8), "deep_supervision": True, "deep_supr_num": 2,
}  # fmt: skip
UNET: dict[str, Any] = {
    "in_channels": 1, "out_channels": 2, "channels": (4, 6, 8), "strides": (2, 2), "num_res_units": 1,
}  # fmt: skip
BASIC: dict[str, Any] = {"in_channels": 1, "out_channels": 2, "features": (4, 4, 6, 6, 8, 4)}
SEG: dict[str, Any] = {
    "init_filters": 8, "in_channels": 1, "out_channels": 2, "blocks_down": (1, 1, 1), "blocks_up": (1, 1),
}  # fmt: skip
ATTENTION: dict[str, Any] = {"in_channels": 1, "out_channels": 2, "channels": (4, 6, 8), "strides": (2, 2)}
MONAI: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "DynUNet": ("DynUNet", {"spatial_dims": 2, **DEEP}, (1, 1, 40, 24)),
    "DynUNet of volumes": ("DynUNet", {"spatial_dims": 3, **DEEP, "res_block": True}, (1, 1, 16, 24, 16)),
    "UNet": ("UNet", {"spatial_dims": 2, **UNET}, (1, 1, 44, 28)),
    "UNet, batch norm": ("UNet", {"spatial_dims": 2, **UNET, "norm": "batch"}, (2, 1, 40, 36)),
    "UNet of volumes": ("UNet", {"spatial_dims": 3, **UNET}, (1, 1, 16, 12, 20)),
    "UNet of volumes, batch norm": ("UNet", {"spatial_dims": 3, **UNET, "norm": "batch"}, (2, 1, 16, 12, 20)),
    "BasicUNet": ("BasicUNet", {"spatial_dims": 2, **BASIC}, (1, 1, 61, 47)),
    "BasicUNet of volumes": ("BasicUNet", {"spatial_dims": 3, **BASIC}, (1, 1, 37, 33, 35)),
    "BasicUNetPlusPlus": ("BasicUNetPlusPlus", {"spatial_dims": 2, **BASIC}, (1, 1, 64, 48)),
    "SegResNet": ("SegResNet", {"spatial_dims": 2, **SEG, "upsample_mode": "pixelshuffle"}, (1, 1, 44, 36)),
    "SegResNet of volumes": ("SegResNet", {"spatial_dims": 3, **SEG}, (1, 1, 16, 12, 20)),
    "VNet": ("VNet", {"spatial_dims": 2, "out_channels": 2}, (1, 1, 32, 48)),
    "VNet of volumes": ("VNet", {"spatial_dims": 3, "out_channels": 2}, (1, 1, 16, 32, 16)),
    "FlexibleUNet": ("FlexibleUNet", {"in_channels": 3, "out_channels": 2, "backbone": "resnet18"}, (1, 3, 96, 64)),
    "FlexibleUNet, efficientnet": (
        "FlexibleUNet", {"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0"}, (1, 3, 96, 64)
    ),
    "AttentionUnet": ("AttentionUnet", {"spatial_dims": 2, **ATTENTION}, (1, 1, 40, 36)),
    "AttentionUnet of volumes": ("AttentionUnet", {"spatial_dims": 3, **ATTENTION}, (1, 1, 16, 12, 20)),
    "HighResNet": ("HighResNet", {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (1, 1, 33, 29)),
    "MedNeXt": ("MedNeXt", {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "init_filters": 4,
                            "blocks_down": (1, 1), "blocks_bottleneck": 1, "blocks_up": (1, 1)}, (1, 1, 40, 36)),
}  # fmt: skip
QUICK_MONAI = ("DynUNet",)
EVALUATED = ("FlexibleUNet, efficientnet",)
"""In training it goes over the image a hundred times, which takes minutes."""


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MONAI if ALL else QUICK_MONAI)
@torch.no_grad()
def test_networks_of_monai(name: str, training: bool) -> None:
    nets = pytest.importorskip("monai.networks.nets", exc_type=Exception)
    if training and name in EVALUATED:
        pytest.skip("takes minutes")
    torch.manual_seed(0)
    kind, numbers, shape = MONAI[name]
    net, x = getattr(nets, kind)(**numbers).double().train(training), structured(shape)
    for part in net.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    for dim in (2, 3) if ALL else (2,):
        stock, tiled = copy.deepcopy(net), copy.deepcopy(net)
        torch.manual_seed(1)  # some leave out blocks at random
        want = stock(x)
        torch.manual_seed(1)
        assert error(pc.tile(tiled, x, tile=3, dim=dim), want) < 1e-9
        for key, value in stock.state_dict().items():
            torch.testing.assert_close(tiled.state_dict()[key], value, rtol=1e-9, atol=1e-12)
        if "deep_supervision" in numbers:  # it keeps them for what follows in the same call
            assert error(tiled.heads, stock.heads) < 1e-9


# ----------------------------------------------------------------------------------------------------------------------
# Of diffusers: numbers, and the shape of what is decoded.

WAN: dict[str, Any] = {
    "base_dim": 4, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "attn_scales": [],
    "temperal_downsample": [True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "latent_channels": 4, "block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "norm_num_groups": 2,
}  # fmt: skip
MOCHI = {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4, "layers_per_block": (1,) * 5}
MAGVIT = SMALL | {"block_out_channels": (4, 8, 8, 8)}
COSMOS: dict[str, Any] = {
    "latent_channels": 4, "encoder_block_out_channels": (8, 8, 16), "decode_block_out_channels": (8, 16, 16),
    "attention_resolutions": (8,), "resolution": 64, "num_layers": 1, "patch_size": 2, "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 4, "latents_mean": None, "latents_std": None,
}  # fmt: skip
QWEN = {key: value for key, value in WAN.items() if key != "attn_scales"}
_LTX_STEPS = (True, True, False, False)
LTX: dict[str, Any] = {
    "latent_channels": 8, "block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4, "patch_size": 2,
    "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5,
    "spatio_temporal_scaling": _LTX_STEPS, "decoder_spatio_temporal_scaling": _LTX_STEPS,
}  # fmt: skip
VIDEOS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "AutoencoderKLWan": (WAN, (1, 4, 2, 7, 5)),
    "AutoencoderKLCogVideoX": (SMALL, (1, 4, 3, 5, 4)),
    "AutoencoderKLHunyuanVideo": (SMALL, (1, 4, 3, 5, 4)),
    "AutoencoderKLMochi": (MOCHI, (1, 12, 3, 5, 4)),
    "AutoencoderKLMagvit": (MAGVIT, (1, 4, 2, 7, 5)),
    "AutoencoderKLCosmos": (COSMOS, (1, 4, 3, 8, 6)),
    "AutoencoderKLQwenImage": (QWEN, (1, 4, 3, 7, 5)),
    "AutoencoderKLLTXVideo": (LTX, (1, 8, 3, 7, 5)),
}  # fmt: skip
QUICK = ("AutoencoderKLWan",)
TOLERANCE = {"AutoencoderKLLTXVideo": 1e-6, "AutoencoderDC": 1e-6}
"""Of models that compute a part in float32, whatever their dtype."""


def encoded(vae: Any, x: Tensor) -> Tensor:
    """The mean, where the result is a distribution."""
    found = vae.encode(x)[0]
    return found if isinstance(found, Tensor) else found.mode()


@pytest.mark.parametrize("name", VIDEOS if ALL else QUICK)
@torch.no_grad()
def test_decoders_of_videos(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frame by frame with caches, by modules; and all frames at once."""
    most = TOLERANCE.get(name, 1e-9)
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    numbers, shape = VIDEOS[name]
    vae, z = getattr(diffusers, name)(**numbers).eval().double(), structured(shape)
    want = vae.decode(z).sample
    assert want.std() > 1e-3
    monkeypatch.setattr(strip_sizes, "STRIP", want.nbytes // 10)  # so that there are strips
    monkeypatch.setattr(choices, "THINNEST", 1)
    for dim in (2, 3) if ALL else (3,):
        assert error(pc.tile(lambda z: vae.decode(z).sample, z, tile=5, dim=dim), want) < most
        pc.tile_modules(vae, {"decoder": "1GiB", "encoder": "1GiB"}, dim=dim)
        assert error(vae.decode(z).sample, want) < most
        got = encoded(vae, want)
        pc.tile_modules(vae, ())
        assert error(got, encoded(vae, want)) < most


@pytest.mark.skipif(not ALL, reason="PATCHCONV_ALL_MODELS=1 takes more of diffusers")
@torch.no_grad()
def test_a_decoder_of_many_frames() -> None:
    """Allegro's is called for 24 frames of 320x320 pixels, and has no other way."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    numbers = {"latent_channels": 4, "block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 2}
    vae, z = diffusers.AutoencoderKLAllegro(**numbers).eval().double(), structured((1, 4, 3, 5, 4))
    want = vae.decoder(z)
    for dim in (2, 3):
        assert error(pc.tile(vae.decoder, z, tile=5, dim=dim), want) < 1e-9
        assert error(pc.tile(vae.encoder, want, tile=2, dim=dim), vae.encoder(want)) < 1e-9


BLOCKS: dict[str, Any] = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
}  # fmt: skip
TINY = {f"{side}_block_out_channels": (8,) * 3 for side in ("encoder", "decoder")}
TINY |= {f"num_{side}_blocks": (1,) * 3 for side in ("encoder", "decoder")}
DC: dict[str, Any] = {"latent_channels": 4, "attention_head_dim": 4}
for _side in ("encoder", "decoder"):
    DC |= {
        f"{_side}_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"), f"{_side}_layers_per_block": (1,) * 3,
        f"{_side}_block_out_channels": (4, 8, 8), f"{_side}_qkv_multiscales": ((), (), (5,)),
    }  # fmt: skip
OOBLECK: dict[str, Any] = {
    "encoder_hidden_size": 4, "downsampling_ratios": [2, 3], "channel_multiples": [1, 2], "decoder_channels": 4,
    "decoder_input_channels": 4,
}  # fmt: skip
TEMPORAL: dict[str, Any] = {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2}
CONSISTENT: dict[str, Any] = {
    "encoder_block_out_channels": (8, 8), "encoder_down_block_types": ("DownEncoderBlock2D",) * 2,
    "encoder_layers_per_block": 1, "encoder_norm_num_groups": 4, "decoder_block_out_channels": (8, 8),
    "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2, "decoder_layers_per_block": 1,
    "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2, "decoder_norm_num_groups": 4,
}  # fmt: skip
# And what else `decode` is given.
PICTURES: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "AutoencoderKL": (BLOCKS, (1, 4, 9, 7), {}),
    "AutoencoderTiny": (TINY, (1, 4, 9, 7), {}),
    "VQModel": (BLOCKS | {"num_vq_embeddings": 16}, (1, 3, 9, 7), {}),
    "AutoencoderDC": (DC, (1, 4, 9, 7), {}),
    "AutoencoderKLTemporalDecoder": (TEMPORAL, (3, 4, 9, 7), {"num_frames": 3}),
    "AutoencoderOobleck": (OOBLECK, (1, 4, 23), {}),
    "ConsistencyDecoderVAE": (CONSISTENT, (1, 4, 9, 7), {"num_inference_steps": 2}),
}


@pytest.mark.skipif(not ALL, reason="PATCHCONV_ALL_MODELS=1 takes more of diffusers")
@pytest.mark.parametrize("name", PICTURES)
@torch.no_grad()
def test_decoders_of_pictures_and_of_sound(name: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    numbers, shape, more = PICTURES[name]
    most = TOLERANCE.get(name, 1e-9)
    vae, z = getattr(diffusers, name)(**numbers).eval().double(), structured(shape)

    def decode(z: Tensor) -> Tensor:
        torch.manual_seed(1)
        return vae.decode(z, **more).sample

    want = decode(z)
    for dim in range(2, z.dim()):
        assert error(pc.tile(decode, z, tile=3, dim=dim), want) < most
        assert error(pc.tile(lambda x: encoded(vae, x), want, tile=3, dim=dim), encoded(vae, want)) < most
