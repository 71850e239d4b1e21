"""Rules for convolutions. What needs no halo is computed while the halos travel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _library, functional
from .axis import Axes, Axis, Fetch, Range
from .layout import cut_out, empty, joined, layout
from .operands import parameter
from .rules import refuse, rule
from .tensor import SpatialTensor
from .windows import Window, by_sample, check_image, fetching, inside, listed, reading

_C = _library.load()
_ops = torch.ops.patchconv

IN_PIECES_FROM = 2**18
"""Elements of a part. A smaller one is computed by one call, after its halo has come."""
PIECES = 8
"""How many pieces the outputs that need no halo are computed in. Each piece is copied to its place."""
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Of which the package has convolutions."""


def _pads_of(padding: Any, kernel: list[int], dilation: list[int]) -> list[int]:
    """Two numbers, before and after, for each dimension."""
    dims = len(kernel)
    if padding == "same":
        return functional.same_padding(kernel, dilation)
    entries = listed(0 if padding == "valid" else padding, dims)
    return entries if len(entries) == 2 * dims else [entry for entry in entries for _ in range(2)]


def _check(name: str, input: Any, dims: int) -> tuple[Tensor, int]:
    if not input.is_floating_point():
        raise refuse(name, f"of {input.dtype}")
    return check_image(name, input, dims)


def _conv(
    dims: int, input: Any, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    padding_mode: str, splits: Any, onednn: bool = False,
) -> Tensor:  # fmt: skip
    """onednn: oneDNN computes it where no gradients are asked for, and padding is alike on both sides."""
    name = f"conv{dims}d"
    local, first = _check(name, input, dims)
    kernel, strides, dilations = list(weight.shape[2:]), listed(stride, dims), listed(dilation, dims)
    pads = _pads_of(padding, kernel, dilations)
    axes: Axes = {}
    op_padding = list(pads)  # what the operator itself adds: none along cut dimensions
    weight, bias = parameter(weight, input), parameter(bias, input)

    def conv(x: Tensor, recorded: bool = True) -> Tensor:
        w, b = weight, bias
        if not recorded:
            w, b = weight.detach(), None if bias is None else bias.detach()
        alike = op_padding[::2] == op_padding[1::2]
        if onednn and alike and not (torch.is_grad_enabled() and _any_grad(x, w, b)):
            return _ops._conv3d_onednn(x, w, b, strides, op_padding[::2], dilations, groups)
        return functional.conv(dims, x, w, b, strides, op_padding, dilations, groups, padding_mode, splits)

    for d in sorted(input.axes, reverse=True):
        axis, i = input.axes[d], d - first
        window = Window(kernel[i], strides[i], dilations[i], pads[2 * i])
        padded = axis.size + pads[2 * i] + pads[2 * i + 1]
        if padded < window.reach:
            raise RuntimeError(
                f"{name}: expected {axis.name} of the padded input to be at least {window.reach}, the kernel's reach, "
                f"got {padded}"
            )
        axes[d] = window.small_axis(name, axis, (padded - window.reach) // strides[i] + 1)
        reads = [window.reads(part) for part in axes[d].ranges()]
        if padding_mode == "zeros" and axis.range == (0, axis.size) and axes[d].range == (0, axes[d].size):
            reads = [inside(one, axis.size) for one in reads]  # the operator pads what is whole without a copy
        else:
            op_padding[2 * i : 2 * i + 2] = 0, 0
        if d > min(input.axes) or padding_mode != "zeros":
            local = reading(local, d, axis, reads, padding_mode)
            continue
        coming = fetching(local, d, axis, reads)
        with torch.no_grad():
            y = in_pieces(local, d, axis, coming, window, axes[d].range, functools.partial(conv, recorded=False))
        if y is not None and not (torch.is_grad_enabled() and _any_grad(local, weight, bias)):
            return SpatialTensor(y, axes)
        local = coming.finish()
        if y is not None:
            y = _C.conv_given(dims, local, weight, bias, strides, op_padding, dilations, groups, padding_mode, y)
            return SpatialTensor(y, axes)
    unread = any(axis.executor.unread for axis in axes.values()) and not torch.is_autocast_enabled(local.device.type)
    if unread and _has_own_node(local, weight, bias):
        sizes = (local.size(first + i) + op_padding[2 * i] + op_padding[2 * i + 1] for i in range(dims))
        shape = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(sizes, dilations, kernel, strides, strict=True)]
        y = local.new_empty(()).expand(*local.shape[: first - 1], len(weight), *shape)
        y = _C.conv_given(dims, local, weight, bias, strides, op_padding, dilations, groups, padding_mode, y)
        return SpatialTensor(y, axes)
    return SpatialTensor(conv(local), axes)


