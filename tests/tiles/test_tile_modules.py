"""`tile_modules`: put on and off, plans kept and made again."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import patchconv_native as pc
from patchconv_native.tiles import modules as tiled

np = pytest.importorskip("numpy")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
        self.head = nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(1, 3, 300, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("convert", ["no", "before", "after"])
@torch.no_grad()
def test_in_place_and_undone(net: Net, convert: str) -> None:
    want, classes = net(X), [type(m) for m in net.modules()]
    if convert == "before":
        pc.convert(net)
    assert pc.tile_modules(net, {"body": "600KiB", "head": "600KiB"}) is net
    if convert == "after":
        pc.convert(net)
    assert isinstance(net.body, nn.Sequential) and list(net.state_dict()) == list(Net().state_dict())
    torch.testing.assert_close(net(X), want)
    assert len(tiled._plans[net.body]) == 1 and tiled._plans[net.body].popitem()[1][0].sweeps[0].strips > 4
    copied = copy.deepcopy(net)
    torch.testing.assert_close(copied(X), want)
    pc.tile_modules(net, ())
    pc.revert(net)
    assert [type(m) for m in net.modules()] == classes


@torch.no_grad()
def test_a_budget_that_cannot_be_kept_is_refused_at_the_call(net: Net) -> None:
    pc.tile_modules(net, "", budget="10KiB")
    with pytest.raises(pc.BudgetError, match="the least that was found"):
        net(X)


@torch.no_grad()
def test_plans_are_made_again_when_what_they_depend_on_changes(net: Net) -> None:
    torch.nn.utils.parametrizations.weight_norm(net.body[0])  # a weight that is computed from parameters
    stock = copy.deepcopy(net)
    pc.tile_modules(net, "body", budget="600KiB")
    plans = lambda: len(tiled._plans[net.body])  # noqa: E731
    torch.testing.assert_close(net(X), stock(X))
    torch.testing.assert_close(net(X), stock(X))
    assert plans() == 1
    for model in (net, stock):
        for parameter in model.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(net(X), stock(X))
    torch.testing.assert_close(net(X[:, :, :200]), stock(X[:, :, :200]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(X).dtype == stock(X).dtype
    assert plans() == 4


class Settings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.factors, self.shift = nn.Conv2d(3, 3, 3, padding=1), {"of": [1.0]}, torch.zeros(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.factors["of"][0] + self.shift


@torch.no_grad()
def test_attributes_that_a_forward_reads_may_change() -> None:
    net = Settings().eval()
    stock = copy.deepcopy(net)
    pc.tile_modules(net, "", budget="600KiB")
    for change in (lambda m: None, lambda m: m.factors["of"].__setitem__(0, 2.0), lambda m: m.shift.add_(1),
                   lambda m: setattr(m.conv, "dilation", (2, 2))):  # fmt: skip
        change(net), change(stock)
        torch.testing.assert_close(net(X), stock(X))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each recording."""
    found: list[int] = []
    record = tiled.record_call

    def counted(*given: Any, **more: Any) -> Any:
        found.append(1)
        return record(*given, **more)

    monkeypatch.setattr(tiled, "record_call", counted)
    return found


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight / (weight.flatten(1).std(1) + 1e-5).view(-1, 1, 1, 1), self.bias)


class Filled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = torch.zeros_like(self.weight)
        weight[1:] = self.weight.view(3, 3, 3, 3)[1:]
        return self._conv_forward(x, weight, self.bias)


class Asked(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.weight.data[0].sum())


def weight_normed(*sizes: Any, **more: Any) -> Any:
    return torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(*sizes, **more))


