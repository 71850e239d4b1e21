"""torch.library.opcheck on every operator: schema, autograd registration, fake tensors and AOT dispatch.

opcheck compares sizes and strides of the Meta kernel's results with the real ones, so the cases vary what
strides depend on: memory format of input, weight and gradient, unbatched inputs and the output mask.
"""

from __future__ import annotations

import torch
from support.configurations import lay_out
from support.conv_calls import backward_arguments
from support.pairs import pairwise

import patchconv_native  # noqa: F401  (registers the operators)

ops = torch.ops.patchconv
DIMS = [1, 2, 3]
SPLITS = [None, [2]]


def tensor(*shape: int, layout: str = "contiguous", device: str = "cpu", grad: bool = True) -> torch.Tensor:
    return lay_out(torch.randn(*shape, device=device), layout).requires_grad_(grad)


def name(dims: int, transposed: bool) -> str:
    return f"conv{'_transpose' if transposed else ''}{dims}d"


@pairwise(
    dims=DIMS, splits=SPLITS, transposed=[False, True],
    layout=["contiguous", "channels_last", "transposed", "sliced", "expanded"],
    weight_layout=["contiguous", "channels_last"],
)  # fmt: skip
def test_forward(device, dims, splits, transposed, layout, weight_layout):
    x = tensor(2, 4, *[7] * dims, layout=layout, device=device)
    w = tensor(4, 4, *[3] * dims, layout=weight_layout, device=device)
    b = tensor(4, device=device)
    torch.library.opcheck(getattr(ops, name(dims, transposed)).default, (x, w, b, 2, 1), {"splits": splits})


@pairwise(dims=DIMS, mode=["zeros", "reflect", "replicate", "circular"], batched=[True, False])
def test_forward_padding_modes_and_unbatched(device, dims, mode, batched):
    x = tensor(*[2] * batched, 4, *[7] * dims, device=device)
    w = tensor(6, 2, *[3] * dims, device=device)
    padding = [2, 1] * dims
    given, how = (x, w, None, 1, padding, 1, 2), {"padding_mode": mode, "splits": [3]}
    torch.library.opcheck(getattr(ops, name(dims, False)).default, given, how)


@pairwise(dims=DIMS, transposed=[False, True], frozen=["input", "weight", "both"])
def test_forward_with_frozen_arguments(device, dims, transposed, frozen):
    x = tensor(2, 4, *[6] * dims, device=device, grad=frozen == "weight")
    w = tensor(4, 4, *[3] * dims, device=device, grad=frozen == "input")
    b = tensor(4, device=device)
    torch.library.opcheck(getattr(ops, name(dims, transposed)).default, (x, w, b), {"splits": [2]})


def check_backward(transposed, splits, grad, x, w, mask):
    """Only what the mask needs is given; results that nobody asked for are undefined."""
    given = (grad, x if mask[1] else None, w if mask[0] else None, x.shape, w.shape, mask)
    how = {"padding": 1, "transposed": transposed, "splits": splits or []}
    torch.library.opcheck(ops._convolution_backward.default, backward_arguments(*given, **how))


@pairwise(
    dims=DIMS, splits=SPLITS, transposed=[False, True], layout=["contiguous", "channels_last", "transposed"],
    grad_layout=["contiguous", "channels_last", "expanded", "sliced"],
    weight_layout=["contiguous", "channels_last"],
)  # fmt: skip
def test_backward(device, dims, splits, transposed, layout, grad_layout, weight_layout):
    x = tensor(2, 4, *[7] * dims, layout=layout, device=device)
    w = tensor(4, 4, *[3] * dims, layout=weight_layout, device=device)
    g = tensor(2, 4, *[7] * dims, layout=grad_layout, device=device)
    check_backward(transposed, splits, g, x, w, [True] * 3)


@pairwise(
    dims=DIMS, splits=SPLITS, transposed=[False, True],
    mask=[(True, False, False), (False, True, False), (False, False, True), (False,) * 3], batched=[True, False],
)  # fmt: skip
def test_backward_masks(device, dims, splits, transposed, mask, batched):
    x = tensor(*[2] * batched, 4, *[7] * dims, device=device, layout="channels_last")
    w = tensor(4, 4, *[3] * dims, device=device)
    check_backward(transposed, splits, tensor(*x.shape, device=device), x, w, mask)


@pairwise(dims=DIMS, transposed=[False, True], dtype=[torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(device, dims, transposed, dtype):
    x = torch.randn(1, 2, *[6] * dims, device=device).to(dtype).requires_grad_()
    w = torch.randn(2, 2, *[3] * dims, device=device).to(dtype).requires_grad_()
    # Half precision is compared by shape and dtype only: opcheck's tolerances are those of float32.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(ops, name(dims, transposed)).default, (x, w), {"splits": [2]}, test_utils=checks)
