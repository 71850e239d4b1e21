"""First and second derivatives against finite differences, in float64."""

from __future__ import annotations

import pytest
import torch
from support.checks import operator, oracle
from support.configurations import Configuration, build, plain
from support.conv_calls import backward_arguments
from support.pairs import pairwise
from torch.autograd import gradcheck, gradgradcheck

import patchconv_native as pc

BOTH = pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
SMALL = {1: (6,), 2: (5, 4), 3: (4, 3, 3)}


def small(dims: int = 2, **changes) -> Configuration:
    values = {"dtype": "float64", "batch": 2, "channels": 2, "outputs": 2, "sizes": SMALL[dims], "splits": (2,) * dims}
    return plain(dims, **(values | changes))


def check_both(c: Configuration, device: str) -> None:
    tensors = build(c, device)
    leaves = [t for t in vars(tensors).values() if t is not None]

    def call(*given: torch.Tensor) -> torch.Tensor:
        return operator(c)(given[0], given[1], given[2] if len(given) == 3 else None)

    with pc.record_paths() as records:
        assert gradcheck(call, leaves, fast_mode=False)
    assert {r["path"] for r in records} == ({"stock"} if c.splits is None else {"tiled"})
    with pc.record_paths() as records:
        assert gradgradcheck(call, leaves)
    if c.splits is not None:
        assert {r["path"] for r in records} == {"tiled"}, "second derivatives are tiled as well"


@pairwise(transposed=[False, True], dims=[1, 2, 3], cut=[True, False], bias=[True, False], batch=[None, 2])
def test_plain(device, transposed, dims, cut, bias, batch):
    splits = (2,) * dims if cut else None
    check_both(small(dims, transposed=transposed, splits=splits, bias=bias, batch=batch), device)


@BOTH
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_stride_dilation_groups(device, transposed, dims):
    twos = dict.fromkeys(("groups", "stride", "dilation", "padding", "kernel"), 2)
    check_both(small(dims, transposed=transposed, batch=1, output_padding=int(transposed), **twos), device)


@pairwise(mode=["reflect", "replicate", "circular"], dims=[1, 2, 3], cut=[True, False])
def test_padding_modes(device, mode, dims, cut):
    padding = (2, 1, 1, 2, 0, 1)[: 2 * dims]
    c = small(dims, padding=padding, padding_mode=mode, batch=1, splits=(2,) * dims)
    if cut:
        check_both(c, device)
    else:
        tensors = build(c, device)
        call = getattr(pc.functional, c.operator)
        leaves = (tensors.input, tensors.weight)
        assert gradgradcheck(lambda x, w: call(x, w, None, 1, list(padding), padding_mode=mode), leaves)
        assert pc.last_path()["path"] == "tiled"


@pairwise(
    transposed=[False, True],
    requires_grad=[(True, False, False), (False, True, False), (False, False, True), (True, False, True)],
)
def test_second_derivative_of_what_is_asked_for(device, transposed, requires_grad):
    c = small(transposed=transposed, requires_grad=requires_grad)
    tensors = build(c, device)
    leaves = list(vars(tensors).values())
    assert gradcheck(lambda *given: operator(c)(*given), leaves)
    assert gradgradcheck(lambda *given: operator(c)(*given), leaves)


@BOTH
def test_third_derivative(device, transposed):
    c = small(transposed=transposed, sizes=(4, 3), batch=1, channels=1, outputs=1, bias=False, kernel=(2, 2))
    tensors = build(c, device)
    x, w = tensors.input, tensors.weight

    def third(call) -> list[torch.Tensor]:
        y = call(x, w, None)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), w, create_graph=True)
        return list(torch.autograd.grad(second.square().sum(), (x, w)))

    torch.testing.assert_close(third(operator(c)), third(lambda *given: oracle(c, *given)))


@BOTH
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True), (False, True, False), (False, False, True)])
def test_backward_operator_by_itself(device, transposed, mask):
    """The backward operator is a differentiable operator of its own, with any mask."""
    c = small(transposed=transposed, bias=False)
    tensors = build(c, device)
    x, w = tensors.input, tensors.weight
    y = operator(c)(x, w, None).detach()
    grad = torch.randn_like(y).requires_grad_()
    more = c.arguments() | {"transposed": transposed, "splits": c.splits}

    def call(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = backward_arguments(grad, x, w, x.shape, w.shape, mask, **more)
        found = torch.ops.patchconv._convolution_backward(*given)
        return tuple(f for f, wanted in zip(found, mask, strict=True) if wanted)

    assert gradcheck(call, (grad, x, w))
    assert gradgradcheck(call, (grad, x, w))
