"""Volumes by strips: oneDNN computes strips of what it computes whole, for which torch takes another library."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import todays
from support.spatial_chains import structured
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.spatial.convs import conv3d_by_onednn
from patchconv_native.tiles import strip_sizes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def _small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strip_sizes, "STRIP", 2**16)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def net(norm: Callable[[int], nn.Module], convert: bool = False) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv3d(2, 12, 3, padding=1, bias=False), norm(12), nn.ReLU(inplace=True),
        nn.Conv3d(12, 8, (3, 1, 3), (2, 1, 1), "valid"), nn.SiLU(),
        nn.Conv3d(8, 8, (1, 3, 2), 1, (0, 2, 1), (1, 2, 1), groups=2), nn.Conv3d(8, 3, 3, padding="same"),
    )  # fmt: skip
    return pc.convert(made) if convert else made


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "folded": lambda channels: nn.BatchNorm3d(channels).eval(),
    "of groups": lambda channels: nn.GroupNorm(3, channels),
}


def is_by_onednn(call: Any) -> bool:
    return conv3d_by_onednn in (call.function, *call.args[3:4])


def by_onednn(plan: Any) -> int:
    return sum(map(is_by_onednn, plan.graph.calls))


def strips_by_onednn(plan: Any) -> int:
    """Those of convolutions, which may have no rows while the first ones of the image are read."""
    steps = [step for sweep in plan.sweeps for step in sweep.steps]
    convs = [step for step in steps for place in step.calls if is_by_onednn(plan.graph.calls[place])]
    return sum(begin < end for step in convs for begin, end in step.rows)


@pytest.mark.parametrize(("batch", "last"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize(("norm", "convert"), todays(itertools.product(NORMS, [False, True])))
@torch.no_grad()
def test_strips_of_volumes(batch: int, last: bool, norm: str, convert: bool) -> None:
    """torch takes another library for the first convolution of one volume, which has few channels."""
    model, x = net(NORMS[norm], convert), structured((batch, 2, 96, 60, 9)).float()
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    exact, stock = copy.deepcopy(model).double()(x.double()), model(x)
    for budget, tile in ((None, None), ("2MiB", None), (None, 3)):
        plan = pc.tile_plan(model, x, budget=budget, tile=tile)
        assert by_onednn(plan) == (4 if batch > 1 else 3)
        formats = [call.kwargs["format"] for call in plan.graph.calls if "format" in call.kwargs]
        already = last and convert  # torch makes NCHW of the first convolution's result
        assert (torch.channels_last_3d in formats) == (not already)
        found: list[Tensor] = []
        with Calls() as calls:
            peak = allocated_peak(lambda budget=budget, tile=tile, to=found: to.append(pc.tile(model, x, budget, tile)))
        assert calls.names.count("patchconv::_conv3d_onednn") == strips_by_onednn(plan)
        assert peak - found[0].nbytes <= plan.needs
        assert found[0].stride() == stock.stride()
        assert (found[0] - exact).square().mean() <= 1.2**2 * (stock - exact).square().mean()


@torch.no_grad()
def test_small_volumes_and_other_dtypes_are_left_to_torch() -> None:
    """torch has another library compute them whole, too. Of groups oneDNN computes all in float32."""
    model = net(NORMS["folded"])
    for volume, count in ((structured((1, 2, 8, 7, 9)).float(), 1), (structured((1, 2, 96, 60, 9)), 0)):
        model = model.to(volume.dtype)
        assert by_onednn(pc.tile_plan(model, volume, tile=3)) == count
        assert torch.allclose(pc.tile(model, volume, tile=3), model(volume), atol=1e-5)
    circular = nn.Conv3d(12, 8, 3, padding=1, padding_mode="circular")
    x = structured((1, 12, 96, 60, 9)).float()
    assert by_onednn(pc.tile_plan(pc.convert(circular), x, tile=3)) == 0
    thin, deep = nn.Conv3d(1, 4, 3, stride=2), structured((1, 1, 400, 60, 10)).float()
    assert by_onednn(pc.tile_plan(thin, deep, tile=3)) == 0
    assert torch.allclose(pc.tile(thin, deep, tile=3), thin(deep), atol=1e-5)


def test_gradients_of_volumes() -> None:
    model, x = net(NORMS["of groups"]), structured((1, 2, 96, 60, 9)).float().requires_grad_()
    wrt = [x, *model.parameters()]
    want = torch.autograd.grad(model(x).square().mean(), wrt)
    with Calls() as calls:
        y = pc.tile(model, x, tile=3)
    assert "patchconv::_conv3d_onednn" in calls.names
    for got, one in zip(torch.autograd.grad(y.square().mean(), wrt), want, strict=True):
        assert (got - one).abs().max() <= 1e-4 * one.abs().max()


def test_the_operator() -> None:
    torch.manual_seed(0)
    for last in (False, True):
        x, w, b = torch.randn(1, 4, 5, 6, 7), torch.randn(6, 2, 3, 2, 1), torch.randn(6)
        x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
        arguments = (x, w, b, [1, 2, 1], [1, 0, 2], [1, 1, 2], 2)
        torch.library.opcheck(torch.ops.patchconv._conv3d_onednn.default, arguments, test_utils="test_schema")
        torch.library.opcheck(torch.ops.patchconv._conv3d_onednn.default, arguments, test_utils="test_faketensor")
        found = torch.ops.patchconv._conv3d_onednn(*arguments)
        want = F.conv3d(x, w, b, (1, 2, 1), (1, 0, 2), (1, 1, 2), 2)
        assert found.is_contiguous(memory_format=[torch.contiguous_format, torch.channels_last_3d][last])
        assert torch.allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("last", [False, True])
def test_training_on_volumes_keeps_its_budget(last: bool) -> None:
    model, x = net(NORMS["of groups"]), structured((1, 2, 96, 60, 9)).float()
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    parameters = [*model.parameters()]
    want = torch.autograd.grad(model(x).square().mean(), parameters)

    def to_loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def step(budget: int) -> list[Tensor]:
        return [*torch.autograd.grad(pc.tile(to_loss, x, budget), parameters)]

    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(to_loss, x, budget=1)
    least = refused.value.least
    for budget in (least, 2 * least):
        found: list[list[Tensor]] = []
        peak = allocated_peak(lambda budget=budget, to=found: to.append(step(budget)))
        assert peak - sum(one.nbytes for one in found[0]) <= budget
        for got, one in zip(found[0], want, strict=True):
            assert (got - one).abs().max() <= 1e-4 * one.abs().max()


@pytest.mark.parametrize("dim", [2, 3, 4])
@torch.no_grad()
def test_volumes_thinner_than_the_kernel(dim: int) -> None:
    torch.manual_seed(0)
    for channels, sizes in ((2, (2, 8, 8)), (2, (8, 8, 1)), (2, (8, 2, 8)), (64, (2, 200, 6))):
        conv, x = nn.Conv3d(channels, channels, 3, padding=1), torch.randn(1, channels, *sizes)
        for net in (conv, lambda x, conv=conv: F.conv3d(x, conv.weight, padding="same")):
            assert by_onednn(pc.tile_plan(net, x, dim=dim)) == (channels == 64 and net is conv)
            assert torch.allclose(pc.tile(net, x, dim=dim), net(x), atol=1e-4)


@torch.no_grad()
def test_a_weight_that_is_the_image() -> None:
    torch.manual_seed(0)
    weight, volume = torch.randn(8, 8, 3, 3, 3), torch.ones(1, 8, 8, 8, 8)
    for stride in (1, 2):
        net = functools.partial(torch.conv3d, volume, stride=stride)
        assert torch.allclose(pc.tile(lambda z, net=net: net(z), weight), net(weight), atol=1e-4)


@torch.no_grad()
def test_without_onednn_when_it_runs() -> None:
    """A plan that was made before stays; torch's other library computes it then."""
    net, x = nn.Conv3d(12, 8, 3, padding=1), structured((1, 12, 96, 60, 9)).float()
    pc.tile_modules(net, "", "2MiB")
    want = net(x)
    with torch.backends.mkldnn.flags(enabled=False), profile() as profiled:
        got = net(x)
    names = [event.key for event in profiled.key_averages()]
    assert torch.allclose(got, want, atol=1e-4)
    assert "aten::slow_conv3d_forward" in names and "aten::mkldnn_convolution" not in names
