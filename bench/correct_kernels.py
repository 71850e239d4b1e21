"""The kernels of packed masks, max pools and dropout against float64, forward and backward: a part of bench.correct.

On CUDA they are asked for by pc.backend("native"). Elsewhere the same operators compute with that device's own code,
which tests this file. Exact values are stock PyTorch's in float64 on the CPU, fed with the rounded tensors that the
device gets; dropout's mask is made again by numpy from the published generator. What is a selection must be exact; a
product may be rounded once to float32 and once to the tensor's type, a sum of gradients once a term.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import patchconv_native as pc

from .cases import CONTENTS, UNIT, contents

ops = torch.ops.patchconv
Found = tuple[float, str]  # the largest error in units of its bound, and what was wrong ("" if nothing)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 8192  # the most elements that a block of any of these kernels takes

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (ops.relu, F.relu),
    "relu_": (lambda x: ops.relu_(x * 1), F.relu),
    "leaky_relu": (lambda x: ops.leaky_relu(x, 0.01), lambda x: F.leaky_relu(x, 0.01)),
    "hardtanh": (lambda x: ops.hardtanh(x, -0.25, 0.75), lambda x: F.hardtanh(x, -0.25, 0.75)),
    "relu6": (lambda x: ops.hardtanh(x, 0, 6), F.relu6),
    "threshold": (lambda x: ops.threshold(x, 0.125, 2.5), lambda x: F.threshold(x, 0.125, 2.5)),
    "hardsigmoid": (ops.hardsigmoid, F.hardsigmoid),
}
# Shape, and how many elements the tensor begins off an aligned address; None: channels_last.
FORMS: list[tuple[tuple[int, ...], int | None]] = [
    ((3 * TILE + 37,), 0), ((1,), 0), ((TILE - 1,), 1), ((33,), 3), ((2, 5, 19, 23), None), ((2, 5, 64, 64), 0),
]  # fmt: skip

# Sizes; kernel, stride, padding, dilation and ceil_mode, or the output's size where it is adaptive.
POOLS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "2x2": ((38, 46), (2, 2, 0, 1, False)),
    "3x3 overlapping": ((37, 45), (3, 2, 1, 1, True)),
    "with holes": ((19, 23), (3, 1, 1, 2, False)),
    "of two bytes an offset": ((41, 43), (18, 5, 9, 1, False)),
    "line": ((301,), (5, 3, 2, 1, False)),
    "volume": ((9, 10, 11), (3, 2, 1, 1, False)),
    "adaptive": ((19, 23), (7, 5)),
    "adaptive volume": ((7, 9, 11), (3, 4, 5)),
}


def native(device: str) -> contextlib.AbstractContextManager[Any]:
    """The project's own kernels where they are."""
    return pc.backend("native") if device == "cuda" else contextlib.nullcontext()


def compared(results: list[tuple[str, Tensor, Tensor, Tensor | float]], dtype: torch.dtype) -> Found:
    """(name, what came, what is exact, the bound beside the one rounding to `dtype`) of every result."""
    worst, wrong = 0.0, ""
    for name, got, exact, slack in results:
        if got.dtype != dtype or got.shape != exact.shape:
            return float("inf"), f"{name}: {got.dtype} {tuple(got.shape)}"
        bound = UNIT[dtype] * exact.abs() + slack + (2.0**-25 if dtype == torch.float16 else 1e-300)
        error = (got.detach().cpu().double() - exact).abs()
        ratio = float((error / bound).nan_to_num(float("inf")).max()) if error.numel() else 0.0
        if ratio > 1 and not wrong:
            wrong = f"{name}: error {ratio:.3g} times its bound"
        worst = max(worst, ratio)
    return worst, wrong


def passes(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor | None = None) -> list[Tensor]:
    """[output, gradient of the input]; without a gradient of the output, for one of ones."""
    leaf = x.detach().requires_grad_()
    y = call(leaf)
    return [y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y) if grad is None else grad)]


def laid_out(values: Tensor, off: int | None, device: str) -> Tensor:
    """On the device, in channels_last or `off` elements from an aligned address."""
    if off is None:
        return values.to(device).contiguous(memory_format=torch.channels_last)
    room = torch.empty(values.numel() + off, dtype=values.dtype, device=device)
    return room[off:].view(values.shape).copy_(values)


