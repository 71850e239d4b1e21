"""Many small models in one group of processes. Every rank compares each of them with the whole image on one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.ranks import run
from support.spatial_chains import differences, step, structured

# Ranks, dims, shape of the mesh.
MESHES = {"2 rows": (2, "H", (2,)), "3 columns": (3, "W", (3,)), "2x2": (4, "HW", (2, 2)), "4 rows": (4, "H", (4,))}


SHAPE = (2, 4, 13, 11)
ODD = (1, 3, 17, 13)


def conv(a: int = 4, b: int = 4, k: int = 3, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(a, b, k, **{"padding": k // 2, **more})


def whole(*shape: int) -> Tensor:
    """The same values on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).double()


class Apply(nn.Module):
    """A function of the image and of parameters of these shapes."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.values = nn.ParameterList(torch.randn(shape).double() for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.values)


Maker = Callable[[], nn.Module]
Cases = dict[str, tuple[Maker, tuple[int, ...]]]


def mesh_of(world: int, mesh_shape: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    assert world == math.prod(mesh_shape)
    return init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple(f"m{i}" for i in range(len(mesh_shape))))


def compare(
    model: nn.Module,
    image: Tensor,
    mesh: Any,
    dims: str,
    tolerance: float = 1e-9,
    surroundings: Any = contextlib.nullcontext,
    tile: dict[str, Any] | None = None,
) -> list[str]:
    """What differs from one process: output, gradients, state. surroundings: makes a context to call the model in.
    tile: arguments of `tile`, which runs the model on the ranks' parts in place of `spatial`.
    """
    import patchconv_native as pc
    import patchconv_native.distributed as pd

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with surroundings():
            return pd.gather(model(x))  # a plain tensor is returned as it is

    def tiled(model: nn.Module, x: Tensor) -> Tensor:
        with surroundings():
            return pd.gather(pc.tile(model, pd.scatter(x, mesh, dims), **(tile or {})))

    want, other = step(copy.deepcopy(model), image, forward, 5), copy.deepcopy(model)
    got = step(pd.spatial(other, mesh, dims), image, forward, 5) if tile is None else step(other, image, tiled, 5)
    found = differences(got, want, tolerance)
    if got["output"].dtype != want["output"].dtype:
        found.append(f"dtype {got['output'].dtype}, not {want['output'].dtype}")
    return found


def each(
    rank: int, world: int, cases: str, mesh_shape: tuple[int, ...], dims: str, names: list[str],
    tile: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """What differs, or the error's text, for each of these cases of a module's. tile: as of `compare`."""
    import importlib

    module, _, table = cases.partition(":")
    mesh, found = mesh_of(world, mesh_shape), {}
    for name in names:
        make, shape = getattr(importlib.import_module(module), table)[name]
        found[name] = []
        torch.manual_seed(11)
        for image in (structured(shape), torch.randn(shape, generator=torch.Generator().manual_seed(3)).double()):
            torch.manual_seed(1)
            model = make().double()
            try:
                found[name] += compare(model, image, mesh, dims, tile=tile)
            except Exception as error:
                found[name].append(f"{type(error).__name__}: {error}")
    return found


@functools.cache
def results(cases: str, mesh: str, names: tuple[str, ...]) -> list[dict[str, list[str]]]:
    world, dims, shape = MESHES[mesh]
    torch.manual_seed(7)
    return run(world, each, cases, shape, dims, list(names))


def wrong(cases: str, mesh: str, names: tuple[str, ...], name: str) -> list[str]:
    """What differs on any rank."""
    return [f"rank {i}: {text}" for i, found in enumerate(results(cases, mesh, names)) for text in found[name]]
