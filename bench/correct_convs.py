"""What bench.correct asks of the project's own convolution kernels, and the fused operator against float64.

The shapes are those that the kernels divide in different ways: channels and outputs past a block's 64 and 128 and past
a chunk's 32, rows past a tile, first layers, depthwise, groups, dilation, strides, every padding mode, transposed. On
CUDA they are asked for by pc.backend("native"), and a pass that anything else computed is a failure. Elsewhere the same
operators compute with that device's own code, which tests this file.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import CONTENTS, contents
from .correct_kernels import Found, compared, native

ops = torch.ops.patchconv
TF32 = 2.0**-10  # of the sum of absolute products: both factors are rounded to 11 bits, or cut off
TYPES = [(torch.float32, False), (torch.float32, True), (torch.float16, False), (torch.bfloat16, False)]


def _kind(channels: int, outputs: int, sizes: tuple[int, ...], kernel: int, **more: Any) -> dict[str, Any]:
    dims = len(sizes)
    given = {"dims": dims, "transposed": False, "kernel": (kernel,) * dims, "padding": (kernel // 2,)}
    return given | {"channels": channels, "outputs": outputs, "sizes": sizes} | more


KINDS: list[dict[str, Any]] = [
    _kind(16, 24, (19, 23), 3),
    _kind(64, 64, (17, 35), 3),
    _kind(72, 136, (9, 33), 3),
    _kind(3, 64, (21, 25), 7, stride=2),
    _kind(32, 32, (19, 23), 3, groups=32),
    _kind(16, 16, (18, 23), 3, padding=(2,), mode="reflect"),
    _kind(32, 48, (11, 40), 1, padding=(0,)),
    _kind(16, 32, (19, 23), 3, stride=2),
    _kind(32, 32, (19, 22), 3, stride=2, groups=32),
    _kind(16, 16, (18, 23), 3, padding=(2,), mode="replicate"),
    _kind(16, 16, (18, 23), 3, padding=(2,), mode="circular"),
    _kind(16, 16, (22, 27), 3, dilation=2, padding=(2,)),
    _kind(64, 16, (14, 14), 7),
    _kind(16, 64, (12, 30), 5),
    _kind(32, 64, (9, 11), 3, groups=2),
    _kind(32, 64, (15, 18), 5, groups=32),  # two outputs a channel
    _kind(64, 64, (12, 13), 7, groups=64, dilation=2, padding=(6,)),
    _kind(3, 32, (20, 26), 3),
    _kind(1, 16, (20, 26), 5),
    _kind(7, 13, (19, 23), 3),
    _kind(64, 32, (15, 16), 1, stride=2, padding=(0,)),
    _kind(8, 16, (16, 19), 2, stride=2, padding=(0,)),
    _kind(16, 16, (13, 20), 3, padding=(0, 1, 2, 3)),
    _kind(16, 16, (13, 21), 3, stride=3, padding=(2, 0, 1, 4), mode="reflect"),
    _kind(32, 32, (11, 13), 3, groups=32, padding=(2,), mode="circular"),
    _kind(16, 24, (301,), 5),
    _kind(16, 16, (203,), 9, groups=16, dilation=3, padding=(12,)),
    _kind(8, 16, (7, 9, 11), 3),
    _kind(16, 16, (6, 8, 10), 3, stride=2, padding=(1,), mode="replicate"),
    _kind(16, 24, (10, 13), 4, transposed=True, stride=2, padding=(1,)),
    _kind(24, 16, (9, 12), 3, transposed=True, stride=2, output_padding=1),
    _kind(32, 32, (9, 12), 3, transposed=True, stride=2, groups=32, output_padding=1),
    _kind(16, 16, (12, 14), 3, transposed=True, groups=2),
    _kind(8, 16, (5, 6, 7), 3, transposed=True, stride=2),
]


@contextlib.contextmanager
def allowed(tf32: bool) -> Iterator[None]:
    """TF32 in convolutions of float32, or not."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def not_native(records: list[dict[str, Any]]) -> str:
    """What is wrong with the paths that a call and its backward took."""
    others = [f"{r['pass']} by {r['path']}" for r in records if r["path"] != "native"]
    missing = {"fprop", "dgrad", "wgrad"} - {r["pass"] for r in records}
    return "; ".join([*others, *(f"{pass_} not recorded" for pass_ in sorted(missing))])


# ----------------------------------------------------------------------------------------------------------------------
# conv2d_fused: relu(convolution * scale + bias + residual)

PARTS = [
    ("bias", "relu"), ("bias",), ("scale", "bias", "relu"), ("bias", "residual", "relu"),
    ("scale", "bias", "residual", "relu"), ("relu",), ("residual",),
]  # fmt: skip


