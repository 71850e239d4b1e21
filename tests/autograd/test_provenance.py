"""Recompute by provenance: an input that its producer can make again is not kept, and nobody can tell but the memory.

`chains` are producers in front of a convolution, which needs its input for the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.counts import Hooked
from support.pairs import todays
from support.threads import on_threads
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import patchconv_native as pc

lf = pc.functional


def batch_norm(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return lf.batch_norm(x, None, None, p["gamma"], p["beta"], training=True)


CHAINS: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "batch_norm": batch_norm,
    "batch_norm relu": lambda x, p: lf.relu(batch_norm(x, p)),
    "batch_norm relu_": lambda x, p: lf.relu(batch_norm(x, p), inplace=True),
    "batch_norm silu_": lambda x, p: lf.silu(batch_norm(x, p), inplace=True),
    "batch_norm relu dropout": lambda x, p: lf.dropout(lf.relu(batch_norm(x, p)), 0.3),
    "batch_norm relu6 max_pool": lambda x, p: lf.max_pool2d(lf.relu6(batch_norm(x, p)), 3, 1, 1),
    "group_norm silu": lambda x, p: lf.silu(lf.group_norm(x, 2, p["gamma"], p["beta"])),
    "batch_norm_relu": lambda x, p: lf.batch_norm_relu(x, None, None, p["gamma"], p["beta"], training=True),
    "group_norm_silu dropout": lambda x, p: lf.dropout(lf.group_norm_silu(x, 2, p["gamma"], p["beta"]), 0.3),
    "add_relu": lambda x, p: lf.add_relu(batch_norm(x, p), lf.silu(x)),
    "silu": lambda x, p: lf.silu(x),
    "gelu": lambda x, p: lf.gelu(x * 1),
    "sigmoid of batch_norm": lambda x, p: lf.sigmoid(batch_norm(x, p)),
    "prelu": lambda x, p: lf.prelu(x, p["gamma"]),
    "instance_norm": lambda x, p: lf.leaky_relu(lf.instance_norm(x, weight=p["gamma"], bias=p["beta"])),
    "cat": lambda x, p: lf.relu(lf.cat([batch_norm(x[:, :2], half(p)), lf.silu(x[:, 2:])], 1)),
    "residual": lambda x, p: lf.relu(lf.add(batch_norm(x, p), lf.silu(x))),
    "gate": lambda x, p: lf.mul(lf.sigmoid(x.mean((2, 3), keepdim=True)), lf.silu(batch_norm(x, p))),
    "gated halves": lambda x, p: lf.glu(lf.cat([batch_norm(x, p), lf.silu(x)], 1), 1),
    "channels dropped": lambda x, p: lf.dropout2d(batch_norm(x, p), 0.4),
    "alpha dropout": lambda x, p: lf.alpha_dropout(lf.selu(batch_norm(x, p)), 0.2, training=True),
    "permuted layer_norm": lambda x, p: lf.layer_norm(
        x.permute(0, 2, 3, 1), [4], p["gamma"], p["beta"]).permute(0, 3, 1, 2),
    "avg_pool": lambda x, p: lf.avg_pool2d(lf.hardswish(batch_norm(x, p)), 3, 1, 1),
    "rms_norm": lambda x, p: lf.rms_norm(x, [6], None),
    "upsampled": lambda x, p: lf.interpolate(lf.silu(x), scale_factor=2),
    "upsampled leaf": lambda x, p: lf.interpolate(x, size=(9, 11), mode="bilinear", align_corners=True),
    "padded by reflection": lambda x, p: lf.pad(lf.relu(batch_norm(x, p)), [2, 1, 0, 2], "reflect"),
    "padded by its border": lambda x, p: lf.pad(x, [1, 1, 1, 1], "replicate"),
    "padded by zeros": lambda x, p: lf.relu(lf.pad(batch_norm(x, p), [1, 2, -1, 0])),
}  # fmt: skip
ALL = pytest.mark.parametrize("name", CHAINS)


def half(p: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value[:2] for key, value in p.items()}


def leaves(device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    torch.manual_seed(7)
    x = torch.randn(2, 4, 6, 6, device=device, dtype=dtype, requires_grad=True)
    p = {name: torch.rand(4, device=device, dtype=dtype, requires_grad=True) for name in ("gamma", "beta")}
    w = torch.randn(3, 4, 3, 3, device=device, dtype=dtype, requires_grad=True)
    return x, p, w


def run(name: str, x: Tensor, p: dict[str, Tensor], w: Tensor) -> Tensor:
    torch.manual_seed(3)  # for dropout
    return pc.functional.conv2d(CHAINS[name](x, p), w, padding=1)


def gradients(y: Tensor, *inputs: Tensor, **options: bool) -> list[Tensor | None]:
    torch.manual_seed(11)
    return list(torch.autograd.grad(y, inputs, torch.randn_like(y), allow_unused=True, **options))


def same(a: list[Tensor | None], b: list[Tensor | None]) -> None:
    """The same bits. On CUDA, where stock adds gradients of some pools, resizes and pads in any order, to rounding."""
    for one, other in zip(a, b, strict=True):
        some = other is not None and other.is_cuda
        atol = 16 * torch.finfo(other.dtype).eps * float(other.abs().max()) if some else 0
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def either_way(call: Callable[[], Tensor], *inputs: Tensor) -> None:
    """The call gives the same bits, and its gradients are, with recompute and without."""
    found = []
    for on in (False, True):
        with pc.recompute(on):
            y = call()
        found.append([y, *gradients(y, *inputs)])
    same(*found)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_the_same_bits_as_without(device, name, dtype):
    x, p, w = leaves(device, dtype)
    either_way(lambda: run(name, x, p, w), x, w, *p.values())


@ALL
def test_what_the_convolution_reads_is_freed(device, name):
    x, p, w = leaves(device)
    for on in (True, False):
        with pc.recompute(on):
            middle = CHAINS[name](x, p)
            reference = StorageWeakRef(middle.untyped_storage())
            y = pc.functional.conv2d(middle, w, padding=1)
            del middle
        assert reference.expired() == on
        y.sum().backward()


@pytest.mark.parametrize("name", todays(CHAINS))
def test_first_and_second_derivatives(device, name):
    x, p, w = leaves(device)
    x, w = x[:1, :, :3, :3].detach().requires_grad_(), w[:1].detach().requires_grad_()
    if "rms_norm" in name:
        x = x.repeat(1, 1, 1, 2).detach().requires_grad_()

    def function(x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return run(name, x, {"gamma": gamma, "beta": beta}, w)

    inputs = (x, w, p["gamma"], p["beta"])
    tolerance = 1e-12 if device == "cuda" else 0.0  # of two backward passes; see `same`
    assert torch.autograd.gradcheck(function, inputs, eps=1e-6, atol=1e-5, nondet_tol=tolerance)
    assert torch.autograd.gradgradcheck(function, inputs, eps=1e-6, atol=1e-4, nondet_tol=tolerance)


@ALL
def test_twice_with_a_retained_graph_and_not_without(device, name):
    x, p, w = leaves(device)
    y = run(name, x, p, w)
    first = gradients(y, x, w, retain_graph=True)
    same(first, gradients(y, x, w))
    with pytest.raises(RuntimeError, match="second time"):
        gradients(y, x, w)


@ALL
def test_one_gradient_at_a_time(device, name):
    x, p, w = leaves(device)
    y = run(name, x, p, w)
    want = gradients(y, x, w, *p.values(), retain_graph=True)
    for i, leaf in enumerate((x, w, *p.values())):
        same([want[i]], gradients(y, leaf, retain_graph=True))


def test_a_freed_producer_gives_pytorchs_error(device):
    x, p, w = leaves(device)
    middle = CHAINS["batch_norm relu"](x, p)
    y = pc.functional.conv2d(middle, w, padding=1)
    middle.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_an_edit_of_what_was_consumed_changes_nothing(device):
    """Stock raises: it kept the tensor. Here the value is made again from what was not edited."""
    x, p, w = leaves(device)
    want = gradients(run("batch_norm relu", x, p, w), x, w)
    middle = CHAINS["batch_norm relu"](x, p)
    y = pc.functional.conv2d(middle, w, padding=1)
    with torch.no_grad():
        middle.zero_()
    same(want, gradients(y, x, w))


def test_an_edit_of_what_is_kept_raises(device):
    x, p, w = leaves(device)
    inner = x * 1
    y = pc.functional.conv2d(batch_norm(inner, p), w, padding=1)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "no_grad": torch.no_grad()(lambda t: t.mul_(2)), "recorded": lambda t: t.mul_(2),
    "view": lambda t: t[:, 1].zero_(), "detached": lambda t: t.detach().mul_(2),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_producer_and_consumer_is_seen(device, edit):
    x, p, w = leaves(device)
    found = []
    for middle, conv2d in ((CHAINS["silu"](x, p), pc.functional.conv2d), (F.silu(x), F.conv2d)):
        EDITS[edit](middle)
        found.append(gradients(conv2d(middle, w, padding=1), x, w))
    torch.testing.assert_close(*found)


def test_views_of_what_a_producer_made(device):
    x, p, w = leaves(device)
    for look in (
        lambda t: t[:, :, 1:5, ::2],
        lambda t: t.transpose(2, 3),
        lambda t: t.flatten(2).unflatten(2, (6, 6)),
        lambda t: t.chunk(2)[1],
        lambda t: t[0],
    ):
        call = lambda: pc.functional.conv2d(look(CHAINS["batch_norm silu_"](x, p)), w, padding=1)  # noqa: B023, E731
        either_way(call, x, w, *p.values())


@ALL
def test_saved_tensor_hooks_see_all_that_is_kept(device, name):
    x, p, w = leaves(device)
    want = gradients(run(name, x, p, w), x, w)
    with Hooked() as counting:
        y = run(name, x, p, w)
    assert counting.packed
    same(want, gradients(y, x, w))
    # Each at most once a pass, although consumers ask producers.
    assert 0 < counting.unpacked <= len(counting.packed)


def test_hooks_that_change_what_is_kept_change_the_gradients(device):
    x, p, w = leaves(device)
    with saved_tensors_hooks(lambda t: t, lambda t: t * 2 if t.shape == x.shape else t):
        y = run("silu", x, p, w)
    want = gradients(run("silu", (2 * x).detach().requires_grad_(), p, w), w)
    same(want, gradients(y, w))


@ALL
def test_save_on_cpu(device, name):
    x, p, w = leaves(device)
    want = gradients(run(name, x, p, w), x, w)
    with save_on_cpu(pin_memory=False):
        y = run(name, x, p, w)
    same(want, gradients(y, x, w))


@ALL
@pytest.mark.parametrize("inside", ["all", "the convolution", "the chain"])
def test_checkpoint_without_reentry(device, name, inside):
    x, p, w = leaves(device)
    want = gradients(run(name, x, p, w), x, w, *p.values())
    torch.manual_seed(3)
    if inside == "all":
        y = checkpoint(lambda t: pc.functional.conv2d(CHAINS[name](t, p), w, padding=1), x, use_reentrant=False)
    elif inside == "the chain":
        middle = checkpoint(lambda t: CHAINS[name](t, p), x, use_reentrant=False)
        y = pc.functional.conv2d(middle, w, padding=1)
    else:
        y = checkpoint(lambda t: pc.functional.conv2d(t, w, padding=1), CHAINS[name](x, p), use_reentrant=False)
    same(want, gradients(y, x, w, *p.values()))


@pytest.mark.parametrize("name", ["batch_norm relu_", "residual", "cat"])
def test_several_consumers(device, name):
    x, p, w = leaves(device)

    def call() -> Tensor:
        torch.manual_seed(3)
        middle = CHAINS[name](x, p)
        y = pc.functional.conv2d(middle, w, padding=1) + pc.functional.conv2d(middle, 2 * w, padding=1)
        return y.sum() + middle.square().sum()

    either_way(call, x, w, *p.values())


@pytest.mark.parametrize("name", ["batch_norm relu", "group_norm silu", "residual"])
def test_autocast(device, name):
    """The cast in front of the convolution does not break the chain."""
    x, p, w = leaves(device, torch.float32)
    found = []
    for on in (False, True):
        with pc.recompute(on), torch.autocast(device, dtype=torch.bfloat16), Hooked() as counting:
            y = run(name, x, p, w)
        kept = [t for t in counting.packed if t.dtype == torch.bfloat16 and t.shape[1:] == x.shape[1:]]
        assert len(kept) == (0 if on else 1)
        found.append([y, *gradients(y, x, w)])
    same(*found)


def test_frozen_weights_keep_no_input(device):
    x, _, w = leaves(device)
    with Hooked() as counting:
        y = pc.functional.conv2d(lf.relu(x * 1), w.detach(), padding=1)
    assert sum(t.nbytes for t in counting.packed if t.shape != w.shape) == x.numel() // 8
    y.sum().backward()


def test_an_output_that_is_kept_replaces_the_mask(device):
    """conv -> ReLU -> conv: stock keeps the ReLU's output alone, and so it is here."""
    x, _, w = leaves(device)
    middle = lf.relu(x * 1)
    reference = StorageWeakRef(middle.untyped_storage())
    y = pc.functional.conv2d(middle, w, padding=1)
    del middle
    assert not reference.expired()
    stock = F.conv2d(F.relu(x * 1), w, padding=1)
    torch.testing.assert_close(gradients(y, x, w), gradients(stock, x, w))


