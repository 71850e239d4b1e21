"""The weight's gradient by tensor cores and the bias's, on the CPU executor, against the float64 oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support import conv_kernels, kernels
from support.conv_kernels import MODES, ROUNDING, Case, Problem
from support.kernels import Memory
from support.pairs import FULL
from support.seeds import SWEEP_SEED
from torch import Tensor

pytestmark = pytest.mark.timeout(1200)  # the first that runs compiles the executor

KINDS = [(torch.float16, False), (torch.bfloat16, False), (torch.float32, False), (torch.float32, True)]


def results(cases: Sequence[Case], off: int = 0) -> list[Tensor]:
    found = kernels.run([c.call("conv_weight", off) for c in cases])
    return [c.result(buffers) for c, buffers in zip(cases, found, strict=True)]


def check_one(c: Case, got: Tensor) -> None:
    """A number of tf32 is 2^-11 off at most, two are 2^-23, and their product loses 2^-22; halves multiply exactly. By
    PTX tensor cores cut their sums, as on a GPU: of many places in a row a little more is lost.
    """
    cut = 2e-5 if kernels.HOW.startswith("ptx") and not c.strict else 0
    conv_kernels.check(c, got, (5e-7 if got.dtype != torch.float32 or c.strict else 1e-3) + cut)


def check(*cases: Case) -> None:
    for c, got in zip(cases, results(cases), strict=True):
        check_one(c, got)


def problem(choose: random.Random, dims: int, mode: str, whole: bool) -> Problem:
    """With channels for asynchronous copies, if `whole`."""
    some = [8, 16, 24, 64, 72] if whole else [1, 3, 5, 16, 33, 65, 70]

    def axis(d: int) -> tuple[int, ...]:
        size, taps = choose.randint(1, {1: 70, 2: 20, 3: 8}[dims]), choose.randint(1, 7 if dims == 1 else 4)
        return size, taps, choose.choice([1, 1, 2, 3]), choose.choice([1, 1, 2, 3])

    def channels() -> tuple[int, ...]:
        return choose.choice(some), choose.choice(some), choose.choice([1, 1, 2, 3]), choose.randint(1, 3)

    while True:
        found = conv_kernels.drawn(choose, dims, mode, axis, channels)
        products = found.groups * -(-found.sources // 16) * -(-found.outputs // 16)
        if products * torch.Size((*found.small_shape[2:], *found.kernel)).numel() < 2500:
            return found


@pytest.mark.parametrize("mode", MODES)
def test_weight(mode):
    choose = random.Random(f"{SWEEP_SEED}{mode}")
    torch.manual_seed(choose.randint(0, 999))
    cases = []
    for number in range(16 if FULL else 8):
        dtype, strict = KINDS[number % 4]
        layout = choose.choice(["NCHW", "NHWC", "NHWC", "sliced"])
        p = problem(choose, number % 3 + 1, mode, layout == "NHWC" and number % 5 > 0)
        more = {"strict": strict, "limit": choose.choice([1 << 20, 4 * 3 * torch.Size(p.weight_shape).numel()])}
        masked = choose.random() < 0.4
        cases.append(conv_kernels.swept(choose, p, "weight", dtype, masked, False, layouts=[layout], **more))
    check(*cases)


@pytest.mark.parametrize(("dtype", "strict"), KINDS)
def test_same_bits(dtype, strict):
    """With both grids masked: of two runs, and however the channels lie and are aligned: sums are made in one order."""
    p = Problem((6, 40), (2, 4), 8, 24, 2, 2, (1, 2), (2, 1), ((1, 1), (3, 0)), "reflect")
    c = conv_kernels.case(p, "weight", dtype, "NHWC", strict=strict)
    c.keep = conv_kernels.filled(p.small_shape, torch.float32, "NHWC") > 0
    counts = conv_kernels.filled(p.big_shape, torch.float32, "NHWC") > 0
    c.bits = conv_kernels.bits_of(counts)
    plain = replace(c, big=c.big.contiguous(), small=c.small.contiguous(), keep=c.keep.contiguous())
    plain.bits = conv_kernels.bits_of(counts.contiguous())
    first, second, other = results([c, c, plain])
    (unaligned,) = results([c], off=dtype.itemsize)
    check_one(replace(c, big=c.big.masked_fill(~counts, 0)), first)
    assert all(torch.equal(got, first) for got in (second, other, unaligned))


@pytest.mark.parametrize(("dtype", "strict"), KINDS)
def test_parts(dtype, strict):
    """As many as the workspace allows, and one in any case."""
    p = Problem((30, 62), (2, 1), 8, 8)
    one = 4 * torch.Size(p.weight_shape).numel()
    for limit in (one - 4, one, 2 * one, 3 * one + 4, 100 * one):
        check(conv_kernels.case(p, "weight", dtype, "NHWC", "ramp", strict=strict, limit=limit))


@pytest.mark.parametrize(("dtype", "strict"), KINDS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_many_places(dtype, strict, layout):
    """More in a part than are summed at once."""
    p = Problem((103, 122), (1, 1), 8, 8)
    c = conv_kernels.case(p, "weight", dtype, layout, "ramp", strict=strict, limit=4 * 8 * 8)
    c.big /= 8  # so that half precision holds the sums
    check(c)


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (1, 40), (2, 1), (2, 3), (3, 1), (7, 2), (4, 6), (50, 33)])
def test_columns_of_any_distance(stride, dilation):
    """Runs that taps share, that they do not, and columns that none asks for."""
    cases = []
    for number, taps in enumerate((2, 3, 4, 5, 7)):
        dtype, strict = KINDS[number % 4]
        size = 37 * stride + dilation * (taps - 1)
        p = Problem((2, size), (1, taps), 8, 8, 1, 1, (1, stride), (1, dilation), ((0, 0), (stride, 1)))
        cases.append(conv_kernels.case(p, "weight", dtype, "NHWC", strict=strict))
    check(*cases)


@pytest.mark.parametrize(("dtype", "strict"), KINDS)
def test_segments_at_edges(dtype, strict):
    """All channels of a tile and three taps, or fewer: rows of 32, 16 and 8 columns that end inside and outside of the
    images, above, below and beside them, and planes that are all padding.
    """
    three = (3, 3)
    cases = [
        Problem((28, 28), three, 64, 64, padding=((1, 1), (1, 1))),
        Problem((9, 70), three, 24, 72, images=2, padding=((0, 2), (5, 1))),
        Problem((7, 14), three, 72, 64, images=3, padding=((1, 1), (1, 1))),
        Problem((13, 11), (5, 3), 8, 64, stride=(2, 2), dilation=(1, 2), padding=((3, 0), (0, 3))),
        Problem((40, 9), (2, 7), 64, 16, groups=2, stride=(3, 1), padding=((4, 4), (4, 4))),
        Problem((3, 6, 20), (3, 3, 3), 8, 64, padding=((2, 2), (1, 1), (1, 1))),
        Problem((2, 3), three, 8, 8, stride=(1, 3), padding=((40, 0), (0, 40))),
        Problem((5, 33), (1, 1), 64, 64, images=2, stride=(2, 2)),
    ]
    check(*(conv_kernels.case(p, "weight", dtype, "NHWC", strict=strict) for p in cases))


@pytest.mark.parametrize(("dtype", "strict"), KINDS)
def test_no_image(dtype, strict):
    c = conv_kernels.case(Problem((5, 6), (3, 2), 3, 4, images=0), "weight", dtype, strict=strict)
    (got,) = results([c])
    assert (got == 0).all()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_weight_past_two_to_the_31(layout):
    """Images and outputs 2^31 elements apart: offsets are not cut to 32 bits. Of the tensors the end is looked at."""
    far = 2**31
    p = Problem((6, 9), (3, 2), 8, 2 * 8, images=2, padding=((1, 0), (0, 1)))
    c = conv_kernels.case(p, "weight", torch.float16, layout)
    c.big[0], c.small[0] = 0, 0
    call = c.call("conv_weight")
    numbers = [far if i in (36, 41, 46) else number for i, number in enumerate(call.numbers)]
    windows = [conv_kernels.storage(t[-1:]) for t in (c.big, c.small, c.weight)]
    images = [Memory(windows[i], 0, far + len(windows[i])) for i in range(2)]
    weight = Memory(windows[2], 0, 15 * far + len(windows[2]))
    (found,) = kernels.run([replace(call, numbers=numbers, buffers=[*images, weight, *call.buffers[3:]])])
    got = torch.as_strided(found[2], c.weight[-1:].shape, c.weight[-1:].stride())
    last = replace(c, small=c.small[:, -1:], weight=c.weight[-1:], problem=replace(p, outputs=1))
    check_one(last, got)


def sums_case(p: Problem, dtype: torch.dtype, layout: str, content: str, masked: bool) -> Case:
    c = conv_kernels.case(p, "weight", dtype, layout, content)
    if masked:
        c.keep = conv_kernels.filled(p.small_shape, torch.float32, layout) > 0
    c.bias = torch.full((p.small_shape[1],), -777, dtype=dtype)
    return c


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_channel_sums(dtype):
    """Few channels and many, rows that are pieces and rows that are not; one block a channel and several."""
    choose = random.Random(str(dtype))
    cases = []
    for number, size in enumerate([(1,), (97,), (13, 11), (16, 8), (64, 160), (3, 5, 7), (4, 4, 24), (1, 1, 1)] * 2):
        p = Problem(
            size, (1,) * len(size), 1, choose.choice([1, 3, 8, 16, 33, 300 if number < 3 else 40]), 1, number % 4
        )
        layout = choose.choice(["NCHW", "NHWC", "sliced"])
        masked = layout != "sliced" and number % 3 > 0
        cases.append(sums_case(p, dtype, layout, "steps" if len(size) == 2 else "ramp", masked))
    for channels in (16, 40):  # side by side, whatever was drawn
        cases.append(sums_case(Problem((16, 8), (1, 1), 1, channels, images=2), dtype, "NHWC", "steps", True))
    calls = [c.call("conv_channel_sums", dtype.itemsize * (i % 5 == 4)) for i, c in enumerate(cases)]
    for c, found, again in zip(cases, kernels.run(calls), kernels.run(calls), strict=True):
        kept = c.small.double() if c.keep is None else c.small.double().masked_fill(~c.keep, 0)
        places = [0, *range(2, kept.dim())]
        want, terms = kept.sum(places), kept.abs().sum(places)
        bound = ROUNDING[dtype] * want.abs() + (1e-15 if dtype == torch.float64 else 2e-7) * terms
        got = found[5]
        assert got is not None and got.isfinite().all()
        assert ((got.double() - want).abs() <= bound).all(), c.problem
        assert torch.equal(got, again[5])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_channel_sums_past_two_to_the_31(layout):
    far = 2**31
    c = sums_case(Problem((5, 9), (1, 1), 1, 16, images=2), torch.float16, layout, "noise", False)
    c.small[0] = 0
    call = c.call("conv_channel_sums")
    numbers = [far if i == 41 else number for i, number in enumerate(call.numbers)]
    window = conv_kernels.storage(c.small[1:])
    buffers = [call.buffers[0], Memory(window, 0, far + len(window)), *call.buffers[2:]]
    (found,) = kernels.run([replace(call, numbers=numbers, buffers=buffers)])
    torch.testing.assert_close(found[5].double(), c.small.double().sum((0, 2, 3)), rtol=1e-3, atol=1e-3)
