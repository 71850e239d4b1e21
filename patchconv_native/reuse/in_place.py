"""Layers that write their result into their input, without gradients.

Activations have operators of torch for that. A norm by channel is torch's batch norm with its input for `out`; a norm
by group is the same with the statistics of each group, which this package finds. A layer norm computes some rows at a
time, and they are copied over those of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.activation import STOCK_LAYERS

_PIECE = 1 << 20
"""Bytes of a layer norm's rows that are computed at a time, for each thread."""
_PAYS = 32 << 20
"""Bytes of an input from which two passes, or a copy, cost less than the memory of a result of its own."""

_aten = torch.ops.aten


def in_place(layer: nn.Module, stock: type[nn.Module], input: Tensor) -> Tensor | None:
    """What stock's forward gives for the layer, in the memory of `input`, which must fill its memory.

    None if that cannot be, or does not pay: nothing has been written then.
    """
    return _INTO[stock](layer, input)


def _by_inplace(stock: type[nn.Module]) -> Callable[[nn.Module, Tensor], Tensor]:
    """For layers with an argument `inplace`."""

    def into(layer: nn.Module, input: Tensor) -> Tensor:
        # The layer itself is not changed: other threads may use it.
        made: Any = stock.__new__(stock)
        vars(made).update({**vars(layer), "inplace": True})
        return made.forward(input)

    return into


def _unless_cast(function: Callable[[Any, Tensor], Tensor | None]) -> Callable[[Any, Tensor], Tensor | None]:
    """Autocast may have the stock function give another dtype."""

    def into(layer: Any, input: Tensor) -> Tensor | None:
        return None if torch.is_autocast_enabled(input.device.type) else function(layer, input)

    return into


def _by_channel(
    input: Tensor, rows: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """A batch norm in eval mode of `rows`, which is the input in another shape."""
    nothing = mean.new_empty(0), mean.new_empty(0)
    torch.ops.aten.native_batch_norm.out(
        rows, weight, bias, mean, variance, False, 0.0, eps, out=rows, save_mean=nothing[0], save_invstd=nothing[1]
    )
    return input


def _batch_norm(layer: Any, input: Tensor) -> Tensor | None:
    layer._check_input_dim(input)
    parameters = layer.running_mean, layer.running_var, layer.weight, layer.bias
    if parameters[0] is None or parameters[1] is None or not _fit(input, parameters):
        return None
    return _by_channel(input, input, *parameters, layer.eps)


def _fit(input: Tensor, parameters: tuple[Tensor | None, ...]) -> bool:
    """Whether there is one of each a channel, in a dtype that goes with the input's. Others are stock's."""
    given = [p for p in parameters if p is not None]
    dtypes = {p.dtype for p in given}
    fits = dtypes <= {input.dtype} or (input.dtype.itemsize == 2 and dtypes == {torch.float32})
    return fits and all(p.shape == (input.shape[1],) for p in given)


def _group_norm(layer: Any, input: Tensor) -> Tensor | None:
    return _by_group(layer, input, layer.num_groups)


def _instance_norm(layer: Any, input: Tensor) -> Tensor | None:
    if layer.track_running_stats or input.dim() == layer._get_no_batch_dim():
        return None
    layer._check_input_dim(input)
    return _by_group(layer, input, layer.num_features) if input.shape[1] == layer.num_features else None


def _by_group(layer: Any, input: Tensor, groups: int) -> Tensor | None:
    """On a CPU, where the statistics take one pass and no memory."""
    served = input.is_cpu and input.nbytes >= _PAYS and input.is_contiguous() and input.dim() > 2
    if not served or input.shape[1] % groups or not _fit(input, (layer.weight, layer.bias)):
        return None
    images, channels = input.shape[:2]
    mean, variance = torch.ops.patchconv._batch_statistics.default(input.view(1, images * groups, -1), None, None, 0.0)
    mean, variance = (one.repeat_interleave(channels // groups) for one in (mean, variance))
    weight, bias = (p if p is None else p.to(mean.dtype).repeat(images) for p in (layer.weight, layer.bias))
    if weight is None:
        weight = torch.ones_like(mean)
    return _by_channel(input, input.view(1, images * channels, -1), mean, variance, weight, bias, layer.eps)


def _layer_norm(layer: Any, input: Tensor) -> Tensor | None:
    shape = layer.normalized_shape
    if not input.is_cpu or input.nbytes < _PAYS or not input.is_contiguous() or input.shape[-len(shape) :] != shape:
        return None
    rows = input.view(-1, *shape)
    for piece in rows.split(max(1, _PIECE * torch.get_num_threads() * len(rows) // input.nbytes)):
        piece.copy_(nn.LayerNorm.forward(layer, piece))
    return input


_INTO: dict[type[nn.Module], Callable[[Any, Tensor], Tensor | None]] = {
    **{
        stock: _by_inplace(stock)
        for stocks in STOCK_LAYERS.values()
        for stock in stocks
        if "inplace" in stock.__init__.__code__.co_varnames
    },
    nn.GELU: lambda layer, input: _aten.gelu_(input, approximate=layer.approximate),
    nn.Sigmoid: lambda layer, input: torch.sigmoid_(input),
    nn.Tanh: lambda layer, input: torch.tanh_(input),
    nn.Softplus: _unless_cast(lambda layer, input: _aten.softplus.out(input, layer.beta, layer.threshold, out=input)),
    nn.Hardshrink: _unless_cast(lambda layer, input: _aten.hardshrink.out(input, layer.lambd, out=input)),
    nn.Softshrink: _unless_cast(lambda layer, input: _aten.softshrink.out(input, layer.lambd, out=input)),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _unless_cast(_instance_norm)),
    nn.GroupNorm: _unless_cast(_group_norm),
    nn.LayerNorm: _unless_cast(_layer_norm),
}
SERVED = frozenset(_INTO)
