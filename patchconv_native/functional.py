"""The convolutions with the signatures of torch.nn.functional, plus `padding_mode` and `splits`.

Only arguments are normalised here ("same" to numbers); shapes and values are checked by the operators, whose errors
name operator, argument, what was expected and what came. `splits` is the number of pieces the output is cut into:
None (automatic: as few as keep the transient memory under `workspace_limit()`), an int for the first spatial
dimension (rows of an image, depth of a volume), or a tuple with one entry a spatial dimension. Results do not depend
on it beyond rounding.

`padding` of conv1d, conv2d and conv3d is "same", "valid", an int, one int a spatial dimension, or two: (before, after)
of the first dimension, then of the next: for an image (top, bottom, left, right). This is more than torch takes, and
how "same" with an even kernel is served: conv2d(x, w, padding="same") with a 4×4 kernel is
conv2d(x, w, padding=(1, 2, 1, 2)).

Where torch takes an int, anything with `__index__` serves (numpy.int64, a tensor of one element); a bool or another
type is a TypeError. Not checked, since it would cost every call: a bool inside of a sequence counts as 0 or 1.
"""

from __future__ import annotations

import operator
import reprlib
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


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


def shown(value: Any) -> str:
    """The repr of a refused argument, on one line of bounded length."""
    return " ".join(_repr.repr(value).split())


def whole(value: Any) -> Any:
    """An entry as the operators take it: TypeError for a bool and for what is no integer."""
    if isinstance(value, bool):
        raise TypeError("a bool")
    return value if isinstance(value, torch.SymInt) else operator.index(value)


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


def _converted(name: str, argument: str, value: Any) -> Any:
    """An argument in Python's own ints, or TypeError naming it."""
    try:
        if argument == "padding_mode":
            if isinstance(value, str):
                return value
        elif argument == "groups":
            return whole(value)
        elif argument == "splits" and value is None:
            return None
        elif not isinstance(value, Sequence):
            return [whole(value)]
        elif not isinstance(value, (str, bytes)):
            return [whole(entry) for entry in value]
    except TypeError:
        pass
    got = f"{shown(value)} ({type(value).__name__})"
    raise TypeError(f"{name}: expected {argument} to be {_expected(name, argument)}, got {got}")


def _check_tensor(name: str, argument: str, value: Any) -> None:
    # torch.ops takes None for an undefined tensor. What has __torch_function__ (torch.fx.Proxy) stands for a tensor.
    if not isinstance(value, Tensor) and not hasattr(type(value), "__torch_function__"):
        expected = "a Tensor" if argument in ("input", "weight") else "a Tensor or None"
        raise TypeError(f"{name}: expected {argument} to be {expected}, got {type(value).__name__}")


def _by_schema(
    name: str, input: Any, weight: Any, bias: Any, parts: dict[str, Any] | None = None, **arguments: Any
) -> Tensor:
    """The call through torch.ops, for what the short way does not serve or has refused: mended, or a named error."""
    if not torch.compiler.is_compiling():
        _check_tensor(name, "input", input)
        _check_tensor(name, "weight", weight)
        if bias is not None:
            _check_tensor(name, "bias", bias)
        # Padding last: "same" with a wrong dilation has made wrong numbers of it.
        order = sorted(arguments, key=lambda argument: argument == "padding")
        arguments = {argument: _converted(name, argument, arguments[argument]) for argument in order}
    # Lists, since a compiler may have made a number symbolic.
    lists = {argument: value if argument == "groups" else _list(value) for argument, value in arguments.items()}
    return getattr(_ops, name)(input, weight, bias, **lists, **(parts or {}))


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
        try:
            # A bool is no `type(...) is int`: in a list's or groups' place _C refuses what it is given instead.
            return _C.conv(
                dims, input, weight, bias,
                [stride] if type(stride) is int else stride,
                [padding] if type(padding) is int else padding,
                [dilation] if type(dilation) is int else dilation,
                groups if type(groups) is int else None,
                padding_mode,
                [splits] if type(splits) is int else splits,
            )  # fmt: skip
        except TypeError:
            pass  # mended or said more clearly by the longer way
    return _by_schema(
        f"conv{dims}d", input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups,
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
    """The operator conv_transpose{dims}d, by the shortest way."""
    if direct(input, weight, bias):
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
        except TypeError:
            pass
    return _by_schema(
        f"conv_transpose{dims}d", input, weight, bias, stride=stride, padding=padding, output_padding=output_padding,
        groups=groups, dilation=dilation, splits=splits,
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
    try:
        return _same(name, weight, stride, dilation)
    except (AttributeError, TypeError):
        if torch.compiler.is_compiling():
            raise
    _check_tensor(name, "weight", weight)
    return _same(name, weight, _converted(name, "stride", stride), _converted(name, "dilation", dilation))


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
    """conv2d(input, weight) * scale + bias + residual, and relu of that: each part where it is given.

    scale (K) with bias is a batch norm with constant statistics, residual (N, K, P, Q) what a block adds. Under
    `backend("native")` on CUDA the result is rounded and written once; elsewhere the parts follow in place. With relu
    and without scale, gradients keep what the convolution keeps and 1 bit an element (nothing where the output is kept
    by who uses it); with scale or without relu, what the parts keep.
    """
    padding = _pads("conv2d_fused", padding, weight, stride, dilation)
    if not isinstance(relu, bool):
        raise TypeError(f"conv2d_fused: expected relu to be a bool, got {shown(relu)} ({type(relu).__name__})")
    if not torch.compiler.is_compiling():
        for argument, part in (("scale", scale), ("residual", residual)):
            if part is not None:
                _check_tensor("conv2d_fused", argument, part)
    return _by_schema(
        "conv2d_fused", input, weight, bias, {"scale": scale, "residual": residual, "relu": relu}, stride=stride,
        padding=padding, dilation=dilation, groups=groups, padding_mode=padding_mode, splits=splits,
    )  # fmt: skip


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
