"""Cases of the convolution kernels for tests/host_cuda (conv_cases.cpp), and what they must give, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from support import kernels, reference
from support.kernels import Call, Memory

MODES = ("zeros", "reflect", "replicate", "circular")
PASSES = ("small", "big", "weight")
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Problem:
    """A convolution of `size` (the big grid) by (groups * outputs, sources, *kernel)."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    sources: int  # channels of the big grid, a group
    outputs: int  # of the small one
    groups: int = 1
    images: int = 1
    stride: tuple[int, ...] = (1, 1, 1)
    dilation: tuple[int, ...] = (1, 1, 1)
    padding: tuple[tuple[int, int], ...] = ((0, 0),) * 3
    mode: str = "zeros"

    @property
    def dims(self) -> int:
        return len(self.size)

    def small(self, d: int) -> int:
        reach = (self.kernel[d] - 1) * self.dilation[d] + 1
        return (self.size[d] + sum(self.padding[d]) - reach) // self.stride[d] + 1

    @property
    def big_shape(self) -> tuple[int, ...]:
        return self.images, self.groups * self.sources, *self.size

    @property
    def small_shape(self) -> tuple[int, ...]:
        return self.images, self.groups * self.outputs, *(self.small(d) for d in range(self.dims))

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.groups * self.outputs, self.sources, *self.kernel

    def shape(self, pass_: str) -> tuple[int, ...]:
        """Of what a pass writes."""
        return {"small": self.small_shape, "big": self.big_shape, "weight": self.weight_shape}[pass_]


def lift(x: Tensor) -> Tensor:
    """(N, C, D, H, W)."""
    while x.dim() < 5:
        x = x.unsqueeze(2)
    return x


def bits_of(keep: Tensor) -> Tensor:
    """Packed in the order in which `keep` lies in memory: it must be dense."""
    order = sorted(range(keep.dim()), key=lambda d: -keep.stride(d))
    flat = keep.permute(order).reshape(-1).to(torch.uint8)
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)]).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


@dataclass
class Case:
    """One pass. Of the tensors that it reads and writes, the last is given with what it holds before."""

    problem: Problem
    pass_: str
    big: Tensor
    small: Tensor
    weight: Tensor
    keep: Tensor | None = None  # what counts of the tensor read (of the small one for the weight)
    scale: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    relu: bool = False
    bits: Tensor | None = None
    strict: bool = False
    ranges: Sequence[tuple[int, int]] = field(default_factory=tuple)  # of what is written
    limit: int = 1 << 20  # of the weight gradient's workspace, in bytes

    def call(self, kernel: str, off: int = 0, **extra: Any) -> Call:
        p = self.problem
        numbers: list[float] = [
            PASSES.index(self.pass_), MODES.index(p.mode), p.images, p.groups, p.sources, p.outputs,
            int(self.strict), int(self.relu), self.limit,
        ]  # fmt: skip
        for d in range(p.dims - 3, p.dims):
            if d < 0:
                numbers += [1, 1, 1, 1, 1, 0, 0, 0, 1]
                continue
            written = p.size[d] if self.pass_ == "big" else p.small(d)
            cut = self.ranges[d] if self.ranges else (0, written)
            numbers += [p.size[d], p.small(d), p.kernel[d], p.stride[d], p.dilation[d], *p.padding[d], *cut]
        for tensor in (self.big, self.small, self.weight):
            numbers += lift(tensor).stride()
        bits = None if self.keep is None else bits_of(self.keep)
        tensors = [self.big, self.small, self.weight, bits, self.scale, self.bias, self.residual, self.bits]
        buffers = [Memory(None if t is None else storage(t), off if i < 3 else 0) for i, t in enumerate(tensors)]
        return Call(kernel, self.big.dtype, numbers, buffers, **extra)

    def result(self, buffers: Sequence[Tensor | None]) -> Tensor:
        """What the pass wrote, of what run() returned."""
        index = {"big": 0, "small": 1, "weight": 2}[self.pass_]
        like = (self.big, self.small, self.weight)[index]
        flat = buffers[index]
        assert flat is not None
        return torch.as_strided(flat.reshape(-1), like.shape, like.stride())

    def expected(self) -> Tensor:
        """The same in float64."""
        p = self.problem
        big, small, weight = (t.double() for t in (self.big, self.small, self.weight))
        if self.keep is not None:
            kept = self.keep.double()
            if self.pass_ == "small":
                big = big.masked_fill(kept == 0, 0)
            else:
                small = small.masked_fill(kept == 0, 0)
        padding = [side for pair in p.padding[: p.dims] for side in pair]

        def forward(x: Tensor, w: Tensor) -> Tensor:
            return reference.conv(x, w, None, p.stride[: p.dims], padding, p.dilation[: p.dims], p.groups, p.mode)

        if self.pass_ == "small":
            y = forward(big, weight)
        else:
            leaf = (big if self.pass_ == "big" else weight).clone().requires_grad_()
            out = forward(*((leaf, weight) if self.pass_ == "big" else (big, leaf)))
            (y,) = torch.autograd.grad(out, leaf, small)
        shape = (1, -1) + (1,) * p.dims
        if self.scale is not None:
            y = y * self.scale.double().view(shape)
        if self.bias is not None:
            y = y + self.bias.double().view(shape)
        if self.residual is not None:
            y = y + self.residual.double()
        return y.relu() if self.relu else y


