"""The workspace of the CPU's operators of torch 2.14, as observed: of Fourier transforms, orders, and others that copy
what they are given. Each rule gets the operator's arguments, as its schema names them, and its first result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def rules() -> dict[Any, Callable[..., int]]:
    """By operator, as of `workspace`."""
    found: dict[Any, Callable[..., int]] = {
        _aten.roll.default: _roll,
        _aten.logsumexp.default: lambda self, result, **_: self.numel() * result.dtype.itemsize + result.nbytes,
        _aten.kthvalue.default: lambda self, **_: self.nbytes + 8 * self.numel(),
        _aten.median.default: lambda self, **_: self.nbytes,
        _aten.nanmedian.default: lambda self, **_: self.nbytes,
        _aten.median.dim: _median,
        _aten.nanmedian.dim: _median,
        _aten.sort.default: _sort,
        _aten.sort.stable: _sort,
        _aten.triu.default: _triangle,
        _aten.tril.default: _triangle,
        _aten.index_select.default: _index_select,
        _aten._trilinear.default: lambda i3, **_: i3.nbytes + i3.nbytes // max(i3.size(-1), 1),
        _aten.binary_cross_entropy_with_logits.default: _cross_entropy,
        _aten._fft_r2c.default: lambda self, dim, **_: _copied(self, dim[:-1], dim[-1:]),
        _aten._fft_c2c.default: lambda self, dim, **_: _copied(self, dim),
        _aten._fft_c2r.default: _to_real,
        _aten.abs.default: _of_complex,
        _aten.angle.default: _of_complex,
    }
    for name, support in {"_upsample_bilinear2d_aa": 1, "_upsample_bicubic2d_aa": 2}.items():
        forms = getattr(_aten, name).default, getattr(_aten, name).vec
        found |= dict.fromkeys(forms, functools.partial(_aa, support))
    return {operator: functools.partial(_named, operator, rule) for operator, rule in found.items()}


def _named(
    operator: Any, rule: Callable[..., int], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str
) -> int:
    if device != "cpu":
        return 0
    arguments = operator._schema.arguments
    given = {one.name: one.default_value for one in arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    first = result[0] if isinstance(result, (tuple, list)) else result
    return rule(**given, result=first)


def _roll(self: Tensor, dims: Sequence[int], **_: Any) -> int:
    """A dimension after the other; without dimensions a copy as a row."""
    return self.nbytes * (len(dims) - 1 if dims else not self.is_contiguous())


def _median(self: Tensor, dim: int, **_: Any) -> int:
    return self.nbytes if self.dim() and self.stride(dim) != 1 else 0


def _sort(self: Tensor, dim: int = -1, **_: Any) -> int:
    return 8 * self.size(dim) if self.dim() else 0


def _index_select(self: Tensor, dim: int, **_: Any) -> int:
    """Of dimension 1 it has a way of its own, which wants the whole in order."""
    copied = self.dim() > 1 and dim % self.dim() == 1 and not self.is_contiguous()
    return self.nbytes * copied


def _triangle(self: Tensor, **_: Any) -> int:
    """Matrices that do not lie one after the other are copied."""
    expected = self.size(-1) * self.size(-2)
    for size, stride in zip(reversed(self.shape[:-2]), reversed(self.stride()[:-2]), strict=True):
        if size != 1 and stride != expected:
            return self.nbytes
        expected *= size
    return 0


def _cross_entropy(self: Tensor, pos_weight: Tensor | None, reduction: int, **_: Any) -> int:
    tensors = (2 if reduction else 1) + (not self.is_contiguous())
    return tensors * self.nbytes + 16 + (0 if pos_weight is None else pos_weight.nbytes)


def _copied(self: Tensor, dim: Sequence[int], last: Sequence[int] = ()) -> int:
    """Bytes of a transform's copy of its input, unless its dimensions `dim` and `last` lie innermost, in this order."""
    along, last = ([d % self.dim() for d in given] for given in (dim, last))
    others = [d for d in range(self.dim()) if d not in (*along, *last)]
    order = [d for some in (others, along, last) for d in sorted(some, key=self.stride, reverse=True)]
    return 0 if self.permute(order).is_contiguous() else self.nbytes


def _to_real(self: Tensor, dim: Sequence[int], **_: Any) -> int:
    """Complex transforms along all dimensions but the last come first."""
    return self.nbytes + _copied(self, dim[:-1]) if len(dim) > 1 else _copied(self, dim)


def _of_complex(self: Tensor, **_: Any) -> int:
    """Computed as complex numbers first."""
    return self.nbytes if self.is_complex() else 0


def _aa(support: int, result: Tensor, **given: Any) -> int:
    """Rows first, into another tensor; of each coordinate of the result where it begins, and weights."""
    input = given.get("self", given.get("input"))
    assert input is not None
    between = math.prod(input.shape[:-1]) * result.size(-1) * input.dtype.itemsize
    weight = 8 if result.dtype == torch.float64 else 4

    def of_weights(d: int) -> int:
        reach = support * max(1.0, input.size(d) / result.size(d))
        return result.size(d) * ((2 * math.ceil(reach) + 1) * weight + 32)

    return between + max(of_weights(-2), of_weights(-1))
