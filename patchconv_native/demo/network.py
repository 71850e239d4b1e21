"""The demo's network, its training, and the dark photograph that it restores.

A photograph is darkened by an unknown factor and gets noise; a small U-Net brings it back. How bright it should be can
only be told from the whole of it: by the group norms, whose statistics are over the image. The network is trained here,
on views of the photograph itself. A view has 12 to 100 % of its width: the smallest see as much as a tile of the
blended way does, so that the network has seen tiles, too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .picture import Photo

VIEW, BATCH, STEPS = (64, 96), 4, 600
DARK = 0.12, 0.52  # factors that views are darkened by
SHOWN = 0.22  # the photograph's
NOISE = 0.01  # standard deviation, of values 0 to 1
STRIP_ROWS = 128


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A convolution, a norm over the whole image, ReLU."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(outputs // 4, outputs), nn.ReLU(inplace=True))


class Restorer(nn.Module):
    """A U-Net that gives each pixel a gain, and each value an offset. Bytes (N, 3, H, W) in, values 0 to 1 out.

    The three colours of a pixel share its gain, so that they keep their balance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(inplace=True))
        self.halved = block(8, 16, stride=2)
        self.quarter = nn.Sequential(block(16, 32, stride=2), block(32, 32))
        self.joined = block(48, 8)
        self.last = nn.Sequential(nn.Conv2d(16, 8, 3, 1, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() / 255
        full = self.first(x)
        half = self.halved(full)
        half = self.joined(torch.cat([_twice(self.quarter(half)), half], 1))
        gain, offset = self.last(torch.cat([_twice(half), full], 1)).split([1, 3], 1)
        return (x + offset / 10) * torch.exp(gain + 1)


def _twice(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


def darken(clean: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    """Values 0 to 1, darker and with noise, as bytes."""
    noise = NOISE * torch.randn(clean.shape, generator=generator)
    return (clean * factor + noise).clamp(0, 1).mul(255).round().byte()


def train(photo: Photo, seed: int, steps: int = STEPS) -> Restorer:
    """A trained network. In one thread: its layers are small, and its weights then do not depend on the machine's."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.from_numpy(photo.pixels).permute(2, 0, 1)[None].float() / 255
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = Restorer()
        optimizer = torch.optim.AdamW(network.parameters(), lr=8e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
        for _ in range(steps):
            clean = torch.cat([_view(pixels, generator) for _ in range(BATCH)])
            factors = [DARK[0] + (DARK[1] - DARK[0]) * _random(generator) for _ in range(BATCH)]
            dark = torch.cat([darken(one[None], by, generator) for one, by in zip(clean, factors, strict=True)])
            optimizer.zero_grad()
            functional.l1_loss(network(dark), clean).backward()
            optimizer.step()
            schedule.step()
    finally:
        torch.set_num_threads(threads)
    return network.eval().requires_grad_(False)


def _random(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def _view(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """A part of the photograph, of any of its sizes from 12 % on, also mirrored."""
    share = 0.12 ** _random(generator)
    height, width = (max(1, int(side * share)) for side in pixels.shape[2:])
    top = int((pixels.shape[2] - height) * _random(generator))
    left = int((pixels.shape[3] - width) * _random(generator))
    part = pixels[:, :, top : top + height, left : left + width]
    view = functional.interpolate(part, VIEW, mode="bicubic", antialias=True).clamp(0, 1)
    return view.flip(3) if _random(generator) < 0.5 else view


def write_dark(photo: Photo, seed: int, out: np.ndarray) -> None:
    """Writes the photograph at its size, dark and with noise, into `out`, uint8 (1, 3, H, W), strip by strip."""
    generator = torch.Generator().manual_seed(seed + 1 if seed < 2**63 else seed)
    height, width = photo.size
    for top in range(0, height, STRIP_ROWS):
        rows = photo.crop(top, 0, min(STRIP_ROWS, height - top), width)
        clean = torch.tensor(rows).permute(2, 0, 1)[None].float() / 255
        out[:, :, top : top + rows.shape[0]] = darken(clean, SHOWN, generator).numpy()
