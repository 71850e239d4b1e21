"""Layers that write their result into their input, without gradients.

An activation with an argument `inplace` is called with it. Other layers compute a piece of their result at a time, by
stock's functions, and it is copied over that piece of the input. A piece is what the layer computes apart: places,
channels, groups or rows. So the numbers are those of one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.activation import STOCK_LAYERS

_PIECES = 32
"""A piece is at most a 32nd of the input, where the layer allows it ..."""
_LEAST = 1 << 20
"""... but has at least so many bytes."""

_Pieces = Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]
"""Pieces of the input, and what computes the result for each."""


def in_place(layer: nn.Module, stock: type[nn.Module], input: Tensor) -> Tensor | None:
    """What stock's forward gives for the layer, in the memory of `input`, which must fill its memory.

    None if that cannot be: nothing has been written then.
    """
    if isinstance(getattr(layer, "inplace", None), bool):
        made: Any = stock.__new__(stock)
        vars(made).update({**vars(layer), "inplace": True})
        return made.forward(input)
    if stock not in _PIECES_OF:
        return by_place(functools.partial(stock.forward, layer), input)
    pieces = _PIECES_OF[stock](layer, input)
    return None if pieces is None else _written(input, pieces)


def by_place(function: Callable[..., Tensor], input: Tensor, **options: Any) -> Tensor | None:
    """function(input, **options) in the memory of the input, as `in_place` does it. The function computes by place."""
    flat = input.as_strided((input.numel(),), (1,))
    parts = _ranges(flat.numel(), _length(input, 1))
    return _written(input, ((flat[part], lambda piece: function(piece, **options)) for part in parts))


def _written(input: Tensor, pieces: _Pieces) -> Tensor | None:
    for number, (piece, compute) in enumerate(pieces):
        result = compute(piece)
        if number == 0 and (result.dtype != input.dtype or result.shape != piece.shape):
            return None  # autocast, say
        piece.copy_(result)
    return input


def _length(input: Tensor, of_one: int, at_least: int = 1) -> int:
    """How many places, channels, ... of so many elements a piece has."""
    least = max(_LEAST // input.element_size(), input.numel() // _PIECES)
    return max(1, at_least, least // max(1, of_one))


def _ranges(count: int, length: int) -> Iterator[slice]:
    return (slice(i, min(i + length, count)) for i in range(0, count, length))


def _by_channel(input: Tensor, function: Callable[..., Tensor], *parameters: Tensor | None) -> _Pieces:
    """function(piece, *parameters of its channels)."""
    images, channels = input.shape[:2]
    places = max(1, input[:1, :1].numel())
    for image in range(images):
        one = input[image : image + 1]
        if input.is_contiguous():
            for part in _ranges(channels, _length(input, places)):
                own = [p if p is None else p[part] for p in parameters]
                yield one[:, part], lambda piece, own=own: function(piece, *own)  # type: ignore[misc]
        else:  # channels_last: all channels of some rows
            for part in _ranges(input.shape[2], _length(input, channels * places // max(1, input.shape[2]))):
                yield one[:, :, part], lambda piece: function(piece, *parameters)


def _prelu(layer: Any, input: Tensor) -> _Pieces | None:
    if input.dim() < 2 or layer.weight.numel() not in (1, input.shape[1]):
        return None
    return _by_channel(input, F.prelu, layer.weight.expand(input.shape[1]))


def _batch_norm(layer: Any, input: Tensor) -> _Pieces | None:
    if layer.running_mean is None or layer.running_var is None:
        return None
    layer._check_input_dim(input)

    def norm(piece: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.batch_norm(piece, mean, variance, weight, bias, False, 0.0, layer.eps)

    return _by_channel(input, norm, layer.running_mean, layer.running_var, layer.weight, layer.bias)


def _group_norm(layer: Any, input: Tensor) -> _Pieces | None:
    """On a CPU: a GPU computes all groups at once."""
    groups = layer.num_groups
    if not input.is_cpu or not input.is_contiguous() or input.dim() < 2 or input.shape[1] % groups:
        return None
    return _by_group(layer, input, groups)


def _by_group(layer: Any, input: Tensor, groups: int) -> _Pieces:
    channels = input.shape[1] // groups
    length = _length(input, channels * input[:1, :1].numel(), torch.get_num_threads())
    for image in range(input.shape[0]):
        for part in _ranges(groups, length):
            own = slice(part.start * channels, part.stop * channels)
            weight, bias = (p if p is None else p[own] for p in (layer.weight, layer.bias))
            yield (
                input[image : image + 1, own],
                lambda piece, n=part.stop - part.start, w=weight, b=bias: torch.group_norm(piece, n, w, b, layer.eps),  # type: ignore[misc]
            )


def _layer_norm(layer: Any, input: Tensor) -> _Pieces | None:
    shape = layer.normalized_shape
    if not input.is_contiguous() or tuple(input.shape[-len(shape) :]) != shape:
        return None
    return _by_row(layer, input, shape)


def _by_row(layer: nn.Module, input: Tensor, shape: tuple[int, ...]) -> _Pieces:
    rows = input.view(-1, *shape)
    forward = type(layer)._stock.forward  # type: ignore[attr-defined]
    for part in _ranges(len(rows), _length(input, rows[0].numel(), torch.get_num_threads())):
        yield rows[part], lambda piece: forward(layer, piece)


_PIECES_OF: dict[type[nn.Module], Callable[[Any, Tensor], _Pieces | None]] = {
    nn.PReLU: _prelu,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}
"""Besides what is computed by place."""
SERVED = frozenset(_PIECES_OF).union(*STOCK_LAYERS.values())
