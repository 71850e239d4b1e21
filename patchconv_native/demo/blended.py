"""The usual way to run a network on a large image: tile after tile alone, blended linearly where they overlap.

As diffusers' enable_tiling does, a quarter of a tile overlaps the next. A norm over the image then sees one tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LARGEST_SIDE = 1024


def tile_side(size: tuple[int, int]) -> int:
    """About an eighth of the picture's width, a multiple of 32, up to LARGEST_SIDE."""
    return max(64, min(LARGEST_SIDE, size[1] // 8 // 32 * 32))


def overlap(side: int) -> int:
    return side // 4


def blend(network: nn.Module, image: Any, out: Any, side: int, device: str = "cpu") -> None:
    """Writes network(image) into `out`, which holds zeros, one tile of side x side after another."""
    height, width = image.shape[2:]
    lap = overlap(side)
    for top in _starts(height, side):
        for left in _starts(width, side):
            tile = torch.from_numpy(image[:, :, top : top + side, left : left + side].copy()).to(device)
            values = network(tile).cpu()
            down = _ramps(values.shape[2], lap, top == 0, top + side >= height)
            across = _ramps(values.shape[3], lap, left == 0, left + side >= width)
            out[:, :, top : top + side, left : left + side] += (values * down[:, None] * across).numpy()


def _starts(size: int, side: int) -> range:
    lap = overlap(side)
    return range(0, max(1, size - lap), side - lap)


def _ramps(size: int, lap: int, first: bool, last: bool) -> Tensor:
    """The weights of a tile's rows: those of two tiles that overlap add up to 1."""
    weights = torch.ones(size)
    rising = (torch.arange(lap) + 0.5) / lap
    if not first:
        weights[:lap] = rising
    if not last:
        weights[-lap:] = rising.flip(0)
    return weights
