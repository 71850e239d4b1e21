"""What the tests of the project's CUDA kernels share: tensors, and the bound on an error against float64.

On a GPU the kernels are asked for by pc.backend("native"). Elsewhere the same operators compute with that device's own
code, which tests the tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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


class Mistaken:
    """torch.ops.patchconv with a mistake in what one operator returns, or each of them."""

    def __init__(self, mistake: Callable[[Any], Any], operator: str = "") -> None:
        self.mistake, self.operator = mistake, operator

    def __getattr__(self, name: str) -> Any:
        made = getattr(torch.ops.patchconv, name)
        return (lambda *given: self.mistake(made(*given))) if self.operator in ("", name) else made


def large(elements: int, device: str, mean: float = 0.0) -> tuple[Tensor, list[slice]]:
    """So many numbers (bfloat16), and places that are looked at: the first ones, those about 2^31, and the last."""
    generator = torch.Generator(device).manual_seed(23)
    flat = torch.empty(elements, dtype=torch.bfloat16, device=device)
    for part in flat.split(2**27):
        part.copy_(torch.randn(len(part), device=device, generator=generator) + mean)
    length = min(2**16, elements // 4 * 4)
    starts = {0, max(0, min(2**31, elements) - length // 2) // 4 * 4, (elements - length) // 4 * 4}
    return flat, [slice(start, min(start + length, elements)) for start in sorted(starts)]


def philox(seed: int, first: int, count: int) -> np.ndarray:
    """`count` words of Philox4x32-10 from block `first` on: the seed is its key, the block's number its counter."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    blocks = np.arange(first, first + -(-count // 4), dtype=np.uint64)
    a, b, c, d = blocks & low, blocks >> shift, np.zeros_like(blocks), np.zeros_like(blocks)
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        one, two = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = two >> shift ^ b ^ np.uint64(key[0]), two & low, one >> shift ^ d ^ np.uint64(key[1]), one & low
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack([a, b, c, d], 1).reshape(-1)[:count]
