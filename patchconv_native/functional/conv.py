"""Convolutions, with torch's signatures plus `padding_mode` and `splits`.

This file turns arguments into numbers ("same" into a padding). The operators check shapes and values.

splits: the number of pieces that the output is cut into. None (automatic): as few as keep the transient memory under
`workspace_limit()`. An int: pieces of the first spatial dimension (rows of an image, depth of a volume). A tuple: one
entry a spatial dimension. Results depend on it by no more than rounding.

padding of conv1d, conv2d and conv3d: "same", "valid", an int, or one int a spatial dimension. Two ints a spatial
dimension are taken too, which torch does not: (before, after) of the first, then of the next; for an image (top,
bottom, left, right). "same" with a 4x4 kernel is padding=(1, 2, 1, 2).

Tensors that the operators do not serve (integers, complex, sparse, mkldnn's, nested, of no channels, on other devices,
DTensors) are left to stock, as far as splits is None. torch.onnx.export gets stock's operators.

Where torch takes an int, anything with `__index__` is taken too (numpy.int64, a tensor of one element). A bool or
another type is a TypeError. A bool inside of a sequence counts as 0 or 1: to check that would cost every call.
"""

from __future__ import annotations

import operator
import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from .. import _library
from .naming import named

__all__ = [
    "conv", "conv1d", "conv2d", "conv2d_fused", "conv3d", "conv_transpose", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "same_padding",
]  # fmt: skip

Ints = int | Sequence[int]
Splits = int | Sequence[int] | None

