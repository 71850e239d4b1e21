"""The norm kernels, run on the CPU by tests/host_cuda, against float64.

Errors are held against those that one rounding of the result, or sums in float32, must make; that they are at most
stock PyTorch's own is what test_native_norms.py shows on a GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from support import kernels
from support.kernels import Call, Memory, off
from support.pairs import pairwise
from torch import Tensor

import patchconv_native  # noqa: F401  (registers the operators)

pytestmark = pytest.mark.timeout(1200)  # the first that runs compiles the executor

TYPES = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=lambda d: str(d)[6:])
LAYOUTS = pytest.mark.parametrize("channels_last", [False, True], ids=["planes", "channels_last"])
ACTIVATIONS = ["none", "relu", "silu"]
EPS = 1e-5

# (images, channels, pixels, groups): rows that a warp takes and rows that a block takes, odd and not; one channel; more
# channels than a block has lanes for; one image; several parts.
SHAPES = [
    (2, 6, 49, 0), (3, 5, 1, 0), (1, 1, 3, 0), (2, 3, 8200, 0), (2, 130, 64, 0), (1, 16, 4101, 0), (4, 37, 33, 0),
    (2, 3, 900, 0), (3000, 3, 4, 0), (2, 6, 49, 3), (2, 8, 4100, 2), (3, 64, 36, 32), (2, 6, 50, 6),
    (1, 12, 1000, 1), (2, 96, 17, 8),
]  # fmt: skip


@dataclass
class Example:
    """A norm's arguments, as (images, channels, pixels)."""

    images: int
    channels: int
    pixels: int
    groups: int
    channels_last: bool
    dtype: torch.dtype
    activation: str = "none"

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.pixels * 31 + self.channels)
        draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
        shape = self.images, self.channels, self.pixels
        # A mean far from zero, a gradient across the image, and noise.
        ramp = torch.linspace(-1, 1, self.pixels, dtype=torch.float64)
        self.x = (draw(*shape) + ramp + 8 * draw(1, self.channels, 1)).to(self.dtype)
        self.grad = (draw(*shape) + 0.3).to(self.dtype)
        self.weight, self.bias = draw(self.channels).float(), draw(self.channels).float()
        self.statistics = self.channels if self.groups == 0 else self.images * self.groups

    def numbers(self, training: bool = True, momentum: float = 0.1) -> list[float]:
        kind = ["none", "relu", "silu"].index(self.activation)
        shape = [self.images, self.channels, self.pixels, self.groups, int(self.channels_last)]
        return [*shape, EPS, momentum, kind, int(training)]

    def flat(self, x: Tensor) -> Tensor:
        """In the order that the kernels read."""
        x = x.view(self.images, self.channels, self.pixels)
        return (x.transpose(1, 2) if self.channels_last else x).flatten()

    def back(self, flat: Tensor) -> Tensor:
        if self.channels_last:
            return flat.view(self.images, self.pixels, self.channels).transpose(1, 2)
        return flat.view(self.images, self.channels, self.pixels)

    def shared(self, x: Tensor) -> Tensor:
        """(statistics, elements): those that share a mean."""
        if self.groups == 0:
            return x.transpose(0, 1).reshape(self.channels, -1)
        return x.reshape(self.images * self.groups, -1)

    def moments(self) -> tuple[Tensor, Tensor]:
        all = self.shared(self.x.double())
        return all.mean(1), all.var(1, unbiased=False)

    def spread(self, numbers: Tensor) -> Tensor:
        """One number a statistic, as it meets (images, channels, 1)."""
        if self.groups == 0:
            return numbers.view(1, -1, 1)
        return numbers.view(self.images, -1, 1).repeat_interleave(self.channels // self.groups, dim=1)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        z = (x - self.spread(mean)) / (self.spread(var) + EPS).sqrt() * weight.view(-1, 1) + bias.view(-1, 1)
        return {"none": lambda z: z, "relu": torch.relu, "silu": torch.nn.functional.silu}[self.activation](z)

    def cancellation(self) -> float:
        """By how much x - mean is less exact than x."""
        mean, var = self.moments()
        return 1 + float((mean.abs() / (var + EPS).sqrt()).max())

    def affine(self) -> list[Memory]:
        mean, var = self.moments()
        return [Memory(mean.float()), Memory(var.float()), Memory(self.weight), Memory(self.bias)]


def close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 4) -> None:
    """Within some roundings of dtype at the scale of the values."""
    scale = want.abs().mean() + want.abs()
    error = ((got.double() - want).abs() / scale.clamp_min(1e-30)).max()
    assert error <= factor * torch.finfo(dtype).eps, (error / torch.finfo(dtype).eps).item()


