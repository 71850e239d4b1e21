"""Backends where there is no GPU: what holds on every device, and what the CUDA tests (test_native_cuda.py) rely on."""

from __future__ import annotations

import pytest
import torch
from support import backends
from support.backends import OPERATORS, REBUILT, SERVED, WARM, Leaves, Step, not_ours
from support.counts import OperatorsSeen
from torch import Tensor

import patchconv_native as pc

lf = pc.functional
KINDS = [(torch.float32, "NCHW"), (torch.float32, "channels_last"), (torch.float16, "NCHW"),
         (torch.bfloat16, "channels_last")]  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_made_of_its_pieces(name):
    """Those that have kernels on CUDA: an operator that went another way would be stock's there."""
    operator, leaves = OPERATORS[name], Leaves("cpu")
    y: list[Tensor] = []
    forward = backends.ran(lambda: y.append(operator.forward(leaves)), "cpu")
    backward = backends.ran(lambda: operator.backward(y[0], leaves, leaves.gradient(y[0])), "cpu")
    for names, pieces in zip((forward, backward), operator.pieces, strict=True):
        for piece in pieces.split():
            assert f"patchconv::{piece}" in names, names


OURS = "void patchconv::kernels::(anonymous namespace)::mask_forward_kernel<float>(MaskForward, bool)"
STOCK = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<MulFunctor>>(int)"


def test_kernels_that_should_not_have_run_are_named():
    mangled = "_ZN9patchconv7kernels12_GLOBAL__N_119mask_forward_kernelIfEEvNS0_11MaskForwardEb"
    assert not_ours([OURS], "mask_forward_kernel") == []
    assert not_ours([mangled, "Memcpy DtoD (Device -> Device)", "Memset (Device)"], "mask_forward_kernel") == []
    assert not_ours([], "mask_forward_kernel") == ["mask_forward_kernel did not run"]
    assert not_ours([OURS], "mask_forward_kernel norm_map_") == ["norm_map_ did not run"]
    assert not_ours([OURS, STOCK], "mask_forward_kernel") == [STOCK]
    assert not_ours([OURS, STOCK], "mask_forward_kernel", "MulFunctor") == []
    stock_of_that_name = "void at::native::mask_forward_kernel(int)"
    assert len(not_ours([stock_of_that_name], "mask_forward_kernel")) == 2


def test_what_may_run_beside_norms():
    elementwise = "vectorized_elementwise_kernel<4, at::native::{}>"
    group_norms = map(elementwise.format, ("silu_backward_kernel", "GroupNormKernelImpl"))
    for operator, not_wanted in (
        ("batch_norm_relu eval frozen", ["batch_norm_backward_elementwise_kernel", elementwise.format("threshold")]),
        ("group_norm_silu", ["RowwiseMomentsCUDAKernel", *group_norms]),
    ):
        beside = OPERATORS[operator].beside[1]
        assert not_ours([STOCK], "", beside) == []
        assert not_ours(not_wanted, "", beside) == not_wanted


@pytest.mark.parametrize(("dtype", "layout"), KINDS)
@pytest.mark.parametrize("later", SERVED)
@pytest.mark.parametrize("made", SERVED)
def test_values_made_again_under_another_backend(device, made, later, layout, dtype):
    """Bit for bit: a node remembers the backend that it was made with."""
    for name in REBUILT:
        original, again = backends.made_again(name, Leaves(device, dtype, layout), made, later)
        assert torch.equal(original, again), name


def test_a_value_that_is_not_the_same_is_noticed(monkeypatch):
    """An edit of what a value is made of, behind autograd's back."""
    a = Leaves("cpu")

    def edited(leaves: Leaves) -> Tensor:
        y = lf.batch_norm_relu(leaves.x, None, None, leaves.weight, leaves.bias, True)
        leaves.x.data.mul_(2)
        return y

    monkeypatch.setitem(REBUILT, "edited", edited)
    original, again = backends.made_again("edited", a, "auto", "auto")
    assert not torch.equal(original, again)
    monkeypatch.setitem(REBUILT, "kept", lambda leaves: leaves.x * 1)
    with pytest.raises(AssertionError, match="the value was kept"):
        backends.made_again("kept", a, "auto", "auto")


@pytest.mark.parametrize("backends", [(a, b) for a in SERVED for b in SERVED if a != b], ids=" then ".join)
def test_nodes_remember_the_backend_they_were_made_with(backends):
    """Both what they make again for others and their own gradients; nodes that are not this package's do not."""
    made, later = backends
    a = Leaves("cpu")
    with pc.backend(made):
        inner = a.x * 1
        norm = lf.batch_norm(inner, None, None, a.weight, a.bias, True)
        middle = lf.relu(norm)
        del norm
    with pc.backend(later):
        # Stock's node runs under the setting of its time, and asks nobody.
        found: list[str] = []
        inner.register_hook(lambda grad: found.append(pc.backend()))
        consumer = lf.dropout(lf.mul(middle, a.other), 0.5)
        del middle
        with OperatorsSeen(lambda name, args: (name, pc.backend())) as seen:
            torch.autograd.grad(consumer, (a.x, a.other), a.grad)
        assert pc.backend() == later
    assert found == [later]
    assert ("_dropout", later) in seen.found
    assert {("_normalize", made), ("_mask_backward", made), ("_norm_backward", made)} <= set(seen.found)
    assert {backend for name, backend in seen.found if name != "_dropout"} == {made}


def test_a_step_is_stock_s(device):
    """The step that CUDA graphs are tested with: parameters, statistics and gradients are those of the stock model."""
    steps = [Step(device, convert=convert) for convert in (True, False)]
    ours, stock = (backends.replayed(step, step, range(5)) for step in steps)
    assert [backends.differences(one, other) for one, other in zip(ours, stock, strict=True)] == [[]] * 5
    moved = backends.differences(ours[4], ours[3])
    assert set(moved) >= {name for name in ours[0] if "running" in name or "weight" in name or "loss" in name}


@pytest.mark.parametrize("mistake", ["batch", "step", "momentum"])
def test_a_replay_that_is_not_a_step_is_noticed(mistake):
    """One that reads an old batch, leaves a step out, or begins without the optimizer's state."""
    want = backends.replayed(eager := Step("cpu"), eager, range(WARM + 2))[WARM:]
    step = Step("cpu")
    backends.replayed(step, step, range(WARM))
    if mistake == "momentum":
        step.optimizer.state.clear()
    old = step.x.clone()

    def replay() -> None:
        if mistake == "batch":
            step.x.copy_(old)
        if mistake != "step":
            step()

    got = backends.replayed(step, replay, range(WARM, WARM + 2))
    assert all(backends.differences(one, other) for one, other in zip(got, want, strict=True))


def test_dropout_of_a_step_differs_from_step_to_step(device):
    """What the graphs' test asks of replays: with a learning rate of 0 nothing but the masks can move the loss."""
    step = Step(device, p=0.5, lr=0.0)
    losses = [float(state["loss"]) for state in backends.replayed(step, step, [7] * 4)]
    assert len(set(losses)) == 4
    step = Step(device, p=0.0, lr=0.0)
    losses = [float(state["loss"]) for state in backends.replayed(step, step, [7] * 4)]
    assert max(losses) - min(losses) <= 1e-5
