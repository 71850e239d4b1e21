"""patchconv_native.functional against torch.nn.functional: the same arguments in the same places, the same
numbers.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import patchconv_native as pc

CONV = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
TRANSPOSED = ["input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"]
DEFAULTS = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "output_padding": 0,
    "dilation": 1,
    "groups": 1,
    "padding_mode": "zeros",
    "splits": None,
}
DIMS = pytest.mark.parametrize("dims", [1, 2, 3])


def tensors(dims: int, device: str, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    weight = (4, 3) if transposed else (6, 2)
    return (
        torch.randn(2, 4, *[9] * dims, device=device, dtype=torch.float64),
        torch.randn(*weight, *[3] * dims, device=device, dtype=torch.float64),
        torch.randn(6, device=device, dtype=torch.float64),
    )


@DIMS
def test_signatures(dims):
    for name, positional, keywords in (
        (f"conv{dims}d", CONV, ["padding_mode", "splits"]),
        (f"conv_transpose{dims}d", TRANSPOSED, ["splits"]),
    ):
        parameters = inspect.signature(getattr(pc.functional, name)).parameters
        assert list(parameters) == positional + keywords
        for key, parameter in parameters.items():
            expected = inspect.Parameter.KEYWORD_ONLY if key in keywords else inspect.Parameter.POSITIONAL_OR_KEYWORD
            assert parameter.kind is expected, (name, key)
            assert parameter.default == DEFAULTS.get(key, inspect.Parameter.empty), (name, key)


@DIMS
def test_positional_arguments_mean_what_they_mean_in_torch(device, dims):
    """Every argument has a value of its own, so that no two can be swapped unseen."""
    x, w, b = tensors(dims, device)
    found = getattr(pc.functional, f"conv{dims}d")(x, w, b, 2, 3, 4, 2)
    torch.testing.assert_close(found, getattr(F, f"conv{dims}d")(x, w, b, 2, 3, 4, 2))

    x, w, b = tensors(dims, device, transposed=True)
    found = getattr(pc.functional, f"conv_transpose{dims}d")(x, w, b, 3, 0, 2, 2, 4)
    torch.testing.assert_close(found, getattr(F, f"conv_transpose{dims}d")(x, w, b, 3, 0, 2, 2, 4))


@DIMS
@pytest.mark.parametrize("splits", [None, 2, "tuple"])
def test_ints_tuples_and_lists(device, dims, splits):
    x, w, b = tensors(dims, device)
    splits = (2,) * dims if splits == "tuple" else splits
    call = getattr(pc.functional, f"conv{dims}d")
    expected = getattr(F, f"conv{dims}d")(x, w, b, 2, 1, 2, 2)
    for kind in (int, tuple, list):
        stride, padding, dilation = (n if kind is int else kind([n] * dims) for n in (2, 1, 2))
        torch.testing.assert_close(call(x, w, b, stride, padding, dilation, 2, splits=splits), expected)
    if isinstance(splits, tuple):
        torch.testing.assert_close(call(x, w, b, 2, 1, 2, 2, splits=list(splits)), expected)
    assert pc.last_path()["path"] == ("stock" if splits is None else "tiled")


@DIMS
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_words_for_padding(device, dims, padding, kernel, dilation):
    x = torch.randn(1, 2, *[11] * dims, device=device, dtype=torch.float64)
    w = torch.randn(3, 2, *[kernel] * dims, device=device, dtype=torch.float64)
    found = getattr(pc.functional, f"conv{dims}d")(x, w, None, 1, padding, dilation, splits=3)
    torch.testing.assert_close(found, getattr(F, f"conv{dims}d")(x, w, None, 1, padding, dilation))
    assert pc.last_path()["path"] == "tiled"


def test_valid_takes_a_stride(device):
    x, w, _ = tensors(2, device)
    found = pc.functional.conv2d(x, w, stride=2, padding="valid", groups=2)
    torch.testing.assert_close(found, F.conv2d(x, w, stride=2, padding="valid", groups=2))


@DIMS
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_mode(device, dims, mode):
    x, w, b = tensors(dims, device)
    found = getattr(pc.functional, f"conv{dims}d")(x, w, b, padding=2, groups=2, padding_mode=mode)
    padded = F.pad(x, [2] * (2 * dims), mode=mode)
    torch.testing.assert_close(found, getattr(F, f"conv{dims}d")(padded, w, b, groups=2))


def test_keywords(device):
    x, w, b = tensors(2, device)
    found = pc.functional.conv2d(input=x, weight=w, bias=b, groups=2, dilation=2, stride=1, padding=1)
    torch.testing.assert_close(found, F.conv2d(x, w, b, padding=1, dilation=2, groups=2))


def test_a_model_can_swap_the_import(device):
    """`import patchconv_native.functional as F` in a function written for torch's."""

    def block(functional, x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        y = functional.conv2d(x, w, None, (2, 1), padding=(1, 1), groups=2)
        return functional.conv_transpose2d(y, t, stride=(2, 1), padding=1, output_padding=(1, 0))

    x, w, _ = tensors(2, device)
    t = torch.randn(6, 4, 3, 3, device=device, dtype=torch.float64)
    import patchconv_native.functional as ours

    torch.testing.assert_close(block(ours, x, w, t), block(F, x, w, t))