def _has_own_node(local: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the package's node can be that of such a convolution, without a result that was computed."""
    tensors = [t for t in (local, weight, bias) if t is not None]
    alike = all((t.dtype, t.device, t.layout) == (local.dtype, local.device, torch.strided) for t in tensors)
    return alike and local.dtype in DTYPES and 0 not in weight.shape[:2] and _any_grad(*tensors)


def _conv_rule(dims: int) -> Callable[..., Tensor]:
    @by_sample(dims)
    def serve(
        input: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1, *, padding_mode: str = "zeros", splits: Any = None,
    ) -> Tensor:  # fmt: skip
        return _conv(dims, input, weight, bias, stride, padding, dilation, groups, padding_mode, splits)

    return serve


def conv3d_by_onednn(
    input: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """conv3d, of an image so large that torch has oneDNN compute it: then oneDNN computes parts of it too, for which
    torch would take another library, which is several times slower.
    """
    return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)


@rule(conv3d_by_onednn)
@by_sample(3)
def _conv3d_by_onednn(
    input: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    return _conv(3, input, weight, bias, stride, padding, dilation, groups, "zeros", None, onednn=True)


def _any_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def in_pieces(
    x: Tensor, dim: int, axis: Axis, coming: Fetch, window: Window, output: Range, conv: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """This part of the output, `output` of the whole: first what x suffices for, while the halos come, then the rest.
    None where that would gain nothing: nothing has to come, x suffices for nothing, or x is small.
    """
    (low, high), (begin, end) = output, axis.range
    inner = window.small_inside((begin, end))
    inner = max(inner[0], low), min(inner[1], high)
    if coming.complete or inner[0] >= inner[1] or x.numel() < IN_PIECES_FROM:
        return None
    y: Tensor | None = None
    first = window.reads(output)[0]
    count = min(PIECES, inner[1] - inner[0])
    bounds = [inner[0] + (inner[1] - inner[0]) * n // count for n in range(count + 1)]
    pieces = [(a, b, True) for a, b in itertools.pairwise(bounds)]
    for a, b, complete in [*pieces, (low, inner[0], False), (inner[1], high, False)]:
        if a == b:
            continue
        rows = window.reads((a, b))
        if complete:
            piece = conv(x.detach().narrow(dim, rows[0] - begin, rows[1] - rows[0]))
        else:
            piece = conv(coming.rows(rows[0] - first, rows[1] - first))
        if y is None:
            y = empty(piece, dim, high - low, layout(piece))
        y.narrow(dim, a - low, b - a).copy_(piece)
        del piece
    return y


def _conv_transpose(
    dims: int, input: Any, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, output_padding: Any,
    groups: int, dilation: Any, splits: Any,
) -> Tensor:  # fmt: skip
    name = f"conv_transpose{dims}d"
    local, first = _check(name, input, dims)
    kernel, strides, dilations = list(weight.shape[2:]), listed(stride, dims), listed(dilation, dims)
    pads, more = listed(padding, dims), listed(output_padding, dims)
    axes: Axes = {}
    op_padding, extra, crops = [], [], []
    for i in range(dims):
        d = first + i
        window = Window(kernel[i], strides[i], dilations[i], pads[i])
        size = (input.size(d) - 1) * strides[i] - 2 * pads[i] + window.reach + more[i]
        if d not in input.axes:
            op_padding.append(pads[i])
            extra.append(more[i])
            continue
        axis = input.axes[d]
        if size < 1:
            raise refuse(name, "nothing of a cut dimension")
        axes[d] = window.big_axis(name, axis, size)
        # What touches a part of the output; one coordinate at least, so that there is something to compute with.
        reads = []
        for part in axes[d].ranges():
            a, b = window.touches(part, axis.size)
            a = min(max(a, 0), axis.size - 1)
            reads.append((a, max(b, a + 1)))
        local = reading(local, d, axis, reads)
        a, b = reads[axis.index]
        low, high = axes[d].range
        begin = a * strides[i] - pads[i]  # of what these inputs give without padding
        end = begin + (b - a - 1) * strides[i] + window.reach
        op_padding.append(0)
        extra.append(0)
        crops.append((d, low - begin, end - high, high - low))
    weight, bias = parameter(weight, input), parameter(bias, input)
    y = functional.conv_transpose(
        dims, local, weight, bias, strides, op_padding, extra, groups, dilations, splits
    )  # fmt: skip
    for d, before, after, length in crops:
        if before < 0 or after < 0:  # reached by no input: the bias alone
            y = _with_bias(y, bias, first - 1, d, max(-before, 0), max(-after, 0))
            before = max(before, 0)
        y = cut_out(y, d, before, length)
    return SpatialTensor(y, axes)


def _conv_transpose_rule(dims: int) -> Callable[..., Tensor]:
    @by_sample(dims)
    def serve(
        input: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, dilation: Any = 1, *, splits: Any = None,
    ) -> Tensor:  # fmt: skip
        return _conv_transpose(
            dims, input, weight, bias, stride, padding, output_padding, groups, dilation, splits
        )  # fmt: skip

    return serve


def _with_bias(y: Tensor, bias: Tensor | None, channels: int, dim: int, before: int, after: int) -> Tensor:
    """y, with the bias alone at so many coordinates more along `dim`. channels: the dimension of the channels."""
    parts = []
    for length in (before, after):
        shape = list(y.shape)
        shape[dim] = length
        rows = y.new_zeros(shape)
        parts.append(rows if bias is None else rows + bias.to(y.dtype).view(-1, *[1] * (y.dim() - 1 - channels)))
    return joined([parts[0], y, parts[1]], dim)


@rule(torch.convolution, torch._convolution)
def _convolution(
    input: Any, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, *of_cudnn: bool, **named: bool,
) -> Tensor:  # fmt: skip
    """What the functions above call, of as many dimensions as the weight says."""
    dims = weight.dim() - 2
    if dims not in (1, 2, 3):
        raise refuse("convolution", f"of {dims} dimensions")
    if transposed:
        return _conv_transpose_rule(dims)(
            input, weight, bias, stride, padding, output_padding, groups, dilation, splits=None
        )
    return _conv_rule(dims)(input, weight, bias, stride, padding, dilation, groups, padding_mode="zeros", splits=None)


def _functions(name: str) -> list[Any]:
    op = getattr(_ops, name)
    return [getattr(torch, name), op, op.default]


CONVS = frozenset(function for dims in (1, 2, 3) for function in _functions(f"conv{dims}d"))
"""Whose results are not computed where nothing reads them."""

for _dims in (1, 2, 3):
    rule(*_functions(f"conv{_dims}d"))(_conv_rule(_dims))
    rule(*_functions(f"conv_transpose{_dims}d"))(_conv_transpose_rule(_dims))
