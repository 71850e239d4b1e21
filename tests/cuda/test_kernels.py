"""The CUDA kernels, run on the CPU by tests/host_cuda under AddressSanitizer and UndefinedBehaviorSanitizer.

What a kernel computes is compared with the operators of the CPU, which are compared with stock PyTorch's elsewhere:
the bits must be the same where both round once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import kernels
from support.kernels import Call, Memory
from support.native import philox
from support.pairs import pairwise
from torch import Tensor

import patchconv_native  # noqa: F401  (registers the operators)

pytestmark = pytest.mark.timeout(1200)  # the first that runs compiles the executor

ops = torch.ops.patchconv
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])

# A tile of activation.cu: 256 threads, 4 pieces of 16 bytes each.
TILE = {torch.float32: 4096, torch.float16: 8192, torch.bfloat16: 8192}
MASKS: dict[str, tuple[int, float, float]] = {
    "relu": (0, 0.0, 0.0), "leaky_relu": (1, 0.01, 0.0), "hardtanh": (2, -0.3, 0.7), "relu6": (2, 0.0, 6.0),
    "threshold": (3, 0.1, 2.3), "hardsigmoid": (4, 0.0, 0.0),
}  # fmt: skip


def values(count: int, dtype: torch.dtype) -> Tensor:
    """Noise, with limits of the activations, infinities and both zeros among it."""
    x = torch.randn(count, dtype=torch.float64) * 3
    special = torch.tensor([0.0, -0.0, 3, -3, 6, 0.1, 0.7, -0.3, torch.inf, -torch.inf, 1e-30], dtype=torch.float64)
    places = torch.randperm(count)[: count // 3]
    x[places] = special[torch.randint(len(special), (len(places),))]
    return x.to(dtype)


def bits_of(count: int) -> Tensor:
    return torch.full(((count + 7) // 8,), 0xEE, dtype=torch.uint8)


def counts(dtype: torch.dtype) -> list[int]:
    tile = TILE[dtype]
    return [0, 1, 7, 8, 31, 32, 33, 255, 1000, tile - 1, tile, tile + 1, 2 * tile + 37]


def forward_call(x: Tensor, kind: str, *, other: Tensor | None = None, off: int = 0, store: str = "y") -> Call:
    mask, a, b = MASKS[kind]
    y = None if store == "bits" else torch.empty_like(x).fill_(77)
    buffers = [Memory(x, off), Memory(other, off), Memory(y, off), Memory(bits_of(len(x)))]
    return Call("mask_forward", x.dtype, (mask, len(x), a, b), buffers)


def same(got: Tensor, want: Tensor, what: Any) -> None:
    """The same numbers; of zeros not the sign, which stock's devices do not agree on either."""
    assert torch.equal(got.isnan(), want.isnan()), what
    assert torch.equal(got.nan_to_num(), want.nan_to_num()), what


def test_the_executor():
    """Shuffles, shared memory and barriers, over blocks in shuffled order."""
    x = torch.randint(0, 100, (7, 96)).float()
    ((_, sums),) = kernels.run([Call("selftest_sum", torch.float32, [7], [Memory(x), Memory(torch.zeros(7))])])
    assert torch.equal(sums, x.sum(1))


def test_votes_of_the_executor():
    x = torch.randint(-3, 4, (32,)).float()
    ((_, y),) = kernels.run([Call("selftest_votes", torch.float32, [], [Memory(x), Memory(torch.zeros(32))])])
    votes = sum(1 << lane for lane in range(32) if x[lane] > 0)
    assert torch.equal(y, torch.full((32,), votes).float())  # as float32 holds it


@DTYPES
def test_products_of_the_executor(dtype):
    """cp.async in two stages with zeros beyond the end, ldmatrix as it lies and transposed, and mma."""
    for k in (8, 16, 32, 40, 96, 200):
        a, b = torch.randn(16, k).to(dtype), torch.randn(k, 8).to(dtype)
        buffers = [Memory(a), Memory(b), Memory(torch.zeros(16, 8))]
        ((_, _, c),) = kernels.run([Call("selftest_product", dtype, [k], buffers)])
        rounded = [tf32(t) if dtype == torch.float32 else t.double() for t in (a, b)]
        torch.testing.assert_close(c.view(16, 8).double(), rounded[0] @ rounded[1], rtol=1e-5, atol=1e-5)


