"""Kinds of forwards (wrap.py) on one module: put on in any order, and taken off one by one."""

from __future__ import annotations

import abc
import contextlib
import copy
import itertools
import pickle
import types
import typing
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import needs_gloo, run
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.convert import LeanCode
from patchconv_native.planner import Strategy
from patchconv_native.wrap import keeps_its_class, parts, set_class, wrapped_class


class Attention(nn.Module):
    """spatial() gathers what has this name."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.project(x.flatten(2).transpose(1, 2))
        return x + F.relu(F.scaled_dot_product_attention(tokens, tokens, tokens)).transpose(1, 2).reshape(x.shape)


def network(norm: type[nn.Module] = nn.BatchNorm2d) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm(4), Attention(), nn.Conv2d(4, 2, 3)).double()


def image() -> Tensor:
    return torch.randn(2, 3, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def outcome(model: nn.Module, whole: Any = None) -> list[Tensor]:
    x = image().requires_grad_()
    y = model(x)
    y = y if whole is None else whole(y)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def names(module: nn.Module) -> list[str]:
    return [kind.__name__ for kind in parts(type(module))[1]]


def all_orders(rank: int, world: int) -> list[str]:
    import patchconv_native.distributed as pd

    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    expected = outcome(network())
    steps = {
        "spatial": lambda m: pd.spatial(m, mesh),
        "checkpoint": lambda m: pc.checkpoint_modules(m, (Attention, nn.SyncBatchNorm)),
        "microbatch": lambda m: pc.microbatch_modules(m, Attention, 2),
        "convert": pc.convert,
    }
    wrong = []
    for order in itertools.permutations(steps):
        model = network(nn.SyncBatchNorm)
        for step in order:
            steps[step](model)
        kinds = (names(model[1]), names(model[2]), isinstance(model[1], pc.SyncBatchNorm))
        right = ["LeanCode", "_Microbatched", "_Checkpointed", "_Gathered"]
        if kinds != (["_Checkpointed", "_Synced"], right, True):
            wrong.append(f"{order}: {kinds}")
        try:
            torch.testing.assert_close(outcome(model, pd.gather), expected)
        except AssertionError as error:
            wrong.append(f"{order}: {error}")
    return wrong


@needs_gloo
def test_every_order_on_ranks() -> None:
    assert run(2, all_orders, timeout=300) == [[], []]


def without_kinds(rank: int, world: int) -> list[bool]:
    import patchconv_native.distributed as pd

    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    scripted, patched = network(), network()
    scripted[2] = torch.jit.script(scripted[2])
    stock = patched[2].forward
    patched[2].forward = lambda x: stock(x)
    found = []
    for model in (scripted, patched):
        pd.spatial(model, mesh, gather="2")
        pairs = zip(outcome(model, pd.gather), outcome(network()), strict=True)
        found.append(all(torch.allclose(one, other) for one, other in pairs))
    return found


@needs_gloo
def test_gathered_modules_whose_class_cannot_change() -> None:
    """Scripted ones, and those with a forward of the instance."""
    assert run(2, without_kinds, timeout=300) == [[True, True]] * 2


def test_a_plan_over_micro_batches() -> None:
    """A plan takes off what it has put on, and nothing else."""
    expected = outcome(network())
    strategy = Strategy(convert=True, checkpoints=["2"])
    model = pc.microbatch_modules(network(), "2", 2)
    undo = strategy.apply(model)
    assert names(model[2]) == ["LeanCode", "_Microbatched", "_Checkpointed"]
    torch.testing.assert_close(outcome(model), expected)
    undo()
    assert names(model[2]) == ["_Microbatched"] and type(model[0]) is nn.Conv2d

    model = network()
    undo = strategy.apply(model)
    pc.microbatch_modules(model, ("1", "2"), 2)
    pc.checkpoint_modules(model, ("1", "2"))
    undo()
    assert names(model[1]) == ["_Microbatched", "_Checkpointed"] and type(model[0]) is nn.Conv2d
    assert names(model[2]) == ["_Microbatched"], "the plan's checkpoint goes"
    torch.testing.assert_close(outcome(model), expected)


def test_a_plan_is_made_for_micro_batches() -> None:
    model = pc.microbatch_modules(network(), "2", 2)
    plan = pc.plan(model, image(), budget="1GiB")
    plan.undo(plan.apply(model))
    assert names(model[2]) == ["_Microbatched"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied: Any) -> None:
    model = pc.convert(Attention())
    pc.checkpoint_modules(pc.microbatch_modules(model, "", 2), "")
    other = copied(model)
    assert type(other) is type(model) and names(other) == ["LeanCode", "_Microbatched", "_Checkpointed"]
    pc.checkpoint_modules(pc.microbatch_modules(pc.revert(other), ()), ())
    assert type(other) is Attention and len(names(model)) == 3


def test_a_class_derived_from_a_wrapped_one() -> None:
    class Derived(type(pc.checkpoint_modules(Attention(), ""))):  # type: ignore[misc]
        pass

    text = r"^checkpoint_modules: Derived is a subclass of a checkpointed class and has no plain form$"
    with pytest.raises(TypeError, match=text):
        pc.checkpoint_modules(Derived(), ())


def test_a_class_derived_from_a_converted_one() -> None:
    """FSDP derives one from the class of each module that it shards."""
    model = pc.convert(nn.Sequential(nn.Conv2d(3, 3, 1), Attention()))
    model[1].__class__ = type("Derived", (type(model[1]),), {})
    assert "1" in pc.convert_report(model).converted
    assert type(copy.deepcopy(model)[1]) is type(model[1])
    pc.convert(model)
    before = [type(module) for module in model.modules()]
    with pytest.raises(TypeError, match=r"^revert: Derived is a subclass of a converted class and has no plain form$"):
        pc.revert(model)
    assert [type(module) for module in model.modules()] == before
    pc.checkpoint_modules(model, "1")
    assert names(model[1]) == ["_Checkpointed"]


def test_a_forward_that_somebody_wraps_later() -> None:
    """Profilers and accelerate put a function around a module's forward, on the instance."""
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    expected = model(torch.ones(4, 3, 8, 8))
    pc.microbatch_modules(model, "0", 2)
    inner, calls = model[0].forward, []

    def outer(x: Tensor) -> Tensor:
        calls.append(len(x))
        return inner(x)

    model[0].forward = outer
    torch.testing.assert_close(model(torch.ones(4, 3, 8, 8)), expected)
    assert calls == [4]


