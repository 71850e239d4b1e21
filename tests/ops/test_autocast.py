"""autocast: the convolutions run in the lower precision where torch's own do, and gradients come back in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.gradients import graded
from support.pairs import pairwise

import patchconv_native as pc

NAMES = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def leaves(name: str, device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    dims = int(name[-2])
    shapes = [(2, 4, *[9] * dims), (4, 4, *[3] * dims), (4,)]
    return [torch.randn(*s, device=device, dtype=dtype).requires_grad_() for s in shapes]


@pairwise(name=NAMES, splits=[None, 2], dtype=[torch.bfloat16, torch.float16])
def test_like_torch(device, name, splits, dtype):
    """As near to float64 as torch's autocast: what is lost is lost by the cast, not by the tiles."""
    given = leaves(name, device)
    with torch.autocast(device, dtype):
        ours = getattr(pc.functional, name)(*given, padding=1, splits=splits)
        stock = getattr(F, name)(*given, padding=1)
    assert ours.dtype == stock.dtype == dtype
    assert splits is None or pc.last_path()["path"] == "tiled"
    exact_leaves = [t.detach().to(dtype).double().requires_grad_() for t in given]
    exact = getattr(F, name)(*exact_leaves, padding=1)
    grad = torch.randn_like(stock)
    found = torch.autograd.grad(ours, given, grad)
    theirs = torch.autograd.grad(stock, given, grad)
    wanted = torch.autograd.grad(exact, exact_leaves, grad.double())
    near(ours, stock, exact, dtype)
    for got, want, right in zip(found, theirs, wanted, strict=True):
        assert got.dtype == want.dtype == torch.float32
        near(got, want, right, dtype)


def near(ours: torch.Tensor, stock: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    error, allowed = ((t.double() - exact).abs().max() for t in (ours, stock))
    assert error <= 1.1 * allowed + torch.finfo(dtype).eps * exact.abs().max()


@DTYPES
def test_mixed_inputs(device, dtype):
    """Half inputs and float32 weights meet, as after an earlier autocast layer."""
    x, w, b = leaves("conv2d", device)
    with torch.autocast(device, dtype):
        y = pc.functional.conv2d(x.to(dtype), w, b, splits=2)
        expected = F.conv2d(x.to(dtype), w, b)
    assert y.dtype == expected.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(y, expected, rtol=2 * unit, atol=8 * unit)


def test_what_is_not_cast(device):
    """float64, as torch leaves it; and where autocast is switched off inside."""
    given, wide = leaves("conv2d", device), leaves("conv2d", device, torch.float64)
    with torch.autocast(device, torch.bfloat16):
        assert pc.functional.conv2d(*wide, splits=2).dtype == F.conv2d(*wide).dtype
        with torch.autocast(device, enabled=False):
            assert pc.functional.conv2d(*given, splits=2).dtype == torch.float32


def test_backward_inside_the_block(device):
    """backward() under autocast must not be cast again."""
    given = leaves("conv2d", device)
    with torch.autocast(device, torch.bfloat16):
        found = graded(lambda *t: pc.functional.conv2d(*t, padding=1, splits=2).float(), *given)
        expected = graded(lambda *t: F.conv2d(*t, padding=1).float(), *given)
    for got, want in zip(found[1:], expected[1:], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * float(want.abs().max()))


def test_weight_casts_are_cached(device):
    """Within one block a weight is cast once, as for torch's layers: both uses share the cast's node."""
    x, w, _ = leaves("conv2d", device)
    casts = []
    with torch.autocast(device, torch.bfloat16), torch.profiler.profile() as profile:
        for _ in range(3):
            casts.append(pc.functional.conv2d(x, w, splits=2))
    copies = [e for e in profile.events() if e.name == "aten::to" and e.input_shapes == [list(w.shape)]]
    assert len(copies) <= 1
    assert torch.equal(casts[0], casts[2])
