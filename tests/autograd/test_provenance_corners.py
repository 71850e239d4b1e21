"""Recompute by provenance where graphs are unusual: overlapping views, histories, freed nodes, failures, chains."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.counts import OperatorsSeen
from support.modules import Made
from support.threads import on_threads
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import patchconv_native as pc

lf = pc.functional


def image(device: str, *shape: int) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(shape or (2, 4, 6, 6), device=device, dtype=torch.float64, requires_grad=True)


def beside_stock(run: Callable[[Any], Any]) -> None:
    """run(module of functions) gives the same, or raises the same kind of error, with stock's functions and ours."""
    results = []
    for functions in (F, lf):
        torch.manual_seed(1)
        results.append(run(functions))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "unfold": lambda y: y.unfold(-1, 4, 1),
    "as_strided": lambda y: y.as_strided((2, 4, 5, 4), (144, 36, 6, 1)),
    "expand": lambda y: y[:, :, :1].expand(-1, -1, 5, -1),
    "diagonal": lambda y: y.diagonal(0, 2, 3),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_that_overlap(device, name):
    def run(f: Any) -> list[Tensor]:
        x = image(device)
        v = VIEWS[name](f.silu(x * 1))
        z = f.silu(v)
        w = torch.ones(3, z.shape[-1], device=device, dtype=torch.float64, requires_grad=True)
        y = f.linear(z, w)
        added = (lf.add if f is lf else torch.add)(v, z)
        return list(torch.autograd.grad(y.square().sum() + added.square().sum(), (x, w)))

    beside_stock(run)


@pytest.mark.parametrize("how", ["intermediate", "retain_grad", "hook", "view", "linear"])
def test_a_value_made_again_has_the_history_of_the_original(device, how):
    """Second derivatives with respect to an activation, or through hooks on it."""

    def run(f: Any) -> list[Tensor]:
        x, w = image(device), image(device, 3, 4, 3, 3)
        y = f.silu(x * 1)
        seen = y[:, :, 1:] if how == "view" else y
        if how == "hook":
            y.register_hook(lambda grad: 2 * grad)
        if how == "retain_grad":
            y.retain_grad()
        if how == "linear":
            v = image(device, 5, 6)
            z, parameter = f.linear(y, v), v
        else:
            z, parameter = (pc.functional if f is lf else F).conv2d(seen, w), w
        (gw,) = torch.autograd.grad(z.square().sum(), parameter, create_graph=True)
        if how == "hook":
            return list(torch.autograd.grad(gw.square().sum(), x))
        if how == "retain_grad":
            gw.square().sum().backward()
            return [y.grad, x.grad]
        return list(torch.autograd.grad(gw.square().sum(), (seen, x) if how == "view" else (y, x)))

    beside_stock(run)


def test_a_leaf_that_views_an_activation(device):
    """It has no edge to the activation's producer: it is saved."""

    def run(f: Any) -> list[Tensor]:
        x = image(device)
        y = f.silu(x * 1)
        with torch.no_grad():
            v = y[:, :]
        v.requires_grad_()
        z = f.silu(v)
        y.detach_()
        del y
        return list(torch.autograd.grad(z.sum(), v))

    beside_stock(run)


