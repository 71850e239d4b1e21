"""Rules for dropout. On several devices the mask is that of one device that has the whole image. `tile` computes rows
more than once and in strips of any size: its masks follow from a seed and an element's place in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from ..lean import in_lean
from .axis import Axes
from .layout import layout
from .operands import wrap
from .parts import part_of
from .rules import refuse, rule
from .tensor import SpatialTensor
from .windows import SIZES


def _mask_of_one_device(x: SpatialTensor, p: float) -> Tensor:
    """Draws for the whole image, as one device would with this random state, and takes the part.

    Every part's call needs the same random state. During the call the mask is as large as the whole image, in one byte
    an element (two for that of a converted layer).
    """
    seeded = in_lean()
    dtype = torch.bfloat16 if seeded else torch.bool
    whole = torch.empty(x.shape, dtype=dtype, device=x._local.device, memory_format=layout(x._local))
    with torch.no_grad():
        mask = torch.ops.patchconv.dropout(whole.fill_(1), p) != 0 if seeded else whole.bernoulli_(1 - p)
    return part_of(mask, x.axes).clone()


def _dropout(x: SpatialTensor, p: float, training: bool, inplace: bool, whole_channels: bool) -> Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return x
    if p == 1 and not in_lean():  # draws nothing
        return x.mul_(0) if inplace else x * 0
    if whole_channels:
        keep = torch.ones((*x.shape[:2], *(1 for _ in x.shape[2:])), dtype=x.dtype, device=x.device)
        if in_lean():
            with torch.no_grad():
                mask = torch.ops.patchconv.feature_dropout(keep, p)
            return x.mul_(mask) if inplace else x * mask
        mask = keep.bernoulli_(1 - p)
        return x.mul_(mask.div_(1 - p)) if inplace else x * mask.div_(1 - p)
    mask, scale = _mask_of_one_device(x, p), 1 / (1 - p) if p < 1 else 0.0
    local = x._local
    if inplace:
        local.mul_(mask).mul_(scale)
        return x
    return wrap(local * mask * scale, x.axes)


@rule(F.dropout, torch.dropout)
def _plain_dropout(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _dropout(input, p, training, inplace, False)


def _channel_dropout(name: str, dims: int) -> Callable[..., Tensor]:
    def serve(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and input.dim() != dims + 2:
            raise refuse(name, f"it takes (N, C, {SIZES[dims]})")
        return _dropout(input, p, training, inplace, True)

    return serve


for _dims in SIZES:
    rule(getattr(F, f"dropout{_dims}d"))(_channel_dropout(f"dropout{_dims}d", _dims))


@rule(torch.feature_dropout)
def _feature_dropout(input: SpatialTensor, p: float, train: bool) -> Tensor:
    return _dropout(input, p, train, False, True)


@rule(torch.bernoulli, Tensor.bernoulli_)
def _bernoulli(x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    raise refuse("bernoulli", "its numbers would not be those of one device")


# ----------------------------------------------------------------------------------------------------------------------
# By a seed.

_DIMS = {getattr(F, f"dropout{dims}d"): dims + 2 for dims in SIZES}
DROPOUTS = {F.dropout, torch.dropout, torch.feature_dropout, *_DIMS}


def draw_seed(device: torch.device) -> Tensor:
    """Of a mask, from torch's default generator."""
    return torch.randint(-(2**63), 2**63 - 1, (1,)).to(device)


def seeded(
    function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> dict[str, Any] | None:
    """The numbers of `dropout_by_seed` for a call of one of DROPOUTS; None for one that drops nothing.

    NotImplementedError where it is not served.
    """
    if not (training and train) or not 0 < p <= 1:
        return None
    if not input.is_floating_point() or input.dim() != _DIMS.get(function, input.dim()):
        what = "(N, C, ...) of floating point" if function in _DIMS else "floating point"
        raise NotImplementedError(f"expected input to be {what}, got {input.dtype} of {tuple(input.shape)}")
    return {"p": p, "inplace": inplace, "channels": function in _DIMS or function is torch.feature_dropout}


def dropout_by_seed(
    x: Tensor, seed: Tensor, p: float, inplace: bool = False, channels: bool = False, dim: int = 0
) -> Tensor:
    """Dropout in training, of whole channels or of elements. The mask follows from this seed and `dim`."""
    if channels:
        return _dropped(x, p, inplace, lambda y: _drop_channels(y, seed, p))
    return _dropped(x, p, inplace, lambda y: _drop_rows(y, dim, 0, seed, p))


@rule(dropout_by_seed)
def _dropout_by_seed(
    x: Any, seed: Tensor, p: float, inplace: bool = False, channels: bool = False, dim: int = 0
) -> Tensor:
    if channels:
        if 1 in x.axes:
            raise refuse("dropout", "of whole channels: they are cut")
        samples = {0: x.axes[0]} if 0 in x.axes else {}
        return wrap(_dropped(x._local, p, inplace, lambda y: _drop_channels(y, seed, p, samples)), x.axes)
    low = x.axes[dim].range[0] if dim in x.axes else 0
    others = {d: axis for d, axis in x.axes.items() if d != dim}
    return wrap(_dropped(x._local, p, inplace, lambda y: _drop_rows(y, dim, low, seed, p, others)), x.axes)


class _Dropped(Function):
    """Saves nothing: the mask is made again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, drop: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.given = p, drop
        return drop(_scaled(x, p, False))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Dropped.apply(grads[0], *ctx.given), None, None


def _dropped(x: Tensor, p: float, inplace: bool, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """drop: of x, scaled, in place."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Dropped.apply(x, p, drop)
    return drop(_scaled(x, p, inplace))


def _scaled(x: Tensor, p: float, inplace: bool) -> Tensor:
    scale = 1 / (1 - p) if p < 1 else 1.0
    return x.mul_(scale) if inplace else x * scale


def _kept(shape: Sequence[int], seed: Tensor, p: float) -> Tensor:
    """Ones and zeros. Half precision has them exactly, and CUDA does not draw in float64."""
    ones = torch.ones(shape, dtype=torch.bfloat16, device=seed.device)
    return torch.ops.patchconv._dropout(ones, seed, p, 1.0, 0.0, 0.0)


def _drop_channels(y: Tensor, seed: Tensor, p: float, samples: Axes | None = None) -> Tensor:
    """samples: where the batch is cut; the mask of the whole is made."""
    count = samples[0].size if samples else y.size(0)
    return y.mul_(part_of(_kept((count, y.size(1), *[1] * (y.dim() - 2)), seed, p), samples or {}))


def _drop_rows(y: Tensor, dim: int, low: int, seed: Tensor, p: float, others: Axes | None = None) -> Tensor:
    """Drops in place. Along `dim`, y begins at row `low` of the whole; each row has a seed of its own. others: where
    y is a part as well; the mask of the whole row is made.
    """
    rows, shape = y.size(dim), list(y.shape)
    for d, axis in (others or {}).items():
        shape[d] = axis.size
    shape[dim] = 1
    for row in range(min(rows, 1) if isinstance(y, FakeTensor) else rows):  # without data all rows take the same memory
        y.narrow(dim, row, 1).mul_(part_of(_kept(shape, seed + (low + row), p), others or {}))
    return y
