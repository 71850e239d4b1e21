"""What a call leaves behind: running statistics, buffers after an error, tensors that hooks keep, memory of views."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak


class Arms(nn.Module):
    """Two arms that are added, of one norm and of three: that of the short one is known long before it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.g, self.x = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(5))
        self.unread = nn.InstanceNorm2d(8, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        n, dn, gn, xn, dead = self.norms
        k = F.relu(n(self.c(x)))
        self.unread(dead(k))
        y = xn(self.x(k))
        return F.relu(gn(self.g(F.relu(dn(self.d(k))))) + y)


def alike(model: nn.Module, stock: nn.Module) -> None:
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("budget", ["40MiB", "6MiB", "3MiB", "2MiB"])
@torch.no_grad()
def test_running_statistics_move_whatever_is_stored(budget: str) -> None:
    torch.manual_seed(0)
    net, x = Arms().double().train(), structured((1, 3, 256, 96))
    stock = copy.deepcopy(net)
    want = stock(x)
    assert (pc.tile(net, x, budget) - want).abs().max() < 1e-9 * want.abs().max()
    alike(net, stock)


class Shared(nn.Module):
    """A norm that is called late first, and early then."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.BatchNorm2d(3), nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x) * 3 + 1) + self.norm(x)


@torch.no_grad()
def test_running_statistics_move_in_the_order_of_the_calls() -> None:
    net, x = Shared().double().train(), structured((2, 3, 40, 20))
    stock = copy.deepcopy(net)
    want = stock(x)
    assert (pc.tile(net, x, tile=7) - want).abs().max() < 1e-9 * want.abs().max()
    alike(net, stock)


class Axial(nn.Module):
    """One norm of columns, each a sequence, and then of rows: one of the two cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.3)

    def along(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return self.norm(x.permute(0, 3, 1, 2).reshape(b * w, c, h)).reshape(b, w, c, h).permute(0, 2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.along(self.along(x).transpose(2, 3) * 2 + 1).transpose(2, 3)


@pytest.mark.parametrize("grad", [False, True])
def test_running_statistics_move_in_order_where_some_calls_get_their_values_whole(grad: bool) -> None:
    net, x = Axial().double().train(), structured((2, 3, 24, 20))
    stock = copy.deepcopy(net)
    with torch.set_grad_enabled(grad):
        want, got = stock(x), pc.tile(net, x, tile=5)
    if grad:
        want.square().sum().backward()
        got.square().sum().backward()
    assert (got - want).abs().max() < 1e-9 * want.abs().max()
    assert "whole" in str(pc.tile_plan(net, x, tile=5))
    alike(net, stock)


class Full:
    """An array that cannot be written any more after some strips."""

    def __init__(self, shape: torch.Size, strips: int) -> None:
        self.shape, self.dtype, self.left = tuple(shape), numpy.dtype("float64"), strips

    def __getitem__(self, place: Any) -> Any:
        raise NotImplementedError

    def __setitem__(self, place: Any, value: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("no space left")


@torch.no_grad()
def test_an_error_in_the_middle_changes_nothing() -> None:
    torch.manual_seed(0)
    net, x = Arms().double().train(), structured((1, 3, 64, 32))
    before, shape = copy.deepcopy(net), torch.Size((1, 8, 64, 32))
    for strips in (0, 2):
        with pytest.raises(OSError, match="no space left"):
            pc.tile(net, x, tile=4, out=Full(shape, strips))
        alike(net, before)
    stock = copy.deepcopy(net)
    want = stock(x)
    assert (pc.tile(net, x, tile=4) - want).abs().max() < 1e-9 * want.abs().max()
    alike(net, stock)


def test_a_tensor_that_a_hook_keeps_is_refused() -> None:
    found: dict[str, Any] = {}
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)).train()
    before, x = copy.deepcopy(net.state_dict()), structured((1, 3, 64, 48)).float()
    handle = net[0].register_forward_hook(lambda module, given, result: found.update(a=result))
    with torch.no_grad(), pytest.raises(pc.NotServed, match="kept by a hook, a closure or a global variable"):
        pc.tile(net, x, tile=9)
    handle.remove()
    found.clear()
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    net[0].register_forward_hook(lambda module, given, result: found.update(a=result.shape))
    with torch.no_grad():
        torch.testing.assert_close(pc.tile(net, x, tile=9), copy.deepcopy(net)(x))
    assert found["a"] == (1, 8, 62, 46)


class TwoImages(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.relu(a, inplace=True) + b


@torch.no_grad()
def test_writing_into_an_image_that_is_given_twice_is_refused() -> None:
    x = structured((1, 3, 20, 20))
    for pair in ((x, x), (x, x[:, :, :, :1])):
        with pytest.raises(pc.NotServed, match="an image that is handed in twice"):
            pc.tile(TwoImages(), pair, tile=4)
    other = x.clone()
    assert torch.equal(pc.tile(TwoImages(), (x, other), tile=4), F.relu(x) + other) and torch.equal(x, other)
    assert torch.equal(pc.tile(lambda a, b: F.relu(a) + b, (x, x), tile=4), F.relu(x) + x)


@torch.no_grad()
def test_dropout_of_a_flattened_image_is_that_of_the_seed() -> None:
    x = torch.ones(1, 4, 24, 20)
    net = nn.Dropout(0.5)

    def call(x: Tensor) -> Tensor:
        return net(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)

    found = []
    for tile in (None, 4, 7, (4, 8), (3, 5)):
        torch.manual_seed(3)
        found.append(pc.tile(call, x, tile=tile))
    assert 0.4 < found[0].count_nonzero() / found[0].numel() < 0.6
    assert all(torch.equal(one, found[0]) for one in found)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "some channels": lambda y: y[:, :2],
    "half of them": lambda y: y.chunk(2, 1)[1],
    "every other row": lambda y: y[:, :, ::2],
    "a crop": lambda y: y[:, :, 3:-4, 5:20],
}


@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_a_result_takes_its_own_bytes(part: str) -> None:
    net, x = nn.Conv2d(3, 16, 3, padding=1), structured((2, 3, 96, 64)).float()
    want = PARTS[part](net(x))
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(lambda x: PARTS[part](net(x)), x, budget=1)
    results: list[Tensor] = []
    least = refused.value.least
    peak = allocated_peak(lambda: results.append(pc.tile(lambda x: PARTS[part](net(x)), x, budget=least)))
    torch.testing.assert_close(results[0], want)
    assert results[0].untyped_storage().nbytes() == want.nbytes and peak <= want.nbytes + least


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(1, 2, 1), (2, 3, 2), (1, 3, 2), (1, 2, 2), (3, 4, 3)])
@torch.no_grad()
def test_rows_that_read_padding_alone(kernel: int, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, kernel, stride, padding), nn.Conv2d(4, 3, 3, padding=1)).double()
    for size in (17, 18, 19, 20):
        x = structured((1, 3, size, 13))
        for tile in (1, 3, (2, 3)):
            torch.testing.assert_close(pc.tile(net, x, tile=tile), net(x), rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_bands_read_a_part_of_what_is_stored() -> None:
    x = structured((3, 3, 8, 13))

    def call(x: Tensor) -> Tensor:
        return F.instance_norm(F.instance_norm(F.relu(x))[:, :, :, 4:9])

    torch.testing.assert_close(pc.tile(call, x, tile=(1, 13)), call(x), rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_threads_share_a_tiled_module(tmp_path: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    other = copy.deepcopy(net)
    other.register_forward_hook(lambda module, given, result: None)
    images = [structured((1, 3, rows, 40)).float() for rows in (90, 91, 92)]
    want = [net(x) for x in images]
    pc.tile_modules(net, "", budget="400KiB")
    errors: list[Any] = []

    @torch.no_grad()
    def calls(number: int) -> None:
        try:
            for k in range(12):
                place = (k + number) % 3
                model = other if (k + number) % 4 == 0 else net
                torch.testing.assert_close(model(images[place]), want[place], rtol=1e-4, atol=1e-5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@torch.no_grad()
def test_the_least_budget_is_taken_when_it_is_asked_for() -> None:
    torch.manual_seed(0)
    for seed in range(6 if FULL else 1):
        layers: list[nn.Module] = []
        for k in range(5):
            layers += [nn.Conv1d(4, 4, 3 + 2 * ((seed + k) % 2), padding=1), nn.GroupNorm(2, 4), nn.ReLU()]
        net, x = nn.Sequential(*layers).double(), torch.randn(1, 4, 150 + 13 * seed, dtype=torch.float64)
        with pytest.raises(pc.BudgetError) as refused:
            pc.tile_plan(net, x, budget=1)
        least = refused.value.least
        for budget in (least, int(least * 1.02), int(least * 1.05)):
            assert pc.tile_plan(net, x, budget=budget).needs <= budget


def test_budgets_are_positive() -> None:
    net, x = nn.Conv2d(3, 3, 3), torch.zeros(1, 3, 9, 9)
    for call in (lambda: pc.tile_plan(net, x, budget=0), lambda: pc.tile_modules(net, "", budget=-5)):
        with pytest.raises(ValueError, match="budget: expected at least 1 byte"):
            call()