_C = _library.load()
_ops = torch.ops.patchconv
# By number of dimensions. Not an f-string: torch.compile of torch 2.13 makes the number symbolic, and refuses one.
_CONVS = ("", "conv1d", "conv2d", "conv3d")
_CONV_TRANSPOSES = ("", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_PLAIN = frozenset((Tensor, Parameter))
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda", "meta")
_function_modes: Any = torch._C._len_torch_function_stack
_is_tracing: Any = torch._C._is_tracing


def _short_way(input: Any, weight: Any, bias: Any) -> bool:
    """Whether `_C` can be called without torch.ops: plain tensors, eager mode.

    Tensor subclasses, function modes, compilers and traces must see the call as torch.ops.patchconv.*.
    """
    return (
        type(input) is Tensor
        and type(weight) in _PLAIN
        and (bias is None or type(bias) in _PLAIN)
        and not torch.compiler.is_compiling()
        and not torch.onnx.is_in_onnx_export()
        and not _function_modes()
        and not _is_tracing()
    )


def _list(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


def short_repr(value: Any) -> str:
    """The repr of a wrong argument, for an error text: one line of limited length."""
    return " ".join(_repr.repr(value).split())


def int64(name: str, argument: str, value: Any) -> Any:
    """An int, or the SymInt of a compiler. TypeError for a bool and for what is no integer; ValueError, naming the
    argument, for one of more than 64 bits.
    """
    if isinstance(value, bool):
        raise TypeError("a bool")
    found = value if isinstance(value, torch.SymInt) else operator.index(value)
    if isinstance(found, int) and not -(2**63) <= found < 2**63:
        raise ValueError(f"{name}: expected {argument} to fit into 64 bits, got {short_repr(value)}")
    return found


def _expected(name: str, argument: str) -> str:
    dims = int(name.split("d")[0][-1])  # conv_transpose2d, conv2d_fused
    ints = f"an int or a sequence of {dims} int{'s' if dims > 1 else ''}"
    if argument == "groups":
        return "an int"
    if argument == "padding_mode":
        return "a str"
    if argument == "splits":
        return f"None, {ints}"
    if argument == "padding" and not name.startswith("conv_transpose"):
        return f"'same', 'valid', an int or a sequence of {dims} or {2 * dims} ints"
    return ints


def _normalized(name: str, argument: str, value: Any) -> Any:
    """An argument in Python's own ints, or TypeError naming it."""
    try:
        if argument == "padding_mode":
            if isinstance(value, str):
                return value
        elif argument == "groups":
            return int64(name, argument, value)
        elif argument == "splits" and value is None:
            return None
        elif not isinstance(value, Sequence):
            return [int64(name, argument, value)]
        elif not isinstance(value, (str, bytes)):
            return [int64(name, argument, entry) for entry in value]
    except TypeError:
        pass
    got = f"{short_repr(value)} ({type(value).__name__})"
    raise TypeError(f"{name}: expected {argument} to be {_expected(name, argument)}, got {got}")


def _check_tensor(name: str, argument: str, value: Any) -> None:
    # torch.ops takes None for a tensor. An object with __torch_function__ (torch.fx.Proxy) stands for a tensor.
    if not isinstance(value, Tensor) and not hasattr(type(value), "__torch_function__"):
        expected = "a Tensor" if argument in ("input", "weight") else "a Tensor or None"
        raise TypeError(f"{name}: expected {argument} to be {expected}, got {type(value).__name__}")


def _through_torch_ops(
    name: str, input: Any, weight: Any, bias: Any, parts: dict[str, Any] | None = None, **arguments: Any
) -> Tensor:
    """The call by torch.ops, for what the short way does not serve, with arguments made right or refused by name."""
    if not torch.compiler.is_compiling():
        _check_tensor(name, "input", input)
        _check_tensor(name, "weight", weight)
        if bias is not None:
            _check_tensor(name, "bias", bias)
        # Padding last: if dilation is wrong, so is the padding computed for "same", and dilation should be named.
        order = sorted(arguments, key=lambda argument: argument == "padding")
        arguments = {argument: _normalized(name, argument, arguments[argument]) for argument in order}
    # A list of one also for a number that a compiler has made symbolic.
    lists = {argument: value if argument == "groups" else _list(value) for argument, value in arguments.items()}
    return getattr(_ops, name)(input, weight, bias, **lists, **(parts or {}))


def _served(input: Any, weight: Any) -> bool:
    """Whether the operators serve such tensors. Wrong arguments count as served: the operators name them."""
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        return True
    return (
        input.dtype in _DTYPES
        and input.device.type in _DEVICES
        and input.is_meta == weight.is_meta
        and 0 not in weight.shape[:2]
        and all(t.layout == torch.strided and not t.is_nested and not t.is_quantized for t in (input, weight))
        and not _of_dtensors(input, weight)
    )


def _of_dtensors(*tensors: Tensor) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and any(isinstance(tensor, loaded.DTensor) for tensor in tensors)


def _padded(dims: int, input: Tensor, padding: Any, padding_mode: str) -> tuple[Tensor, Any]:
    """The input, and the padding that a stock convolution of it still has to add."""
    pads = [padding] if isinstance(padding, int) else list(padding)
    pads = pads * dims if len(pads) == 1 else pads
    both = pads if len(pads) == 2 * dims else [p for p in pads for _ in range(2)]
    if padding_mode == "zeros" and both[0::2] == both[1::2]:
        return input, both[0::2]
    last_first = [p for d in reversed(range(dims)) for p in both[2 * d : 2 * d + 2]]
    return F.pad(input, last_first, "constant" if padding_mode == "zeros" else padding_mode), 0


def conv(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    padding_mode: str,
    splits: Any,
) -> Tensor:
    """conv{dims}d with a padding of numbers, by the fastest way into the operator."""
    if _short_way(input, weight, bias):
        try:
            # `type(...) is int` is False for a bool, which _C then refuses where it expects a list or gets None.
            return _C.conv(
                dims, input, weight, bias,
                [stride] if type(stride) is int else stride,
                [padding] if type(padding) is int else padding,
                [dilation] if type(dilation) is int else dilation,
                groups if type(groups) is int else None,
                padding_mode,
                [splits] if type(splits) is int else splits,
            )  # fmt: skip
        except (TypeError, ValueError, NotImplementedError):
            pass  # stock or the longer way serves it, or the longer way names the wrong argument
    if torch.onnx.is_in_onnx_export() or (splits is None and not _served(input, weight)):
        input, padding = _padded(dims, input, padding, padding_mode)
        return getattr(F, _CONVS[dims])(input, weight, bias, stride, padding, dilation, groups)
    return _through_torch_ops(
        _CONVS[dims], input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups,
        padding_mode=padding_mode, splits=splits,
    )  # fmt: skip


def conv_transpose(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
    splits: Any,
) -> Tensor:
    """conv_transpose{dims}d, by the fastest way into the operator."""
    if _short_way(input, weight, bias):
        try:
            return _C.conv_transpose(
                dims, input, weight, bias,
                [stride] if type(stride) is int else stride,
                [padding] if type(padding) is int else padding,
                [output_padding] if type(output_padding) is int else output_padding,
                groups if type(groups) is int else None,
                [dilation] if type(dilation) is int else dilation,
                [splits] if type(splits) is int else splits,
            )  # fmt: skip
        except (TypeError, ValueError, NotImplementedError):
            pass
    if torch.onnx.is_in_onnx_export() or (splits is None and not _served(input, weight)):
        stock = getattr(F, _CONV_TRANSPOSES[dims])
        return stock(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return _through_torch_ops(
        _CONV_TRANSPOSES[dims], input, weight, bias, stride=stride, padding=padding, output_padding=output_padding,
        groups=groups, dilation=dilation, splits=splits,
    )  # fmt: skip


def same_padding(kernel_size: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """The padding, (before, after) a dimension in one list, for an output as large as its input at stride 1.

    Of an odd total the larger part is after, as in torch.
    """
    pads = []
    for k, d in zip(kernel_size, dilation, strict=True):
        total = d * (k - 1)
        pads += [total // 2, total - total // 2]
    return pads


def _pads(name: str, padding: str | Ints, weight: Tensor, stride: Ints, dilation: Ints) -> Ints:
    if not isinstance(padding, str):
        return padding
    if padding == "valid":
        return 0
    if padding != "same":
        raise ValueError(f"{name}: expected padding to be 'same', 'valid' or numbers, got {padding!r}")
    try:
        return _same(name, weight, stride, dilation)
    except (AttributeError, TypeError):
        if torch.compiler.is_compiling():
            raise
    _check_tensor(name, "weight", weight)
    return _same(name, weight, _normalized(name, "stride", stride), _normalized(name, "dilation", dilation))


def _same(name: str, weight: Tensor, stride: Ints, dilation: Ints) -> list[int]:
    dims = weight.dim() - 2
    if any(s != 1 for s in ([stride] if isinstance(stride, int) else stride)):
        raise ValueError(f"{name}: expected stride 1 with padding='same', got {stride}")
    steps = [dilation] * dims if isinstance(dilation, int) else list(dilation)
    if len(steps) == 1:
        steps *= dims
    if len(steps) != dims:
        raise ValueError(f"{name}: expected dilation to have 1 or {dims} entries, got {len(steps)}")
    return same_padding(weight.shape[2:], steps)


def _conv(dims: int, doc: str) -> Callable[..., Tensor]:
    name = f"conv{dims}d"

    def function(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Ints = 1,
        padding: str | Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
        *,
        padding_mode: str = "zeros",
        splits: Splits = None,
    ) -> Tensor:
        padding = _pads(name, padding, weight, stride, dilation)
        return conv(dims, input, weight, bias, stride, padding, dilation, groups, padding_mode, splits)

    return named(function, name, f"torch.nn.functional.{name}: {doc}")


def _conv_transpose(dims: int, doc: str) -> Callable[..., Tensor]:
    name = f"conv_transpose{dims}d"

    def function(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
        *,
        splits: Splits = None,
    ) -> Tensor:
        return conv_transpose(dims, input, weight, bias, stride, padding, output_padding, groups, dilation, splits)

    return named(function, name, f"torch.nn.functional.{name}: {doc}")


conv1d = _conv(1, "input (N, C, L) or (C, L), weight (K, C/groups, S), result (N, K, P) or (K, P).")
conv2d = _conv(
    2,
    "input (N, C, H, W) or (C, H, W), weight (K, C/groups, R, S).\n\n"
    "The result is (N, K, P, Q) or (K, P, Q), in channels_last where input or weight is.",
)
conv3d = _conv(3, "input (N, C, D, H, W) or (C, D, H, W), weight (K, C/groups, T, R, S).")
conv_transpose1d = _conv_transpose(1, "input (N, C, L) or (C, L), weight (C, K/groups, S).")
conv_transpose2d = _conv_transpose(2, "input (N, C, H, W) or (C, H, W), weight (C, K/groups, R, S).")
conv_transpose3d = _conv_transpose(3, "input (N, C, D, H, W) or (C, D, H, W), weight (C, K/groups, T, R, S).")


def conv2d_fused(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: str | Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
    padding_mode: str = "zeros",
    splits: Splits = None,
) -> Tensor:
    """conv2d(input, weight) * scale + bias + residual, and its ReLU if relu=True. Parts that are None are left out.

    scale (K) with bias (K) stands for a batch norm with constant statistics, residual (N, K, P, Q) for what a block
    adds at its end. Under `backend("native")` on CUDA the result is rounded and written once. Elsewhere the parts are
    applied one after another, in place. Saved for backward: with relu and without scale what conv2d saves, and one bit
    an element (none where a later layer saves the output anyway); otherwise what each part saves.
    """
    padding = _pads("conv2d_fused", padding, weight, stride, dilation)
    if not isinstance(relu, bool):
        raise TypeError(f"conv2d_fused: expected relu to be a bool, got {short_repr(relu)} ({type(relu).__name__})")
    if not torch.compiler.is_compiling():
        for argument, part in (("scale", scale), ("residual", residual)):
            if part is not None:
                _check_tensor("conv2d_fused", argument, part)
    return _through_torch_ops(
        "conv2d_fused", input, weight, bias, {"scale": scale, "residual": residual, "relu": relu}, stride=stride,
        padding=padding, dilation=dilation, groups=groups, padding_mode=padding_mode, splits=splits,
    )  # fmt: skip
