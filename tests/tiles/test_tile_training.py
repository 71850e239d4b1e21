"""Training steps by `tile` in a budget: the same gradients, and no more memory."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL
from support.spatial_chains import structured
from test_tile_gradients import SMALL, Function, assert_alike, conv, graded, images
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles import heap, strip_sizes


def block(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(conv(a, b), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class Net(nn.Module):
    """A U-Net of one level, with an upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up, self.out = block(3, 8), block(8, 16), block(24, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        up = F.interpolate(self.down(F.max_pool2d(first, 2)), scale_factor=2.0, mode="bilinear")
        return self.out(self.up(torch.cat([first, up], 1)))


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x), (x[:, 0] > 0).long())


NETS: dict[str, Callable[[], nn.Module]] = {
    "in training": Net,
    "converted": lambda: pc.convert(Net()),
    "in eval": lambda: Net().eval(),
    "folded norms": lambda: nn.Sequential(block(3, 8), *[block(8, 8) for _ in range(4)]).eval(),
    "group norms": lambda: nn.Sequential(conv(3, 8), nn.GroupNorm(2, 8), nn.SiLU(), conv(8, 8, stride=2), conv(8, 3)),
    "to its loss": lambda: Function(loss, Net()),
    "a head": lambda: nn.Sequential(block(3, 8), block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
}


def stepped(net: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> tuple[int, Tensor]:
    """The peak above the result and the gradients, and the result."""
    for leaf in (x, *net.parameters()):
        leaf.grad = None
    with torch.no_grad():
        grad = torch.ones_like(copy.deepcopy(net)(x))
    found: list[Tensor] = []

    def step() -> None:
        found.append(call(x))
        found[0].backward(grad)

    peak = allocated_peak(step)
    gradients = sum(leaf.grad.nbytes for leaf in (x, *net.parameters()) if leaf.grad is not None)
    return peak - gradients - found[0].nbytes, found[0]


@pytest.mark.parametrize(
    ("name", "asked"),
    [(name, asked) for place, name in enumerate(NETS) for asked in (False, True) if FULL or asked == place % 2],
)
def test_a_training_step_keeps_its_budget(name: str, asked: bool) -> None:
    torch.manual_seed(0)
    net, x = NETS[name](), structured((2, 3, 96, 80)).float().requires_grad_(asked)
    stock = copy.deepcopy(net)
    theirs, want = stepped(stock, x, stock)
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1)
    least = refused.value.least
    assert least < theirs / 2
    for budget in (least, (least + theirs) // 2)[: 2 if FULL or name == "in training" else 1]:
        model = copy.deepcopy(net)
        peak, got = stepped(model, x, lambda x, model=model, budget=budget: pc.tile(model, x, budget=budget))
        assert peak <= budget
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert_alike(*([p.grad for p in one.parameters()] for one in (model, stock)), within=1e-3)
        for a, b in zip(model.buffers(), stock.buffers(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frozen_convolutions_keep_a_budget(dtype: torch.dtype) -> None:
    """Their inputs are not kept: the way back to them is a convolution of its own."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(c, 24, 1), nn.BatchNorm2d(24), nn.ReLU()) for c in (3, 24)]
    net = nn.Sequential(*layers, conv(24, 6)).to(dtype)
    for one in net.modules():
        if isinstance(one, nn.Conv2d):
            one.weight.requires_grad_(False)
    x = structured((2, 3, 90, 70)).to(dtype)
    theirs, _ = stepped(copy.deepcopy(net), x, copy.deepcopy(net))
    for part in (4, 6):
        model = copy.deepcopy(net)
        peak, _ = stepped(model, x, lambda x, model=model, part=part: pc.tile(model, x, budget=theirs // part))
        assert peak <= theirs // part


class Tokens(nn.Module):
    """Blocks of attention between all places, which get their values whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, 3, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        tokens = y.flatten(2).transpose(1, 2)
        for block in self.blocks:
            q, k, v = block(tokens).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            tokens = tokens + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).tanh()
        return self.last(tokens.transpose(1, 2).reshape(y.shape))


class Along(nn.Module):
    """Along one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        t = self.first(x).mT
        return self.last(F.scaled_dot_product_attention(t, t, t).mT.flip(2))


class Folded(nn.Module):
    """The batch in the channels, as where each sample has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x.flatten(0, 1)[None], self.weight.repeat(len(x), 1, 1, 1), padding=1, groups=len(x))
        return y.view(len(x), 8, *x.shape[2:])


@pytest.mark.parametrize(("made", "shape"), [(Tokens, (2, 3, 96, 80)), (Along, (1, 3, 400)), (Folded, (2, 3, 64, 48))])
def test_calls_on_whole_values_keep_a_budget(made: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net, x = made().double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    stock = copy.deepcopy(net)
    theirs, want = stepped(stock, x, stock)
    gradient = x.grad
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1)
    least = refused.value.least
    assert least < 2 * theirs
    peak, got = stepped(net, x, lambda x: pc.tile(net, x, budget=least))
    assert peak <= least
    assert_alike(
        [got, x.grad, *(p.grad for p in net.parameters())], [want, gradient, *(p.grad for p in stock.parameters())]
    )


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    reason="oneDNN's workspace in bfloat16 is known for vectors, not for AMX's tiles",
)
@pytest.mark.parametrize("name", NETS if FULL else ["in training"])
@pytest.mark.parametrize("autocast", [True, False][: 2 if FULL else 1])
def test_budgets_are_kept_in_bfloat16(name: str, autocast: bool) -> None:
    """The backward pass is inside of the autocast block, where torch does not want it, but where many have it."""
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    net, x = NETS[name]().to(dtype), structured((2, 3, 96, 80)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        theirs, want = stepped(copy.deepcopy(net), x, copy.deepcopy(net))
        with pytest.raises(pc.BudgetError) as refused:
            pc.tile_plan(net, x, budget=1)
        least = refused.value.least
        assert least < theirs / 2
        peak, got = stepped(net, x, lambda x: pc.tile(net, x, budget=least))
    assert peak <= least
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


def test_freed_memory_is_given_back_in_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each sweep of both passes."""
    calls: list[int] = []
    monkeypatch.setattr(heap, "_trim", lambda: calls.append)
    net, x = NETS["group norms"](), structured((1, 3, 48, 40)).float()
    plan = pc.tile_plan(net, x, budget="360KiB")
    y = pc.tile(net, x, budget="360KiB")
    assert len(calls) == len(plan.sweeps) > 1
    y.sum().backward()
    again = sum(len(stretch.again) for stretch in plan.stretches)
    assert len(calls) == len(plan.sweeps) + again + sum(one.end - one.begin for one in plan.stretches)
    calls.clear()
    pc.tile(net, x).sum().backward()
    assert not calls


@pytest.mark.parametrize("name", SMALL if FULL else ["squeezed", "attention", "frozen", "in place"])
def test_gradients_in_a_budget_are_those_of_one_call(name: str) -> None:
    torch.manual_seed(0)
    net, given = SMALL[name]().double(), images(1, 2, (26, 19))
    stock = copy.deepcopy(net)
    expected = graded(stock, given, stock)
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, given[0], budget=1)
    assert refused.value.plan.at_once == (name == "attention")
    assert_alike(graded(net, given, lambda x: pc.tile(net, x, budget=refused.value.least)), expected)


def test_fewer_columns_than_bands() -> None:
    net = nn.Sequential(nn.Conv2d(16, 32, 5, 3, (4, 2), padding_mode="replicate"), nn.AdaptiveAvgPool2d(1))
    x = structured((1, 16, 1, 1)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dim in (2, -1):
            with pytest.raises(pc.BudgetError) as refused:
                pc.tile_plan(net, x, budget=1, dim=dim)
            got, want = pc.tile(net, x, budget=refused.value.least, dim=dim), net(x)
            torch.testing.assert_close(got, want, rtol=0, atol=0.02)


class Placed(nn.Module):
    """Adds a tensor of the image's size that it makes, and has a weight that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(conv(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x + torch.linspace(0, 1, x.numel()).view(x.shape)).square().mean()


def test_what_a_module_makes_counts_in_both_passes() -> None:
    torch.manual_seed(0)
    net, x = Placed(), structured((1, 32, 80, 60)).float()
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1)
    peak, _ = stepped(net, x, lambda x: pc.tile(net, x, budget=refused.value.least))
    assert x.nbytes < peak <= refused.value.least


def test_less_than_the_least_is_always_refused() -> None:
    """Deep layers are small: there it takes less to keep values than to compute a tile again from the image."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((3, 8, 16, 32, 64)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    for a, b in itertools.pairwise((64, 32, 16, 8)):
        layers += [nn.Upsample(scale_factor=2), nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
    net, x = nn.Sequential(*layers), torch.randn(1, 3, 64, 64)
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1)
    least = refused.value.least
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=least * 9 // 10)
    assert refused.value.least == least


@pytest.mark.parametrize("dims", [1, 3])
def test_signals_and_volumes_in_a_budget(dims: int) -> None:
    torch.manual_seed(0)
    size = (4000,) if dims == 1 else (12, 24, 20)
    net = nn.Sequential(*(getattr(nn, f"Conv{dims}d")(a, b, 3, padding=1) for a, b in ((2, 8), (8, 2)))).double()
    x = structured((1, 2, *size)).requires_grad_()
    stock = copy.deepcopy(net)
    theirs, want = stepped(stock, x, stock)
    wanted = x.grad
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1)
    peak, got = stepped(net, x, lambda x: pc.tile(net, x, budget=refused.value.least))
    assert peak <= refused.value.least < theirs
    assert_alike(
        [got, x.grad, *(p.grad for p in net.parameters())], [want, wanted, *(p.grad for p in stock.parameters())]
    )


def test_a_budget_chooses_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """More, and smaller ones, in less; without a budget, by the size of the largest value."""
    net, x = Net(), torch.randn(1, 3, 128, 128)

    def tiles(**more: Any) -> int:
        """Of the sweep that has the most."""
        plan = pc.tile_plan(net, x, **more)
        return max(math.prod(math.ceil(1 / share) for share in one) for one in plan.tiles.values())

    assert pc.tile_plan(net, x, budget="1GiB").at_once
    assert 1 < tiles(budget="5MiB") < tiles(budget="2MiB")
    more, fewer = (pc.tile_plan(net, x, budget=budget).overhead for budget in ("2MiB", "5MiB"))
    assert more > 1.5 * fewer > 0  # of their steps
    assert tiles() == 1
    monkeypatch.setattr(strip_sizes, "STRIP", 2**16)
    assert tiles() == 128 * 128 * 24 * 4 / 2**18


class Deep(nn.Module):
    """Six convolutions, each with a norm, and a skip around them."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = conv(3, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(conv(8, 8), norm(8), nn.SiLU()) for _ in range(6)))
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(torch.cat([first, self.blocks(first)], 1))


@pytest.mark.parametrize("where", ["files", "device"][: 2 if FULL else 1])
def test_values_that_are_not_kept_are_computed_again(where: str, tmp_path: Any) -> None:
    """In the backward pass, some at a time; and once more where the graph is retained."""
    torch.manual_seed(0)
    net = Deep(nn.BatchNorm2d).double()
    x = structured((1, 3, 96, 80)).requires_grad_()
    stock = copy.deepcopy(net)
    stores: dict[str, Any] = {} if where == "device" else {"store": tmp_path}
    theirs, want = stepped(stock, x, stock)
    wanted = [x.grad, *(p.grad for p in stock.parameters())]
    budget = int(0.35 * theirs)
    plan = pc.tile_plan(net, x, budget=budget, **stores)
    again = {v for stretch in plan.stretches for sweep in stretch.again for v in sweep.stores}
    if where == "device":
        assert again and len(plan.stretches) > 1 and f"{len(again)} of {len(plan.stored)} stored values" in str(plan)
    peak, got = stepped(net, x, lambda x: pc.tile(net, x, budget=budget, **stores))
    assert peak <= budget
    assert_alike([got, x.grad, *(p.grad for p in net.parameters())], [want, *wanted])
    y = pc.tile(net, x, budget=budget, **stores)
    leaves = [x, *net.parameters()]
    once, twice = (torch.autograd.grad(y.sum(), leaves, retain_graph=keep) for keep in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), leaves)
    del y, got
    assert not list(tmp_path.iterdir())


