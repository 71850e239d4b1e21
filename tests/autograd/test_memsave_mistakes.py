"""Mistakes found in memsave_torch. Those of single layers (arguments out of order, modes and dtypes not obeyed, nothing
that hooks see) are tested with the layers, in tests/layers/test_lean_layers.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.counts import saved_bytes
from torch import nn

import patchconv_native as pc


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_frozen_layers_in_other_dtypes(dtype):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)).to(dtype)
    x = torch.randn(2, 3, 8, 8, dtype=dtype, requires_grad=True)
    y = pc.convert(model.requires_grad_(False))(x)
    assert y.dtype == dtype
    y.sum().backward()


@pytest.mark.parametrize(
    "affine,momentum,track", list(itertools.product([True, False], [0.1, None], [True, False])), ids=str
)
def test_batch_norm_with_every_option(affine, momentum, track):
    make = lambda: nn.BatchNorm2d(4, affine=affine, momentum=momentum, track_running_stats=track)  # noqa: E731
    stock, ours = make(), pc.convert(make())
    for training in (True, True, False):
        x = torch.randn(3, 4, 5, 5, requires_grad=True)
        y, z = stock.train(training)(x), ours.train(training)(x)
        torch.testing.assert_close(z, y)
        torch.testing.assert_close(torch.autograd.grad(z.square().sum(), x), torch.autograd.grad(y.square().sum(), x))
    torch.testing.assert_close(ours.state_dict(), stock.state_dict())
    assert not track or ours.num_batches_tracked == 2


def test_relu_of_minus_infinity_is_zero():
    x = torch.tensor([-float("inf"), 1.0, float("inf")], requires_grad=True)
    y = pc.convert(nn.ReLU())(x)
    (grad,) = torch.autograd.grad(y, x, torch.tensor([float("inf"), 1.0, 2.0]))
    assert y.tolist() == [0.0, 1.0, float("inf")] and grad.tolist() == [0.0, 1.0, 2.0]


def test_no_zeros_in_place_of_what_was_not_saved():
    """Frozen weights: the input is gone, and backward makes nothing of its size but the gradient."""
    model = pc.convert(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)))
    model.requires_grad_(False)
    x = torch.randn(1, 8, 64, 64, requires_grad=True)
    made: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "zeros" in str(func):
                made.append(out.nbytes)
            return out

    y = model(x)
    with Watch():
        y.sum().backward()
    assert not [n for n in made if n >= x.nbytes]


def test_a_mask_never_adds_memory():
    """conv -> ReLU -> conv: the next layer keeps the ReLU's output anyway, which then serves the ReLU too."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3))
    x, own = torch.randn(2, 3, 16, 16), list(model.parameters())
    stock = saved_bytes(lambda: model(x), own)
    pc.convert(model)
    assert saved_bytes(lambda: model(x), own) == stock
