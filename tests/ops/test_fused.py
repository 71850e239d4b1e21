"""Norms with an activation and residual sums with ReLU, in one operator: the numbers of two, less kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.configurations import lay_out
from support.counts import saved_bytes
from support.errors import raises
from support.pairs import pairwise
from torch import Tensor

import patchconv_native as pc

lf = pc.functional
SHAPE = (3, 6, 5, 7)


class Arguments:
    def __init__(
        self, device: str, dtype: torch.dtype = torch.float64, layout: str = "contiguous", shape: Any = SHAPE
    ) -> None:
        torch.manual_seed(3)
        rest = {"device": device, "dtype": dtype}
        ramp = torch.linspace(-2, 2, shape[-1], **rest)  # not noise alone
        self.x = lay_out(torch.randn(shape, **rest) + ramp, layout).detach().requires_grad_()
        self.other = lay_out(torch.randn(shape, **rest), layout).detach().requires_grad_()
        parameters = torch.float32 if dtype == torch.bfloat16 else dtype  # as mixed precision has them
        self.weight = torch.randn(6, device=device, dtype=parameters, requires_grad=True)
        self.bias = torch.randn(6, device=device, dtype=parameters, requires_grad=True)
        self.mean = torch.randn(6, device=device, dtype=parameters)
        self.var = torch.rand(6, device=device, dtype=parameters) + 0.5
        self.grad = torch.randn(shape, **rest)

    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.other, self.weight, self.bias) if t.requires_grad]


def training(a: Arguments) -> tuple[Tensor, ...]:
    return a.x, None, None, a.weight, a.bias, True


def constants(a: Arguments) -> tuple[Tensor, ...]:
    return a.x, a.mean, a.var, a.weight, a.bias


# One operator; and the same as two of ours (lf), or two of stock's (F).
Case = tuple[Callable[[Arguments], Tensor], Callable[[Any, Arguments], Tensor]]
CASES: dict[str, Case] = {
    "batch_norm_relu": (lambda a: lf.batch_norm_relu(*training(a)), lambda f, a: f.relu(f.batch_norm(*training(a)))),
    "batch_norm_relu of constants": (
        lambda a: lf.batch_norm_relu(*constants(a)), lambda f, a: f.relu(f.batch_norm(*constants(a)))),
    "group_norm_silu": (
        lambda a: lf.group_norm_silu(a.x, 3, a.weight, a.bias),
        lambda f, a: f.silu(f.group_norm(a.x, 3, a.weight, a.bias))),
    "add_relu": (
        lambda a: lf.add_relu(a.x, a.other), lambda f, a: f.relu((lf.add if f is lf else torch.add)(a.x, a.other))),
}  # fmt: skip
ALL = pytest.mark.parametrize("name", CASES)


def forms(name: str) -> list[Callable[[Arguments], Tensor]]:
    """The operator, two of ours, two of stock's."""
    one, two = CASES[name]
    return [one, partial(two, lf), partial(two, F)]


def gradients(y: Tensor, a: Arguments) -> list[Tensor | None]:
    return list(torch.autograd.grad(y, a.leaves(), a.grad, allow_unused=True))


@pairwise(
    name=list(CASES),
    layout=["contiguous", "channels_last", "sliced"],
    dtype=[torch.float64, torch.float32, torch.bfloat16],
)
def test_as_the_two_operators(device, name, layout, dtype):
    a = Arguments(device, dtype, layout)
    if device == "cuda" and name == "group_norm_silu":  # stock's kernels do not mix types
        a.weight, a.bias = (t.detach().to(dtype).requires_grad_() for t in (a.weight, a.bias))
    one, two, stock = (f(a) for f in forms(name))
    assert one.stride() == two.stride()
    eps = torch.finfo(dtype).eps
    if device == "cpu":
        assert torch.equal(one, two)
    torch.testing.assert_close(one, stock, rtol=20 * eps, atol=20 * eps)
    for got, same, want in zip(gradients(one, a), gradients(two, a), gradients(stock, a), strict=True):
        if want is None:
            assert got is None
            continue
        assert got.dtype == want.dtype
        if device == "cpu":
            assert torch.equal(got, same)
        scale = float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=50 * eps, atol=50 * eps * scale)


@ALL
def test_gradcheck(device, name):
    a = Arguments(device, shape=(2, 6, 3, 4))
    f = CASES[name][0]

    def call(*leaves: Tensor) -> Tensor:
        b = Arguments(device)
        b.x, b.other, b.weight, b.bias = leaves
        return f(b)

    leaves = (a.x, a.other, a.weight, a.bias)
    torch.autograd.gradcheck(call, leaves)
    torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("frozen", ["weight", "weight and bias", "all but bias", "all but weight"])