def test_networks_without_barriers_are_parted() -> None:
    """So that tiles do not compute the whole network's halo again."""
    torch.manual_seed(0)
    net, x = Deep(lambda channels: nn.Identity()).double(), structured((1, 3, 96, 80))
    stock = copy.deepcopy(net)
    theirs, want = stepped(stock, x, stock)
    wanted = [p.grad for p in stock.parameters()]
    budget = int(0.4 * theirs)
    plan = pc.tile_plan(net, x, budget=budget)
    assert len(plan.sweeps) > 1 and plan.stored and len(pc.tile_plan(net, x).sweeps) == 1
    peak, got = stepped(net, x, lambda x: pc.tile(net, x, budget=budget))
    assert peak <= budget
    assert_alike([got, *(p.grad for p in net.parameters())], [want, *wanted])


@pytest.mark.parametrize("folder", [True, False][: 2 if FULL else 1])
def test_stored_values_in_files_are_not_in_the_budget(folder: bool, tmp_path: Any) -> None:
    torch.manual_seed(0)
    net, x = Net(), structured((1, 3, 96, 80)).float()
    where: dict[str, Any] = {"store": tmp_path} if folder else {}
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1, **where)
    peak, y = stepped(net, x, lambda x: pc.tile(net, x, budget=refused.value.least, **where))
    assert peak <= refused.value.least
    del y
    assert not list(tmp_path.iterdir())


