"""What a configuration must satisfy: values and gradients as near to float64 as stock PyTorch's, and exact
form.

The bound on an error is 1.1 times the error that stock makes on the same numbers plus a slack of the size
that another order of summation can make: half a unit in the last place of the result, and the accumulator's
rounding times the square root of the number of terms times the sum of the terms' absolute values. For float32
and float64, where every product is accumulated in that type, the textbook bound (terms * unit * sum of
absolute values) caps each element too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import patchconv_native as pc
from support import reference
from support.configurations import DTYPES, Configuration, Tensors, build, build_grad
from support.threads import threads

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
ON_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Where oneDNN's workspace is known."""
SUMS_IN_BFLOAT16 = not ON_AVX512
"""Whether stock adds the products of small bfloat16 gradients up in bfloat16 on this CPU: far from one rounding."""
NAMES = ("output", "grad_input", "grad_weight", "grad_bias")


def operator(c: Configuration) -> Callable[..., Tensor]:
    """The library's operator with the configuration's arguments, to be called with tensors."""
    native = getattr(torch.ops.patchconv, c.operator)
    padding = c.padding
    if isinstance(padding, str):
        named = getattr(pc.functional, c.operator)
        rest = {"padding_mode": c.padding_mode, "splits": c.splits}
        return lambda x, w, b: named(x, w, b, c.stride, padding, c.dilation, c.groups, **rest)
    splits = [c.splits] if isinstance(c.splits, int) else c.splits
    if c.transposed:
        return lambda x, w, b: native(x, w, b, c.stride, padding, c.output_padding, c.groups, c.dilation, splits=splits)
    rest = {"padding_mode": c.padding_mode, "splits": splits}
    return lambda x, w, b: native(x, w, b, c.stride, padding, c.dilation, c.groups, **rest)


