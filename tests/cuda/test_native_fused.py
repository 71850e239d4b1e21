"""relu(convolution * scale + bias + residual) by the project's kernels against float64, forward and backward.

The shapes are those that the kernels divide in different ways: channels and outputs past a block's 64 and 128 and past
a chunk's 32, rows past a tile, first layers, depthwise, groups, dilation, strides, every padding mode. On a GPU a pass
that anything else computed is a failure. Random shapes of all convolutions are in test_conv_native.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.checks import SUMS_IN_BFLOAT16, UNIT
from support.native import contents, native, near, some
from support.pairs import pairwise
from torch import Tensor

import patchconv_native as pc

ops = torch.ops.patchconv
TF32 = 2.0**-10  # of the sum of absolute products: both factors are rounded to 11 bits, or cut off
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def shape(channels: int, outputs: int, sizes: tuple[int, int], kernel: int, **more: Any) -> dict[str, Any]:
    usual = {"stride": 1, "padding": kernel // 2, "dilation": 1, "groups": 1, "padding_mode": "zeros"}
    return usual | {"channels": channels, "outputs": outputs, "sizes": sizes, "kernel": kernel} | more


SHAPES = [
    shape(16, 24, (19, 23), 3), shape(64, 64, (17, 35), 3), shape(72, 136, (9, 33), 3),
    shape(3, 64, (21, 25), 7, stride=2), shape(32, 32, (19, 23), 3, groups=32),
    shape(16, 16, (18, 23), 3, padding=2, padding_mode="reflect"), shape(32, 48, (11, 40), 1),
    shape(16, 32, (19, 23), 3, stride=2), shape(32, 32, (19, 22), 3, stride=2, groups=32),
    shape(16, 16, (18, 23), 3, padding=2, padding_mode="replicate"),
    shape(16, 16, (18, 23), 3, padding=2, padding_mode="circular"), shape(16, 16, (22, 27), 3, dilation=2, padding=2),
    shape(64, 16, (14, 14), 7), shape(16, 64, (12, 30), 5), shape(32, 64, (9, 11), 3, groups=2),
    shape(32, 64, (15, 18), 5, groups=32),  # two outputs per channel
    shape(64, 64, (12, 13), 7, groups=64, dilation=2, padding=6), shape(3, 32, (20, 26), 3), shape(1, 16, (20, 26), 5),
    shape(7, 13, (19, 23), 3), shape(64, 32, (15, 16), 1, stride=2), shape(8, 16, (16, 19), 2, stride=2),
    shape(32, 32, (11, 13), 3, groups=32, padding=2, padding_mode="circular"),
]  # fmt: skip
PARTS = ("bias relu", "bias", "scale bias relu", "bias residual relu", "scale bias residual relu", "relu", "residual")


def wide(tensor: Tensor | None, other: float) -> Tensor | float:
    """One value per channel, in float64."""
    return other if tensor is None else tensor.double().view(-1, 1, 1)


class Case:
    """Tensors on the CPU; what is exact, in float64; and sums of absolute products, which the bounds are made of."""

    def __init__(self, shape: dict[str, Any], dtype: torch.dtype, parts: str, content: str) -> None:
        self.shape, self.parts = shape, parts.split()
        generator = torch.Generator().manual_seed(29)
        size = (shape["outputs"], shape["channels"] // shape["groups"], shape["kernel"], shape["kernel"])
        self.x = contents((2, shape["channels"], *shape["sizes"]), content, generator).to(dtype)
        self.weight = (torch.randn(size, generator=generator) / torch.Size(size[1:]).numel() ** 0.5).to(dtype)
        self.leaves = [t.double().requires_grad_() for t in (self.x, self.weight)]
        self.sums = self.convolved(*self.leaves)
        made = {
            "bias": torch.randn(size[0], generator=generator), "scale": torch.rand(size[0], generator=generator) + 0.5,
            "residual": torch.randn(self.sums.shape, generator=generator),
        }  # fmt: skip
        self.bias, self.scale, self.residual = (
            made[name].to(dtype) if name in self.parts else None for name in ("bias", "scale", "residual")
        )
        self.grad = torch.randn(self.sums.shape, generator=generator).to(dtype)

    def convolved(self, x: Tensor, weight: Tensor) -> Tensor:
        padding, mode = self.shape["padding"], self.shape["padding_mode"]
        if mode != "zeros":
            x, padding = F.pad(x, (padding,) * 4, mode=mode), 0
        return F.conv2d(x, weight, None, self.shape["stride"], padding, self.shape["dilation"], self.shape["groups"])

    def compare(self, y: Tensor, grads: dict[str, Tensor], each: float, sums: float, twice: bool) -> None:
        """`each`: the rounding of a product, `sums`: of a sum's term. `twice`: the convolution's result is rounded
        before scale, bias and residual are applied. ReLU's derivative is taken where `y` is positive:
        a value near zero may round to either side, which is judged as a value.
        """
        scale, dtype = wide(self.scale, 1.0), self.x.dtype
        residual = 0.0 if self.residual is None else self.residual.double()
        before = self.sums.detach() * scale + wide(self.bias, 0.0) + residual
        relu = "relu" in self.parts
        passed = self.grad.double() * ((y.detach().cpu() > 0) if relu else 1)
        absolute = [t.double().abs().requires_grad_() for t in (self.x, self.weight)]
        most = self.convolved(*absolute)
        sizes = torch.autograd.grad(most, absolute, (passed * scale).abs())
        exact = torch.autograd.grad(self.sums, self.leaves, passed * scale)
        slack = each * (most.detach() * scale + before.abs() + 1)
        if twice:
            slack = slack + UNIT[dtype] * ((self.sums.detach() * scale).abs() + abs(wide(self.bias, 0.0)))
        near("output", y, before.relu() if relu else before, slack, dtype)
        for name, want, size in zip(("input", "weight"), exact, sizes, strict=True):
            near(f"grad_{name}", grads[name], want, each * size, dtype)
        if self.bias is not None:
            near("grad_bias", grads["bias"], passed.sum((0, 2, 3)), sums * passed.abs().sum((0, 2, 3)), dtype)
        if self.residual is not None:
            near("grad_residual", grads["residual"], passed, 0.0, dtype)


@pairwise(
    number=some(range(len(SHAPES))), dtype=list(DTYPES), parts=PARTS, content=["noise", "ramp"], layout=["NCHW", "NHWC"]
)
def test_values_and_gradients(device, number: int, dtype: str, parts: str, content: str, layout: str, monkeypatch):
    case = Case(SHAPES[number], DTYPES[dtype], parts, content)

    def there(tensor: Tensor | None, wants: bool = True) -> Tensor | None:
        if tensor is None:
            return None
        put = tensor.detach().to(device)
        if layout == "NHWC" and put.dim() == 4:
            put = put.contiguous(memory_format=torch.channels_last)
        return put.requires_grad_(wants)

    leaves = {name: there(getattr(case, name)) for name in ("x", "weight", "bias", "residual")}
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", dtype == "tf32")
    given = SHAPES[number]
    with native(device), pc.record_paths() as records:
        y = ops.conv2d_fused(
            leaves["x"], leaves["weight"], leaves["bias"], [given["stride"]] * 2, [given["padding"]] * 2,
            [given["dilation"]] * 2, given["groups"], scale=there(case.scale, False), residual=leaves["residual"],
            relu="relu" in case.parts, padding_mode=given["padding_mode"],
        )  # fmt: skip
        wanted = {name.replace("x", "input"): leaf for name, leaf in leaves.items() if leaf is not None}
        grads = torch.autograd.grad(y, list(wanted.values()), there(case.grad, False))
    if device == "cuda":
        found = {(one["pass"], one["path"]) for one in records}
        assert found == {(pass_, "native") for pass_ in ("fprop", "dgrad", "wgrad")}
    # A float32 sum is rounded, or cut off, at most once per term. On the CPU stock sums some products of float16 in it,
    # and without AVX-512 those of bfloat16.
    coarse = {"float16": 2.0**-8} | ({"bfloat16": 2.0**-5} if SUMS_IN_BFLOAT16 else {})
    sums = coarse.get(dtype, 2.0**-20) if device == "cpu" else 2.0**-20
    each = sums + (TF32 if dtype == "tf32" else 0.0)
    if case.scale is not None and y.dtype != torch.float32:
        each += 2.0**-8 if dtype == "bfloat16" else 2.0**-11  # the gradient times the scale is rounded too
    composed = device == "cpu" or "relu" not in case.parts or case.scale is not None  # with gradients
    case.compare(y, dict(zip(wanted, grads, strict=True)), each, sums, twice=composed)


@pytest.mark.parametrize(
    ("part", "mistake", "what"),
    [
        ("y", lambda t: t * (1 + 2.0**-6), "output"),
        ("y", lambda t: t.roll(1, 3), "output"),
        ("scale", lambda t: t.roll(1), "output"),
        ("bias", lambda t: t * 0, "output"),
        ("residual", lambda t: t.detach() + 0 * t, "grad_residual"),
        ("input", lambda t: t.detach() + 2 * (t - t.detach()), "grad_input"),
        ("weight", lambda t: t.detach() + 1.1 * (t - t.detach()), "grad_weight"),
        ("bias", lambda t: t.detach() + 0.9 * (t - t.detach()), "grad_bias"),
    ],
)
def test_mistakes_are_noticed(part: str, mistake: Callable[[Tensor], Tensor], what: str, monkeypatch) -> None:
    class Wrong:
        def conv2d_fused(self, input: Tensor, weight: Tensor, bias: Tensor, *given: Any, **more: Any) -> Tensor:
            tensors = {"input": input, "weight": weight, "bias": bias, **more}
            if part != "y":
                tensors[part] = mistake(tensors[part])
            first = [tensors.pop(name) for name in ("input", "weight", "bias")]
            y = torch.ops.patchconv.conv2d_fused(*first, *given, **tensors)
            return mistake(y) if part == "y" else y

    monkeypatch.setitem(globals(), "ops", Wrong())
    with pytest.raises(AssertionError, match=f"^{what}: error"):
        dtype = "float32" if SUMS_IN_BFLOAT16 else "bfloat16"  # what is summed in bfloat16 has too wide a bound
        test_values_and_gradients("cpu", 0, dtype, "scale bias residual relu", "noise", "NCHW", monkeypatch)
