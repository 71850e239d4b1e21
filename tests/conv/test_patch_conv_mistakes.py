"""Mistakes found in patch_conv, the package whose job this one does: one test each, named after the mistake.

patch_conv splits rows when a tensor is very large, so most of its faults show at sizes its tests never reach.
Here the splits are forced and the path is asserted: a test that does not tile fails.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import patchconv_native as pc


def check(stock: nn.Module, x: torch.Tensor, splits: int | tuple[int, int] = 4) -> torch.Tensor:
    """A converted copy of `stock` gives stock's shape and numbers, forward and backward, and is tiled."""
    layer = type(stock)(
        stock.in_channels,
        stock.out_channels,
        stock.kernel_size,
        stock.stride,
        stock.padding,
        dilation=stock.dilation,
        groups=stock.groups,
        bias=stock.bias is not None,
        padding_mode=stock.padding_mode,
    ).double()
    layer.load_state_dict(stock.double().state_dict())
    pc.convert_model(layer, splits=splits)
    given = [x.double().requires_grad_(), x.double().clone().requires_grad_()]
    with pc.record_paths() as records:
        found = layer(given[0])
        found.square().sum().backward()
    expected = stock(given[1])
    expected.square().sum().backward()
    assert len(records) == 3 and {r["path"] for r in records} == {"tiled"}, records
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(given[0].grad, given[1].grad)
    torch.testing.assert_close(layer.weight.grad, stock.weight.grad)
    if stock.bias is not None:
        torch.testing.assert_close(layer.bias.grad, stock.bias.grad)
    return found


def image(height: int = 32, width: int = 20, batch: int = 1) -> torch.Tensor:
    rows = torch.linspace(-1, 1, height).view(-1, 1)
    return torch.randn(batch, 4, height, width) + 3 * rows


@pytest.mark.parametrize("stride", [2, 3, 5])
@pytest.mark.parametrize("height", [31, 32, 33])
def test_wrong_shape_when_the_stride_does_not_divide_the_strip(stride, height):
    check(nn.Conv2d(4, 5, 3, stride=stride, padding=1), image(height))


@pytest.mark.parametrize("kernel,padding", [(3, 2), (5, 1), (7, 2), (4, 2), (3, 5)])
def test_wrong_shape_when_padding_is_not_same(kernel, padding):
    check(nn.Conv2d(4, 5, kernel, padding=padding), image())


@pytest.mark.parametrize("dilation", [2, 3])
@pytest.mark.parametrize("padding", [0, 2, 6])
def test_wrong_shape_with_dilation(dilation, padding):
    check(nn.Conv2d(4, 5, 3, dilation=dilation, padding=padding), image())


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_error_for_padding_0(kernel):
    check(nn.Conv2d(4, 5, kernel, padding=0), image())


@pytest.mark.parametrize("kernel", [3, 4, 5])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_error_for_padding_same(kernel):
    check(nn.Conv2d(4, 5, kernel, padding="same"), image())


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_error_for_padding_modes(mode):
    check(nn.Conv2d(4, 5, 5, padding=2, padding_mode=mode), image())


@pytest.mark.parametrize("height", [29, 30, 31, 33])
def test_error_for_heights_that_do_not_divide(height):
    check(nn.Conv2d(4, 5, 3, padding=1), image(height))


@pytest.mark.parametrize("splits", [16, 32])
def test_error_for_strips_shorter_than_the_halo(splits):
    check(nn.Conv2d(4, 5, 15, padding=7), image(), splits)


def test_error_for_unbatched_input():
    assert check(nn.Conv2d(4, 5, 3, padding=1), image()[0]).dim() == 3


def test_an_exception_leaves_the_padding_changed():
    layer = pc.convert_model(nn.Conv2d(4, 5, 3, padding=1))
    before = (layer.padding, layer.padding_mode, layer.stride, layer.splits, repr(layer))
    for bad in (torch.randn(1, 3, 16, 16), torch.randn(4, 4), torch.randn(1, 4, 16, 16, dtype=torch.float64)):
        with pytest.raises((ValueError, TypeError)):
            layer(bad)
        assert (layer.padding, layer.padding_mode, layer.stride, layer.splits, repr(layer)) == before
    assert layer(image()).shape == (1, 5, 32, 20)
    assert pc.last_path()["path"] == "tiled"


def test_the_wrapper_loses_weight_and_stride():
    stock = nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2)
    expected = {k: v for k, v in vars(stock).items() if not k.startswith("_")}
    weight, bias = stock.weight, stock.bias
    layer = pc.convert_model(stock)
    assert isinstance(layer, nn.Conv2d)
    assert layer.weight is weight and layer.bias is bias
    assert {k: getattr(layer, k) for k in expected} == expected


def test_state_dict_keys_are_renamed():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 2, 1)))
    state = model.state_dict()
    converted = pc.convert_model(model)
    assert list(converted.state_dict()) == list(state)
    assert converted.load_state_dict(state).missing_keys == []
    fresh = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 2, 1)))
    fresh.load_state_dict(converted.state_dict())


def test_a_tied_module_is_converted_under_one_name_only():
    shared = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.ModuleDict({"first": shared, "second": nn.Sequential(shared)})
    pc.convert_model(model)
    x = image()
    for found in (model["first"], model["second"][0]):
        assert found is shared and type(found) is pc.Conv2d
        found(x)
        assert pc.last_path()["path"] == "tiled"


def test_tests_that_never_reach_the_split_path():
    """Small tensors are tiled when splits are given; and without them, the record says that nothing was."""
    layer = nn.Conv2d(4, 5, 3, padding=1)
    x = image()
    stock = layer(x)
    pc.convert_model(layer)
    tiled = layer(x)
    assert pc.last_path() | {"path": "tiled", "tiles": [4, 1], "count": 4} == pc.last_path()
    pc.convert(layer, splits=None)
    whole = layer(x)
    assert pc.last_path()["path"] == "stock"
    assert torch.equal(whole, stock)
    torch.testing.assert_close(tiled, stock)


@pytest.mark.parametrize("splits", [(1, 4), (3, 5)])
def test_rows_only(splits):
    """patch_conv cuts rows alone; an image that is wide rather than high gains nothing from that."""
    check(nn.Conv2d(4, 5, 3, padding=1), image(8, 101), splits)
