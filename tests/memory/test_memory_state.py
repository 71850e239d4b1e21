"""A trace or a plan leaves nothing behind: not in model, optimizer or the caller's tensors, and no fake tensor."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from support.modules import Made
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import patchconv_native as pc
from patchconv_native.memory import trace


class Caches(nn.Module):
    """Makes a table, a buffer and a layer when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.table: Tensor | None = None
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table, self.late = torch.arange(8.0), torch.ones(8)
            self.made = nn.Linear(8, 8, device=x.device)
        return self.made(self.line(x) * self.table + self.late)


@pytest.mark.parametrize("fake", [False, True])
def test_what_a_module_makes_for_itself_goes_again(fake: bool) -> None:
    model, x = Caches(), torch.randn(4, 8)
    names = set(vars(model))
    assert trace(model, x, fake=fake).finished
    assert model.table is None and model.late is None and set(vars(model)) == names
    assert [name for name, _ in model.named_modules()] == ["", "line"]
    assert not isinstance(model(x), FakeTensor)


def test_a_loss_with_parameters_of_its_own() -> None:
    model, criterion = nn.Linear(8, 8), nn.Linear(8, 1)
    report = trace(model, torch.randn(4, 8), loss=lambda y: criterion(y).sum(), fake=True)
    assert report.finished and criterion.weight.grad is None


@pytest.mark.parametrize("fake", [False, True])
def test_inputs_and_random_numbers(fake: bool) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    x, z = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
    before, numbers = x.clone(), random.getstate()

    def loss(y: Tensor) -> Tensor:
        random.random()
        return y.sum()

    trace(model, x, loss=loss, fake=fake)
    assert torch.equal(x, before)
    if not fake:
        assert random.getstate() == numbers
    trace(nn.Linear(8, 8), z, fake=fake)
    assert z.grad is None


def test_parameters_that_move_in_backward() -> None:
    """An optimizer that steps in hooks of the gradients."""
    model = nn.Linear(8, 8)
    optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    before = copy.deepcopy(model.state_dict())
    trace(model, torch.randn(2, 8))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_an_optimizer_is_the_same_object_as_before() -> None:
    model, other = nn.Linear(8, 8), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([*model.parameters(), other], lr=0.1)
    x = torch.randn(2, 8)
    (model(x).sum() + other.sum()).backward()
    optimizer.step()
    states = {id(p): id(s) for p, s in optimizer.state.items()}
    tensors = {id(p): s["exp_avg"].data_ptr() for p, s in optimizer.state.items()}
    want = copy.deepcopy(optimizer.state_dict())
    trace(model, x, optimizer=optimizer)
    assert {id(p): id(s) for p, s in optimizer.state.items()} == states
    assert {id(p): s["exp_avg"].data_ptr() for p, s in optimizer.state.items()} == tensors
    torch.testing.assert_close(optimizer.state_dict(), want, rtol=0, atol=0)
    text = "expected optimizer to be a function of the parameters with fake=True, got Adam"
    with pytest.raises(ValueError, match=text):
        trace(model, x, optimizer=optimizer, fake=True)


def test_models_under_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        assert trace(model, torch.randn(1, 3, 8, 8), train=False).finished


def test_lazy_models_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a model whose parameters are made"):
        trace(nn.Sequential(nn.LazyLinear(3)), torch.randn(2, 4))


def test_hooks_from_outside_go_on_working() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)), torch.randn(4, 8)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> tuple[int]:
        packed.append(tensor)
        return (len(packed) - 1,)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: packed[place[0]]):
        report = trace(model, x)
    assert report.finished and packed and report.saved == 0, "what others keep is not ours"


def test_errors_of_in_place_changes_stay() -> None:
    def forward(module: Made, x: Tensor) -> Tensor:
        y = torch.sigmoid(module.line(x))
        z = y * 2
        y.add_(1)
        return z

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trace(Made(forward, line=nn.Linear(8, 8)), torch.randn(4, 8))


def test_autocast_from_outside() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(1, 3, 16, 16)
    half = trace(model, x, amp=torch.bfloat16).saved
    with torch.autocast("cpu", torch.bfloat16):
        assert trace(model, x).saved == half
    assert trace(model, x).saved != half


def test_outputs_of_many_kinds() -> None:
    @dataclass(slots=True)
    class Output:
        first: Tensor
        rest: list[Tensor]

    model = Made(lambda m, x: Output(y := m.line(x), [y * 2, x]), line=nn.Linear(8, 8))
    assert trace(model, torch.randn(4, 8)).trace.after["gradients"] > 0