def check(c: Case, got: Tensor, sums: float) -> None:
    """Within one rounding of the result's type, and `sums` times the sum of the absolute values of its terms: what an
    accumulator of float32 or one product of tf32 may be off, whatever the values are.
    """
    given = {name: getattr(c, name) for name in ("big", "small", "weight", "bias", "residual")}
    sizes = {name: tensor.abs() for name, tensor in given.items() if tensor is not None}
    want, terms = c.expected(), replace(c, **sizes, relu=False).expected()
    beyond = want.abs() > 1.001 * torch.finfo(got.dtype).max  # of what the type holds
    assert torch.equal(got[beyond].double(), want[beyond].sign() * torch.inf), (c.problem, c.pass_, got.dtype)
    got, want, terms = (t[~beyond] for t in (got, want, terms))
    least = 2.0**-25 if got.dtype == torch.float16 else 0.0  # half the distance of its smallest numbers
    far = (got.double() - want).abs() - ROUNDING[got.dtype] * want.abs() - sums * terms - least
    assert got.isfinite().all() and (far <= 0).all(), (c.problem, c.pass_, got.dtype, c.strict, far)


def check_all(kernel: str, cases: Sequence[Case], offs: Sequence[int] = (0,), shared: int = 99) -> None:
    """Each case against the oracle, and the bits that it writes. `offs`: at these distances from aligned addresses.
    shared: of a block, in KiB.
    """
    calls = [c.call(kernel, off=offs[i % len(offs)]) for i, c in enumerate(cases)]
    for c, found in zip(cases, kernels.run(calls, shared=shared), strict=True):
        got, dtype = c.result(found), c.big.dtype
        # Of float64 the oracle adds up no more exactly than the kernel does: over many terms both may be off.
        sums = 1e-13 if dtype == torch.float64 else 5e-7
        if dtype == torch.float32 and kernel in ("conv_tiles", "conv_stem"):
            sums = 1e-6 if c.strict else 1e-3
        check(c, got, sums)
        if c.bits is not None:
            assert torch.equal(found[7], bits_of(got > 0)), c.problem


