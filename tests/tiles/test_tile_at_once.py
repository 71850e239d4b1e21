"""With gradients, in the budget of one step of the module: its calls run at once, and autograd keeps what it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import ON_AVX512
from support.spatial_chains import structured
from test_tile_gradients import SMALL, assert_alike, graded, images
from test_tile_training import NETS, stepped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patchconv_native as pc
from patchconv_native._budget import MARGIN_OF_BACKWARD, least_budget
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles.at_once import StepAtOnce


def added(net: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> int:
    """The peak above the result, of a step whose gradients are added to those of another one."""
    grad = torch.ones_like(call(x))
    call(x).backward(grad)
    found: list[Tensor] = []

    def step() -> None:
        found.append(call(x))
        found[0].backward(grad)

    return allocated_peak(step) - found[0].nbytes


@pytest.mark.skipif(not ON_AVX512, reason="oneDNN's workspace is not known")
@pytest.mark.parametrize(("name", "asked"), [(name, place % 2 == 0) for place, name in enumerate(NETS)])
def test_a_budget_that_one_step_keeps_is_not_refused(name: str, asked: bool) -> None:
    torch.manual_seed(0)
    net, x = NETS[name](), structured((2, 3, 96, 80)).float().requires_grad_(asked)
    stock = copy.deepcopy(net)
    theirs = added(copy.deepcopy(net), x, copy.deepcopy(net))
    _, want = stepped(stock, x, stock)
    wanted = x.grad
    budget = least_budget(theirs + 1024, MARGIN_OF_BACKWARD)
    plan = pc.tile_plan(net, x, budget=budget)
    assert plan.at_once and "at once     as one call of the module: autograd keeps" in str(plan)
    assert plan.in_lean == (name == "converted")
    first, got = stepped(net, x, lambda x: pc.tile(net, x, budget=budget))
    assert_alike(
        [got, *(p.grad for p in net.parameters()), *net.buffers(), *([x.grad] if asked else [])],
        [want, *(p.grad for p in stock.parameters()), *stock.buffers(), *([wanted] if asked else [])], within=1e-5,
    )  # fmt: skip
    peak = added(net, x, lambda x: pc.tile(net, x, budget=budget))
    assert max(first, peak) <= budget and abs(plan.peak - peak) <= 0.01 * peak


def test_gradients_that_are_there_are_in_no_budget() -> None:
    """Of a network with large weights: a new gradient is there beside the one that it is added to."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.extend([nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024)])
    x = torch.randn(1, 8, 128, 128)
    plan = pc.tile_plan(net, x, budget="1GiB")
    assert plan.at_once
    budget = plan.needs
    assert added(net, x, lambda x: pc.tile(net, x, budget=budget)) <= budget


def test_progress_and_anomalies() -> None:
    net, x = NETS["in training"](), structured((2, 3, 48, 40)).float()
    told: list[tuple[int, int]] = []
    for budget in ("1GiB", "1MiB"):
        with torch.autograd.detect_anomaly(check_nan=True):
            pc.tile(net, x, budget=budget, progress=lambda *done: told.append(done)).sum().backward()
    assert told[0] == (1, 1) and told[-1][0] == told[-1][1]


def test_noise_that_is_drawn_after_it_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose second run stops there has noise that nobody drew."""
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.RReLU(), nn.Conv2d(8, 8, 3), nn.RReLU(), nn.Conv2d(8, 2, 3))
    x, found = torch.randn(2, 8, 24, 20).requires_grad_(), []
    for begins in ([0], [0, 2, 4]):
        monkeypatch.setattr(StepAtOnce, "_all", lambda self, most=None, begins=begins: [self._of_parts(begins, True)])
        torch.manual_seed(3)
        y = pc.tile(net, x, budget="1GiB")
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *net.parameters()])])
    assert_alike(found[1], found[0], within=1e-5)


@pytest.mark.parametrize("parts", [0, 1, 2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_gradients_at_once_are_those_of_one_call(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """parts: 0 is one part with stock's functions."""
    torch.manual_seed(0)
    net, given = SMALL[name]().double(), images(1, 2, (26, 19))
    stock = copy.deepcopy(net)
    begins = [0, 1, 2, 3][: max(parts, 1)]
    monkeypatch.setattr(StepAtOnce, "_all", lambda self, most=None: [self._of_parts(begins, parts > 0)])
    plan = pc.tile_plan(net, given[0], budget="1GiB")
    assert plan.at_once and plan.in_lean == (parts > 0) and plan.parts == begins
    expected = graded(stock, given, stock), list(stock.buffers())
    assert_alike((graded(net, given, lambda x: pc.tile(net, x, budget="1GiB")), list(net.buffers())), expected)


