"""`lean()` and convert: functional code saves less, computes the same, and is left as it was after."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.activations import ROWS
from support.gradients import graded
from support.threads import on_threads
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import patchconv_native as pc

CALLS: dict[str, Any] = {
    f"F.{name} {arguments}": functools.partial(lambda x, row, given: row.function(x, *given), row=row, given=arguments)
    for name, row in ROWS.items() for arguments in row.arguments
} | {
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "torch.relu": lambda x: torch.relu(x), "Tensor.relu": lambda x: x.relu(), "torch.relu_": lambda x: torch.relu_(x),
    "Tensor.relu_": lambda x: x.relu_(),
    "F.leaky_relu_": lambda x: F.leaky_relu_(x, 0.2),
    "F.hardtanh_": lambda x: F.hardtanh_(x, -0.5, 0.5),
    "F.threshold_": lambda x: F.threshold_(x, 0.1, 2.0),
    "torch.sigmoid": lambda x: torch.sigmoid(x), "Tensor.sigmoid": lambda x: x.sigmoid(),
    "torch.tanh": lambda x: torch.tanh(x), "Tensor.tanh": lambda x: x.tanh(),
    "torch.hardshrink": lambda x: torch.hardshrink(x, 0.3), "Tensor.hardshrink": lambda x: x.hardshrink(0.3),
    "F.prelu": lambda x: F.prelu(x, torch.full((4,), 0.3).to(x)),
    "F.max_pool2d": lambda x: F.max_pool2d(x, 2),
    "F.max_pool2d by name": lambda x: F.max_pool2d(input=x, kernel_size=3, stride=1, padding=1),
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, 2),
    "F.adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (3, None)),
    "F.avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "F.adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, None)),
    "F.max_pool1d": lambda x: F.max_pool1d(x[0], 2), "F.avg_pool1d": lambda x: F.avg_pool1d(x[0], 2),
    "F.batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "torch.batch_norm": lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, True),
    "F.group_norm": lambda x: F.group_norm(x, 2), "F.layer_norm": lambda x: F.layer_norm(x, (6,)),
    "torch.layer_norm": lambda x: torch.layer_norm(x, (6,)), "torch.group_norm": lambda x: torch.group_norm(x, 2),
    "F.instance_norm": lambda x: F.instance_norm(x), "F.rms_norm": lambda x: F.rms_norm(x, (6,)),
    "F.local_response_norm": lambda x: F.local_response_norm(x, 3),
    "torch.cat": lambda x: torch.cat([x, x * 2], 1), "torch.cat by name": lambda x: torch.cat(tensors=(x, x), dim=1),
    "torch.concat axis": lambda x: torch.concat([x, x], axis=1),
    "x + y": lambda x: x + x.flip(0), "x + 1": lambda x: x + 1, "1 + x": lambda x: 1 + x,
    "x += y": lambda x: iadd(x, x.flip(0)),
    "torch.add alpha": lambda x: torch.add(x, x.flip(0), alpha=2), "x.add_": lambda x: x.add_(x.flip(0)),
    "x * y": lambda x: x * x.flip(0), "x * 2": lambda x: x * 2,
    "broadcast": lambda x: x * x.mean((2, 3), keepdim=True) + x[:1],
    "torch.mul": lambda x: torch.mul(x, x.flip(0)), "x.mul": lambda x: x.mul(x.flip(0)),
    "F.glu": lambda x: F.glu(x), "F.glu of channels": lambda x: F.glu(input=x, dim=1),
    "torch._C._nn.glu": lambda x: torch._C._nn.glu(x, 1),
    "F.linear": lambda x: F.linear(x, torch.eye(6).to(x) + 1),
    "F.conv2d": lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3).to(x), padding="same"),
    "F.conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.ones(4, 4, 3, 3).to(x)),
    "F.interpolate": lambda x: F.interpolate(x, scale_factor=2), "F.upsample": lambda x: F.upsample(x, (7, 9)),
    "F.interpolate by name": lambda x: F.interpolate(input=x, size=[7, 3], mode="bicubic", align_corners=False),
    "F.interpolate area": lambda x: F.interpolate(x, 3, mode="area"),
    "F.interpolate smoothed": lambda x: F.interpolate(x, 3, mode="bilinear", antialias=True),
    "F.pad": lambda x: F.pad(x, (1, 2)), "F.pad reflect": lambda x: F.pad(x, (1, 2, 0, 3), mode="reflect"),
    "F.pad value": lambda x: F.pad(input=x, pad=(1, -2), value=3.0),
    "F.dropout in eval": lambda x: F.dropout(x, 0.4, training=False),
}  # fmt: skip
STOCK_DOES_IT = {
    "x + 1", "1 + x", "x * 2", "F.dropout in eval", "F.conv2d", "F.conv_transpose2d", "F.local_response_norm",
    "F.interpolate area", "F.interpolate smoothed",
}  # fmt: skip


def iadd(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


def image(device: str = "cpu") -> Tensor:
    torch.manual_seed(4)
    return torch.randn(2, 4, 6, 6, device=device, dtype=torch.float64, requires_grad=True)


@pytest.mark.filterwarnings("ignore:.*upsample.*deprecated")
@pytest.mark.parametrize("name", CALLS)
def test_the_same_values_and_gradients(name):
    found = []
    for block in (torch.enable_grad(), pc.lean()):
        x = image()
        inner = x * 1
        with block:
            y = CALLS[name](inner)
        if isinstance(block, pc.lean) and name not in STOCK_DOES_IT:
            assert "patchconv" in (y.grad_fn.name() + "".join(n.name() for n, _ in y.grad_fn.next_functions if n)), name
        torch.manual_seed(2)
        found.append((y, *torch.autograd.grad(y, x, torch.randn_like(y))))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*upsample.*deprecated")
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_autocast_chooses_the_same_dtypes(device, name, given):
    found = []
    for block in (torch.enable_grad(), pc.lean()):
        x = image(device).to(given).detach().requires_grad_()
        with torch.autocast(device, torch.bfloat16), block:
            try:
                y = CALLS[name](x * 1)
            except RuntimeError:
                # A dtype that stock does not mix or serve (a functional call's own weights are float64 here, say).
                y = x = None
        weight = None if x is None else torch.linspace(-1, 2, y.numel()).cos().view(y.shape).to(y)
        found.append([] if x is None else [y.detach(), *torch.autograd.grad(y, x, weight)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02 * float(want.abs().max()))


def test_dropout_is_drawn_from_the_generator():
    x = image()
    with pc.lean():
        torch.manual_seed(1)
        one = F.dropout(x, 0.5)
        torch.manual_seed(1)
        assert torch.equal(one, F.dropout(x, 0.5))
    assert one.grad_fn.name() == "patchconv::DropoutBackward"


def test_outside_of_the_block_nothing_is_changed():
    x, block = image(), pc.lean()
    with block:
        with block, pc.lean():
            pass
        assert "patchconv" in F.relu(x).grad_fn.name()
    assert "patchconv" not in F.relu(x).grad_fn.name()
    with pytest.raises(KeyError), pc.lean():
        raise KeyError
    assert "patchconv" not in F.relu(x).grad_fn.name()


def test_other_threads_are_not_concerned():
    with pc.lean():
        assert "patchconv" not in on_threads(lambda: F.relu(image()).grad_fn.name())[0]


def test_as_a_decorator():
    @pc.lean()
    def net(x: Tensor) -> Tensor:
        """doc"""
        return F.relu(x)

    assert net(image()).grad_fn.name() == "patchconv::ReluBackward" and net.__doc__ == "doc"
    with pytest.raises(TypeError, match=r"^lean: expected a function, got a generator function"):

        @pc.lean()
        def several() -> Any:
            yield F.relu(image())


def test_tensor_subclasses_and_transforms_go_to_stock():
    class Own(torch.Tensor):
        pass

    with pc.lean():
        assert isinstance(F.relu(image().as_subclass(Own)), Own)
        assert torch.func.vmap(F.relu)(image()).shape == (2, 4, 6, 6)
        given = (image().detach(),), (torch.ones(2, 4, 6, 6).double(),)
        values, tangents = torch.func.jvp(lambda t: F.silu(F.relu(t)), *given)
    assert values.shape == tangents.shape


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + x)


def test_arguments_that_stock_takes():
    x = image().detach()
    out = torch.empty_like(x)
    three = np.int64(3)
    calls: list[Any] = [
        lambda: torch.sigmoid(x, out=out), lambda: torch.tanh(x, out=out),
        lambda: torch.threshold(x, 0.1, 2.0, out=out), lambda: torch.hardshrink(x, out=out),
        lambda: torch._C._nn.log_sigmoid(x, out=out), lambda: torch._C._nn.softshrink(x, out=out),
        lambda: torch._C._nn.gelu(x, out=out), lambda: torch.add(x, x, alpha=2, out=out), lambda: torch.mul(x, 2),
        lambda: torch.cat([x, x], 1, out=torch.empty(0, dtype=x.dtype)), lambda: F.max_pool2d(x, three, three),
        lambda: F.avg_pool2d(x, three), lambda: F.group_norm(x[:, :, 0, 0], 4), lambda: F.pad(x, [1, 1], value=None),
    ]  # fmt: skip
    for call in calls:
        want = call().clone()
        with pc.lean():
            assert torch.equal(call(), want)


def test_a_subclass_sees_the_function_that_was_called():
    seen: list[Any] = []

    class Watching(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.randn(3).as_subclass(Watching)

    def calls() -> list[Any]:
        seen.clear()
        x + x, x.relu(), F.relu(x), torch.cat([x, x])
        return list(seen)

    want = calls()
    with pc.lean():
        assert calls() == want and len(want) == 4


def test_mistaken_arguments():
    with pytest.raises(TypeError, match=r"^lean: expected no argument: write `with pc.lean\(\):`, or `@pc.lean\(\)`"):
        pc.lean(F.relu)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with pytest.raises(TypeError, match=r"^convert: expected functional to be True or False, got 'yes'"):
        pc.convert(model, functional="yes")
    assert type(model[0]) is nn.Conv2d
    scripted = torch.jit.script(model)
    with pytest.warns(UserWarning, match=r"left 1 convolution alone: 0: a TorchScript module cannot change its class"):
        pc.convert(scripted)


def test_convert_functional_and_back():
    stock = nn.Sequential(Block(), Block(), nn.Conv2d(4, 2, 1)).double()
    model = pc.convert(copy.deepcopy(stock))
    assert isinstance(model[0], Block) and "Block" in str(pc.convert_report(model))
    x = image()
    torch.testing.assert_close(graded(model, x), graded(stock, x), rtol=1e-9, atol=1e-9)
    assert model[0](x).grad_fn.name() == "patchconv::ReluBackward"
    again = copy.deepcopy(model)
    assert again[0](x).grad_fn.name() == "patchconv::ReluBackward"
    pc.revert(model)
    assert type(model[0]) is Block and "patchconv" not in model[0](x).grad_fn.name()


def test_scripts_and_traces_of_a_converted_model():
    model, x = pc.convert(nn.Sequential(Block(), Block())).double().eval(), image()
    for made in (torch.jit.script(model), torch.jit.trace(model, x)):
        torch.testing.assert_close(made(x), model(x))
    assert "patchconv" not in torch.jit.script(pc.revert(model)).code


def test_residual_sums_are_made_again():
    """The sum in front of a block is not kept where batch norm and the sum before it give it."""
    model = pc.convert(nn.Sequential(*(Block() for _ in range(3)))).double()
    x = image()
    seen = []
    for block in model:
        block.register_forward_hook(lambda m, i, o: seen.append(StorageWeakRef(o.untyped_storage())))
    y = model(x)
    assert [reference.expired() for reference in seen] == [True, True, False]
    y.sum().backward()


def test_checkpointed_blocks_recompute_as_they_ran():
    from torch.utils.checkpoint import checkpoint

    model = pc.convert(nn.Sequential(Block(), Block())).double()
    x = image()
    want = graded(model, x)[1:]
    y = checkpoint(model[1], checkpoint(model[0], x, use_reentrant=False), use_reentrant=False)
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, want)


def test_in_place_behind_a_layer_that_cannot_be_made_again():
    """The input that is written over is copied first, as stock does."""
    stock = nn.Sequential(nn.Linear(6, 8), nn.Hardswish(inplace=True), nn.Linear(8, 2)).double()
    ours = pc.convert(copy.deepcopy(stock))
    x = image()
    torch.testing.assert_close(graded(ours, x), graded(stock, x))


class Outer(nn.Module):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        block = Block()
        self.first, self.last = block, Block()
        if compiled:
            self.first = torch.compile(block, backend="aot_eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.last(F.relu(self.first(x))))


def test_a_part_that_is_compiled():
    """Its graph is stock's, without breaks, and is not made again at the next call."""
    torch.manual_seed(0)
    stock = Outer(False).double()
    torch.manual_seed(0)
    model, x = pc.convert(Outer(True)).double(), image()
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        torch.testing.assert_close(graded(model, x), graded(stock, x), rtol=1e-9, atol=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert model.last(x).grad_fn.name() == "patchconv::ReluBackward"