def test_hooks_of_subclasses_hear_of_derived_classes_alone() -> None:
    """Registries list the classes that somebody wrote."""
    heard: list[type] = []

    class Listed(nn.Module):
        def __init_subclass__(cls, *, listed: bool = True) -> None:
            super().__init_subclass__()
            heard.append(cls)

    class Net(Listed, listed=True):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x)

    model = pc.checkpoint_modules(pc.convert(Net()), "")
    assert heard == [Net] and names(model) == ["LeanCode", "_Checkpointed"]
    Derived = type("Derived", (type(model),), {})
    assert heard == [Net, Derived]


class Slots:
    __slots__ = ()


class Mixin:
    def forward(self, x: Any) -> Any:
        return torch.relu(self.c(x))  # type: ignore[attr-defined]


BEFORE: list[tuple[Any, ...]] = [
    (Mixin, nn.Module), (Mixin, abc.ABC, nn.Module), (abc.ABC, Mixin, nn.Module), (Slots, Mixin, nn.Module),
    (Mixin, Slots, nn.Module), (Mixin, typing.Generic[typing.TypeVar("T")], nn.Module), (Mixin, nn.Module, abc.ABC),
    (type("Inner", (abc.ABC, Mixin), {}), nn.Module), (Slots, type("Inner", (Mixin, nn.Module), {})),
    (type("Inner", (Slots, Mixin, nn.Module), {}), abc.ABC),
]  # fmt: skip


@pytest.mark.parametrize("bases", BEFORE, ids=str)
def test_classes_that_python_lets_nobody_change(bases: tuple[Any, ...]) -> None:
    """They are left alone, or refused with nothing changed."""
    cls = types.new_class("Odd", bases)

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        odd: Any = cls()
        odd.c = nn.Conv2d(3, 3, 1)
        return nn.Sequential(nn.Conv2d(3, 3, 1), odd, nn.ReLU())

    kind = wrapped_class(cls, [LeanCode])
    one: Any = cls()
    with contextlib.suppress(TypeError):
        set_class(one, kind)
    fixed = type(one) is cls
    assert (keeps_its_class(cls) is not None) == fixed

    model, x = made(), torch.randn(1, 3, 8, 8)
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pc.convert(model)
    left = pc.convert_report(model).left
    assert ("Python cannot change the class of a Odd" in left.get("1", "")) == fixed
    assert torch.allclose(model(x), expected)
    model = made()
    for call in (pc.checkpoint_modules, pc.tile_modules, lambda m, which: pc.microbatch_modules(m, which, 2)):
        if fixed:
            with pytest.raises(TypeError, match="'1': Python cannot change the class of a Odd: it has "):
                call(model, ("0", "1"))
            assert type(model[0]) is nn.Conv2d and type(model[1]) is cls
        else:
            call(model, ("0", "1"))
    assert torch.allclose(model(x), expected)


def test_a_layer_that_python_lets_nobody_change_is_left_alone() -> None:
    model = nn.Sequential(types.new_class("Odd", (abc.ABC, nn.Conv2d))(3, 3, 1), nn.ReLU())
    with pytest.warns(UserWarning, match="Python cannot change the class of a Odd"):
        pc.convert(model)
    assert type(model[0]).__name__ == "Odd" and isinstance(model[1], pc.ReLU)
