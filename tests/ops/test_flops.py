"""torch.utils.flop_counter.FlopCounterMode counts a converted model as it counts the stock one."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from support.conv_calls import backward_arguments
from support.pairs import pairwise
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import patchconv_native as pc

KINDS = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


def count(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def train(model: nn.Module, x: torch.Tensor):
    return lambda: model(x).sum().backward()


@pairwise(
    kind=KINDS, splits=[None, 2], batched=[True, False],
    arguments=[{}, {"stride": 2, "padding": 1}, {"groups": 2, "bias": False}, {"dilation": 2, "groups": 2}],
)  # fmt: skip
def test_modules(device, kind, splits, batched, arguments):
    x = torch.randn(*[3] * batched, 4, *[9] * int(kind[-2]), device=device)
    model = nn.Sequential(getattr(nn, kind)(4, 6, 3, **arguments)).to(device)
    expected = [count(lambda: model(x)), count(train(model, x)), count(train(model, x.clone().requires_grad_()))]
    pc.convert(model, splits=splits)
    found = [count(lambda: model(x)), count(train(model, x)), count(train(model, x.clone().requires_grad_()))]
    assert found == expected and 0 < found[0] < found[1] < found[2]
    assert pc.last_path()["path"] == ("stock" if splits is None else "tiled")


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, "same", (2, 1)])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_padding(mode, padding):
    x = torch.randn(2, 4, 9, 8)
    model = nn.Conv2d(4, 6, (4, 3), padding=padding, padding_mode=mode)
    expected = count(train(model, x.requires_grad_()))
    assert count(train(pc.convert(model, splits=2), x)) == expected > 0


@pairwise(dims=[1, 2, 3], transposed=[False, True], mask=list(itertools.product([True, False], repeat=3)))
def test_backward_operators(dims, transposed, mask):
    weight = (4, 3) if transposed else (6, 2)
    x, w = torch.randn(2, 4, *[9] * dims), torch.randn(*weight, *[3] * dims)
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    ops = torch.ops.patchconv
    grad = torch.ones_like(getattr(ops, name)(x, w, None, 2, 1, groups=2))
    stock = torch.ops.aten.convolution_backward
    twos, ones, zeros = ([number] * dims for number in (2, 1, 0))
    expected = count(lambda: stock(grad, x, w, [6], twos, ones, ones, transposed, zeros, 2, list(mask)))
    # What is not needed is not kept for the backward pass: shapes must do.
    given = (grad, x if mask[1] else None, w if mask[0] else None, x.shape, w.shape, mask)
    ours = backward_arguments(*given, stride=2, padding=1, groups=2, transposed=transposed)
    assert count(lambda: ops._convolution_backward(*ours)) == expected
    assert (expected > 0) == (mask[0] or mask[1])


def test_a_model_module_by_module():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, stride=2)))
    tables = []
    for change in (pc.revert, pc.convert):
        change(model)
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(2, 3, 9, 9)).sum().backward()
        tables.append({name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()})
    assert tables[0] == tables[1] and set(tables[0]) >= {"Global", "Sequential.0", "Sequential.1.1"}


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("first", ["patchconv_native", "torch.utils.flop_counter"])
def test_whichever_is_imported_first(first):
    code = f"""
import sys, {first}
import patchconv_native as pc, torch
early = "torch.utils.flop_counter" in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    pc.Conv2d(1, 1, 3)(torch.ones(1, 1, 5, 5))
hooks = [finder for finder in sys.meta_path if type(finder).__module__.startswith("patchconv_native")]
print(early, counter.get_total_flops(), hooks)
"""
    # Importing this package does not import the counter, which imports triton.
    assert run(code).split() == [str(first != "patchconv_native"), str(2 * 9 * 9), "[]"]


def test_registering_twice_changes_nothing():
    from torch.utils.flop_counter import flop_registry

    before = dict(flop_registry)
    pc.flops.register()
    assert flop_registry == before