def fused(
    kind: dict[str, Any], dtype: torch.dtype, tf32: bool, parts: tuple[str, ...], content: str, channels_last: bool,
    device: str,
) -> Found:  # fmt: skip
    """The result, and gradients of input, weight, bias and residual. ReLU's derivative is taken where our result is
    positive: a value near zero may round to either side, which is judged as a value."""
    generator = torch.Generator().manual_seed(29)
    groups, stride, dilation = kind.get("groups", 1), kind.get("stride", 1), kind.get("dilation", 1)
    padding, mode = kind["padding"][0], kind.get("mode", "zeros")
    size = (kind["outputs"], kind["channels"] // groups, *kind["kernel"])
    x = contents((2, kind["channels"], *kind["sizes"]), content, generator).to(dtype)
    weight = (torch.randn(size, generator=generator) / torch.Size(size[1:]).numel() ** 0.5).to(dtype)

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        if mode != "zeros":
            x = F.pad(x, (padding,) * 4, mode=mode)
        return F.conv2d(x, weight, None, stride, 0 if mode != "zeros" else padding, dilation, groups)

    exact_leaves = [t.double().requires_grad_() for t in (x, weight)]
    sums = convolved(*exact_leaves)
    bias = torch.randn(size[0], generator=generator).to(dtype) if "bias" in parts else None
    scale = (torch.rand(size[0], generator=generator) + 0.5).to(dtype) if "scale" in parts else None
    residual = torch.randn(sums.shape, generator=generator).to(dtype) if "residual" in parts else None
    grad = torch.randn(sums.shape, generator=generator).to(dtype)

    def there(tensor: Tensor | None, wants: bool = True) -> Tensor | None:
        if tensor is None:
            return None
        put = tensor.detach().to(device)
        if channels_last and put.dim() == 4:
            put = put.contiguous(memory_format=torch.channels_last)
        return put.requires_grad_(wants)

    leaves = [there(t) for t in (x, weight, bias, residual)]
    with native(device), allowed(tf32):
        y = ops.conv2d_fused(
            leaves[0], leaves[1], leaves[2], [stride] * 2, [padding] * 2, [dilation] * 2, groups,
            scale=there(scale, False), residual=leaves[3], relu="relu" in parts, padding_mode=mode,
        )  # fmt: skip
        wanted = [leaf for leaf in leaves if leaf is not None]
        grads = iter(torch.autograd.grad(y, wanted, there(grad, False)))
    got = [next(grads) if leaf is not None else None for leaf in leaves]

    def wide(tensor: Tensor | None, other: float) -> Tensor | float:
        return other if tensor is None else tensor.double().view(-1, 1, 1)

    before = sums.detach() * wide(scale, 1.0) + wide(bias, 0.0) + (0.0 if residual is None else residual.double())
    exact = before.relu() if "relu" in parts else before
    keep = (y.detach().cpu() > 0).double() if "relu" in parts else torch.ones_like(exact)
    passed = grad.double() * keep
    inner = passed * wide(scale, 1.0)
    # Sums of absolute products, for the bounds. A float32 sum is rounded, or cut off, once a term at most.
    sizes = [t.double().abs().requires_grad_() for t in (x, weight)]
    most = convolved(*sizes)
    bound_grads = torch.autograd.grad(most, sizes, inner.abs())
    exact_grads = torch.autograd.grad(sums, exact_leaves, inner)
    # On the CPU stock sums some products of float16 in float16.
    sum_of_terms = 2.0**-8 if device == "cpu" and dtype == torch.float16 else 2.0**-20
    each = sum_of_terms + (TF32 if tf32 else 0.0)
    if dtype != torch.float32 and scale is not None:
        each += 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11  # the gradient times the scale is rounded too
    results: list[tuple[str, Tensor, Tensor, Tensor | float]] = [
        ("output", y, exact, each * (most.detach() * wide(scale, 1.0) + before.abs() + 1)),
    ]
    for name, one, right, size_of in (("grad_input", got[0], exact_grads[0], bound_grads[0]),
                                      ("grad_weight", got[1], exact_grads[1], bound_grads[1])):  # fmt: skip
        assert one is not None
        results.append((name, one, right, each * size_of))
    if got[2] is not None:
        results.append(("grad_bias", got[2], passed.sum((0, 2, 3)), sum_of_terms * passed.abs().sum((0, 2, 3))))
    if got[3] is not None:
        results.append(("grad_residual", got[3], passed, 0.0))
    return compared(results, dtype)


def fused_checks(few: bool = False) -> Iterator[tuple[str, Callable[[str], Found]]]:
    """Every kind that is a plain 2-D convolution with one padding, in every type; parts take turns."""
    kinds = [k for k in KINDS if k["dims"] == 2 and not k["transposed"] and len(k["padding"]) == 1]
    turns = itertools.cycle(itertools.product(PARTS, (False, True), CONTENTS[:2]))
    for kind, (dtype, tf32) in itertools.product(kinds[:: 4 if few else 1], TYPES[:: 2 if few else 1]):
        for parts, last, content in itertools.islice(turns, 1 if few else 3):  # 3 and 28 have no common divisor
            name = (
                f"conv2d_fused {'+'.join(parts)} {kind['channels']}->{kind['outputs']} {kind['sizes']} kernel "
                f"{kind['kernel']} {dtype}{' TF32' if tf32 else ''} {content} channels_last={last}"
            )
            yield name, partial(fused, kind, dtype, tf32, parts, content, last)
