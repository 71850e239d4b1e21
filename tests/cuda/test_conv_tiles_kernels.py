"""The halo kernel on the CPU executor, against the float64 oracle."""

from __future__ import annotations

import random

import pytest
import torch
from support import conv_kernels, kernels
from support.conv_kernels import MODES, Case, Problem
from support.kernels import Memory
from support.pairs import FULL
from support.seeds import SWEEP_SEED
from test_conv_kernels import problem

# float32 in one product of tf32, and in three. The number: what sums may be off, by the sum of their terms' sizes.
KINDS = {
    "float16": (torch.float16, False, 5e-7), "bfloat16": (torch.bfloat16, False, 5e-7),
    "tf32": (torch.float32, False, 1e-3), "strict": (torch.float32, True, 1e-6),
}  # fmt: skip
KIND = pytest.mark.parametrize("kind", KINDS)


def check(cases: list[Case], kind: str = "float16") -> None:
    for c, found in zip(cases, kernels.run([c.call("conv_tiles") for c in cases]), strict=True):
        got = c.result(found)
        conv_kernels.check(c, got, KINDS[kind][2])
        if c.bits is not None:
            assert torch.equal(found[7], conv_kernels.bits_of(got > 0)), c


@KIND
@pytest.mark.parametrize("mode", MODES)
def test_random_problems(mode, kind):
    dtype, strict, _ = KINDS[kind]
    choose = random.Random(f"{SWEEP_SEED}{mode}{kind}")
    torch.manual_seed(choose.randint(0, 999))
    cases = []
    problems, most = (7, 20_000) if FULL else (4, 8_000)
    for number in range(problems):
        pass_ = "big" if mode == "zeros" and number % 2 else "small"
        p = problem(choose, number % 3 + 1, mode)
        while torch.Size(p.kernel).numel() * torch.Size(p.small_shape).numel() > most:  # a slice a depth is dear here
            p = problem(choose, number % 3 + 1, mode)
        layout, more = choose.choice(["NCHW", "NHWC", "sliced"]), {}
        read, shape = (p.small_shape, p.big_shape) if pass_ == "big" else (p.big_shape, p.small_shape)
        if layout != "sliced" and number % 3 == 0:
            more["keep"] = conv_kernels.filled(read, torch.float32, layout) > 0
        if number % 2 == 0:
            more |= conv_kernels.epilogue(shape, dtype, layout)
        content = choose.choice(["noise", "steps", "ramp"])
        cases.append(conv_kernels.case(p, pass_, dtype, layout, content, strict=strict, **more))
    check(cases, kind)


@KIND
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_several_chunks_tiles_and_outputs(layout, kind):
    """More channels than a chunk, more outputs than a warp's and a block's, more rows and columns than a tile."""
    dtype, strict, _ = KINDS[kind]
    chunk = 16 if dtype == torch.float32 else 32
    torch.manual_seed(3)
    cases = []
    for p in [
        Problem((12, 40), (3, 3), 2 * chunk + 8, 72, padding=((1, 1), (1, 1))),
        Problem((9, 16), (1, 1), 3 * chunk, 136),
        Problem((18, 34), (3, 2), chunk, 8, groups=2, stride=(2, 2), padding=((1, 0), (1, 1))),
    ]:
        shape = p.small_shape
        more = {"keep": conv_kernels.filled(p.big_shape, torch.float32, layout) > 0} if p.groups == 1 else {}
        if layout == "NHWC" or shape[-1] % 8 == 0:
            more |= {"relu": True, "bits": torch.full((torch.Size(shape).numel() // 8,), 0xEE, dtype=torch.uint8)}
        cases.append(conv_kernels.case(p, "small", dtype, layout, strict=strict, **more))
    check(cases, kind)


def test_tiles_that_only_just_fit():
    """One halo tile instead of two, rows of taps in several tiles, and columns far apart."""
    torch.manual_seed(5)
    problems = [
        Problem((20, 20), (3, 3), 40, 8, stride=(2, 2), padding=((1, 1), (1, 1))),
        Problem((40, 40), (7, 7), 8, 8, dilation=(5, 5), padding=((15, 15), (15, 15))),
        Problem((9, 9), (7, 7), 40, 8, padding=((3, 3), (3, 3))),
    ]
    for layout in ("NCHW", "NHWC"):
        check([conv_kernels.case(p, "small", torch.float16, layout) for p in problems])
        check([conv_kernels.case(p, "big", torch.float16, layout) for p in problems])


@pytest.mark.parametrize("pass_", ["small", "big"])
def test_parts_have_the_bits_of_the_whole(pass_):
    torch.manual_seed(7)
    p = Problem((21, 37), (3, 5), 24, 10, stride=(2, 1), padding=((1, 1), (2, 2)))
    height, width = p.shape(pass_)[2:]
    whole = conv_kernels.case(p, pass_, torch.bfloat16, "NHWC")
    parts = [
        Case(p, pass_, whole.big, whole.small, whole.weight, ranges=ranges)
        for ranges in [((0, 3), (0, width)), ((3, height), (0, 10)), ((3, height), (10, width))]
    ]
    found = [
        c.result(f)
        for c, f in zip([whole, *parts], kernels.run([c.call("conv_tiles") for c in [whole, *parts]]), strict=True)
    ]
    joined = torch.full_like(found[0], -777)
    for c, got in zip(parts, found[1:], strict=True):
        place = (..., *(slice(*r) for r in c.ranges))
        joined[place] = got[place]
    assert torch.equal(joined, found[0])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("pass_", ["small", "big"])
@pytest.mark.parametrize("kernel", ["conv_tiles", "conv_stem", "conv_plain"])
def test_past_two_to_the_31(kernel, pass_, layout):
    """The last block alone, of tensors of 2^32 elements of which all but the last rows are zeros."""
    channels = 1 if layout == "NCHW" else 4 if kernel == "conv_stem" else 8
    width, rows = 32, 5
    p = Problem((2**32 // channels // width + rows, width), (3, 1), channels, channels, padding=((1, 1), (0, 0)))
    strides = (1, width * channels, channels) if layout == "NHWC" else (p.size[0] * width, width, 1)
    whole = torch.empty_strided(p.big_shape, (p.size[0] * width * channels, *strides), dtype=torch.half, device="meta")
    part = Problem((rows + 1, width), (3, 1), channels, channels, padding=((1, 1), (0, 0)))
    c = conv_kernels.case(part, pass_, torch.half, layout)
    call = Case(p, pass_, whole, whole, c.weight).call(kernel, last_blocks=1)
    for i, tensor in enumerate((c.big, c.small)):
        call.buffers[i] = Memory(conv_kernels.storage(tensor), 0, whole.numel())
    (found,) = kernels.run([call])
    last = (..., slice(1, None), slice(-8, None))  # whose inputs the part has, in the last block of any kernel
    got, want = c.result(found)[last], c.expected()[last]
    if kernel == "conv_plain":  # 256 results a block
        got, want = (t[..., -1:, -8:] for t in (got, want))
    assert conv_kernels.error(got, want) < 1.5e-3
