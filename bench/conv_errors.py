"""Errors of a convolution at probed places: float64 values of a few places cost little, however large the tensors.

Places are corners, places by chance, and those around the 2^31st and the 2^32nd element of the larger tensor, in its
order in memory. A forward pass is probed for all outputs of a place, the input's gradient for all channels of one, the
weight's gradient at a few taps, each a product of two planes.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import patchconv_native as pc

from .cases import UNIT, backend
from .conv_cases import ConvJob

MARKS = (2**31, 2**32)


def places(size: tuple[int, int, int, int], layout: str, count: int = 24) -> list[tuple[int, int, int]]:
    """(image, row, column) of some places of a tensor."""
    images, channels, height, width = size
    chance = random.Random(5)
    found = [(0, 0, 0), (images - 1, height - 1, width - 1), (0, height - 1, 0), (images - 1, 0, width - 1)]
    for mark in MARKS:
        if mark < images * channels * height * width:
            plane = mark // channels if layout == "channels_last" else mark % (height * width)
            image = mark // (channels * height * width)
            row, column = plane % (height * width) // width, plane % width
            near = ((row, column), (row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
            found += [(image, r, c) for r, c in near if 0 <= r < height and 0 <= c < width]
    while len(found) < count:
        found.append((chance.randrange(images), chance.randrange(height), chance.randrange(width)))
    return found


def forward(job: ConvJob, x: Tensor, weight: Tensor, bias: Tensor | None, where: list[tuple[int, int, int]]) -> Tensor:
    """Exact outputs, (places, outputs), with ReLU if there is a bias."""
    return torch.stack([_forward_at(job, x, weight.double(), bias, place) for place in where])


def _forward_at(job: ConvJob, x: Tensor, weight: Tensor, bias: Tensor | None, place: tuple[int, int, int]) -> Tensor:
    image, row, column = place
    window, pad = [], []
    for at, size in ((row, job.height), (column, job.width)):
        begin = at * job.stride - job.padding
        low, high = max(0, begin), min(size, begin + job.kernel)
        window.append(slice(low, high))
        pad.append((low - begin, begin + job.kernel - high))
    patch = F.pad(x[image, :, window[0], window[1]].double(), (*pad[1], *pad[0]))
    y = F.conv2d(patch[None], weight, groups=job.groups).view(-1)
    return y if bias is None else (y + bias.double()).relu()


def input_gradient(job: ConvJob, grad: Tensor, weight: Tensor, where: list[tuple[int, int, int]]) -> Tensor:
    """Exact gradients of the input, (places, channels), for a gradient of the convolution's output."""
    return torch.stack([_gradient_at(job, grad, weight.double(), place) for place in where])


