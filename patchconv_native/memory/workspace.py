"""Estimates the workspace of operators, in bytes: the memory that one takes while it runs, besides its results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _library

_C = _library.load()
_aten = torch.ops.aten
# Channels in a block of oneDNN's layouts.
_BLOCK = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """The workspace of one call with fake arguments. 0 for operators without a rule."""
    rule = _rules().get(func)
    return 0 if rule is None else rule(args, kwargs, result, device)


@functools.lru_cache
def _rules() -> dict[Any, Callable[..., int]]:
    rules: dict[Any, Callable[..., int]] = {
        _aten.convolution.default: _stock_forward,
        _aten.convolution_backward.default: _stock_backward,
        _aten.native_batch_norm_backward.default: _batch_norm_backward,
        _aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
        torch.ops.patchconv._max_pool_backward.default: _patchconv_max_pool_backward,
        _aten.native_layer_norm.default: _layer_norm,
        _aten.native_layer_norm_backward.default: _layer_norm,
        torch.ops.patchconv._layer_norm.default: _layer_norm,
        torch.ops.patchconv._layer_norm_backward.default: _layer_norm,
    }
    for dims in (1, 2, 3):
        for transposed in ("", "_transpose"):
            name = f"conv{transposed}{dims}d"
            forward = functools.partial(_patchconv_forward, bool(transposed))
            rules[getattr(torch.ops.patchconv, name).default] = forward
            rules[getattr(torch.ops.patchconv, f"{name}_backward").default] = functools.partial(
                _patchconv_backward, bool(transposed)
            )
    rules[torch.ops.patchconv._conv2d_fused.default] = functools.partial(_patchconv_forward, False)
    return rules


def _tiling(
    size: tuple[int, ...], strides: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype, device: str,
    stride: Any, padding: Any, dilation: Any, groups: int, pass_: str,
    output_padding: Any = None, transposed: bool = False, padding_mode: str = "zeros", splits: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """How a convolution of an input of `size` would be computed, as in `explain`."""
    dims = len(weight) - 2

    def entries(value: Any) -> list[int]:
        value = [value] if isinstance(value, int) else list(value)
        return value * dims if len(value) == 1 else value

    name = str(dtype).removeprefix("torch.")
    return _C.plan(
        input=list(size), weight=list(weight), stride=entries(stride), padding=entries(padding),
        output_padding=entries(output_padding or 0), dilation=entries(dilation), groups=groups, transposed=transposed,
        padding_mode=padding_mode, splits=None if splits is None else list(splits), input_stride=list(strides),
        weight_stride=[], dtype=name, weight_dtype=name, device=device, pass_=pass_,
    )  # fmt: skip


def _bytes(shape: Any, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _stock(
    device: str, stock: int, pass_: str, size: Any, out: Any, weight: Any, dtype: torch.dtype,
    stride: Any, groups: int, last: bool,
) -> int:  # fmt: skip
    """The workspace of one pass of a stock call.

    `stock` is the library's own bound. Where that means that oneDNN computes on the CPU, the value here follows what
    torch 2.14 was observed to allocate: the weight is always reordered into a copy, NCHW tensors are too, not all of
    them alive at once, and inputs of few channels are not.
    """
    given, made, weights = (_bytes(shape, dtype) for shape in (size, out, weight))
    if device == "cpu" and math.prod(weight[2:]) == 1 and size[2:] == out[2:] and stock not in (0, given + made):
        return 0  # for a 1x1 kernel the column buffer is the input itself
    if device != "cpu" or stock not in (0, given + made):
        return stock
    if pass_ == "wgrad" and last and weight[1] == 1 and weight[0] == groups and max(weight[2:]) > 3:
        return (_BLOCK**2 + 1) * weights  # depthwise: as dense blocks of channels
    reordered = stock > 0 and not last
    strided = groups == 1 and any(step > 1 for step in ([stride] if isinstance(stride, int) else stride))
    blocked, out_blocked = (
        _bytes((shape[0], -(-shape[1] // _BLOCK) * _BLOCK, *shape[2:]), dtype) for shape in (size, out)
    )
    read = blocked if weight[1] > 3 or groups > 1 else 0
    if pass_ == "fprop":
        return weights + (max(read + out_blocked - made, out_blocked) if reordered else 0)
    if pass_ == "dgrad":
        if not reordered:
            return weights + (blocked // size[0] if strided else 0)
        return weights + (2 * blocked if strided else max(out_blocked + blocked - given, blocked))
    return max(read + out_blocked + weights, 2 * weights) - weights if reordered else 2 * weights


def _pair(found: dict[str, int], weights: int) -> int:
    """The workspace of both gradients in one call, above both results.

    The input's comes first; the weight's gradient, of `weights` bytes, is not allocated until then.
    """
    if len(found) < 2:
        return next(iter(found.values()), 0)
    return max(found["dgrad"] - weights, found["wgrad"])


def _stock_forward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    input, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
    found = _tiling(
        input.shape, input.stride(), weight.shape, input.dtype, device, stride, padding, dilation, groups, "fprop",
        output_padding, transposed,
    )  # fmt: skip
    pass_ = "dgrad" if transposed else "fprop"
    return _stock(
        device, found["stock_workspace_bytes"], pass_, *_ordered(transposed, input.shape, result.shape),
        weight.shape, input.dtype, stride, groups, _last(input),
    )  # fmt: skip


def _last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _made_dense(grad: Tensor) -> int:
    """Bytes of the dense copy of an expanded gradient, such as that of a sum."""
    return 0 if grad.is_contiguous() or _last(grad) else _bytes(grad.shape, grad.dtype)


def _ordered(transposed: bool, input: Any, output: Any) -> tuple[Any, Any]:
    """Input and output of the convolution whose input gradient a transposed one is; or of the convolution itself."""
    return (output, input) if transposed else (input, output)


def _stock_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    grad, input, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask = args
    taken = {}
    for pass_, wanted in zip(("dgrad", "wgrad"), mask[:2], strict=True):
        if wanted:
            found = _tiling(
                input.shape, input.stride(), weight.shape, grad.dtype, device, stride, padding, dilation, groups,
                pass_, output_padding, transposed,
            )  # fmt: skip
            taken[pass_] = _stock(
                device, found["stock_workspace_bytes"], _turned(pass_, transposed),
                *_ordered(transposed, input.shape, grad.shape), weight.shape, grad.dtype, stride, groups, _last(input),
            )  # fmt: skip
    return _pair(taken, _bytes(weight.shape, weight.dtype)) + _made_dense(grad)


def _turned(pass_: str, transposed: bool) -> str:
    return {"fprop": "dgrad", "dgrad": "fprop"}.get(pass_, pass_) if transposed else pass_


def _batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """The CPU's operator allocates the input's gradient twice."""
    return args[1].nbytes if device == "cpu" else 0


def _max_pool_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """Copies of the input's gradient and the indices, if the incoming gradient has another layout than the input."""
    return args[1].nbytes + args[-1].nbytes if device == "cpu" and _last(args[0]) != _last(args[1]) else 0