def tf32(x: Tensor) -> Tensor:
    """10 bits behind the point, ties away from zero."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()


BY_SANITIZERS = pytest.mark.skipif(bool(kernels.HOW), reason="of the program with sanitizers")
FAULTS = {
    "barrier": (0, "thread 0 waits at a barrier for threads that do not come"),
    "shuffle": (1, "thread 0 waits at a shuffle for threads that do not come"),
    "shared": (2, "use-after-poison"), "global": (3, "heap-buffer-overflow"),
    "different operations": (6, "lanes of a warp meet at a shuffle and at a ballot"),
}  # fmt: skip


@BY_SANITIZERS
@pytest.mark.parametrize("fault", FAULTS)
def test_the_executor_finds_faults(fault):
    number, text = FAULTS[fault]
    with pytest.raises(kernels.Fault, match=text):
        kernels.run([Call("selftest_fault", torch.float32, [number], [Memory(torch.zeros(96))])])


@BY_SANITIZERS
@pytest.mark.parametrize("number", [4, 5], ids=["never written", "not waited for"])
def test_shared_memory_holds_what_was_written(number):
    """And no zeros elsewhere; nothing of an asynchronous copy before it is waited for."""
    ((y,),) = kernels.run([Call("selftest_fault", torch.float32, [number], [Memory(torch.zeros(96))])])
    assert (y.view(torch.int32) == -0x58585859).all()  # 0xa7 in every byte


@DTYPES
@pytest.mark.parametrize("kind", MASKS)
def test_mask_forward(kind, dtype):
    xs = [values(count, dtype) for count in counts(dtype)]
    offs = [0 if i % 3 else dtype.itemsize for i in range(len(xs))]
    found = kernels.run([forward_call(x, kind, off=off) for x, off in zip(xs, offs, strict=True)])
    for x, (_, _, y, bits) in zip(xs, found, strict=True):
        mask, a, b = MASKS[kind]
        if kind == "threshold":  # on CUDA, and there alone, stock rounds it to the tensor's type
            a = torch.tensor(a, dtype=dtype).item()
        want_y, want_bits = ops._mask_forward(x, mask, a, b)
        assert torch.equal(bits, want_bits), len(x)
        if kind == "hardsigmoid":  # a sixth times, on the device; by six, on the CPU
            torch.testing.assert_close(y, want_y, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
        else:
            same(y, want_y, len(x))


@DTYPES
def test_mask_of_a_sum(dtype):
    xs = [values(count, dtype).nan_to_num(0, 5, -5) for count in counts(dtype)]
    others = [values(len(x), dtype).nan_to_num(0, 5, -5) for x in xs]
    found = kernels.run([forward_call(x, "relu", other=other) for x, other in zip(xs, others, strict=True)])
    for x, other, (_, _, y, bits) in zip(xs, others, found, strict=True):
        want_y, want_bits = ops._mask_forward(x + other, 0, 0.0, 0.0)
        same(y, want_y, len(x))
        assert torch.equal(bits, want_bits)


@DTYPES
def test_bits_alone(dtype):
    xs = [values(count, dtype) for count in counts(dtype)]
    found = kernels.run([forward_call(x, "hardtanh", store="bits") for x in xs])
    for x, (kept, _, _, bits) in zip(xs, found, strict=True):
        assert torch.equal(bits, ops._mask_pack(x, *MASKS["hardtanh"]))
        same(kept, x, "the input was written to")


def test_not_a_number():
    for dtype in TILE:
        x = torch.full((40,), torch.nan, dtype=dtype)
        for kind in MASKS:
            ((_, _, y, bits),) = kernels.run([forward_call(x, kind)])
            assert torch.equal(bits, ops._mask_forward(x, *MASKS[kind])[1]) and y.isnan().all()


@DTYPES
@pytest.mark.parametrize("inside,outside", [(1.0, 0.0), (1.0, 0.01), (0.25, 0.0), (1 / 6, 0.0), (0.0, 1.0)])
def test_mask_backward(dtype, inside, outside):
    calls, wanted = [], []
    for i, count in enumerate(counts(dtype)):
        grad = values(count, dtype)
        bits = ops._mask_pack(values(count, dtype), 0, 0.0, 0.0)
        off = 0 if i % 3 else dtype.itemsize
        buffers = [Memory(grad, off), Memory(bits), Memory(torch.full_like(grad, 77), off)]
        calls.append(Call("mask_backward", dtype, (count, inside, outside), buffers))
        wanted.append(ops._mask_backward(grad, bits, inside, outside))
    for (_, _, got), want in zip(kernels.run(calls), wanted, strict=True):
        same(got, want, len(want))


@pairwise(dtype=list(TILE), p=[0.0, 0.3, 1.0], dropped=[(0.0, 0.0), (0.25, -1.5)])
def test_dropout(dtype, p, dropped):
    """The mask of the CPU's kernel for the same seed, at any alignment, also in place."""
    shift, fill = dropped
    scale = 1 / (1 - p) if p < 1 else 0.0
    calls, wanted = [], []
    for i, count in enumerate(counts(dtype)):
        x = torch.randn(count).to(dtype)
        seed = torch.tensor([2**62 + 12345 * i])
        off = 0 if i % 3 else dtype.itemsize
        y = Memory(torch.full_like(x, 77), off)
        calls.append(Call("dropout", dtype, (count, p, scale, shift, fill), [Memory(x, off), y, Memory(seed)]))
        wanted.append(ops._dropout(x, seed, p, scale, shift, fill))
    for (_, got, _), want in zip(kernels.run(calls), wanted, strict=True):
        same(got, want, len(want))