def mask(name: str, dtype: torch.dtype, content: str, form: tuple[tuple[int, ...], int | None], device: str) -> Found:
    (shape, off), (ours, stock) = form, ACTIVATIONS[name]
    generator = torch.Generator().manual_seed(13)
    x = contents(shape, content, generator).to(dtype)
    grad = torch.randn(shape, generator=generator).to(dtype)
    with native(device):
        y, back = passes(ours, laid_out(x, off, device), laid_out(grad, off, device))
    exact = passes(stock, x.double(), grad.double())
    # A slope or a sixth in float32, and the product with it.
    return compared([("output", y, exact[0], 2.0**-22 * exact[0].abs()),
                     ("grad_input", back, exact[1], 2.0**-22 * exact[1].abs())], dtype)  # fmt: skip


def pool(name: str, dtype: torch.dtype, content: str, channels_last: bool, device: str) -> Found:
    sizes, windows = POOLS[name]
    dims, adaptive = len(sizes), isinstance(windows[-1], int) and not isinstance(windows[-1], bool)
    function = f"{'adaptive_' if adaptive else ''}max_pool{dims}d"

    def ours(x: Tensor) -> Tensor:
        if adaptive:
            return getattr(ops, function)(x, list(windows))
        return getattr(ops, function)(x, *([n] * dims for n in windows[:4]), windows[4])

    def stock(x: Tensor) -> Tensor:
        return getattr(F, function)(x, windows if adaptive else windows[0], *(() if adaptive else windows[1:]))

    generator = torch.Generator().manual_seed(17)
    x = contents((2, 5, *sizes), content, generator).to(dtype)
    shape = stock(x.double()).shape
    grad = torch.randn(shape, generator=generator).to(dtype)
    there = x.to(device)
    if channels_last and dims > 1:
        there = there.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    with native(device):
        y, back = passes(ours, there, grad.to(device))
    exact = passes(stock, x.double(), grad.double())
    size = passes(stock, x.double(), grad.double().abs())[1]  # of the terms of each sum: at most 4 a dimension
    return compared([("output", y, exact[0], 0.0), ("grad_input", back, exact[1], 4**dims * 2.0**-24 * size)], dtype)


