"""How a convolution would be computed, without computing it: path, tiles, halo, workspace and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _library
from ._bytes import format_bytes
from .convert import conv_base, weight_of
from .functional import same_padding
from .modules import Split, checked_splits

_C = _library.load()


@dataclass(frozen=True)
class Explanation:
    """How one pass of a convolution is computed. Bytes are estimates, those that automatic splits go by."""

    operator: str
    """"conv2d", ..."""
    path: str
    """"stock": one call of the stock operator; "tiled"; "native": a kernel of this project."""
    kernel: str | None
    """The name of the kernel with path "native", else None."""
    tiles: tuple[int, ...]
    """The number of pieces of each spatial dimension."""
    batch_step: int
    """Images a tile."""
    halo_percent: float
    """Input positions that are read again, in percent of those that are read; above 100 if halos are larger than
    tiles.
    """
    workspace_bytes: int
    """Transient memory besides the result."""
    stock_workspace_bytes: int
    """The same for one call of the stock operator."""
    input_size: tuple[int, ...]
    output_size: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        pieces = " x ".join(map(str, self.tiles))
        images = f"{self.batch_step} image{'s' if self.batch_step > 1 else ''}"
        path = {
            "stock": "stock (one call)",
            "native": f"native: {self.kernel}" + ("" if max(self.tiles, default=1) == 1 else f", in {pieces} pieces"),
            "tiled": f"tiled: {pieces} tiles an image, {images} at a time",
        }[self.path]
        stock = "" if self.path == "stock" else f" (one stock call: {format_bytes(self.stock_workspace_bytes)})"
        rows = [f"{self.operator} {_shape(self.input_size)} -> {_shape(self.output_size)}", f"  path       {path}"]
        if self.path == "tiled":
            rows.append(f"  halo       {self.halo_percent:.2f} % read more than once")
        rows += [f"  workspace  {format_bytes(self.workspace_bytes)}{stock}", f"  why        {self.reason}"]
        return "\n".join(rows)


def _shape(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


def _autocast(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype to which autocast casts a tensor of this dtype, if it is on."""
    served = torch.amp.is_autocast_available(device) and dtype.is_floating_point and dtype != torch.float64
    if served and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


class _OfTheModule:
    def __repr__(self) -> str:
        return "the module's own"


_OF_THE_MODULE: Any = _OfTheModule()


def explain(
    input: Tensor | Sequence[int],
    conv: nn.Module,
    splits: Any = _OF_THE_MODULE,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    pass_: str = "fprop",
) -> Explanation:
    """How `conv` would be computed on `input`, a tensor or a shape ((N, C, H, W) or (C, H, W) for Conv2d).

    conv: any torch.nn.ConvNd or ConvTransposeNd, converted or not.
    splits: None, an int or a tuple, in place of the module's.
    dtype, device: those of the input if a shape is given (default: the weight's, or autocast's dtype where that is on).
    A shape stands for a contiguous tensor.
    pass_: "fprop" (forward), "dgrad" (gradient of the input) or "wgrad" (gradient of the weight; the gradient of the
    output is taken to have the output's layout).

    Nothing is computed. Raises what the convolution itself would raise, TypeError for another conv or input and for
    dtype or device with a tensor, ValueError for another pass_.
    """
    stock = conv_base(type(conv))
    if stock is None:
        raise TypeError(f"explain: expected conv to be a convolution module, got {type(conv).__name__}")
    if pass_ not in ("fprop", "dgrad", "wgrad"):
        raise ValueError(f"explain: expected pass_ to be 'fprop', 'dgrad' or 'wgrad', got {pass_!r}")
    module: Any = conv
    dims = len(module.kernel_size)
    if splits is _OF_THE_MODULE:
        splits = module.splits if isinstance(module, Split) else None
    weight = weight_of(module)
    stride: Sequence[int] = ()
    if isinstance(input, Tensor):
        if dtype is not None or device is not None:
            raise TypeError("explain: expected dtype and device only with a shape, got them with a tensor")
        size, stride, device = tuple(input.shape), input.stride(), input.device
        types = [_autocast(t.dtype, device.type) for t in (input, weight)]
    else:
        if not isinstance(input, Sequence) or not all(isinstance(n, int) for n in input):
            raise TypeError(f"explain: expected input to be a tensor or a shape, a sequence of ints, got {input!r}")
        size, device = tuple(input), torch.device(device or weight.device)
        types = [dtype or _autocast(weight.dtype, device.type)] * 2
    transposed = module.transposed
    padding = module.padding
    if isinstance(padding, str):
        padding = same_padding(module.kernel_size, module.dilation) if padding == "same" else [0]
    tile_plan = _C.plan(
        input=list(size),
        weight=list(weight.shape),
        stride=list(module.stride),
        padding=list(padding),
        output_padding=list(module.output_padding),
        dilation=list(module.dilation),
        groups=module.groups,
        transposed=transposed,
        padding_mode=module.padding_mode,
        splits=checked_splits("explain", dims, splits),
        input_stride=list(stride),
        weight_stride=list(weight.stride()),
        dtype=str(types[0]).removeprefix("torch."),
        weight_dtype=str(types[1]).removeprefix("torch."),
        device=device.type,
        pass_=pass_,
    )
    tile_plan |= {"tiles": tuple(tile_plan["tiles"]), "output_size": tuple(tile_plan["output_size"])}
    return Explanation(operator=f"conv{'_transpose' if transposed else ''}{dims}d", input_size=size, **tile_plan)
