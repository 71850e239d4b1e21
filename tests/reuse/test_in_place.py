"""Without gradients converted layers write into inputs that nobody reads again, with stock's numbers."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.reuse import in_place, spent

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(24), "BatchNorm2d, plain": lambda: nn.BatchNorm2d(24, affine=False),
    "GroupNorm": lambda: nn.GroupNorm(6, 24), "GroupNorm of all": lambda: nn.GroupNorm(1, 24),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(24),
    "InstanceNorm2d, affine": lambda: nn.InstanceNorm2d(24, affine=True),
    "LayerNorm": lambda: nn.LayerNorm(192), "LayerNorm of images": lambda: nn.LayerNorm([128, 192]),
    "ReLU": nn.ReLU, "ReLU6": nn.ReLU6,
    "LeakyReLU": lambda: nn.LeakyReLU(0.3), "Hardtanh": lambda: nn.Hardtanh(-0.5, 0.25), "Softshrink": nn.Softshrink,
    "Threshold": lambda: nn.Threshold(0.1, 7.0), "Hardshrink": nn.Hardshrink, "Hardsigmoid": nn.Hardsigmoid,
    "SiLU": nn.SiLU, "GELU": nn.GELU, "GELU tanh": lambda: nn.GELU("tanh"), "Hardswish": nn.Hardswish, "Mish": nn.Mish,
    "ELU": lambda: nn.ELU(0.7), "SELU": nn.SELU, "CELU": lambda: nn.CELU(2.0), "Softplus": lambda: nn.Softplus(2.0),
    "Sigmoid": nn.Sigmoid, "Tanh": nn.Tanh,
}  # fmt: skip
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
NOT_IN_CHANNELS_LAST = ("GroupNorm", "LayerNorm", "InstanceNorm")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Then(nn.Module):
    """The layer of a tensor that is nobody else's. Remembers where in memory the tensor and the result were."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone(memory_format=torch.preserve_format)
        self.before = y.data_ptr()
        y = self.layer(y)
        self.after = y.data_ptr()
        return y


