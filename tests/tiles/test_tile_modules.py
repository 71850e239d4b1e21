"""`tile_modules`: put on and off, plans kept and made again."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import patchconv_native as pc
from patchconv_native.tiles import modules as tiled


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
        pc.convert(net, functional=True)
    assert pc.tile_modules(net, {"body": "600KiB", "head": "600KiB"}) is net
    if convert == "after":
        pc.convert(net, functional=True)
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
def test_small_images_are_recorded_once(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no smaller ones: planning takes longer than a call of a small image."""
    recorded = []
    record = tiled.record_call
    monkeypatch.setattr(tiled, "record_call", lambda *given, **more: recorded.append(1) or record(*given, **more))
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


@torch.no_grad()
def test_small_images_are_counted_once_by_batch_norm() -> None:
    net = pc.tile_modules(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    net(X[:, :, :12, :12])
    assert net[1].num_batches_tracked == 1


def test_with_gradients_it_is_refused(net: Net) -> None:
    pc.tile_modules(net, "body")
    with pytest.raises(pc.NotServed, match="tile_modules: gradients are not served"):
        net(X)


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
