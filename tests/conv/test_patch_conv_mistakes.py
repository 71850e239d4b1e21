"""Mistakes found in patch_conv, the package whose job this one does: wrong shapes, and errors that need not be.

patch_conv splits rows when a tensor is very large, so most of its faults show at sizes its tests never reach. Here the
splits are forced and the path is asserted: a test that does not tile fails. What it does to modules, their names and
their state is tested with convert (tests/layers/test_convert.py).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.gradients import graded
from torch import nn

import patchconv_native as pc

# What it got wrong, the convolution's options, the image's size, splits.
CASES: list[tuple[str, dict[str, Any], tuple[int, ...], Any]] = [
    *(("stride", {"stride": n, "padding": 1}, (1, 4, height, 20), 4) for n in (2, 3, 5) for height in (31, 32, 33)),
    *(("wide padding", {"kernel_size": k, "padding": p}, (1, 4, 32, 20), 4)
      for k, p in ((3, 2), (5, 1), (7, 2), (4, 2), (3, 5))),
    *(("dilation", {"dilation": n, "padding": p}, (1, 4, 32, 20), 4) for n in (2, 3) for p in (0, 2, 6)),
    *(("no padding", {"kernel_size": k}, (1, 4, 32, 20), 4) for k in (1, 2, 3, 5)),
    *(("same", {"kernel_size": k, "padding": "same"}, (1, 4, 32, 20), 4) for k in (3, 4, 5)),
    *(("padding mode", {"kernel_size": 5, "padding": 2, "padding_mode": mode}, (1, 4, 32, 20), 4)
      for mode in ("reflect", "replicate", "circular")),
    *(("heights that do not divide", {"padding": 1}, (1, 4, height, 20), 4) for height in (29, 30, 31, 33)),
    *(("strips shorter than the halo", {"kernel_size": 15, "padding": 7}, (1, 4, 32, 20), n) for n in (16, 32)),
    ("unbatched", {"padding": 1}, (4, 32, 20), 4),
    *(("rows only", {"padding": 1}, (1, 4, 8, 101), splits) for splits in ((1, 4), (3, 5))),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("mistake", "options", "size", "splits"), CASES)
def test_what_it_got_wrong(mistake: str, options: dict[str, Any], size: tuple[int, ...], splits: Any) -> None:
    """A converted layer gives stock's shape and numbers, forward and backward, and is tiled."""
    stock = nn.Conv2d(4, 5, **{"kernel_size": 3} | options).double()
    layer = pc.convert_model(copy.deepcopy(stock), splits=splits)
    image = (torch.randn(size) + 3 * torch.linspace(-1, 1, size[-2]).view(-1, 1)).double()
    with pc.record_paths() as records:
        found = graded(layer, image.requires_grad_())
    assert len(records) == 3 and {r["path"] for r in records} == {"tiled"}, records
    torch.testing.assert_close(found, graded(stock, image))
