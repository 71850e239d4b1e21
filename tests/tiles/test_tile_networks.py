"""`tile` on networks that people own: U-Nets of medical images, super-resolution, decoders of videos with caches.

PATCHCONV_ALL_MODELS=1 takes more of diffusers' decoders.
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
from patchconv_native.tiles import choices

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


WAN: dict[str, Any] = {
    "base_dim": 4, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "attn_scales": [],
    "temperal_downsample": [True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "latent_channels": 4, "block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "norm_num_groups": 2,
}  # fmt: skip
MOCHI = {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4, "layers_per_block": (1,) * 5}
# Of diffusers' classes: numbers, and the shape of what is decoded.
VIDEOS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "AutoencoderKLWan": (WAN, (1, 4, 2, 7, 5)),
    "AutoencoderKLCogVideoX": (SMALL, (1, 4, 3, 5, 4)),
    "AutoencoderKLHunyuanVideo": (SMALL, (1, 4, 3, 5, 4)),
    "AutoencoderKLMochi": (MOCHI, (1, 12, 3, 5, 4)),
}  # fmt: skip
QUICK = ("AutoencoderKLWan",)


@pytest.mark.parametrize("name", VIDEOS if ALL else QUICK)
@torch.no_grad()
def test_decoders_of_videos(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frame by frame with caches, by modules; and all frames at once."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    numbers, shape = VIDEOS[name]
    vae, z = getattr(diffusers, name)(**numbers).eval().double(), structured(shape)
    want = vae.decode(z).sample
    assert want.std() > 1e-3
    monkeypatch.setattr(choices, "STRIP", want.nbytes // 10)  # so that there are strips
    monkeypatch.setattr(choices, "THINNEST", 1)
    for dim in (2, 3) if ALL else (3,):
        assert error(pc.tile(lambda z: vae.decode(z).sample, z, tile=5, dim=dim), want) < 1e-9
        pc.tile_modules(vae, {"decoder": "1GiB", "encoder": "1GiB"}, dim=dim)
        assert error(vae.decode(z).sample, want) < 1e-9
        got = vae.encode(want).latent_dist.mean
        pc.tile_modules(vae, ())
        assert error(got, vae.encode(want).latent_dist.mean) < 1e-9
