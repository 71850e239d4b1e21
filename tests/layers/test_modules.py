"""pc.Conv1d ... pc.ConvTranspose3d are torch's modules: constructor, attributes, state, copies, numbers."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from support.copies import COPIES
from support.gradients import graded
from torch import nn

import patchconv_native as pc

NAMES = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]
ALL = pytest.mark.parametrize("name", NAMES)
CONV = pytest.mark.parametrize("name", NAMES[:3])


def dims_of(name: str) -> int:
    return int(name[-2])


def make(name: str, *args, device: str = "cpu", **kwargs) -> nn.Module:
    return getattr(pc, name)(*(args or (4, 6, 3)), device=device, **kwargs)


def stock_like(layer: nn.Module, *args, **kwargs) -> nn.Module:
    """torch's own module with the same arguments and parameters."""
    kwargs.pop("splits", None)
    name = type(layer).__name__
    other = getattr(nn, name)(*(args or (4, 6, 3)), device=layer.weight.device, dtype=layer.weight.dtype, **kwargs)
    other.load_state_dict(layer.state_dict())
    return other


def image(name: str, device: str = "cpu", batch: int = 2, size: int = 9) -> torch.Tensor:
    return torch.randn(batch, 4, *[size] * dims_of(name), device=device)


@ALL
def test_constructor_takes_all_that_torch_takes(name):
    stock = inspect.signature(getattr(nn, name).__init__).parameters
    ours = inspect.signature(getattr(pc, name).__init__).parameters
    assert [p for p in ours if p in stock] == list(stock), "the same order, so positional calls mean the same"
    for key, parameter in stock.items():
        assert ours[key].default == parameter.default, key
        assert ours[key].kind == parameter.kind, key
    extra = set(ours) - set(stock)
    assert extra == {"splits"}
    assert ours["splits"].default is None and ours["splits"].kind is inspect.Parameter.KEYWORD_ONLY


@ALL
def test_is_a_subclass_with_the_same_attributes(name):
    layer = make(name, splits=3)
    stock = getattr(nn, name)(4, 6, 3)
    assert isinstance(layer, getattr(nn, name)) and type(layer).__name__ == name
    public = {k: v for k, v in vars(stock).items() if not k.startswith("_")}
    assert {k: v for k, v in vars(layer).items() if k in public} == public
    assert layer.splits == 3
    assert layer.weight.shape == stock.weight.shape and layer.bias.shape == stock.bias.shape


@ALL
def test_initialisation_is_that_of_torch(name):
    made = []
    for kind in (getattr(pc, name), getattr(nn, name)):
        torch.manual_seed(3)
        made.append(kind(4, 6, 3))
    assert all(map(torch.equal, *(layer.parameters() for layer in made)))


@ALL
def test_repr(name):
    plain, split = make(name), make(name, splits=2)
    assert "splits" not in repr(plain)
    assert repr(plain).startswith(f"{name}(4, 6, kernel_size=") and "stride=" in repr(plain)
    assert repr(split).endswith(", splits=2)")
    split.splits = (2,) * dims_of(name)
    assert repr(split).endswith(", splits=2)" if dims_of(name) == 1 else f", splits={split.splits})")
    assert repr(stock_like(plain)) == repr(plain)


@ALL
@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_goes_both_ways(name, bias):
    ours, stock = make(name, 4, 6, 3, bias=bias, splits=2), getattr(nn, name)(4, 6, 3, bias=bias)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert ours.load_state_dict(stock.state_dict()).missing_keys == []
    assert torch.equal(ours.weight, stock.weight)
    torch.manual_seed(11)
    again = make(name, 4, 6, 3, bias=bias)
    stock.load_state_dict(again.state_dict(), strict=True)
    assert torch.equal(again.weight, stock.weight)


@ALL
@pytest.mark.parametrize("splits", [None, 3, "each"])
def test_forward_and_backward_are_those_of_torch(device, name, splits):
    splits = (2,) * dims_of(name) if splits == "each" else splits
    # In float64: stock's own float32 sums of a bias gradient are off in the fifth digit.
    layer = make(name, 4, 6, 3, stride=2, padding=1, dilation=2, groups=2, splits=splits, device=device).double()
    stock = stock_like(layer, 4, 6, 3, stride=2, padding=1, dilation=2, groups=2)
    x = image(name, device).double().requires_grad_()
    found = graded(layer, x)
    assert pc.last_path()["path"] == ("stock" if splits is None else "tiled")
    torch.testing.assert_close(found, graded(stock, x))


@CONV
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, 2, "same", "valid"])
@pytest.mark.parametrize("kernel", [3, 4])
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_padding(device, name, mode, padding, kernel, splits):
    arguments = {"padding": padding, "padding_mode": mode}
    layer = make(name, 4, 6, kernel, splits=splits, device=device, **arguments)
    x = image(name, device)
    torch.testing.assert_close(layer(x), stock_like(layer, 4, 6, kernel, **arguments)(x))
    assert splits is None or pc.last_path()["path"] == "tiled"


