"""The plain convolution kernels on the CPU executor, against the float64 oracle; and the lines they sum along."""

from __future__ import annotations

import random

import pytest
import torch
from support import conv_kernels, kernels
from support.conv_kernels import MODES, PASSES, Problem
from support.pairs import FULL
from support.seeds import SWEEP_SEED

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Of float64 the oracle adds up no more exactly than the kernel does: over two thousand terms both may be off.
SUMS = {torch.float64: 1e-13, torch.float32: 5e-7, torch.float16: 5e-7, torch.bfloat16: 5e-7}
CASES = 36 if FULL else 18


def problem(choose: random.Random, dims: int, mode: str) -> Problem:
    """A small problem in which at least one output sees the input."""
    while True:
        stride, dilation, kernel, size, padding = [], [], [], [], []
        for _ in range(dims):
            kernel.append(choose.choice([1, 2, 3, 3, 4, 5]))
            stride.append(choose.choice([1, 1, 2, 3]))
            dilation.append(choose.choice([1, 1, 2, 3]))
            size.append(choose.randint(1, 9 if dims == 3 else 13))
            widest = {"zeros": 4, "reflect": size[-1] - 1, "replicate": 4, "circular": size[-1]}[mode]
            padding.append((choose.randint(0, min(4, widest)), choose.randint(0, min(4, widest))))
        found = Problem(
            tuple(size), tuple(kernel), choose.randint(1, 5), choose.randint(1, 4), choose.choice([1, 1, 2, 3]),
            choose.randint(1, 3), tuple(stride), tuple(dilation), tuple(padding), mode,
        )  # fmt: skip
        if all(found.small(d) >= 1 for d in range(dims)):
            return found


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("mode", MODES)
def test_plain_kernels(mode, pass_):
    choose = random.Random(f"{SWEEP_SEED}{mode}{pass_}")
    torch.manual_seed(choose.randint(0, 999))
    cases = []
    for number in range(CASES):
        p = problem(choose, number % 3 + 1, mode)
        keep = more = None
        dtype, layout = DTYPES[number % 4], choose.choice(["NCHW", "NHWC", "sliced"])
        if number % 2 and layout != "sliced":
            read = p.big_shape if pass_ == "small" else p.small_shape
            keep = conv_kernels.filled(read, torch.float32, layout) > 0
        more = {"keep": keep}
        if pass_ != "weight" and number % 3 == 0:
            more |= conv_kernels.epilogue(p.shape(pass_), dtype, layout)
        cases.append(conv_kernels.case(p, pass_, dtype, layout, choose.choice(["noise", "steps", "ramp"]), **more))
    for c, found in zip(cases, kernels.run([c.call("conv_plain") for c in cases]), strict=True):
        got = c.result(found)
        conv_kernels.check(c, got, SUMS[got.dtype])


@pytest.mark.parametrize("pass_", ["small", "big"])
def test_a_part_of_the_outputs(pass_):
    """Lines cut to a range write what they would have written, and nothing else."""
    p = Problem((11, 13), (3, 4), 2, 3, stride=(2, 3), dilation=(1, 2), padding=((1, 2), (0, 3)))
    whole = conv_kernels.case(p, pass_, torch.float32)
    height, width = p.shape(pass_)[2:]
    for ranges in [((0, 1), (0, width)), ((1, 3), (2, 3)), ((height - 1, height), (1, width))]:
        part = conv_kernels.case(p, pass_, torch.float32, ranges=ranges)
        part.big, part.small, part.weight = whole.big, whole.small, whole.weight
        first, second = (
            c.result(f)
            for c, f in zip([whole, part], kernels.run([c.call("conv_plain") for c in [whole, part]]), strict=True)
        )
        inside = torch.zeros(height, width, dtype=torch.bool)
        inside[slice(*ranges[0]), slice(*ranges[1])] = True
        assert torch.equal(second[..., inside], first[..., inside])
        assert (second[..., ~inside] == -777).all()
