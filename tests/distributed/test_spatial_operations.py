"""Each kind of operation on parts of an image against one process, in float64: outputs, all gradients, all state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import needs_gloo
from support.spatial_cases import SHAPE, Apply, Cases, conv, whole, wrong
from torch import Tensor, nn

pytestmark = needs_gloo


def labels(classes: int, ignored: int | None = None) -> Tensor:
    found = torch.arange(2 * 13 * 11).mul(7).remainder(classes).view(2, 13, 11)
    if ignored is not None:
        found[0, :3] = ignored
    return found


def apply(function: Any, *shapes: tuple[int, ...]) -> Any:
    return lambda: nn.Sequential(conv(), Apply(function, *shapes))


def overwritten(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3] = x[:, :2].square()
    y[:, 0] = 0.5
    return y


class NextBlock(nn.Module):
    """ConvNeXt's: the norm and the linear layers on channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = conv(4, 4, 7, groups=4), nn.LayerNorm(4)
        self.wide, self.narrow = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(F.gelu(self.wide(self.norm(self.mix(x).permute(0, 2, 3, 1)))))
        return x + self.scale * y.permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Runs gathered, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2).transpose(1, 2)
        return x + self.heads(flat, flat, flat)[0].transpose(1, 2).reshape(x.shape)


