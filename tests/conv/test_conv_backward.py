"""Gradients against the oracle: input, weight and bias, untiled and in tiles, with the path of each pass
asserted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import reference
from support.checks import check
from support.configurations import GRAD_LAYOUTS, LAYOUTS, REQUIRES
from test_conv import ALL_SPLITS, BOTH, SPLITS, configuration

import patchconv_native as pc

ALL = (True, True, True)


def check_tiled(c, device: str) -> None:
    """All passes that run are tiled where tiles are asked for; the numbers are right with them and
    without.
    """
    with pc.record_paths() as records:
        check(c, device)
    assert {r["op"] for r in records} == {c.operator}
    wanted = {"fprop"}
    if c.requires_grad[0]:
        wanted.add("dgrad")
    if c.requires_grad[1]:
        wanted.add("wgrad")
    assert {r["pass"] for r in records} == wanted, records
    assert all(r["path"] == "tiled" for r in records), records
    assert all(r["count"] >= max(c.splits) for r in records), records
    check(replace(c, splits=None), device)


@BOTH
@ALL_SPLITS
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_dtypes(device, transposed, dims, splits, dtype):
    c = configuration(dims, transposed=transposed, splits=splits, dtype=dtype, requires_grad=ALL)
    check_tiled(c, device)


@BOTH
@ALL_SPLITS
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_stride_padding_dilation(device, transposed, dims, splits, stride, padding, dilation):
    c = configuration(
        dims,
        transposed=transposed,
        sizes=tuple(n + 8 for n in configuration(dims).sizes),
        stride=(stride,) * dims,
        padding=(padding,) * dims,
        dilation=(dilation,) * dims,
        output_padding=(stride - 1 if transposed else 0,) * dims,
        splits=splits,
        requires_grad=ALL,
    )
    check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("stride", [4, 7])
@pytest.mark.parametrize("kernel", [1, 2])
def test_stride_beyond_the_kernel(device, transposed, stride, kernel):
    """Input rows that no window touches get a gradient of zero, in tiles that may hold nothing else."""
    c = configuration(
        transposed=transposed,
        sizes=(30, 29) if not transposed else (5, 6),
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=(0, 0),
        output_padding=(stride - 1, 0) if transposed else (0, 0),
        splits=(3, 2),
        requires_grad=ALL,
    )
    check_tiled(c, device)
    if not transposed:
        check(replace(c, splits=(100, 100)), device)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@ALL_SPLITS
@pytest.mark.parametrize("stride", [1, 2])
def test_padding_modes(device, mode, dims, splits, stride):
    """The gradient of padding folds back onto the elements that it showed."""
    c = configuration(
        dims,
        padding_mode=mode,
        padding=(2,) * dims,
        stride=(stride,) * dims,
        splits=splits,
        requires_grad=ALL,
    )
    check_tiled(c, device)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("first", [(3, 0), (0, 3), (2, 1)])
def test_asymmetric_padding(device, mode, dims, first):
    padding = (*first, 0, 2, 1, 0)[: 2 * dims]
    check_tiled(configuration(dims, padding=padding, padding_mode=mode, kernel=(4,) * dims, requires_grad=ALL), device)


@pytest.mark.parametrize("mode", ["reflect", "circular"])
@pytest.mark.parametrize("splits", [None, (2, 3)])
def test_padding_as_large_as_its_mode_allows(device, mode, splits):
    padding = (4, 5) if mode == "reflect" else (5, 6)
    check(
        configuration(sizes=(5, 6), padding=padding, padding_mode=mode, splits=splits, requires_grad=ALL),
        device,
    )


@BOTH
@pytest.mark.parametrize("requires_grad", REQUIRES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [(4, 3), None])
def test_which_gradients_are_asked_for(device, transposed, requires_grad, bias, splits):
    c = configuration(transposed=transposed, requires_grad=requires_grad, bias=bias, splits=splits)
    if splits is None:
        check(c, device)
    else:
        check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("channels,outputs,groups", [(4, 6, 2), (4, 4, 4), (4, 8, 4), (1, 5, 1), (6, 3, 3)])
def test_groups_and_depthwise(device, transposed, dims, channels, outputs, groups):
    c = configuration(dims, transposed=transposed, channels=channels, outputs=outputs, groups=groups, requires_grad=ALL)
    check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (4, 2), (1, 7), (7, 1), (9, 3), (16, 12)])
@pytest.mark.parametrize("splits", [(4, 1), (3, 2)])
def test_kernels(device, transposed, kernel, splits):
    padding = tuple(k // 2 for k in kernel)
    c = configuration(
        transposed=transposed,
        kernel=kernel,
        padding=padding,
        sizes=(31, 29),
        splits=splits,
        requires_grad=ALL,
    )
    check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", GRAD_LAYOUTS)
def test_layouts(device, transposed, dims, layout, grad_layout):
    c = configuration(dims, transposed=transposed, layout=layout, grad_layout=grad_layout, requires_grad=ALL)
    check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("batch", [None, 0, 1, 3])
@pytest.mark.parametrize("splits", ["some", None])
def test_batches(device, transposed, dims, batch, splits):
    """Every image counts in the gradients of weight and bias, also in an unbatched call, also where there is
    none.
    """
    c = configuration(
        dims,
        transposed=transposed,
        batch=batch,
        splits=SPLITS[dims][-1] if splits else None,
        requires_grad=ALL,
    )
    if batch == 0 or not splits:
        check(c, device)
    else:
        check_tiled(c, device)


@BOTH
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("splits", [None, 3])
def test_gradients_keep_the_memory_format(device, transposed, dims, splits):
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.randn(2, 4, *[9] * dims, device=device).contiguous(memory_format=last).requires_grad_()
    w = torch.randn(4, 4, *[3] * dims, device=device, requires_grad=True)
    call = getattr(pc.functional, f"conv{'_transpose' if transposed else ''}{dims}d")
    call(x, w, padding=1, splits=splits).square().sum().backward()
    assert x.grad.is_contiguous(memory_format=last) and not x.grad.is_contiguous()
    assert w.grad.shape == w.shape


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weight_gradient_is_not_rounded_once_a_tile(device, transposed, dtype):
    """A sum over hundreds of tiles kept in half precision would stop growing: each term is below half a
    unit.
    """
    c = configuration(
        transposed=transposed,
        dtype=dtype,
        batch=1,
        channels=2,
        outputs=2,
        sizes=(64, 64),
        content="offset",
        grad_layout="expanded",
        splits=(64, 8),
        requires_grad=ALL,
    )
    check_tiled(c, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("splits", [None, 3, (2, 4)])
def test_half_precision_is_rounded_once(device, dtype, mode, stride, splits):
    """What padding received is added to the input's gradient before that is rounded."""
    x = torch.randn(2, 5, 11, 13, device=device).to(dtype).requires_grad_()
    w = torch.randn(4, 5, 5, 5, device=device).to(dtype)
    y = pc.functional.conv2d(x, w, stride=stride, padding=4, padding_mode=mode, splits=splits)
    grad = torch.randn_like(y)
    with pc.record_paths() as records:
        (got,) = torch.autograd.grad(y, x, grad)
    assert [r["path"] for r in records] == ["tiled"]
    exact_x = x.detach().double().requires_grad_()
    exact = reference.conv(exact_x, w.double(), None, stride=stride, padding=4, padding_mode=mode)
    (wanted,) = torch.autograd.grad(exact, exact_x, grad.double())
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    # Half a unit in the last place, of a number that is up to twice a power of two, and float32's own error.
    assert ((got.double() - wanted).abs() <= 1.01 * unit * wanted.abs() + 1e-5).all()
