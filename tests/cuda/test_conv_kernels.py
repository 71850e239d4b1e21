"""The convolution kernels on the CPU executor, against the float64 oracle: the plain ones, those in tiles of tensor
cores, those of first layers, and the depthwise ones. Those of the weight are in test_conv_weight_kernels.py.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support import conv_kernels, kernels
from support.conv_kernels import MODES, PASSES, Problem, case, check_all, check_parts, error
from support.pairs import FULL, pairwise, todays
from support.seeds import SWEEP_SEED

pytestmark = pytest.mark.timeout(1200)  # the first that runs compiles the executor

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
BOUND = {FLOAT: 2e-6, HALF: 1.5e-3, BFLOAT: 1.2e-2}
# Types, and whether float32 is computed strictly: by three products of tf32, or by one.
KINDS = {
    "conv_plain": [(torch.float64, False), (FLOAT, False), (HALF, False), (BFLOAT, False)],
    "conv_tiles": [(HALF, False), (BFLOAT, False), (FLOAT, False), (FLOAT, True)],
    "conv_stem": [(FLOAT, True), (FLOAT, False), (HALF, True), (BFLOAT, True)],
    "conv_depthwise": [(FLOAT, False), (HALF, False), (BFLOAT, False)],
}
LAYOUTS = pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
TILES = pytest.mark.parametrize(("dtype", "strict"), KINDS["conv_tiles"])
OF_TILES = [(*kind, layout) for kind in KINDS["conv_tiles"] for layout in ("NCHW", "NHWC")]
TILES_AND_LAYOUTS = pytest.mark.parametrize(("dtype", "strict", "layout"), todays(OF_TILES, 3))

# Of each kernel's random problems: the most places along depth, rows and columns; kernel sizes, strides, dilations.
DRAWN = {
    "conv_plain": ((7, 11, 13), [1, 2, 3, 3, 4, 5], [1, 1, 2, 3], [1, 1, 2, 3]),
    "conv_tiles": ((7, 11, 13), [1, 2, 3, 3, 4, 5], [1, 1, 2, 3], [1, 1, 2, 3]),
    "conv_stem": ((3, 16, 40), [1, 2, 3, 3, 4, 5, 7], [1, 1, 2, 2, 3], [1, 1, 1, 2, 3]),
    "conv_depthwise": ((5, 24, 40), [1, 2, 3, 3, 4, 5, 7], [1, 1, 1, 2, 3], [1, 1, 1, 2, 5]),
}
COUNTS = {"conv_plain": (18, 36), "conv_tiles": (16, 28), "conv_stem": (8, 16), "conv_depthwise": (18, 27)}
SUMS = [
    *(("conv_plain", pass_, mode) for pass_ in PASSES for mode in MODES),
    *(("conv_depthwise", "weight", mode) for mode in MODES),
    *((kernel, "small", mode) for kernel in ("conv_tiles", "conv_stem", "conv_depthwise") for mode in MODES),
    *((kernel, "big", "zeros") for kernel in ("conv_tiles", "conv_stem", "conv_depthwise")),
]


def problem(choose: random.Random, kernel: str, dims: int, mode: str, pass_: str) -> Problem:
    """The depthwise way back knows one source channel a group as one output."""
    most, taps, strides, dilations = DRAWN[kernel]

    def axis(d: int) -> tuple[int, ...]:
        size = choose.randint(1, most[d - dims])
        if kernel == "conv_depthwise" and d == dims - 1:
            size += -size % choose.choice([1, 8])  # rows of whole pieces
        few = kernel == "conv_stem" and d == dims - 3
        return size, choose.choice([1, 2] if few else taps), choose.choice(strides), choose.choice(dilations)

    def channels() -> tuple[int, ...]:
        if kernel == "conv_depthwise":
            outputs = 1 if pass_ == "big" else choose.choice([1, 1, 2, 3])
            return 1, outputs, choose.choice([1, 3, 8, 16, 24, 40]), choose.randint(1, 2)
        if kernel == "conv_stem":
            few, many = choose.randint(1, 4), choose.choice([1, 5, 8, 24, 64, 70])
            return *((few, many) if pass_ == "small" else (many, few)), 1, choose.randint(1, 2)
        return choose.randint(1, 5), choose.randint(1, 4), choose.choice([1, 1, 2, 3]), choose.randint(1, 3)

    while True:
        found = conv_kernels.drawn(choose, dims, mode, axis, channels)
        products = torch.Size(found.kernel).numel() * torch.Size(found.small_shape).numel()
        if kernel != "conv_tiles" or products <= (20_000 if FULL else 8_000):  # a slice a depth is dear here
            return found


@pytest.mark.parametrize(("kernel", "pass_", "mode"), todays(SUMS, 4))
def test_sums(kernel, pass_, mode):
    choose = random.Random(f"{SWEEP_SEED}{kernel}{mode}{pass_}")
    torch.manual_seed(choose.randint(0, 999))
    cases, kinds = [], KINDS[kernel]
    for number in range(COUNTS[kernel][FULL] // (2 if kernel == "conv_tiles" and mode == "zeros" else 1)):
        p = problem(choose, kernel, number % 3 + 1, mode, pass_)
        dtype, strict = kinds[number % 4] if len(kinds) == 4 else kinds[number // 3 % 3]
        parts, bits = pass_ != "weight" and choose.random() < 0.5, kernel in ("conv_stem", "conv_depthwise")
        masked = choose.random() < 0.5
        cases.append(conv_kernels.swept(choose, p, pass_, dtype, masked, parts, bits, strict=strict))
    check_all(kernel, cases, offs=[choose.choice([0, 0, 4]) if kernel == "conv_depthwise" else 0 for _ in cases])


# Sources, outputs, groups for the way there; they are swapped for the way back.
OF_PARTS = {"conv_plain": (2, 3, 1), "conv_tiles": (16, 10, 1), "conv_stem": (3, 8, 1), "conv_depthwise": (1, 1, 8)}


@LAYOUTS
@pytest.mark.parametrize("pass_", ["small", "big"])
@pytest.mark.parametrize("kernel", OF_PARTS)
def test_a_part_of_the_outputs(kernel, pass_, layout):
    one, other, groups = OF_PARTS[kernel]
    channels = (other, one) if pass_ == "big" else (one, other)
    size, dtype = {"conv_depthwise": ((37, 72), HALF), "conv_tiles": ((21, 50), BFLOAT)}.get(kernel, ((21, 50), FLOAT))
    p = Problem(size, (3, 5), *channels, groups, stride=(1, 2), dilation=(2, 1), padding=((1, 2), (0, 3)))
    whole = case(p, pass_, dtype, layout, strict=kernel == "conv_stem")
    height, width = p.shape(pass_)[2:]
    check_parts(kernel, whole, [((0, 1), (0, width)), ((1, 15), (2, 21)), ((height - 1, height), (1, width))])


@LAYOUTS
@pytest.mark.parametrize(("kernel", "pass_"), [
    *((kernel, pass_) for kernel in ("conv_tiles", "conv_stem", "conv_plain") for pass_ in ("small", "big")),
    *(("conv_depthwise", pass_) for pass_ in ("small", "weight")),
])  # fmt: skip
def test_past_two_to_the_31(kernel, pass_, layout):
    channels = 1 if layout == "NCHW" else 4 if kernel == "conv_stem" else 8
    each = (1, channels) if kernel == "conv_depthwise" else (channels, 1)
    got, want = conv_kernels.far(kernel, pass_, layout, *each)
    if pass_ == "weight":
        got, want = got.flatten()[-8:], want.flatten()[-8:]  # of the block that adds up parts
    else:  # places whose inputs the part has, in the last block: 256 results of the plain kernel
        rows = slice(-1 if kernel == "conv_plain" else 1, None)
        got, want = got[..., rows, -8:], want[..., rows, -8:]
    assert error(got, want) < BOUND[HALF]


@pytest.mark.parametrize(("kernel", "p", "dtype", "layout"), [
    ("conv_depthwise", Problem((4, 4), (1, 1), 2, 1, 2), FLOAT, "NCHW"),  # two source channels a group
    ("conv_depthwise", Problem((4, 4), (1, 1), 1, 1, 2), torch.float64, "NCHW"),
    ("conv_depthwise", Problem((120, 120), (100, 100), 1, 1, 8), HALF, "NHWC"),  # what no tile holds
    ("conv_depthwise", Problem((2000, 2000), (20, 1), 1, 1, 2, stride=(20, 100)), FLOAT, "NCHW"),
    ("conv_stem", Problem((4, 4), (1, 1), 5, 1), FLOAT, "NCHW"),  # more than four channels
    ("conv_stem", Problem((4, 4), (1, 1), 1, 1, 2), FLOAT, "NCHW"),  # groups
    ("conv_stem", Problem((4, 4), (1, 1), 1, 1), torch.float64, "NCHW"),
    ("conv_stem", Problem((210, 210), (3, 3), 1, 1, dilation=(100, 100)), HALF, "NCHW"),
])  # fmt: skip
def test_refusals(kernel, p, dtype, layout):
    with pytest.raises(kernels.Fault, match="not served"):
        kernels.run([case(p, "small", dtype, layout).call(kernel)])


@TILES_AND_LAYOUTS
def test_several_chunks_tiles_and_outputs(layout, dtype, strict):
    """More channels than a chunk, more outputs than a warp's and a block's, more rows and columns than a tile."""
    chunk = 16 if dtype == FLOAT else 32
    torch.manual_seed(3)
    cases = []
    for p in [
        Problem((12, 40), (3, 3), 2 * chunk + 8, 72, padding=((1, 1), (1, 1))),
        Problem((9, 16), (1, 1), 3 * chunk, 136),
        Problem((18, 34), (3, 2), chunk, 8, groups=2, stride=(2, 2), padding=((1, 0), (1, 1))),
    ]:
        shape = p.small_shape
        more = {"keep": conv_kernels.filled(p.big_shape, FLOAT, layout) > 0} if p.groups == 1 else {}
        if layout == "NHWC" or shape[-1] % 8 == 0:
            more |= {"relu": True, "bits": torch.full((torch.Size(shape).numel() // 8,), 0xEE, dtype=torch.uint8)}
        cases.append(case(p, "small", dtype, layout, strict=strict, **more))
    check_all("conv_tiles", cases)


SMALL_IMAGES = [
    Problem((7, 7), (3, 3), 24, 16, images=8, padding=((1, 1), (1, 1))),
    Problem((9, 9), (3, 3), 8, 72, 2, images=5, padding=((1, 1), (2, 0)), mode="reflect"),
    Problem((5, 8), (2, 3), 40, 8, images=8, dilation=(2, 1), padding=((1, 2), (1, 1)), mode="circular"),
    Problem((9, 3), (5, 1), 8, 8, images=5, stride=(3, 1), padding=((2, 2), (0, 0)), mode="replicate"),
    Problem((6, 8), (1, 1), 32, 8, images=3),
    Problem((8, 9), (1, 1), 8, 8, images=5, stride=(2, 2)),
    Problem((9, 9), (2, 2), 8, 8, images=8, stride=(3, 2)),  # images share no rows
    Problem((1, 16), (1, 3), 16, 8, images=8, padding=((0, 0), (1, 1))),  # one row an image
    Problem((21,), (3,), 16, 24, images=70, padding=((1, 1),)),
    Problem((3, 4, 5), (2, 3, 2), 8, 8, images=8, padding=((1, 0), (1, 1), (0, 1))),
]


@pairwise(kind=KINDS["conv_tiles"], layout=["NCHW", "NHWC"], pass_=["small", "big"])
def test_tiles_over_small_images(pass_, layout, kind):
    """With a mask of the source, with every part of an epilogue."""
    dtype, strict = kind
    torch.manual_seed(11)
    cases = []
    for p in SMALL_IMAGES:
        if pass_ == "big":
            p = replace(p, mode="zeros")
        keep = conv_kernels.filled(p.big_shape if pass_ == "small" else p.small_shape, FLOAT, layout) > 0
        parts = conv_kernels.epilogue(p.shape(pass_), dtype, layout, conv_kernels.writes_bits(p, pass_, layout))
        cases.append(case(p, pass_, dtype, layout, strict=strict, keep=keep, **parts))
    check_all("conv_tiles", cases)


@TILES_AND_LAYOUTS
def test_images_together_as_alone(layout, dtype, strict):
    """The same bits whatever images a batch has, and whatever part of the outputs is computed."""
    torch.manual_seed(12)
    for p in SMALL_IMAGES[:3]:
        together = case(p, "small", dtype, layout, strict=strict)
        alone = case(replace(p, images=1), "small", dtype, layout, strict=strict)
        alone.big.copy_(together.big[-1:])
        alone.weight.copy_(together.weight)
        found = kernels.run([c.call("conv_tiles") for c in (together, alone)])
        of_all, of_one = (c.result(r) for c, r in zip((together, alone), found, strict=True))
        assert torch.equal(of_all[-1:], of_one)
    height, width = SMALL_IMAGES[0].shape("small")[2:]
    whole = case(SMALL_IMAGES[0], "small", dtype, layout, strict=strict)
    check_parts("conv_tiles", whole, [((0, 3), (0, width)), ((3, 4), (2, 5)), ((4, height), (1, width))])


@TILES
@pytest.mark.parametrize("shared", [99, 163])
def test_bits_in_words(shared, dtype, strict):
    """Where 32 channels begin at a word of bits: whole chunks, and halves of words for float32. One, two and three
    halo tiles in shared memory.
    """
    torch.manual_seed(7)
    cases = []
    for p in [
        Problem((16, 17), (3, 3), 64, 8, padding=((1, 1), (1, 1))),
        Problem((5, 12), (1, 1), 96, 72, images=5),
        Problem((7, 7), (3, 3), 64, 8, images=8, padding=((1, 1), (1, 1))),
        Problem((4, 9), (3, 2), 32, 8, groups=2, padding=((2, 1), (0, 1)), mode="circular"),
        Problem((3, 4, 5), (2, 2, 2), 64, 8, padding=((1, 0), (0, 1), (1, 1))),
    ]:
        keep = conv_kernels.filled(p.big_shape, FLOAT, "NHWC") > 0
        cases.append(case(p, "small", dtype, "NHWC", strict=strict, keep=keep))
    check_all("conv_tiles", cases, shared=shared)


@pairwise(layout=["NCHW", "NHWC"], shared=[99, 163, 227], pass_=["small", "big"])  # KiB: every GPU, an A100, an H100
def test_tiles_that_only_just_fit(pass_, layout, shared):
    """One halo tile instead of two without room for more, rows of taps in several tiles, and columns far apart."""
    torch.manual_seed(5)
    problems = [
        Problem((20, 20), (3, 3), 40, 8, stride=(2, 2), padding=((1, 1), (1, 1))),
        Problem((40, 40), (7, 7), 8, 8, dilation=(5, 5), padding=((15, 15), (15, 15))),
        Problem((9, 9), (7, 7), 40, 8, padding=((3, 3), (3, 3))),
    ]
    check_all("conv_tiles", [case(p, pass_, HALF, layout) for p in problems], shared=shared)


@LAYOUTS
def test_depthwise_weight_gradient_of_many_tiles(layout):
    """Several tiles a part; and the same bits when it is made again."""
    c = case(Problem((5, 4), (2, 2), 1, 1, 272, 48, padding=((0, 1), (1, 1))), "weight", FLOAT, layout)
    first, second = (c.result(found) for found in kernels.run([c.call("conv_depthwise")] * 2))
    assert error(first, c.expected()) < 1e-6
    assert torch.equal(first, second)


@LAYOUTS
def test_depthwise_taps_far_apart(layout):
    """A dilation that no tile spans: a tile for each tap along rows; with channels together along columns, too."""
    p = Problem((140, 150), (3, 3), 1, 1, 16, dilation=(60, 60), padding=((60, 60), (60, 60)), mode="reflect")
    c = case(p, "small", BFLOAT, layout)
    (found,) = kernels.run([c.call("conv_depthwise")])
    assert error(c.result(found), c.expected()) < BOUND[BFLOAT]


@LAYOUTS
def test_an_infinity_in_the_corner(layout):
    """Only the last tap meets it: places beside the small grid count for nothing."""
    c = case(Problem((9, 7), (2, 3), 1, 1, 8), "weight", BFLOAT, layout)
    c.big[0, 3, -1, -1] = torch.inf
    (found,) = kernels.run([c.call("conv_depthwise")])
    got, expected = c.result(found), c.expected()
    assert torch.equal(got.isfinite(), expected.isfinite()) and int(got.isfinite().logical_not().sum()) == 1


@pytest.mark.parametrize(("dtype", "strict"), KINDS["conv_stem"])
def test_an_infinity_stays_where_it_is(dtype, strict):
    """Weights that fill up the inner dimension of a first layer's products meet no value of the source."""
    c = case(Problem((12, 40), (3, 3), 3, 8), "small", dtype, strict=strict)
    c.big[0, 1, 6, 20] = torch.inf
    (found,) = kernels.run([c.call("conv_stem")])
    got, expected = c.result(found), c.expected()
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert error(got[finite], expected[finite]) < (2e-3 if dtype == FLOAT and not strict else BOUND[dtype])


def test_large_numbers_in_float32():
    """The largest number, which rounds to infinity in tf32, counts as itself."""
    c = case(Problem((4, 9), (1, 1), 1, 3), "small", FLOAT, strict=True)
    c.big.fill_(torch.finfo(FLOAT).max)
    c.weight.mul_(0.1)
    (found,) = kernels.run([c.call("conv_stem")])
    assert error(c.result(found), c.expected()) < BOUND[FLOAT]
