"""What users call on tensors: `scatter`, `gather`, `halo_exchange`, and to and from DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..spatial import Axis, Range, SpatialTensor
from ..spatial.operands import scattered
from ..spatial.parts import fetch, gather_parts, recut
from ..spatial.windows import inside
from .ranks import Ranks, even, group_of, same_everywhere

_FROM_THE_END = {"D": 3, "H": 2, "W": 1, "L": 1}
_DIMS = ("H", "W", "HW", "D", "DH", "DW", "DHW", "L")


def takes(dims: str) -> tuple[tuple[int, ...], str]:
    """The numbers of dimensions that a tensor to be cut along `dims` can have, with a batch first; and in words."""
    if dims == "L":
        return (3, 2), "(N, C, L) or (C, L)"
    if "D" in dims:
        return (5, 4), "(N, C, D, H, W) or (C, D, H, W)"
    return (4, 5, 3), "(N, C, H, W), (N, C, D, H, W) or (C, H, W)"


def axes_on_mesh(operator: str, mesh: Any, dims: str, shape: Sequence[int]) -> dict[int, Axis]:
    """The axes of an image, a volume or a signal of this shape."""
    if dims not in _DIMS:
        raise ValueError(f"{operator}: expected dims to be letters of 'DHW' in this order, or 'L', got {dims!r}")
    if not hasattr(mesh, "ndim") or not hasattr(mesh, "get_group"):
        raise TypeError(f"{operator}: expected mesh to be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != len(dims):
        raise ValueError(
            f"{operator}: expected a mesh of {len(dims)} dimension{'s' if len(dims) > 1 else ''} for dims={dims!r}, "
            f"got {mesh.ndim}; take a part of it, as in mesh['name']"
        )
    axes = {}
    for place, name in enumerate(dims):
        group, d = mesh.get_group(place), len(shape) - _FROM_THE_END[name]
        ranks = dist.get_world_size(group)
        axes[d] = Axis(name, even(operator, name, shape[d], ranks), dist.get_rank(group), Ranks(group), ranks)
    return axes


def groups_on_mesh(operator: str, mesh: Any, dims: str) -> list[Axis]:
    """Axes of no size in particular, for their groups."""
    return list(axes_on_mesh(operator, mesh, dims, (2**40,) * 3).values())


def scatter(image: Tensor, mesh: Any, dims: str = "H", check: bool = True) -> SpatialTensor:
    """This rank's part of an image that is the same on every rank, cut evenly: (N, C, H, W) or (C, H, W). A volume has
    D before H, a signal (N, C, L) or (C, L).

    dims: "H", "W" or "HW", of a volume also "D", "DH", "DW" or "DHW", of a signal "L"; a letter for each dimension of
    the DeviceMesh, between whose ranks it is cut. The part is a copy, so that the whole can be freed. Nothing is sent
    but, with check, a checksum of the shape and of some of the values, which on a GPU waits for them. Differentiable:
    every rank gets the whole image's gradient. ValueError, on every rank, for sizes below the number of ranks, for
    images that are not the same on all of them, and where mesh, dims and image do not fit.
    """
    if not isinstance(image, Tensor):
        raise TypeError(f"scatter: expected image to be a Tensor, got {type(image).__name__}")
    if isinstance(image, SpatialTensor):
        raise TypeError("scatter: expected image to be a whole tensor, got a SpatialTensor")
    groups = groups_on_mesh("scatter", mesh, dims)
    numbers, words = takes(dims)
    if image.dim() not in numbers:
        raise ValueError(
            f"scatter: expected image to have dimensions {words} for dims={dims!r}, got {tuple(image.shape)}"
        )
    if check and not same_everywhere(_sample(image, dims), groups):
        raise ValueError(
            f"scatter: expected the same image on every rank, got {tuple(image.shape)} here and other sizes or values "
            "on another rank"
        )
    return scattered(image, axes_on_mesh("scatter", mesh, dims, image.shape))


def _sample(image: Tensor, dims: str) -> Tensor:
    """The shape of an image, and its values at up to 32 places (of a volume 12) along each spatial dimension."""
    number = 1 if dims == "L" else 3 if "D" in dims or image.dim() == 5 else 2
    values = image.detach()
    for d in range(image.dim() - number, image.dim()):
        step = max(1, image.size(d) // (6 if number == 3 else 16))
        values = values[(slice(None),) * d + (slice(None, None, step),)]
    return torch.cat([torch.tensor(image.shape, dtype=torch.float64), values.double().cpu().flatten()])


def gather(x: Tensor) -> Tensor:
    """The whole, the same on every rank. Its gradient, the same on every rank too, is taken once: each rank's own part
    of it goes to that rank's part. A plain tensor is returned as it is.
    """
    return gather_parts(x.to_local(), x.axes) if isinstance(x, SpatialTensor) else x


def halo_exchange(x: SpatialTensor, halo: int | tuple[int, ...]) -> Tensor:
    """This rank's part with `halo` more rows (and columns) of its neighbours on either side, as a plain tensor.

    halo: a number for every cut dimension, two (before, after) for every one, or two for each. Nothing is added beyond
    the image's border. Any width is served, also one that reaches past the next rank. Differentiable: gradients of the
    halo go back to the rank it came from and are added there.
    """
    if not isinstance(x, SpatialTensor):
        raise TypeError(f"halo_exchange: expected a SpatialTensor, got {type(x).__name__}")
    widths = [halo] * 2 if isinstance(halo, int) else list(halo)
    if len(widths) == 2:
        widths = widths * len(x.axes)
    if len(widths) != 2 * len(x.axes) or any(not isinstance(w, int) or w < 0 for w in widths):
        raise ValueError(
            f"halo_exchange: expected halo to be 1, 2 or {2 * len(x.axes)} numbers that are not negative, got {halo!r}"
        )
    local = x.to_local()
    for place, (d, axis) in enumerate(x.axes.items()):
        before, after = widths[2 * place : 2 * place + 2]
        wanted: list[tuple[Range, ...]] = [(inside((a - before, b + after), axis.size),) for a, b in axis.ranges()]
        local = fetch(local, d, axis, tuple(wanted))
    return local


def _dtensor_cuts(axis: Axis) -> tuple[int, ...]:
    """Where DTensor cuts: pieces of the same size, of which the last ones are smaller or empty."""
    piece = -(-axis.size // axis.count)
    return tuple(min(rank * piece, axis.size) for rank in range(axis.count + 1))


def to_dtensor(x: SpatialTensor, mesh: Any) -> Any:
    """As a DTensor on `mesh`, the one that it was scattered over. Differentiable.

    DTensor cuts sizes that do not divide at other places: rows or columns move between ranks then. ValueError for
    another mesh.
    """
    from torch.distributed.tensor import DTensor, Shard

    groups = [mesh.get_group(i) for i in range(mesh.ndim)]
    order = {d: next((i for i, g in enumerate(groups) if g is group_of(axis)), None) for d, axis in x.axes.items()}
    if len(groups) != len(x.axes) or None in order.values():
        raise ValueError("to_dtensor: expected mesh to be the one that the SpatialTensor is cut over")
    local = x.to_local()
    for d, axis in x.axes.items():
        local = recut(local, d, axis, _dtensor_cuts(axis))
    placements = [Shard(d) for d, _ in sorted(order.items(), key=lambda item: item[1] or 0)]
    whole = torch.empty(x.shape, device="meta")
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=whole.shape,
                              stride=whole.stride())  # fmt: skip


def from_dtensor(x: Any, dims: str = "H") -> SpatialTensor:
    """A DTensor of a shape that `scatter` takes, whose placements are Shard of the dimensions that `dims` names, in its
    mesh's order. ValueError for other placements.
    """
    from torch.distributed.tensor import Shard

    wanted = tuple(Shard(x.dim() - _FROM_THE_END[name]) for name in dims if name in _FROM_THE_END)
    if tuple(x.placements) != wanted:
        raise ValueError(f"from_dtensor: expected placements {wanted} for dims={dims!r}, got {tuple(x.placements)}")
    axes = axes_on_mesh("from_dtensor", x.device_mesh, dims, x.shape)
    local = x.to_local()
    for d, axis in axes.items():
        local = recut(local, d, axis.cut_at(_dtensor_cuts(axis)), axis.cuts)
    return SpatialTensor(local, axes)
