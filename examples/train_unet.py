"""Trains a U-Net on images that do not fit: convert it, add checkpoints by hand, or let `pc.plan` choose.

python train_unet.py --side 512 --budget 1GiB      # pc.plan chooses what to turn on
python train_unet.py --side 512 --checkpoint       # the blocks are checkpoints, the rest is converted
python train_unet.py --side 512 --stock            # stock PyTorch
"""

import argparse
import itertools

import torch
from torch import nn

import patchconv_native as pc


class Block(nn.Sequential):
    """Two convolutions with batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers = [(nn.Conv2d(c, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()) for c in (inputs, outputs)]
        super().__init__(*itertools.chain.from_iterable(layers))


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block(c, w) for c, w in itertools.pairwise((3, *widths)))
        wide = widths[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(c, w, 2, stride=2) for c, w in itertools.pairwise(wide))
        self.join = nn.ModuleList(Block(2 * w, w) for w in wide[1:])
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = join(torch.cat([up(x), skip], 1))
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--budget", help="of a whole step, such as 1GiB")
    how.add_argument("--checkpoint", action="store_true")
    how.add_argument("--stock", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = UNet()
    images = torch.rand(arguments.batch, 3, arguments.side, arguments.side)
    labels = (images.mean(1) > 0.5).long()
    if arguments.budget:
        plan = pc.plan(model, images, budget=arguments.budget, optimizer=torch.optim.AdamW)
        print(plan)
        plan.apply(model)
    elif not arguments.stock:
        pc.convert(model)
        if arguments.checkpoint:
            pc.checkpoint_modules(model, Block)

    print(f"peak of a step: {pc.memory.trace(model, images, optimizer=torch.optim.AdamW).peak / 2**20:.0f} MiB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
