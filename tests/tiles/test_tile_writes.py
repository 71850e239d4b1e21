"""What a module writes and draws besides its result: as one call of it does, and nothing where nothing is computed."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc

GENERATOR = torch.Generator()


class Net(nn.Module):
    """A convolution, times a number that `number` finds."""

    def __init__(self, number: Callable[[Net], Any]) -> None:
        super().__init__()
        self.conv, self.number = nn.Conv2d(2, 3, 3, padding=1), number
        self.register_buffer("buffer", torch.ones(3))
        self.several = [torch.ones(2), torch.ones(3)]
        self.own = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(2), numpy.random.default_rng(3)
        self.held = {"legacy": numpy.random.RandomState(4)}

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.number(self)


def by_numpy(net: Net) -> Any:
    net.buffer.numpy()[1] += 1
    return net.buffer[1]


def by_list(net: Net) -> Any:
    torch._foreach_add_(net.several, 1)
    return net.several[0][0]


def by_out(net: Net) -> Any:
    torch.add(net.buffer, 1, out=net.buffer)
    return net.buffer[0]


def by_name(net: Net) -> Any:
    nn.init.constant_(net.buffer, float(net.buffer[0]) + 1)
    return net.buffer[2]


def by_data(net: Net) -> Any:
    net.buffer.data.add_(1)
    return net.buffer[1]


def by_assignment(net: Net) -> Any:
    net.buffer.data = net.buffer.data * 2
    return net.buffer[1]


def by_view(net: Net) -> Any:
    net.buffer[1:].view(2, 1)[0, 0] += 1
    return net.buffer[1]


def by_norm(net: Net) -> Any:
    nn.functional.batch_norm(torch.randn(4, 3), net.buffer, net.several[1], training=True)
    return net.buffer[1]


def replaced(net: Net) -> Any:
    net.buffer = net.buffer + 1
    return net.buffer[1]


WRITES: list[Callable[[Net], Any]] = [
    by_numpy, by_list, by_out, by_name, by_data, by_assignment, by_view, by_norm, replaced,
]  # fmt: skip
DRAWS: dict[str, Callable[[Net], Any]] = {
    "torch": lambda net: torch.rand(()),
    "random": lambda net: random.random(),
    "numpy": lambda net: numpy.random.rand(),
    "own": lambda net: torch.rand((), generator=net.own),
    "own random": lambda net: net.python.random(),
    "own numpy": lambda net: net.numpy.random(),
    "in a mapping": lambda net: net.held["legacy"].rand(),
    "global": lambda net: torch.rand((), generator=GENERATOR),
}
CASES = {one.__name__: one for one in WRITES} | DRAWS
X = structured((1, 2, 30, 20)).float()


def seed() -> None:
    torch.manual_seed(5)
    random.seed(6)
    numpy.random.seed(7)
    GENERATOR.manual_seed(8)


def state(net: Net) -> list[Any]:
    """All that a call may change."""
    generators = [torch.default_generator, net.own, GENERATOR]
    others = [random.getstate(), net.python.getstate(), numpy.random.get_state(), net.numpy.bit_generator.state]
    numbers = [one.get_state() for one in generators] + [net.buffer, *net.several, *net.parameters()]
    return [pickle.dumps([others, net.held["legacy"].get_state()]), *(one.detach().clone() for one in numbers)]


def same(a: list[Any], b: list[Any]) -> bool:
    return a[0] == b[0] and all(map(torch.equal, a[1:], b[1:]))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_nothing_changes_where_nothing_is_computed(name: str) -> None:
    seed()
    net = Net(CASES[name])
    before = state(net)
    pc.tile_plan(net, X, tile=5)
    assert same(state(net), before)
    with pytest.raises(pc.BudgetError):
        pc.tile(net, X, budget=1)
    assert same(state(net), before)

    def broken(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pc.tile(net, X, tile=5, progress=broken)
    assert same(state(net), before)


@pytest.mark.parametrize("kept", [False, True], ids=["tile", "tile_modules"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_each_call_is_one_of_the_module(name: str, kept: bool) -> None:
    net = Net(CASES[name])
    stock = copy.deepcopy(net)
    tiled = pc.tile_modules(net, budget="1MiB") if kept else lambda x: pc.tile(net, x, tile=5)
    for number in range(3):
        found = []
        for model, call in ((stock, stock), (net, tiled)):
            seed()
            torch.rand(number + 1)
            random.random()
            found.append((call(X), state(model)))
        torch.testing.assert_close(found[1][0], found[0][0])
        assert same(found[1][1], found[0][1])
