"""torch.func transforms and forward-mode AD: a C++ node cannot serve them, so such calls are stock's, and agree.

Outside of the transforms the library's own path is taken again: asserted after each.
"""

from __future__ import annotations

import copy
from functools import partial

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
    ours, stock = getattr(pc.functional, name), getattr(F, name)
    return partial(ours, stride=2, padding=1, splits=2), partial(stock, stride=2, padding=1)


def tensors(name: str, device: str) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = (2, 2, *[5] * int(name[-2])), (2, 2, *[3] * int(name[-2])), (2,)
    return [torch.randn(shape, device=device, dtype=torch.float64) for shape in shapes]


@pytest.fixture(autouse=True)
def own_path_afterwards(device):
    yield
    pc.functional.conv2d(torch.ones(1, 1, 6, 6, device=device), torch.ones(1, 1, 3, 3, device=device), splits=2)
    assert pc.last_path()["path"] == "tiled"


def gradients(call, argnums=(0, 1, 2)):
    return grad(lambda *t: call(*t).square().sum(), argnums=argnums)


def twice(call, *given):
    return gradients(lambda *t: sum(g.square().sum() for g in gradients(call, (0, 1))(*t)))(*given)


def mapped(call, x, w, b, *in_dims):
    given = [torch.stack([t, 2 * t, -t.flip(0)], d or 0) if d is not None else t
             for t, d in zip((x, w, b), in_dims, strict=True)]  # fmt: skip
    return vmap(call, in_dims=in_dims)(*given)


def per_sample(call, x, w, b):
    return vmap(gradients(lambda image, w, b: call(image.unsqueeze(0), w, b), (1, 2)), in_dims=(0, None, None))(x, w, b)


def of_weights(transform, call, x, w, b):
    small = x[(slice(1), slice(None), *[slice(3)] * (x.dim() - 2))].contiguous()
    return transform(lambda w: call(small, w, b).square().mean(dim=0).sum(dim=-1))(w)


def forward_mode(call, given, which):
    given = list(given)
    with forward_ad.dual_level():
        for i in which:
            given[i] = forward_ad.make_dual(given[i], given[i].flip(0).sin())
        return tuple(forward_ad.unpack_dual(call(*given)))


def pulled(call, *given):
    y, back = vjp(call, *given)
    return y, *back(torch.ones_like(y))


TRANSFORMS = {
    "grad": lambda call, *given: gradients(call)(*given),
    "grad of grad": twice,
    "vmap, inputs": lambda *given: mapped(*given, 0, None, None),
    "vmap, all": lambda *given: mapped(*given, 0, 0, 0),
    "vmap, weights": lambda *given: mapped(*given, None, 0, None),
    "vmap, second dimension": lambda *given: mapped(*given, 1, None, None),
    "per sample": per_sample,
    "vjp": pulled,
    "jvp": lambda call, *given: jvp(call, given, tuple(t.cos() for t in given)),
    "jacrev": partial(of_weights, jacrev),
    "jacfwd": partial(of_weights, jacfwd),
    "hessian": partial(of_weights, hessian),
    "forward, input": lambda call, *given: forward_mode(call, given, [0]),
    "forward, weight": lambda call, *given: forward_mode(call, given, [1]),
    "forward, bias": lambda call, *given: forward_mode(call, given, [2]),
    "forward, all": lambda call, *given: forward_mode(call, given, [0, 1, 2]),
}


@ALL
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(device, name, transform):
    given = tensors(name, device)
    torch.testing.assert_close(*(TRANSFORMS[transform](call, *given) for call in calls(name)))


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

    tangents = (torch.randn_like(x), torch.randn_like(w))
    results = []
    for call in (ours, stock):
        one = vmap(call, in_dims=(0, None))(x[:, None], w)
        results.append([one, *gradients(call, (0, 1))(x, w), *jvp(call, (x, w), tangents)])
    torch.testing.assert_close(*results)


@ALL
def test_forward_ad_with_gradients_too(device, name):
    """Forward over reverse: a tangent on tensors that require gradients."""
    results = []
    for call in calls(name):
        given = [t.requires_grad_() for t in tensors(name, device)]
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given[0], torch.randn_like(given[0]))
            tangent = forward_ad.unpack_dual(call(dual, *given[1:])).tangent
            results.append(torch.autograd.grad(tangent.square().sum(), given[1]))
    torch.testing.assert_close(*results)


def test_reverse_then_forward(device):
    """A tangent that arrives with the gradient only: the node's own backward meets it."""
    results = []
    for call in calls("conv2d"):
        x, w, b = (t.requires_grad_() for t in tensors("conv2d", device))
        y = call(x, w, b)
        with forward_ad.dual_level():
            v = forward_ad.make_dual(torch.randn_like(y), torch.randn_like(y))
            found = torch.autograd.grad(y, (x, w, b), v)
            results.append([part for g in found for part in forward_ad.unpack_dual(g)])
    torch.testing.assert_close(*results)


def test_functional_call_on_a_converted_model(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)).to(device).double()
    x = torch.randn(3, 3, 7, 7, device=device, dtype=torch.float64)
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(parameters, image):
        return functional_call(model, parameters, (image.unsqueeze(0),)).square().sum()

    expected = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    pc.convert(model, splits=2)
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    torch.testing.assert_close(found, expected)


def test_ensembles(device):
    """vmap over stacked parameters: each member has weights of its own."""
    members = [pc.Conv2d(3, 4, 3, splits=2, device=device).double() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(members)
    x = torch.randn(2, 3, 6, 6, device=device, dtype=torch.float64)
    found = vmap(lambda p, b: functional_call(members[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([m(x) for m in members]))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("transform", ["vjp", "jvp", "vmap", "grad"])
def test_autocast_inside_a_transform(device, linear, transform):
    """Behind a linear layer the convolution gets what that made: the lower precision."""
    conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    stock = nn.Sequential(nn.Linear(8, 8) if linear else nn.Identity(), conv).to(device)
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
        "glu": lambda f, x: f.glu(x, -3),
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
        torch.testing.assert_close(*found)
