"""The mistakes that spatial parallelism is known for, each as a model on which it shows: several ranks against one
process, in float64, on images with slopes and on noise; outputs, all gradients, all state.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.ranks import needs_gloo
from support.spatial_cases import MESHES, ODD, SHAPE, Apply, Cases, conv, whole, wrong
from torch import nn

pytestmark = needs_gloo

MISTAKES: Cases = {
    "halo rows' gradient dropped": (lambda: nn.Sequential(conv(), conv(k=5)), SHAPE),
    "overlapping max pool": (lambda: nn.Sequential(conv(), nn.MaxPool2d(3, 2, 1)), SHAPE),
    "overlapping average pool": (lambda: nn.Sequential(conv(), nn.AvgPool2d(3, 1, 1)), SHAPE),
    "variance about each rank's mean": (lambda: nn.Sequential(nn.BatchNorm2d(4), conv()), SHAPE),
    "group norm of a part": (lambda: nn.Sequential(conv(), nn.GroupNorm(2, 4)), SHAPE),
    "instance norm of a part": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), SHAPE),
    "bilinear at the seam": (lambda: nn.Sequential(conv(), nn.Upsample(scale_factor=2, mode="bilinear")), SHAPE),
    "bilinear to corners": (lambda: nn.Upsample(size=(20, 9), mode="bilinear", align_corners=True), SHAPE),
    "uneven heights": (lambda: nn.Sequential(conv(3, 3), conv(3, 3, stride=2)), (1, 3, 15, 14)),
    "bias=False": (lambda: nn.Sequential(conv(bias=False), nn.BatchNorm2d(4), conv(bias=False)), SHAPE),
    "bias counted once a rank": (lambda: nn.Sequential(conv(), conv(k=1)), (3, 4, 9, 8)),
    "halo wider than a part": (lambda: nn.Sequential(conv(3, 2, 9), conv(2, 2, 3, dilation=4, padding=4)),
                               (1, 3, 6, 7)),
    "odd sizes with stride 2": (lambda: nn.Sequential(conv(3, 4, stride=2), conv(stride=2), conv(k=5)), ODD),
    "reflect padding": (lambda: conv(padding_mode="reflect"), SHAPE),
    "circular padding": (lambda: conv(padding_mode="circular", k=5), SHAPE),
    "padding wider than a part": (lambda: nn.Conv2d(4, 3, 13, padding=12), (1, 4, 5, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 3, 2, 1, 1), SHAPE),
    "transposed with gaps": (lambda: nn.ConvTranspose2d(4, 3, 2, 5, output_padding=4), SHAPE),
    "residual, gradient of two ways": (lambda: Apply(lambda x: x + F.conv2d(x, whole(4, 4, 3, 3), padding=1)), SHAPE),
    "batch norm of one image": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(4, momentum=None)), (1, 4, 13, 11)),
    "ReLU in place": (lambda: nn.Sequential(conv(), nn.ReLU(True), conv(), nn.BatchNorm2d(4), nn.ReLU(True)), SHAPE),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(mesh: str, name: str) -> None:
    found = wrong("test_spatial:MISTAKES", mesh, tuple(MISTAKES), name)
    assert not found, found


# Layouts: what is sent has the receiver's layout too.
LAYOUTS: Cases = {
    "channels last": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv()).to(
        memory_format=torch.channels_last), SHAPE),
    "channels last, dropout": (
        lambda: nn.Sequential(
            conv(), Apply(lambda x: F.dropout(x.contiguous(memory_format=torch.channels_last), 0.3))), SHAPE),
    "channels last, a crop": (lambda: nn.Sequential(
        Apply(lambda x: x.contiguous(memory_format=torch.channels_last)[:, :, 2:, 3:]), conv()), SHAPE),
    "channels last, one column": (lambda: nn.Sequential(
        Apply(lambda x: x.contiguous(memory_format=torch.channels_last)), nn.Conv2d(4, 4, (5, 1), padding=(2, 0))),
        (1, 4, 3, 1)),
}  # fmt: skip


@pytest.mark.parametrize("mesh", ["2 rows", "2x2"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_channels_last(mesh: str, name: str) -> None:
    if name == "channels last, one column" and mesh == "2x2":
        pytest.skip("a column for each of two ranks is needed")
    found = wrong("test_spatial:LAYOUTS", mesh, (name,), name)
    assert not found, found