def test_dropout_does_not_depend_on_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Dropout(0.3), nn.Dropout2d(0.2), nn.Conv2d(8, 2, 3)).double()
    x = structured((2, 3, 64, 48)).requires_grad_()

    def stepped(budget: str) -> list[Tensor]:
        """The result, what is drawn after it and after the backward pass, and the gradients."""
        assert pc.tile_plan(net, x, budget=budget).at_once == (budget == "1GiB")
        torch.manual_seed(3)
        y = pc.tile(net, x, budget=budget)
        after = torch.rand(1)
        return [y.detach(), after, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()]), torch.rand(1)]

    expected = stepped("1GiB")
    assert_alike(stepped("1MiB"), expected)
    monkeypatch.setattr(StepAtOnce, "_all", lambda self, most=None: [self._of_parts([0, 2, 3], True)])
    assert_alike(stepped("1GiB"), expected)


def test_second_derivatives_are_those_of_one_call_or_refused() -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 2, 3)).double(), structured((1, 3, 48, 40))
    x.requires_grad_()

    def second(call: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(lambda x: pc.tile(net, x, budget="1GiB")), second(net))
    with pytest.raises(pc.NotServed, match="second derivatives"):
        second(lambda x: pc.tile(net, x, budget="512KiB"))


AROUND: dict[str, Callable[..., Tensor]] = {
    "pc.checkpoint": pc.checkpoint,
    "torch's": lambda call, x: checkpoint(call, x, use_reentrant=False),
    "torch's, reentrant": lambda call, x: checkpoint(call, x, use_reentrant=True),
}


@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("budget", ["1GiB", "3MiB"])
def test_a_checkpoint_around(how: str, budget: str) -> None:
    """What planning saves of values without data is not the checkpoint's."""
    torch.manual_seed(0)
    net, x = NETS["in training"]().double(), structured((2, 3, 64, 48)).requires_grad_()
    stock, tiled = copy.deepcopy(net), pc.tile_modules(net, "", budget)
    assert pc.tile_plan(net, x, budget=budget).at_once == (budget == "1GiB")
    expected = graded(stock, [x], stock)
    assert_alike(graded(tiled, [x], lambda x: AROUND[how](tiled, x)), expected)


@pytest.mark.parametrize("budget", ["1GiB", "3MiB"])
def test_hooks_see_what_is_saved_and_nothing_of_planning(budget: str) -> None:
    net, x = NETS["in training"]().double(), structured((2, 3, 64, 48))
    seen: list[Any] = []

    def pack(saved: Tensor) -> Tensor:
        seen.append(type(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        pc.tile(net, x, budget=budget).sum().backward()
    assert seen and set(seen) <= {Tensor, nn.Parameter}


@pytest.mark.parametrize("budget", ["1GiB", "3MiB"])
def test_where_such_hooks_are_disabled_nothing_is_a_checkpoint(budget: str) -> None:
    net, x = NETS["in training"]().double(), structured((2, 3, 64, 48)).requires_grad_()
    stock = copy.deepcopy(net)
    expected = graded(stock, [x], stock)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        plan = pc.tile_plan(net, x, budget=budget)
        assert len(plan.parts) == (budget == "1GiB")
        assert_alike(graded(net, [x], lambda x: pc.tile(net, x, budget=budget)), expected)


def test_a_step_without_data_takes_what_it_takes() -> None:
    net, x = NETS["in training"](), structured((2, 3, 96, 80)).float()
    tiled = pc.tile_modules(net, "", "1GiB")
    real, fake = (pc.memory.trace(tiled, x, fake=fake).peak for fake in (False, True))
    assert abs(real - fake) <= 0.02 * real


def test_a_plan_says_what_checkpoints_compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = structured((2, 8, 48, 40)).float().requires_grad_()
    for begins, again in (
        ([0], 0.0),
        ([0, 4], 0.5),
        ([0, 2, 4, 6], 0.75),
    ):  # all of equal convolutions but the last part
        monkeypatch.setattr(StepAtOnce, "_all", lambda self, most=None, begins=begins: [self._of_parts(begins, True)])
        net = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)))
        plan = pc.tile_plan(net, x, budget="1GiB")
        assert plan.at_once and plan.backward == pytest.approx(2 + again)
        assert f"and {2 + again:.2f} in the backward pass" in str(plan)
