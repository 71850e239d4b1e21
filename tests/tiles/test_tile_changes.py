"""Modules that change something while they run, or draw random numbers: a plan, a refusal and an error change nothing;
`tile` and `tile_modules` change what each call of the module does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.tiles import modules as tiled

np = pytest.importorskip("numpy")
X = torch.randn(1, 3, 80, 16, generator=torch.Generator().manual_seed(1))
TOTAL, LOG = 0, []
GENERATOR = np.random.default_rng(7)


class Net(nn.Module):
    """Has state of each kind, and does with it what `step` says. step(net, x) gives a number or a tensor."""

    total = 0

    def __init__(self, step: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.step = nn.Conv2d(3, 3, 3, padding=1), step
        self.norm = nn.BatchNorm2d(3)
        self.buffer, self.other = nn.Buffer(torch.ones(3, 1, 1)), nn.Buffer(torch.full((3, 1, 1), 0.5))
        self.tensors, self.cache, self.seen = [torch.ones(3, 1, 1), torch.ones(3, 1, 1)], {}, {1.0}
        self.count, self.object = 1, SimpleNamespace(count=1, inner=SimpleNamespace(count=1))

    def with_more(self) -> Net:
        """With objects for which no plan is kept."""
        self.array, self.view = np.ones((3, 1, 1), np.float32), self.other[:1].detach().numpy()
        self.torch, self.python, self.numpy = torch.Generator(), random.Random(3), np.random.default_rng(3)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.step(self, x)


def parts(*steps: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """The last one's result, after all."""
    return lambda net, x: [step(net, x) for step in steps][-1]


def adds(name: str) -> Callable[[Any, Tensor], Any]:
    def step(net: Any, x: Tensor) -> Any:
        setattr(net, name, getattr(net, name) + 1)
        return getattr(net, name)

    return step


def counted() -> Callable[[Any, Tensor], Any]:
    count, kept = 0, [1]

    def step(net: Any, x: Tensor) -> int:
        nonlocal count
        count += 1
        kept[0] += 1
        return count + kept[0]

    return step


def of_the_world(net: Any, x: Tensor) -> float:
    global TOTAL
    TOTAL += 1
    LOG.append(TOTAL)
    return TOTAL + len(LOG) + GENERATOR.random()


def by_default(net: Any, x: Tensor, generator: Any = torch.Generator().manual_seed(2)) -> Tensor:  # noqa: B008
    return torch.rand((), generator=generator)


def written_late(net: Any, x: Tensor) -> Tensor:
    """A tensor that another call has read by then."""
    y = x * net.buffer
    net.buffer.add_(1)
    made = torch.ones(1)
    z = x * made
    made += 1
    return y + z + x * net.buffer * made


def of_its_class(net: Any, x: Tensor) -> int:
    Net.total += 1
    return Net.total


def hooked(net: Any, x: Tensor) -> Any:
    def hook(module: nn.Module, args: Any, result: Any) -> None:
        net.count += 1

    with net.norm.register_forward_hook(hook):
        return net.norm(x) * net.count


def with_gradients(net: Any, x: Tensor) -> float:
    """A new one each time, and one that is added to."""
    net.conv.bias.requires_grad_(not net.conv.bias.requires_grad)
    net.conv.weight.requires_grad_(True)
    with torch.enable_grad():
        (net.conv.weight**2).sum().backward()
    return float(net.conv.weight.grad.sum())


