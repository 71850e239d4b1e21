"""What is remembered of operators on fake tensors is what they give when they are asked again."""

import pytest
import torch
from support.modules import of_torchvision
from support.pairs import FULL
from torch import Tensor
from torch.utils._pytree import tree_leaves

import patchconv_native as pc
from bench.whole_models import UNet
from patchconv_native.memory import recipes
from patchconv_native.memory.fake import FakeMode


def described(result, args):
    """Metadata of the results, and of which argument each one is a view."""
    found = [isinstance(result, list)]
    for one in tree_leaves(result):
        if isinstance(one, Tensor):
            memory = one.untyped_storage()
            shared = [isinstance(arg, Tensor) and arg.untyped_storage()._cdata == memory._cdata for arg in args]
            layout = one.shape, one.stride(), one.storage_offset(), memory.nbytes()
            found.append((layout, one.dtype, one.fake_device, one.requires_grad, shared))
        else:
            found.append(one)
    return found


@pytest.fixture
def asked_again(monkeypatch):
    """How many calls were asked again; those that change an argument's metadata are not in what is remembered."""
    counted = [0]
    real = recipes.made

    def made(mode, recipe, args):
        found = real(mode, recipe, args)
        func, kwargs = mode.asked
        expected = mode._computed(func, (), args, kwargs)
        assert described(found, args) == described(expected, args), func
        counted[0] += 1
        return found

    key_of = recipes.key_of

    def remembering(func, args, kwargs):
        FakeMode.asked = func, kwargs
        return key_of(func, args, kwargs)

    monkeypatch.setattr(FakeMode, "asked", None, raising=False)
    monkeypatch.setattr(recipes, "made", made)
    monkeypatch.setattr(recipes, "key_of", remembering)
    return counted


MODELS = {
    "resnet18": lambda: of_torchvision("resnet18"), "unet": lambda: UNet(),
    "mobilenet": lambda: of_torchvision("mobilenet_v3_small"),
    "swin": lambda: of_torchvision("swin_t"),
}  # fmt: skip


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("name", MODELS if FULL else ["resnet18", "unet"])
def test_of_training_steps(name, last, asked_again):
    model = MODELS[name]()
    x = torch.randn(2, 3, 64, 64)
    if last:
        model, x = (one.to(memory_format=torch.channels_last) for one in (model, x))
    for converted in (False, True):
        if converted:
            pc.convert(model)
        pc.memory.trace(model, x, fake=True)
        if FULL:
            pc.memory.trace(model, x, fake=True, amp=torch.bfloat16)
    assert asked_again[0] > 500


def test_of_plans(asked_again):
    model = UNet() if FULL else torch.nn.Sequential(*UNet().down)
    with pytest.raises(pc.BudgetError):
        pc.tile_plan(model, torch.randn(2, 3, 64, 48), budget=1)
    assert asked_again[0] > 1000


def test_results_depend_on_settings():
    x = torch.randn(2, 8, 16, 16)
    conv = torch.nn.Conv2d(8, 8, 3)
    peaks = []
    for enabled in (True, False, True):
        with torch.backends.mkldnn.flags(enabled=enabled):
            peaks.append(pc.memory.trace(conv, x, fake=True).peak)
    assert peaks[0] == peaks[2] != peaks[1]


def test_no_more_are_kept_than_said(monkeypatch):
    monkeypatch.setattr(recipes, "MOST", 8)
    pc.memory.trace(UNet(), torch.randn(1, 3, 32, 32), fake=True)
    assert len(recipes._known) <= 8


def test_a_result_that_is_given_is_that_one():
    with FakeMode():
        x, out = torch.empty(4, 4), torch.empty(4, 4)
        for _ in range(2):
            made = torch.ops.aten.clamp_min.out(x, 0, out=out)
            assert made.untyped_storage()._cdata == out.untyped_storage()._cdata
            assert torch.ops.aten.relu_.default(x) is x


def test_a_real_tensor_has_one_fake_while_it_stays_as_it_is():
    mode, weight = FakeMode(), torch.nn.Parameter(torch.randn(4, 3))

    def width():
        with mode, torch.no_grad():
            return torch.nn.functional.linear(torch.empty(5, 3), weight).shape[1]

    assert width() == 4
    made = mode._of_real[weight]
    assert width() == 4 and mode._of_real[weight] is made
    weight.data = torch.randn(6, 3)
    assert width() == 6 and mode._of_real[weight] is not made
