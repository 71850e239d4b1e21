"""convert and revert: classes change in place, everything that held on to the model goes on holding."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
from support.copies import COPIES, OwnReduce, saved_and_loaded
from support.gradients import graded
from torch import nn

import patchconv_native as pc

KINDS = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


def network() -> nn.Sequential:
    return nn.Sequential(OrderedDict(
        stem=nn.Conv2d(3, 8, 3, stride=2, padding=1),
        body=nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2)),
        up=nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1), head=nn.Conv2d(4, 2, 1, bias=False),
    ))  # fmt: skip


class OwnForward(nn.Conv2d):
    """Weight standardisation: a subclass that does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(x, w, self.bias)


class OwnInnerForward(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return 2 * super()._conv_forward(input, weight, bias)


class OnlyNamed(nn.Conv2d):
    """A subclass that changes nothing about the computation."""


class OwnState(nn.Conv2d):
    """Leaves out of copies and pickles what cannot or need not be in them."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.cache = lambda: 0
        self.kept = "kept"

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "cache"}


class OwnShortState(nn.Conv2d):
    """A state of its own make, in which splits have no place, and a module built anew from it."""

    def __getstate__(self):
        return {"sizes": (self.in_channels, self.out_channels, self.kernel_size), "tensors": self.state_dict()}

    def __setstate__(self, state):
        nn.Conv2d.__init__(self, *state["sizes"])
        self.load_state_dict(state["tensors"])


class OwnReduceByName(nn.Conv2d):
    def __reduce_ex__(self, protocol):
        return OwnReduceByName, (self.in_channels, self.out_channels, self.kernel_size)


class OwnSplits(nn.Conv2d):
    splits = "mine"


class OwnSplitsOfTheInstance(nn.Conv2d):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.splits = "mine"


class OwnSplitsBuffer(nn.Conv2d):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("splits", torch.zeros(2))


def image(device: str = "cpu") -> torch.Tensor:
    return torch.randn(2, 3, 16, 18, device=device)


@pytest.mark.parametrize("splits", [None, 2, (2, 3)])
def test_same_numbers(device, splits):
    model = network().to(device).eval()
    x = image(device)
    expected = model(x)
    assert pc.convert(model, splits=splits) is model
    with pc.record_paths() as records:
        found = model(x)
    torch.testing.assert_close(found, expected)
    assert [r["op"] for r in records] == ["conv2d", "conv2d", "conv_transpose2d", "conv2d"]
    assert {r["path"] for r in records} == ({"stock"} if splits is None else {"tiled"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [None, 2])
def test_every_kind(kind, splits):
    """A layer alone is its own model."""
    layer = getattr(nn, kind)(2, 3, 3, stride=2, padding=1)
    x = torch.randn(1, 2, *[8] * int(kind[-2]))
    expected = layer(x)
    assert pc.convert(layer, splits=splits) is layer
    assert type(layer) is getattr(pc, kind) and layer.splits == splits
    torch.testing.assert_close(layer(x), expected)
    assert pc.revert(layer) is layer
    assert type(layer) is getattr(nn, kind) and "splits" not in vars(layer)
    assert torch.equal(layer(x), expected)


def test_parameters_are_the_same_objects():
    model = network()
    before = {name: id(p) for name, p in model.named_parameters()}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modules = {name: id(m) for name, m in model.named_modules()}
    for change in (pc.convert, pc.revert):
        change(model)
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert {name: id(m) for name, m in model.named_modules()} == modules
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_revert_leaves_nothing_behind():
    model, untouched = network(), network()
    untouched.load_state_dict(model.state_dict())
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    pc.revert(pc.convert(model, splits=(2, 2)))
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert [type(m) for m in model.modules()] == [type(m) for m in untouched.modules()]
    assert repr(model) == repr(untouched)


def test_idempotent():
    model = pc.convert(network(), splits=2)
    kinds = [type(m) for m in model.modules()]
    pc.convert(model, splits=2)
    assert [type(m) for m in model.modules()] == kinds and model.stem.splits == 2
    pc.convert(model, splits=5)
    assert model.stem.splits == 5, "a second call with other splits sets them"
    pc.revert(pc.revert(model))
    assert type(model.stem) is nn.Conv2d


def test_revert_leaves_modules_that_were_built_as_ours():
    """revert undoes convert; what its owner built as pc.Conv2d is not convert's work."""
    model = nn.Sequential(pc.Conv2d(3, 3, 3, splits=4), nn.Conv2d(3, 3, 3))
    pc.revert(pc.convert(model, splits=2))
    assert type(model[1]) is nn.Conv2d
    assert type(model[0]) in (pc.Conv2d, nn.Conv2d)
    assert torch.isfinite(model(torch.randn(1, 3, 9, 9))).all()


def test_patch_convs_name():
    model = network()
    assert pc.convert_model(model) is model
    assert {m.splits for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)} == {4}
    assert pc.convert_model(network(), splits=7).stem.splits == 7


