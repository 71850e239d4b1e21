"""Remembers which sizes and strides the results of operators on fake tensors have.

A plan or a trace calls the same operators with the same sizes thousands of times. torch's fake tensors have a cache of
their own, which asks much more of each argument than plain dense tensors need, and none for operators of extensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MOST = 2**14
"""Calls that are remembered. Then all are forgotten."""

_LIBRARIES = {"aten", "patchconv"}
_UNFIT = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
}  # fmt: skip
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout}

Recipe = Any
"""Of a result that is an argument, that one's number; of another, its metadata and the number of the argument of which
it is a view, or -1; "nothing" where an operator returns none. Of several results, their kind and a list of these. None:
nothing can be remembered.
"""
_known: dict[Any, Recipe] = {}
_fit: dict[Any, bool] = {}


class _Unfit(Exception):
    """Nothing is remembered of such a call."""


def key_of(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What the sizes of the results follow from; None where that is not all in the sizes of the arguments."""
    fit = _fit.get(func)
    if fit is None:
        fit = func.namespace in _LIBRARIES and _UNFIT.isdisjoint(func.tags)
        fit = _fit[func] = fit and not any(one.is_out for one in func._schema.arguments)
    if not fit:
        return None
    found: list[Any] = [
        func, torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled(), torch.is_inference_mode_enabled(),
        torch.get_default_dtype(), torch.get_num_threads(),
    ]  # fmt: skip
    try:
        _describe(args, found)
        for name, value in kwargs.items():
            found.append(name)
            _describe((value,), found)
    except _Unfit:
        return None
    return tuple(found)


def _describe(values: Any, found: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.is_sparse or value.is_mkldnn or value.dtype.is_complex:
                raise _Unfit
            found += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
        elif kind in _PLAIN:
            found += (kind, value)
        elif kind is list or kind is tuple or kind is torch.Size:
            found.append(len(value))
            _describe(value, found)
        else:
            raise _Unfit


def known(key: Any) -> Recipe:
    """The recipe of such a call; a KeyError where there is none yet, None where there can be none."""
    return _known[key]


def learn(key: Any, func: Any, args: Any, result: Any) -> None:
    """Remembers how the result of a call is made."""
    if len(_known) >= MOST:
        _known.clear()
    try:
        several = isinstance(result, (tuple, list))
        found = [_recipe(func, args, one) for one in (result if several else (result,))]
        _known[key] = (list if isinstance(result, list) else tuple, found) if several else found[0]
    except _Unfit:
        _known[key] = None


def _recipe(func: Any, args: Any, result: Any) -> Recipe:
    if result is None:
        return "nothing"
    if type(result) is not FakeTensor or result.constant is not None or result.is_sparse or result.is_mkldnn:
        raise _Unfit
    for number, one in enumerate(args):
        if one is result:
            return number
    memory, where = result.untyped_storage(), -1
    for number, one in enumerate(args):
        if type(one) is FakeTensor and one.untyped_storage()._cdata == memory._cdata:
            where = number
    if where < 0:
        ends = [(n - 1) * step for n, step in zip(result.shape, result.stride(), strict=True)]
        size = (sum(ends) + 1) * result.dtype.itemsize if result.numel() else 0
        if func.is_view or result.storage_offset() or memory.nbytes() != size:
            raise _Unfit
    return result.shape, result.stride(), result.storage_offset(), result.dtype, result.fake_device, where


def made(mode: Any, recipe: Recipe, args: Any) -> Any:
    """The results of a call by its recipe."""
    if type(recipe) is tuple and len(recipe) == 2:
        kind, several = recipe
        return kind([_made(mode, one, args) for one in several])
    return _made(mode, recipe, args)


def _made(mode: Any, recipe: Recipe, args: Any) -> Tensor | None:
    if type(recipe) is int:
        return args[recipe]
    if recipe == "nothing":
        return None
    shape, strides, offset, dtype, device, where = recipe
    if where < 0:
        return FakeTensor(mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)
    plain = torch.empty(0, dtype=dtype, device="meta")
    plain.set_(args[where].untyped_storage(), offset, shape, strides)
    return FakeTensor(mode, plain, device)
