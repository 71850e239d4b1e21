"""Estimates the workspace of operators, in bytes: the memory that one takes while it runs, besides its results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes, suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes

from .. import _library
from ..settings import all_settings
from . import cpu_operators
from .cpu_conv_calls import Conv
from .cpu_convs import forward_bytes, gradients_bytes, of_a_gradients_tile, of_a_tile, onednn_bytes, turned_bytes

_C = _library.load()
_aten = torch.ops.aten


def workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """The workspace of one call with fake arguments. 0 for operators without a rule."""
    rule = _rules().get(func, _by_place if torch.Tag.pointwise in func.tags else None)
    return 0 if rule is None else rule(args, kwargs, result, device)


@functools.lru_cache
def _rules() -> dict[Any, Callable[..., int]]:
    stock = {"ours": False}
    rules: dict[Any, Callable[..., int]] = {
        _aten.convolution.default: functools.partial(_forward, _STOCK, stock),
        _aten.convolution_backward.default: functools.partial(_backward, _STOCK_BACKWARD, stock),
        _aten.native_batch_norm_backward.default: _batch_norm_backward,
        _aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
        torch.ops.patchconv._max_pool_backward.default: _patchconv_max_pool_backward,
        _aten.native_layer_norm.default: _made_contiguous,
        _aten.native_layer_norm_backward.default: _made_contiguous,
        torch.ops.patchconv._layer_norm.default: _made_contiguous,
        torch.ops.patchconv._layer_norm_backward.default: _made_contiguous,
        _aten._softmax.default: _made_contiguous,
        _aten._softmax_backward_data.default: _made_contiguous,
        _aten._log_softmax.default: _made_contiguous,
        _aten._log_softmax_backward_data.default: _made_contiguous,
        _aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_attention_backward,
        _aten.count_nonzero.dim_IntList: _counted,
        _aten.im2col.default: _resized,
        _aten.col2im.default: _resized,
        _aten._cdist_forward.default: _distances,
        _aten._euclidean_dist.default: _distances_by_products,
        torch.ops.patchconv._convolution.default: functools.partial(_forward, _OURS, {}),
        torch.ops.patchconv._convolution_fused.default: functools.partial(_forward, _OURS_FUSED, {}),
        torch.ops.patchconv._convolution_backward.default: functools.partial(_backward, _OURS_BACKWARD, {}),
        torch.ops.patchconv._conv3d_onednn.default: _onednn_forward,
    }
    rules |= cpu_operators.rules()
    for name, condition in {"where": 0, "masked_fill": 1, "masked_fill_": 1, "floor_divide": None}.items():
        rule = functools.partial(_by_place, condition=condition)
        rules |= {getattr(getattr(_aten, name), form): rule for form in getattr(_aten, name).overloads()}
    for name in _REDUCED.split():
        rule = functools.partial(_reduced, name)
        rules |= {getattr(getattr(_aten, name), form): rule for form in getattr(_aten, name).overloads()}
    for name, taps in _TAPS.items():
        rule = functools.partial(_resize, taps)
        rules |= dict.fromkeys((getattr(_aten, name).default, getattr(_aten, name).vec), rule)
    return rules


def _bytes(shape: Any, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _resized(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """im2col and col2im: the result is first as large as the argument, which is copied where it is not contiguous."""
    copies = (result.nbytes > args[0].nbytes) + (not args[0].is_contiguous())
    return copies * args[0].nbytes if device == "cpu" else 0


def _last(tensor: Tensor) -> bool:
    """Whether torch takes it for an image in channels_last: not one that is in both layouts, such as of one pixel."""
    return tensor.dim() == 4 and _in_last(tensor)


def _in_last(tensor: Tensor) -> bool:
    """The same, of volumes too."""
    return suggest_memory_format(tensor) is not torch.contiguous_format


def _copied(operands: Iterable[Tensor | None], last: bool) -> int:
    """Bytes of the copies where a convolution on the CPU finds operands in another layout: torch brings them to one."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if last else {}
    given = [(t, formats.get(t.dim(), torch.contiguous_format)) for t in operands if t is not None]
    return sum(t.nbytes for t, format in given if not t.is_contiguous(memory_format=format))


def _batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """The CPU's operator allocates the input's gradient twice."""
    return args[1].nbytes if device == "cpu" else 0


