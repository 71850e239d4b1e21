"""The one form of calls that rules are written for: by place, by name, and under NumPy's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from support.tiles import by_tiles
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.spatial.forms import in_form

X = torch.ones(2, 3)
Y = X.double()


@pytest.mark.parametrize("function, args, kwargs, want", [
    (Tensor.view, (X, 3, 2), {}, ((X, (3, 2)), {})),
    (Tensor.view, (X,), {"size": (3, 2)}, ((X, (3, 2)), {})),
    (Tensor.view, (X,), {"dtype": torch.int32}, ((X, torch.int32), {})),
    (Tensor.squeeze, (X, 0), {}, ((X, 0), {})),
    (Tensor.squeeze, (X, 0, 1), {}, ((X, (0, 1)), {})),
    (torch.sum, (), {"x": X, "axis": 1, "keepdims": True}, ((X, 1), {"keepdim": True})),
    (torch.sum, (X,), {"dtype": torch.int32, "out": None}, ((X,), {"dtype": torch.int32})),
    (torch.add, (), {"alpha": 2, "other": Y, "input": X}, ((X, Y), {"alpha": 2})),
    (torch.cat, (), {"tensors": (X, X), "axis": 1}, (((X, X),), {"dim": 1})),
    (torch.where, (Y,), {"other": 2, "input": X}, ((Y, X, 2), {})),
    (Tensor.var, (X,), {"unbiased": False}, ((X,), {"unbiased": False})),
    (Tensor.var, (X,), {"axis": 1, "unbiased": False}, ((X, 1), {"unbiased": False})),
    (Tensor.to, (X,), {"tensor": Y}, ((X, Y), {})),
    (Tensor.to, (X,), {"dtype": torch.int32, "copy": True}, ((X, torch.int32), {"copy": True})),
    (F.linear, (), {"input": X, "weight": Y, "bias": None}, ((X, Y), {"bias": None})),
    (torch.ops.patchconv.conv2d, (), {"input": X, "weight": Y, "padding": 1}, ((X, Y), {"padding": 1})),
    # As they are: torch does not take them, or they are those of a function in Python.
    (Tensor.sum, (X,), {"row": 1}, ((X,), {"row": 1})),
    (F.relu, (X,), {"inplace": True}, ((X,), {"inplace": True})),
])  # fmt: skip
def test_the_form_of_a_call(function: Any, args: Any, kwargs: Any, want: Any) -> None:
    assert repr(in_form(function, args, kwargs)) == repr(want)


# Of an image of 2 x 4 x 12 x 6. The result has as many rows.
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda x: x.reshape(shape=(2, 2, 12, -1)) if x.dim() == 3 else x.reshape(shape=x.shape),
    "view": lambda x: x.view(size=(2, 4, 12, 3, 2)),
    "permute": lambda x: torch.permute(input=x, dims=(1, 0, 2, 3)),
    "transpose": lambda x: torch.transpose(input=x, dim0=0, dim1=1),
    "axes": lambda x: torch.swapaxes(x, axis0=0, axis1=-3),
    "expand": lambda x: x[:, :1].expand(size=(-1, 4, -1, -1)),
    "repeat": lambda x: x.repeat(repeats=(1, 2, 1, 1)),
    "flip": lambda x: x.flip(dims=(1, 3)) + torch.flip(input=x, dims=[]),
    "roll": lambda x: torch.roll(input=x, shifts=1, dims=1),
    "cat": lambda x: torch.cat(tensors=[x, x], axis=1),
    "nothing besides": lambda x: torch.cat([x, x.new_zeros(0)], 1),
    "stack": lambda x: torch.stack(tensors=(x, x), dim=-1),
    "softmax": lambda x: torch.softmax(input=x, axis=1),
    "cumsum": lambda x: x.cumsum(axis=-1),
    "largest": lambda x: torch.topk(input=x, k=2, dim=1, largest=False).values,
    "extreme": lambda x: torch.amax(input=x, dim=1, keepdim=True) + x.max(axis=1, keepdims=True).values,
    "statistics": lambda x: x.var(axis=1, keepdims=True) - torch.std(input=x, dim=(1, 3), keepdim=True, unbiased=False),
    "sums": lambda x: torch.mean(x, axis=2, keepdim=True) + x.sum(axis=(0, 1), keepdims=True) * x,
    "linear": lambda x: F.linear(input=x, weight=x.new_ones(3, 6), bias=x.new_ones(3)),
    "where": lambda x: torch.where(condition=x > 0, other=x, input=x * 2),
    "sum of products": lambda x: torch.addcmul(input=x, tensor1=x, tensor2=x, value=2),
    "numbers": lambda x: torch.full_like(input=x, fill_value=3) + torch.clamp(x, max=x * 0.5),
    "gated": lambda x: torch.prelu(input=x, weight=x.new_ones(4) * 0.3),
    "convolved": lambda x: torch.conv2d(input=x, weight=x.new_ones(4, 4, 3, 3), padding=1),
    "padded": lambda x: torch.constant_pad_nd(input=x, pad=(1, 1), value=2.5),
    "divergence": lambda x: F.kl_div(x, x.sigmoid(), reduction="batchmean") * x,
    "number by number": lambda x: F.kl_div(input=x, target=x.sin(), log_target=True, reduction="none"),
    "cast": lambda x: x.type(dtype=torch.float32).type_as(other=x).type(torch.float64),
    "lengths of complex numbers": lambda x: torch.complex(real=x, imag=x * 2).norm(dim=2, keepdim=True) * x,
    "mean complex numbers": lambda x: torch.complex(x, x * 2).mean((2, 3), keepdim=True).imag + x,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_parts(name: str) -> None:
    function, x = CALLS[name], structured((2, 4, 12, 6))
    got = by_tiles(_Apply(function), [x], {2: (0, 5, 12)})
    torch.testing.assert_close(got, function(x), rtol=1e-11, atol=1e-11)


class _Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_a_call_by_strips(name: str) -> None:
    function, x = CALLS[name], structured((2, 4, 12, 6))
    torch.testing.assert_close(pc.tile(function, x, tile=(3, 4)), function(x), rtol=1e-11, atol=1e-11)
    assert "whole" not in str(pc.tile_plan(function, x, tile=3))


@pytest.mark.parametrize("function", [
    lambda x: torch.sum(x, row=1), lambda x: torch.flip(x, 0, 1), lambda x: F.softmax(x, axis=1),
    lambda x: x.to(other=x), lambda x: torch.cat(images=[x, x]),
])  # fmt: skip
def test_what_torch_does_not_take_is_its_error(function: Callable[[Tensor], Tensor]) -> None:
    x = structured((2, 4, 12, 6))
    with pytest.raises(TypeError) as error:
        function(x)
    with pytest.raises(TypeError, match=str(error.value).split("(")[0]):
        pc.tile(function, x, tile=3)
