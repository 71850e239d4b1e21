"""Trains a segmentation network on whole images of many megapixels, in a given memory.

    python train_megapixels.py                                   # 50 megapixels; the process grows by less than 2 GiB
    python train_megapixels.py --side 512 --budget 64MiB --picture discs.png

Each step, its batch norms and its loss are of the whole image. Images are made up: discs on a noisy ground.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchconv_native as pc


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Segmenter(nn.Module):
    """Takes bytes, and ends in its loss: no gradient of the image's size is ever there."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(block(3, 16, stride=2), block(16, 16, stride=2), block(16, 32), block(32, 32))
        self.head = nn.Conv2d(32, 2, 1)

    def logits(self, x: Tensor) -> Tensor:
        return F.interpolate(self.head(self.down(x / 255)), scale_factor=4.0, mode="bilinear")

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), target[:, 0].long())


def image(side: int) -> tuple[Tensor, Tensor]:
    """(1, 3, side, side) and (1, 1, side, side), made in parts, which take little memory."""
    x, target = torch.empty(1, 3, side, side, dtype=torch.uint8), torch.empty(1, 1, side, side, dtype=torch.uint8)
    discs, at = torch.rand(20, 3).tolist(), torch.arange(side) / side
    for rows in (slice(first, first + 64) for first in range(0, side, 64)):
        inside = [(at[rows, None] - y) ** 2 + (at - x) ** 2 < (0.02 + 0.06 * r) ** 2 for y, x, r in discs]
        target[0, 0, rows] = torch.stack(inside).any(0)
        x[0, :, rows] = (50 * torch.randn(3, *inside[0].shape) + 75 + 75 * target[0, :, rows]).clamp(0, 255)
    return x, target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", type=int, default=7072)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget", default="1.25GiB")
    parser.add_argument("--picture", help="a file for another image and what the network says of it")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Segmenter()
    pc.tile_modules(model, "", arguments.budget)  # every call of it from here on
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(arguments.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(*image(arguments.side))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - start:.1f} s", flush=True)
    if arguments.picture:
        from PIL import Image

        x, target = image(arguments.side)
        with torch.no_grad():
            found = pc.tile(lambda x: model.logits(x).argmax(1, keepdim=True).byte(), x, budget=arguments.budget)
        shown = torch.cat([x[0], *(255 * part[0].expand(3, -1, -1) for part in (target, found))], 2).permute(1, 2, 0)
        every = max(1, arguments.side // 512)
        Image.fromarray(shown[::every, ::every].numpy()).save(arguments.picture)


if __name__ == "__main__":
    main()
