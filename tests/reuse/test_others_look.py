"""Modes, attributes, storages, and layers that compute otherwise inside of a mode: what others see stays right."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.threads import on_threads
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

import patchconv_native as pc
from patchconv_native.lean import ForwardInLean
from patchconv_native.reuse import spent


@pytest.fixture(autouse=True)
def _tensors_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent, "_LEAST", 1)


def made() -> Tensor:
    return torch.arange(24.0).view(1, 3, 2, 4) - 9


class Code(nn.Module):
    def __init__(self, code: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.relu, self.code = nn.ReLU(), code
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x) if x is not None else torch.relu(x + x)  # so that its code is one that is looked at


def both(code: Callable[..., Any], x: Tensor | None = None, **layers: nn.Module) -> tuple[Any, Any]:
    """The results of the stock module and the converted one."""
    torch.manual_seed(0)
    model = Code(code, **layers).eval()
    with torch.no_grad():
        return model(made() if x is None else x), pc.convert(copy.deepcopy(model))(made() if x is None else x)


def same(stock: Any, ours: Any) -> bool:
    if isinstance(stock, Tensor):
        facts = [(one.dtype, one.stride(), one.is_inference(), one.is_neg()) for one in (stock, ours)]
        return torch.equal(stock, ours) and facts[0] == facts[1]
    if isinstance(stock, (tuple, list)):
        return len(stock) == len(ours) and all(map(same, stock, ours))
    return bool(stock == ours)


class Records(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.results.append(func(*args, **(kwargs or {})))
        return self.results[-1]


class RecordsFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.results.append(torch.sin(*args) if func is torch.tanh else func(*args, **(kwargs or {})))
        return self.results[-1]


@pytest.mark.parametrize("kind", [Records, RecordsFunctions])
def test_modes_that_keep_what_they_see(kind: Any) -> None:
    def code(self: Any, x: Tensor) -> Any:
        y = x * 2.0
        z = self.relu(y)
        z = z + x
        return torch.tanh(z)

    def kept(self: Any, x: Tensor) -> Any:
        y = x * 2.0
        held = [y]
        y = self.relu(y)
        return held[0], y

    model = Code(code).eval()
    results = []
    for one in (model, pc.convert(copy.deepcopy(model))):
        with torch.no_grad(), kind() as mode:
            one(made())
        results.append([result for result in mode.results if isinstance(result, Tensor)])
    assert same(*results)
    assert same(*both(kept))  # what was counted under the mode is not taken for granted afterwards


def test_a_default_device_changes_nothing() -> None:
    def code(self: Any, _: Tensor) -> Any:
        y = made()
        place = y.data_ptr()
        y = torch.relu(y)
        y = self.relu(y)
        return y.data_ptr() == place

    with DeviceContext("cpu"):
        assert both(code) == (False, True)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sigmoid into a buffer": lambda y, buffer: (torch.sigmoid(y, out=buffer), buffer),
    "tanh into a buffer": lambda y, buffer: (torch.tanh(y, out=buffer), buffer),
    "gelu into a buffer": lambda y, buffer: (torch._C._nn.gelu(y, out=buffer), buffer),
    "gelu with tanh": lambda y, buffer: F.gelu(y, approximate="tanh"),
    "elu": lambda y, buffer: F.elu(y, alpha=0.5),
    "a sum with alpha": lambda y, buffer: torch.add(y, y, alpha=2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_functions(name: str) -> None:
    def code(self: Any, x: Tensor) -> Any:
        y = x * 2.0
        return FUNCTIONS[name](y, torch.empty_like(y))

    assert same(*both(code))


def test_attention_computes_as_without_a_mode() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert same(*both(lambda self, x: self.layer(x + 1.0, src_key_padding_mask=mask), x, layer=encoder.eval()))
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    assert same(*both(lambda self, x: self.layer(x + 1.0, x, x, need_weights=False)[0], x, layer=attention.eval()))


def test_a_compiled_function_inside() -> None:
    compiled = torch.compile(lambda t: torch.sigmoid(t) * t, fullgraph=True, backend="eager")

    def code(self: Any, x: Tensor) -> Any:
        y = x * 2.0
        return compiled(y)

    assert same(*both(code))


def test_storages_that_are_kept() -> None:
    for take in (Tensor.untyped_storage, lambda y: y.untyped_storage()):

        def code(self: Any, x: Tensor, take: Any = take) -> Any:
            y = x * 2.0
            storage, shape = take(y), y.shape
            z = self.relu(y)
            return torch.empty(0).set_(storage).view(shape), z

        assert same(*both(code))


def test_attributes_and_gradients_of_the_input() -> None:
    def tagged(self: Any, x: Tensor) -> Any:
        y = x * 2.0
        y.mean_ = float(y.mean())
        z = self.relu(y)
        return hasattr(z, "mean_"), z

    def graded(self: Any, x: Tensor) -> Any:
        y = x * 2.0
        y.grad = torch.ones_like(y)
        z = self.relu(y)
        return z.grad is None, z

    assert same(*both(tagged)) and same(*both(graded))


def test_strides_of_results() -> None:
    def broadcast(self: Any, x: Tensor) -> Any:
        y = x[0, 0] * 2.0
        z = y.t()[:, :1]
        z = z.clone(memory_format=torch.preserve_format) + y.t().contiguous()
        return (y.t()[None] * 2.0).transpose(1, 2)[0] + z.t()

    def first(self: Any, x: Tensor) -> Any:
        pos = x[0, 0].t()  # (4, 2)
        y = torch.ones(5, 4, 2)
        y = pos + y
        return y

    def one_channel(self: Any, x: Tensor) -> Any:
        y = x[:, :1].contiguous(memory_format=torch.channels_last) * 2.0
        y = self.relu(y)
        return torch.sigmoid(y)

    def padded(self: Any, x: Tensor) -> Any:
        y = torch.empty_strided((1, 3, 4), (4, 4, 1)).fill_(2.0)
        y = self.relu(y)
        return y

    for code in (broadcast, first, one_channel, padded):
        assert same(*both(code))


def test_inference_mode_within() -> None:
    def code(self: Any, x: Tensor) -> Any:
        with torch.inference_mode(False):
            y = made()
        y = self.relu(y)
        z = made()
        z = self.relu(z)
        return y, z

    model = Code(code).eval()
    with torch.inference_mode():
        assert same(model(made()), pc.convert(copy.deepcopy(model))(made()))


def test_tensors_without_memory_and_with_a_sign() -> None:
    def zeros(self: Any, x: Tensor) -> Any:
        y = torch._efficientzerotensor(3, 4)
        return self.relu(y)

    def negated(self: Any, x: Tensor) -> Any:
        y = torch._neg_view(x * 2.0)
        return self.relu(y)

    assert same(*both(zeros)) and same(*both(negated))


def test_callables_with_an_odd_equality() -> None:
    class Odd:
        def __call__(self, x: Tensor) -> Tensor:
            return torch.relu(x)

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    odd = Odd()

    def code(self: Any, x: Tensor) -> Any:
        y = x * 2.0
        y = odd(y)
        return y

    assert same(*both(code))


def test_each_thread_counts_for_itself() -> None:
    """What is active in one (a hook of torch.compile, say) changes the count there alone."""
    probes = sys.modules[ForwardInLean.__module__]._probes
    (other,) = on_threads(lambda: probes.layer)
    assert other is not probes.layer and probes.layer is probes.layer