def test_dropout_past_two_to_the_34():
    """Where the number of the Philox block takes more than 32 bits, past what the CPU can hold."""
    count, seed, p = 2**34 + TILE[torch.bfloat16] + 5, 987654321, 0.4
    x = torch.ones(TILE[torch.bfloat16] + 5, dtype=torch.bfloat16)
    buffers = [Memory(x, 0, count), Memory(torch.zeros_like(x), 0, count), Memory(torch.tensor([seed]))]
    ((_, got, _),) = kernels.run([Call("dropout", torch.bfloat16, (count, p, 1.0, 0.0, 0.0), buffers, 2)])
    first = count - len(x)
    for i in (0, 1, 7, 4096, len(x) - 1):
        word = philox(seed, (first + i) // 4, 4)[(first + i) % 4]
        assert got[i] == float(word >= int(p * 2**32 + 0.5))


@DTYPES
def test_past_two_to_the_31(dtype):
    """The last blocks of tensors of more than 2^31 and 2^32 elements: indices are not cut to 32 bits."""
    tile = TILE[dtype]
    calls, wanted = [], []
    for count in (2**31 + 5 * tile + 123, 2**32 + 3 * tile + 8):
        rest = count % tile
        x = values(tile + rest, dtype)  # what the last two blocks see
        y, bits = torch.full_like(x, 77), bits_of(len(x))
        calls.append(Call("mask_forward", dtype, (0, count, 0.0, 0.0), [
            Memory(x, 0, count), Memory(None), Memory(y, 0, count), Memory(bits, 0, (count + 7) // 8)], 2))  # fmt: skip
        wanted.append(ops._mask_forward(x, 0, 0.0, 0.0))
        want_bits = wanted[-1][1]
        calls.append(Call("mask_backward", dtype, (count, 1.0, 0.0), [
            Memory(x, 0, count), Memory(want_bits, 0, (count + 7) // 8), Memory(y.clone(), 0, count)], 2))  # fmt: skip
        wanted.append((ops._mask_backward(x, want_bits, 1.0, 0.0), want_bits))
    for call, found, (want, want_bits) in zip(calls, kernels.run(calls), wanted, strict=True):
        same(found[2], want, call.kernel)
        if call.kernel == "mask_forward":
            assert torch.equal(found[3], want_bits)


# Kernel, stride, padding, dilation of a dimension, or the output's size where it is adaptive.
POOLS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "2x2": ((9, 12), ((2, 2, 0, 1), (2, 2, 0, 1))), "3x3 overlapping": ((9, 7), ((3, 2, 1, 1), (3, 2, 1, 1))),
    "holes": ((11, 9), ((3, 1, 2, 2), (2, 3, 1, 3))), "line": ((37,), ((5, 3, 2, 1),)),
    "volume": ((5, 6, 7), ((2, 2, 0, 1), (3, 2, 1, 1), (2, 1, 1, 2))),
    "large window": ((20, 21), ((17, 4, 8, 1), (18, 5, 9, 1))),
    "adaptive": ((9, 10), (4, 7)), "adaptive volume": ((5, 7, 4), (2, 3, 3)), "adaptive to one": ((8, 6), (1, 1)),
}  # fmt: skip


def numbers_of(first: list[int], sizes: Sequence[int], out: Sequence[int], windows: Sequence[Any]) -> list[int]:
    """What the kernels get of a pool: three dimensions, each with its sizes and its window, whole where adaptive."""
    adaptive = isinstance(windows[0], int)
    given = [w if isinstance(w, tuple) else (1, 1, 0) for w in windows]
    rows = [(n, o, int(adaptive), *w, 1)[:7] for n, o, w in zip(sizes, out, given, strict=True)]
    alone = (1, 1, int(adaptive), 1, 1, 0, 1)
    return [*first, *(number for row in [alone] * (3 - len(sizes)) + rows for number in row)]


def in_order(inner: int, t: Tensor) -> Tensor:
    """As a pool reads it: with channels last where they are the inner dimension."""
    return t.permute(0, *range(2, t.dim()), 1).flatten() if inner > 1 else t.flatten()


@pairwise(name=list(POOLS), inner=[1, 5], dtype=list(TILE))
def test_max_pool(name, inner, dtype):
    """Values, places and gradients of the CPU's kernel, which sums gradients in float32 in the same order."""
    sizes, windows = POOLS[name]
    adaptive = isinstance(windows[0], int)
    spec = [[]] * 4 if adaptive else [list(column) for column in zip(*windows, strict=True)]
    out = list(windows) if adaptive else [
        (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, (k, s, p, d) in zip(sizes, windows, strict=True)]  # fmt: skip
    shape = (2, 3, *sizes) if inner == 1 else (6, inner, *sizes)
    if inner > 1 and len(sizes) == 1:
        pytest.skip("lines have no channels_last")
    last = torch.channels_last if len(sizes) == 2 else torch.channels_last_3d
    format = torch.contiguous_format if inner == 1 else last
    x = values(torch.Size(shape).numel(), dtype).view(shape)
    x[0, 0].flatten()[3] = torch.nan
    x = x.to(memory_format=format)
    want, offsets = ops._max_pool(x, *spec, out)
    if offsets.dtype == torch.int32:
        pytest.skip("windows of more than 65536 places")
    numbers = numbers_of([6, inner, offsets.element_size()], sizes, out, windows)
    flat = partial(in_order, inner)
    grad = torch.randn(want.shape).to(dtype).to(memory_format=format)
    back = ops._max_pool_backward(grad, offsets, list(x.shape), *spec)
    x_memory, y_memory = Memory(flat(x)), Memory(torch.full_like(flat(want), 77))
    places_memory, empty = Memory(flat(offsets)), Memory(torch.full_like(flat(offsets), 99))
    (_, y, places), (_, taken, _), (_, _, gradient) = kernels.run([
        Call("max_pool", dtype, numbers, [x_memory, y_memory, empty]),
        Call("max_pool_take", dtype, numbers, [x_memory, y_memory, places_memory]),
        Call("max_pool_backward", dtype, numbers, [Memory(flat(grad)), places_memory, Memory(flat(x) * 0 + 77)]),
    ])  # fmt: skip
    same(y, flat(want), "forward")
    assert torch.equal(places, flat(offsets))
    same(taken, flat(want), "taken")
    torch.testing.assert_close(gradient, flat(back), rtol=torch.finfo(dtype).eps * 4, atol=0)


# As POOLS, and what follows: ceil_mode, count_include_pad, divisor_override.
AVERAGES: dict[str, tuple[tuple[int, ...], tuple[Any, ...], tuple[bool, bool, int | None]]] = {
    "2x2": ((9, 12), ((2, 2, 0), (2, 2, 0)), (False, True, None)),
    "overlapping": ((9, 7), ((3, 2, 1), (3, 1, 1)), (False, True, None)),
    "padding does not count": ((9, 7), ((3, 2, 1), (3, 1, 1)), (False, False, None)),
    "beyond the padding": ((8, 9), ((3, 2, 1), (4, 3, 2)), (True, True, None)),
    "beyond the padding, which does not count": ((8, 9), ((3, 2, 1), (4, 3, 2)), (True, False, None)),
    "divisor": ((8, 9), ((3, 2, 0), (2, 3, 0)), (False, True, 5)),
    "gaps": ((11, 10), ((2, 3, 0), (1, 4, 0)), (False, True, None)),
    "volume": ((5, 6, 7), ((2, 2, 0), (3, 2, 1), (2, 1, 1)), (True, True, None)),
    "adaptive": ((9, 10), (4, 7), (False, True, None)), "adaptive volume": ((5, 7, 4), (2, 3, 3), (False, True, None)),
    "adaptive to more": ((3, 4), (5, 9), (False, True, None)),
}  # fmt: skip


@pairwise(name=list(AVERAGES), inner=[1, 5], dtype=list(TILE))
def test_avg_pool(name, inner, dtype):
    """Values and gradients against stock's in float64."""
    sizes, windows, (ceil, count_padding, divisor) = AVERAGES[name]
    adaptive, dims = isinstance(windows[0], int), len(sizes)
    shape = (2, 3, *sizes) if inner == 1 else (6, inner, *sizes)
    x = torch.randn(shape).to(dtype)
    leaf = x.double().requires_grad_()
    if adaptive:
        want = [F.adaptive_avg_pool2d, F.adaptive_avg_pool3d][dims - 2](leaf, windows)
    else:
        spec = [list(column) for column in zip(*windows, strict=True)]
        want = [F.avg_pool2d, F.avg_pool3d][dims - 2](leaf, *spec, ceil, count_padding, divisor)
    grad = torch.randn(want.shape).to(dtype)
    (back,) = torch.autograd.grad(want, leaf, grad.double())
    numbers = [*numbers_of([6, inner, int(count_padding)], sizes, want.shape[2:], windows), divisor or 0]
    flat = partial(in_order, inner)
    y, result = torch.full_like(flat(want.detach()), 77, dtype=dtype), torch.full_like(flat(x), 77)
    (_, got), (_, gradient) = kernels.run([
        Call("avg_pool", dtype, numbers, [Memory(flat(x)), Memory(y)]),
        Call("avg_pool_backward", dtype, numbers, [Memory(flat(grad)), Memory(result)]),
    ])  # fmt: skip
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), flat(want.detach()), rtol=4 * eps, atol=eps)
    torch.testing.assert_close(gradient.double(), flat(back), rtol=4 * eps, atol=4 * eps)


# 2^31 planes of 2x2, of which 1027 at the end are given, and how many outputs and inputs the last blocks write.
OUTER, SEEN = 2**31 + 3, 1027
PLANES = [OUTER, 1, 1, *[1, 1, 0, 1, 1, 0, 1], *[2, 1, 0, 2, 2, 0, 1] * 2]
OUTPUTS, INPUTS = 1024 + OUTER % 1024, 4 * OUTER % 1024 or 1024


def far_end(values: Tensor, planes: int = 1) -> Memory:
    return Memory(values.flatten(), 0, planes * OUTER)


def test_max_pool_past_two_to_the_31():
    """The last blocks: places, and gradients."""
    dtype = torch.float16
    x = torch.randn(SEEN, 2, 2).to(dtype)
    y, places = torch.zeros(SEEN, dtype=dtype), torch.zeros(SEEN, dtype=torch.uint8)
    ((_, got, offsets),) = kernels.run(
        [Call("max_pool", dtype, PLANES, [far_end(x, 4), far_end(y), far_end(places)], 2)]
    )
    best, where = x.flatten(1).max(1)
    assert torch.equal(got[-OUTPUTS:], best[-OUTPUTS:])
    assert torch.equal(offsets[-OUTPUTS:].long(), where[-OUTPUTS:])
    grad = torch.randn(SEEN).to(dtype)
    buffers = [far_end(grad), far_end(where.to(torch.uint8)), far_end(torch.full_like(x, 77), 4)]
    ((_, _, gradient),) = kernels.run([Call("max_pool_backward", dtype, PLANES, buffers, 1)])
    want = torch.zeros(SEEN, 4, dtype=dtype).scatter_(1, where[:, None], grad[:, None]).flatten()
    assert torch.equal(gradient[-INPUTS:], want[-INPUTS:])


def test_avg_pool_past_two_to_the_31():
    """The last blocks: means, and gradients."""
    dtype = torch.float16
    x, grad = torch.randn(SEEN, 2, 2).to(dtype), torch.randn(SEEN).to(dtype)
    y, result = torch.full_like(grad, 77), torch.full_like(x, 77)
    (_, got), (_, gradient) = kernels.run([
        Call("avg_pool", dtype, [*PLANES, 0], [far_end(x, 4), far_end(y)], 2),
        Call("avg_pool_backward", dtype, [*PLANES, 0], [far_end(grad), far_end(result, 4)], 1),
    ])  # fmt: skip
    want, back = x.double().mean((1, 2)), (grad.double() / 4).repeat_interleave(4)
    torch.testing.assert_close(got[-OUTPUTS:].double(), want[-OUTPUTS:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gradient[-INPUTS:].double(), back[-INPUTS:], rtol=1e-3, atol=0)
    assert (got[:-OUTPUTS] == 77).all() and (gradient[:-INPUTS] == 77).all()
