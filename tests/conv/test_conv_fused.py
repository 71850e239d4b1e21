"""conv2d_fused: a convolution with scale, bias, residual and ReLU in one operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import reference
from support.conv_calls import backward_arguments
from support.counts import saved_bytes
from torch import Tensor

import patchconv_native as pc

fused = pc.functional.conv2d_fused
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
GEOMETRIES: dict[str, dict[str, Any]] = {
    "same": {"padding": 1}, "strided": {"stride": 2, "padding": (1, 0, 2, 1)}, "dilated": {"dilation": 2},
    "reflect": {"padding": 1, "padding_mode": "reflect"}, "splits": {"padding": 1, "splits": (3, 2)},
    "grouped": {"padding": 1, "groups": 2},
}  # fmt: skip
PARTS = ["", "bias", "relu", "bias relu", "bias residual relu", "scale bias", "scale bias residual relu", "residual"]


def arguments(device: str, dtype: torch.dtype, geometry: dict[str, Any], parts: str, layout: str = "NCHW") -> Any:
    torch.manual_seed(1)
    options: Any = {"device": device, "dtype": dtype}
    x = torch.randn(2, 4, 9, 11, **options) + torch.linspace(-1, 1, 11, **options)
    w = torch.randn(6, 4 // geometry.get("groups", 1), 3, 3, **options) / 4
    if layout == "channels_last":
        x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    y = pc.functional.conv2d(x, w, **geometry)
    scale_dtype = dtype if dtype == torch.float64 else torch.float32
    tensors = {
        "bias": torch.randn(6, **options) if "bias" in parts else None,
        "scale": (torch.rand(6, **options) + 0.5).to(scale_dtype) if "scale" in parts else None,
        "residual": torch.randn_like(y) if "residual" in parts else None,
    }
    tensors = {name: t.requires_grad_() for name, t in tensors.items() if t is not None}
    return x.requires_grad_(), w.requires_grad_(), tensors


def expected(x: Tensor, w: Tensor, tensors: dict[str, Tensor], geometry: dict[str, Any], relu: bool) -> Tensor:
    plain = {name: value for name, value in geometry.items() if name != "splits"}
    y = reference.conv(x, w, None, **plain)
    for name, apply in (("scale", torch.mul), ("bias", torch.add)):
        if name in tensors:
            y = apply(y, tensors[name].double().view(-1, 1, 1))
    if "residual" in tensors:
        y = y + tensors["residual"].double()
    return y.relu() if relu else y


CASES = [("same", parts) for parts in PARTS] + [(geometry, PARTS[6]) for geometry in GEOMETRIES if geometry != "same"]


@DTYPES
@pytest.mark.parametrize(("geometry", "parts"), CASES)
def test_values_and_gradients(device, geometry, parts, dtype):
    geometry = GEOMETRIES[geometry]
    relu = "relu" in parts
    for layout in ("NCHW", "channels_last"):
        x, w, tensors = arguments(device, dtype, geometry, parts, layout)
        y = fused(x, w, **tensors, **geometry, relu=relu)
        want = expected(x, w, tensors, geometry, relu)
        eps = torch.finfo(dtype).eps * (1 if dtype == torch.float64 else 8)
        torch.testing.assert_close(y.double(), want, rtol=8 * eps, atol=8 * eps)
        assert y.stride() == pc.functional.conv2d(x, w, **geometry).stride()
        leaves = [x, w, *tensors.values()]
        grad = torch.randn_like(want)
        grad = torch.where(want.abs() > 100 * eps, grad, 0)  # which side of 0 is rounding's to say
        got = torch.autograd.grad(y, leaves, grad.to(dtype))
        for g, e in zip(got, torch.autograd.grad(want, leaves, grad.to(dtype).double()), strict=True):
            slack = eps * (1 + 16 * float(e.abs().max()))
            torch.testing.assert_close(g.double(), e.double(), rtol=16 * eps, atol=slack)
        with torch.no_grad():
            again = fused(x, w, **tensors, **geometry, relu=relu)
        torch.testing.assert_close(again, y.detach(), rtol=4 * eps, atol=4 * eps)


def test_keeps_a_bit_an_element(device):
    x, w, tensors = arguments(device, torch.float32, {"padding": 1}, "bias relu")
    leaf = x.nbytes + w.nbytes
    kept = saved_bytes(lambda: fused(x, w, **tensors, padding=1, relu=True))
    assert kept == leaf + (2 * 6 * 9 * 11 + 7) // 8
    x.requires_grad_(False)
    assert saved_bytes(lambda: fused(x, w, **tensors, padding=1, relu=True)) == kept - w.nbytes


def test_no_bits_where_the_output_is_kept_anyway(device):
    """The next convolution keeps its input, which says where it is 0."""
    x, w, tensors = arguments(device, torch.float32, {"padding": 1}, "bias relu")
    v = torch.randn(5, 6, 3, 3, device=device, requires_grad=True)

    def chain() -> Tensor:
        return fused(fused(x, w, **tensors, padding=1, relu=True), v, padding=1)

    # Input, weights, and the output in between: no bits of it.
    assert saved_bytes(chain) == x.nbytes + w.nbytes + v.nbytes + 4 * 2 * 6 * 9 * 11
    y = chain()
    want = F.conv2d(F.relu(F.conv2d(x, w, tensors["bias"], padding=1)), v, padding=1)
    torch.testing.assert_close(y, want)
    grad, leaves = torch.randn_like(want), [x, w, v, tensors["bias"]]
    found, expected = (torch.autograd.grad(one, leaves, grad) for one in (y, want))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", ["bias relu", "bias residual relu", "scale bias relu"])
def test_second_derivatives(device, parts):
    x, w, tensors = arguments(device, torch.float64, {"stride": 2, "padding": 1}, parts)
    small = [t.detach()[..., :5, :6].requires_grad_() if t.dim() == 4 and t is x else t for t in (x, w)]
    if "residual" in tensors:
        y = pc.functional.conv2d(small[0], small[1], stride=2, padding=1)
        tensors["residual"] = torch.randn_like(y).requires_grad_()

    def f(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        return fused(x, w, stride=2, padding=1, relu=True, **dict(zip(tensors, rest, strict=True)))

    assert torch.autograd.gradcheck(f, (*small, *tensors.values()))
    assert torch.autograd.gradgradcheck(f, (*small, *tensors.values()))


def test_infinities_and_nan(device):
    x = torch.tensor([float("-inf"), -1.0, 0.0, 2.0, float("inf"), float("nan")], device=device).view(1, 1, 2, 3)
    x.requires_grad_()
    y = fused(x, torch.ones(1, 1, 1, 1, device=device), relu=True)
    assert y.flatten()[:5].tolist() == [0, 0, 0, 2, float("inf")] and y.flatten()[5].isnan()
    y.backward(torch.ones_like(y))
    assert x.grad is not None and x.grad.flatten().tolist() == [0, 0, 0, 1, 1, 1]


def test_unbatched_and_empty(device):
    x, w, tensors = arguments(device, torch.float32, {"padding": 1}, "scale bias residual relu")
    one = fused(x[0], w, tensors["bias"], scale=tensors["scale"], residual=tensors["residual"][0], padding=1, relu=True)
    all_ = fused(x, w, tensors["bias"], scale=tensors["scale"], residual=tensors["residual"], padding=1, relu=True)
    torch.testing.assert_close(one, all_[0])
    none = fused(x[:0], w, tensors["bias"], padding=1, relu=True)
    assert none.shape == (0, 6, 9, 11)
    none.sum().backward()


def test_autocast_transforms_and_compilers(device):
    x, w, tensors = arguments(device, torch.float32, {"padding": 1}, "bias residual relu")

    def f(x: Tensor) -> Tensor:
        return fused(x, w, **tensors, padding=1, relu=True)

    want = f(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = f(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want, rtol=0.05, atol=0.05)
    each = torch.func.vmap(lambda a, r: fused(a, w, tensors["bias"], residual=r, padding=1, relu=True))
    torch.testing.assert_close(each(x, tensors["residual"]), want)
    _, tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))
    with torch.no_grad():
        inside = (want > 0).float()
        torch.testing.assert_close(tangent, inside * F.conv2d(torch.ones_like(x), w, padding=1))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want)
    (g,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (e,) = torch.autograd.grad(want.square().sum(), x)
    torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


def test_scripted(device):
    @torch.jit.script
    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.ops.patchconv.conv2d_fused(x, w, b, [1, 1], [1, 1], relu=True)

    x, w, tensors = arguments(device, torch.float32, {"padding": 1}, "bias relu")
    torch.testing.assert_close(f(x, w, tensors["bias"]), fused(x, w, tensors["bias"], padding=1, relu=True))


NUMBERS = ([1, 1], [1, 1, 1, 1], [1, 1], [], 1, "zeros")


def test_operators_are_sound(device):
    x, w, tensors = arguments(device, torch.float32, {"padding": 1}, "scale bias residual relu")
    rest = {"scale": tensors["scale"], "residual": tensors["residual"], "relu": True}
    ops = torch.ops.patchconv
    torch.library.opcheck(ops.conv2d_fused.default, (x, w, tensors["bias"], [1], [1]), rest)
    torch.library.opcheck(ops.conv2d_fused.default, (x, w, tensors["bias"], [1], [1]), {"relu": True})
    flat = {name: t.detach() if isinstance(t, Tensor) else t for name, t in rest.items()}
    x, w = x.detach(), w.detach()
    for mask in (False, True):
        torch.library.opcheck(ops._convolution_fused.default, (x, w, None, *flat.values(), mask, *NUMBERS))
    y, bits = ops._convolution_fused(x, w, None, None, None, True, True, *NUMBERS)
    given = backward_arguments(torch.randn_like(y), x, w, x.shape, w.shape, bits=bits, padding=1)
    torch.library.opcheck(ops._convolution_backward.default, given)
    with pytest.raises(RuntimeError, match="expected a dense grad_output and a bit for each element"):
        ops._convolution_backward(*given[:-1], bits[:-1])


def test_backward_under_vmap_and_with_tangents(device):
    """The backward operator takes bits; transforms and forward-mode AD see it with the bits applied."""
    x, w, _ = arguments(device, torch.float64, {"padding": 1}, "relu")
    y = fused(x, w, padding=1, relu=True)
    stock = F.relu(F.conv2d(x, w, padding=1))
    grads = torch.randn(3, *y.shape, dtype=torch.float64, device=device)

    def batched(of: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vmap(lambda g: torch.autograd.grad(of, (x, w), g, retain_graph=True))(grads)

    torch.testing.assert_close(batched(y), batched(stock))

    def tangent(of: Tensor) -> list[Tensor | None]:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(grads[0], grads[1])
            found = torch.autograd.grad(of, (x, w), dual, retain_graph=True)
            return [torch.autograd.forward_ad.unpack_dual(one).tangent for one in found]

    torch.testing.assert_close(tangent(y), tangent(stock))


def test_a_traced_step_runs_with_gradients_recorded(device):
    x, w, _ = arguments(device, torch.float32, {"padding": 1}, "relu")

    def step(x: Tensor, w: Tensor) -> Tensor:
        return torch.autograd.grad(fused(x, w, padding=1, relu=True).square().sum(), w)[0]

    traced = torch.fx.experimental.proxy_tensor.make_fx(step)(x, w)
    torch.testing.assert_close(traced(x, w), step(x, w))


ERRORS = {
    "conv2d_fused: expected bias to": (ValueError, {"scale": torch.ones(6), "bias": torch.ones(5)}),
    "conv2d_fused: expected bias to have the dtype of input":
        (TypeError, {"scale": torch.ones(6), "bias": torch.ones(6).double()}),
    "expected scale to have K = 6 elements, got shape [5]": (ValueError, {"scale": torch.ones(5)}),
    "expected scale to be of a floating-point dtype, got Int": (TypeError, {"scale": torch.ones(6, dtype=torch.int32)}),
    "expected residual to have the result's shape [2, 6, 7, 9], got [2, 6, 7, 1]":
        (ValueError, {"residual": torch.ones(2, 6, 7, 1)}),
    "expected residual to be of input's dtype Float, got Double":
        (TypeError, {"residual": torch.ones(2, 6, 7, 9, dtype=torch.float64)}),
    "conv2d_fused: expected relu to be a bool, got 1 (int)": (TypeError, {"relu": 1}),
    "conv2d_fused: expected scale to be a Tensor or None, got float": (TypeError, {"scale": 1.0}),
    "conv2d_fused: expected stride to be": (TypeError, {"stride": "two"}),
}  # fmt: skip


@pytest.mark.parametrize("text", ERRORS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_errors(text, needs_grad):
    kind, wrong = ERRORS[text]
    x, w = torch.randn(2, 4, 9, 11, requires_grad=needs_grad), torch.randn(6, 4, 3, 3)
    with pytest.raises(kind) as caught:
        fused(x, w, **wrong)
    assert text in str(caught.value)