def _gradient_at(job: ConvJob, grad: Tensor, weight: Tensor, place: tuple[int, int, int]) -> Tensor:
    image, row, column = place
    share = job.outputs // job.groups
    total = torch.zeros(job.groups, job.channels // job.groups, dtype=torch.float64, device=grad.device)
    for r in range(job.kernel):
        for s in range(job.kernel):
            down, across = row + job.padding - r, column + job.padding - s
            if down % job.stride or across % job.stride:
                continue
            p, q = down // job.stride, across // job.stride
            if 0 <= p < grad.shape[2] and 0 <= q < grad.shape[3]:
                values = grad[image, :, p, q].double().view(job.groups, 1, share)
                total += (values @ weight[:, :, r, s].view(job.groups, share, -1)).squeeze(1)
    return total.view(-1)


def taps(job: ConvJob, count: int = 6) -> list[tuple[int, int, int, int]]:
    """Some elements of the weight."""
    chance = random.Random(6)
    corners = [(0, 0, 0, 0), tuple(n - 1 for n in job.weight_size)]
    return [*corners, *(tuple(map(chance.randrange, job.weight_size)) for _ in range(count - 2))]  # type: ignore[list-item]


def weight_gradient(job: ConvJob, x: Tensor, grad: Tensor, where: list[tuple[int, int, int, int]]) -> Tensor:
    """Exact elements of the weight's gradient."""
    return torch.stack([_weight_at(job, x, grad, *place) for place in where])


def _weight_at(job: ConvJob, x: Tensor, grad: Tensor, output: int, source: int, r: int, s: int) -> Tensor:
    channel = output // (job.outputs // job.groups) * (job.channels // job.groups) + source
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    ranges = []
    for tap, size, count in ((r, job.height, grad.shape[2]), (s, job.width, grad.shape[3])):
        shift = tap - job.padding
        first = max(0, -(shift // job.stride)) if shift < 0 else 0
        last = min(count, (size - 1 - shift) // job.stride + 1)
        ranges.append((first, last, shift))
    (top, bottom, down), (left, right, across) = ranges
    if top >= bottom or left >= right:
        return total
    for image in range(job.batch):
        read = x[image, channel, top * job.stride + down :: job.stride, left * job.stride + across :: job.stride]
        part = grad[image, output, top:bottom, left:right]
        for begin in range(0, part.shape[0], 4096):  # planes in float64 are large
            rows = slice(begin, begin + 4096)
            piece = part[rows].double()
            total += (read[rows][: piece.shape[0], : piece.shape[1]].double() * piece).sum()
    return total


def at(result: Tensor, where: list[tuple[int, ...]] | list[Any]) -> Tensor:
    """What a result holds at these places, for all channels, or at these elements of a weight."""
    if len(where[0]) == 4:
        return torch.stack([result[place] for place in where]).double()
    return torch.stack([result[image, :, row, column] for image, row, column in where]).double()


# ----------------------------------------------------------------------------------------------------------------------
# More than 2^31 and 2^32 elements

LARGE = {"2^31": 11648, "2^32": 16448}  # sides of squares with 16 channels


def probe_large(device: str, layout: str, side: int, channels: int = 16, groups: int = 1) -> tuple[float, str]:
    """Forward, both gradients and their places near the marks, bfloat16, by the project's kernels: the largest error in
    units of its bound, and what was wrong.
    """
    job = ConvJob(channels, channels, side, side, 3, layout=layout, groups=groups)
    where = places(job.input_size, layout)
    worst, wrong = 0.0, []

    def judged(name: str, got: Tensor, exact: Tensor) -> None:
        nonlocal worst
        bound = UNIT[torch.bfloat16] * exact.abs() + 1e-4
        ratio = float(((got - exact).abs() / bound).nan_to_num(float("inf")).max())
        worst = max(worst, ratio)
        if ratio > 1:
            wrong.append(f"{name}: error {ratio:.3g} times its bound")

    x, weight, _ = job.tensors(device)
    with backend("native", device):
        with torch.no_grad():
            y = pc.functional.conv2d(x, weight, None, 1, job.padding, 1, groups)
        judged("output", at(y, where), forward(job, x, weight, None, where))
        # A gradient that is zero but near the places: where a sum over all of it reads wrongly, it shows.
        grad = y.zero_()
        for image, row, column in where:
            square = (slice(max(0, row - 1), row + 2), slice(max(0, column - 1), column + 2))
            part = grad[(image, slice(None), *square)]
            part.copy_(torch.linspace(-1, 1, part.numel(), device=device).view(part.shape))
        leaves = x.requires_grad_(), weight.requires_grad_()
        z = pc.functional.conv2d(*leaves, None, 1, job.padding, 1, groups)
        edge = torch.autograd.graph.get_gradient_edge(z)
        del z, y
        grad_x, grad_w = torch.autograd.grad([edge], leaves, [grad])
    x, weight = x.detach(), weight.detach()
    judged("grad_input", at(grad_x, where), input_gradient(job, grad, weight, where))
    judged("grad_weight", at(grad_w, taps(job)), weight_gradient(job, x, grad, taps(job)))
    return worst, "; ".join(wrong)
