"""Faults of oneDNN's kernels that stock PyTorch shares (seen in 2.14.1), and that the library avoids. For AVX-512:

1. In bfloat16 and channels_last, F.conv2d crashes (a null pointer) where no kernel of a row or column meets the image:
   torch.nn.functional.conv2d(zeros(2, 6, 15, 1), zeros(5, 6, 2, 1), None, (2, 2), (1, 1), (2, 2)).
2. In channels_last with one input channel a group, several output channels and a stride, it reads behind the end of
   the input: values from freed memory reach the result. In torch 2.11 so it does with one output channel. Freed memory
   is filled with NaN here before every call.

3. In channels_last, weight gradients of 1x1 kernels under a stride are written past their end by three threads and
   more, where the channels do not fill blocks of 16: the heap is damaged, and the process dies later.

Without AVX-512:

9. In channels_last, with a bias and several images, it crashes where a single tap with a dilation meets padding alone:
   torch.nn.functional.conv2d(zeros(3, 4, 5, 2), zeros(3, 4, 2, 1), zeros(3), (1, 3), (0, 1), (1, 3)).

In half precision, most of them on processors with AMX:

4. F.conv2d is wrong where the result is one column wide and the columns have a stride.
5. Weight gradients are wrong where the image has fewer columns than their stride.
6. Kernels four, six or eight columns wide are wrong with 8 to 28 input channels.
7. Volumes: results are garbage, or the process dies, where the image is thinner than the kernel, or a stride is longer
   than the kernel. So are input gradients there, and with strides of 3 and more, and weight gradients of thin images.
8. Results are wrong with padded columns and a stride of 8.

What is asserted is that ours is right, on any processor.
"""

from __future__ import annotations

import pytest
import torch
from support import reference
from support.threads import threads
from torch import Tensor

import patchconv_native as pc

LAST = {3: None, 4: torch.channels_last, 5: torch.channels_last_3d}


def poison_freed_memory() -> None:
    """Small blocks that malloc hands out next hold NaN."""
    blocks = [torch.full((n,), float("nan")) for n in (16, 64, 128, 256, 512, 1024, 4096) * 3]
    del blocks


def check(x: Tensor, w: Tensor, tolerance: float, **arguments) -> None:
    call = getattr(pc.functional, f"conv{x.dim() - 2}d")
    expected = reference.conv(x, w, None, **arguments)
    for splits in (None, 2):
        for _ in range(5):
            poison_freed_memory()
            y = call(x, w, None, splits=splits, **arguments)
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape,kernel,stride,padding,dilation",
    [((2, 6, 15, 1), (5, 6, 2, 1), (2, 2), (1, 1), (2, 2)), ((1, 16, 9, 1), (16, 16, 3, 2), (1, 1), (1, 1), (1, 2)),
     ((1, 5, 1, 4, 2), (6, 5, 4, 2, 2), (3, 1, 3), (6, 3, 4), (1, 1, 3))],
)  # fmt: skip
def test_kernels_that_meet_padding_alone(dtype, shape, kernel, stride, padding, dilation):
    x = torch.randn(shape).to(dtype).contiguous(memory_format=LAST[len(shape)])
    w = torch.randn(kernel).to(dtype)
    check(x, w, 2e-2, stride=stride, padding=padding, dilation=dilation)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("splits", [None, 2, 5])
@pytest.mark.parametrize(
    "shape,kernel,stride,padding,dilation",
    [((3, 4, 5, 2), (3, 4, 2, 1), (1, 3), (0, 1), (1, 3)), ((3, 8, 6, 1), (16, 8, 1, 1), (2, 2), (1, 1), (3, 3)),
     ((3, 4, 5, 3, 2), (3, 4, 2, 1, 1), (3, 1, 3), (1, 1, 1), (3, 1, 3))],
)  # fmt: skip
def test_single_taps_that_meet_padding_alone(shape, kernel, stride, padding, dilation, splits, last):
    x, w, bias = torch.randn(shape), torch.randn(kernel), torch.randn(kernel[0])
    if last:
        x = x.contiguous(memory_format=LAST[len(shape)])
    arguments = {"stride": stride, "padding": padding, "dilation": dilation}
    expected = reference.conv(x, w, bias, **arguments)
    found = getattr(pc.functional, f"conv{len(shape) - 2}d")(x, w, bias, splits=splits, **arguments)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    if len(shape) == 5:
        by_onednn = torch.ops.patchconv._conv3d_onednn(x, w, bias, stride, padding, dilation, 1)
        torch.testing.assert_close(by_onednn.double(), expected, rtol=1e-5, atol=1e-5)