def run_statistics(examples: list[Example], momentum: float = 0.1) -> list[list[Tensor]]:
    """[mean, var, running mean, running var] of each."""
    calls = []
    for i, example in enumerate(examples):
        results = [torch.full((example.statistics,), 77.0) for _ in "mv"]
        running = [None] * 2 if example.groups else [torch.full((example.channels,), value) for value in (1.0, 2.0)]
        buffers = [Memory(example.flat(example.x), off(example.dtype, i)), *map(Memory, [*results, *running])]
        calls.append(Call("norm_statistics", example.dtype, example.numbers(momentum=momentum), buffers))
    return [found[1:] for found in kernels.run(calls)]


@DTYPES
@LAYOUTS
def test_statistics(channels_last, dtype):
    examples = [Example(*shape, channels_last, dtype) for shape in SHAPES]
    for example, (mean, var, running_mean, running_var) in zip(examples, run_statistics(examples), strict=True):
        want_mean, want_var = example.moments()
        deviation = want_var.sqrt() + want_mean.abs()
        assert ((mean.double() - want_mean).abs() <= 4e-7 * deviation).all()
        # Differences from the mean are as exact as float32 numbers of its size are.
        assert ((var.double() - want_var).abs() <= 3e-6 * want_var + 2e-7 * want_mean.abs() * want_var.sqrt()).all()
        if example.groups == 0:
            count = example.images * example.pixels
            torch.testing.assert_close(running_mean.double(), 0.9 + 0.1 * want_mean, rtol=1e-6, atol=1e-6)
            unbiased = want_var * count / max(1, count - 1)
            torch.testing.assert_close(running_var.double(), 1.8 + 0.1 * unbiased, rtol=3e-6, atol=3e-6)


def test_statistics_about_a_large_mean():
    """Where sums of squares would leave nothing: a mean of 4096 deviations."""
    for channels_last in (False, True):
        example = Example(2, 8, 5000, 0, channels_last, torch.float32)
        example.x = (torch.randn(2, 8, 5000, dtype=torch.float64) + 4096).float()
        ((mean, var, *_),) = run_statistics([example])
        want_mean, want_var = example.moments()
        torch.testing.assert_close(mean.double(), want_mean, rtol=4e-7, atol=0)
        torch.testing.assert_close(var.double(), want_var, rtol=1e-4, atol=0)


@pairwise(channels_last=[False, True], activation=ACTIVATIONS, dtype=TYPES)
def test_map(channels_last, activation, dtype):
    examples = [Example(*shape, channels_last, dtype, activation) for shape in SHAPES]
    calls = []
    for i, example in enumerate(examples):
        x = example.flat(example.x)
        y = Memory(torch.full_like(x, 77), off(dtype, i))
        calls.append(Call("norm_map", dtype, example.numbers(), [Memory(x, off(dtype, i)), y, *example.affine()]))
    for example, (_, y, *_) in zip(examples, kernels.run(calls), strict=True):
        want = example.forward(example.x.double(), example.weight.double(), example.bias.double(), *example.moments())
        close(example.back(y), want, dtype, 4 + example.cancellation())