def test_subclasses_with_their_own_forward_are_left_alone_and_reported(device):
    model = nn.Sequential(OwnForward(3, 4, 3), OwnInnerForward(4, 4, 3), nn.Conv2d(4, 2, 3), nn.ReLU()).to(device)
    x = image(device)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"left 2 convolutions alone: 0: OwnForward .*; 1: OwnInnerForward "):
        pc.convert(model, splits=2, functional=False)
    assert [type(m) for m in model] == [OwnForward, OwnInnerForward, pc.Conv2d, pc.ReLU]
    torch.testing.assert_close(model(x), expected)
    text = str(pc.convert_report(model))
    assert "  0: left alone: OwnForward computes its forward itself" in text
    assert "  1: left alone: OwnInnerForward computes its forward itself" in text
    assert "  2: Conv2d" in text


def test_what_subclasses_compute_themselves_is_converted_as_functional_code():
    model = nn.Sequential(OwnForward(3, 4, 3), OwnInnerForward(4, 4, 3), OwnSplits(4, 2, 3)).double()
    x = image().double()
    expected = model(x)
    with pytest.warns(
        UserWarning, match=r"convert gave no splits to convolutions with a forward of their own: 0, 1, 2$"
    ):
        pc.convert(model, splits=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pc.convert(model)
    assert pc.convert_report(model).converted == {"0": "OwnForward", "1": "OwnInnerForward", "2": "OwnSplits"}
    torch.testing.assert_close(model(x), expected)
    for module in model:
        with pc.workspace_limit(2**16), pc.record_paths() as paths:
            big = torch.randn(1, module.in_channels, 128, 128, dtype=torch.float64)
            y = module(big)
        assert paths[-1]["path"] == "tiled"
        torch.testing.assert_close(pc.revert(module)(big), y)


def test_a_subclass_that_changes_nothing_keeps_its_type():
    """Whatever is decided about such a class, isinstance goes on working and the numbers stay."""
    model = nn.Sequential(OnlyNamed(3, 4, 3))
    x = image()
    expected = model(x)
    pc.convert(model, splits=2)
    assert isinstance(model[0], OnlyNamed)
    torch.testing.assert_close(model(x), expected)
    pc.revert(model)
    assert type(model[0]) is OnlyNamed


def test_a_forward_set_on_the_instance_is_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model[0].forward = lambda x: x + 1  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=r"left 1 convolution alone: 0: "):
        pc.convert(model)
    x = image()
    assert torch.equal(model(x), x + 1)
    assert type(model[0]) is nn.Conv2d
    assert list(pc.convert_report(model).left) == ["0"]


def test_lazy_modules_are_left_alone():
    model = nn.Sequential(nn.LazyConv2d(4, 3))
    with pytest.warns(UserWarning, match=r"0: LazyConv2d has no weight yet"):
        pc.convert(model)
    assert type(model[0]) is nn.LazyConv2d
    model(image())
    assert type(model[0]) is nn.Conv2d
    assert type(pc.convert(model)[0]) is pc.Conv2d