def image(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Slopes and edges, and a different level in each channel, with some noise."""
    rows, columns = torch.linspace(-3, 3, shape[2]).view(-1, 1), torch.linspace(0, 9, shape[3])
    steps = (columns * 2).sin().sign() + rows * (columns > 4)
    return (torch.arange(shape[1]).view(-1, 1, 1) / 8 - 1 + steps + torch.randn(shape) / 9).to(dtype)


def prepared(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layer = make()
    for tensor in itertools.chain(layer.parameters(), layer.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.3, 1.7)
    return layer.to(dtype).eval()


@pytest.fixture(autouse=True)
def _any_size_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[in_place.__module__], "_PAYS", 1)
    monkeypatch.setattr(spent, "_LEAST", 1)


def assert_same(result: Tensor, expected: Tensor, exact: Tensor) -> None:
    """To the bit, or with no larger an error than one and a half times that of the expected result, and rounding."""
    assert result.dtype == expected.dtype and result.stride() == expected.stride()
    if not torch.equal(result, expected):
        ours, stocks = ((one.double() - exact).abs().max() for one in (result, expected))
        rounding = max(torch.finfo(result.dtype).eps / 2, 1e-14)  # nothing is more exact than float64 here
        assert ours <= 1.5 * stocks + rounding * exact.abs().max()


@pytest.mark.parametrize(
    ("name", "dtype", "layout", "batch"),
    [
        (name, DTYPES[i % 4], list(LAYOUTS)[i // 2 % 2], (1, 3)[i % 2]) for i, name in enumerate(LAYERS)
    ] + [(name, DTYPES[i % 3 - 1], "contiguous", 1) for i, name in enumerate(LAYERS)],
)  # fmt: skip
def test_the_numbers_of_stock_in_the_memory_of_the_input(name: str, dtype: Any, layout: str, batch: int) -> None:
    layer = prepared(LAYERS[name], dtype)
    x = image((batch, 24, 128, 192), dtype).contiguous(memory_format=LAYOUTS[layout])
    given = x.clone()
    model = pc.convert(Then(copy.deepcopy(layer)).eval())
    with torch.no_grad():
        expected, result = layer(x), model(x)
        assert_same(result, expected, layer.double()(x.double()))
    assert torch.equal(x, given)
    served = layout == "contiguous" or not name.startswith(NOT_IN_CHANNELS_LAST)
    assert (model.after == model.before) == served


VOLUMES = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(16), (4, 16, 8192)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(5), (2, 5, 40, 41, 42)),
    "rows": (lambda: nn.BatchNorm1d(65), (9001, 65)), "GroupNorm": (lambda: nn.GroupNorm(5, 10), (2, 10, 37, 41, 43)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(16), (4, 16, 8193)),
    "LayerNorm": (lambda: nn.LayerNorm(65), (9001, 65)),
    "SiLU": (nn.SiLU, (300_007,)),
}  # fmt: skip


@pytest.mark.parametrize("name", VOLUMES)
@pytest.mark.parametrize("inference", [False, True])
def test_other_shapes(name: str, inference: bool) -> None:
    make, shape = VOLUMES[name]
    layer = prepared(make, torch.float32)
    x = torch.randn(shape)
    model = pc.convert(Then(copy.deepcopy(layer)).eval())
    with torch.inference_mode() if inference else torch.no_grad():
        result, expected = model(x), layer(x)
        assert_same(result, expected, layer.double()(x.double()))
    assert model.after == model.before


def test_left_to_stock() -> None:
    """Statistics of the batch, other dtypes of the result, errors."""
    x = torch.randn(4, 24, 128, 192)
    for layer in (
        nn.BatchNorm2d(24, track_running_stats=False),
        nn.BatchNorm2d(24).train(),
        nn.GroupNorm(2, 24).train(),
    ):
        model = pc.convert(Then(copy.deepcopy(layer)).train(layer.training))
        with torch.no_grad():
            torch.testing.assert_close(model(x), layer(x))
        assert model.after != model.before
    model = pc.convert(Then(nn.Softplus()).eval())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(x.bfloat16()).dtype == nn.Softplus()(x.bfloat16()).dtype
    for layer, shape in ((nn.BatchNorm2d(24), (24, 128, 192)), (nn.GroupNorm(5, 25), (1, 24, 128, 192))):
        model = pc.convert(Then(layer.eval()))
        with torch.no_grad(), pytest.raises((ValueError, RuntimeError)) as ours:
            model(torch.randn(shape))
        with torch.no_grad(), pytest.raises(ours.type) as stock:
            pc.revert(model)(torch.randn(shape))
        assert str(ours.value) == str(stock.value)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_and_parameters_in_float32(name: str, layout: str, dtype: Any) -> None:
    layer = prepared(LAYERS[name], torch.float32)
    x = image((2, 24, 128, 192), dtype).contiguous(memory_format=LAYOUTS[layout])
    model = pc.convert(Then(copy.deepcopy(layer)).eval())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_same(model(x), layer(x), layer.double()(x.double()))


class Net(nn.Module):
    """Each of the ways in which networks are written."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.conv, self.norm = nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32)
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.norm(x)
        h = self.act(h)
        x = x + self.conv(h)
        del h
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        y = F.gelu(x) * 0.5
        return torch.sigmoid(F.leaky_relu(y, 0.2) - x)


def test_a_network_takes_less_memory_and_has_the_same_numbers() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    converted, doubled = pc.convert(copy.deepcopy(net)), pc.convert(copy.deepcopy(net).double())
    x = torch.randn(1, 3, 320, 320)
    with torch.no_grad(), pc.workspace_limit("256KiB"):
        torch.testing.assert_close(doubled(x.double()), net.double()(x.double()), rtol=0, atol=1e-12)
        models = net.float(), converted
        stock, ours = (allocated_peak(lambda model=model: model(x)) / (32 * x[0, 0].nbytes) for model in models)
    assert stock > 3.9
    assert ours < 3.1


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True), nn.AdaptiveMaxPool2d(31)])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_max_pools_keep_one_byte_an_output(pool: nn.Module, inference: bool, layout: str) -> None:
    x = torch.randn(2, 8, 127, 129).contiguous(memory_format=LAYOUTS[layout])
    x[:, :, 5:9, 3] = float("nan")
    converted = pc.convert(nn.Sequential(copy.deepcopy(pool)).eval())
    with torch.inference_mode() if inference else torch.no_grad():
        expected, result = pool(x), converted(x)
        assert torch.equal(result.isnan(), expected.isnan()) and result.stride() == expected.stride()
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())
        stock, ours = (allocated_peak(lambda model=model: model(x)) for model in (pool, converted))
    assert stock >= 3 * expected.nbytes > 2 * ours


def test_memory_reports_see_it() -> None:
    torch.manual_seed(0)
    model = pc.convert(Net().eval())
    x = torch.randn(1, 3, 320, 320)
    with torch.no_grad():
        measured = allocated_peak(lambda: model(x))
    traced = pc.memory.trace(model, x, train=False)
    predicted = pc.memory.trace(model, x, train=False, fake=True)
    assert traced.peak - traced.static == measured
    assert abs(predicted.peak - predicted.static - measured) <= 0.03 * measured