@DTYPES
@LAYOUTS
def test_mask(channels_last, dtype):
    """The bits of norm_map's values, which it gives as well."""
    shapes = [shape for shape in SHAPES if shape[3] == 0] + [(1, 3, 1, 0), (5, 2, 3, 0), (2, 3, 1366, 0)]
    examples = [Example(*shape, channels_last, dtype, "relu") for shape in shapes]
    calls = []
    for i, example in enumerate(examples):
        x = example.flat(example.x)
        y, bits = Memory(torch.full_like(x, 77), off(dtype, i)), torch.full(((len(x) + 7) // 8,), 0xEE).to(torch.uint8)
        given = Memory(x, off(dtype, i))
        calls.append(Call("norm_map", dtype, example.numbers(), [given, y, *example.affine()]))
        calls.append(Call("norm_mask", dtype, example.numbers(), [given, y, Memory(bits), *example.affine()]))
    found = kernels.run(calls)
    for (_, want, *_), (_, y, bits, *_) in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(y, want)
        assert torch.equal(bits, torch.ops.patchconv._mask_pack(want, 0, 0.0, 0.0))


def test_map_without_parameters_and_of_numbers_that_are_none():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -1.0, 2.0])
    for kind, want in enumerate([x, torch.relu(x)]):
        buffers = [Memory(x), Memory(torch.zeros(6)), Memory(torch.zeros(1)), Memory(torch.ones(1) - EPS)]
        call = Call("norm_map", x.dtype, [1, 1, 6, 0, 0, EPS, 0, kind, 0], [*buffers, Memory(None), Memory(None)])
        ((_, y, *_),) = kernels.run([call])
        torch.testing.assert_close(y, want, rtol=1e-6, atol=0, equal_nan=True)


@pairwise(channels_last=[False, True], training=[True, False], activation=ACTIVATIONS, dtype=TYPES)
def test_backward(channels_last, training, activation, dtype):
    examples = [Example(*shape, channels_last, dtype, activation) for shape in SHAPES]
    calls = []
    for i, example in enumerate(examples):
        x, grad = example.flat(example.x), example.flat(example.grad)
        sums = [Memory(torch.zeros(example.channels)) for _ in "wb"]
        results = [Memory(torch.full_like(x, 77), off(dtype, i)), *sums]
        given = [Memory(grad, off(dtype, i)), Memory(x, off(dtype, i)), *example.affine()]
        calls.append(Call("norm_backward", dtype, example.numbers(training), [*given, *results]))
    for example, found in zip(examples, kernels.run(calls), strict=True):
        grad_x, grad_weight, grad_bias = found[6:]
        want = wanted(example, training)
        for got, exact in zip((grad_weight, grad_bias), want[1:], strict=True):
            scale = exact.abs().max() + example.pixels**0.5
            assert ((got.double() - exact).abs() <= 2e-5 * scale).all()
        if example.images * example.pixels > 2 or example.groups:
            close(example.back(grad_x), want[0], dtype, 4 + 4 * example.cancellation() * (dtype == torch.float32))


def wanted(example: Example, training: bool) -> list[Tensor]:
    """By autograd in float64. ReLU's mask is that of the rounded output."""
    leaves = [t.double().requires_grad_() for t in (example.x, example.weight, example.bias)]
    mean, var = example.moments()
    if training:
        all = example.shared(leaves[0])
        mean, var = all.mean(1), all.var(1, unbiased=False)
    y = example.forward(*leaves, mean, var)
    return list(torch.autograd.grad(y, leaves, example.grad.double()))


