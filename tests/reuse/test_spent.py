"""Which inputs may be written into: those that nobody can read after the call."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.holders import FRESH, HELD, SPENT, Code, made
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import patchconv_native as pc
from patchconv_native.reuse import spent


@pytest.fixture(autouse=True)
def _tensors_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent, "_LEAST", 1)
    monkeypatch.setattr("patchconv_native.reuse.functions._is_served", lambda forward: True)


def run(code: Callable[..., Any], *, convert: bool = True, before: Callable[[Code], Any] = lambda model: None) -> Any:
    model = Code(code).eval()
    if convert:
        pc.convert(model)
    before(model)
    with torch.no_grad():
        return model(FRESH.clone())


SHARED: dict[str, Callable[[Any], Tensor]] = {
    "processes": lambda folder: made().share_memory_(),
    "a file": lambda folder: torch.from_file(str(folder / "x"), shared=True, size=12).copy_(FRESH.flatten()),
    "a buffer": lambda folder: torch.frombuffer(bytearray(48), dtype=torch.float32),
    "dlpack": lambda folder: torch.from_dlpack(np.ones(12, dtype=np.float32)),
}


@pytest.mark.parametrize("name", SHARED)
def test_memory_of_others(name: str, tmp_path: Any) -> None:
    def code(self: Any, _: Tensor) -> Any:
        x = SHARED[name](tmp_path)
        place = x.data_ptr()
        x = self.relu(x)
        return place, x

    place, result = run(code)
    assert result.data_ptr() != place


@pytest.mark.parametrize("name", SPENT)
def test_nobody_reads_it_again(name: str) -> None:
    place, result = run(SPENT[name])
    _, expected = run(SPENT[name], convert=False)
    assert torch.equal(result, expected)
    assert result.data_ptr() == place


@pytest.mark.parametrize("name", HELD)
def test_somebody_may_read_it_again(name: str) -> None:
    unchanged, result = run(HELD[name])
    _, expected = run(HELD[name], convert=False)
    assert torch.equal(unchanged, FRESH)
    pairs = zip(result, expected, strict=True) if isinstance(result, list) else [(result, expected)]
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", ["set_again", "of_a_sum", "of_a_function"])
def test_gradients(name: str) -> None:
    """With gradients nothing is written into, even where no tensor requires any."""
    model = pc.convert(Code(SPENT[name]).eval())
    place, result = model(FRESH.clone())
    assert result.data_ptr() != place


def test_transforms_and_other_tensors() -> None:
    def code(self: Any, x: Tensor) -> Any:
        y = x * 2
        y = self.norm(y)
        y = torch.relu(y)
        return y / 2.0

    stock = Code(code).eval()
    stock.norm = nn.BatchNorm2d(3).eval()
    model = pc.convert(copy.deepcopy(stock))
    x = torch.stack([made(), made() + 1])
    with torch.no_grad():
        assert torch.equal(torch.vmap(model)(x), torch.vmap(stock)(x))
        ours, stocks = (torch.func.jvp(one, (made(),), (made(),)) for one in (model, stock))
        assert torch.equal(ours[0], stocks[0]) and torch.equal(ours[1], stocks[1])
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(made(), made())
            ours, stocks = (torch.autograd.forward_ad.unpack_dual(one(dual)) for one in (model, stock))
        assert torch.equal(ours.primal, stocks.primal) and torch.equal(ours.tangent, stocks.tangent)
        sparse = pc.convert(nn.Sequential(nn.ReLU()).eval())(made().to_sparse())
        assert sparse.is_sparse and torch.equal(sparse.to_dense(), made().relu())
        graph = make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(made())
        assert torch.equal(graph(made()), stock(made()))


def hook(model: Code) -> Any:
    model.relu.register_forward_hook(lambda layer, args, result: model.kept.append((args[0].clone(), result)))


def hook_before(model: Code) -> Any:
    model.relu.register_forward_pre_hook(lambda layer, args: model.kept.append(args[0]))


def test_hooks_see_the_input() -> None:
    for before in (hook, hook_before):
        model = pc.convert(Code(SPENT["set_again"]).eval())
        before(model)
        with torch.no_grad():
            model(FRESH.clone())
        seen = model.kept[0]
        assert torch.equal(seen[0] if isinstance(seen, tuple) else seen, FRESH)


def test_a_debugger_sees_the_variables() -> None:
    model = pc.convert(Code(SPENT["set_again"]).eval())
    sys.settrace(lambda *_: None)
    try:
        with torch.no_grad():
            place, result = model(FRESH.clone())
    finally:
        sys.settrace(None)
    assert result.data_ptr() != place


class Own(nn.ReLU):
    """A subclass whose forward reads its input again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x


def test_a_layer_that_reads_its_input_again() -> None:
    def code(self: Any, x: Tensor) -> Any:
        y = made()
        y = self.own(y)
        return FRESH, y

    def add(model: Any) -> None:
        model.own = pc.convert(Own().eval())

    assert torch.equal(run(code, before=add)[1], Own()(FRESH))
