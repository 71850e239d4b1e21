"""The kernels of packed masks, max pools and dropout against float64, forward and backward.

Exact values are stock PyTorch's in float64 on the CPU, fed with the rounded tensors that the device gets; numpy makes
dropout's mask again from the published generator. What is a selection must be exact. A product may be rounded once to
float32 and once to the tensor's type, a sum of gradients once per term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.native import CONTENTS, DTYPES, Mistaken, contents, laid_out, large, native, near, philox
from support.pairs import pairwise
from torch import Tensor

ops = torch.ops.patchconv
TILE = 8192  # the most elements that a block of any of these kernels takes

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (lambda x: ops.relu(x), F.relu),
    "relu_": (lambda x: ops.relu_(x * 1), F.relu),
    "leaky_relu": (lambda x: ops.leaky_relu(x, 0.01), lambda x: F.leaky_relu(x, 0.01)),
    "hardtanh": (lambda x: ops.hardtanh(x, -0.25, 0.75), lambda x: F.hardtanh(x, -0.25, 0.75)),
    "relu6": (lambda x: ops.hardtanh(x, 0, 6), F.relu6),
    "threshold": (lambda x: ops.threshold(x, 0.125, 2.5), lambda x: F.threshold(x, 0.125, 2.5)),
    "hardsigmoid": (lambda x: ops.hardsigmoid(x), F.hardsigmoid),
}
# Shape, elements by which it begins off an aligned address, channels_last.
FORMS: dict[str, tuple[tuple[int, ...], int, bool]] = {
    "tiles": ((3 * TILE + 37,), 0, False), "one": ((1,), 0, False), "off by one": ((TILE - 1,), 1, False),
    "off by three": ((33,), 3, False), "channels_last": ((2, 5, 19, 23), 0, True), "image": ((2, 5, 64, 64), 0, False),
}  # fmt: skip
# Sizes; kernel, stride, padding, dilation and ceil_mode, or the output's size where it is adaptive.
POOLS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "2x2": ((38, 46), (2, 2, 0, 1, False)), "3x3 overlapping": ((37, 45), (3, 2, 1, 1, True)),
    "with holes": ((19, 23), (3, 1, 1, 2, False)), "two bytes per offset": ((41, 43), (18, 5, 9, 1, False)),
    "line": ((301,), (5, 3, 2, 1, False)), "volume": ((9, 10, 11), (3, 2, 1, 1, False)), "adaptive": ((19, 23), (7, 5)),
    "adaptive volume": ((7, 9, 11), (3, 4, 5)),
}  # fmt: skip


def passes(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
    """[output, gradient of the input]"""
    leaf = x.detach().requires_grad_()
    y = call(leaf)
    return [y.detach(), *torch.autograd.grad(y, leaf, grad)]


@pairwise(name=list(ACTIVATIONS), dtype=list(DTYPES), content=CONTENTS, form=list(FORMS))
def test_activations(device: str, name: str, dtype: str, content: str, form: str) -> None:
    (shape, *place), (ours, stock) = FORMS[form], ACTIVATIONS[name]
    generator = torch.Generator().manual_seed(13)
    x = contents(shape, content, generator).to(DTYPES[dtype])
    grad = torch.randn(shape, generator=generator).to(DTYPES[dtype])
    with native(device):
        found = passes(ours, laid_out(x, *place, device), laid_out(grad, *place, device))
    exact = passes(stock, x.double(), grad.double())
    for what, got, want in zip(("output", "grad_input"), found, exact, strict=True):
        near(what, got, want, 2.0**-22 * want.abs(), x.dtype)  # a slope or a sixth in float32, and the product with it


@pairwise(name=list(POOLS), dtype=list(DTYPES), content=CONTENTS, channels_last=[False, True])
def test_max_pools(device: str, name: str, dtype: str, content: str, channels_last: bool) -> None:
    sizes, windows = POOLS[name]
    dims, adaptive = len(sizes), name.startswith("adaptive")
    function = f"{'adaptive_' if adaptive else ''}max_pool{dims}d"

    def ours(x: Tensor) -> Tensor:
        if adaptive:
            return getattr(ops, function)(x, list(windows))
        return getattr(ops, function)(x, *([n] * dims for n in windows[:4]), windows[4])

    def stock(x: Tensor) -> Tensor:
        return getattr(F, function)(x, windows if adaptive else windows[0], *(() if adaptive else windows[1:]))

    generator = torch.Generator().manual_seed(17)
    x = contents((2, 5, *sizes), content, generator).to(DTYPES[dtype])
    grad = torch.randn(stock(x.double()).shape, generator=generator).to(x.dtype)
    with native(device):
        y, back = passes(ours, laid_out(x, 0, channels_last and dims > 1, device), grad.to(device))
    exact = passes(stock, x.double(), grad.double())
    size = passes(stock, x.double(), grad.double().abs())[1]  # of the terms of each sum: at most 4 a dimension
    near("output", y, exact[0], 0.0, x.dtype)
    near("grad_input", back, exact[1], 4**dims * 2.0**-24 * size, x.dtype)


def kept(seed: int, p: float, count: int, first: int = 0) -> Tensor:
    """What dropout of this seed keeps of the elements from 4 * first on."""
    return torch.from_numpy(philox(seed, first, count) >= np.uint64(int(p * 2**32 + 0.5)))


def test_philox() -> None:
    """The words that the generator's authors give for key and counter 0."""
    assert [hex(int(word)) for word in philox(0, 0, 4)] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    assert (philox(2**62 + 3, 5, 9) == philox(2**62 + 3, 0, 29)[20:]).all()


