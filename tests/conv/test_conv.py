"""Every operator against the oracle: output and gradients, in tiles and in one piece, with the path of each pass.

One theme a test, as pairs of values; calls that differ in everything at once are the sweep's (test_conv_sweep.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import reference
from support.checks import check, check_tiled
from support.configurations import CONTENTS, DTYPES, GRAD_LAYOUTS, LAYOUTS, REQUIRES, SIZES, SPLITS, plain
from support.pairs import pairwise

import patchconv_native as pc

BOTH = [False, True]  # convolution, transposed convolution
MODES = ["zeros", "reflect", "replicate", "circular"]


def one_cut_in_1d(**case) -> bool:
    """A line can be cut in one dimension only."""
    return case["cut"] < len(SPLITS[case["dims"]])


@pairwise(
    one_cut_in_1d, dims=[1, 2, 3], transposed=BOTH, cut=[0, 1, 2], dtype=list(DTYPES), stride=[1, 2, 3],
    padding=[0, 1, 2], dilation=[1, 2],
)  # fmt: skip
def test_stride_padding_dilation(device, dims, transposed, cut, dtype, stride, padding, dilation):
    c = plain(
        dims,
        transposed=transposed, dtype=dtype, sizes=tuple(n + 8 for n in SIZES[dims]), stride=stride, padding=padding,
        dilation=dilation, output_padding=stride - 1 if transposed else 0, splits=SPLITS[dims][cut],
    )  # fmt: skip
    check_tiled(c, device)


@pairwise(
    transposed=BOTH,
    kernel=[(1, 1), (2, 2), (4, 2), (1, 7), (7, 1), (5, 5), (9, 3), (16, 12)],
    splits=[(4, 1), (1, 4), (3, 2)],
)
def test_kernels(device, transposed, kernel, splits):
    padding = tuple(k // 2 for k in kernel)
    check_tiled(plain(transposed=transposed, kernel=kernel, padding=padding, sizes=(31, 29), splits=splits), device)


@pairwise(transposed=BOTH, stride=[4, 7], kernel=[1, 2])
def test_stride_beyond_the_kernel(device, transposed, stride, kernel):
    """Input rows that no window touches get a gradient of zero, in tiles that may hold nothing else."""
    c = plain(
        transposed=transposed, sizes=(5, 6) if transposed else (30, 29), kernel=kernel, stride=stride, padding=0,
        output_padding=(stride - 1, 0) if transposed else 0, splits=(3, 2),
    )  # fmt: skip
    check_tiled(c, device)
    if not transposed:
        check(replace(c, splits=(100, 100)), device)


@pairwise(
    dims=[1, 2, 3], transposed=BOTH, channels=[(4, 6, 1), (4, 6, 2), (4, 4, 4), (4, 8, 4), (1, 5, 1), (6, 3, 3)],
    batch=[None, 0, 1, 3], bias=[True, False],
)  # fmt: skip
def test_channels_groups_and_batches(device, dims, transposed, channels, batch, bias):
    """Every image counts in the gradients of weight and bias, also in an unbatched call, also where there is none."""
    channels, outputs, groups = channels
    c = plain(dims, transposed=transposed, channels=channels, outputs=outputs, groups=groups, batch=batch, bias=bias)
    if batch == 0:
        check(c, device)
        check(replace(c, splits=None), device)
    else:
        check_tiled(c, device)


@pairwise(
    one_cut_in_1d, dims=[1, 2, 3], mode=MODES, first=[(2, 2), (3, 0), (0, 3), (2, 1)], stride=[1, 2], kernel=[3, 4],
    cut=[0, 1, 2],
)  # fmt: skip
def test_padding(device, dims, mode, first, stride, kernel, cut):
    """As much on both sides, and not. The gradient of padding is added to the elements that it repeats."""
    before, after = first
    padding = 2 if before == after else (*first, 0, 2, 1, 0)[: 2 * dims]
    more = {"stride": stride, "kernel": kernel, "splits": SPLITS[dims][cut]}
    check_tiled(plain(dims, padding_mode=mode, padding=padding, content="ramp", **more), device)


@pairwise(mode=["reflect", "circular"], splits=[None, (2, 3)], content=["ramp", "noise"])
def test_padding_as_large_as_its_mode_allows(device, mode, splits, content):
    """Circular padding may show the whole input again on both sides; reflection all but the border."""
    padding = (4, 5) if mode == "reflect" else (5, 6)
    check(plain(sizes=(5, 6), padding=padding, padding_mode=mode, splits=splits, content=content), device)


@pairwise(
    padding=["same", "valid"],
    kernel=[((3, 3), (1, 1)), ((2, 4), (1, 1)), ((1, 6), (2, 3)), ((4, 3), (3, 2))],
    mode=MODES,
)
def test_named_padding(device, padding, kernel, mode):
    kernel, dilation = kernel
    c = plain(padding=padding, kernel=kernel, dilation=dilation, padding_mode=mode, sizes=(19, 18), splits=(3, 2))
    check_tiled(c, device)


@pairwise(
    dims=[1, 2, 3], transposed=BOTH, layout=LAYOUTS, weight_layout=["contiguous", "channels_last", "sliced"],
    grad_layout=GRAD_LAYOUTS,
)  # fmt: skip
def test_layouts(device, dims, transposed, layout, weight_layout, grad_layout):
    c = plain(dims, transposed=transposed, layout=layout, weight_layout=weight_layout, grad_layout=grad_layout)
    check_tiled(c, device)


@pairwise(transposed=BOTH, dims=[2, 3], splits=[None, 1, 3])
def test_channels_last_is_kept(device, transposed, dims, splits):
    """By output and gradient, in whatever pieces."""
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.randn(2, 4, *SIZES[dims], device=device).contiguous(memory_format=last).requires_grad_()
    w = torch.randn(4, 4, *[3] * dims, device=device, requires_grad=True)
    call = getattr(pc.functional, f"conv{'_transpose' if transposed else ''}{dims}d")
    y = call(x, w, padding=1, splits=splits)
    assert pc.last_path()["path"] == ("tiled" if splits == 3 else "stock")
    y.square().sum().backward()
    for tensor in (y, x.grad):
        assert tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()
    assert w.grad.shape == w.shape


@pairwise(
    transposed=BOTH, requires_grad=REQUIRES, bias=[True, False], content=CONTENTS, splits=[(4, 3), (3, 1), None],
)  # fmt: skip
def test_which_gradients_are_asked_for(device, transposed, requires_grad, bias, content, splits):
    """Of images with structure as well: a mistake at a seam or a border shows, where noise would hide it."""
    what = {"requires_grad": requires_grad, "bias": bias, "content": content, "splits": splits}
    c = plain(transposed=transposed, kernel=(5, 4), padding=2, **what)
    (check if splits is None else check_tiled)(c, device)


@pairwise(transposed=BOTH, dtype=["bfloat16", "float16"])
def test_weight_gradient_is_not_rounded_once_a_tile(device, transposed, dtype):
    """A sum over hundreds of tiles kept in half precision would stop growing: each term is below half a unit."""
    sums = {"sizes": (64, 64), "splits": (64, 8), "content": "offset", "grad_layout": "expanded"}
    check_tiled(plain(transposed=transposed, dtype=dtype, batch=1, channels=2, outputs=2, **sums), device)


@pairwise(dtype=[torch.bfloat16, torch.float16], mode=MODES[1:], stride=[1, 2], splits=[None, 3, (2, 4)])
def test_half_precision_is_rounded_once(device, dtype, mode, stride, splits):
    """What padding received is added to the input's gradient before that is rounded. cuDNN gives it rounded."""
    x = torch.randn(2, 5, 11, 13, device=device).to(dtype).requires_grad_()
    w = torch.randn(4, 5, 5, 5, device=device).to(dtype)
    y = pc.functional.conv2d(x, w, stride=stride, padding=4, padding_mode=mode, splits=splits)
    grad = torch.randn_like(y)
    with pc.record_paths() as records:
        (got,) = torch.autograd.grad(y, x, grad)
    assert [r["path"] for r in records] == ["tiled"]

    def gradient(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        exact_x = x.detach().double().requires_grad_()
        exact = reference.conv(exact_x, weight.double(), None, stride=stride, padding=4, padding_mode=mode)
        return torch.autograd.grad(exact, exact_x, grad.double())[0]

    wanted, unit = gradient(w, grad), 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    # Half a unit in the last place, of a number that is up to twice a power of two, and float32's own error.
    size = wanted.abs() + (gradient(w.abs(), grad.abs()) if device == "cuda" else 0)
    assert ((got.double() - wanted).abs() <= 1.01 * unit * size + 1e-5).all()


def test_scalar_and_list_arguments_are_the_same(device):
    x, w = torch.randn(1, 2, 9, 8, device=device), torch.randn(3, 2, 3, 3, device=device)
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
    """A NaN may reach exactly the outputs whose window covers it: a zero weight times padding must not spread it."""
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
