"""torch.compile without graph breaks and with one compilation over many shapes; torch.export with dynamic sizes."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from support.gradients import graded
from support.pairs import pairwise
from torch import nn
from torch._dynamo.utils import counters

import patchconv_native as pc

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NAMES = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


def whole(block, dynamic=True):
    return torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)


def sizes(dims: int) -> list[tuple[int, ...]]:
    """Batches and spatial sizes of every parity.

    None is 0 or 1, which dynamo treats apart, and the first has no two sizes alike, since equal sizes get one
    symbol.
    """
    return [(n, *[10 + n + 3 * d + k for d in range(dims)]) for k, n in enumerate((8, 3, 4, 7, 2))]


@pairwise(name=NAMES, splits=[None, 2], backward=[False, True])
def test_one_compilation_over_many_shapes(device, name, splits, backward):
    dims = int(name[-2])
    call = getattr(pc.functional, name)

    def block(x, w, b):
        if splits is None:
            return torch.relu(call(x, w, b, stride=2, padding=1)) + 1
        return torch.relu(call(x, w, b, stride=2, padding=1, splits=2)) + 1

    compiled = whole(block)
    w = torch.randn(3, 3, *range(4, 4 + dims), device=device, requires_grad=backward)
    b = torch.randn(3, device=device, requires_grad=backward)
    for n, *spatial in sizes(dims):
        x = torch.randn(n, 3, *spatial, device=device, requires_grad=backward)
        torch.testing.assert_close(graded(compiled, x, w, b), graded(block, x, w, b))
    assert compilations() == 1
    assert pc.last_path()["path"] == ("stock" if splits is None else "tiled")


@pairwise(argument=["stride", "padding", "dilation", "groups", "splits"], name=["conv2d", "conv_transpose2d"])
def test_a_number_that_dynamo_makes_symbolic(device, name, argument):
    """Under dynamic=True an int that a function is given becomes a symbol; torch's convolutions take those too."""
    call = getattr(pc.functional, name)
    compiled = whole(lambda x, w, n: call(x, w, **{argument: n}))
    x = torch.randn(5, 4, 11, 13, device=device)
    for n in (2, 4):
        groups = n if argument == "groups" else 1
        w = torch.randn(4, 4 // groups, 3, 2, device=device)
        torch.testing.assert_close(compiled(x, w, n), call(x, w, **{argument: n}))


@pairwise(mode=["zeros", "reflect", "replicate", "circular"], padding=[(1, 1), (2, 0, 1, 2), "same"])
def test_padding_modes_compile_once(device, mode, padding):
    def block(x, w):
        return pc.functional.conv2d(x, w, padding=padding, padding_mode=mode, splits=2)

    compiled = whole(block)
    w = torch.randn(6, 3, 4, 5, device=device, requires_grad=True)
    for n, h, wide in sizes(2):
        x = torch.randn(n, 3, h, wide, device=device, requires_grad=True)
        torch.testing.assert_close(graded(compiled, x, w), graded(block, x, w))
    assert compilations() == 1


def net(device) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding="same", padding_mode="circular", groups=3), nn.ReLU(),
        nn.ConvTranspose2d(6, 2, 4, stride=2, padding=1),
    ).to(device)  # fmt: skip


@pytest.mark.parametrize("splits", [None, (2, 2)])
def test_converted_model_compiles_once(device, splits):
    model = pc.convert(net(device), splits=splits)
    model[1].eval()
    compiled = whole(model)
    for n, h, w in sizes(2):
        x = torch.randn(n, 3, 2 * h, 2 * w, device=device)
        torch.testing.assert_close(graded(compiled, x), graded(model, x))
    assert compilations() == 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_strides_of_compiled_results(device, layout):
    """Ahead-of-time graphs trust the Meta kernels' strides; a later view would show a wrong one."""

    def block(x, w):
        y = pc.functional.conv2d(x, w, padding=1, splits=2)
        return y, y.permute(0, 2, 3, 1).reshape(-1)

    compiled = whole(block, dynamic=None)
    x = torch.randn(2, 4, 7, 6, device=device).contiguous(memory_format=layout).requires_grad_()
    w = torch.randn(3, 4, 3, 3, device=device, requires_grad=True)
    for got, want in zip(compiled(x, w), block(x, w), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    torch.testing.assert_close(*(graded(lambda *given, f=f: f(*given)[1], x, w) for f in (compiled, block)))


def test_inductor(device):
    """The default backend, which generates code around the operator: needs a C++ compiler, or Triton on a GPU."""

    def block(x, w, b):
        return torch.relu(pc.functional.conv2d(x * 2, w, b, padding=1, splits=3)).sum(dim=1)

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    x = torch.randn(2, 3, 9, 10, device=device, requires_grad=True)
    w = torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    b = torch.randn(4, device=device, requires_grad=True)
    torch.testing.assert_close(graded(compiled, x, w, b), graded(block, x, w, b))


def test_compiled_autograd_is_refused(device):
    layer = pc.Conv2d(3, 4, 3, padding=1, splits=2, device=device)
    loss = layer(torch.randn(2, 3, 8, 8, device=device)).square().sum()
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with compiled, pytest.raises((NotImplementedError, RuntimeError), match="compiled"):
        loss.backward()
    torch._dynamo.reset()
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("splits", [None, 2])
def test_export_with_dynamic_sizes(device, splits):
    model = pc.convert(net(device).eval(), splits=splits)
    half_h, half_w = torch.export.Dim("half_h", min=4, max=512), torch.export.Dim("half_w", min=4, max=512)
    dynamic = {"input": {0: torch.export.Dim("n", min=2, max=64), 2: 2 * half_h, 3: 2 * half_w}}
    program = torch.export.export(model, (torch.randn(2, 3, 12, 16, device=device),), dynamic_shapes=dynamic)
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"patchconv.conv2d.default", "patchconv.conv_transpose2d.default"} <= targets
    for n, h, w in ((2, 12, 16), (5, 20, 14), (3, 8, 30)):
        x = torch.randn(n, 3, h, w, device=device)
        torch.testing.assert_close(program.module()(x), model(x))
    assert pc.last_path()["path"] == ("stock" if splits is None else "tiled")


def test_exported_program_can_be_saved(device, tmp_path):
    model = pc.convert(net(device).eval(), splits=2)
    x = torch.randn(2, 3, 12, 16, device=device)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "net.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(x), model(x))


def test_fake_and_meta_tensors_compute_nothing(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 64, 100_000, 100_000, device=device)
        w = torch.empty(64, 64, 3, 3, device=device, requires_grad=True)
        y = pc.functional.conv2d(x, w, padding=1)
        assert y.shape == x.shape
        y.sum().backward()
        assert w.grad is not None and w.grad.shape == w.shape
    x = torch.empty(1, 8, 1000, 1000, 1000, device="meta")
    assert pc.functional.conv3d(x, torch.empty(8, 8, 3, 3, 3, device="meta"), stride=2).shape == (1, 8, 499, 499, 499)