def test_parts_of_a_concatenation_are_kept_once(device):
    """Densely connected layers: memory grows with depth, not with its square."""
    x, _, _ = leaves(device, torch.float32)
    with Hooked() as counting:
        features = [x * 1]
        for _ in range(6):
            h = lf.cat(features, 1)
            w = torch.randn(4, h.shape[1], 1, 1, device=device, requires_grad=True)
            h = lf.relu(lf.batch_norm(h, None, None, training=True))
            features.append(pc.functional.conv2d(h, w))
        y = lf.cat(features, 1).sum()
    storages = [t.untyped_storage() for t in counting.packed if t.dim() == 4 and t.shape[2] == 6]
    assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) == 6 * x.nbytes
    y.backward()


def test_the_small_side_of_an_upsampling_is_kept(device):
    """Also where nobody holds it by the time the consumer asks for it."""
    x = torch.randn(2, 4, 8, 8, device=device, requires_grad=True)
    w = torch.randn(4, 4, 3, 3, device=device, requires_grad=True)
    small = pc.functional.conv2d(x, w, padding=1)
    large = lf.interpolate(small, scale_factor=2)
    references = [StorageWeakRef(t.untyped_storage()) for t in (small, large)]
    del small
    y = pc.functional.conv2d(large, w, padding=1)
    del large
    assert [reference.expired() for reference in references] == [False, True]
    down = lf.interpolate(y, scale_factor=0.5)
    references = [StorageWeakRef(t.untyped_storage()) for t in (y, down)]
    del y
    z = pc.functional.conv2d(down, w, padding=1)
    del down
    assert [reference.expired() for reference in references] == [True, False]
    z.sum().backward()


def test_backward_in_another_thread(device):
    x, p, w = leaves(device)
    want = gradients(run("batch_norm relu", x, p, w), x, w)
    y = run("batch_norm relu", x, p, w)
    same(want, *on_threads(lambda: gradients(y, x, w)))


def test_the_setting_is_restored(device):
    assert pc.recompute() is True
    with pc.recompute(False):
        assert pc.recompute() is False
    assert pc.recompute() is True
    with pytest.raises(TypeError, match="recompute: expected True or False, got 1"):
        pc.recompute(1)


def test_compiled_autograd_is_refused_where_it_cannot_work(device):
    x, p, w = leaves(device, torch.float32)
    y = run("silu", x, p, w).sum()
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with compiled, pytest.raises((NotImplementedError, RuntimeError), match="compiled"):
        y.backward()
    torch._dynamo.reset()