@pytest.mark.parametrize("name", NAMES[3:])
@pytest.mark.parametrize("size", [17, 18])
@pytest.mark.parametrize("splits", [None, 4])
def test_transposed_takes_an_output_size(device, name, size, splits):
    layer = make(name, 4, 6, 3, stride=2, padding=1, splits=splits, device=device)
    x = image(name, device)
    expected = stock_like(layer, 4, 6, 3, stride=2, padding=1)(x, output_size=[size] * dims_of(name))
    torch.testing.assert_close(layer(x, output_size=[size] * dims_of(name)), expected)


@ALL
@pytest.mark.parametrize("copied", ["deepcopy", "copy", "save", "pickle 2"])
def test_copies(device, name, copied):
    layer = make(name, splits=3, device=device)
    x = image(name, device)
    expected = layer(x)
    other = COPIES[copied](layer)
    assert type(other) is type(layer) and other.splits == 3 and other is not layer
    assert torch.equal(other(x), expected)
    assert pc.last_path()["path"] == "tiled"


@ALL
def test_splits_can_be_set_later(device, name):
    layer = make(name, device=device)
    x = image(name, device)
    whole = layer(x)
    assert pc.last_path()["path"] == "stock"
    layer.splits = 2
    torch.testing.assert_close(layer(x), whole)
    assert pc.last_path()["path"] == "tiled"
    layer.splits = None
    layer(x)
    assert pc.last_path()["path"] == "stock"


@pytest.mark.parametrize("bad", [0, -1, (2, 0), (1, 2, 3), "4", 2.0, True])
def test_constructor_refuses_bad_splits(bad):
    with pytest.raises((ValueError, TypeError), match=r"^Conv2d: expected .*splits"):
        pc.Conv2d(4, 6, 3, splits=bad)


@pytest.mark.parametrize("splits", [np.int64(3), torch.tensor(3), (np.int64(3),)], ids=repr)
def test_splits_may_be_any_integer(splits):
    layer = pc.Conv2d(4, 6, 3, splits=splits)
    assert layer.splits == 3 and type(layer.splits) is int
    layer.splits = None
    layer.splits = splits
    assert layer.splits == 3 and type(layer.splits) is int
    assert torch.jit.script(layer)(image("Conv2d")).shape == (2, 6, 7, 7)


@ALL
def test_numbers_of_the_wrong_type_are_named(name):
    operator = f"conv{'_transpose' if 'Transpose' in name else ''}{dims_of(name)}d"
    layer = make(name, 4, 6, 3, stride=2.5)
    with pytest.raises(TypeError, match=f"^{operator}: expected stride to be an int or a sequence of "):
        layer(image(name))
    with pytest.raises(TypeError, match=f"^{operator}: expected input to be a Tensor, got list$"):
        getattr(pc.functional, operator)([1.0], layer.weight)


@ALL
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(device, name, norm):
    layer = make(name, splits=2, device=device).double()
    stock = stock_like(layer)
    torch.manual_seed(5)
    layer = getattr(nn.utils.parametrizations, norm)(layer)
    torch.manual_seed(5)
    stock = getattr(nn.utils.parametrizations, norm)(stock)
    stock.load_state_dict(layer.state_dict())
    layer.eval(), stock.eval()
    x = image(name, device).double()
    found = graded(layer, x)
    assert pc.last_path()["path"] == "tiled"
    torch.testing.assert_close(found, graded(stock, x))


def test_a_tied_weight_gets_both_gradients(device):
    one = pc.Conv2d(4, 4, 3, padding=1, splits=2, device=device)
    two = pc.Conv2d(4, 4, 3, padding=1, splits=3, device=device)
    two.weight = one.weight
    stock = nn.Conv2d(4, 4, 3, padding=1, device=device)
    stock.load_state_dict(one.state_dict())
    two.bias = one.bias
    x = image("Conv2d", device)
    two(one(x)).square().sum().backward()
    stock(stock(x)).square().sum().backward()
    torch.testing.assert_close(one.weight.grad, stock.weight.grad)
    torch.testing.assert_close(one.bias.grad, stock.bias.grad)


@ALL
def test_moves_and_casts(name):
    layer = make(name, splits=2).double()
    assert layer.weight.dtype == torch.float64
    assert layer(image(name).double()).dtype == torch.float64
    assert make(name, 4, 6, 3, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    meta = getattr(pc, name)(4, 6, 3, device="meta", splits=2)
    assert meta(image(name).to("meta")).shape == layer(image(name).double()).shape


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_traces_name_the_public_operator():
    """Which is in saved programs: the internal one may change."""
    traced = torch.jit.trace(pc.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))
    assert "patchconv::conv2d(" in str(traced.inlined_graph)