def test_input_gradient_of_a_transposed_convolution_that_crops_everything():
    x = torch.randn(2, 5, 8, 2).bfloat16().contiguous(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(5, 6, 2, 1).bfloat16()
    arguments = {"stride": (2, 2), "padding": (1, 1), "dilation": (2, 2)}
    y = pc.functional.conv_transpose2d(x, w, None, **arguments)
    grad = torch.randn(y.shape).bfloat16().contiguous(memory_format=torch.channels_last)
    (dx,) = torch.autograd.grad(y, x, grad)
    expected = reference.conv(grad, w, None, **arguments)
    torch.testing.assert_close(dx.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_last", [False, True])
@pytest.mark.parametrize(
    "shape,kernel,groups,stride",
    [((2, 1, 12, 5), (8, 1, 4, 4), 1, (1, 2)), ((2, 4, 12, 5), (8, 1, 4, 4), 4, (1, 2)),
     ((2, 3, 31, 17), (6, 1, 7, 7), 3, (2, 2)), ((1, 1, 5, 5, 3), (6, 1, 3, 3, 3), 1, (2, 1, 1)),
     ((1, 1, 4, 3), (1, 1, 2, 2), 1, (1, 3)), ((2, 1, 6, 5), (2, 1, 3, 3), 1, (1, 4))],
)  # fmt: skip
def test_single_channels_under_a_stride(dtype, weight_last, shape, kernel, groups, stride):
    last = LAST[len(shape)]
    x = torch.randn(shape).to(dtype).contiguous(memory_format=last)
    w = torch.randn(kernel).to(dtype)
    w = w.contiguous(memory_format=last) if weight_last else w
    check(x, w, 1e-5 if dtype == torch.float32 else 2e-2, stride=stride, groups=groups)


@pytest.mark.parametrize("channels,outputs", [(5, 6), (24, 40), (16, 6)])
@pytest.mark.parametrize("splits", [None, 2])
def test_weight_gradient_of_1x1_kernels_under_a_stride(channels, outputs, splits):
    with threads(3):
        x = torch.randn(2, channels, 16, 12).contiguous(memory_format=torch.channels_last)
        w = torch.randn(outputs, channels, 1, 1, requires_grad=True)
        y = pc.functional.conv2d(x, w, None, stride=(2, 1), splits=splits)
        grad = torch.randn_like(y)
        for _ in range(20):
            with pc.record_paths() as records:
                (dw,) = torch.autograd.grad(y, w, grad, retain_graph=True)
            assert [r["path"] for r in records] == ["tiled"], "stock's call is the one that fails"
    exact = w.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(reference.conv(x, exact, None, stride=(2, 1)), exact, grad.double())
    torch.testing.assert_close(dw.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape,kernel,groups,stride,padding",
    [((2, 8, 16, 6), (5, 8, 4, 5), 1, (1, 2), (2, 0)), ((2, 4, 12, 5), (8, 1, 4, 4), 4, (1, 2), (0, 0)),
     ((1, 16, 17, 9), (33, 16, 1, 3), 1, (1, 4), (0, 0)), ((2, 3, 9), (6, 3, 8), 1, (3,), (0,)),
     ((1, 4, 3, 5, 7), (5, 4, 2, 3, 4), 1, (1, 2, 4), (0, 1, 0))],
)  # fmt: skip
def test_one_column_under_a_stride(channels_last, dtype, shape, kernel, groups, stride, padding):
    """Rows and a result of several columns, whose tiles are one column wide, too."""
    x, w = torch.randn(shape).to(dtype), torch.randn(kernel).to(dtype)
    if channels_last and len(shape) > 3:
        x = x.contiguous(memory_format=LAST[len(shape)])
    check(x, w, 2e-2, stride=stride, padding=padding, groups=groups)
    wide = torch.cat([x] * 3, -1)
    call = getattr(pc.functional, f"conv{x.dim() - 2}d")
    y = call(wide, w, None, stride, padding, 1, groups, splits=(*[1] * (x.dim() - 3), 9))
    expected = reference.conv(wide, w, None, stride=stride, padding=padding, groups=groups)
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape,kernel,stride,padding",
    [((2, 4, 8, 1), (2, 4, 3, 2), (1, 2), (0, 1)), ((2, 17, 10, 2), (2, 17, 1, 3), (3, 3), (0, 2)),
     ((2, 16, 5, 1), (16, 16, 4, 3), (3, 2), (1, 2)), ((2, 3, 2), (5, 3, 3), (3,), (2,))],
)  # fmt: skip
def test_weight_gradient_of_images_narrower_than_the_stride(dtype, shape, kernel, stride, padding):
    x, w = torch.randn(shape).to(dtype), torch.randn(kernel).to(dtype).requires_grad_()
    y = getattr(pc.functional, f"conv{x.dim() - 2}d")(x, w, None, stride, padding)
    grad = torch.randn(y.shape).to(dtype)
    exact = w.detach().double().requires_grad_()
    stock = reference.conv(x, exact, None, stride=stride, padding=padding)
    (wanted,) = torch.autograd.grad(stock, exact, grad.double())
    for _ in range(5):
        poison_freed_memory()
        (dw,) = torch.autograd.grad(y, w, grad, retain_graph=True)
        torch.testing.assert_close(dw.double(), wanted, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape,kernel,how",
    [((1, 16, 5, 20), (16, 16, 1, 4), {"stride": (1, 4)}), ((2, 8, 4, 19), (24, 8, 3, 8), {"stride": (1, 3)}),
     ((1, 48, 9, 13, 9), (3, 48, 3, 1, 6), {"stride": (1, 3, 1), "padding": (3, 0, 0), "dilation": (2, 1, 1)}),
     ((2, 4, 20, 20, 6), (32, 4, 1, 2, 2), {"stride": (3, 3, 2), "padding": (0, 0, 2), "dilation": (2, 1, 1)}),
     ((1, 1, 1, 13, 6), (3, 1, 5, 3, 4), {"stride": (2, 4, 1), "padding": (2, 1, 0)}),
     ((1, 64, 1, 13), (4, 64, 2, 5), {"stride": (3, 8), "padding": (1, 3)})],
)  # fmt: skip
def test_in_half_precision(shape, kernel, how, dtype, channels_last):
    x, w = torch.randn(shape).to(dtype), torch.randn(kernel).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=LAST[len(shape)])
    check(x, w, 2e-2, **how)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape,kernel,how",
    [((2, 6, 2, 6, 13), (4, 3, 3, 2, 2), {"stride": (2, 4, 4), "padding": (2, 1, 0), "groups": 2}),
     ((2, 48, 13, 1, 20), (2, 48, 4, 3, 4), {"stride": (3, 3, 3), "padding": (1, 2, 2), "dilation": (1, 1, 2)}),
     ((1, 24, 7, 13, 20), (48, 24, 4, 3, 8), {"stride": (2, 3, 4), "dilation": (1, 2, 1)}),
     ((1, 12, 4, 4, 20), (2, 12, 4, 3, 1), {"stride": (4, 2, 6), "padding": (1, 0, 0), "dilation": (1, 1, 2)})],
)  # fmt: skip
def test_gradients_of_volumes_in_half_precision(shape, kernel, how, dtype, channels_last):
    x, w = torch.randn(shape).to(dtype), torch.randn(kernel).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d) if channels_last else x
    exact = x.double().requires_grad_(), w.double().requires_grad_()
    expected = reference.conv(*exact, None, **how)
    grad = torch.randn(expected.shape).to(dtype)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for _ in range(5):
        given = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = pc.functional.conv3d(*given, None, **how)
        poison_freed_memory()
        for found, right in zip(torch.autograd.grad(y, given, grad), wanted, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=2e-2 * float(right.abs().max()))
