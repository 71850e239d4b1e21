"""What exports and distributes a converted model finds torch's own operators in it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.modules import of_torchvision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor, init_device_mesh

import patchconv_native as pc


class Odd(nn.Module):
    """Convolutions that stock computes in two steps, a transposed one, and functional code."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 4, 4, padding="same", padding_mode="reflect")
        self.circular = nn.Conv2d(4, 4, 3, padding=(2, 1), padding_mode="circular", groups=2)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.circular(self.same(x))))
        return nn.functional.silu(torch.cat([self.up(y), self.up(y * 2)], 1))


MODELS = {"odd": Odd, "resnet18": lambda: of_torchvision("resnet18")}


def converted(name: str, **options: Any) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, an image, and what the stock model makes of it."""
    torch.manual_seed(0)
    model, x = MODELS[name]().eval(), torch.randn(2, 3, 33, 40)
    with torch.no_grad():
        expected = model(x)
    return pc.convert(model, **options), x, expected


@pytest.mark.parametrize("name", MODELS)
def test_onnx_by_torch_export(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.onnx.export(dynamo=True) calls torch.export, with its flag set, and turns what comes out into ONNX."""
    model, x, expected = converted(name, splits=2)
    inside = torch.export.export(model, (x,))
    assert any("patchconv" in str(node.target) for node in inside.graph.nodes)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    found = torch.export.export(model, (x,), strict=False)
    assert not any("patchconv" in str(node.target) for node in found.graph.nodes)
    torch.testing.assert_close(found.module()(x), expected)


@pytest.mark.parametrize("name", MODELS)
def test_onnx_by_a_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.onnx.export(dynamo=False) traces the model, with its flag set."""
    model, x, expected = converted(name)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    traced = torch.jit.trace(model, (x,))
    assert "patchconv::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), expected)


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["resnet18"])
def test_dtensors(name: str, group: None) -> None:
    model, x, expected = converted(name)
    mesh = init_device_mesh("cpu", (1,))
    given = distribute_tensor(x, mesh, [Shard(0)])
    try:
        distribute_module(MODELS[name](), mesh)(given)
    except RuntimeError as error:
        if "for tensor parallel convolution" not in str(error):  # torch 2.11's, of strides
            raise
        pytest.skip(str(error))
    distribute_module(model, mesh)
    y = model(given)
    assert isinstance(y, DTensor)
    torch.testing.assert_close(y.full_tensor(), expected)
    y.full_tensor().square().sum().backward()
    stock = MODELS[name]().eval()
    stock.load_state_dict({key: value.full_tensor() for key, value in model.state_dict().items()})
    stock(x).square().sum().backward()
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and q.grad is not None
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_dtensors_in_pieces(group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    x, w = (distribute_tensor(torch.randn(*shape), mesh, [Shard(0)]) for shape in ((2, 3, 8, 8), (4, 3, 3, 3)))
    with pytest.raises(NotImplementedError, match="_convolution"):
        pc.functional.conv2d(x, w, splits=2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, scale: float = 2.0, relu: bool = True) -> Tensor:
        y = self.conv(x) * scale
        return torch.relu(y) if relu else y


class ByName(Scaled):
    """With arguments that have no place, which torch.fx gives places."""

    def forward(self, x: Tensor, *, scale: float = 2.0, relu: bool = True) -> Tensor:
        return super().forward(x, scale, relu)


KINDS = {
    "converted": pc.convert,
    "checkpointed": lambda model: pc.checkpoint_modules(model, ""),
    "both": lambda model: pc.checkpoint_modules(pc.convert(model), ""),
    "tiled": lambda model: pc.tile_modules(model),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [Scaled, ByName])
def test_signatures_stay(kind: str, cls: type[Scaled]) -> None:
    model = KINDS[kind](cls())
    assert inspect.signature(model.forward) == inspect.signature(cls().forward)
    assert inspect.getsource(type(model).forward) == inspect.getsource(cls.forward)
    assert model.forward.__name__ == "forward" and type(model).forward is not cls.forward


@pytest.mark.parametrize("kind", ["converted"])
@pytest.mark.parametrize("cls", [Scaled, ByName])
def test_fx_finds_the_arguments(kind: str, cls: type[Scaled]) -> None:
    torch.manual_seed(0)
    model, x = KINDS[kind](cls()), torch.randn(2, 3, 9, 8)
    graph = torch.fx.symbolic_trace(model, concrete_args={"relu": True})
    assert [node.target for node in graph.graph.nodes if node.op == "placeholder"][:2] == ["x", "scale"]
    assert torch.equal(graph(x, scale=3.0), model(x, scale=3.0))
    assert torch.equal(graph(x), cls.forward(model, x))


def test_a_graph_module_keeps_its_class() -> None:
    """torch.fx writes the class of each graph module anew when its graph changes."""
    torch.manual_seed(0)
    graph, x = torch.fx.symbolic_trace(Scaled(), concrete_args={"relu": True}), torch.randn(2, 3, 9, 8)
    model = pc.convert(nn.Sequential(graph, nn.ReLU()))
    assert type(graph.conv) is pc.Conv2d and "with patchconv_native.lean()" in str(pc.convert_report(model))
    for node in list(graph.graph.nodes):
        if node.target is torch.relu:
            node.target = torch.sigmoid
    graph.recompile()
    expected = torch.sigmoid(graph.conv(x) * 2.0)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(pc.revert(copy.deepcopy(model))(x), expected)


@pytest.mark.parametrize("kind", ["converted", "checkpointed"])
def test_export_with_dynamic_shapes_by_name(kind: str) -> None:
    torch.manual_seed(0)
    model, x = KINDS[kind](Scaled()), torch.randn(2, 3, 9, 8)
    rows = torch.export.Dim("rows", min=4, max=64)
    found = torch.export.export(model, (x,), dynamic_shapes={"x": {2: rows}})
    other = torch.randn(2, 3, 31, 8)
    torch.testing.assert_close(found.module()(other), model(other))