def test_report():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Sequential(nn.Conv1d(3, 3, 3)), nn.PixelShuffle(2), nn.Fold(3, 3))
    before = str(pc.convert_report(model))
    pc.convert(model, splits=3)
    text = str(pc.convert_report(model))
    assert text != before
    assert "Conv2d" in text and "Conv1d" in text and "1.0" in text
    assert before.splitlines()[0] == "0 layers converted, 2 left alone, 1 with nothing to gain"
    assert text.splitlines()[0] == "2 layers converted, 0 left alone, 1 with nothing to gain"
    assert str(pc.convert_report(model[0])).splitlines()[0] == "1 layer converted, 0 left alone, 0 with nothing to gain"
    assert "  2: nothing to gain: stock saves only sizes" in text
    assert "Fold" not in text, "what this package has no layer for needs no mention"
    assert max(len(line) for line in text.splitlines()) <= 120


def test_tied_modules(device):
    """One module under two names is converted once and stays one module, with a reference back to the model."""
    shared = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": shared}).to(device)
    shared.owner = [model]
    pc.convert(model, splits=2)
    assert model["a"] is model["b"][0] is model["c"] is shared
    assert type(shared) is pc.Conv2d
    x = image(device)
    expected = nn.Conv2d.forward(shared, x)
    for found in (model["a"](x), model["b"](x), model["c"](x)):
        torch.testing.assert_close(found, expected)
    pc.revert(model)
    assert type(model["c"]) is nn.Conv2d


def test_hooks_survive(device):
    model = network().to(device)
    seen: list[str] = []
    model.stem.register_forward_hook(lambda *_: seen.append("forward"))
    model.stem.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.body[1].register_forward_hook(lambda *_: seen.append("ReLU"))
    model.head.register_full_backward_hook(lambda *_: seen.append("backward"))
    pc.convert(model, splits=2)
    model(image(device)).sum().backward()
    pc.revert(model)
    model(image(device)).sum().backward()
    assert seen == ["pre", "forward", "ReLU", "backward"] * 2


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_optimizers_go_on(device, optimizer):
    """Two training steps around a conversion, and two without one, end at the same parameters."""
    runs = []
    for changes in ([partial(pc.convert, splits=2), pc.revert, nn.Module.train], [nn.Module.train] * 3):
        torch.manual_seed(0)
        net = network().to(device).double()
        steps = getattr(torch.optim, optimizer)(net.parameters(), lr=0.01)
        for change in changes:
            steps.zero_grad()
            net(image(device).double()).square().mean().backward()
            steps.step()
            change(net)
        runs.append(net.state_dict())
    torch.testing.assert_close(*runs)


@pytest.mark.parametrize("converted_first", [True, False])
def test_parametrizations(device, converted_first):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)).to(device)
    x = image(device)
    expected = model(x)
    steps = [lambda: pc.convert(model, splits=2), lambda: nn.utils.parametrizations.weight_norm(model[0])]
    for step in steps if converted_first else steps[::-1]:
        step()
    with pc.record_paths() as records:
        torch.testing.assert_close(model(x), expected)
    assert [r["path"] for r in records] == ["tiled"]
    for undo in steps[::-1] if converted_first else steps:
        if undo is steps[0]:
            pc.revert(model)
        else:
            nn.utils.parametrize.remove_parametrizations(model[0], "weight")
            assert type(model[0]) is (pc.Conv2d if converted_first else nn.Conv2d)
        torch.testing.assert_close(model(x), expected)
    assert type(model[0]) is nn.Conv2d


@pytest.mark.parametrize("copied", COPIES.values(), ids=list(COPIES))
@pytest.mark.parametrize("kind", [nn.Conv2d, OnlyNamed, OwnState, OwnShortState, OwnReduce, OwnReduceByName])
def test_copies_of_converted_layers_are_made_as_their_class_makes_them(kind, copied):
    layer = kind(3, 4, 3)
    torch.manual_seed(0)
    stock = copied(layer)
    pc.convert(layer, splits=2)
    torch.manual_seed(0)
    other = copied(layer)
    assert type(other) is type(layer) is not kind and isinstance(other, kind) and other.splits == 2
    assert set(vars(other)) == set(vars(stock)) | {"_splits"}
    assert hasattr(other, "cache") == hasattr(stock, "cache") and hasattr(other, "kept") == hasattr(stock, "kept")
    x = image()
    torch.testing.assert_close(other(x), stock(x))
    assert pc.last_path()["path"] == "tiled"
    pc.revert(other)
    assert type(other) is kind and set(vars(other)) == set(vars(stock))
    assert layer.splits == 2, "the copy's revert is the copy's"


