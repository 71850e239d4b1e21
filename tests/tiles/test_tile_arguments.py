"""What `tile` is called with: the dimension that is cut, lists and mappings that the module changes; what it keeps."""

from __future__ import annotations

import copy
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.spatial_chains import Unknown, structured
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles.modules import _plans


def alike(got: Any, want: Any) -> None:
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    assert pairs
    for a, b in pairs:
        if isinstance(b, Tensor):
            assert type(a) is Tensor and a.shape == b.shape and (a - b).abs().max() <= 1e-9 * b.abs().max()
        else:
            assert a == b


# ----------------------------------------------------------------------------------------------------------------------
# dim


class Mixed(nn.Module):
    """Kernels, strides and pads that differ along the dimensions, a norm, a mean along each, and a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, (5, 3), (1, 2), (0, 2), bias=False)
        self.norm, self.second = nn.GroupNorm(2, 6), nn.ConvTranspose2d(6, 3, (2, 3), (2, 1))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = self.norm(self.first(x)).relu()
        y = torch.cat([self.second(y), y.repeat_interleave(2, 2)[:, :3, :, :1].expand(-1, -1, -1, 2)], 3)
        return y, y.mean(2), y.amax(3), y[..., 1:-1].flip(3), x.shape[2]


@pytest.mark.parametrize(("dim", "rows"), [(2, 2), (3, 3), (-2, 2), (-1, 3)])
@torch.no_grad()
def test_either_dimension_can_be_cut(dim: int, rows: int) -> None:
    torch.manual_seed(0)
    net, x = Mixed().double(), structured((3, 3, 21, 37))
    alike(pc.tile(net, x, tile=rows, dim=dim), net(x))


@torch.no_grad()
def test_wide_images_fit_by_columns() -> None:
    net, x = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))).double(), structured((1, 3, 8, 1500))
    want = net(x)
    assert pc.tile_plan(net, x, budget="100KiB").sweeps[0].bands > 1
    plan = pc.tile_plan(net, x, budget="100KiB", dim=3)
    assert plan.sweeps[0].bands == 1 and plan.needs < 100 * 2**10 < allocated_peak(lambda: net(x))
    alike(pc.tile_modules(net, "", budget="100KiB", dim=3)(x), want)


@torch.no_grad()
def test_dim_counts_from_the_last_one_too() -> None:
    net, video, line = nn.ReLU(), structured((1, 2, 6, 30, 8)), structured((1, 2, 40))
    plans = [str(pc.tile_plan(net, video, tile=5, dim=dim)) for dim in (2, 3, 4)]
    assert len(set(plans)) == 3 and plans == [str(pc.tile_plan(net, video, tile=5, dim=dim)) for dim in (-3, -2, -1)]
    tiled = pc.tile_modules(nn.Sequential(nn.Conv1d(2, 2, 3)).double(), "", budget="1MiB", dim=-1)
    alike(tiled(line), tiled[0](line))
    known = list(_plans[tiled].values())
    assert [kept.plan.kinds.dims[kept.plan.graph.inputs[0]] for kept in known] == [2]
    tiled = pc.tile_modules(nn.Sequential(nn.Conv1d(2, 2, 3)).double(), "", budget="1MiB", dim=-2)
    alike(tiled(line), tiled[0](line))  # it has no rows: as it is
    assert tiled not in _plans


@pytest.mark.parametrize("dim", [1, 4, -3, -4, True, "W", None])
def test_dim_is_checked(dim: Any) -> None:
    net, x = nn.ReLU(), structured((1, 3, 12, 10))
    text = "expected dim to be from 2 to 3 or from -2 to -1, a spatial dimension of x, or 0, its batch, got "
    for call in (pc.tile, pc.tile_plan):
        with pytest.raises(ValueError, match=f"{call.__name__}: {text}{dim!r}"):
            call(net, x, dim=dim)


@pytest.mark.parametrize("dim", [1, True, "W", None])
def test_dim_of_modules_is_checked(dim: Any) -> None:
    net = nn.Sequential(nn.ReLU())
    with pytest.raises(ValueError, match=f"tile_modules: expected dim to be .* or 0, the batch, got {dim!r}"):
        pc.tile_modules(net, "", dim=dim)
    assert type(net) is nn.Sequential


# ----------------------------------------------------------------------------------------------------------------------
# Lists and mappings


class Caching(nn.Module):
    """Reads entries of lists and mappings, and replaces, adds and moves some."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, cache: dict[str, Any], place: list[int]) -> Tensor:
        y, old = self.conv(x), cache["kept"][place[0]]
        if old is None:
            cache["kept"][place[0]] = y[:, :, -2:].clone()
        elif old != "text":
            y = y + old.mean(2, keepdim=True)
            cache["kept"][place[0]] = "text"
            cache["more"].insert(0, old)
        place[0] += 1
        cache["new"] = (y.mean(), "text", 3)
        cache["more"].append(x)
        return y


