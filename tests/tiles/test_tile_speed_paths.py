"""What makes `tile` fast: strips in channels_last, rows written behind others, small steps that wait."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from test_tile_folded import _small_strips, close, graph_of, in_layout, norm  # noqa: F401
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles import choices, fold, graded, kept, strip_sizes, ways


def as_planned(net: Callable[..., Any], x: Tensor, budget: str | None) -> Tensor:
    """The result, which takes no more than the plan predicts."""
    found: list[Tensor] = []
    peak = allocated_peak(lambda: found.append(pc.tile(net, x, budget=budget)))
    assert peak - found[0].nbytes <= pc.tile_plan(net, x, budget=budget).needs
    return found[0]


# ----------------------------------------------------------------------------------------------------------------------
# Strips in channels_last


class Small(nn.Module):
    """A skip, a pool, an upsampling, an output between."""

    def __init__(self, images: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(images, 8, 3, padding=1), norm(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8), nn.SiLU())
        self.last = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        y = torch.cat([a, F.interpolate(b, size=a.shape[2:], mode="bilinear")], 1)
        return F.leaky_relu(self.last(y), 0.1), b, a


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_results_keep_stocks_strides(batch: int, last: bool) -> None:
    torch.manual_seed(0)
    net, x = Small().eval(), in_layout(structured((batch, 3, 45, 30)).float(), last)
    graph = pc.tile_plan(net, x, tile=45).graph
    assert bool(graph.strides) == (not last)
    assert all(fake.is_contiguous(memory_format=torch.channels_last) for fake in graph.fakes)
    close(pc.tile(net, x, tile=45), net(x), 1e-5)


class Residual(nn.Module):
    """A convolution that adds many products for each element, and a skip of few."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 72, 3, 2, 1), norm(72), nn.ReLU(), nn.MaxPool2d(2))
        self.main = nn.Sequential(nn.Conv2d(72, 80, 3, 2, 1, bias=False), norm(80), nn.ReLU())
        self.skip, self.last = nn.Conv2d(72, 80, 1, 2), nn.ConvTranspose2d(80, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = F.relu(self.main(y) + self.skip(y))
        return self.last(y)


@torch.no_grad()
def test_what_adds_many_products_stays_in_nchw() -> None:
    """In channels_last its error would be 2 to 4 times stock's. What is added to it is in NCHW too."""
    torch.manual_seed(0)
    net, x = Residual().eval(), structured((1, 3, 200, 144)).float()
    graph = graph_of(net, x)
    convs = [call for call in graph.calls if call.function is fold.conv_of_strips]
    formats = [call.kwargs["format"] for call in convs]
    assert formats == [torch.channels_last, *[torch.contiguous_format] * 3]
    for call, format in zip(convs, formats, strict=True):
        assert graph.fakes[call.outputs[0]].is_contiguous(memory_format=format)
    exact, stock = copy.deepcopy(net).double()(x.double()), net(x)
    for budget in (None, "400KiB"):
        found = as_planned(net, x, budget)
        assert found.stride() == stock.stride()
        assert (found - exact).square().mean() <= 1.3**2 * (stock - exact).square().mean()


class Attending(nn.Module):
    """As decoders have it: group norms, a gate, attention over the image between convolutions, an upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.qkv, self.gate = nn.Linear(16, 48), nn.Conv2d(16, 16, 1)
        self.second = nn.Sequential(nn.Conv2d(16, 80, 3, padding=1), nn.GroupNorm(4, 80), nn.SiLU())
        self.last = nn.Conv2d(80, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z)
        n, c, h, w = x.shape
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, c, h, w)
        x = x * torch.sigmoid(self.gate(x))
        return self.last(self.second(F.interpolate(x, scale_factor=2.0, mode="nearest")))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_strips_as_on_a_gpu(batch: int, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else a network has, its convolutions are in channels_last; what other calls make stays as it is."""
    monkeypatch.setattr(fold, "_on_cpu", lambda graph: False)
    monkeypatch.setattr(fold, "_of_tensor_cores", lambda: {torch.float32})
    torch.manual_seed(0)
    net, x = Attending().eval(), in_layout(structured((batch, 4, 22, 15)).float(), last)
    exact = copy.deepcopy(net).double()(x.double())
    with torch.no_grad():
        stock, graph = net(x), graph_of(net, x)
        if not last:
            convs = [call.kwargs["format"] for call in graph.calls if call.function is fold.conv_of_strips]
            assert convs == [torch.contiguous_format, torch.contiguous_format, torch.channels_last, torch.channels_last]
        for budget in (None, "600KiB"):
            found = as_planned(net, x, budget)
            assert found.stride() == stock.stride()
            assert (found - exact).square().mean() <= 1.5**2 * (stock - exact).square().mean()
    parameters = [*net.parameters()]
    want = torch.autograd.grad(net(x).square().mean(), parameters)
    for got, one in zip(torch.autograd.grad(pc.tile(net, x).square().mean(), parameters), want, strict=True):
        assert last or got.stride() == one.stride()
        assert (got - one).abs().max() <= 1e-4 * one.abs().max()


@torch.no_grad()
def test_where_strips_cost_time_fewer_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the plans that keep a budget that with less to launch, though it computes more."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(4))
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks), structured((1, 3, 256, 32)).float()

    def strips(plan: Any) -> int:
        return sum(len(sweep.steps) * sweep.strips for sweep in plan.sweeps)

    few = pc.tile_plan(net, x, budget="380KiB")
    for module in (choices, ways):
        monkeypatch.setattr(module, "step_work", lambda graph: 1e9)
    kept._forms.clear()
    fewer = pc.tile_plan(net, x, budget="380KiB")
    assert strips(fewer) < strips(few) and fewer.arithmetic >= few.arithmetic
    assert fewer.needs <= 380 * 1024
    close(pc.tile(net, x, budget="380KiB"), net(x), 1e-4)


