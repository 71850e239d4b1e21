"""The oracle against stock PyTorch in float64: an oracle that is wrong would bless a library that is wrong alike."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from support import reference

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SIZES = {1: (23,), 2: (11, 9), 3: (7, 6, 5)}
KERNELS = {1: [(1,), (4,), (7,)], 2: [(1, 1), (3, 3), (2, 4), (1, 5)], 3: [(2, 1, 3), (3, 3, 3)]}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_with_gradients(ours, stock, leaves: list[torch.Tensor]) -> None:
    leaves = [leaf.requires_grad_() for leaf in leaves]
    expected, found = stock(*leaves), ours(*leaves)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    grad = random(*expected.shape, seed=9)
    wanted = torch.autograd.grad(expected, leaves, grad)
    torch.testing.assert_close(reference.gradients(found, leaves, grad), wanted, rtol=1e-11, atol=1e-11)


CASES = [
    (dims, kernel, stride, padding, dilation, groups)
    for dims in (1, 2, 3)
    for kernel in KERNELS[dims]
    for stride, padding, dilation, groups in itertools.product((1, 2, 3), (0, 1, 2), (1, 2), (1, 2))
    if all(n + 2 * padding > dilation * (k - 1) for n, k in zip(SIZES[dims], kernel, strict=True))
]


@pytest.mark.parametrize("dims,kernel,stride,padding,dilation,groups", CASES)
def test_conv(dims, kernel, stride, padding, dilation, groups):
    leaves = [random(2, 4, *SIZES[dims]), random(6, 4 // groups, *kernel, seed=1), random(6, seed=2)]
    settings = (stride, padding, dilation, groups)
    ours, stock = (lambda *t, f=f: f(*t, *settings) for f in (reference.conv, CONV[dims]))
    check_with_gradients(ours, stock, leaves)


@pytest.mark.parametrize("dims,kernel,stride,padding,dilation,groups", CASES)
def test_conv_transpose(dims, kernel, stride, padding, dilation, groups):
    extra = min(max(stride, dilation) - 1, 1)
    sizes = zip(SIZES[dims], kernel, strict=True)
    if any((n - 1) * stride - 2 * padding + dilation * (k - 1) + extra < 0 for n, k in sizes):
        pytest.skip("no output")
    leaves = [random(2, 4, *SIZES[dims]), random(4, 6 // groups, *kernel, seed=1), random(6, seed=2)]
    settings = (stride, padding, extra, groups, dilation)
    ours, stock = (lambda *t, f=f: f(*t, *settings) for f in (reference.conv_transpose, CONV_TRANSPOSE[dims]))
    check_with_gradients(ours, stock, leaves)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_padding_modes_asymmetric(mode, dims):
    before, after = [2, 0, 1][:dims], [1, 3, 2][:dims]
    for_pad = [n for d in reversed(range(dims)) for n in (before[d], after[d])]
    ours = [n for d in range(dims) for n in (before[d], after[d])]
    leaves = [random(2, 3, *SIZES[dims]), random(4, 3, *[3] * dims, seed=1)]
    padded = lambda x, w: CONV[dims](F.pad(x, for_pad, mode=mode), w, None, 2)  # noqa: E731
    check_with_gradients(lambda x, w: reference.conv(x, w, None, 2, ours, 1, 1, mode), padded, leaves)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_zeros_asymmetric_and_negative_side_empty(dims):
    ours = [n for d in range(dims) for n in (3, 0)]
    for_pad = [3, 0] * dims
    leaves = [random(1, 2, *SIZES[dims]), random(2, 2, *[4] * dims, seed=1)]
    padded = lambda x, w: CONV[dims](F.pad(x, for_pad), w)  # noqa: E731
    check_with_gradients(lambda x, w: reference.conv(x, w, None, 1, ours), padded, leaves)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4), (1, 6)])
@pytest.mark.parametrize("dilation", [1, 2, (1, 3)])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_named_padding(padding, kernel, dilation):
    x, w = random(2, 3, 16, 19), random(4, 3, *kernel, seed=1)
    expected = F.conv2d(x, w, None, 1, padding, dilation)
    torch.testing.assert_close(reference.conv(x, w, None, 1, padding, dilation), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unbatched_and_empty_batch(dims):
    w, wt = random(5, 3, *[3] * dims, seed=1), random(3, 5, *[3] * dims, seed=1)
    x, none = random(3, *SIZES[dims]), random(0, 3, *SIZES[dims])
    torch.testing.assert_close(reference.conv(x, w), CONV[dims](x, w), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(reference.conv_transpose(x, wt), CONV_TRANSPOSE[dims](x, wt), rtol=1e-11, atol=1e-11)
    assert reference.conv(none, w).shape == CONV[dims](none, w).shape
    assert reference.conv_transpose(none, wt).shape == CONV_TRANSPOSE[dims](none, wt).shape


def test_second_derivative():
    x, w = random(1, 2, 6, 5).requires_grad_(), random(3, 2, 3, 2, seed=1).requires_grad_()

    def second(operator):
        y = operator(x, w, None, 2, 1)
        (dx,) = torch.autograd.grad(y, x, torch.sin(y), create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, w))

    torch.testing.assert_close(second(reference.conv), second(F.conv2d), rtol=1e-10, atol=1e-10)
