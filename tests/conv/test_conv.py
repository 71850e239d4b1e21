"""Forward: every operator against the oracle, argument by argument, untiled and in tiles, with the path
asserted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import reference
from support.checks import check
from support.configurations import LAYOUTS, Configuration

import patchconv_native as pc

SIZES = {1: (37,), 2: (17, 13), 3: (9, 8, 7)}
SPLITS = {1: [(4,)], 2: [(4, 1), (1, 3), (4, 3)], 3: [(3, 1, 1), (1, 1, 2), (3, 2, 2)]}


def configuration(dims: int = 2, **changes) -> Configuration:
    """A plain call, tiled, that each test changes in one respect."""
    plain = {
        "transposed": False,
        "batch": 2,
        "channels": 4,
        "outputs": 6,
        "groups": 1,
        "sizes": SIZES[dims],
        "kernel": (3,) * dims,
        "stride": (1,) * dims,
        "padding": (1,) * dims,
        "output_padding": (0,) * dims,
        "dilation": (1,) * dims,
        "padding_mode": "zeros",
        "dtype": "float32",
        "bias": True,
        "layout": "contiguous",
        "weight_layout": "contiguous",
        "grad_layout": "contiguous",
        "content": "noise",
        "requires_grad": (False, False, False),
        "splits": SPLITS[dims][-1],
        "limit": None,
        "seed": 1,
    }
    return Configuration(**(plain | changes))


def check_tiled(c: Configuration, device: str) -> None:
    """The configuration is right in the tiles it asks for, in one piece, and in what is chosen for it."""
    path = check(c, device)
    assert path["op"] == c.operator
    assert path["path"] == "tiled", path
    assert path["tiles"] == list(c.splits), path

    check(replace(c, splits=None), device)
    whole = check(replace(c, splits=(1,) * c.dims), device)
    assert whole["path"] == ("stock" if stock_serves(c) else "tiled"), whole


def stock_serves(c: Configuration) -> bool:
    """Whether stock PyTorch takes this padding without a padded copy of the input."""
    if c.transposed:
        return True
    pairs = reference.padding_pairs(c.padding, c.kernel, c.dilation)
    nothing = all(pair == (0, 0) for pair in pairs)
    return nothing or (c.padding_mode == "zeros" and all(before == after for before, after in pairs))


BOTH = pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
ALL_SPLITS = pytest.mark.parametrize(
    "dims,splits", [(d, s) for d in (1, 2, 3) for s in SPLITS[d]], ids=lambda v: str(v).replace(" ", "")
)


@BOTH
@ALL_SPLITS
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_dtypes(device, transposed, dims, splits, dtype):
    check_tiled(configuration(dims, transposed=transposed, splits=splits, dtype=dtype), device)


@BOTH
@ALL_SPLITS
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_stride_padding_dilation(device, transposed, dims, splits, stride, padding, dilation):
    sizes = tuple(2 * n for n in SIZES[dims]) if not transposed and dims < 3 else tuple(n + 4 for n in SIZES[dims])
    c = configuration(
        dims,
        transposed=transposed,
        sizes=sizes,
        stride=(stride,) * dims,
        padding=(padding,) * dims,
        dilation=(dilation,) * dims,
        output_padding=(stride - 1 if transposed else 0,) * dims,
        splits=splits,
    )
    check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (4, 2), (1, 7), (7, 1), (5, 5), (9, 3), (16, 12)])
@pytest.mark.parametrize("splits", [(4, 1), (1, 4), (3, 2)])
def test_kernels(device, transposed, kernel, splits):
    sizes = (31, 29)
    padding = tuple(k // 2 for k in kernel)
    c = configuration(transposed=transposed, kernel=kernel, padding=padding, sizes=sizes, splits=splits)
    check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("channels,outputs,groups", [(4, 6, 2), (4, 4, 4), (4, 8, 4), (1, 5, 1), (6, 3, 3)])
def test_groups_and_depthwise(device, transposed, dims, channels, outputs, groups):
    c = configuration(dims, transposed=transposed, channels=channels, outputs=outputs, groups=groups)
    check_tiled(c, device)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@ALL_SPLITS
@pytest.mark.parametrize("stride", [1, 2])
def test_padding_modes(device, mode, dims, splits, stride):
    c = configuration(
        dims, padding_mode=mode, padding=(2,) * dims, stride=(stride,) * dims, splits=splits, content="ramp"
    )
    check_tiled(c, device)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("first", [(3, 0), (0, 3), (2, 1)])
def test_asymmetric_padding(device, mode, dims, first):
    padding = (*first, 0, 2, 1, 0)[: 2 * dims]
    c = configuration(dims, padding=padding, padding_mode=mode, kernel=(4,) * dims, content="ramp")
    check_tiled(c, device)


@pytest.mark.parametrize("mode", ["reflect", "circular"])
@pytest.mark.parametrize("splits", [None, (2, 3)])
def test_padding_as_large_as_its_mode_allows(device, mode, splits):
    """Circular padding may show the whole input again on both sides; reflection all but the border."""
    padding = (4, 5) if mode == "reflect" else (5, 6)
    c = configuration(sizes=(5, 6), padding=padding, padding_mode=mode, splits=splits, content="ramp")
    check(c, device)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel,dilation", [((3, 3), (1, 1)), ((2, 4), (1, 1)), ((1, 6), (2, 3)), ((4, 3), (3, 2))])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_named_padding(device, padding, kernel, dilation, mode):
    c = configuration(
        padding=padding, kernel=kernel, dilation=dilation, padding_mode=mode, sizes=(19, 18), splits=(3, 2)
    )
    check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", ["contiguous", "channels_last", "sliced"])
def test_layouts(device, transposed, dims, layout, weight_layout):
    check_tiled(configuration(dims, transposed=transposed, layout=layout, weight_layout=weight_layout), device)


@BOTH
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_channels_last_is_kept(device, transposed, dims, splits):
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.randn(2, 4, *SIZES[dims], device=device).contiguous(memory_format=last)
    w = torch.randn(4, 4, *[3] * dims, device=device)
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    y = getattr(pc.functional, name)(x, w, padding=1, splits=splits)
    assert y.is_contiguous(memory_format=last) and not y.is_contiguous()
    assert pc.last_path()["path"] == ("tiled" if splits == 3 else "stock")


@BOTH
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("batch", [None, 0, 1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_batches(device, transposed, dims, batch, bias):
    c = configuration(dims, transposed=transposed, batch=batch, bias=bias)
    if batch == 0:
        check(c, device)
    else:
        check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("content", ["ramp", "checkerboard", "spike", "offset"])
def test_structured_images(device, transposed, content):
    """Seams and borders show on structure, where noise would hide them in its average."""
    check_tiled(configuration(transposed=transposed, content=content, kernel=(5, 4), padding=(2, 2)), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalar_and_list_arguments_are_the_same(device, dtype):
    x = torch.randn(1, 2, 9, 8, device=device, dtype=dtype)
    w = torch.randn(3, 2, 3, 3, device=device, dtype=dtype)
    one = torch.ops.patchconv.conv2d(x, w, None, 2, 1, 1, 1, splits=2)
    two = torch.ops.patchconv.conv2d(x, w, None, [2, 2], [1, 1], [1, 1], 1, splits=[2])
    three = torch.ops.patchconv.conv2d(x, w, None, [2], [1, 1, 1, 1], [1], 1, splits=[2, 1])
    assert torch.equal(one, two) and torch.equal(one, three)


def test_defaults_are_those_of_torch(device):
    x, w = torch.randn(1, 2, 9, 8, device=device), torch.randn(3, 2, 3, 3, device=device)
    assert torch.equal(torch.ops.patchconv.conv2d(x, w), torch.nn.functional.conv2d(x, w))
    t = w.transpose(0, 1).contiguous()
    assert torch.equal(torch.ops.patchconv.conv_transpose2d(x, t), torch.nn.functional.conv_transpose2d(x, t))


@pytest.mark.parametrize("splits", [None, 4])
def test_infinities_and_nan_stay_where_they_belong(device, splits):
    """A NaN may reach exactly the outputs whose window covers it: a zero weight times padding must not spread
    it.
    """
    x = torch.zeros(1, 1, 12, 12, device=device)
    x[0, 0, 5, 5] = float("nan")
    y = pc.functional.conv2d(x, torch.ones(1, 1, 3, 3, device=device), padding=1, splits=splits)
    expected = torch.zeros(12, 12, dtype=torch.bool, device=device)
    expected[4:7, 4:7] = True
    assert torch.equal(y[0, 0].isnan(), expected)


def test_result_does_not_alias_the_input(device):
    x = torch.ones(1, 1, 6, 6, device=device)
    y = pc.functional.conv2d(x, torch.ones(1, 1, 1, 1, device=device), splits=3)
    y.zero_()
    assert x.sum() == 36


def test_inputs_that_need_no_gradient_give_a_leaf(device):
    y = pc.functional.conv2d(torch.randn(1, 1, 6, 6, device=device), torch.randn(1, 1, 3, 3, device=device), splits=2)
    assert y.grad_fn is None and not y.requires_grad
    with torch.no_grad():
        w = torch.randn(1, 1, 3, 3, device=device, requires_grad=True)
        assert pc.functional.conv2d(torch.randn(1, 1, 6, 6, device=device), w, splits=2).grad_fn is None
    with torch.inference_mode():
        assert pc.functional.conv2d(torch.randn(1, 1, 6, 6, device=device), w, splits=2).is_inference()