@pytest.mark.parametrize("channels_last", [0, 1], ids=["planes", "channels_last"])
@pytest.mark.parametrize("kind", [0, 1], ids=["none", "relu"])
def test_constants_of_an_input_that_is_not_finite(kind, channels_last):
    """Where the statistics are constants an infinite input has a finite gradient."""
    x, grad = torch.tensor([torch.inf, 1.0, -torch.inf, 2.0, torch.nan]), torch.ones(5)
    affine = [torch.zeros(1), torch.ones(1) - EPS, None, None]
    results = [torch.full((5,), 77.0), None, None]
    numbers = [1, 1, 5, 0, channels_last, EPS, 0.0, kind, 0]
    call = Call("norm_backward", x.dtype, numbers, list(map(Memory, [grad, x, *affine, *results])))
    got = kernels.run([call])[0][6]
    want = torch.autograd.grad([lambda t: t, torch.relu][kind](leaf := x.clone().requires_grad_()), leaf, grad)[0]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_more_channels_than_a_grid_takes():
    """The limit that serves() gives, which callers ask first, is the launch's."""
    channels = 65535 * 128 + 1
    numbers = [1, channels, 1, 0, 1, EPS, 0.0, 0, 1]
    far = lambda: Memory(torch.zeros(4), 0, channels)  # noqa: E731
    with pytest.raises(kernels.Fault, match="more than 65535 blocks along y"):
        kernels.run([Call("norm_map", torch.float32, numbers, [far(), far(), *(far() for _ in "mvwb")], 1)])


@pytest.mark.parametrize("asked", list(itertools.product([True, False], repeat=3)), ids=str)
@pytest.mark.parametrize("groups", [0, 2], ids=["batch", "group"])
def test_only_what_is_asked_for(groups, asked):
    """Gradients do not depend on which others are computed, and what is not asked for is not written."""
    example = Example(2, 4, 70, groups, False, torch.float32, "relu")
    x, grad = example.flat(example.x), example.flat(example.grad)
    results = [torch.full_like(x, 77), torch.full((4,), 77.0), torch.full((4,), 77.0)]
    given = [Memory(grad), Memory(x), *example.affine()]
    calls = [
        Call("norm_backward", x.dtype, example.numbers(), [*given, *map(Memory, results)]),
        Call("norm_backward", x.dtype, example.numbers(),
             [*given, *(Memory(r if a else None) for r, a in zip(results, asked, strict=True))]),
    ]  # fmt: skip
    all, some = (found[6:] for found in kernels.run(calls))
    for a, one, other in zip(asked, all, some, strict=True):
        assert torch.equal(one, other) if a else other is None


def test_map_past_two_to_the_31():
    """The last blocks of one channel of 2^32 pixels and some, and of 2^31 rows."""
    dtype, one = torch.float16, [Memory(torch.zeros(1)), Memory(torch.ones(1)), Memory(None), Memory(None)]
    whole, rows = 8192 + 5, 2**31 + 12
    # Rows, pixels, elements that are given, blocks, elements that these write.
    for shape in ((1, 2**32 + whole, whole, 2, whole), (rows, 4, 400, 3, 4 * (16 + (rows % 8 or 8)))):
        images, pixels, held, blocks, written = shape
        x = torch.randn(held).to(dtype)
        far = partial(Memory, elements=images * pixels)
        numbers = [images, 1, pixels, 0, 0, 0.0, 0, 1, 0]
        call = Call("norm_map", dtype, numbers, [far(x), far(torch.full_like(x, 77)), *one], blocks)
        ((_, y, *_),) = kernels.run([call])
        assert torch.equal(y[-written:], torch.relu(x)[-written:]) and (y[:-written] == 77).all()