def stock(c: Configuration, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Stock PyTorch on the same arguments: what it cannot pad itself is padded with F.pad first."""
    if crashes_stock(c):
        return stock(replace(c, dtype="float32"), x.float(), w.float(), None if b is None else b.float()).to(x.dtype)
    call = getattr(F, c.operator)
    if c.transposed:
        return call(x, w, b, c.stride, c.padding, c.output_padding, c.groups, c.dilation)
    pairs = reference.padding_pairs(c.padding, c.kernel, c.dilation)
    if c.padding_mode == "zeros" and all(before == after for before, after in pairs):
        return call(x, w, b, c.stride, [pair[0] for pair in pairs], c.dilation, c.groups)
    mode = "constant" if c.padding_mode == "zeros" else c.padding_mode
    padded = F.pad(x, [n for pair in reversed(pairs) for n in pair], mode=mode)
    return call(padded, w, b, c.stride, 0, c.dilation, c.groups)


def crashes_stock(c: Configuration) -> bool:
    """oneDNN's bfloat16 kernels for AVX-512 crash where, in some dimension, no tap of any kernel meets the grid."""
    if c.dtype not in ("float16", "bfloat16"):
        return False
    pairs = reference.padding_pairs(c.padding, c.kernel, c.dilation)
    for d, (size, kernel, (before, after)) in enumerate(zip(c.sizes, c.kernel, pairs, strict=True)):
        reach = (kernel - 1) * c.dilation[d] + 1
        big, small = size, (size + before + after - reach) // c.stride[d] + 1
        if c.transposed:
            big, small = (size - 1) * c.stride[d] - 2 * before + reach + c.output_padding[d], size
        taps = (p * c.stride[d] + r * c.dilation[d] - before for p in range(small) for r in range(kernel))
        if not any(0 <= tap < big for tap in taps):
            return True
    return False


def oracle(c: Configuration, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return (reference.conv_transpose if c.transposed else reference.conv)(x, w, b, **c.arguments())


Change = Callable[[Tensor], Tensor]


def forward_backward(call: Any, leaves: Tensors, grad: Change, prepare: Change = lambda t: t) -> list[Any]:
    """[output, grad_input, grad_weight, grad_bias]; None where no gradient is asked for."""
    x, w, b = (t if t is None else prepare(t.detach()).requires_grad_(t.requires_grad) for t in vars(leaves).values())
    y = call(x, w, b)
    return [y.detach(), *reference.gradients(y, [x, w, b], grad(y))]


def terms(c: Configuration, output: Tensor) -> list[int]:
    """The number of products in each sum: of the output and of the gradients."""
    taps = torch.Size(c.kernel).numel()
    batch = 1 if c.batch is None else c.batch
    places = max(1, batch * torch.Size(c.sizes if c.transposed else output.shape[-c.dims :]).numel())
    everywhere = max(1, batch * torch.Size(output.shape[-c.dims :]).numel())
    return [c.channels // c.groups * taps + 1, c.outputs // c.groups * taps, places, everywhere]


@lru_cache(maxsize=2)
def references(c: Configuration, device: str) -> list[list[Any]]:
    """Output and gradients by stock PyTorch, in float64, and the sums of the terms' absolute values.

    None of them depends on how the call is cut: a test that cuts it in several ways computes them once.
    """
    assert c.splits is None and c.limit is None
    leaves = build(c, device)
    # With more threads, some of its weight gradients damage the heap (tests/conv/test_onednn.py).
    with threads(min(2, torch.get_num_threads())):
        theirs = forward_backward(lambda *t: stock(c, *t), leaves, lambda y: build_grad(c, y))
    # From float64 leaves: their gradients would otherwise be rounded to the leaves' dtype.
    graded = lambda y: build_grad(c, theirs[0]).double()  # noqa: E731
    exact = forward_backward(lambda *t: oracle(c, *t), leaves, graded, prepare=torch.Tensor.double)
    sizes = forward_backward(
        lambda *t: oracle(c, *t),
        leaves,
        lambda y: build_grad(c, theirs[0]).double().abs(),
        prepare=lambda t: t.double().abs(),
    )
    return [theirs, exact, sizes]


def check(c: Configuration, device: str = "cpu") -> dict[str, object]:
    """Raises AssertionError where the library differs; returns what pc.last_path() says after the forward pass."""
    leaves = build(c, device)
    kept = [None if t is None else t.detach().clone() for t in vars(leaves).values()]
    path: dict[str, object] = {}

    def ours_and_path(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = operator(c)(x, w, b)
        path.update(pc.last_path())
        return y

    with pc.workspace_limit(c.limit) if c.limit is not None else contextlib.nullcontext():
        ours = forward_backward(ours_and_path, leaves, lambda y: build_grad(c, y))
    theirs, exact, sizes = references(replace(c, splits=None, limit=None), device)

    for before, tensor in zip(kept, vars(leaves).values(), strict=True):
        assert before is None or torch.equal(before, tensor.detach()), "an argument was written to"
    for name, count, got, theirs_, wanted, total in zip(
        NAMES, terms(c, theirs[0]), ours, theirs, exact, sizes, strict=True
    ):
        assert (got is None) == (theirs_ is None), f"{name}: {got is not None} but stock {theirs_ is not None}"
        if got is None or theirs_ is None or wanted is None or total is None:
            continue
        assert got.shape == theirs_.shape, f"{name}: shape {tuple(got.shape)}, stock {tuple(theirs_.shape)}"
        assert got.dtype == theirs_.dtype, f"{name}: {got.dtype}, stock {theirs_.dtype}"
        assert got.device == theirs_.device, f"{name}: {got.device}, stock {theirs_.device}"
        if got.numel():
            check_values(name, c, count, got, theirs_, wanted, total)
    check_format(c, leaves, ours[0], theirs[0])
    return path


def check_tiled(c: Configuration, device: str) -> None:
    """Right in the tiles that are asked for, in every pass; in one piece; and in what is chosen for the call."""
    with pc.record_paths() as records:
        path = check(c, device)
    assert path["path"] == "tiled" and path["tiles"] == list(c.splits), path
    passes = {"fprop"} | {name for name, wanted in zip(("dgrad", "wgrad"), c.requires_grad, strict=False) if wanted}
    assert {r["pass"] for r in records} == passes, records
    assert all(r["op"] == c.operator and r["path"] == "tiled" and r["count"] >= max(c.splits) for r in records), records

    check(replace(c, splits=None), device)
    whole = check(replace(c, splits=(1,) * c.dims), device)
    assert whole["path"] == ("stock" if stock_serves(c) else "tiled"), whole


def stock_serves(c: Configuration) -> bool:
    """Whether stock PyTorch takes this padding without a padded copy of the input."""
    if c.transposed:
        return True
    pairs = reference.padding_pairs(c.padding, c.kernel, c.dilation)
    nothing = all(pair == (0, 0) for pair in pairs)
    return nothing or (c.padding_mode == "zeros" and all(before == after for before, after in pairs))


def check_values(name: str, c: Configuration, count: int, *values: Tensor) -> None:
    got, theirs, wanted, total = values
    unit = UNIT[DTYPES[c.dtype]]
    accumulator = min(unit, UNIT[torch.float32])
    tiny = 2.0**-25 if c.dtype == "float16" else 0.0
    error = (got.double() - wanted).abs()
    # Where oneDNN reads freed memory, stock's own result may be NaN.
    stock_error = (theirs.double() - wanted).abs().max().nan_to_num(0.0, 0.0)
    if name == "grad_input":  # padding that shows an element again adds to its gradient
        count *= copies(c)
    slack = unit * wanted.abs().max() + 2 * accumulator * count**0.5 * total.abs().max() + tiny
    worst = error.max()
    assert worst <= 1.1 * stock_error + slack, (
        f"{name}: error {worst:.3e} at {place_of_max(error)}, stock {stock_error:.3e}, slack {slack:.3e}"
    )
    if accumulator == unit:
        cap = (count + 2) * unit * total.abs() + unit * wanted.abs()
        over = error > cap
        assert not over.any(), f"{name}: error {error[over].max():.3e} over the bound at {int(over.sum())} places"


def copies(c: Configuration) -> int:
    """How often the input's most repeated element stands in the padded input."""
    if c.padding_mode == "zeros":
        return 1
    found = 1
    pairs = reference.padding_pairs(c.padding, c.kernel, c.dilation)
    for size, (before, after) in zip(c.sizes, pairs, strict=True):
        places = range(-before, size + after)
        found *= max(Counter(reference.source_index(p, size, c.padding_mode) for p in places).values())
    return found


def place_of_max(error: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))


def check_format(c: Configuration, leaves: Tensors, got: Tensor | None, theirs: Tensor | None) -> None:
    """The output is channels_last where input or weight is, else contiguous; never anything in between.

    Stock's strides are the same for contiguous and channels_last images with plain weights. Elsewhere it has
    moods (a transposed weight makes a 1-D result strided, groups lose the layout of a volume), which are not
    copied.
    """
    assert got is not None and theirs is not None
    batched = got if c.batch is not None else got.unsqueeze(0)
    if c.dims == 1:
        assert batched.is_contiguous()
        return
    last = torch.channels_last if c.dims == 2 else torch.channels_last_3d
    given = leaves.input if c.batch is not None else leaves.input.unsqueeze(0)
    kept = given.is_contiguous(memory_format=last) and not given.is_contiguous()
    if kept:
        assert batched.is_contiguous(memory_format=last), f"channels_last is lost: {got.stride()}"
    elif c.weight_layout != "channels_last":
        assert batched.is_contiguous() or batched.is_contiguous(memory_format=last), got.stride()
    if c.weight_layout == "contiguous" and (
        c.layout == "contiguous" or (c.layout == "channels_last" and c.dims == 2 and c.padding_mode != "circular")
    ):
        meant = [d for d in range(got.dim()) if got.shape[d] > 1] if got.numel() else []
        strides, stock_strides = [got.stride(d) for d in meant], [theirs.stride(d) for d in meant]
        assert strides == stock_strides, f"strides {got.stride()} of {tuple(got.shape)}, stock {theirs.stride()}"