@torch.no_grad()
def test_results_that_are_computed_whole_keep_stocks_strides() -> None:
    conv, x = nn.Conv2d(3, 8, 3), structured((1, 3, 42, 42)).float()
    for net in (
        lambda x: F.interpolate(conv(x), scale_factor=0.5, mode="bilinear", antialias=True),
        lambda x: F.interpolate(conv(x), size=(1, 5), mode="area"),
        lambda x: torch.cat([conv(x), conv(x)], 2),
    ):
        close(pc.tile(net, x), net(x), 1e-5)


@pytest.mark.parametrize(("batch", "images"), [(1, 1), (1, 3), (3, 3)])
@torch.no_grad()
def test_strips_in_either_layout_keep_the_predicted_peak(
    batch: int, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the strip at the border, which gets its padding, has fewer rows than others."""
    monkeypatch.setattr(strip_sizes, "STRIP", 2**17)
    torch.manual_seed(0)
    net, x = nn.Sequential(Small(images).first, nn.Conv2d(8, 2, 3, padding=1)), structured((batch, images, 90, 64))
    x = x.float()
    for budget in (None, "300KiB"):
        as_planned(net, x, budget)


@torch.no_grad()
def test_the_copy_behind_padding_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strip_sizes, "STRIP", 2**17)
    conv, x = nn.Conv2d(64, 4, 3, padding=1), structured((3, 64, 40, 16)).float()
    for budget in (None, "300KiB"):
        as_planned(conv, x, budget)


@pytest.mark.parametrize("kernel", [1, 3])
@torch.no_grad()
def test_the_copy_of_an_images_rows_counts(kernel: int) -> None:
    """A convolution without padding reads a view, which it copies."""
    net, x = nn.Sequential(nn.Conv2d(32, 4, kernel), nn.GroupNorm(1, 4)), structured((1, 32, 60, 64)).float()
    for budget in (None, "300KiB"):
        as_planned(net, x, budget)


# ----------------------------------------------------------------------------------------------------------------------
# Rows behind those that are still read

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "relu": (F.relu, 1),
    "relu6": (lambda x: F.relu6(x, inplace=True), 1),
    "hardtanh": (lambda x: F.hardtanh(x, -0.3, 0.4, True), 1),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.3, True), 1),
    "elu": (lambda x: F.elu(x, 0.5), 1),
    "silu": (lambda x: F.silu(x, inplace=True), 1),
    "hardswish": (F.hardswish, 1),
    "gelu": (F.gelu, 0),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), 0),
    "mish": (F.mish, 0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_activations_write_behind_rows(name: str, dtype: torch.dtype) -> None:
    activation, rooms = ACTIVATIONS[name]
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 6, 3).to(dtype), nn.Conv2d(6, 4, 3).to(dtype)

    def net(x: Tensor) -> Tensor:
        return second(activation(first(x)))

    for last in (False, True):
        x = in_layout(structured((2, 3, 35, 20)).to(dtype), last)
        assert len(pc.tile_plan(net, x, tile=8).sweeps[0].rooms) == rooms
        close(pc.tile(net, x, tile=8), net(x), 1e-5 if dtype == torch.float32 else 2e-2)


@torch.no_grad()
def test_results_do_not_share_the_memory_that_rows_are_in() -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 6, 3).double(), nn.Conv2d(6, 4, 3).double()

    def net(x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(first(x))
        z = y[:, :5]
        return y, z, second(y).add_(1), z.clone().neg_(), y.detach()

    x = structured((1, 3, 61, 43))
    for got, want in zip(pc.tile(net, x, tile=5), net(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# Small steps that wait


class Deep(nn.Module):
    """Levels of a sixteenth of the bytes, up again, and a norm of the whole image between."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 4, 4)
        self.c, self.d = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm = nn.GroupNorm(1, 4) if whole else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(self.a(x))
        z = self.norm(F.relu(self.c(F.relu(self.b(y)))))
        z = F.max_pool2d(self.c(z), 2)
        up = F.interpolate(z, size=y.shape[2:], mode="nearest")
        return self.d(torch.cat([y[:, :4], up], 1)), self.c(z)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dim", [2, 3])
@torch.no_grad()
def test_waiting_steps_give_the_same_numbers(dim: int, whole: bool) -> None:
    torch.manual_seed(0)
    net, x = Deep(whole).double(), structured((1, 3, 85, 61))
    sweeps = pc.tile_plan(net, x, dim=dim).sweeps
    idle = [sum(low == high for low, high in step.rows) for sweep in sweeps for step in sweep.steps]
    assert max(idle) > max(sweep.strips for sweep in sweeps) // 3
    close(pc.tile(net, x, dim=dim), net(x))


# ----------------------------------------------------------------------------------------------------------------------
# What a backward pass computes again, and its tiles


def trained() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for c in (3, *[8] * 5)]
    net = nn.Sequential(*made)
    return lambda x: net(x).square().mean(), structured((1, 3, 96, 64)).float()


def test_what_is_computed_again_has_room_for_what_it_makes() -> None:
    """Room for three quarters of the value that is made: strips of some rows keep it, above that value."""
    plan = pc.tile_plan(*trained(), tile=96)
    planner = choices.Planner(plan.graph, plan.kinds, plan.outside, [], choices.Learned(), kept=set())
    stored = planner.everything_stored()
    v = next(v for v in sorted(stored) if plan.kinds.level[v] == 2)
    room = 3 * planner.kept_bytes(v) // 4
    sweep, taken = planner.again(stored, 2, {v}, room)
    assert taken <= room and 1 < sweep.strips <= 24


def test_tiles_that_cost_time_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = trained()
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1)
    counts = []
    for work in (0.0, 1e9):
        monkeypatch.setattr(graded, "tile_step_work", lambda graph, work=work: work)
        kept._forms.clear()
        plans = [pc.tile_plan(net, x, budget=int(share * refused.value.least)) for share in (1.6, 1.8)]
        assert all(plan.budget is not None and plan.needs <= plan.budget for plan in plans)
        shares = [one for plan in plans for one in plan.tiles.values()]
        counts.append(sum(math.prod(math.ceil(1 / share) for share in one) for one in shares))
    assert counts[1] < counts[0]