@pairwise(p=[0.1, 0.5], shift_fill=[(0.0, 0.0), (0.25, -1.5)], dtype=list(DTYPES))
def test_dropout(device: str, p: float, shift_fill: tuple[float, float], dtype: str) -> None:
    """A mask of a known seed; then of a seed that the operator draws, forward and backward."""
    (shift, fill), off = shift_fill, int(p == 0.5)
    generator = torch.Generator().manual_seed(19)
    count, seed, scale = 3 * TILE + 37, 2**62 + 987654321, 1 / (1 - p)
    x, grad = (torch.randn(count, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    x = torch.where(x == 0, torch.ones_like(x), x)  # so that what is dropped shows
    there = laid_out(x, off, False, device)
    with native(device):
        got = ops._dropout(there, torch.tensor([seed], device=device), p, scale, shift, fill)
        y, back = passes(lambda x: ops.dropout(x, p), there, laid_out(grad, off, False, device))
    exact = torch.where(kept(seed, p, count), x.double() * scale + shift, fill)
    near("of a seed", got, exact, 2.0**-22 * ((x.double() * scale).abs() + abs(shift)), x.dtype)
    mine = (y != 0).cpu()
    assert abs(float(mine.double().mean()) - (1 - p)) <= 6 * (p * (1 - p) / count) ** 0.5
    for what, found, given in (("output", y, x), ("grad_input", back, grad)):
        product = given.double() * scale * mine
        near(what, found, product, 2.0**-22 * product.abs(), x.dtype)


@pytest.mark.parametrize(
    ("test", "arguments", "mistake"),
    [
        (test_activations, ("leaky_relu", "float32", "noise", "image"), lambda y: y * (1 + 1e-6)),
        (test_activations, ("relu", "float16", "ramp", "off by one"), lambda y: y + y * 2.0**-10),
        (test_max_pools, ("2x2", "float32", "noise", False), lambda y: y.roll(1, -1)),
        (test_dropout, (0.5, (0.25, -1.5), "float32"), lambda y: y.roll(1, -1)),
    ],
)
def test_mistakes_are_noticed(test, arguments: tuple[Any, ...], mistake: Callable[[Tensor], Tensor], monkeypatch):
    monkeypatch.setitem(globals(), "ops", Mistaken(mistake))
    with pytest.raises(AssertionError, match=r"error .* times its bound"):
        test("cpu", *arguments)


def probe(device: str, elements: int, width: int) -> list[str]:
    """Masks, dropout and a max pool of so many elements: what is not exact at the places that are looked at."""
    x, places = large(elements, device)
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
    return wrong


def test_the_probe_of_large_tensors_notices_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"device": "cpu", "elements": 3 * 2**16 + 4, "width": 64}
    assert probe(**small) == []
    of_seed = kept
    monkeypatch.setitem(globals(), "kept", lambda seed, p, count, first: of_seed(seed, p, count, first + 1))
    monkeypatch.setattr(F, "max_unpool2d", lambda *_, **__: torch.zeros(()))
    assert [name.split(" at ")[0] for name in probe(**small)] == ["dropout"] * 3 + ["max pool"] * 3


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_more_than_two_billion_elements() -> None:
    assert probe("cuda", 2**31 + 3 * TILE + 44, 2**16 + 4) == []
