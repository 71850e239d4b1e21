"""Random Python functions give the same numbers converted: nothing that is read again is written into."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL
from support.seeds import SWEEP_SEED
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.lean import ForwardInLean
from patchconv_native.reuse import functions, in_place, spent

PROGRAMS = 2000 if FULL else 100
VARIABLES = "abcde"
LAYERS = ("relu", "tanh", "norm", "clip", "gelu")  # with stock's very bits: branches depend on them
FUNCTIONS = ("torch.relu", "torch.tanh", "torch.sigmoid", "F.silu", "F.relu", "F.gelu", "F.softplus")


class Writer:
    """Writes the body of a function line by line."""

    def __init__(self, seed: int) -> None:
        self.random, self.lines = random.Random(seed), []

    def value(self) -> str:
        return self.random.choice(VARIABLES)

    def layer(self, argument: str) -> str:
        return f"{self.random.choice([f'self.{name}' for name in LAYERS] + list(FUNCTIONS))}({argument})"

    def expression(self) -> str:
        a, b = self.value(), self.value()
        return self.random.choice([
            self.layer(a), self.layer(a), self.layer(a), self.layer(self.layer(a)), self.layer(f"{a} * 0.5"),
            f"{a} + {b}", f"{a} * {b}", f"{a} - {b}", f"{a} / 2.0", f"1 - {a}",
            f"{a} - 0.5", f"{a} * 0.5", f"{a} / 3", f"{a} + {a}.mean((2, 3), keepdim=True)",
            f"{a} + {self.layer(b)}", f"({a} + {b}) * 0.5", a, f"{a}.view({a}.shape)", f"{a}.detach()",
            f"{a}.transpose(2, 3).contiguous().transpose(2, 3)", "kept[-1]", f"named['x'] + {a}", "self.memory",
            f"{self.layer(a)} if float({b}.sum()) > 0 else {b}", f"self.relu(input={a})", f"(lambda: {a})()",
            f"sum({self.layer('t')} for t in ({a}, {b}))", f"list(map(self.tanh, [{a}, {b}]))[0]", f"self.block({a})",
            f"torch.stack([{self.layer('t')} for t in ({a}, {b})]).sum(0)", f"identity({a})", f"F.leaky_relu({a}, 0.2)",
            f"next(iter([{a}]))", f"({a} := {self.layer(b)})", f"{self.layer(f'identity({a})')} + {a}",
        ])  # fmt: skip

    def block(self, depth: int, indent: str) -> None:
        for _ in range(self.random.randint(2, 4)):
            self.statement(depth, indent)

    def statement(self, depth: int, indent: str) -> None:
        put = lambda line: self.lines.append(indent + line)  # noqa: E731
        kind = self.random.randrange(16 if depth else 10)
        a, b = self.value(), self.value()
        if kind < 7:
            put(f"{a} = {self.expression()}")
        elif kind == 7:
            put(self.random.choice([f"kept.append({a})", f"named['x'] = {a}", f"self.memory = {a}"]))
        elif kind == 8:
            put(f"{a}, {b} = {b}, {self.layer(a)}")
        elif kind == 9:
            put(f"{a} = kept.pop() if len(kept) > 1 else {b}")
        elif kind < 12:
            put(f"if float({a}.sum()) > {self.random.choice((-2, 0, 2))}:")
            self.block(depth - 1, indent + "    ")
            put("else:")
            self.block(depth - 1, indent + "    ")
        elif kind == 12:
            put(f"for i in range({self.random.randint(1, 3)}):")
            self.block(depth - 1, indent + "    ")
        elif kind == 13:
            put("try:")
            self.block(depth - 1, indent + "    ")
            put("    if float(a.sum()) > 0: raise ValueError")
            put("except ValueError:")
            self.block(depth - 1, indent + "    ")
        elif kind == 14:
            put("with contextlib.suppress(ValueError):")
            self.block(depth - 1, indent + "    ")
            put("    if float(b.sum()) > 0: raise ValueError")
        else:
            put("while True:")
            self.block(depth - 1, indent + "    ")
            put(f"    if float({a}.sum()) > 0: break")
            self.block(depth - 1, indent + "    ")
            put("    break")


def program(seed: int) -> str:
    writer = Writer(seed)
    writer.block(2, "    ")
    writer.block(2, "    ")
    start = "".join(f"    {name} = x * {i + 1} - {i}\n" for i, name in enumerate(VARIABLES))
    head = f"def forward(self, x):\n{start}    kept, named = [a], {{'x': b}}\n    self.memory = c\n"
    shown = writer.random.sample(VARIABLES, 2)  # the others are not read again
    end = f"    return {', '.join(shown)}, self.memory, named['x'], *kept\n"
    return head + "\n".join(writer.lines) + "\n" + end


def identity(x: Tensor) -> Tensor:
    return x


class Code(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu, self.tanh, self.gelu = nn.ReLU(), nn.Tanh(), nn.GELU()
        self.norm, self.clip = nn.BatchNorm2d(2), nn.Hardtanh(-2.0, 3.0)
        self.block = nn.Sequential(nn.Tanh(), nn.BatchNorm2d(2), nn.ReLU())


def made(source: str) -> nn.Module:
    found: dict[str, Any] = {"torch": torch, "F": F, "contextlib": contextlib, "identity": identity}
    exec(source, found)
    return type("Random", (Code,), {"forward": found["forward"]})()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which calls have written into their input."""
    seen: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(name)
            return function(*args)

        return call

    monkeypatch.setattr(spent, "_LEAST", 1)
    monkeypatch.setattr(sys.modules[ForwardInLean.__module__], "in_place", noted("layer", in_place))
    monkeypatch.setattr(functions, "_into", noted("function", functions._into))
    sums = {function: (sign, noted(sign, into)) for function, (sign, into) in functions._ARITHMETIC.items()}
    monkeypatch.setattr(functions, "_ARITHMETIC", sums)
    yield seen


def test_random_code(counted: list[str]) -> None:
    generator = torch.Generator().manual_seed(SWEEP_SEED)
    for number in range(PROGRAMS):
        source = program(SWEEP_SEED * 10000 + number)
        model = made(source).double().eval()
        model.norm.running_mean.normal_(generator=generator)
        x = torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            expected = model(x.clone())
            given = x.clone()
            result = pc.convert(model)(given)
        assert torch.equal(given, x), source
        for one, other in zip(result, expected, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True), source
    assert {name for name in counted if counted.count(name) > PROGRAMS // 100} == {"layer", "function", *"+-*/"}