def test_a_tied_subclass_stays_tied_in_copies():
    shared = OwnState(3, 3, 3)
    shared.owner = [shared]
    for copied in (copy.deepcopy, saved_and_loaded):
        other = copied(pc.convert(nn.Sequential(shared, shared), splits=2))
        assert other[0] is other[1] is other[0].owner[0] is not shared


def test_a_look_at_a_weight_does_not_move_what_makes_it() -> None:
    """A spectral norm takes a step with every call in training; convert, its report and explain make none."""
    conv = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3))
    before = {name: value.clone() for name, value in conv.state_dict().items()}
    model = pc.convert(nn.Sequential(conv))
    pc.convert_report(model)
    pc.explain((1, 3, 9, 9), model[0])
    assert all(torch.equal(value, before[name]) for name, value in conv.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", [nn.Conv2d, OnlyNamed, OwnState])
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("converted_first", [True, False])
def test_parametrized_modules_are_copied_but_not_pickled(kind, norm, converted_first):
    """As torch has it: deepcopy is served, pickling refused with a reason."""
    changes = [lambda m: pc.convert(m, splits=2), getattr(nn.utils.parametrizations, norm)]
    model = kind(3, 4, 3)
    for change in changes if converted_first else reversed(changes):
        change(model)
    model.eval()
    x = image()
    other = copy.deepcopy(model)
    assert torch.equal(other(x), model(x)) and pc.last_path()["path"] == "tiled"
    stream = io.BytesIO()
    for dump in (pickle.dumps, copy.copy, lambda m: torch.save(m, stream)):
        with pytest.raises(RuntimeError, match="Serialization of parametrized modules is only supported"):
            dump(model)


@pytest.mark.parametrize("kind", [OwnSplits, OwnSplitsOfTheInstance, OwnSplitsBuffer])
def test_a_subclass_with_splits_of_its_own_is_left_alone(kind):
    model = nn.Sequential(kind(3, 4, 3), nn.Conv2d(4, 4, 3))
    before = model[0].splits
    reason = f"{kind.__name__} has an attribute named splits of its own"
    with pytest.warns(UserWarning, match=f"left 1 convolution alone: 0: {reason}"):
        pc.convert(model, splits=2, functional=False)
    assert type(model[0]) is kind and model[0].splits is before and type(model[1]) is pc.Conv2d
    assert pc.convert_report(model).left == {"0": reason}
    pc.revert(model)
    assert model[0].splits is before


def test_bad_splits_change_nothing():
    """Also (rows, cols), which fits a Conv2d but not the Conv1d beside it."""
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv1d(3, 3, 3))
    for bad in (0, (2, 0), "2", (1, 2, 3, 4), (2, 2)):
        with pytest.raises((ValueError, TypeError), match=r"expected .*splits"):
            pc.convert(model, splits=bad)
        assert [type(m) for m in model] == [nn.Conv2d, nn.Conv1d]


def test_not_a_module():
    for call in (pc.convert, pc.revert, pc.convert_report):
        with pytest.raises(TypeError, match=f"^{call.__name__}: expected model to be a torch.nn.Module, got int$"):
            call(3)


def test_a_resnet(device):
    """In tiles, in training and then in eval mode."""
    resnet = pytest.importorskip("torchvision.models.resnet", reason="torchvision is not installed")
    torch.manual_seed(0)
    model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1]).to(device).double()
    other = copy.deepcopy(model)
    pc.convert(model, splits=(3, 2))
    x = torch.randn(2, 3, 64, 64, device=device, dtype=torch.float64)
    torch.testing.assert_close(graded(model, x), graded(other, x))
    with pc.record_paths() as records:
        found = model.eval()(x[:1])
    # The last stages are 2 rows high and still cut; every convolution here can be.
    assert [r["path"] for r in records] == ["tiled"] * 12
    torch.testing.assert_close(found, other.eval()(x[:1]))
    pc.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in other.modules()]
