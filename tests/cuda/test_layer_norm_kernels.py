"""The layer norm kernels, run on the CPU by tests/host_cuda, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import kernels
from support.kernels import Call, Memory, off
from torch import Tensor

pytestmark = pytest.mark.timeout(1200)  # the first that runs compiles the executor

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
EPS = 1e-5
# Rows and columns: of a warp, of a block, of several steps, odd and not, one column, more rows than a block has teams.
SHAPES = [(1, 1), (3, 5), (17, 96), (70, 33), (5, 1000), (2, 1024), (3, 4100), (2, 9000), (300, 8)]


def example(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(rows * 7 + columns)
    ramp = torch.linspace(-1, 1, columns, dtype=torch.float64)
    x = torch.randn(rows, columns, dtype=torch.float64) + ramp + 4 * torch.randn(rows, 1, dtype=torch.float64)
    grad = torch.randn(rows, columns, dtype=torch.float64) + 0.2
    return x.to(dtype), grad.to(dtype), torch.randn(columns), torch.randn(columns)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """What the forward pass keeps."""
    exact = x.double()
    return exact.mean(1).float(), (exact.var(1, unbiased=False) + EPS).rsqrt().float()


def bound(want: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Some roundings of dtype at the scale of the values; and what x - mean loses where the mean is large."""
    mean, rstd = moments(x)
    lost = (1 + mean.abs() * rstd).double()[:, None] * torch.finfo(torch.float32).eps
    scale = want.abs() + want.abs().mean()
    return scale * (2 * torch.finfo(dtype).eps + 8 * lost)


@DTYPES
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_forward(dtype, affine):
    calls, examples = [], [example(*shape, dtype) for shape in SHAPES]
    for i, (x, _, weight, bias) in enumerate(examples):
        y = Memory(torch.full_like(x, 77), off(dtype, i))
        parameters = [Memory(weight if affine else None), Memory(bias if affine else None)]
        kept = [Memory(torch.full((len(x),), 77.0)) for _ in "mr"]
        calls.append(Call("layer_norm", dtype, [*x.shape, EPS], [Memory(x, off(dtype, i)), y, *kept, *parameters]))
    for (x, _, weight, bias), (_, y, mean, rstd, *_) in zip(examples, kernels.run(calls), strict=True):
        given = (weight.double(), bias.double()) if affine else (None, None)
        want = F.layer_norm(x.double(), x.shape[1:], *given, EPS)
        assert ((y.view_as(x).double() - want).abs() <= bound(want, x, dtype)).all(), x.shape
        want_mean, want_rstd = moments(x)
        torch.testing.assert_close(mean, want_mean, rtol=4e-7, atol=4e-7 * float(x.abs().max()))
        lost = 1e-6 * (1 + float((want_mean * want_rstd).abs().max()))
        torch.testing.assert_close(rstd, want_rstd, rtol=lost, atol=0)


@DTYPES
@pytest.mark.parametrize("asked", ["all", "input", "parameters", "weight"])
def test_backward(dtype, asked):
    calls, examples = [], [example(*shape, dtype) for shape in (SHAPES if asked == "all" else SHAPES[1:5])]
    wants = {"all": (True, True, True), "input": (True, False, False), "parameters": (False, True, True),
             "weight": (False, True, False)}[asked]  # fmt: skip
    for i, (x, grad, weight, bias) in enumerate(examples):
        results = [torch.full_like(x, 77), torch.full_like(weight, 77), torch.full_like(bias, 77)]
        given = [Memory(grad, off(dtype, i)), Memory(x, off(dtype, i)), *map(Memory, moments(x)), Memory(weight)]
        outputs = [Memory(r if w else None) for r, w in zip(results, wants, strict=True)]
        calls.append(Call("layer_norm_backward", dtype, [*x.shape, EPS], [*given, Memory(bias), *outputs]))
    for (x, grad, weight, bias), found in zip(examples, kernels.run(calls), strict=True):
        leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
        y = F.layer_norm(leaves[0], x.shape[1:], leaves[1], leaves[2], EPS)
        exact = torch.autograd.grad(y, leaves, grad.double())
        for got, want, asked_for in zip(found[6:], exact, wants, strict=True):
            if not asked_for:
                assert got is None
                continue
            if want.dim() == 1:
                assert ((got.double() - want).abs() <= 2e-5 * (want.abs().max() + len(x) ** 0.5)).all()
            elif x.shape[1] > 1:  # of one column the gradient is zero but for rounding
                assert ((got.view_as(x).double() - want).abs() <= 4 * bound(want, x, dtype)).all(), x.shape


def test_past_two_to_the_31():
    """The last rows of 2^31 and some, and of rows that lie past 2^32 elements."""
    dtype, columns = torch.float16, 8
    rows = 2**31 + 13
    x = torch.randn(64, columns).to(dtype)
    far = lambda t: Memory(t.flatten(), 0, rows * t[0].numel())  # noqa: E731
    kept = [far(torch.full((64, 1), 77.0)) for _ in "mr"]
    buffers = [far(x), far(torch.full_like(x, 77)), *kept, Memory(None), Memory(None)]
    ((_, y, mean, *_),) = kernels.run([Call("layer_norm", dtype, [rows, columns, EPS], buffers, 2)])
    written = 8 + rows % 8
    want = F.layer_norm(x.double(), [columns], eps=EPS)
    torch.testing.assert_close(y.view_as(x)[-written:].double(), want[-written:], rtol=2e-3, atol=2e-3)
    assert (y.view_as(x)[:-written] == 77).all() and (mean[:-written] == 77).all() and (mean[-written:] != 77).all()