@torch.no_grad()
def test_lists_and_mappings_are_changed_as_by_one_call() -> None:
    torch.manual_seed(0)
    net, x = Caching().double(), structured((2, 3, 20, 11))

    def called(call: Callable[..., Tensor]) -> Any:
        cache: dict[str, Any] = {"kept": [None, None], "more": []}
        kept, place, results = cache["kept"], [0], []
        for number in range(3):
            place[0] = 0
            results.append(call(x + number, cache, place))
        assert kept is cache["kept"]
        return results, cache, place

    want = called(net)
    alike(called(lambda *args: pc.tile(net, args, tile=3)), want)
    alike(called(pc.tile_modules(net, "", budget="1MiB")), want)


class Thing:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.count = 0

    def add(self, x: Tensor) -> None:
        self.kept.append(x)
        self.count += 1


def in_place(x: Tensor, cache: list[Tensor]) -> Tensor:
    cache[0].mul_(2)
    return x + cache[0]


def by_a_view(x: Tensor, cache: list[Tensor]) -> Tensor:
    cache[0][:, 1] = 2
    cache.append(x)
    return x + 1


def a_result(x: Tensor, cache: list[Any]) -> Thing:
    found = Thing()
    found.add(x * 2)
    return found


def on_pixels(x: Tensor, cache: list[Any]) -> Tensor:
    cache.append(x)
    return x if x.mean() > 0 else -x


@pytest.mark.parametrize(("function", "text"), [
    (in_place, "writing into a tensor that is handed in in a list or mapping"),
    (by_a_view, "writing into a tensor that is handed in in a list or mapping"),
    (a_result, "a result with tensors in a Thing is not served"),
    (on_pixels, "values of pixels"),
])  # fmt: skip
@torch.no_grad()
def test_what_is_refused_changes_nothing(function: Callable[..., Any], text: str) -> None:
    x, thing = structured((1, 3, 12, 10)), Thing()
    cache = [x + 1, thing]
    with pytest.raises(pc.NotServed, match=text):
        pc.tile(function, (x, cache))
    assert len(cache) == 2 and torch.equal(cache[0], x + 1) and vars(thing) == vars(Thing())  # type: ignore[arg-type]


class Doubling(nn.Module):
    def forward(self, x: Tensor, apply: Any = Unknown.apply) -> Tensor:
        return apply(x)


def test_the_module_of_what_is_refused_is_named() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 3), Doubling(), nn.Conv2d(3, 3, 3))
    with pytest.raises(pc.NotServed, match=r"Unknown \(in 1\) is not served: gradients of an autograd.Function"):
        pc.tile(net.double(), structured((1, 3, 12, 10)), tile=4)


# ----------------------------------------------------------------------------------------------------------------------
# Tensors that modules keep