def test_a_module_in_two_places() -> None:
    """What it saves is of the one that called it."""
    inner = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())
    parts = [Made(lambda m, x: torch.sigmoid(m.inner(x)), inner=inner) for _ in range(2)]
    report = trace(nn.Sequential(*parts), torch.randn(16, 64, requires_grad=True))
    assert report.module("0").saved == report.module("1").saved + 16 * 64 * 4, "and the first one the input"


def test_cumulative_batch_norms_can_be_predicted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
    assert trace(model, torch.randn(2, 3, 8, 8), fake=True).finished
    assert model[1].momentum is None and int(model[1].num_batches_tracked) == 0


def test_what_cannot_be_predicted_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"fake=True does not serve .*rnn"):
        trace(nn.LSTM(8, 8), torch.randn(3, 2, 8), loss=lambda y: y[0].sum(), fake=True)
    with pytest.raises(NotImplementedError, match="recurrent layers"):
        pc.plan(nn.LSTM(8, 8), torch.randn(3, 2, 8), budget="1GiB", loss=lambda y: y[0].sum())


def stack() -> nn.Sequential:
    """Of many saved tensors: loops of tanh."""

    def forward(module: Made, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(module.line(x))
        return x

    return nn.Sequential(*(nn.Sequential(Made(forward, line=nn.Linear(64, 64)), nn.Identity()) for _ in range(3)))


def test_checkpoints_from_before_stay() -> None:
    model, x = pc.checkpoint_modules(stack(), ["0", "1"]), torch.randn(512, 64)
    before = trace(model, x).peak
    frontier = pc.plan(model, x, frontier=True, tiles=False)
    assert all(one.peak <= 1.01 * before for one in frontier.tried)
    plan = pc.plan(model, x, budget=frontier.plans[-1].needs, tiles=False)
    plan.apply(model)
    assert trace(model, x).peak <= plan.needs
    plan.undo(model)
    assert trace(model, x).peak == pytest.approx(before, rel=1e-3)


def pairs() -> nn.Sequential:
    """Blocks that hand on two tensors."""

    def forward(module: Made, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return F.gelu(module.norm(module.conv(pair[0]))), pair[1] + pair[0]

    blocks = [Made(forward, conv=nn.Conv2d(8, 8, 3, padding=1), norm=nn.BatchNorm2d(8)) for _ in range(4)]
    ends = Made(lambda m, x: (x, x)), Made(lambda m, pair: pair[0] * pair[1])
    return nn.Sequential(ends[0], nn.Sequential(*blocks), ends[1])


@pytest.mark.parametrize("make", [pairs, stack])
def test_the_frontiers_plans_are_found_by_their_budgets(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(2, 8, 64, 64) if make is pairs else torch.randn(512, 64)
    model = make()
    plans = pc.plan(model, x, frontier=True, tiles=False).plans
    for one in (plans[0], plans[-1]):
        assert pc.plan(model, x, budget=one.needs, tiles=False).peak <= one.peak


def test_plans_do_not_keep_models_alive() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    plan = pc.plan(model, torch.randn(1, 3, 16, 16), budget="1GiB")
    plan.apply(model)
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match="the last one applied"):
        plan.undo(other)
    pickle.loads(pickle.dumps(model))
    alive = weakref.ref(model.get_parameter("0.weight"))
    del model
    gc.collect()
    assert alive() is None


def test_undo_does_not_guess() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(1, 3, 64, 64)
    plan = pc.Plan(**{**vars(pc.plan(model, x, budget="1GiB")), "strategy": pc.planner.Strategy(convert=True)})
    plan.apply(model)
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match=r"plan\.undo: expected module '0' to be what the plan made of it"):
        plan.undo(model)
    assert model(x).shape == (1, 8, 62, 62)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")


def test_batches_that_cannot_be_one() -> None:
    """Batch norm of single values wants two; a pool of a fixed size a large image."""
    pooled = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8))
    assert pc.max_batch(pooled, torch.randn(4, 3, 16, 16), budget="1MiB") > 4
    assert 2 <= pc.max_batch(pooled, torch.randn(64, 3, 16, 16), budget="256KiB") < 64
    fixed = nn.Sequential(*(nn.Conv2d(3 if i == 0 else 8, 8, 3, 2, 1) for i in range(3)), nn.AvgPool2d(7))
    assert min(pc.max_size(fixed, torch.randn(1, 3, 224, 224), budget="10MiB")) > 224
