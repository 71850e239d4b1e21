"""Random chains of layers for `spatial`, and a step on one process to hold them against."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y + x if y.shape == x.shape else y


class Branches(nn.Module):
    """Two ways of the same output size, joined along the channels."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


class Gate(nn.Module):
    """Squeeze and excite: a global pool's result, the same everywhere, times the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(self.pool(x)).sigmoid()


class Bias(nn.Module):
    """A parameter of the whole image's size."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value


def structured(shape: tuple[int, ...]) -> Tensor:
    """A vertical and a horizontal slope, stripes, and a little noise: parts differ much from each other. Of a volume,
    each layer is another multiple of that; a signal is one row.
    """
    n, c, *depth, h, w = shape if len(shape) > 3 else (*shape[:2], 1, *shape[2:])
    rows, columns = torch.linspace(0, 5, h).view(-1, 1), torch.linspace(-2, 1, w)
    base = rows.square() + columns + (rows * 7).sin()
    for size in depth:
        base = base * torch.linspace(1, 3, size).view(-1, 1, 1)
    scales = torch.linspace(0.5, 2, n * c).view(n, c, *[1] * base.dim())
    return (base.expand(n, c, *base.shape).double() * scales).view(shape) + 0.1 * torch.randn(shape)


def _layer(r: random.Random, channels: int, size: tuple[int, int]) -> tuple[nn.Module, int]:
    least = min(size)
    kind = r.choice([
        "conv", "conv", "conv", "strided", "transposed", "max", "avg", "up", "batch", "group", "instance", "act", "act",
        "residual", "branches", "gate", "bias", "pad", "shuffle", "adaptive", "mode", "unshuffle",
    ])  # fmt: skip
    out = r.choice([2, 4, 6])
    if kind in ("conv", "mode"):
        k, d = (r.randint(1, 5), r.randint(1, 5)), r.randint(1, 2)
        mode = r.choice(["reflect", "replicate", "circular"]) if kind == "mode" else "zeros"
        most = [min((e - 1) * d, least - 1 if mode != "zeros" else 9) for e in k]
        p = tuple(r.randint((e - 1) * d // 2 if m > (e - 1) * d // 2 else m, m) for e, m in zip(k, most, strict=True))
        g = r.choice([1, 1, 2]) if channels % 2 == 0 else 1
        return nn.Conv2d(channels, out, k, 1, p, d, g, r.random() < 0.7, mode), out
    if kind == "strided":
        k = r.randint(1, 5)
        return nn.Conv2d(channels, out, k, (r.randint(1, 3), r.randint(1, 3)), k // 2), out
    if kind == "transposed":
        k, s = r.randint(1, 4), r.randint(1, 3)
        return nn.ConvTranspose2d(channels, out, k, s, r.randint(0, (k - 1) // 2), r.randint(0, s - 1)), out
    if kind == "max":
        k = r.randint(2, 4)
        return nn.MaxPool2d(k, r.choice([1, 2, 2, k]), r.randint(0, k // 2), ceil_mode=r.random() < 0.4), channels
    if kind == "avg":
        k = r.randint(2, 4)
        return nn.AvgPool2d(k, r.choice([1, 2, k]), r.randint(0, k // 2), r.random() < 0.4, r.random() < 0.5), channels
    if kind == "up":
        mode = r.choice(["nearest", "bilinear", "bicubic", "nearest-exact"])
        align = {"align_corners": r.random() < 0.5} if mode.startswith("bi") else {}
        if r.random() < 0.5:
            return nn.Upsample(scale_factor=r.choice([2, 1.5, 2.3, 0.7]), mode=mode, **align), channels
        return nn.Upsample(size=(r.randint(8, 24), r.randint(8, 24)), mode=mode, **align), channels
    if kind == "batch":
        return nn.BatchNorm2d(channels, momentum=r.choice([0.1, None]), affine=r.random() < 0.8), channels
    if kind == "group":
        return nn.GroupNorm(r.choice([1, channels, 2 - channels % 2]), channels), channels
    if kind == "instance":
        return nn.InstanceNorm2d(channels, affine=r.random() < 0.5, track_running_stats=r.random() < 0.5), channels
    if kind == "act":
        return r.choice([nn.ReLU(), nn.ReLU(inplace=False), nn.SiLU(), nn.GELU(), nn.LeakyReLU(0.2), nn.Hardswish(),
                         nn.PReLU(channels), nn.Softplus()]), channels  # fmt: skip
    if kind == "residual":
        k = r.choice([3, 5])
        return Residual(nn.Sequential(nn.Conv2d(channels, channels, k, padding=k // 2), nn.ReLU())), channels
    if kind == "branches":
        s = r.randint(1, 2)
        left, right = nn.Conv2d(channels, 2, 3, s, 1), nn.Conv2d(channels, 2, r.choice([1, 5]), s)
        right.padding = (right.kernel_size[0] // 2,) * 2
        return Branches(left, right), 4
    if kind == "gate":
        return Gate(channels), channels
    if kind == "bias":
        return Bias((1, channels, 1, 1) if r.random() < 0.3 else (channels, *size)), channels
    if kind == "pad":
        pads = [r.randint(0, min(2, least - 1)) for _ in range(4)]
        return r.choice([nn.ZeroPad2d(pads), nn.ReflectionPad2d(pads), nn.ReplicationPad2d(pads),
                         nn.CircularPad2d(pads), nn.ConstantPad2d(pads, 1.5)]), channels  # fmt: skip
    if kind == "shuffle" and channels % 4 == 0:
        return nn.PixelShuffle(2), channels // 4
    if kind == "unshuffle" and size[0] % 2 == 0 and size[1] % 2 == 0 and channels < 4:
        return nn.PixelUnshuffle(2), channels * 4
    if kind == "adaptive":
        return r.choice([nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])((r.randint(5, 9), r.randint(5, 9))), channels
    return nn.Identity(), channels


def chain(seed: int, ranks: int, dims: str) -> tuple[nn.Module, Tensor]:
    """A model and an image, float64. No layer's output has fewer rows or columns than `ranks`, with some to spare."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    shape = (r.choice([1, 2]), 3, r.randint(9, 25), r.randint(9, 25))
    image = structured(shape) if seed % 2 else torch.randn(shape).double()
    layers, channels, x = nn.Sequential(), 3, image
    while len(layers) < 6:
        try:
            layer, made = _layer(r, channels, (x.size(2), x.size(3)))
            layer = layer.double()
            with torch.no_grad():
                y = copy.deepcopy(layer)(x)
        except (RuntimeError, ValueError):
            continue
        if min(y.shape[2:]) < ranks + 1 or y.numel() > 30000:
            continue
        layers.append(layer)
        channels, x = made, y
    if r.random() < 0.3:
        layers.append(r.choice([nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)]))
        layers.append(nn.Flatten())
        layers.append(nn.Linear(channels, 3).double())
    layers.train(r.random() < 0.8)
    if r.random() < 0.5:
        pc.convert(layers)
    return layers, image


def step(model: nn.Module, image: Tensor, forward: Any, seed: int) -> dict[str, Any]:
    """Output, gradients and state after one pass, by names. `forward` gives the whole output."""
    torch.manual_seed(seed)
    image = image.clone().requires_grad_()
    y = forward(model, image)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    (y * weights).sum().backward()
    found = {"output": y.detach(), "input": image.grad}
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters()}
    return found | {f"state {name}": value.detach().clone() for name, value in model.state_dict().items()}


def differences(got: dict[str, Any], want: dict[str, Any], tolerance: float = 1e-9) -> list[str]:
    """What is not the same to rounding: relative to the largest of all values of its kind."""
    wrong = [] if got.keys() == want.keys() else [f"names {sorted(got.keys() ^ want.keys())}"]
    largest = {kind: max((float(v.double().abs().max()) for k, v in want.items()
                          if v is not None and v.numel() and k.split()[0] == kind), default=0.0)
               for kind in {k.split()[0] for k in want}}  # fmt: skip
    for name in got.keys() & want.keys():
        a, b = got[name], want[name]
        if (a is None) != (b is None) or (a is not None and a.shape != b.shape):
            wrong.append(
                f"{name}: {None if a is None else tuple(a.shape)}, not {None if b is None else tuple(b.shape)}"
            )
        elif a is not None and a.numel():
            off = float((a.double() - b.double()).abs().max())
            if not off <= tolerance * max(largest[name.split()[0]], 1e-3):
                wrong.append(f"{name}: off by {off:.3g} of {largest[name.split()[0]]:.3g}")
    return wrong


class Unknown(torch.autograd.Function):
    """What tiles do not serve."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2