def shuffled(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def elsewhere(x: Tensor) -> Tensor:
    """Both have 6 x 5 places, and are cut at different ones."""
    return F.max_pool2d(x, 2) * F.pad(x, (-3, -3, -7, 0)) + F.conv2d(x, whole(4, 4, 8, 7))


OPERATIONS: Cases = {
    "dropout": (apply(lambda x: F.dropout(x, 0.3, True)), SHAPE),
    "dropout off": (apply(lambda x: F.dropout(x, 0.3, False)), SHAPE),
    "dropout of nothing": (apply(lambda x: F.dropout(x, 0.0, True)), SHAPE),
    "dropout of all": (apply(lambda x: F.dropout(x, 1.0, True)), SHAPE),
    "dropout in place": (apply(lambda x: F.dropout(x * 1, 0.6, True, True)), SHAPE),
    "dropout twice": (apply(lambda x: F.dropout(F.dropout2d(x, 0.3), 0.3) + F.dropout(x, 0.2)), SHAPE),
    "dropout2d": (apply(lambda x: F.dropout2d(x, 0.5, True)), SHAPE),
    "dropout2d in place": (apply(lambda x: F.dropout2d(x * 1, 0.5, True, True)), SHAPE),
    "dropout2d of all": (apply(lambda x: F.dropout2d(x, 1.0, True)), SHAPE),
    "unbatched": (lambda: nn.Sequential(Apply(lambda x: x[0]), conv(), nn.ReLU(), nn.MaxPool2d(2)), SHAPE),
    "no images": (lambda: nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2)), (0, 4, 13, 11)),
    "mask": (apply(lambda x: x * (whole(13, 11) > 0) + x.masked_fill(whole(4, 13, 11) > 1, 0.5)), SHAPE),
    "scalar parameter": (apply(lambda x, a: x * a + a, ()), SHAPE),
    "embedding of places": (apply(lambda x, a: x + a, (1, 4, 13, 11)), SHAPE),
    "embedding of rows": (apply(lambda x, a: a * x, (13, 1)), SHAPE),
    "cut at different places": (apply(elsewhere), (2, 4, 13, 11)),
    "branches": (apply(lambda x: torch.cat([x, F.avg_pool2d(x, 3, 1, 1), F.conv2d(x, whole(2, 4, 1, 1))], 1)), SHAPE),
    "sum": (apply(lambda x: x.sum() * x.sum((0, 2)).square().sum()), SHAPE),
    "mean of rows": (apply(lambda x: x.mean(2) * 3), SHAPE),
    "mean of columns": (apply(lambda x: x.mean((1, 3), keepdim=True)), SHAPE),
    "amax": (apply(lambda x: x.amax((2, 3)) + x.amin((1, 2, 3), keepdim=True)[:, 0, 0] + x.max() * x.min()), SHAPE),
    "max over channels": (apply(lambda x: x.max(1, keepdim=True)[0] + x.amax(1, keepdim=True)), SHAPE),
    "softmax": (apply(lambda x: x.softmax(1) * F.log_softmax(x, dim=1)), SHAPE),
    "mse": (apply(lambda x: F.mse_loss(x, whole(*SHAPE))), SHAPE),
    "l1 summed": (apply(lambda x: F.l1_loss(x, whole(*SHAPE), reduction="sum")), SHAPE),
    "l1 of each": (apply(lambda x: F.smooth_l1_loss(x, whole(*SHAPE), reduction="none")), SHAPE),
    "bce": (apply(lambda x: nn.BCEWithLogitsLoss(pos_weight=whole(4, 1, 1).abs())(x, whole(*SHAPE).sigmoid())), SHAPE),
    "cross entropy": (apply(lambda x: F.cross_entropy(x, labels(4))), SHAPE),
    "cross entropy, all of it": (apply(lambda x: F.cross_entropy(x, labels(4, -100), whole(4).abs(),
                                                                 label_smoothing=0.2)), SHAPE),
    "cross entropy, 255 ignored": (apply(lambda x: F.cross_entropy(x, labels(4, 255), ignore_index=255)), SHAPE),
    "cross entropy, probabilities": (apply(lambda x: F.cross_entropy(x, whole(*SHAPE).softmax(1))), SHAPE),
    "cross entropy, summed": (apply(lambda x: F.cross_entropy(x, labels(4), reduction="sum")), SHAPE),
    "crops": (apply(lambda x: x[:, 1:, 2:-3, 1:] + x[..., 1:4, :-4, :-1][:, :, 1:]), SHAPE),
    "flatten and back": (apply(lambda x: x.flatten(0, 1).view(2, 4, 13, 11).reshape(8, 1, 13, 11)), SHAPE),
    "windows": (apply(lambda x: x.view(2, 4, 8, 2, 6, 2).permute(0, 3, 5, 1, 2, 4).flatten(1, 3)), (2, 4, 16, 12)),
    "moments by products": (
        apply(lambda x, w: torch.einsum("nchw,nc,dc->ndhw", x, torch.einsum("nchw,nchw->nc", x, x), w), (3, 4)),
        SHAPE,
    ),
    "channels by number": (apply(lambda x: x[:, [2, 0, 0]] * x.index_select(1, torch.tensor([1, 3, 3]))), SHAPE),
    "sorted channels": (apply(lambda x: x.sort(1)[0] + x.topk(1, 1).values), SHAPE),
    "unit columns, and moments": (
        apply(lambda x: torch.mul(*torch.var_mean(x, (2, 3), keepdim=True)) + F.normalize(x, dim=2)), SHAPE
    ),
    "written channels": (apply(overwritten), SHAPE),
    "ConvNeXt's block": (NextBlock, SHAPE),
    "layer norm of the image": (lambda: nn.Sequential(conv(), nn.LayerNorm([4, 13, 11])), SHAPE),
    "channel shuffle": (apply(shuffled), SHAPE),
    "attention": (lambda: nn.Sequential(conv(), Attention(), conv()), SHAPE),
    "pixel shuffle": (lambda: nn.Sequential(conv(), nn.PixelShuffle(2), nn.PixelUnshuffle(2)), SHAPE),
    "global pools": (lambda: nn.Sequential(conv(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 2)), SHAPE),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(conv()), SHAPE),
    "power pool": (apply(lambda x: F.lp_pool2d(x * x + 1, 2, 3, 2)), SHAPE),
    "convolution, called directly": (
        apply(lambda x, w: torch.convolution(x, w, None, [2, 1], [1, 1], [1, 1], False, [0, 0], 1), (4, 4, 3, 3)), SHAPE
    ),
    "words": (apply(lambda x, a: x * F.embedding((x * 3).long().abs().clamp(0, 9), a)[..., 1], (10, 2)), SHAPE),
    "alike channels": (apply(lambda x: F.cosine_similarity(x, x.roll(1, 1) + 1)), SHAPE),
    "masks": (apply(lambda x: x * ~(x > 0) + x.tile(1, 1, 1, 1).movedim((1, 2), (2, 1)).mT.sum((1, 2, 3))[0]), SHAPE),
    "a crop, then in place": (apply(lambda x: F.relu((x * 1)[:, :, 2:, 2:], inplace=True)), SHAPE),
}  # fmt: skip