class Keeping(nn.Module):
    """Reads what it has kept in the call before, in attributes, lists and an object."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.before, self.calls = nn.Conv2d(3, 3, 3, padding=1), None, 0
        self.seen: list[Tensor] = []
        self.again, self.thing = self.seen, Thing()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.before is not None:
            y = torch.cat([self.before, y], 2)[:, :, 1:-1] + self.thing.kept[-1].mean()
        self.before = y[:, :, -2:].clone()
        self.calls += 1
        self.seen.append(y.mean((2, 3)))
        self.thing.add(x)
        return y

    def state(self) -> Any:
        assert self.again is self.seen
        return self.before, self.calls, self.seen, vars(self.thing)


@torch.no_grad()
def test_modules_keep_what_they_keep_in_one_call() -> None:
    torch.manual_seed(0)
    stock, x = Keeping().double(), structured((2, 3, 20, 11))
    one, by_module, named = copy.deepcopy(stock), copy.deepcopy(stock), copy.deepcopy(stock)
    pc.tile_modules(by_module, "", budget="1MiB")
    for number in range(2):
        want = stock(x + number)
        before = copy.deepcopy(one.state())
        pc.tile_plan(one, x + number)
        alike(one.state(), before)
        with pytest.raises(ValueError, match="out: expected a module that keeps no tensor for its next call"):
            pc.tile(one, x + number, out=torch.empty_like(want))
        alike(pc.tile(one, x + number, tile=3), want)
        alike(by_module(x + number), want)
        alike(pc.tile(lambda x: named(x), x + number, tile=3), want)
        for net in (one, by_module, named):
            alike(net.state(), stock.state())


@torch.no_grad()
def test_objects_keep_what_they_keep_in_one_call() -> None:
    x, thing = structured((1, 3, 12, 10)), Thing()

    def function(x: Tensor, things: list[Thing]) -> Tensor:
        things[0].add(x * 2)
        return x + 1

    alike(pc.tile(function, (x, [thing]), tile=3), x + 1)
    alike(vars(thing), {"kept": [x * 2], "count": 1})


class Hidden:
    """Of which nobody knows that it has an attribute."""

    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = Thing()


@torch.no_grad()
def test_a_tensor_that_was_left_somewhere_is_refused() -> None:
    hidden, x = Hidden(), structured((1, 3, 12, 10))

    def function(x: Tensor, things: list[Hidden]) -> Tensor:
        hidden.inner.add(x)
        return x + hidden.inner.kept[0]

    with pytest.raises(pc.NotServed, match="kept by a hook, a closure or a global variable"):
        pc.tile(function, (x, [hidden]))
    with pytest.raises(pc.NotServed, match="add is not served: it reads what an earlier call of tile has left in an"):
        pc.tile(function, (x, [hidden]))


@torch.no_grad()
def test_one_list_given_twice_is_not_changed() -> None:
    both: list[Tensor] = []

    def function(x: Tensor, a: list[Tensor], b: list[Tensor]) -> Tensor:
        a.append(x)
        return x

    with pytest.raises(pc.NotServed, match="handed in twice"):
        pc.tile(function, (structured((1, 3, 12, 10)), both, both))
    assert both == []


def test_parameters_on_meta_are_refused() -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to("meta"), torch.zeros(1, 3, 40, 40)
    for call in (pc.tile_plan, pc.tile):
        with pytest.raises(ValueError, match=r"expected parameters and buffers with memory, got 0\.weight on meta"):
            call(net.eval().requires_grad_(False), x)
    assert pc.tile_plan(net.to_empty(device="cpu"), x, tile=4).sweeps


# ----------------------------------------------------------------------------------------------------------------------
# Wrong calls


def net_with_a_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1))


X = torch.ones(1, 3, 24, 20)
DENSE = "expected x to be a dense tensor, got one that is "
NO_X = "expected x to be a tensor, an array-like such as numpy.memmap, or a tuple of the module's arguments with one"


@pytest.mark.parametrize(("module", "error", "text"), [
    (nn.Conv2d, TypeError, "got the class Conv2d: make one, as Conv2d(...)"),
    (nn.ReLU, TypeError, "got the class ReLU: make one, as ReLU(...)"),
    (X, TypeError, "expected module to be a torch.nn.Module or a function, got Tensor"),
    ("resnet18", TypeError, "expected module to be a torch.nn.Module or a function, got str"),
    (nn.ModuleList([nn.ReLU()]), TypeError, "got a ModuleList, which has no forward"),
    (nn.Sequential(nn.LazyConv2d(4, 3)), ValueError, "got 0.weight without: run the model once first"),
    (torch.jit.script(nn.Conv2d(3, 4, 3)), pc.NotServed, "it is TorchScript: give the module that it was made from"),
])  # fmt: skip
@pytest.mark.parametrize("call", [pc.tile, pc.tile_plan])
@torch.no_grad()
def test_what_is_no_module_is_refused(call: Any, module: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call(module, X)


@pytest.mark.parametrize(("x", "options", "text"), [
    ("scan.npy", {}, f"{NO_X} of these in it, got str; a file is opened first: numpy.load(path, mmap_mode='r')"),
    (pathlib.Path("scan.npy"), {}, "; a file is opened first: numpy.load(path, mmap_mode='r')"),
    (None, {}, f"{NO_X} of these in it, got NoneType"),
    ((), {}, f"{NO_X} of these in it, got an empty tuple"),
    ((1, "a"), {}, f"{NO_X} of these in it, got int, str"),
    (X.to("meta"), {}, "expected x and out to have memory, got a tensor on meta: tile_plan takes it"),
    (X, {"out": torch.empty(1, 2, 24, 20, device="meta")}, "expected x and out to have memory, got a tensor on meta"),
    (X.to_sparse(), {}, f"{DENSE}of layout torch.sparse_coo"),
    (torch.nested.nested_tensor([X[0], X[0]]), {}, f"{DENSE}nested"),
    (X[:0], {}, "expected images with elements, got [(0, 3, 24, 20)]"),
    (X, {"out": torch.empty(1, 2, 1, 20).expand(1, 2, 24, 20)}, "expected out to have memory for each of its elements"),
    (X, {"out": "out.npy"}, "expected out to be a tensor or an array-like, got str"),
    (X, {"progress": "yes"}, "expected progress to be True, False or a function, got 'yes'"),
    (X, {"tile": "256"}, "expected tile to be a positive number of rows, or a tuple of several, got '256'"),
    (X, {"tile": 16.0}, "a tuple of several, got 16.0"),
    (X, {"tile": [16, 0]}, "a tuple of several, got [16, 0]"),
    (X, {"tile": (16, True)}, "a tuple of several, got (16, True)"),
    (X, {"tile": ()}, "a tuple of several, got ()"),
    (X, {"budget": "1 gig"}, "budget: expected a number of bytes such as 67108864, '64MiB' or '1.5GiB', got '1 gig'"),
    (X, {"store": None}, "expected store to be 'device', 'cpu' or a folder that exists"),
])  # fmt: skip
@torch.no_grad()
def test_wrong_arguments_are_named_and_change_nothing(x: Any, options: dict[str, Any], text: str) -> None:
    net = net_with_a_norm()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=f"^tile: .*{re.escape(text)}"):
        pc.tile(net, x, **options)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("tile", [[5, 7], (torch.tensor(5), 7)])
@torch.no_grad()
def test_sizes_of_tiles_may_be_in_a_list_and_of_other_kinds(tile: Any) -> None:
    assert str(pc.tile_plan(net_with_a_norm(), X, tile=tile)) == str(pc.tile_plan(net_with_a_norm(), X, tile=(5, 7)))


def test_gradients_are_served_wherever_they_come_from() -> None:
    """Also of a function that names a module, and of tensors beside the image."""
    net, leaf = nn.Sequential(nn.Conv2d(3, 2, 3)), torch.ones(1, requires_grad=True)
    image = X.clone().requires_grad_()
    calls: list[tuple[Any, Any, Tensor]] = [
        (net, X, net[0].weight), (net.forward, X, net[0].weight), (lambda x: net(x), X, net[0].weight),
        (nn.ReLU(), image, image), (lambda x, w: x * w, (X, leaf), leaf),
        (lambda x, some: x * some[0], (X, [leaf]), leaf),
    ]  # fmt: skip
    for module, x, asked in calls:
        whole = module(*x) if isinstance(x, tuple) else module(x)
        (want,) = torch.autograd.grad(whole.square().sum(), asked)
        (found,) = torch.autograd.grad(pc.tile(module, x, tile=4).square().sum(), asked)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            assert not pc.tile(module, x).requires_grad
    assert not pc.tile(nn.ReLU(), X).requires_grad


class Recurrent(nn.Module):
    """Over the places of an image, one after the other."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.lines = kind(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lines(x.flatten(2).transpose(1, 2))[0]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@torch.no_grad()