class OfTheSecond(torch.autograd.Function):
    """A view of its second argument, as full backward hooks of modules make them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return b.view_as(b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


def test_views_made_by_custom_functions_and_module_hooks(device):
    def run(f: Any) -> list[Tensor]:
        x, w = image(device), image(device, 3, 4, 3, 3)
        y = OfTheSecond.apply(x, f.silu(x * 1))
        z = (pc.functional if f is lf else F).conv2d(y, w)
        return list(torch.autograd.grad(z.square().sum(), (x, w)))

    beside_stock(run)

    torch.manual_seed(0)
    stock = Made(lambda m, h, skip: h.mean() + m.conv(skip), conv=nn.Conv2d(4, 4, 3).double()).to(device)
    gradients = []
    for module in (stock, pc.convert(copy.deepcopy(stock))):
        module.register_full_backward_hook(lambda *_: None)
        x = image(device)
        y = (F if module is stock else lf).silu(x * 1)
        gradients.append(torch.autograd.grad(module(x, y).square().sum(), (x, *module.parameters())))
    torch.testing.assert_close(*gradients)


RELEASED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda f, x: (lf.add if f is lf else torch.add)(x, x),
    "cat": lambda f, x: (lf.cat if f is lf else torch.cat)([x, x], 1),
    "pad": lambda f, x: f.pad(x, (1, 1)),
    "upsampling": lambda f, x: f.interpolate(x, scale_factor=2),
}


@pytest.mark.parametrize("name", RELEASED)
def test_what_keeps_nothing_serves_a_second_backward(device, name):
    def run(f: Any) -> list[Tensor]:
        x = image(device)
        h = RELEASED[name](f, x)
        (h * 2).sum().backward()
        (h * 3).sum().backward()
        return [x.grad]

    beside_stock(run)


def test_a_consumer_of_a_freed_producer_saves_its_input(device):
    def run(f: Any) -> list[Tensor]:
        x, w = image(device), image(device, 3, 4, 3, 3)
        y = f.silu(x * 1)
        y.sum().backward()
        return list(torch.autograd.grad((pc.functional if f is lf else F).conv2d(y, w).sum(), w))

    beside_stock(run)


@pytest.mark.parametrize("step", [lambda x: x + lf.relu(x) * 0, lambda x: x + x], ids=["x + relu(x)", "x + x"])
def test_chains_of_sums_take_linear_time(device, step):
    """A cost that doubled with each step would show before a length that does not end."""
    for length in (20, 22, 24, 26, 28, 30, 2000):
        started = time.process_time()
        x = image(device, 1, 1, 2, 2) * 1e-30
        with pc.lean():
            for _ in range(length):
                x = step(x) * 0.5
            pc.functional.conv2d(x, torch.ones(1, 1, 1, 1, dtype=x.dtype, device=device, requires_grad=True))
        assert time.process_time() - started < 5, length


@pytest.mark.parametrize(
    "make",
    [lambda p, q, c: torch.cat([p, q], 1) + c, lambda p, q, c: F.pad(torch.cat([p, q], 1), (1, 1))[..., 1:-1] + c,
     lambda p, q, c: torch.cat([p, q], 1) + torch.cat([q, p], 1) + c],
    ids=["cat and conv", "padded cat", "two cats"],
)  # fmt: skip
def test_no_more_is_kept_than_the_tensor_itself(device, make):
    """Where operands would take more than their sum, the sum is kept, and they are not."""
    x, w = image(device), image(device, 4, 4, 1, 1)
    with pc.lean():
        p, q = F.conv2d(x, w[:2] * 1), F.conv2d(x, w[2:] * 1)
        c = F.conv2d(x, w * 1)
        y = make(p, q, c)
        parts = [StorageWeakRef(t.untyped_storage()) for t in (p, q, c)]
        del p, q, c
        bytes_of_y = y.nbytes
        kept = StorageWeakRef(y.untyped_storage())
        z = F.conv2d(y, w)
        del y
        F.relu(x * 1)  # whatever was held for the next call is let go
    assert bytes_of_y > 0 and not kept.expired() and all(part.expired() for part in parts)
    z.sum().backward()


def test_a_failed_backward_leaves_nothing_behind(device):
    alive: list[weakref.ref[Any]] = []

    class Packed:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive.append(weakref.ref(self))

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("on purpose")

    for _ in range(5):
        x, w = image(device), image(device, 4, 4, 3, 3)
        with saved_tensors_hooks(Packed, lambda packed: packed.tensor.clone()):
            h = x * 1
            h.register_hook(fail)
            y = lf.sigmoid(pc.functional.conv2d(lf.silu(h), w, padding=1))
            z = pc.functional.conv2d(lf.relu(y), w)
        with pytest.raises(ValueError, match="on purpose"):
            z.sum().backward()
        del x, w, h, y, z
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_a_thread_that_ends_lets_go(device):
    references: list[StorageWeakRef] = []

    def work() -> None:
        x = image(device)
        h = x * 1
        references.append(StorageWeakRef(h.untyped_storage()))
        with pc.lean():
            c = torch.cat([h, x * 2], 1)
        h -= c[:, :4]

    for _ in range(3):
        on_threads(work)
    gc.collect()
    # join() can return a moment before the system has ended the thread.
    until = time.monotonic() + 30
    while not all(reference.expired() for reference in references):
        assert time.monotonic() < until, "what the thread's last sums held is still there"
        time.sleep(0.01)


def test_a_convolution_ends_the_hold_on_the_operands_of_a_concatenation(device):
    """What follows the convolution is no consumer of the concatenation: its operands are not kept for it."""
    x, w = image(device), image(device, 4, 8, 3, 3)
    one, two = lf.silu(x * 1), lf.silu(x * 2)
    alive = [weakref.ref(one), weakref.ref(two)]
    y = pc.functional.conv2d(lf.cat([one, two], 1), w, padding=1)
    del one, two
    y = lf.relu(lf.batch_norm(y, None, None, training=True))
    assert y.requires_grad and not [ref for ref in alive if ref() is not None]


def test_a_convolution_of_something_else_leaves_held_operands_alone(device):
    """An upsampled image's consumer saves the small image, whatever is computed between the two."""
    x, v, w = image(device), image(device, 4, 4, 3, 3), image(device, 4, 4, 3, 3)
    shapes: list[torch.Size] = []
    with saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):  # type: ignore[func-returns-value]
        small = x + 1
        large = lf.interpolate(small, scale_factor=4, mode="nearest")
        size = small.shape
        del small
        other = pc.functional.conv2d(torch.ones_like(x), v)
        shapes.clear()
        y = pc.functional.conv2d(large, w)
    assert other.requires_grad and y.requires_grad
    assert shapes == [size, w.shape]


