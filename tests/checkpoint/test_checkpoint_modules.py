"""checkpoint_modules: checkpoints by class, in every order with convert and revert."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.copies import COPIES, OwnReduce
from support.counts import saved_bytes
from support.errors import raises
from support.pairs import pairwise
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import patchconv_native as pc
from patchconv_native.checkpoint_modules import _Checkpointed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor, k: int = 1, fn: Any = torch.sin) -> Tensor:
        return x + k * fn(self.conv(F.relu(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(Block(), nn.Dropout(0.0), Block())
        self.extra = nn.ModuleList([nn.GELU()])
        self.head = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.extra[0](self.blocks(self.stem(x))))


def network() -> Net:
    torch.manual_seed(0)
    return Net().double()


def outcome(model: nn.Module) -> list[Tensor]:
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def checkpointed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _Checkpointed)]


STEPS: dict[str, Callable[[Net], Net]] = {
    "checkpoint": lambda m: pc.checkpoint_modules(m, Block),
    "layers": lambda m: pc.convert(m, functional=False),
    "convert": pc.convert,
    "revert": pc.revert,
    "undo": lambda m: pc.checkpoint_modules(m, ()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


@pairwise(first=list(STEPS), second=list(STEPS), third=list(STEPS))
def test_every_order(first, second, third):
    steps = first, second, third
    model: Any = network()
    keys = list(model.state_dict())
    for step in steps:
        model = STEPS[step](model)
    of_interest = [step for step in steps if step in ("checkpoint", "undo")]
    on = bool(of_interest) and of_interest[-1] == "checkpoint"
    assert checkpointed(model) == (["blocks.0", "blocks.2"] if on else [])
    conversions = [step for step in steps if step in ("layers", "convert", "revert")]
    converted = bool(conversions) and conversions[-1] != "revert"
    assert isinstance(model.blocks[0].norm, pc.BatchNorm2d) == converted
    lean = [kind.__name__ for kind in type(model.blocks[0]).__mro__]
    assert ("LeanCode" in lean) == ("convert" in _since(conversions))
    if on and "LeanCode" in lean:
        assert lean.index("_Checkpointed") < lean.index("LeanCode"), "lean() is inside of the checkpoint"
    assert isinstance(model.blocks[0], Block) and list(model.state_dict()) == keys
    torch.testing.assert_close(outcome(model), outcome(network()))
    assert type(pc.revert(pc.checkpoint_modules(model, ())).blocks[0]) is Block
    assert repr(model) == repr(network())


def _since(conversions: list[str]) -> list[str]:
    """What was converted after the last revert."""
    at = len(conversions) - conversions[::-1].index("revert") if "revert" in conversions else 0
    return conversions[at:]


@pytest.mark.parametrize(
    "which,names",
    [
        ("head", ["head"]),
        (("blocks.0", "stem"), ["stem", "blocks.0"]),
        (["blocks.0"], ["blocks.0"]),
        (nn.BatchNorm2d, ["blocks.0.norm", "blocks.2.norm", "head"]),
        ((nn.BatchNorm2d, nn.GELU), ["blocks.0.norm", "blocks.2.norm", "extra.0", "head"]),
        (lambda name, module: name.endswith("conv"), ["blocks.0.conv", "blocks.2.conv"]),
        ((), []),
        ([], []),
    ],
)
def test_which(which, names):
    model = pc.checkpoint_modules(network(), "stem")
    assert checkpointed(model) == ["stem"]
    assert pc.checkpoint_modules(model, which) is model
    assert checkpointed(model) == names, "these and no others"
    assert [type(m) for m in pc.checkpoint_modules(model, ()).modules()] == [type(m) for m in network().modules()]


def test_less_is_kept_and_without_gradients_nothing():
    def kept(model: nn.Module) -> int:
        return saved_bytes(lambda: model(torch.ones(2, 3, 9, 9, dtype=torch.float64)))

    assert kept(pc.checkpoint_modules(network(), "blocks")) < kept(network()) / 2
    with torch.no_grad():
        assert kept(pc.checkpoint_modules(network(), "blocks")) == 0
    model = pc.checkpoint_modules(network().eval(), "blocks")
    assert all(map(torch.equal, outcome(model), outcome(network().eval())))


def test_hooks_run_once_and_keywords_arrive():
    block = pc.checkpoint_modules(Block().double(), "")
    seen: list[str] = []
    block.register_forward_pre_hook(lambda *_: seen.append("pre"))
    block.register_forward_hook(lambda *_: seen.append("forward"))
    block.register_full_backward_hook(lambda *_: seen.append("backward"))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(pc.checkpoint_modules(copy.deepcopy(block), ()))
    # Keywords that have the names of checkpoint's own parameters are the module's.
    block(x, k=3, fn=torch.cos).sum().backward()
    assert seen == ["pre", "forward", "backward"]
    y = x.detach().requires_grad_()
    plain(y, k=3, fn=torch.cos).sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("order", list(itertools.permutations(["checkpoint", "norm", "convert"])), ids="-".join)
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized(order, norm):
    checkpoint, convert = partial(pc.checkpoint_modules, which=nn.Conv2d), partial(pc.convert, splits=2)
    steps = {"checkpoint": checkpoint, "norm": lambda m: norm(m[0]), "convert": convert}

    def make(*steps: Any) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)).double()
        for step in steps:
            step(model)
        return model

    model, expected = make(*(steps[name] for name in order)), make(steps["norm"])
    with pc.record_paths() as records:
        found = outcome(model)
    torch.testing.assert_close(found, outcome(expected))
    assert {r["path"] for r in records} == {"tiled"} and len([r for r in records if r["pass"] == "fprop"]) == 2
    other = copy.deepcopy(model)
    assert checkpointed(other) == ["0"]
    pc.checkpoint_modules(pc.revert(other), ())
    assert checkpointed(other) == [] and not isinstance(other[0], pc.Conv2d)
    torch.testing.assert_close(outcome(other), outcome(expected))
    parametrize.remove_parametrizations(model[0], "weight")
    assert checkpointed(model) == ["0"] and isinstance(model[0], pc.Conv2d)
    assert type(pc.checkpoint_modules(pc.revert(model), ())[0]) is nn.Conv2d


@pytest.mark.parametrize("copied", [COPIES[how] for how in ("copy", "deepcopy", "save", "pickle 0")])
@pytest.mark.parametrize("convert", [False, True])
def test_copies(copied, convert):
    for kind in (nn.Conv2d, OwnReduce):
        model = pc.checkpoint_modules(kind(3, 4, 3), "")
        if convert:
            pc.convert(model, splits=2)
        other = copied(model)
        assert type(other) is type(model) and isinstance(other, kind) and isinstance(other, _Checkpointed)
        assert getattr(other, "restored", False) == (kind is OwnReduce)
        assert type(pc.revert(pc.checkpoint_modules(other, ()))) is kind
        assert isinstance(model, _Checkpointed), "the copy's change is the copy's"


def test_report_and_script():
    model = pc.checkpoint_modules(network(), (nn.BatchNorm2d, nn.Conv2d, nn.GELU))
    plain = network()
    assert str(pc.convert_report(model)) == str(pc.convert_report(plain)) and len(checkpointed(model)) == 7
    pc.convert(model)
    pc.convert(plain)
    assert str(pc.convert_report(model)) == str(pc.convert_report(plain)) and len(checkpointed(model)) == 7
    scripted = torch.jit.script(pc.checkpoint_modules(pc.convert(nn.Sequential(nn.BatchNorm2d(3))), "0"))
    assert scripted(x := torch.ones(1, 3, 4, 4)).shape == x.shape


def test_errors_change_nothing():
    model = pc.checkpoint_modules(network(), "head")
    own = nn.ReLU()
    own.forward = lambda x: x  # type: ignore[method-assign]
    call, lazy, scripted = pc.checkpoint_modules, nn.Sequential(nn.LazyConv2d(4, 3)), torch.jit.script(nn.ReLU())
    name = "^checkpoint_modules"
    raises(ValueError, {
        f"{name}: expected which to name modules of the model, got 'tail'$": lambda: call(model, ("stem", "tail"))
    })  # fmt: skip
    for which in (3, (nn.Conv2d, "stem"), int, [3.5]):
        raises(TypeError, {f"{name}: expected which to be names of modules, .*, got ": partial(call, model, which)})
    raises(TypeError, {
        f"{name}: expected model to be a torch.nn.Module, got int$": lambda: call(3, ()),
        f"{name}, module 'extra': ModuleList has no forward$": lambda: call(model, ("stem", "extra")),
        f"{name}, module '0': LazyConv2d has no weight yet": lambda: call(lazy, "0"),
        f"{name}, module '': this ReLU was given a forward of its own$": lambda: call(own, ""),
        f"{name}, module '': a TorchScript module cannot change its class": lambda: call(scripted, ""),
    })  # fmt: skip
    with pytest.raises(ValueError, match=r"expected .*splits"):
        pc.convert(model, splits=0)
    assert checkpointed(model) == ["head"] and type(model.stem) is nn.Conv2d


def test_tied_modules():
    shared = nn.BatchNorm2d(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    pc.checkpoint_modules(model, "b.0")
    assert isinstance(model["a"], _Checkpointed) and model["a"] is model["b"][0]
