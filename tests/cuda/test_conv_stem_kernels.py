"""The convolution kernel of first layers on the CPU executor, against the float64 oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import conv_kernels, kernels
from support.conv_kernels import MODES, Case, Problem
from support.pairs import FULL
from support.seeds import SWEEP_SEED

KERNEL = "conv_stem"
# Of float32 strictly, of float32 in tf32, and of the other types.
KINDS = [(torch.float32, True), (torch.float32, False), (torch.float16, True), (torch.bfloat16, True)]
SUMS = {KINDS[0]: 1e-6, KINDS[1]: 1e-3, KINDS[2]: 5e-7, KINDS[3]: 5e-7}
BOUND = {KINDS[0]: 2e-6, KINDS[1]: 2e-3, KINDS[2]: 1.5e-3, KINDS[3]: 1.2e-2}


def problem(choose: random.Random, dims: int, mode: str, pass_: str) -> Problem:
    while True:
        stride, dilation, kernel, size, padding = [], [], [], [], []
        for d in range(dims):
            kernel.append(choose.choice([1, 2, 3, 3, 4, 5, 7] if d + 3 > dims else [1, 2]))
            stride.append(choose.choice([1, 1, 2, 2, 3]))
            dilation.append(choose.choice([1, 1, 1, 2, 3]))
            size.append(choose.randint(1, 3 if d + 3 == dims else 40 if d + 1 == dims else 16))
            widest = {"zeros": 4, "reflect": size[-1] - 1, "replicate": 4, "circular": size[-1]}[mode]
            padding.append((choose.randint(0, min(4, widest)), choose.randint(0, min(4, widest))))
        few, many = choose.randint(1, 4), choose.choice([1, 5, 8, 24, 64, 70])
        found = Problem(
            tuple(size), tuple(kernel), few if pass_ == "small" else many, many if pass_ == "small" else few, 1,
            choose.randint(1, 2), tuple(stride), tuple(dilation), tuple(padding), mode,
        )  # fmt: skip
        if all(found.small(d) >= 1 for d in range(dims)):
            return found


def writes_bits(p: Problem, pass_: str, layout: str) -> bool:
    channels, *places = p.shape(pass_)[1:]
    one_launch = pass_ == "small" or p.stride[p.dims - 1] == 1 or layout == "NHWC"
    return one_launch and (channels if layout == "NHWC" else places[-1]) % 8 == 0 and layout != "sliced"


def swept(choose: random.Random, number: int, mode: str, pass_: str) -> Case:
    p = problem(choose, number % 3 + 1, mode, pass_)
    dtype, strict = KINDS[number % 4]
    layout = choose.choice(["NCHW", "NHWC", "sliced"])
    more: dict[str, Any] = {"strict": strict}
    if number % 5 == 0 and layout != "sliced":
        read = p.big_shape if pass_ == "small" else p.small_shape
        more["keep"] = conv_kernels.filled(read, torch.float32, layout) > 0
    if choose.random() < 0.5:
        more |= conv_kernels.epilogue(p.shape(pass_), dtype, layout, writes_bits(p, pass_, layout))
    return conv_kernels.case(p, pass_, dtype, layout, choose.choice(["noise", "steps", "ramp"]), **more)


@pytest.mark.parametrize(("pass_", "mode"), [*(("small", mode) for mode in MODES), ("big", "zeros")])
def test_sums(mode, pass_):
    choose = random.Random(f"{SWEEP_SEED}{mode}{pass_}")
    torch.manual_seed(choose.randint(0, 999))
    cases = [swept(choose, number, mode, pass_) for number in range(16 if FULL else 8)]
    for c, found in zip(cases, kernels.run([c.call(KERNEL) for c in cases]), strict=True):
        got = c.result(found)
        conv_kernels.check(c, got, SUMS[got.dtype, c.strict])
        if c.bits is not None:
            assert torch.equal(found[7], conv_kernels.bits_of(got > 0)), c.problem


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("pass_", ["small", "big"])
def test_a_part_of_the_outputs(pass_, layout):
    """Lines cut to a range write what they would have written, and nothing else."""
    channels = (3, 8) if pass_ == "small" else (8, 3)
    p = Problem((21, 50), (3, 5), *channels, stride=(1, 2), dilation=(2, 1), padding=((1, 2), (0, 3)))
    whole = conv_kernels.case(p, pass_, torch.float32, layout, strict=True)
    height, width = p.shape(pass_)[2:]
    cases = [whole]
    for ranges in [((0, 1), (0, width)), ((1, 15), (2, 21)), ((height - 1, height), (1, width))]:
        cases.append(Case(p, pass_, whole.big, whole.small, whole.weight, strict=True, ranges=ranges))
    first, *parts = (c.result(f) for c, f in zip(cases, kernels.run([c.call(KERNEL) for c in cases]), strict=True))
    for part, c in zip(parts, cases[1:], strict=True):
        inside = torch.zeros(height, width, dtype=torch.bool)
        inside[slice(*c.ranges[0]), slice(*c.ranges[1])] = True
        assert torch.equal(part[..., inside], first[..., inside])
        assert (part[..., ~inside] == -777).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_infinity_stays_where_it_is(kind):
    """Weights that fill up the inner dimension meet no value of the source."""
    p = Problem((12, 40), (3, 3), 3, 8)
    c = conv_kernels.case(p, "small", kind[0], strict=kind[1])
    c.big[0, 1, 6, 20] = torch.inf
    (found,) = kernels.run([c.call(KERNEL)])
    expected = c.expected()
    got, finite = c.result(found), expected.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert conv_kernels.error(got[finite], expected[finite]) < BOUND[kind]


def test_large_numbers_in_float32():
    """The largest number, which rounds to infinity in tf32, counts as itself."""
    p = Problem((4, 9), (1, 1), 1, 3)
    c = conv_kernels.case(p, "small", torch.float32, strict=True)
    c.big.fill_(torch.finfo(torch.float32).max)
    c.weight.mul_(0.1)
    (found,) = kernels.run([c.call(KERNEL)])
    assert conv_kernels.error(c.result(found), c.expected()) < BOUND[KINDS[0]]


def test_refusals():
    """More than four channels, groups, float64, and what no tile holds."""
    for p, dtype in [
        (Problem((4, 4), (1, 1), 5, 1), torch.float32),
        (Problem((4, 4), (1, 1), 1, 1, 2), torch.float32),
        (Problem((4, 4), (1, 1), 1, 1), torch.float64),
        (Problem((210, 210), (3, 3), 1, 1, dilation=(100, 100)), torch.float16),
    ]:
        with pytest.raises(kernels.Fault, match="not served"):
            kernels.run([conv_kernels.case(p, "small", dtype).call(KERNEL)])
