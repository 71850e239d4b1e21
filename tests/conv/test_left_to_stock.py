"""What the convolution operators do not serve, functions, layers, lean() and conversion leave to stock."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import patchconv_native as pc

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested:UserWarning", "ignore:.*quantize.*", "ignore:patchconv_native.convert left 1 conv"
)


def whole_numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 - 3


X, W, B = whole_numbers(2, 3, 8, 8), whole_numbers(4, 3, 3, 3), whole_numbers(4)
TENSORS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "int64": lambda: (X, W, B),
    "int32": lambda: (X.int(), W.int(), None),
    "complex": lambda: (torch.complex(X.float(), X.flip(3).float()), torch.complex(W.float(), W.float()), None),
    "mkldnn": lambda: (X.float().to_mkldnn(), W.float(), B.float()),
    "mkldnn, both": lambda: (X.float().to_mkldnn(), W.float().to_mkldnn(), None),
    "no channels": lambda: (torch.zeros(2, 0, 8, 8), torch.zeros(4, 0, 3, 3), None),
    "a weight of no channels": lambda: (X.float(), torch.zeros(0, 3, 3, 3), None),
    "meta with a real weight": lambda: (X.float().to("meta"), W.float(), B.float()),
    "sparse": lambda: (X.float().to_sparse(), W.float(), None),
    "nested": lambda: (torch.nested.nested_tensor([X[0].float(), X[1].float()]), W.float(), None),
    "quantized": lambda: (torch.quantize_per_tensor(X.float(), 0.5, 0, torch.quint8), W.float(), None),
}
# padding (before, after) of rows and columns, as stock takes it and as this package does
PADDINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "none": (0, {}),
    "two": ((1, 2), {}),
    "same": ("same", {}),
    "strided": (1, {"stride": 2}),
}


def told(function: Callable[[], Any]) -> Any:
    """The result, dense and of numbers, or the error."""
    try:
        y = function()
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return y.shape, y.dtype, y.layout, y.device, None if y.is_meta else y.to_dense()


def same(one: Any, two: Any) -> bool:
    if len(one) == 2 or len(two) == 2:  # "same" is made numbers before stock gets it, which may fail at another place
        return len(one) == len(two) and "patchconv::" not in one[1]
    values = one[-1] is two[-1] is None or torch.equal(one[-1], two[-1])
    return one[:-1] == two[:-1] and values


def served(function: Callable[..., Tensor], lean: bool) -> Callable[..., Tensor]:
    def inside(*args: Any, **kwargs: Any) -> Tensor:
        with pc.lean():
            return function(*args, **kwargs)

    return inside if lean else function


@pytest.mark.parametrize("how", ["function", "lean"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_convolution(kind, padding, how):
    x, w, b = TENSORS[kind]()
    pads, more = PADDINGS[padding]
    ours = served(F.conv2d, True) if how == "lean" else pc.functional.conv2d
    expected = told(lambda: F.conv2d(x, w, b, padding=pads, **more))
    assert same(told(lambda: ours(x, w, b, padding=pads, **more)), expected), expected


@pytest.mark.parametrize("kind", ["int64", "complex", "no channels", "meta with a real weight", "sparse"])
def test_a_transposed_convolution(kind):
    x, w, _ = TENSORS[kind]()
    w = w.transpose(0, 1)
    expected = told(lambda: F.conv_transpose2d(x, w, None, 2, 1, 1))
    for ours in (pc.functional.conv_transpose2d, served(F.conv_transpose2d, True)):
        assert same(told(lambda: ours(x, w, None, 2, 1, 1)), expected), expected  # noqa: B023


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular", "replicate"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_a_converted_model(dtype, mode):
    def made() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Conv2d(3, 4, 3, padding="same", padding_mode=mode, bias=False)
        layer.weight = nn.Parameter(W.to(dtype), requires_grad=False)
        return nn.Sequential(layer)

    x = X.to(dtype)
    expected = told(lambda: made()(x))
    for functional in (False, True):
        assert same(told(lambda: pc.convert(made(), functional=functional)(x)), expected), expected  # noqa: B023


def test_one_and_three_dimensions():
    for dims in (1, 3):
        x, w = whole_numbers(1, 2, *[5] * dims), whole_numbers(2, 2, *[2] * dims)
        stock, ours = (getattr(where, f"conv{dims}d") for where in (F, pc.functional))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "same" of an even kernel: stock says that it copies
            assert torch.equal(ours(x, w, padding="same"), stock(x, w, padding="same"))
        assert torch.equal(ours(x, w, stride=2), stock(x, w, stride=2))


def test_gradients_are_stocks():
    x = torch.complex(X.double(), X.double()).requires_grad_()
    w = torch.complex(W.double(), -W.double()).requires_grad_()
    found = [torch.autograd.grad(conv(x, w).abs().sum(), (x, w)) for conv in (F.conv2d, pc.functional.conv2d)]
    assert all(map(torch.equal, *found))


def test_explicit_splits_are_not_left_aside():
    with pytest.raises(TypeError, match=r"^conv2d: expected input to have dtype float64, float32"):
        pc.functional.conv2d(X, W, splits=2)


@pytest.mark.parametrize("argument", ["splits", "stride", "padding", "dilation", "groups"])
def test_a_number_that_is_too_large(argument):
    for number in (10**30, -(10**30), 2**63):
        with pytest.raises(ValueError, match=f"^conv2d: expected {argument} to fit into 64 bits, got "):
            pc.functional.conv2d(X.float(), W.float(), **{argument: number})
    if argument == "splits":
        with pytest.raises(ValueError, match=r"^Conv2d: expected splits to fit into 64 bits, got 1000"):
            pc.Conv2d(3, 4, 3, splits=10**30)


def test_a_max_pool_of_quantized_values():
    """Its kernel takes no list of one entry."""
    x = torch.quantize_per_tensor(X.float(), 0.5, 0, torch.quint8)
    assert torch.equal(pc.functional.max_pool2d(x, 2).int_repr(), F.max_pool2d(x, 2).int_repr())