def test_on_a_gpu_training_is_cut_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values would take more than half of its memory. Without gradients strips are for speed, and cost little."""
    plan, size = pc.tile_plan(nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU()), torch.randn(1, 3, 66, 66)), 8 * 64 * 64 * 4
    with FakeTensorMode():
        plan.graph.fakes = [torch.empty(fake.shape, device="cuda") for fake in plan.graph.fakes]
    whole = sum(fake.nbytes for fake in plan.graph.fakes)
    assert plan.graph.needs and whole > 2 * size

    def uncut(strip: int, memory: int, needs: set[int]) -> bool:
        monkeypatch.setattr(strip_sizes, "STRIP_OF_GPU", strip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
        return strip_sizes.is_best_uncut(dataclasses.replace(plan.graph, needs=needs))

    assert uncut(size, 0, set()) and uncut(size, 0, plan.graph.needs)
    assert uncut(size - 1, 2 * whole, plan.graph.needs) and not uncut(size - 1, 2 * whole, set())
    assert not uncut(size - 1, 2 * whole - 1, plan.graph.needs)


def test_images_and_masks_of_bytes() -> None:
    """Strips of them become numbers: nothing of their size is made, and the gradients are those of one call."""

    class ToLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(block(3, 4), nn.Conv2d(4, 2, 1)).double()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x.double() / 255), mask[:, 0].long())

    image = structured((2, 3, 45, 38)).sub(-2).mul(50).clamp(0, 255).byte()
    mask = (image.double().mean(1, keepdim=True) > 100).byte()
    model = ToLoss()
    tiled = copy.deepcopy(model)
    plan = pc.tile_plan(tiled, (image, mask), tile=7)
    assert mask.unique().numel() == 2 and len(plan.graph.inputs) == 2
    assert plan.graph.made == 8  # what the norm's counter held
    want, got = model(image, mask), pc.tile(tiled, (image, mask), tile=7)
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for one, other in zip(tiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)
    for one, other in zip(tiled.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
