"""Checkpoints that end in rrelu, whose noise is saved before it is drawn."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import patchconv_native as pc

RRELUS = {
    "module": nn.RReLU(), "in place": nn.RReLU(inplace=True), "F.rrelu": lambda x: F.rrelu(x, 0.2, 0.3, True),
    "torch.rrelu": lambda x: torch.rrelu(x, 0.2, 0.3, True), "torch.rrelu_": lambda x: torch.rrelu_(x, training=True),
    "generator": lambda x: torch.rrelu(x, 0.2, 0.3, True, torch.Generator().manual_seed(8)),
    "eval": nn.RReLU().eval(),
}  # fmt: skip


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("form", RRELUS)
def test_rrelu_at_the_end(form, layout, lean):
    """It saves its noise before it draws it, and there the second run stops: torch's own checkpoint reads no noise."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, dtype=torch.float64)
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64).to(memory_format=layout).requires_grad_()

    def gradients(run):
        torch.manual_seed(1)
        with pc.lean() if lean else nullcontext():
            y = run(lambda x: RRELUS[form](layer(x)), x)
        return torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    want = gradients(lambda fn, x: fn(x))
    for got, expected in zip(gradients(pc.checkpoint), want, strict=True):
        assert torch.equal(got, expected)