def test_mask_past_two_to_the_31():
    """The channel of an element, found by division, where its number takes more than 32 bits."""
    dtype, channels = torch.float16, 3
    for channels_last, pixels in ((0, 715827883), (0, 5), (1, 7)):
        images = 2**31 // (channels * pixels) + 2
        count = images * channels * pixels
        x = torch.randn(16384).to(dtype)
        far = partial(Memory, elements=count)
        bits = Memory(torch.full(((len(x) + 7) // 8 + 1,), 0xEE, dtype=torch.uint8), 0, (count + 7) // 8)
        mean, bias = torch.tensor([0.25, -0.5, 1.0]), torch.tensor([0.0, 2.0, -1.0])
        affine = [Memory(mean), Memory(torch.ones(3) - EPS), Memory(None), Memory(bias)]
        numbers = [images, channels, pixels, 0, channels_last, EPS, 0.0, 1, 0]
        call = Call("norm_mask", dtype, numbers, [far(x), far(torch.full_like(x, 77)), bits, *affine], 1)
        ((_, y, got, *_),) = kernels.run([call])
        seen = count % 8192 or 8192
        elements = torch.arange(count - seen, count)
        channel = (elements if channels_last else elements // pixels) % channels
        want = torch.relu(x[-seen:].double() - mean[channel] + bias[channel])
        torch.testing.assert_close(y[-seen:].double(), want, rtol=2e-3, atol=1e-3)
        whole = (count - seen) // 8 - ((count + 7) // 8 - len(got))  # bytes of `got` before what was written
        assert torch.equal(got[whole:], torch.ops.patchconv._mask_pack(y[-seen:], 0, 0.0, 0.0))


# (images, channels, pixels) past 2^31 elements; what one block of the statistics sees is the last part of one row, or
# the last chunk of pixels.
FAR = {"rows": (1, 1, 2**32 + 12345), "many rows": (2**29 + 7, 1, 5), "pixels": (1, 8, 2**29 + 4321)}


@pytest.mark.parametrize("name", FAR)
def test_statistics_and_gradients_past_two_to_the_31(name):
    """Of the last blocks alone: sums over what they see, at the right end of the tensor."""
    images, channels, pixels = FAR[name]
    dtype, channels_last = torch.float16, name == "pixels"
    count = images * channels * pixels
    numbers = [images, channels, pixels, 0, int(channels_last), EPS, 0.0, 0, 1]
    held = 2**20 if name == "rows" else 2**18
    x = (torch.randn(held) + 0.5).to(dtype)
    empty = lambda: Memory(torch.full((channels,), 77.0))  # noqa: E731
    far = partial(Memory, elements=count)
    running = [Memory(None), Memory(None)]
    call = Call("norm_statistics", dtype, numbers, [far(x), empty(), empty(), *running], 1)
    ((_, mean, var, *_),) = kernels.run([call])
    seen = seen_by_the_last_block(name, count, channels)
    assert seen <= held
    part = x[-seen:].double().view(-1, channels)
    torch.testing.assert_close(mean.double(), part.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(var.double(), part.var(0, unbiased=False), rtol=1e-5, atol=0)

    grad, affine = torch.randn(held).to(dtype), [torch.zeros(channels), torch.ones(channels) - EPS]
    results = [far(torch.full_like(x, 77)), empty(), empty()]
    given = [far(grad), far(x), *map(Memory, affine), Memory(None), Memory(None)]
    found = kernels.run([Call("norm_backward", dtype, numbers, [*given, *results], 1)])[0]
    grad_x, grad_weight, grad_bias = found[6:]
    far_grad, far_x = (t.double().view(-1, channels) for t in (grad, x))
    sums = seen_by_the_last_block(name, count, channels, gradients=True)
    some = slice(-(sums // channels), None)
    total, product = far_grad[some].sum(0), (far_grad[some] * far_x[some]).sum(0)
    torch.testing.assert_close(grad_bias.double(), total, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(grad_weight.double(), product, rtol=1e-4, atol=1e-2)
    written = int((grad_x != 77).sum())
    assert 0 < written < held
    want = far_grad - (total + far_x * product) / (count // channels)
    torch.testing.assert_close(grad_x[-written:].double(), want.flatten()[-written:], rtol=2e-3, atol=2e-3)


def seen_by_the_last_block(name: str, count: int, channels: int, gradients: bool = False) -> int:
    """Elements, by the rules of norm.cuh: steps of 16-byte pieces, 64 of them a part at most."""
    if name == "many rows":  # of a block's 8 teams each takes as many rows as a step of a warp holds
        repeat = 32 * 4 * 8 // 5
        images = count // 5
        sets = -(-images // repeat)
        last = sets % 8 or 8
        return (images - (sets - last) * repeat) * 5
    if name == "rows":
        part = 64 * 256 * 4 * 8
        return count % part or part
    across, at_once, busy = 1, 2 if gradients else 4, 4096
    step = 256 // across * at_once
    pixels = count // channels
    part = step * min(max(pixels // step // busy, 4), 4096)
    return (pixels % part or part) * channels
