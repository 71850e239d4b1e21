"""What bench.xray trains: a DenseNet with several heads, and the pictures it is trained on.

The network is DenseNet-169 with one channel in and three heads of two findings each; smaller ones differ in numbers
alone. It is one nn.Sequential, so that a stage of a pipeline is a slice of it. Pictures are drawn, not random: a chest
of two lungs between ribs, a spine and a heart, brighter towards one side; findings are what was drawn besides, and the
same number gives the same picture at every size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = {"lungs": ("nodule", "effusion"), "heart": ("enlarged", "pacemaker"), "bones": ("fracture", "dense")}
FINDINGS = sum(len(names) for names in HEADS.values())


@dataclass(frozen=True)
class Net:
    """Numbers of a DenseNet: layers of each block, channels that a layer adds, channels of the stem."""

    blocks: tuple[int, ...]
    growth: int
    stem: int

    @property
    def depth(self) -> int:
        """As in its name: convolutions and the last linear layer."""
        return 2 * sum(self.blocks) + len(self.blocks) + 1


NETS = {"full": Net((6, 12, 32, 32), 32, 64), "small": Net((4, 8, 8, 4), 16, 32), "tiny": Net((2, 3), 8, 16)}


Run = Callable[..., Tensor]


def plain(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    return fn(*args)


class DenseLayer(nn.Module):
    """torchvision's, but that it takes features one by one: a list that grows later would be another one when a
    checkpoint runs again. run: how the bottleneck is run.
    """

    def __init__(self, channels: int, growth: int, run: Run = plain) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

        self.run = run

    def bottleneck(self, *features: Tensor) -> Tensor:
        return self.conv1(F.relu(self.norm1(torch.cat(features, 1))))

    def forward(self, *features: Tensor) -> Tensor:
        return self.conv2(F.relu(self.norm2(self.run(self.bottleneck, *features))))


class DenseBlock(nn.Module):
    def __init__(self, channels: int, layers: int, growth: int, run: Run = plain) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + i * growth, growth, run) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, 1)


class Heads(nn.Module):
    """A linear classifier for each head; their logits in a row."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(channels, len(of)) for name, of in HEADS.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads.values()], 1)


def network(net: Net) -> nn.Sequential:
    """The same parameters every time."""
    torch.manual_seed(0)
    channels = net.stem
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv0=nn.Conv2d(1, channels, 7, stride=2, padding=3, bias=False),
        norm0=nn.BatchNorm2d(channels),
        relu0=nn.ReLU(inplace=True),
        pool0=nn.MaxPool2d(3, stride=2, padding=1),
    )
    for i, layers in enumerate(net.blocks, 1):
        parts[f"block{i}"] = DenseBlock(channels, layers, net.growth)
        channels += layers * net.growth
        if i < len(net.blocks):
            parts[f"transition{i}"] = nn.Sequential(
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels, channels // 2, 1, bias=False),
                nn.AvgPool2d(2),
            )
            channels //= 2
    parts |= {"norm5": nn.BatchNorm2d(channels), "relu5": nn.ReLU(inplace=True)}
    parts |= {"pool5": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "heads": Heads(channels)}
    model = nn.Sequential(parts)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model


def stages(model: nn.Sequential) -> tuple[nn.Sequential, nn.Sequential]:
    """Two stages of a pipeline, cut behind the first block: before it lies about a third of what is kept for backward,
    but the first stage keeps it of two micro-batches at once, the second of one at a time.
    """
    names = list(model._modules)
    at = names.index("transition1") + 1
    every = list(model.named_children())
    return nn.Sequential(OrderedDict(every[:at])), nn.Sequential(OrderedDict(every[at:]))


def loss(logits: Tensor, findings: Tensor) -> Tensor:
    """Of each head the mean over its findings; heads have as many each, so that this is the mean of their means."""
    return F.binary_cross_entropy_with_logits(logits, findings.to(logits.dtype))


# ----------------------------------------------------------------------------------------------------------------------
# Batch norm over all ranks