def test_a_second_backward_is_refused_where_the_bias_alone_is_trained(device):
    x, w = image(device).detach(), image(device, 4, 4, 3, 3).detach()
    b = torch.zeros(4, dtype=x.dtype, device=device, requires_grad=True)
    y = pc.functional.conv2d(x, w, b).sum()
    y.backward()
    first = b.grad.clone()
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()
    assert torch.equal(b.grad, first)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_converted_code(device, reentrant):
    """A method that the model checkpoints runs again in backward, outside of the block."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Hardswish()

        def body(self, x: Tensor) -> Tensor:
            y = F.relu(self.norm(self.conv(x)))
            return F.silu(self.act(torch.cat([y, x], 1)))

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            return F.relu(checkpoint(self.body, x, use_reentrant=reentrant) if self.checkpointed else self.body(x))

        checkpointed = True

    torch.manual_seed(0)
    model = pc.convert(Model().double().to(device))
    found = []
    for checkpointed in (True, False):
        model.checkpointed = checkpointed
        x = image(device)
        torch.manual_seed(3)
        model(x).sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
    torch.testing.assert_close(*found)


def test_dropout_masks_agree_in_a_checkpoint_inside_of_lean(device):
    """x * mask: the gradient is the mask, which must be that of the forward pass."""
    for reentrant in (True, False):
        x = torch.ones(1000, device=device, requires_grad=True)
        with pc.lean():
            y = checkpoint(lambda t: F.dropout(t, 0.5), x * 1, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("inplace", [False, True])
def test_batch_norm_and_relu_are_made_again_in_one_pass(device, inplace):
    x = torch.randn(2, 4, 6, 6, device=device, requires_grad=True)
    w = torch.randn(3, 4, 3, 3, device=device, requires_grad=True)
    middle = lf.relu(lf.batch_norm(x, None, None, training=True), inplace=inplace)
    y = pc.functional.conv2d(middle, w, padding=1)
    want = middle.detach().clone()
    del middle
    with OperatorsSeen(lambda name, args: (name, args[-1])) as seen:
        grads = torch.autograd.grad(y, [x, w], torch.ones_like(y), retain_graph=True)
    assert [last for name, last in seen.found if name == "_normalize"] == [1]  # ReLU, and once
    direct = torch.autograd.grad(F.conv2d(want, w, padding=1), w, torch.ones_like(y))
    torch.testing.assert_close(grads[1], *direct)
