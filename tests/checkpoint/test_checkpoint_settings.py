"""A recomputation runs under the random state, autocast and settings of its forward pass, and leaves none behind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.modules import Made
from torch import Tensor, nn

import patchconv_native as pc

lf = pc.functional

DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "F.dropout2d": lambda x: F.dropout2d(x, 0.5),
    "lean dropout": lambda x: lf.dropout(x, 0.5),
    "lean dropout2d": lambda x: lf.dropout2d(x, 0.5),
    "lean alpha_dropout": lambda x: lf.alpha_dropout(x, 0.5, True),
    "under lean()": pc.lean()(lambda x: F.dropout(x, 0.5)),
    "pc.Dropout": lambda x: pc.Dropout(0.5)(x),
    "rand_like": lambda x: x * torch.rand_like(x),
}


def image() -> Tensor:
    return torch.randn(4, 6, 8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("nested", [False, True])
def test_masks_are_those_of_the_forward_pass(name, nested):
    def fn(x: Tensor) -> Tensor:
        return DROPOUTS[name](DROPOUTS[name](x.sin()).sin())

    def twice(x: Tensor) -> Tensor:
        return pc.checkpoint(fn, x).cos()

    runs = []
    for run in (lambda x: fn(x).cos(), lambda x: pc.checkpoint(twice if nested else lambda x: fn(x).cos(), x)):
        torch.manual_seed(3)
        x = image()
        y = run(x)
        torch.manual_seed(4)
        y.sum().backward()
        runs.append([y, x.grad, torch.rand(1)])  # the generator goes on as it would have
    assert all(map(torch.equal, *runs))


def test_without_preserve_rng_state_masks_differ():
    """What the test above would notice."""
    x = image()
    torch.manual_seed(3)
    y = pc.checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, preserve_rng_state=False)
    y.sum().backward()
    assert not torch.equal(y != 0, x.grad != 0)


@pytest.mark.parametrize("lean", [False, True])
def test_autocast(lean):
    """Backward runs outside of the block; the recomputation in its precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    if lean:
        pc.convert(model)
    seen: list[torch.dtype] = []

    def fn(x: Tensor) -> Tensor:
        y = model(x)
        seen.append(y.dtype)
        return y

    runs, state = [], copy.deepcopy(model.state_dict())
    for run in (fn, lambda x: pc.checkpoint(fn, x, early_stop=False)):
        model.load_state_dict(state)
        model.zero_grad()
        x = image()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(x)
        y.float().square().sum().backward()
        runs.append([y, x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())])
    assert all(map(torch.equal, *runs)) and seen == [torch.bfloat16] * 3


def _settings() -> dict[str, Any]:
    return {
        "deterministic": torch.get_deterministic_debug_mode(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "backend": pc.backend(),
        "recompute": pc.recompute(),
        "limit": pc.workspace_limit(),
        "grad": torch.is_grad_enabled(),
    }


@contextlib.contextmanager
def others(on: bool) -> Any:
    """Other settings than at first, one way or another."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(2 if on else 1)
    limit, flags = pc.workspace_limit(2**20 if on else 2**21), {"benchmark": on, "deterministic": on}
    cudnn, backend = torch.backends.cudnn.flags(enabled=True, **flags), pc.backend("aten" if on else "auto")
    with cudnn, backend, pc.recompute(not on), limit:
        yield
    torch.set_deterministic_debug_mode(before)


@pytest.mark.parametrize("ending", ["stopped", "not stopped", "error"])
def test_settings_are_those_of_the_forward_pass(ending):
    seen: list[dict[str, Any]] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(_settings())
        if ending == "error" and len(seen) > 1:
            raise KeyError("again")
        return x.sin().cos()

    x, first = image(), _settings()
    with others(True):
        y = pc.checkpoint(fn, x, early_stop=ending == "stopped")
    with others(False):
        before = _settings()
        with pytest.raises(KeyError) if ending == "error" else contextlib.nullcontext():
            y.sum().backward()
        assert _settings() == before
    assert len(seen) == 2 and seen[0] == seen[1] != before and _settings() == first


@pytest.mark.parametrize("ours", [True, False])
def test_lean_around_a_checkpoint_is_in_force_both_times(ours):
    """What torch's checkpoint runs is left alone by it."""
    saved: list[str] = []

    def fn(x: Tensor) -> Tensor:
        y = F.relu(x.sin())
        saved.append(type(y.grad_fn).__name__)
        return y * 2

    run = pc.checkpoint if ours else lambda fn, x, **k: torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)
    x = image()
    with pc.lean():
        y = run(fn, x, early_stop=False)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.cos() * (x.sin() > 0)) and len(set(saved)) == 1
    assert (saved[0] == "ReluBackward0") != ours


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*layers).double()


def cumulative() -> nn.Module:
    """A norm at which a compiler gives up."""
    net = network()
    net[1].momentum = None
    return Made(lambda m, x: pc.checkpoint(m.net, x), net=net)


def of_compiled() -> nn.Module:
    compiled = torch.compile(net := network(), backend="aot_eager")
    return Made(lambda m, x: pc.checkpoint(lambda x: compiled(x.sin()).sin(), x), net=net)


COMPILED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Sequential, Tensor], Tensor], bool]] = {
    "model": (lambda: Made(lambda m, x: pc.checkpoint(m.net, x).sin(), net=network()), lambda n, x: n(x).sin(), True),
    "model, given up": (cumulative, lambda net, x: net(x), True),
    "module in a checkpoint": (of_compiled, lambda net, x: net(x.sin()).sin(), False),
    "checkpoint_modules": (lambda: pc.checkpoint_modules(network(), ""), lambda net, x: net(x), True),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    make, plain, compiled = COMPILED[name]
    torch._dynamo.reset()
    model = make()
    net = getattr(model, "net", model)
    reference = network()
    reference[1].momentum = net[1].momentum
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(3):
        x, z = image().detach().double().requires_grad_(), image().detach().double().requires_grad_()
        y, expected = run(x), plain(reference, z)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close([y, x.grad], [expected, z.grad])
        torch.testing.assert_close(list(net.buffers()), list(reference.buffers()))
    torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in reference.parameters()])
