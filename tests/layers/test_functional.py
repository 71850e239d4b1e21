"""patchconv_native.functional against torch.nn.functional: the same arguments in the same places, the same numbers."""

from __future__ import annotations

import enum
import inspect
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.errors import raises
from support.pairs import pairwise
from torch import Tensor

import patchconv_native as pc

CONV = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
TRANSPOSED = ["input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"]
DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1,
            "padding_mode": "zeros", "splits": None}  # fmt: skip
DIMS = pytest.mark.parametrize("dims", [1, 2, 3])


def tensors(dims: int, device: str, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    weight, side = (4, 3) if transposed else (6, 2), {1: 9, 2: 9, 3: 6}[dims]
    shapes = (2, 4, *[side] * dims), (*weight, *[3] * dims), (6,)
    x, w, b = (torch.randn(shape, device=device, dtype=torch.float64) for shape in shapes)
    return x, w, b


@DIMS
def test_signatures(dims):
    direct = (f"conv{dims}d", CONV, ["padding_mode", "splits"])
    for name, positional, keywords in (direct, (f"conv_transpose{dims}d", TRANSPOSED, ["splits"])):
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
@pytest.mark.parametrize("splits", [None, 2])
def test_padding_before_and_after(device, dims, splits):
    """Two entries a dimension: (before, after) of the first, then of the next."""
    x, w, b = tensors(dims, device)
    pads = [1, 2, 0, 3, 2, 1][: 2 * dims]
    # F.pad begins with the last dimension.
    reversed_pads = [pads[2 * d + side] for d in reversed(range(dims)) for side in (0, 1)]
    found = getattr(pc.functional, f"conv{dims}d")(x, w, b, padding=pads, groups=2, splits=splits)
    torch.testing.assert_close(found, getattr(F, f"conv{dims}d")(F.pad(x, reversed_pads), w, b, groups=2))


class Two(enum.IntEnum):
    TWO = 2


class Image(Tensor):
    """A subclass: its calls go by torch.ops.patchconv.*."""


INTEGERS = {"int64": np.int64(2), "int32": np.int32(2), "tensor": torch.tensor(2),
            "tensor of one": torch.tensor([2]), "enum": Two.TWO}  # fmt: skip


@pairwise(
    dims=[1, 2, 3], kind=[Tensor, Image], integer=list(INTEGERS),
    argument=["stride", "padding", "dilation", "groups", "splits"],
)  # fmt: skip
def test_every_kind_of_integer(dims, kind, integer, argument):
    two = INTEGERS[integer]
    x, w, b = tensors(dims, "cpu")
    x, given = x.as_subclass(kind), {"groups": 2, argument: two}
    found = getattr(pc.functional, f"conv{dims}d")(x, w, b, **given)
    expected = getattr(F, f"conv{dims}d")(x, w, b, **{k: 2 for k in given if k != "splits"})
    torch.testing.assert_close(found, expected)
    if argument != "groups":
        given[argument] = (two,) * dims
        torch.testing.assert_close(getattr(pc.functional, f"conv{dims}d")(x, w, b, **given), expected)

    x, w, b = tensors(dims, "cpu", transposed=True)
    x, given = x.as_subclass(kind), {"groups": 2, "stride": 3, argument: two}
    found = getattr(pc.functional, f"conv_transpose{dims}d")(x, w, b, **given)
    stocks = {k: 3 if v == 3 else 2 for k, v in given.items() if k != "splits"}
    expected = getattr(F, f"conv_transpose{dims}d")(x, w, b, **stocks)
    torch.testing.assert_close(found, expected)


def test_same_with_every_kind_of_integer():
    x, w, _ = tensors(2, "cpu")
    for one, two in ((np.int64(1), np.int64(2)), (torch.tensor(1), torch.tensor(2)), ((np.int64(1),) * 2, [2, 2])):
        found = pc.functional.conv2d(x, w, stride=one, padding="same", dilation=two, groups=2)
        torch.testing.assert_close(found, F.conv2d(x, w, padding="same", dilation=2, groups=2))


INTS = "an int or a sequence of 2 ints"
PADS = "'same', 'valid', an int or a sequence of 2 or 4 ints"
EXPECTED = {"stride": INTS, "padding": PADS, "dilation": INTS, "groups": "an int", "splits": f"None, {INTS}",
            "padding_mode": "a str"}  # fmt: skip
WRONG = {
    "stride": (2.5, (2.5, 1), True, None, "2", [None, 1]), "padding": (None, 1.0, False), "dilation": (2.0, True),
    "groups": (2.0, True, (1,), None), "splits": ("2", 2.0, True, (2, "x")), "padding_mode": (None, 3),
}  # fmt: skip


@pytest.mark.parametrize(("argument", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_arguments_of_the_wrong_type(argument, value):
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    for name in ("conv2d", "conv_transpose2d"):
        if (name, argument) == ("conv_transpose2d", "padding_mode"):
            continue
        expected = INTS if (name, argument) == ("conv_transpose2d", "padding") else EXPECTED[argument]
        with pytest.raises(TypeError) as caught:
            getattr(pc.functional, name)(x, w, **{argument: value})
        got = f"{value!r} ({type(value).__name__})"
        assert str(caught.value) == f"{name}: expected {argument} to be {expected}, got {got}"


@pytest.mark.parametrize("value", [2.5, b"2", None, (1, 2.5)], ids=repr)
@pytest.mark.parametrize("argument", ["stride", "padding", "dilation", "groups"])
def test_tensor_subclasses_get_the_same_errors(argument, value):
    x, w = torch.randn(1, 2, 8, 8).as_subclass(Image), torch.randn(2, 2, 3, 3)
    for name in ("conv2d", "conv_transpose2d"):
        with pytest.raises(TypeError, match=f"^{name}: expected {argument} to be .*, got ") as caught:
            getattr(pc.functional, name)(x, w, **{argument: value})
        assert len(str(caught.value)) < 200


def test_errors_are_short():
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    for value in (torch.randn(100, 100), [0.5] * 10000, "x" * 10000, np.zeros((50, 50)), object(), {1: 2}):
        with pytest.raises(TypeError, match=r"^conv2d: expected stride to be an int or a sequence of 2 ints") as caught:
            pc.functional.conv2d(x, w, stride=value)
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_one_dimension_same_and_what_is_no_tensor():
    x, w, b = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3), torch.randn(2)
    conv1d, conv2d = pc.functional.conv1d, pc.functional.conv2d
    raises(TypeError, {
        "^conv1d: expected stride to be an int or a sequence of 1 int, got 2.5 ":
            lambda: conv1d(x[0], w[0], stride=2.5),
        f"^conv2d: expected stride to be {INTS}, got 1.5 ": lambda: conv2d(x, w, padding="same", stride=1.5),
        f"^conv2d: expected dilation to be {INTS}, got 2.0 ": lambda: conv2d(x, w, padding="same", dilation=2.0),
        f"^conv2d: expected dilation to be {INTS}, got .2.0, 1. ":
            lambda: conv2d(x, w, padding="same", dilation=(2.0, 1)),
        "^conv2d: expected weight to be a Tensor, got NoneType$": lambda: conv2d(x, None, padding="same"),
    })  # fmt: skip
    for name in ("conv2d", "conv_transpose2d"):
        call = getattr(pc.functional, name)
        raises(TypeError, {
            f"^{name}: expected input to be a Tensor, got NoneType$": partial(call, None, w),
            f"^{name}: expected weight to be a Tensor, got NoneType$": partial(call, x, None),
            f"^{name}: expected input to be a Tensor, got ndarray$": partial(call, x.numpy(), w, b),
            f"^{name}: expected bias to be a Tensor or None, got float$": partial(call, x, w, 1.0),
        })  # fmt: skip


def test_the_operators_own_type_errors_stay():
    """A TypeError that is not about the types of Python's arguments is passed on as it came."""
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    text = r"^conv2d: expected weight to have the dtype of input \(Float\), got Double"
    for stride in (1, (1, 1), np.int64(1)):
        with pytest.raises(TypeError, match=text):
            pc.functional.conv2d(x, w.double(), stride=stride)


def test_symbolic_traces():
    """torch.fx hands in proxies in the tensors' places."""

    def call(x, w):
        y, z = pc.functional.conv2d(x, w, None, 2, 1), pc.functional.conv_transpose2d(x, w, None, 1)
        return y + z[..., ::2, ::2].sum()

    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    torch.testing.assert_close(torch.fx.symbolic_trace(call)(x, w), call(x, w))