CORNERS: Cases = {
    "mean of rows, spread again": (apply(lambda x: x - x.mean(3, keepdim=True) * x), SHAPE),
    "maximum of columns, spread again": (apply(lambda x: x * x.amax(2, keepdim=True)), SHAPE),
    "weighted mse": (apply(lambda x: F.mse_loss(x, whole(*SHAPE), weight=whole(*SHAPE).abs())), SHAPE),
    "weighted huber": (apply(lambda x: F.huber_loss(x, whole(*SHAPE), weight=whole(*SHAPE).abs())), SHAPE),
    "dropout2d of all in place": (apply(lambda x: F.dropout2d(x * 1, 1.0, True, True)), SHAPE),
    "dropout after one of all": (apply(lambda x: F.dropout(x, 1.0, True) + F.dropout(x, 0.5, True)), SHAPE),
    "amax of infinity": (apply(lambda x: x.masked_fill(x > x.detach().mean(), torch.inf).amax().clamp(max=9)), SHAPE),
    "batch norm of no images": (lambda: nn.BatchNorm2d(4), (0, 4, 13, 11)),
    "bilinear to the same size": (lambda: nn.Upsample(scale_factor=1.05, mode="bilinear"), SHAPE),
    "nearest to the same size": (lambda: nn.Upsample(scale_factor=1.05, mode="nearest"), SHAPE),
    "narrow from the end": (apply(lambda x: x.narrow(1, -2, 2) + x.narrow(1, 0, 2)), SHAPE),
    "maximum of integers": (apply(lambda x: x * (1 + x.long().amax().is_floating_point())), SHAPE),
    "variance of all": (apply(lambda x: x * x.var() + x.std(1, keepdim=True)), SHAPE),
    "variance of rows and columns": (apply(lambda x: x / (1 + x.var((2, 3), keepdim=True, unbiased=False))), SHAPE),
    "norms": (apply(lambda x: x * x.norm() + torch.linalg.vector_norm(x, dim=(2,), keepdim=True)), SHAPE),
    "any and all": (apply(lambda x: x * (1 + (x > 0).any().double() + (x > -9).all(3, keepdim=True).double())), SHAPE),
    "every second row": (apply(lambda x: x[:, :, 1::2, ::3] + x[:, :, :-1:2, ::3]), SHAPE),
    "expand": (apply(lambda x: x.mean(1, keepdim=True).expand(-1, 4, -1, -1) + x.expand_as(x)), SHAPE),
    "variation": (apply(lambda x: x.diff(dim=2).abs().mean() + torch.diff(x, 2).square().mean() + x.diff(dim=1).sum()),
                  SHAPE),
    "differences to other channels": (apply(lambda x: x.diff(2, 1, x[:, 1:2] * 2, append=x[:, :1])), SHAPE),
    "roll of channels": (apply(lambda x: x.roll(1, 1)), SHAPE),
    "mean by axis": (apply(lambda x: x.mean(axis=1)), SHAPE),
    "cross entropy, 255 ignored, weights": (
        apply(lambda x: F.cross_entropy(x, labels(4, 255), whole(4).abs(), ignore_index=255)), SHAPE),
    "chunk by keyword": (apply(lambda x: x.chunk(chunks=2, dim=1)[0]), SHAPE),
    "the type's name": (apply(lambda x: x if x.type() == "torch.DoubleTensor" else x * 2), SHAPE),
}  # fmt: skip


@pytest.mark.parametrize("mesh", ["2 rows", "2x2"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(mesh: str, name: str) -> None:
    found = wrong("test_spatial_operations:OPERATIONS", mesh, tuple(OPERATIONS), name)
    assert not found, found


@pytest.mark.parametrize("name", CORNERS)
def test_corners(name: str) -> None:
    found = wrong("test_spatial_operations:CORNERS", "2x2", tuple(CORNERS), name)
    assert not found, found


ROWS: Cases = {
    "windows as columns": (apply(lambda x: F.unfold(x, 3, padding=1, stride=(2, 1)).square()), SHAPE),
    "and back": (apply(lambda x: F.fold(F.unfold(x, (3, 2), padding=1) * 2, SHAPE[2:], (3, 2), padding=1)), SHAPE),
    "every third": (apply(lambda x: F.fold(F.unfold(x, 2, stride=3).tanh(), SHAPE[2:], 2, stride=3)), SHAPE),
}


@pytest.mark.parametrize("name", ROWS)
def test_of_rows_alone(name: str) -> None:
    found = wrong("test_spatial_operations:ROWS", "2 rows", tuple(ROWS), name)
    assert not found, found