WRITES = {
    "data": lambda t: t.data.mul_(3.0).add_(0.1),
    "copy": lambda t: t.data.copy_(torch.linspace(-1, 2, t.numel()).view_as(t)),
    "numpy": lambda t: t.detach().numpy().__imul__(-0.7),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("kind", [Standardised, Filled, Asked, weight_normed, nn.Conv2d])
@torch.no_grad()
def test_writes_that_no_version_counts(kind: Any, how: str, recorded: list[int]) -> None:
    """Of weights that a forward computes others of: the plan is made again. Of others it stays."""
    torch.manual_seed(0)
    net = nn.Sequential(kind(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3)).eval()
    stock = copy.deepcopy(net)
    pc.tile_modules(net, "", budget="600KiB")
    for _ in range(3):
        torch.testing.assert_close(net(X), stock(X))
    assert len(recorded) == 1
    for model in (net, stock):
        for parameter in model[0].parameters():
            WRITES[how](parameter)
    for _ in range(2):
        torch.testing.assert_close(net(X), stock(X), rtol=1e-4, atol=1e-4)
    assert len(recorded) == (1 if kind is nn.Conv2d else 2)


class Given(nn.Module):
    """Calls what is in its attribute."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.conv, self.value = nn.Conv2d(3, 3, 3, padding=1), value

    def forward(self, x: Tensor) -> Tensor:
        value = self.value[0] if isinstance(self.value, list) else self.value
        x = self.conv(x)
        if isinstance(value, SimpleNamespace):
            return x * value.of[0].scale
        if isinstance(value, (set, np.ndarray)):
            return x * sum(map(float, value))
        return value(x) if callable(value) else x.double() * value if isinstance(value, float) else x * value


@pytest.mark.parametrize("listed", [False, True])
@torch.no_grad()
def test_another_function_in_the_place_of_one_that_is_gone(listed: bool) -> None:
    """It may get the id of the old one."""
    net = pc.tile_modules(Given(None), "", budget="600KiB").eval()
    for factor in range(10):
        net.value = None
        function = eval(f"lambda v: v * {factor}.0")
        net.value = [function] if listed else function
        del function
        torch.testing.assert_close(net(X), net.conv(X) * factor)


@dataclasses.dataclass(slots=True)
class Scale:
    scale: float


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (SimpleNamespace(of=[SimpleNamespace(scale=1.0)]), lambda m: setattr(m.value.of[0], "scale", 3.0)),
        (SimpleNamespace(of=[Scale(1.0)]), lambda m: setattr(m.value.of[0], "scale", 3.0)),
        ({1.0, 2.0}, lambda m: m.value.add(4.0)),
        (2, lambda m: setattr(m, "value", 2.0)),
        (0.0, lambda m: setattr(m, "value", -0.0)),
        (functools.partial(torch.add, other=1.0), lambda m: m.value.keywords.update(other=5.0)),
        (np.ones(2), lambda m: m.value.__setitem__(0, 5.0)),
        (np.float32(2), lambda m: setattr(m, "value", np.float32(3))),
    ],
    ids=["object", "slots", "set", "type", "sign", "partial", "array", "scalar"],
)
@torch.no_grad()
def test_attributes_that_change_in_place(value: Any, change: Any, recorded: list[int]) -> None:
    net: Any = Given(value).eval()
    net.cycle = SimpleNamespace(module=net)
    net.cycle.more = [net.cycle]
    stock = copy.deepcopy(net)
    pc.tile_modules(net, "", budget="600KiB")
    for _ in range(3):
        torch.testing.assert_close(net(X), stock(X))
    assert len(recorded) == (3 if isinstance(value, np.ndarray) else 1)  # arrays may change without a trace
    change(net), change(stock)
    for _ in range(2):
        got, want = net(X), stock(X)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert torch.equal(got.signbit(), want.signbit()) or value != 0.0
    assert len(recorded) == (5 if isinstance(value, np.ndarray) else 2)


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.last = nn.Conv2d(3, 3, 3), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        return self.conv(x) if self.last is None else self.last(self.conv(x))


@torch.no_grad()
def test_which_of_two_equal_parts_is_there() -> None:
    net: Any = Skips().eval()
    stock = copy.deepcopy(net)
    pc.tile_modules(net, "", budget="600KiB")
    for first, last in ((None, nn.ReLU()), (nn.ReLU(), None)):
        for model in (net, stock):
            model.first, model.last = first, last
        torch.testing.assert_close(net(X), stock(X))


class Masked(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(3, 1, 1)
        mask[1] = 1.0
        mask[2].add_(2.0)
        return super().forward(x) * mask


@torch.no_grad()
def test_a_tensor_that_the_module_makes_and_writes_into_is_no_change(recorded: list[int]) -> None:
    net = pc.tile_modules(Masked(3, 3, 3), "", budget="600KiB").eval()
    want = nn.Conv2d.forward(net, X) * torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1)
    for _ in range(3):
        torch.testing.assert_close(net(X), want)
    assert len(recorded) == 1


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.count = nn.Conv2d(3, 3, 3), nn.Buffer(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count[0] += 1
        self.count[1] = 5
        return self.conv(x) * self.count[0]


@torch.no_grad()
def test_a_part_of_a_buffer_that_is_written_to() -> None:
    net = Counts().eval()
    stock = copy.deepcopy(net)
    pc.tile_plan(net, X)
    assert net.count.tolist() == [1, 1]
    pc.tile_modules(net, "", budget="600KiB")
    for _ in range(2):
        torch.testing.assert_close(net(X), stock(X))
        assert torch.equal(net.count, stock.count)


@torch.no_grad()
def test_no_plan_keeps_its_module() -> None:
    net: Any = pc.tile_modules(weight_normed(3, 3, 3, padding=1), "", budget="600KiB").eval()
    net.itself = [SimpleNamespace(of=net), net.forward]
    net(X)
    assert len(tiled._plans[net]) == 1
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None


@torch.no_grad()
def test_small_images_run_the_modules_own_forward(net: Net) -> None:
    ran: list[int] = []
    net.body.register_forward_hook(lambda *_: ran.append(1))
    net.body[1].register_forward_hook(lambda *_: ran.append(2))
    pc.tile_modules(net, "body")
    want = copy.deepcopy(pc.tile_modules(copy.deepcopy(net), ()))(X)
    ran.clear()
    small = X[:, :, :8, :8]
    net(small)
    ran.clear()
    assert torch.equal(net(small), pc.tile_modules(copy.deepcopy(net), ())(small))
    assert ran[:2] == [2, 1]  # the second call of this size records nothing
    torch.testing.assert_close(net(X), want)


@torch.no_grad()
def test_small_images_are_recorded_once(net: Net, recorded: list[int]) -> None:
    """And no smaller ones: planning takes longer than a call of a small image."""
    pc.tile_modules(net)
    for _ in range(3):
        net(X[:, :, :40])
    net(X[:, :, :40, :3])
    assert len(recorded) == 1 and not tiled._plans.get(net)
    net(X[:, :, :41])
    net(X[:, :, :41].repeat(2, 1, 1, 1))
    assert len(recorded) == 3
    net(X[:, :, :40].double().repeat(1, 1, 1, 1).float())
    assert len(recorded) == 3
    pc.tile_modules(net)
    net(X[:, :, :40])
    assert len(recorded) == 4
    with torch.enable_grad():  # where other sizes may be worth it
        net(X[:, :, :40])
        net(X[:, :, :40])
    assert len(recorded) == 5


@torch.no_grad()
def test_small_images_are_counted_once_by_batch_norm() -> None:
    net = pc.tile_modules(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    net(X[:, :, :12, :12])
    assert net[1].num_batches_tracked == 1


def test_bad_arguments_change_nothing(net: Net) -> None:
    classes = [type(m) for m in net.modules()]
    for which, budget, error, text in (
        ("tail", None, ValueError, "expected which to name modules of the model, got 'tail'"),
        ({"body": "lots"}, None, ValueError, "tile_modules: budget: expected a number of bytes"),
        ({"body": "1MiB"}, "1MiB", TypeError, "expected budget to be None where which says it"),
        (3, None, TypeError, "expected which to be names"),
    ):
        with pytest.raises(error, match=text):
            pc.tile_modules(net, which, budget)  # type: ignore[arg-type]
    assert [type(m) for m in net.modules()] == classes


@pytest.fixture
def compiled() -> Iterator[CompileCounter]:
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


@torch.no_grad()
def test_tiled_modules_are_not_compiled_and_what_is_around_them_is(net: Net, compiled: CompileCounter) -> None:
    want = net(X)
    pc.tile_modules(net, {"body": "600KiB"})
    around = torch.compile(net, backend=compiled)
    torch.testing.assert_close(around(X), want)
    assert compiled.frame_count == compiled.op_count == 1, "the group norm"


@pytest.mark.parametrize("how", ["function", "module"])
@torch.no_grad()
def test_tile_and_compiled_modules(net: Net, compiled: CompileCounter, how: str) -> None:
    want, budget = net(X), 900 * 2**10
    if how == "function":
        scaled = torch.compile(lambda x: pc.tile(net, x + 1.0, budget) * 2.0, backend=compiled)
        torch.testing.assert_close(scaled(X - 1.0), want * 2.0, rtol=1e-4, atol=1e-5)
        assert compiled.op_count == 2, "the sum and the product"
        return
    net.body = torch.compile(net.body, backend=compiled)
    torch.testing.assert_close(pc.tile(net, X, budget), want)
    assert compiled.frame_count == 0
    torch.testing.assert_close(net(X), want)
    assert compiled.frame_count == 1


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_training_steps_plan_once(mode: str, recorded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded again, since parameters and statistics have changed; another size is planned again."""
    plans: list[int] = []
    plan_graph = tiled.plan_graph
    monkeypatch.setattr(tiled, "plan_graph", lambda *given: plans.append(0) or plan_graph(*given))  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.0), nn.Conv2d(4, 2, 1))
    net.train(mode == "train")
    stock = copy.deepcopy(net)
    pc.tile_modules(net, "", "1MiB")
    for size in (40, 40, 40, 48):
        x = torch.randn(1, 3, size, 40)
        for model in (stock, net):
            model.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad  # type: ignore[operator]
        pairs = zip(stock.state_dict().values(), net.state_dict().values(), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)
    assert (len(recorded), len(plans)) == (4, 2)


def test_kept_plans_know_whether_gradients_are_asked_for() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1)).double()
    tiled, x = pc.tile_modules(copy.deepcopy(net)), torch.randn(1, 3, 1024, 1024).double()
    with torch.no_grad():
        tiled(x)
    y = tiled(x)
    assert type(y.grad_fn).__name__ == "_TiledBackward"
    y.mean().backward()
    net(x).mean().backward()
    for own, theirs in zip(tiled.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad)
    with torch.no_grad():
        assert tiled(x).grad_fn is None