def _patchconv_max_pool_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    grad, places = args[0], args[1]
    return grad.nbytes if device == "cpu" and _last(grad) != _last(places) else 0


def _layer_norm(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str) -> int:
    """Forward and backward: a copy of each operand that is not contiguous."""
    whole = [t for t in args if isinstance(t, Tensor) and t.dim() == args[0].dim() and t.numel() == args[0].numel()]
    return sum(t.nbytes for t in whole if not t.is_contiguous())


def _given(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
_FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_BACKWARD = ("grad", "input", "weight", "input_size", "weight_size", "stride", "padding", "dilation", "groups")
_TRANSPOSED_BACKWARD = (*_BACKWARD[:7], "output_padding", "groups", "dilation")


def _taken(found: dict[str, Any], device: str, pass_: str, *shapes: Any) -> int:
    if found["path"] == "stock":
        return _stock(device, found["stock_workspace_bytes"], pass_, *shapes)
    return found["workspace_bytes"]


def _patchconv_forward(
    transposed: bool, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str
) -> int:
    a = _DEFAULTS | _given(_TRANSPOSED if transposed else _FORWARD, args, kwargs)
    input, weight = a["input"], a["weight"]
    output = result[0] if isinstance(result, (tuple, list)) else result
    found = _tiling(
        input.shape, input.stride(), weight.shape, input.dtype, device, a["stride"], a["padding"], a["dilation"],
        a["groups"], "fprop", a["output_padding"], transposed, a.get("padding_mode", "zeros"), a.get("splits"),
    )  # fmt: skip
    return _taken(
        found, device, _turned("fprop", transposed), *_ordered(transposed, input.shape, output.shape), weight.shape,
        input.dtype, a["stride"], a["groups"], _last(input),
    )  # fmt: skip


def _patchconv_backward(
    transposed: bool, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str
) -> int:
    a = _DEFAULTS | _given(_TRANSPOSED_BACKWARD if transposed else _BACKWARD, args, kwargs)
    grad: Tensor = a["grad"]
    input = a["input"]
    size, weight = tuple(a["input_size"]), tuple(a["weight_size"])
    strides = tuple(input.stride()) if input is not None else _like(grad, size)
    taken = {}
    for pass_, wanted in zip(("dgrad", "wgrad"), a["output_mask"][:2], strict=True):
        if wanted:
            found = _tiling(
                size, strides, weight, grad.dtype, device, a["stride"], a["padding"], a["dilation"], a["groups"],
                pass_, a["output_padding"], transposed, a.get("padding_mode", "zeros"), a.get("splits"),
            )  # fmt: skip
            taken[pass_] = _taken(
                found, device, _turned(pass_, transposed), *_ordered(transposed, size, grad.shape), weight,
                grad.dtype, a["stride"], a["groups"], _last(grad if input is None else input),
            )  # fmt: skip
    return _pair(taken, _bytes(weight, grad.dtype)) + _made_dense(grad)


def _like(tensor: Tensor, size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor of this size in the layout of `tensor`."""
    if _last(tensor) and not tensor.is_contiguous():
        made = torch.empty(size, device="meta", memory_format=torch.channels_last)
        return made.stride()
    return torch.empty(size, device="meta").stride()
