"""torch.func transforms and forward-mode AD: a C++ node cannot serve them, so such calls are stock's, and
agree.

Outside of the transforms the library's own path is taken again: asserted after each.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import patchconv_native as pc

NAMES = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
ALL = pytest.mark.parametrize("name", NAMES)


def calls(name: str):
    """Ours, cut in two, and stock's, with the same arguments."""
    ours = getattr(pc.functional, name)
    stock = getattr(F, name)
    return (
        lambda x, w, b: ours(x, w, b, stride=2, padding=1, splits=2),
        lambda x, w, b: stock(x, w, b, stride=2, padding=1),
    )


def tensors(name: str, device: str, batch: tuple[int, ...] = (2,)) -> tuple[Tensor, Tensor, Tensor]:
    dims = int(name[-2])
    return (
        torch.randn(*batch, 2, *[5] * dims, device=device, dtype=torch.float64),
        torch.randn(2, 2, *[3] * dims, device=device, dtype=torch.float64),
        torch.randn(2, device=device, dtype=torch.float64),
    )


@pytest.fixture(autouse=True)
def own_path_afterwards(device):
    yield
    pc.functional.conv2d(torch.ones(1, 1, 6, 6, device=device), torch.ones(1, 1, 3, 3, device=device), splits=2)
    assert pc.last_path()["path"] == "tiled"


def same(found, expected) -> None:
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@ALL
def test_grad(device, name):
    given = tensors(name, device)
    ours, stock = (grad(lambda *t, c=c: c(*t).square().sum(), argnums=(0, 1, 2))(*given) for c in calls(name))
    same(ours, stock)


@ALL
def test_grad_of_grad(device, name):
    given = tensors(name, device)

    def second(call):
        def inner(x, w, b):
            return sum(g.square().sum() for g in grad(lambda *t: call(*t).square().sum(), argnums=(0, 1))(x, w, b))

        return grad(inner, argnums=(0, 1, 2))(*given)

    same(*map(second, calls(name)))


@ALL
@pytest.mark.parametrize("in_dims", [(0, None, None), (0, 0, 0), (None, 0, None), (1, None, None)])
def test_vmap(device, name, in_dims):
    x, w, b = tensors(name, device, batch=(3, 2))
    given = [
        x if in_dims[0] is not None else x[0],
        torch.stack([w, 2 * w, -w]) if in_dims[1] is not None else w,
        torch.stack([b, 2 * b, -b]) if in_dims[2] is not None else b,
    ]
    found, expected = (vmap(c, in_dims=in_dims)(*given) for c in calls(name))
    torch.testing.assert_close(found, expected)


@ALL
def test_per_sample_gradients(device, name):
    x, w, b = tensors(name, device, batch=(4,))

    def per_sample(call):
        def loss(w, b, image):
            return call(image.unsqueeze(0), w, b).square().sum()

        return vmap(grad(loss, argnums=(0, 1)), in_dims=(None, None, 0))(w, b, x)

    same(*map(per_sample, calls(name)))


@ALL
def test_vjp_and_jvp(device, name):
    given = tensors(name, device)
    tangents = tuple(torch.randn_like(t) for t in given)
    (y, t), (y0, t0) = (jvp(c, given, tangents) for c in calls(name))
    torch.testing.assert_close(y, y0)
    torch.testing.assert_close(t, t0)
    (y, back), (_, back0) = (vjp(c, *given) for c in calls(name))
    same(back(torch.ones_like(y)), back0(torch.ones_like(y)))


@ALL
@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian], ids=["jacrev", "jacfwd", "hessian"])
def test_jacobians(device, name, transform):
    x, w, b = tensors(name, device, batch=(1,))
    small = x[(..., *[slice(0, 3)] * int(name[-2]))].contiguous()
    found, expected = (
        transform(lambda w, c=c: c(small, w, b).square().mean(dim=0).sum(dim=-1))(w) for c in calls(name)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [(2, 1), (2, 0, 1, 1)])
def test_padding_modes(device, mode, padding):
    x, w, _ = tensors("conv2d", device)
    pairs = padding if len(padding) == 4 else (padding[0], padding[0], padding[1], padding[1])
    pad = [pairs[2], pairs[3], pairs[0], pairs[1]]

    def ours(x, w):
        return pc.functional.conv2d(x, w, padding=padding, padding_mode=mode, splits=2)

    def stock(x, w):
        return F.conv2d(F.pad(x, pad, mode=mode), w)

    torch.testing.assert_close(
        vmap(ours, in_dims=(0, None))(x[:, None], w), vmap(stock, in_dims=(0, None))(x[:, None], w)
    )
    same(
        *(grad(lambda x, w, c=c: c(x, w).square().sum(), argnums=(0, 1))(x, w) for c in (ours, stock)),
    )
    tangents = (torch.randn_like(x), torch.randn_like(w))
    same(jvp(ours, (x, w), tangents), jvp(stock, (x, w), tangents))