def _max_pool_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """Copies of the input's gradient and the indices, if the incoming gradient has another layout than the input."""
    return args[1].nbytes + args[-1].nbytes if device == "cpu" and _last(args[0]) != _last(args[1]) else 0


def _patchconv_max_pool_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    grad, places = args[0], args[1]
    return grad.nbytes if device == "cpu" and _last(grad) != _last(places) else 0


def _made_contiguous(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """Layer norms and softmax, forward and backward: a copy of each operand that is not contiguous."""
    whole = [t for t in args if isinstance(t, Tensor) and t.dim() == args[0].dim() and t.numel() == args[0].numel()]
    return sum(t.nbytes for t in whole if not t.is_contiguous())


def _by_place(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str, condition: int | None = None
) -> int:
    """Operators by place on the CPU copy operands of other dtypes than that in which they compute. condition: the place
    of one that has no part in the dtype.
    """
    given = enumerate((*args, *kwargs.values()))
    values = [one for n, one in given if isinstance(one, (Tensor, int, float, complex)) and n != condition]
    tensors = [one for one in values if isinstance(one, Tensor)]
    if device != "cpu" or not tensors or not isinstance(result, Tensor):
        return 0
    if all(one.dtype == tensors[0].dtype for one in tensors) and tensors[0].dtype in (result.dtype, torch.float32):
        return 0
    _, dtype = elementwise_dtypes(*values, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    if result.is_floating_point() and not (dtype.is_floating_point or dtype.is_complex):
        dtype = result.dtype
    return sum(one.numel() * dtype.itemsize for one in tensors if one.dtype != dtype)


_REDUCED = "sum mean prod cumsum any all"


def _reduced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """Reductions on the CPU copy an input of another dtype than that in which they add."""
    dtype = torch.float32 if name == "mean" and result.dtype.itemsize == 2 else result.dtype
    return 0 if device != "cpu" or args[0].dtype == dtype else args[0].numel() * dtype.itemsize


def _counted(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """count_nonzero along dimensions: whether each element is one, and these as int64."""
    return args[0].numel() * (8 if args[0].dtype == torch.bool else 9) if device == "cpu" else 0


def _distances(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """cdist copies an operand that is not contiguous, or that is the same one for several."""
    lengths = [(t, math.prod(result.shape[:-2]) * t.size(-2) * t.size(-1)) for t in args[:2]]
    copied = [n for t, n in lengths if n != t.numel() or not t.is_contiguous()]
    return sum(copied) * result.dtype.itemsize if device == "cpu" else 0


def _distances_by_products(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """cdist by way of a product of matrices: both operands with their squared lengths and with ones beside them. Before
    there is a result, the first is multiplied by -2 for this.
    """
    (one, other), rows = args[:2], [math.prod(t.shape[:-1]) for t in args[:2]]
    both = one.numel() + other.numel() + 2 * sum(rows)
    first = 2 * one.numel() + 2 * rows[0] + 2 * sum(rows) - result.numel()
    return max(both, first) * result.dtype.itemsize


_TAPS = {"upsample_nearest2d": 1, "_upsample_nearest_exact2d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 4}
"""Coordinates of the input that one of the result follows from, along each dimension."""


def _resize(taps: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """Of torch 2.14 on the CPU, as observed: a small image that is not in channels_last is copied to it and back; of
    others, coordinates and weights of each row and column.
    """
    if device != "cpu":
        return 0
    small = sum(result.shape[2:]) <= 128 and not args[0].is_contiguous(memory_format=torch.channels_last)
    if small and taps < 4:
        return args[0].nbytes + result.nbytes
    weight = 8 if result.dtype == torch.float64 else 4
    return sum(result.shape[2:]) * taps * (8 + weight)


def _flash_attention(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """Of torch 2.14 on the CPU, as observed: for each thread, scores of a block of queries and keys, and a block of the
    result. bfloat16 also packs keys and values, which is about as large as these.
    """
    batch, heads, queries, width = args[0].shape
    keys, threads, size = args[1].shape[2], torch.get_num_threads(), args[0].dtype.itemsize
    block = _block_of_queries(queries)
    scores = block * min(512, keys)
    bytes_ = threads * (scores + 2 * block + block * width) * max(size, 4)
    if size == 2:
        bytes_ += threads * scores * size
    if args[0].dtype == torch.bfloat16:
        bytes_ += threads * block * width * 4 + int(1.05 * 2 * batch * heads * keys * width * size)
    return bytes_


def _block_of_queries(queries: int) -> int:
    return min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries)


def _flash_attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """Of torch 2.14 on the CPU, as observed: for each thread a block of scores and of their gradients, in bfloat16
    also in that and with keys and values packed (which is about right); of several heads a copy of a gradient.
    """
    (batch, heads, queries, width), keys = args[1].shape, min(512, args[2].shape[2])
    block, half = _block_of_queries(queries), args[1].dtype.itemsize == 2
    elements, padded = 2 * block * keys, -(-width // 32) * 32
    if half:
        elements += block * keys + padded * (-(-keys // 32) * 32) + block * padded // 2
    elements = torch.get_num_threads() * elements + block + half
    return (elements + batch * heads * queries * width * (heads > 1)) * max(args[1].dtype.itemsize, 4)


# Arguments of convolutions, stock's and this package's, by place.
_STOCK = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
_STOCK_BACKWARD = ("grad", "input", "weight", "bias_size", *_STOCK[3:], "output_mask")
_LISTS = ("stride", "padding", "dilation")
_REST = ("output_padding", "splits", "groups", "transposed", "padding_mode")
_OURS = ("input", "weight", "bias", *_LISTS, *_REST)
_OURS_FUSED = ("input", "weight", "bias", "scale", "residual", "relu", "mask", *_LISTS, "splits", "groups", _REST[-1])
_OURS_BACKWARD = ("grad", "input", "weight", "input_size", "weight_size", *_LISTS, *_REST, "output_mask", "bits")
_ONEDNN = ("input", "weight", "bias", *_LISTS, "groups")
_DEFAULTS: dict[str, Any] = {
    "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0, "transposed": False,
    "padding_mode": "zeros", "splits": (), "ours": True,
}  # fmt: skip


def _forward(
    names: tuple[str, ...], known: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
    device: str,
) -> int:  # fmt: skip
    a = _DEFAULTS | known | dict(zip(names, args, strict=False)) | kwargs
    input, weight = a["input"], a["weight"]
    output = result[0] if isinstance(result, (tuple, list)) else result
    last = _in_last(input) or (_in_last(weight) and not weight.is_contiguous())
    found, stock = _planned("fprop", a, device, input.shape, input.stride(), weight.shape, input.dtype)
    if device != "cpu":
        return found
    conv = _conv(a, input.shape, weight.shape, output.shape, input.dtype, last)
    if not stock:
        return found + of_a_tile(conv)
    in_nchw = input.dim() == 5 and not conv.by_onednn()  # another library computes volumes in NCHW alone
    return _copied((input, weight), last and not in_nchw) + forward_bytes(conv)


def _onednn_forward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    a = _DEFAULTS | dict(zip(_ONEDNN, args, strict=False)) | kwargs
    input, weight = a["input"], a["weight"]
    last = _in_last(input) or (_in_last(weight) and not weight.is_contiguous())
    conv = _conv(a, input.shape, weight.shape, result.shape, input.dtype, last)
    return _copied((input, weight), last) + onednn_bytes(conv)


def _backward(
    names: tuple[str, ...], known: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
    device: str,
) -> int:  # fmt: skip
    """Stock has all gradients that it computes in one call; those that this package cuts into tiles follow."""
    a = _DEFAULTS | known | dict(zip(names, args, strict=False)) | kwargs
    grad, input, weight, wanted = a["grad"], a["input"], a["weight"], a["output_mask"]
    size, shape = (tuple(a.get(f"{of}_size") or a[of].shape) for of in ("input", "weight"))
    strides = _like(grad, size) if input is None else input.stride()
    last = _in_last(grad if input is None else input)
    last = last or (weight is not None and _in_last(weight) and not weight.is_contiguous())
    sizes = [_bytes(one, grad.dtype) for one in (size, shape, shape[:1] if not a["transposed"] else shape[1:2])]
    found = {
        place: _planned(pass_, a, device, size, strides, shape, grad.dtype)
        for place, pass_ in enumerate(("dgrad", "wgrad")) if wanted[place]
    }  # fmt: skip
    peak = there = 0
    masked = 0 if a.get("bits") is None else grad.nbytes  # a gradient with its bits applied is another tensor
    if device == "cpu":
        conv = _conv(a, size, shape, grad.shape, grad.dtype, last)
        by_itself = a["ours"] and input is None and 0 in found and found[0][1]  # the input was not kept
        asked = [place in found and found[place][1] and not (by_itself and place == 0) for place in (0, 1)]
        asked.append(wanted[2] and (asked[1] or not a["ours"]))
        there = sum(one for one, of in zip(sizes, asked, strict=True) if of)
        peak = there + gradients_bytes(conv, asked) + _copied((grad, input, weight), last)
        if 0 in found and not found[0][1]:
            found[0] = found[0][0] + of_a_gradients_tile(conv), False
        elif by_itself:
            found[0] = _copied((grad, weight), last) + turned_bytes(conv), False
        found = {place: one for place, one in found.items() if not one[1]}
    for place, (bytes_, _) in found.items():
        there += sizes[place]
        peak = max(peak, there + bytes_)
    return max(0, peak - there) + masked


def _planned(
    pass_: str, a: dict[str, Any], device: str, size: Any, strides: Any, weight: Any, dtype: torch.dtype
) -> tuple[int, bool]:
    """The bytes that one pass of a convolution with the arguments `a` is planned with, as `explain` does, and whether
    stock computes it.
    """
    numbers = (size, strides, weight, *_entries(a, len(weight) - 2))
    settings = torch.get_num_threads(), *all_settings()
    splits = tuple(a["splits"])
    return _plan_of(
        pass_, *map(tuple, numbers), a["groups"], a["transposed"], a["padding_mode"], splits, dtype, device, a["ours"],
        settings,
    )  # fmt: skip


@functools.lru_cache(4096)
def _plan_of(
    pass_: str, size: Any, strides: Any, weight: Any, stride: Any, padding: Any, dilation: Any, more: Any, groups: int,
    transposed: bool, padding_mode: str, splits: Any, dtype: torch.dtype, device: str, ours: bool, settings: Any,
) -> tuple[int, bool]:  # fmt: skip
    """settings: what else it goes by."""
    name = str(dtype).removeprefix("torch.")
    with _disable_current_modes():
        found = _C.plan(
            input=list(size), weight=list(weight), stride=list(stride), padding=list(padding),
            output_padding=list(more), dilation=list(dilation), groups=groups, transposed=transposed,
            padding_mode=padding_mode, splits=list(splits) or None, input_stride=list(strides),
            weight_stride=[], dtype=name, weight_dtype=name, device=device, pass_=pass_,
        )  # fmt: skip
    stock = not ours or found["path"] == "stock"
    return found["stock_workspace_bytes" if stock else "workspace_bytes"], stock


def _entries(a: dict[str, Any], dims: int) -> list[list[int]]:
    """Stride, padding, dilation and output_padding, one number for each dimension (padding: or before and after)."""
    given = [a[key] or 0 for key in ("stride", "padding", "dilation", "output_padding")]
    lists = [[value] if isinstance(value, int) else list(value) for value in given]
    if a["transposed"] and len(lists[1]) > dims:
        lists[1] = lists[1][::2]  # which is as much before as after
    return [value * dims if len(value) == 1 else value for value in lists]


def _conv(a: dict[str, Any], size: Any, weight: Any, output: Any, dtype: torch.dtype, last: bool) -> Conv:
    dims = len(weight) - 2
    stride, padding, dilation, more = _entries(a, dims)
    padding = padding[:: len(padding) // dims]  # before and after, which are alike in stock's, or one number for both
    whole, made = ((*[1] * (dims + 2 - len(shape)), *shape) for shape in (size, output))  # with a batch dimension
    bias = a.get("bias") is not None
    return Conv(whole, weight, made, stride, padding, dilation, more, a["groups"], a["transposed"], dtype, last, bias)


def _like(tensor: Tensor, size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor of this size in the layout of `tensor`."""
    if _last(tensor) and not tensor.is_contiguous():
        made = torch.empty(size, device="meta", memory_format=torch.channels_last)
        return made.stride()
    return torch.empty(size, device="meta").stride()