class _SyncedBatchNorm(nn.BatchNorm2d):
    """nn.SyncBatchNorm for the CPU, for which torch has none: moments of the whole batch, by sums over the ranks."""

    group: Any = None

    def forward(self, input: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce

        x = input
        count = x.numel() // x.shape[1] * dist.get_world_size(self.group)
        # The mean first: a difference of means of squares would lose what rounding leaves of a small variance.
        mean = all_reduce(x.sum((0, 2, 3)), group=self.group) / count
        centred = x - mean[None, :, None, None]
        var = all_reduce(centred.square().sum((0, 2, 3)), group=self.group) / count
        with torch.no_grad():
            assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return centred * scale[None, :, None, None] + self.bias[None, :, None, None]


def synced(model: nn.Module, group: Any, device: str) -> nn.Module:
    """Batch norms that see the batch of all ranks of the group."""
    if device == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = _SyncedBatchNorm
            module.group = group
    return model


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


def radiograph(number: int, side: int) -> tuple[Tensor, Tensor]:
    """A picture, uint8 [side, side], and its findings, of uint8 too, in the order of HEADS."""
    made = torch.Generator().manual_seed(7919 * number + 17)
    findings = torch.randint(0, 2, (FINDINGS,), generator=made, dtype=torch.uint8)
    a = torch.rand(16, generator=made).tolist()  # what differs from patient to patient
    nodule, effusion, enlarged, pacemaker, fracture, dense = findings.tolist()
    y = torch.linspace(-1, 1, side)[:, None]
    x = torch.linspace(-1, 1, side)[None, :]

    def blob(cx: float, cy: float, rx: float, ry: float, soft: float = 0.15) -> Tensor:
        """1 inside of an ellipse, 0 outside, with a soft rim."""
        distance = (((x - cx) / rx).square() + ((y - cy) / ry).square()).sqrt_()
        return distance.sub_(1).div_(-soft).sigmoid_()

    body = blob(0, 0.15, 0.95, 1.2, 0.05)
    picture = (0.45 + 0.1 * (a[0] - 0.5) * x + 0.12 * y) * body
    lungs = (blob(-0.42, 0, 0.32, 0.62) + blob(0.42, 0, 0.32, 0.62)).clamp_(0, 1)
    picture -= (0.3 - 0.1 * dense * (0.5 + 0.5 * torch.sin(9 * x + 7 * y + 6 * a[1]))) * lungs
    # Ribs: arcs that sink towards the sides; a fracture is a gap in one, with its ends apart.
    gap = blob(0.45 * (1 if a[2] > 0.5 else -1), -0.4 + 0.5 * a[3], 0.06, 0.12, 0.05) if fracture else 0 * x
    arcs = torch.cos((13 + 2 * a[4]) * (y - 0.35 * x.square() + 0.06 * gap)) - 0.75
    picture += 0.16 * (arcs * 9).sigmoid_() * body * (1 - gap) * ((x.abs() - 0.12) * 20).sigmoid()
    picture += 0.25 * blob(0, 0.1, 0.07, 1.3)  # the spine
    size = 0.24 + 0.03 * a[5] + 0.12 * enlarged
    picture += 0.28 * blob(0.12, 0.28, size, size * 1.1)
    if nodule:
        picture += 0.22 * blob((a[6] - 0.5) * 0.3 - 0.42, (a[7] - 0.5) * 0.7, 0.05, 0.05)
    if effusion:  # fluid: the base of a lung is filled up to a level
        level = 0.25 + 0.15 * a[8]
        picture += 0.3 * ((y - level) * 25 - 4 * (x - 0.42).square()).sigmoid() * blob(0.42, 0.1, 0.33, 0.6)
    if pacemaker:
        box = ((x + 0.45).abs() < 0.09) & ((y + 0.5 + 0.1 * a[9]).abs() < 0.07)
        wire = ((y + 0.5 - 0.9 * (x + 0.45)).abs() < 0.012) & (x > -0.45) & (x < 0.1)
        picture = torch.where(box | wire, torch.ones(()), picture)
    return picture.clamp_(0, 1).mul_(255).to(torch.uint8), findings


def radiographs(first: int, count: int, side: int) -> tuple[Tensor, Tensor]:
    """uint8 [count, 1, side, side], and findings [count, FINDINGS]."""
    pairs = [radiograph(first + i, side) for i in range(count)]
    return torch.stack([picture for picture, _ in pairs])[:, None], torch.stack([found for _, found in pairs])


def to_input(pictures: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    return pictures.to(device=device, dtype=dtype).div_(128).sub_(1)