def test_recurrent_layers_get_their_arguments_whole(kind: type[nn.RNNBase]) -> None:
    net, x = Recurrent(kind), X[:, :, :6, :5]
    if kind is nn.LSTM and torch.backends.mkldnn.is_available():
        with pytest.raises(pc.NotServed, match=r"tile: lstm in lines is not served: what memory .*mkldnn\.flags"):
            pc.tile(net, x)
    with torch.backends.mkldnn.flags(enabled=False):
        torch.testing.assert_close(pc.tile(net, x), net(x))
        name = kind.__name__.lower()
        assert [call.name for call in pc.tile_plan(net, x).graph.calls].count(name) == 1


@pytest.mark.parametrize("budget", [None, "1MiB"])
@pytest.mark.parametrize("graded", [False, True])
def test_a_call_inside_of_another_one_is_part_of_it(budget: str | None, graded: bool) -> None:
    torch.manual_seed(0)
    first, last = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.Conv2d(8, 4, 3, padding=1)
    x = structured((1, 3, 97, 131)).float().requires_grad_(graded)

    def net(x: Tensor) -> Tensor:
        return last(pc.tile(first, x, budget="1KiB"))  # type: ignore[no-any-return]

    want = last(first(x))
    with torch.set_grad_enabled(graded):
        got = pc.tile(net, x, budget=budget)
    torch.testing.assert_close(got, want)
    if graded:
        (a,), (b,) = (torch.autograd.grad(y.square().sum(), x) for y in (got, want))
        torch.testing.assert_close(a, b)
    with pytest.raises(pc.NotServed, match="tile: out is not served in a call of tile that is inside of another one"):
        pc.tile(lambda x: pc.tile(first, x, out=torch.empty(1)), x.detach())


def test_what_keeps_tensors_is_named_where_gradients_are_refused() -> None:
    class Keeps(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = super().forward(x)
            return self.seen

    x = structured((1, 3, 32, 32)).float()
    with pytest.raises(pc.NotServed, match=r"keeps tensors for its next call \(in seen\) are not served"):
        pc.tile(Keeps(3, 2, 3), x, tile=8)
