"""Batch norm's gradients on the CPU: against float64, and written over a gradient only where nobody else has it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from support.modules import Made
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory import trace

ops = torch.ops.patchconv
SHAPES = [(2, 3, 5, 7), (4, 16, 8, 8), (1, 1, 1, 1), (3, 17, 33), (2, 5, 3, 4, 5), (6, 7), (2, 33, 70, 70),
          (0, 3, 4, 4)]  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def reference(grad: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, relu: bool, training: bool,
              mean: Tensor, var: Tensor) -> list[Tensor]:  # fmt: skip
    """By autograd in float64; where ReLU's bits are near a tie they are those of the given precision's forward pass."""
    x, w, b = (None if t is None else t.double().requires_grad_() for t in (x, w, b))
    running = (None, None) if training else (mean.double(), var.double())
    y = torch.nn.functional.batch_norm(x, *running, w, b, training, 0.0, 1e-5)
    if relu:
        y = torch.relu(y)
    given = [t for t in (x, w, b) if t is not None]
    return list(torch.autograd.grad(y, given, grad.double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "last"),
    [(shape, last) for shape in SHAPES for last in (False, True) if len(shape) == 4 or not last],
    ids=str,
)
def test_against_float64(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    torch.manual_seed(0)
    yes, no = [True, False], [False, True]
    for affine, relu, training, inplace in itertools.product(yes, no, yes, no):
        if training and ((len(shape) == 2 and shape[0] < 2) or shape in ((1, 1, 1, 1), (0, 3, 4, 4))):
            continue
        x = (torch.randn(shape) * 2 + 3).to(dtype).contiguous(memory_format=layout)
        # Away from ties: ReLU's bits are then the same in every precision.
        grad = torch.randn(shape).to(dtype).contiguous(memory_format=layout)
        opmath = dtype if dtype in (torch.float64, torch.float32) else torch.float32
        w, b = ((torch.rand(shape[1]) + 0.5).to(opmath), torch.randn(shape[1]).to(opmath)) if affine else (None, None)
        over = [0, *range(2, len(shape))]
        mean = x.double().mean(over) if training else torch.randn(shape[1]).double()
        var = x.double().var(over, unbiased=False) if training else torch.rand(shape[1]).double() + 0.5
        if relu and x.numel():
            view = (1, -1) + (1,) * (len(shape) - 2)
            value = (x.double() - mean.view(view)) / (var.view(view) + 1e-5).sqrt()
            value = value if w is None else value * w.double().view(view) + b.double().view(view)  # type: ignore[union-attr]
            grad = torch.where(value.abs() < 0.05, 0, grad).contiguous(memory_format=layout)
        want = reference(grad, x, w, b, relu, training, mean, var)
        stats = mean.to(opmath), var.to(opmath)
        if inplace:
            got_x = grad.clone(memory_format=torch.preserve_format)
            sums = ops._batch_norm_backward_(got_x, x, w, b, *stats, 1e-5, relu, training, [affine, affine])
        else:
            mask = [True, affine, affine]
            got_x, *sums = ops._norm_backward(grad, x, w, b, *stats, 0, 1e-5, int(relu), training, mask)
        got = [got_x, *(s for s in sums if s is not None)] if affine else [got_x]
        assert got_x.stride() == x.stride()
        tolerance = {torch.float64: 1e-12, torch.float32: 3e-6}.get(dtype, 1e-2 if dtype == torch.bfloat16 else 2e-3)
        for one, other in zip(got, want, strict=True):
            scale = other.abs().max().clamp(min=1e-3) if other.numel() else 1
            assert ((one.double() - other).abs() <= tolerance * scale).all(), (affine, relu, training, inplace)


def test_large_means_cost_no_digits() -> None:
    torch.manual_seed(1)
    x, grad = torch.randn(4, 8, 32, 32) + 1000, torch.randn(4, 8, 32, 32)
    mean, var = x.double().mean((0, 2, 3)), x.double().var((0, 2, 3), unbiased=False)
    mask = [True, False, False]
    got, *_ = ops._norm_backward(grad, x, None, None, mean.float(), var.float(), 0, 1e-5, 0, True, mask)
    want = reference(grad, x, None, None, False, True, mean, var)[0]
    assert (got.double() - want).abs().max() < 1e-4


def shared() -> nn.Module:
    """A gradient that two nodes get: of a sum's operands."""
    return Made(lambda m, x: m.one(x) + m.two(x), one=nn.BatchNorm2d(4), two=nn.BatchNorm2d(4))


@pytest.mark.parametrize("make", [shared, lambda: nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4))])
@pytest.mark.parametrize("functional", [False, True])
def test_gradients_of_others_are_not_written_over(make: Any, functional: bool) -> None:
    torch.manual_seed(2)
    stock, x = make(), torch.randn(3, 4, 6, 6)
    ours = pc.convert(make(), functional=functional)
    ours.load_state_dict(stock.state_dict())
    results = []
    for model in (stock, ours):
        inner: list[Tensor] = []
        source = x.clone().requires_grad_()
        middle = source * 1
        middle.retain_grad()
        y = model(middle)
        y.register_hook(inner.append)
        top = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(3))
        y.backward(top, retain_graph=True)
        y.backward(top)
        results.append([*inner, top, middle.grad, source.grad, *(p.grad for p in model.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_no_second_gradient_is_made() -> None:
    """Of convolution, norm and pool, the norm's backward pass allocates nothing of the input's size."""
    model = pc.convert(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.AvgPool2d(2)))
    report = trace(model, torch.randn(4, 3, 64, 64))
    backward = next(s for s in report.module("1").stretches if s.phase == "backward")
    assert backward.peak - backward.before < 100_000 < 4 * 16 * 64 * 64 * 4


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("size", [(6, 6), (3, 4, 5)], ids=str)
def test_one_image_made_of_tokens(size: tuple[int, ...], training: bool, create_graph: bool) -> None:
    """It is in channels_last, with strides as view() gives them: torch 2.14's own gradient is wrong there."""
    torch.manual_seed(0)
    kind = nn.BatchNorm2d if len(size) == 2 else nn.BatchNorm3d
    norm, places = pc.convert(kind(4)).double().train(training), math.prod(size)
    tokens = torch.randn(1, places, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 4, *size, dtype=torch.float64)
    y = norm(tokens.transpose(1, 2).view(1, 4, *size)) * weight
    (found,) = torch.autograd.grad(y.sum(), tokens, create_graph=create_graph)
    y = kind(4).double().train(training)(tokens.transpose(1, 2).contiguous().view(1, 4, *size)) * weight
    (expected,) = torch.autograd.grad(y.sum(), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