def check_parts(kernel: str, whole: Case, ranges: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Lines cut to a range write what they would have written, and nothing else."""
    cases = [whole, *(replace(whole, ranges=one) for one in ranges)]
    results = zip(cases, kernels.run([c.call(kernel) for c in cases]), strict=True)
    first, *parts = (c.result(found) for c, found in results)
    before = getattr(whole, whole.pass_)
    for part, (rows, columns) in zip(parts, ranges, strict=True):
        inside = torch.zeros(first.shape[2:], dtype=torch.bool)
        inside[slice(*rows), slice(*columns)] = True
        assert torch.equal(part[..., inside], first[..., inside])
        assert torch.equal(part[..., ~inside], before[..., ~inside])


def far(kernel: str, pass_: str, layout: str, sources: int, groups: int) -> tuple[Tensor, Tensor]:
    """What the last block alone writes, of tensors of 2^32 elements of which all but the last rows are zeros; and the
    oracle's result of these rows.
    """
    channels, width, rows, rest = sources * groups, 32, 5, (sources, sources, groups)
    p = Problem((2**32 // channels // width + rows, width), (3, 1), *rest, padding=((1, 1), (0, 0)))
    strides = (1, width * channels, channels) if layout == "NHWC" else (p.size[0] * width, width, 1)
    whole = torch.empty_strided(p.big_shape, (p.size[0] * width * channels, *strides), dtype=torch.half, device="meta")
    c = case(Problem((rows + 1, width), (3, 1), *rest, padding=((1, 1), (0, 0))), pass_, torch.half, layout)
    c.small[:, :, 0] = 0  # needs what lies before
    call = Case(p, pass_, whole, whole, c.weight).call(kernel, last_blocks=1)
    call.buffers = [*(Memory(storage(t), 0, whole.numel()) for t in (c.big, c.small)), *call.buffers[2:]]
    (found,) = kernels.run([call])
    return c.result(found), c.expected()


def storage(tensor: Tensor) -> Tensor:
    """All elements of a tensor's memory from its first one on, in the order they lie in."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (length if tensor.numel() else 0,), (1,))


def filled(shape: Sequence[int], dtype: torch.dtype, layout: str = "NCHW", content: str = "noise") -> Tensor:
    """Values of the checks, in a layout: "NCHW", "NHWC" or "sliced" (a part of a larger tensor)."""
    if content == "noise":
        x = torch.randn(*shape, dtype=torch.float64)
    else:  # steps, or a ramp far from zero
        place = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(*shape)
        x = (place % 7 < 3).double() if content == "steps" else 3 + place % 101 / 101
    x = x.to(dtype)
    if layout == "sliced":
        wider = torch.full([size + 2 for size in shape], 1e4, dtype=dtype)
        wider[tuple(slice(1, -1) for _ in shape)] = x
        return wider[tuple(slice(1, -1) for _ in shape)]
    if layout == "NHWC":
        order = [0, *range(2, len(shape)), 1]
        back = [0, len(shape) - 1, *range(1, len(shape) - 1)]
        return x.permute(order).contiguous().permute(back)
    return x


def case(problem: Problem, pass_: str, dtype: torch.dtype, layout="NCHW", content="noise", **more: Any) -> Case:
    """A pass over filled tensors. What it writes holds a number that would show."""
    shapes = {"big": problem.big_shape, "small": problem.small_shape, "weight": problem.weight_shape}
    tensors = {name: filled(shape, dtype, layout, content) for name, shape in shapes.items()}
    tensors[pass_].fill_(-777)
    return Case(problem, pass_, tensors["big"], tensors["small"], tensors["weight"], **more)


def epilogue(shape: Sequence[int], dtype: torch.dtype, layout: str, bits: bool = False) -> dict[str, Any]:
    """Every part that a result of this shape can have, for a Case."""
    parts: dict[str, Any] = {
        "scale": torch.rand(shape[1]).to(torch.promote_types(dtype, torch.float32)) + 0.5,
        "bias": torch.randn(shape[1]).to(dtype), "residual": filled(shape, dtype, layout), "relu": True,
    }  # fmt: skip
    if bits:
        parts["bits"] = torch.full(((torch.Size(shape).numel() + 7) // 8,), 0x55, dtype=torch.uint8)
    return parts


def writes_bits(p: Problem, pass_: str, layout: str) -> bool:
    channels, *places = p.shape(pass_)[1:]
    one_launch = pass_ == "small" or p.stride[p.dims - 1] == 1 or layout == "NHWC"
    return one_launch and (channels if layout == "NHWC" else places[-1]) % 8 == 0 and layout != "sliced"


def drawn(choose: random.Random, dims: int, mode: str, axis: Callable, channels: Callable) -> Problem:
    """A problem in which at least one output sees the input. axis(d): size, kernel, stride and dilation; channels():
    sources and outputs of a group, groups, images.
    """
    while True:
        size, kernel, stride, dilation = zip(*map(axis, range(dims)), strict=True)
        widest = [min(4, {"reflect": n - 1, "circular": n}.get(mode, 4)) for n in size]
        padding = tuple((choose.randint(0, most), choose.randint(0, most)) for most in widest)
        found = Problem(size, kernel, *channels(), stride, dilation, padding, mode)
        if all(found.small(d) >= 1 for d in range(dims)):
            return found


def swept(
    choose: random.Random, p: Problem, pass_: str, dtype: torch.dtype, masked: bool, parts: bool, bits: bool = False,
    layouts: Sequence[str] = ("NCHW", "NHWC", "sliced"), **more: Any,
) -> Case:  # fmt: skip
    """A pass in a layout and over contents by chance; masked, with every part of an epilogue, with bits, if asked."""
    layout = choose.choice(layouts)
    if masked and layout != "sliced":
        more["keep"] = filled(p.big_shape if pass_ == "small" else p.small_shape, torch.float32, layout) > 0
    if parts:
        more |= epilogue(p.shape(pass_), dtype, layout, bits and writes_bits(p, pass_, layout))
    return case(p, pass_, dtype, layout, choose.choice(["noise", "steps", "ramp"]), **more)


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference, over the largest value that is wanted."""
    assert got.isfinite().all()
    return float((got.double() - want).abs().max() / (want.abs().max() + 1e-30))