@ALL
def test_frozen(device, name, frozen):
    """Whatever needs a gradient gets the one of the two operators, bit for bit on a CPU."""
    a = Arguments(device)
    a.weight.requires_grad_(frozen == "all but weight")
    a.bias.requires_grad_(frozen in ("weight", "all but bias"))
    if frozen.startswith("all but"):
        a.x.requires_grad_(False)
    found, expected = (gradients(f(a), a) for f in forms(name)[:2])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@ALL
def test_keeps_no_more_than_the_two(device, name, frozen):
    a = Arguments(device, torch.float32)
    a.weight.requires_grad_(not frozen)
    one, two = (saved_bytes(partial(f, a)) for f in forms(name)[:2])
    assert one <= two
    if name == "batch_norm_relu":  # no mask
        assert one == two - (a.x.numel() + 7) // 8
    if name == "batch_norm_relu of constants" and frozen:
        assert one < a.x.nbytes / 8


def test_running_statistics_move_once(device):
    a = Arguments(device, torch.float32)
    means, vars = [a.mean.clone() for _ in "ab"], [a.var.clone() for _ in "ab"]
    y = lf.batch_norm_relu(a.x, means[0], vars[0], a.weight, a.bias, True, 0.3)
    F.batch_norm(a.x, means[1], vars[1], a.weight, a.bias, True, 0.3)
    y.sum().backward()
    torch.testing.assert_close(means[0], means[1])
    torch.testing.assert_close(vars[0], vars[1])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_statistics_of_values_far_from_zero(layout):
    """On a CPU, a mean of a million deviations: its rounding to float32 is not in the variance."""
    torch.manual_seed(5)
    x = lay_out(torch.randn(2, 8, 65, 67) + 1e6 * torch.arange(8)[:, None, None], layout)
    mean, var = torch.ops.patchconv._batch_statistics(x, None, None, 0.1)
    want_var, want_mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(mean.double(), want_mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(var.double(), want_var, rtol=2e-7, atol=0)


def test_sums_of_two_shapes(device):
    """Broadcasting goes through the two operators."""
    x = torch.randn(2, 3, 4, device=device, requires_grad=True)
    bias = torch.randn(3, 1, device=device, requires_grad=True)
    y, want = lf.add_relu(x, bias), F.relu(x + bias)
    assert torch.equal(y, want)
    torch.testing.assert_close(*(torch.autograd.grad(one.sum(), [x, bias]) for one in (y, want)))


@ALL
def test_inference(device, name):
    a = Arguments(device, torch.float32)
    with torch.no_grad():
        one, _, stock = (f(a) for f in forms(name))
    assert one.grad_fn is None
    torch.testing.assert_close(one, stock)


def test_mistakes(device):
    x, there = torch.randn(2, 4, 3, device=device), torch.zeros(4, device="meta")
    stats = {"running_mean": torch.zeros(4, device=device), "running_var": torch.ones(4, device=device)}
    raises((ValueError, RuntimeError), {
        "batch_norm_relu: expected more than 1 value per channel when training":
            lambda: lf.batch_norm_relu(x[:1, :, :1], None, None, training=True),
        "expected running_mean and running_var where training is False, got None":
            lambda: lf.batch_norm_relu(x, None, None),
        "num_groups": lambda: lf.group_norm_silu(x, 3),
        **{f"batch_norm: expected {name} on {device}.*, got meta":
            lambda name=name: lf.batch_norm_relu(x, **{**stats, name: there})
            for name in ("running_mean", "running_var", "weight", "bias")},
    })  # fmt: skip


@ALL
def test_under_torch_func(name):
    a = Arguments("cpu")
    a.other, a.weight, a.bias = (t.detach() for t in (a.other, a.weight, a.bias))
    x, direction, found = a.x.detach(), torch.randn(SHAPE).double(), []
    for f in forms(name)[::2]:

        def call(x: Tensor, f: Callable[[Arguments], Tensor] = f) -> Tensor:
            b = copy.copy(a)
            b.x = x
            return f(b).square().sum()

        found.append((torch.func.grad(call)(x), *torch.func.jvp(call, (x,), (direction,))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("frozen", ["nothing", "input"])
@pytest.mark.parametrize("name", ["add_relu", "batch_norm_relu of constants"])
def test_slopes_that_do_not_change(device, name, frozen):
    """With create_graph every gradient depends on every input, as stock's does, with derivatives of zero."""
    seconds = []
    for f in forms(name)[::2]:
        a = Arguments(device)
        a.weight.requires_grad_(False)
        a.x.requires_grad_(frozen != "input")
        leaves = [t for t in ((a.x, a.other) if name == "add_relu" else (a.x, a.bias)) if t.requires_grad]
        for first in leaves:
            (g,) = torch.autograd.grad(f(a).sum(), first, create_graph=True)
            seconds.append(torch.autograd.grad(g.sum(), leaves, allow_unused=True))
    ours, stock = seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :]
    for got, want in zip(sum(ours, ()), sum(stock, ()), strict=True):
        assert (got is None) <= (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)
