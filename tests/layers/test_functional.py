"""patchconv_native.functional against torch.nn.functional: the same arguments in the same places, the same
numbers.
"""

from __future__ import annotations

import enum
import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.pairs import pairwise
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
    weight, side = (4, 3) if transposed else (6, 2), {1: 9, 2: 9, 3: 6}[dims]
    return (
        torch.randn(2, 4, *[side] * dims, device=device, dtype=torch.float64),
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


@pairwise(dims=[1, 2, 3], padding=["same", "valid"], kernel=[2, 3, 4], dilation=[1, 2])
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


INTEGERS = {
    "int64": np.int64(2),
    "int32": np.int32(2),
    "tensor": torch.tensor(2),
    "tensor of one": torch.tensor([2]),
    "enum": Two.TWO,
}


@pairwise(
    dims=[1, 2, 3],
    kind=[Tensor, Image],
    integer=list(INTEGERS),
    argument=["stride", "padding", "dilation", "groups", "splits"],
)
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
    expected = getattr(F, f"conv_transpose{dims}d")(
        x, w, b, **{k: 3 if v == 3 else 2 for k, v in given.items() if k != "splits"}
    )
    torch.testing.assert_close(found, expected)


def test_same_with_every_kind_of_integer():
    x, w, _ = tensors(2, "cpu")
    for one, two in ((np.int64(1), np.int64(2)), (torch.tensor(1), torch.tensor(2)), ((np.int64(1),) * 2, [2, 2])):
        found = pc.functional.conv2d(x, w, stride=one, padding="same", dilation=two, groups=2)
        torch.testing.assert_close(found, F.conv2d(x, w, padding="same", dilation=2, groups=2))


INTS = "an int or a sequence of 2 ints"
PADS = "'same', 'valid', an int or a sequence of 2 or 4 ints"
WRONG = [
    ("stride", 2.5, INTS, "2.5 (float)"),
    ("stride", (2.5, 1), INTS, "(2.5, 1) (tuple)"),
    ("stride", True, INTS, "True (bool)"),
    ("stride", None, INTS, "None (NoneType)"),
    ("stride", "2", INTS, "'2' (str)"),
    ("stride", [None, 1], INTS, "[None, 1] (list)"),
    ("padding", None, PADS, "None (NoneType)"),
    ("padding", 1.0, PADS, "1.0 (float)"),
    ("padding", False, PADS, "False (bool)"),
    ("dilation", 2.0, INTS, "2.0 (float)"),
    ("dilation", True, INTS, "True (bool)"),
    ("groups", 2.0, "an int", "2.0 (float)"),
    ("groups", True, "an int", "True (bool)"),
    ("groups", (1,), "an int", "(1,) (tuple)"),
    ("groups", None, "an int", "None (NoneType)"),
    ("splits", "2", f"None, {INTS}", "'2' (str)"),
    ("splits", 2.0, f"None, {INTS}", "2.0 (float)"),
    ("splits", True, f"None, {INTS}", "True (bool)"),
    ("splits", (2, "x"), f"None, {INTS}", "(2, 'x') (tuple)"),
    ("padding_mode", None, "a str", "None (NoneType)"),
    ("padding_mode", 3, "a str", "3 (int)"),
]


@pytest.mark.parametrize("argument,value,expected,got", WRONG, ids=[f"{row[0]}={row[1]!r}" for row in WRONG])
def test_arguments_of_the_wrong_type(argument, value, expected, got):
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    for name in ("conv2d", "conv_transpose2d"):
        if name == "conv_transpose2d":
            if argument == "padding_mode":
                continue
            expected = INTS if argument == "padding" else expected
        with pytest.raises(TypeError) as caught:
            getattr(pc.functional, name)(x, w, **{argument: value})
        assert str(caught.value) == f"{name}: expected {argument} to be {expected}, got {got}"


@pytest.mark.parametrize("value", [2.5, b"2", None, (1, 2.5)], ids=repr)
@pytest.mark.parametrize("argument", ["stride", "padding", "dilation", "groups"])
def test_tensor_subclasses_get_the_same_errors(argument, value):
    x, w = torch.randn(1, 2, 8, 8).as_subclass(Image), torch.randn(2, 2, 3, 3)
    for name in ("conv2d", "conv_transpose2d"):
        with pytest.raises(TypeError, match=f"^{name}: expected {argument} to be .*, got ") as caught:
            getattr(pc.functional, name)(x, w, **{argument: value})
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "arguments,name",
    [({"stride": 1.5}, "stride"), ({"dilation": 2.0}, "dilation"), ({"dilation": (2.0, 1)}, "dilation")],
)
def test_same_with_numbers_of_the_wrong_type(arguments, name):
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    with pytest.raises(TypeError, match=f"^conv2d: expected {name} to be an int or a sequence of 2 ints, got "):
        pc.functional.conv2d(x, w, padding="same", **arguments)


def test_errors_are_short():
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    for value in (torch.randn(100, 100), [0.5] * 10000, "x" * 10000, np.zeros((50, 50)), object(), {1: 2}):
        with pytest.raises(TypeError, match=r"^conv2d: expected stride to be an int or a sequence of 2 ints") as caught:
            pc.functional.conv2d(x, w, stride=value)
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_one_dimension_is_named_in_the_singular():
    with pytest.raises(TypeError, match=r"^conv1d: expected stride to be an int or a sequence of 1 int, got 2.5 "):
        pc.functional.conv1d(torch.randn(1, 2, 8), torch.randn(2, 2, 3), stride=2.5)


def test_what_is_no_tensor():
    x, w, b = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3), torch.randn(2)
    for name in ("conv2d", "conv_transpose2d"):
        call = getattr(pc.functional, name)
        for arguments, text in (
            ((None, w), "input to be a Tensor, got NoneType"),
            ((x, None), "weight to be a Tensor, got NoneType"),
            ((x.numpy(), w, b), "input to be a Tensor, got ndarray"),
            ((x, w, 1.0), "bias to be a Tensor or None, got float"),
        ):
            with pytest.raises(TypeError, match=f"^{name}: expected {text}$"):
                call(*arguments)
    with pytest.raises(TypeError, match=r"^conv2d: expected weight to be a Tensor, got NoneType$"):
        pc.functional.conv2d(x, None, padding="same")


def test_the_operators_own_type_errors_stay():
    """A TypeError that is not about the types of Python's arguments is passed on as it came."""
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    for stride in (1, (1, 1), np.int64(1)):
        with pytest.raises(
            TypeError, match=r"^conv2d: expected weight to have the dtype of input \(Float\), got Double"
        ):
            pc.functional.conv2d(x, w.double(), stride=stride)


def test_symbolic_traces():
    """torch.fx hands in proxies in the tensors' places."""

    def call(x, w):
        return (
            pc.functional.conv2d(x, w, None, 2, 1) + pc.functional.conv_transpose2d(x, w, None, 1)[..., ::2, ::2].sum()
        )

    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    torch.testing.assert_close(torch.fx.symbolic_trace(call)(x, w), call(x, w))