@ALL
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_forward_ad(device, name, which):
    results = []
    for call in calls(name):
        torch.manual_seed(1)
        given = list(tensors(name, device))
        with forward_ad.dual_level():
            for i in which:
                given[i] = forward_ad.make_dual(given[i], torch.randn_like(given[i]))
            results.append(forward_ad.unpack_dual(call(*given)))
    torch.testing.assert_close(results[0].primal, results[1].primal)
    torch.testing.assert_close(results[0].tangent, results[1].tangent)


@ALL
def test_forward_ad_with_gradients_too(device, name):
    """Forward over reverse: a tangent on tensors that require gradients."""
    results = []
    for call in calls(name):
        torch.manual_seed(1)
        given = [t.requires_grad_() for t in tensors(name, device)]
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given[0], torch.randn_like(given[0]))
            tangent = forward_ad.unpack_dual(call(dual, *given[1:])).tangent
            results.append(torch.autograd.grad(tangent.square().sum(), given[1]))
    same(*results)


def test_reverse_then_forward(device):
    """A tangent that arrives with the gradient only: the node's own backward meets it."""
    results = []
    for call in calls("conv2d"):
        torch.manual_seed(1)
        x, w, b = (t.requires_grad_() for t in tensors("conv2d", device))
        y = call(x, w, b)
        with forward_ad.dual_level():
            v = forward_ad.make_dual(torch.randn_like(y), torch.randn_like(y))
            found = torch.autograd.grad(y, (x, w, b), v)
            results.append([part for g in found for part in forward_ad.unpack_dual(g)])
    same(*results)


def test_functional_call_on_a_converted_model(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)).to(device).double()
    x = torch.randn(3, 3, 7, 7, device=device, dtype=torch.float64)
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(parameters, image):
        return functional_call(model, parameters, (image.unsqueeze(0),)).square().sum()

    expected = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    pc.convert(model, splits=2)
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    assert found.keys() == expected.keys()
    same(found.values(), expected.values())


def test_ensembles(device):
    """vmap over stacked parameters: each member has weights of its own."""
    members = [pc.Conv2d(3, 4, 3, splits=2, device=device).double() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(members)
    x = torch.randn(2, 3, 6, 6, device=device, dtype=torch.float64)
    found = vmap(lambda p, b: functional_call(members[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([m(x) for m in members]))


class Mixed(nn.Module):
    """Under autocast the convolution gets what the linear layer made: the lower precision."""

    def __init__(self, first: nn.Module | None) -> None:
        super().__init__()
        self.first = first or nn.Identity()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.first(x))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("transform", ["vjp", "jvp", "vmap", "grad"])
def test_autocast_inside_a_transform(device, linear, transform):
    stock = Mixed(nn.Linear(8, 8) if linear else None).to(device)
    ours = pc.convert(copy.deepcopy(stock))
    x = torch.randn(2, 3, 8, 8, device=device)

    def run(model: nn.Module) -> tuple[Tensor, ...]:
        with torch.autocast(device, dtype=torch.bfloat16):
            if transform == "vjp":
                y, pull = vjp(model, x)
                return y, *pull(torch.ones_like(y))
            if transform == "jvp":
                return jvp(model, (x,), (torch.ones_like(x),))
            if transform == "vmap":
                return (vmap(model)(x.unsqueeze(1)),)
            return (grad(lambda t: model(t).float().square().mean())(x),)

    for got, want in zip(run(ours), run(stock), strict=True):
        # Stock loses autocast in a batched convolution.
        assert got.dtype == (torch.bfloat16 if transform == "vmap" else want.dtype)
        torch.testing.assert_close(got.to(want.dtype), want, rtol=0.05, atol=0.05)


def test_lean_layers_under_transforms(device):
    """Values of stock's functions, nested transforms and vmap too."""
    functions = {
        "instance_norm": lambda f, x: f.instance_norm(x), "relu": lambda f, x: f.relu(x),
        "local_response_norm": lambda f, x: f.local_response_norm(x, 3),
        "batch_norm": lambda f, x: f.batch_norm(x, None, None, training=True),
        "interpolate": lambda f, x: f.interpolate(x, scale_factor=2),
        "pad": lambda f, x: f.pad(x, (1, 1, 1, 1), "reflect"),
    }  # fmt: skip
    x = torch.randn(2, 4, 5, 5, device=device, dtype=torch.float64)
    for name, function in functions.items():
        found = []
        for f in (F, pc.functional):

            def loss(x, f=f, function=function):
                return function(f, x).pow(3).sum()

            first = torch.func.grad(loss)
            second = torch.func.grad(lambda x, first=first: first(x).square().sum())
            found.append([first(x), second(x), torch.func.jvp(first, (x,), (x,))[1]])
            if name != "batch_norm":
                found[-1].append(torch.func.vmap(lambda x, f=f, function=function: function(f, x))(x.unsqueeze(0)))
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