def philox(seed: int, first: int, count: int) -> np.ndarray:
    """`count` words of Philox4x32-10 from block `first` on: the seed is its key, the block's number its counter."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    blocks = np.arange(first, first + -(-count // 4), dtype=np.uint64)
    a, b, c, d = blocks & low, blocks >> shift, np.zeros_like(blocks), np.zeros_like(blocks)
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        one, two = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = two >> shift ^ b ^ np.uint64(key[0]), two & low, one >> shift ^ d ^ np.uint64(key[1]), one & low
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack([a, b, c, d], 1).reshape(-1)[:count]


def kept(seed: int, p: float, count: int, first: int = 0) -> Tensor:
    """What dropout of this seed keeps of the elements from 4 * first on."""
    return torch.from_numpy(philox(seed, first, count) >= np.uint64(int(p * 2**32 + 0.5)))


def dropout(p: float, shift: float, fill: float, dtype: torch.dtype, off: int, device: str) -> Found:
    """A mask of a known seed; then of a seed that the operator draws, forward and backward."""
    generator = torch.Generator().manual_seed(19)
    count, seed, scale = 3 * TILE + 37, 2**62 + 987654321, 1 / (1 - p)
    x = torch.randn(count, generator=generator).to(dtype)
    x = torch.where(x == 0, torch.ones_like(x), x)  # so that what is dropped shows
    grad = torch.randn(count, generator=generator).to(dtype)
    there = laid_out(x, off, device)
    with native(device):
        got = ops._dropout(there, torch.tensor([seed], device=device), p, scale, shift, fill)
        y, back = passes(lambda x: ops.dropout(x, p), there, laid_out(grad, off, device))
    exact = torch.where(kept(seed, p, count), x.double() * scale + shift, fill)
    mine = (y != 0).cpu()
    share = float(mine.double().mean())
    if abs(share - (1 - p)) > 6 * (p * (1 - p) / count) ** 0.5:
        return float("inf"), f"kept {share:.4f} of the elements, expected {1 - p:.4f}"
    slack = 2.0**-22 * ((x.double() * scale).abs() + abs(shift))
    products = [values.double() * scale * mine for values in (x, grad)]
    return compared([("of a seed", got, exact, slack),
                     ("output", y, products[0], 2.0**-22 * products[0].abs()),
                     ("grad_input", back, products[1], 2.0**-22 * products[1].abs())], dtype)  # fmt: skip


def checks(few: bool = False) -> Iterator[tuple[str, Callable[[str], Found]]]:
    """Every kind in every type; contents, sizes and layouts take turns."""
    dtypes = DTYPES[: 2 if few else 3]
    turns = itertools.cycle(itertools.product(CONTENTS, FORMS))
    for name, dtype in itertools.product(ACTIVATIONS, dtypes):
        for content, form in itertools.islice(turns, 1 if few else 7):  # 7 and 24 have no common divisor
            yield f"mask {name} {dtype} {content} {form}", partial(mask, name, dtype, content, form)
    layouts = itertools.cycle(itertools.product(CONTENTS, (False, True)))
    for name, dtype in itertools.product(POOLS, dtypes):
        for content, last in itertools.islice(layouts, 1 if few else 3):
            yield f"max pool {name} {dtype} {content} channels_last={last}", partial(pool, name, dtype, content, last)
    for p, (shift, fill), dtype in itertools.product((0.1, 0.5), ((0.0, 0.0), (0.25, -1.5)), dtypes):
        off = int(p == 0.5)
        yield f"dropout {p} {shift} {fill} {dtype} off {off}", partial(dropout, p, shift, fill, dtype, off)


def probe_large(device: str, elements: int = 2**31 + 3 * TILE + 44, width: int = 2**16 + 4) -> Found:
    """Masks, dropout and a max pool of over 2^31 elements (bfloat16), at telling places. All of it is exact."""
    generator = torch.Generator(device).manual_seed(23)
    x = torch.empty(elements, dtype=torch.bfloat16, device=device)
    for part in x.split(2**27):
        part.copy_(torch.randn(len(part), device=device, generator=generator))
    length = min(2**16, elements // 4 * 4)
    starts = sorted({0, max(0, min(2**31, elements) - length // 2) // 4 * 4, (elements - length) // 4 * 4})
    places = [slice(start, min(start + length, elements)) for start in starts]
    wrong = []
    with native(device), torch.no_grad():
        y, bits = ops._mask_forward(x, 0, 0.0, 0.0)
        back = ops._mask_backward(x, bits, 1.0, 0.0)
        for part in places:
            wanted = x[part].clamp(min=0)
            if not (torch.equal(y[part], wanted) and torch.equal(back[part], wanted)):
                wrong.append(f"mask at {part.start}")
        del y, bits, back
        dropped = ops._dropout(x, torch.tensor([77], device=device), 0.5, 2.0, 0.0, 0.0)
        for part in places:
            mask = kept(77, 0.5, part.stop - part.start, part.start // 4).to(device)
            if not torch.equal(dropped[part], x[part] * 2 * mask):
                wrong.append(f"dropout at {part.start}")
        del dropped
        rows = elements // width // 2 * 2
        plane = x[: rows * width].view(1, 1, rows, width)
        spec: tuple[Any, ...] = ([2, 2], [2, 2], [0, 0], [1, 1])
        best, offsets = ops._max_pool(plane, *spec, [rows // 2, width // 2])
        back = ops._max_pool_backward(best, offsets, list(plane.shape), *spec)
        for top in (0, rows // 4 * 2, rows - 2):
            wanted, index = F.max_pool2d(plane[:, :, top : top + 2].float(), 2, return_indices=True)
            grads = F.max_unpool2d(wanted, index, [2, 2], output_size=(2, width))
            got, got_back = best[:, :, top // 2 : top // 2 + 1], back[:, :, top : top + 2]
            if not (torch.equal(got.float(), wanted) and torch.equal(got_back.float(), grads)):
                wrong.append(f"max pool at row {top}")
    return (float("inf"), f"above 2^31 elements: {', '.join(wrong)}") if wrong else (0.0, "")