def parameter_late(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    net.conv.weight.mul_(0.5)
    return y + net.conv(x)


def scripted(net: Any, x: Tensor) -> Tensor:
    _SCRIPTED(net.buffer)
    return net.buffer


@torch.jit.script
def _SCRIPTED(tensor: Tensor) -> None:
    tensor.add_(1)


def forked(net: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        factor = torch.rand(())
    torch.rand(())
    return factor


STEPS: dict[str, Callable[[], Callable[[Any, Tensor], Any]]] = {
    "random": lambda: lambda net, x: random.random(),
    "numpy.random": lambda: lambda net, x: float(np.random.rand()),
    "torch.rand": lambda: lambda net, x: torch.rand(()),
    "fork_rng": lambda: forked,
    "its random.Random": lambda: lambda net, x: net.python.random(),
    "its numpy.random.Generator": lambda: lambda net, x: float(net.numpy.random()),
    "its torch.Generator": lambda: lambda net, x: torch.rand((), generator=net.torch),
    "normal_": lambda: lambda net, x: nn.init.normal_(net.buffer, generator=net.torch),
    "a default argument": lambda: by_default,
    "of the image's size": lambda: lambda net, x: torch.randn(x.shape, generator=net.torch),
    "out=": lambda: lambda net, x: torch.add(net.buffer, net.other, out=net.buffer),
    "foreach": lambda: parts(lambda net, x: torch._foreach_add_(net.tensors, 1), lambda net, x: sum(net.tensors)),
    "numpy": lambda: parts(lambda net, x: net.buffer.numpy().__iadd__(1), lambda net, x: net.buffer),
    "a part by numpy": lambda: parts(lambda net, x: np.asarray(net.buffer[1]).fill(9), lambda net, x: net.buffer),
    "a view of numpy's": lambda: parts(lambda net, x: net.view.__iadd__(1), lambda net, x: net.other),
    "data": lambda: parts(lambda net, x: net.buffer.data.add_(1), lambda net, x: net.buffer),
    "data =": lambda: parts(lambda net, x: setattr(net.buffer, "data", net.buffer + 1), lambda net, x: net.buffer),
    "parameter": lambda: parts(lambda net, x: net.conv.bias.data.mul_(1.5), lambda net, x: 1.0),
    "clamp": lambda: parts(lambda net, x: net.conv.weight.data.clamp_(-0.1, 0.1), lambda net, x: 1.0),
    "uniform_": lambda: parts(lambda net, x: nn.init.uniform_(net.conv.weight), lambda net, x: 1.0),
    "a part": lambda: parts(lambda net, x: net.buffer[1].add_(1), lambda net, x: net.buffer),
    "index": lambda: parts(lambda net, x: net.buffer.view(3).__setitem__(1, 4.0), lambda net, x: net.buffer),
    "lerp_": lambda: lambda net, x: net.buffer.lerp_(net.other, 0.1),
    "set_": lambda: lambda net, x: net.buffer.set_(torch.full((3, 1, 1), 2.0)),
    "resize_": lambda: lambda net, x: net.buffer.resize_(net.buffer.size(0) + 3, 1, 1).fill_(2.0)[:3],
    "embedding": lambda: lambda net, x: F.embedding(torch.tensor(0), net.buffer.view(3, 1), max_norm=0.5),
    "batch norm": lambda: lambda net, x: net.norm.train()(torch.ones(1, 3, 2, 2)).sum() + net.norm.running_mean[0],
    "script": lambda: scripted,
    "written late": lambda: written_late,
    "buffer =": lambda: adds("buffer"),
    "register_buffer": lambda: parts(
        lambda net, x: net.register_buffer("buffer", net.buffer + 1), lambda net, x: net.buffer
    ),
    "count": lambda: adds("count"),
    "an object": lambda: parts(
        lambda net, x: setattr(net.object, "count", net.object.count + 1), lambda net, x: net.object.count
    ),
    "a mapping": lambda: parts(lambda net, x: net.cache.update({len(net.cache): 1}), lambda net, x: len(net.cache)),
    "a set": lambda: parts(lambda net, x: net.seen.add(len(net.seen)), lambda net, x: len(net.seen)),
    "an array": lambda: parts(lambda net, x: net.array.__iadd__(1), lambda net, x: torch.from_numpy(net.array)),
    "a closure": counted,
    "an object in an object": lambda: parts(
        lambda net, x: setattr(net.object.inner, "count", net.object.inner.count + 1),
        lambda net, x: net.object.inner.count,
    ),
    "a class": lambda: of_its_class,
    "a hook": lambda: hooked,
    "gradients": lambda: with_gradients,
    "a parameter late": lambda: parameter_late,
    "global variables": lambda: of_the_world,
}  # fmt: skip


MORE = {
    "its random.Random", "its numpy.random.Generator", "its torch.Generator", "normal_", "of the image's size",
    "an array", "a view of numpy's",
}  # fmt: skip


def start(name: str) -> Net:
    global TOTAL
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    TOTAL = Net.total = 0
    LOG.clear()
    GENERATOR.bit_generator.state = np.random.default_rng(7).bit_generator.state
    by_default.__defaults__[0].manual_seed(2)  # type: ignore[index]
    net = Net(STEPS[name]()).eval().requires_grad_(False)
    return net.with_more() if name in MORE else net


def plain(value: Any) -> Any:
    """What there is, to be compared with another."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, (set, int, float, str, type(None))):
        return repr(value)
    return plain(vars(value)) if isinstance(value, (nn.Module, SimpleNamespace)) else None


def everything(net: Net) -> Any:
    """As it is now."""
    gradients = [(str(p.requires_grad), p.grad) for p in net.parameters()]
    world = (TOTAL, Net.total, gradients, LOG, GENERATOR, by_default.__defaults__)
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    step = net.step
    cells = [cell.cell_contents for cell in step.__closure__ or ()] if isinstance(step, FunctionType) else []
    return plain([world, generators, net, [cell for cell in cells if not callable(cell)]])


def broken(done: int, total: int) -> None:
    if done == 2:
        raise OSError("no space left")


@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_what_a_module_changes(name: str) -> None:
    stock = start(name)
    want = []
    for _ in range(3):
        want += [(stock(X), everything(stock))]
    net = start(name)
    before = everything(net)
    pc.tile_plan(net, X)
    assert everything(net) == before, "tile_plan"
    with pytest.raises(ValueError, match="expected out"):
        pc.tile(net, X, out=torch.empty(1))
    assert everything(net) == before, "refused"
    with pytest.raises(OSError, match="no space left"):
        pc.tile(net, X, tile=20, progress=broken)
    assert everything(net) == before, "an error in the middle"
    for result, after in want:
        torch.testing.assert_close(pc.tile(net, X, tile=20), result, rtol=1e-4, atol=1e-4)
        assert everything(net) == after, "tile"
    net = pc.tile_modules(start(name), "", budget="60KiB")
    for result, after in want:
        torch.testing.assert_close(net(X), result, rtol=1e-4, atol=1e-4)
        assert everything(net) == after, "tile_modules"


@torch.no_grad()
def test_a_budget_that_is_refused_changes_nothing() -> None:
    net = start("out=")
    before = everything(net)
    with pytest.raises(pc.BudgetError):
        pc.tile(net, X, "1KiB")
    assert everything(net) == before


@torch.no_grad()
def test_plans_are_kept_unless_a_module_draws_or_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS, "reads", lambda: lambda net, x: float(net.buffer.numpy().sum()) + sum(net.other.view(3)))
    for name in ("reads", "random", "numpy", "a default argument", "fork_rng", "a closure", "global variables"):
        net = pc.tile_modules(start(name), "", budget="60KiB")
        net(X)
        assert len(tiled._plans[net]) == (name == "reads"), name


class After(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mean = nn.BatchNorm2d(3), nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        self.mean.lerp_(self.norm.running_mean, 0.1)
        return y * self.mean.view(1, 3, 1, 1)


@torch.no_grad()
def test_running_statistics_that_are_read_after_they_move_are_refused() -> None:
    net = After()
    before = plain(net.state_dict())
    with pytest.raises(pc.NotServed, match="reads its running statistics, or writes into them, after it"):
        pc.tile(net, X, tile=20)
    assert plain(net.state_dict()) == before
    net.eval()
    assert torch.equal(pc.tile(net, X, tile=20), net(X))


def test_a_constant_with_a_history_that_is_written_to_late_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3, 1, 1))

    def call(x: Tensor) -> Tensor:
        scale = weight * 2
        y = x * scale
        scale.add_(1)
        return y * scale

    with pytest.raises(pc.NotServed, match="writes into a tensor that a call before it has read"):
        pc.tile(call, X, tile=20)


@torch.no_grad()
def test_after_an_error_dropout_draws_as_before() -> None:
    net = nn.Dropout()
    state = torch.get_rng_state()
    with pytest.raises(OSError, match="no space left"):
        pc.tile(net, X, tile=20, progress=broken)
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
def test_a_tensor_in_an_object_of_an_object_is_kept() -> None:
    outer = SimpleNamespace(inner=SimpleNamespace(kept=[]))

    def function(x: Tensor, thing: Any) -> Tensor:
        thing.inner.kept.append(x * 2)
        return x + thing.inner.kept[0]

    assert torch.equal(pc.tile(function, (X, outer)), 3 * X) and torch.equal(outer.inner.kept[0], 2 * X)


@torch.no_grad()
@pytest.mark.parametrize("call", [pc.tile_plan, pc.tile])
def test_an_iterator_is_refused_before_it_gives_anything(call: Any) -> None:
    net = Net(lambda net, x: next(net.scales))
    net.scales = iter([2, 3])
    with pytest.raises(pc.NotServed, match=r"an iterator in an attribute, Net\.scales"):
        call(net, X)
    assert list(net.scales) == [2, 3]
    net.step = lambda net, x: 2  # nothing reads it
    call(net, X)
