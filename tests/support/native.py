"""What the tests of the project's CUDA kernels share: tensors, and the bound on an error against float64.

On a GPU the kernels are asked for by pc.backend("native"). Elsewhere the same operators compute with that device's own
code, which tests the tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import patchconv_native as pc
from support.checks import UNIT
from support.pairs import FULL
from support.seeds import DEVICES

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CONTENTS = ("noise", "ramp", "steps", "spike")


def some(values: Sequence[Any]) -> list[Any]:
    """All of them where there is a GPU and under `make check`, else every third: the CPU only tests the tests."""
    return list(values)[:: 1 if FULL or "cuda" in DEVICES else 3]


def native(device: str) -> contextlib.AbstractContextManager[Any]:
    return pc.backend("native") if device == "cuda" else contextlib.nullcontext()


def contents(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    """Float32 values on the CPU. Ramps, steps and a single spike show mistakes at seams that noise hides."""
    if kind == "noise":
        return torch.randn(shape, generator=generator)
    if kind == "spike":
        values = torch.zeros(shape)
        values.view(-1)[values.numel() // 3] = 1
        return values
    place = torch.zeros(shape)
    for axis, size in enumerate(shape):
        place += (axis + 1) * torch.arange(size).view([-1] + [1] * (len(shape) - axis - 1))
    return place / 8 - 3 if kind == "ramp" else (place % 5 < 2).float()


def laid_out(values: Tensor, off: int, channels_last: bool, device: str) -> Tensor:
    """On the device, dense, `off` elements from an aligned address."""
    order = values.movedim(1, -1) if channels_last else values
    room = torch.empty(values.numel() + off, dtype=values.dtype, device=device)
    there = room[off:].view(order.shape).copy_(order)
    return there.movedim(-1, 1) if channels_last else there


def near(name: str, got: Tensor, exact: Tensor, slack: Tensor | float, dtype: torch.dtype) -> None:
    """Asserts that `got` is `exact` but for one rounding to `dtype` and `slack`."""
    assert (got.dtype, got.shape) == (dtype, exact.shape), f"{name}: {got.dtype} {tuple(got.shape)}"
    tiny = 2.0**-25 if dtype == torch.float16 else 1e-300  # half a step between denormal numbers
    error = (got.detach().cpu().double() - exact).abs()
    ratio = (error / (UNIT[dtype] * exact.abs() + slack + tiny)).nan_to_num(float("inf"))
    assert ratio.numel() == 0 or ratio.max() <= 1, f"{name}: error {float(ratio.max()):.3g} times its bound"
