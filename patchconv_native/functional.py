"""The convolutions with the signatures of torch.nn.functional, plus `padding_mode` and `splits`.

Only arguments are normalised here ("same" to numbers); shapes and values are checked by the operators, whose errors
name operator, argument, what was expected and what came. `splits` is the number of pieces the output is cut into:
None (automatic: as few as keep the transient memory under `workspace_limit()`), an int for the first spatial
dimension (rows of an image, depth of a volume), or a tuple with one entry a spatial dimension. Results do not depend
on it beyond rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _library

Ints = int | Sequence[int]
Splits = int | Sequence[int] | None

_C = _library.load()
_ops = torch.ops.patchconv
_PLAIN = frozenset((Tensor, Parameter))
_function_modes: Any = torch._C._len_torch_function_stack


def direct(input: Any, weight: Any, bias: Any) -> bool:
    """Whether the short way into the dispatcher serves this call: plain tensors, eagerly.

    Tensor subclasses, function modes and compilers must see the call as torch.ops.patchconv.*.
    """
    return (
        type(input) is Tensor
        and type(weight) in _PLAIN
        and (bias is None or type(bias) in _PLAIN)
        and not torch.compiler.is_compiling()
        and not _function_modes()
    )


def _list(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


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
    """The operator conv{dims}d with numbers for padding, by the shortest way."""
    if direct(input, weight, bias):
        return _C.conv(
            dims, input, weight, bias, _list(stride), _list(padding), _list(dilation), groups, padding_mode,
            _list(splits),
        )  # fmt: skip
    op = (_ops.conv1d, _ops.conv2d, _ops.conv3d)[dims - 1]
    # Lists, since a compiler may have made a number symbolic.
    return op(
        input, weight, bias, _list(stride), _list(padding), _list(dilation), groups,
        padding_mode=padding_mode, splits=_list(splits),
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
    """The operator conv_transpose{dims}d, by the shortest way."""
    if direct(input, weight, bias):
        return _C.conv_transpose(
            dims, input, weight, bias, _list(stride), _list(padding), _list(output_padding), groups, _list(dilation),
            _list(splits),
        )  # fmt: skip
    op = (_ops.conv_transpose1d, _ops.conv_transpose2d, _ops.conv_transpose3d)[dims - 1]
    return op(
        input, weight, bias, _list(stride), _list(padding), _list(output_padding), groups, _list(dilation),
        splits=_list(splits),
    )  # fmt: skip


def same_padding(kernel_size: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """(before, after) for each dimension so that a stride-1 output has its input's size.

    An odd total puts the extra element after, as torch does.
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
    dims = weight.dim() - 2
    if any(s != 1 for s in ([stride] if isinstance(stride, int) else stride)):
        raise ValueError(f"{name}: expected stride 1 with padding='same', got {stride}")
    steps = [dilation] * dims if isinstance(dilation, int) else list(dilation)
    if len(steps) == 1:
        steps *= dims
    if len(steps) != dims:
        raise ValueError(f"{name}: expected dilation to have 1 or {dims} entries, got {len(steps)}")
    return same_padding(weight.shape[2:], steps)


def conv1d(
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
    """torch.nn.functional.conv1d: input (N, C, L) or (C, L), weight (K, C/groups, S), result (N, K, P) or (K, P)."""
    padding = _pads("conv1d", padding, weight, stride, dilation)
    return conv(1, input, weight, bias, stride, padding, dilation, groups, padding_mode, splits)


def conv2d(
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
    """torch.nn.functional.conv2d: input (N, C, H, W) or (C, H, W), weight (K, C/groups, R, S).

    The result is (N, K, P, Q) or (K, P, Q), in channels_last where input or weight is.
    """
    padding = _pads("conv2d", padding, weight, stride, dilation)
    return conv(2, input, weight, bias, stride, padding, dilation, groups, padding_mode, splits)


def conv3d(
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
    """torch.nn.functional.conv3d: input (N, C, D, H, W) or (C, D, H, W), weight (K, C/groups, T, R, S)."""
    padding = _pads("conv3d", padding, weight, stride, dilation)
    return conv(3, input, weight, bias, stride, padding, dilation, groups, padding_mode, splits)


def conv_transpose1d(
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
    """torch.nn.functional.conv_transpose1d: input (N, C, L) or (C, L), weight (C, K/groups, S)."""
    return conv_transpose(1, input, weight, bias, stride, padding, output_padding, groups, dilation, splits)


def conv_transpose2d(
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
    """torch.nn.functional.conv_transpose2d: input (N, C, H, W) or (C, H, W), weight (C, K/groups, R, S)."""
    return conv_transpose(2, input, weight, bias, stride, padding, output_padding, groups, dilation, splits)


def conv_transpose3d(
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
    """torch.nn.functional.conv_transpose3d: input (N, C, D, H, W) or (C, D, H, W), weight (C, K/groups, T, R, S)."""
    return conv_transpose(3, input, weight, bias, stride, padding, output_padding, groups, dilation, splits)
