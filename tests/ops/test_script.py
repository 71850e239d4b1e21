"""TorchScript: functions and modules script, save, load, run, differentiate, and cut where they are told to."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from support.gradients import graded
from support.pairs import pairwise
from torch import Tensor, nn

import patchconv_native as pc

KINDS = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]

# TorchScript is deprecated in torch's newer releases; it is served as long as torch has it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::FutureWarning")


def call_conv2d(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.ops.patchconv.conv2d(x, w, b, [2, 1], [1, 2, 0, 1], [1, 1], 1, padding_mode="reflect", splits=[3, 2])


def call_transposed(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.patchconv.conv_transpose2d(x, w, None, [2, 2], [1, 1], [1, 0], 1, [1, 1], splits=[4])


def reloaded(module: Any) -> Any:
    stream = io.BytesIO()
    torch.jit.save(module, stream)
    stream.seek(0)
    return torch.jit.load(stream)


@pytest.mark.parametrize(
    "function,shapes",
    [(call_conv2d, [(1, 2, 9, 8), (3, 2, 3, 3), (3,)]), (call_transposed, [(1, 2, 6, 5), (2, 3, 3, 3)])],
    ids=["conv2d", "conv_transpose2d"],
)
def test_scripted_function(device, function, shapes):
    leaves = [torch.randn(*shape, device=device, requires_grad=True) for shape in shapes]
    expected = function(*leaves)
    scripted = torch.jit.script(function)
    for _ in range(3):  # the profiling executor specialises on the first runs
        torch.testing.assert_close(scripted(*leaves), expected)
    assert pc.last_path()["path"] == "tiled"
    torch.testing.assert_close(graded(scripted, *leaves), graded(function, *leaves))


@pairwise(kind=KINDS, splits=[None, 3, "each"], bias=[True, False])
def test_scripted_module(device, kind, splits, bias):
    dims = int(kind[-2])
    splits = (2,) * dims if splits == "each" else splits
    layer = getattr(pc, kind)(4, 6, 3, stride=2, padding=1, groups=2, bias=bias, splits=splits, device=device)
    scripted = reloaded(torch.jit.script(layer))
    assert [name for name, _ in scripted.named_parameters()] == [name for name, _ in layer.named_parameters()]
    for sizes in ([7] * dims, [9] * dims, [8] * dims):
        x = torch.randn(2, 4, *sizes, device=device, requires_grad=True)
        found = graded(scripted, x)
        assert pc.last_path()["path"] == ("stock" if splits is None else "tiled")
        torch.testing.assert_close(found, graded(layer, x))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [2, "same", "valid"])
def test_scripted_padding(device, mode, padding):
    layer = pc.Conv2d(3, 4, 4, padding=padding, padding_mode=mode, splits=(2, 2), device=device)
    scripted = reloaded(torch.jit.script(layer))
    x = torch.randn(1, 3, 9, 8, device=device)
    torch.testing.assert_close(scripted(x), layer(x))
    torch.testing.assert_close(scripted(x[0]), layer(x[0]))


@pytest.mark.parametrize("kind", KINDS[3:])
def test_scripted_output_size(device, kind):
    dims = int(kind[-2])
    layer = getattr(pc, kind)(4, 6, 3, stride=2, padding=1, splits=2, device=device)
    scripted = reloaded(torch.jit.script(layer))
    x = torch.randn(1, 4, *[5] * dims, device=device)
    for size in (9, 10):
        torch.testing.assert_close(scripted(x, [size] * dims), layer(x, [size] * dims))
    torch.testing.assert_close(scripted(x), layer(x))


def test_scripted_converted_model(device):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 1, 1)
    ).to(device)
    expected = model.eval()(x := torch.randn(2, 3, 10, 12, device=device))
    pc.convert(model, splits=2)
    scripted = reloaded(torch.jit.script(model))
    torch.testing.assert_close(scripted(x), expected)
    assert pc.last_path()["path"] == "tiled"
    frozen = torch.jit.freeze(torch.jit.script(model))
    torch.testing.assert_close(frozen(x), expected)


def test_traced_model(device):
    model = pc.convert(nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ConvTranspose2d(4, 2, 3)), splits=2)
    model.to(device)
    x = torch.randn(1, 3, 8, 8, device=device)
    traced = reloaded(torch.jit.trace(model, x))
    for size in (8, 11):
        y = torch.randn(2, 3, size, size, device=device)
        torch.testing.assert_close(traced(y), model(y))


def test_errors_come_through(device):
    scripted = torch.jit.script(call_conv2d)
    w = torch.randn(3, 2, 3, 3, device=device)
    with pytest.raises(Exception, match=r"conv2d: expected input to have 2 channels"):
        scripted(torch.randn(1, 5, 9, 8, device=device), w, torch.randn(3, device=device))
