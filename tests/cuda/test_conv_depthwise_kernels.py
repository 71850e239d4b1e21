"""The depthwise convolution kernels on the CPU executor, against the float64 oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import conv_kernels, kernels
from support.conv_kernels import MODES, Case, Problem
from support.kernels import Memory
from support.pairs import FULL
from support.seeds import SWEEP_SEED

KERNEL = "conv_depthwise"
DTYPE = torch.float16
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SUMS = 5e-7
BOUND = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def problem(choose: random.Random, dims: int, mode: str, pass_: str) -> Problem:
    """A small problem. The way back knows one source channel a group as one output."""
    while True:
        stride, dilation, kernel, size, padding = [], [], [], [], []
        for d in range(dims):
            kernel.append(choose.choice([1, 2, 3, 3, 4, 5, 7]))
            stride.append(choose.choice([1, 1, 1, 2, 3]))
            dilation.append(choose.choice([1, 1, 1, 2, 5]))
            size.append(choose.randint(1, 5 if d + 3 == dims else 40 if d + 1 == dims else 24))
            widest = {"zeros": 4, "reflect": size[-1] - 1, "replicate": 4, "circular": size[-1]}[mode]
            padding.append((choose.randint(0, min(4, widest)), choose.randint(0, min(4, widest))))
        size[-1] += -size[-1] % choose.choice([1, 8])  # rows of whole pieces
        found = Problem(
            tuple(size), tuple(kernel), 1, 1 if pass_ == "big" else choose.choice([1, 1, 2, 3]),
            choose.choice([1, 3, 8, 16, 24, 40]), choose.randint(1, 2), tuple(stride), tuple(dilation), tuple(padding),
            mode,
        )  # fmt: skip
        if all(found.small(d) >= 1 for d in range(dims)):
            return found


def writes_bits(p: Problem, pass_: str, layout: str) -> bool:
    channels, *places = p.shape(pass_)[1:]
    one_launch = pass_ == "small" or p.stride[p.dims - 1] == 1 or layout == "NHWC"
    return one_launch and (channels if layout == "NHWC" else places[-1]) % 8 == 0 and layout != "sliced"


def swept(choose: random.Random, number: int, mode: str, pass_: str) -> Case:
    p = problem(choose, number % 3 + 1, mode, pass_)
    dtype, layout = DTYPES[number // 3 % 3], choose.choice(["NCHW", "NHWC", "sliced"])
    more: dict[str, Any] = {}
    if number % 2 and layout != "sliced":
        read = p.big_shape if pass_ == "small" else p.small_shape
        more["keep"] = conv_kernels.filled(read, torch.float32, layout) > 0
    if pass_ != "weight" and choose.random() < 0.5:
        more |= conv_kernels.epilogue(p.shape(pass_), dtype, layout, writes_bits(p, pass_, layout))
    return conv_kernels.case(p, pass_, dtype, layout, choose.choice(["noise", "steps", "ramp"]), **more)


@pytest.mark.parametrize(("pass_", "mode"), [*(("small", mode) for mode in MODES), ("big", "zeros")])
def test_sums(mode, pass_):
    choose = random.Random(f"{SWEEP_SEED}{mode}{pass_}")
    torch.manual_seed(choose.randint(0, 999))
    cases = [swept(choose, number, mode, pass_) for number in range(27 if FULL else 18)]
    calls = [c.call(KERNEL, off=choose.choice([0, 0, 4])) for c in cases]
    for c, found in zip(cases, kernels.run(calls), strict=True):
        got = c.result(found)
        conv_kernels.check(c, got, SUMS)
        if c.bits is not None:
            assert torch.equal(found[7], conv_kernels.bits_of(got > 0)), c.problem


@pytest.mark.parametrize("mode", MODES)
def test_weight_gradient(mode):
    choose = random.Random(f"{SWEEP_SEED}{mode}weight")
    torch.manual_seed(choose.randint(0, 999))
    cases = [swept(choose, number, mode, "weight") for number in range(18 if FULL else 9)]
    calls = [c.call(KERNEL, off=choose.choice([0, 0, 4])) for c in cases]
    for c, found in zip(cases, kernels.run(calls), strict=True):
        conv_kernels.check(c, c.result(found), SUMS)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_weight_gradient_of_many_tiles(layout):
    """Several tiles a part; and the same bits when it is made again."""
    p = Problem((5, 4), (2, 2), 1, 1, 272, 48, padding=((0, 1), (1, 1)))
    c = conv_kernels.case(p, "weight", torch.float32, layout)
    first, second = (c.result(found) for found in kernels.run([c.call(KERNEL)] * 2))
    assert conv_kernels.error(first, c.expected()) < BOUND[torch.float32]
    assert torch.equal(first, second)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_an_infinity_in_the_corner(layout):
    """Only the last tap meets it: places beside the small grid count for nothing."""
    p = Problem((9, 7), (2, 3), 1, 1, 8)
    c = conv_kernels.case(p, "weight", torch.bfloat16, layout)
    c.big[0, 3, -1, -1] = torch.inf
    (found,) = kernels.run([c.call(KERNEL)])
    got, expected = c.result(found), c.expected()
    assert torch.equal(got.isfinite(), expected.isfinite()) and int(got.isfinite().logical_not().sum()) == 1


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("pass_", ["small", "big"])
def test_a_part_of_the_outputs(pass_, layout):
    """Lines cut to a range write what they would have written, and nothing else."""
    p = Problem((37, 72), (3, 5), 1, 1, 8, stride=(1, 2), dilation=(2, 1), padding=((1, 2), (0, 3)))
    whole = conv_kernels.case(p, pass_, torch.float16, layout)
    height, width = p.shape(pass_)[2:]
    cases = [whole]
    for ranges in [((0, 1), (0, width)), ((1, 30), (2, 31)), ((height - 1, height), (1, width))]:
        cases.append(Case(p, pass_, whole.big, whole.small, whole.weight, ranges=ranges))
    first, *parts = (c.result(f) for c, f in zip(cases, kernels.run([c.call(KERNEL) for c in cases]), strict=True))
    for part, c in zip(parts, cases[1:], strict=True):
        inside = torch.zeros(height, width, dtype=torch.bool)
        inside[slice(*c.ranges[0]), slice(*c.ranges[1])] = True
        assert torch.equal(part[..., inside], first[..., inside])
        assert (part[..., ~inside] == -777).all()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_taps_far_apart(layout):
    """A dilation that no tile spans: each tap has a tile of its own along rows, with channels together also along
    columns.
    """
    p = Problem((140, 150), (3, 3), 1, 1, 16, dilation=(60, 60), padding=((60, 60), (60, 60)), mode="reflect")
    c = conv_kernels.case(p, "small", torch.bfloat16, layout)
    (found,) = kernels.run([c.call(KERNEL)])
    assert conv_kernels.error(c.result(found), c.expected()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("pass_", ["small", "weight"])
def test_past_two_to_the_31(pass_, layout):
    """The last block alone, of tensors of 2^32 elements of which all but the last rows are zeros."""
    channels, width, rows = (8 if layout == "NHWC" else 1), 32, 5
    p = Problem((2**32 // channels // width + rows, width), (3, 1), 1, 1, channels, padding=((1, 1), (0, 0)))
    strides = (1, width * channels, channels) if layout == "NHWC" else (p.size[0] * width, width, 1)
    whole = torch.empty_strided(p.big_shape, (p.size[0] * width * channels, *strides), dtype=DTYPE, device="meta")
    part = Problem((rows + 1, width), (3, 1), 1, 1, channels, padding=((1, 1), (0, 0)))
    c = conv_kernels.case(part, pass_, DTYPE, layout)
    c.small[:, :, 0] = 0  # needs what lies before
    call = Case(p, pass_, whole, whole, c.weight).call(KERNEL, last_blocks=1)
    for i, tensor in enumerate((c.big, c.small)):
        call.buffers[i] = Memory(conv_kernels.storage(tensor), 0, whole.numel())
    (found,) = kernels.run([call])
    got, want = c.result(found), c.expected()
    if pass_ == "small":
        got, want = got[:, :, 1:, -16:], want[:, :, 1:, -16:]
    else:
        got, want = got.flatten()[-8:], want.flatten()[-8:]  # of the block that adds up parts
    assert conv_kernels.error(got, want) < BOUND[DTYPE]


def test_refusals():
    """Two source channels a group, float64, and what no tile holds."""
    for p, dtype, layout in [
        (Problem((4, 4), (1, 1), 2, 1, 2), torch.float32, "NCHW"),
        (Problem((4, 4), (1, 1), 1, 1, 2), torch.float64, "NCHW"),
        (Problem((120, 120), (100, 100), 1, 1, 8), torch.float16, "NHWC"),
        (Problem((2000, 2000), (20, 1), 1, 1, 2, stride=(20, 100)), torch.float32, "NCHW"),
    ]:
        with pytest.raises(kernels.Fault, match="not served"):
            kernels.run([conv_kernels.case(p, "small", dtype, layout).call(KERNEL)])
