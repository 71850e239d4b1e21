"""What a module is called with: images, and everything else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..spatial import NotServed, SpatialTensor
from .arrays import is_array
from .recorded import Recorded
from .shared import Shared, shared_by
from .state import change, change_of, containers, contents, objects, same


def is_served(dim: Any) -> bool:
    """Whether images may be cut along it: 0, the batch, or a spatial dimension, 2 or more, or -1 or less."""
    return isinstance(dim, int) and not isinstance(dim, bool) and dim != 1


def least_dimensions(dim: int) -> int:
    """How many dimensions an image must have for `dim` to be one of its spatial dimensions, or the batch."""
    return max(3, dim + 1) if dim >= 0 else 2 - dim


def check_called(owner: str, module: Any) -> None:
    """TypeError for what is no module and no function that can be called with images."""
    expected = f"{owner}: expected module to be a torch.nn.Module or a function"
    if isinstance(module, type):
        raise TypeError(f"{expected}, got the class {module.__name__}: make one, as {module.__name__}(...)")
    if not callable(module):
        raise TypeError(f"{expected}, got {type(module).__name__}")
    forward = getattr(type(module), "forward", None)  # a scripted module's class says that it has none
    if isinstance(module, nn.Module) and forward is nn.Module.forward and "forward" not in vars(module):
        raise TypeError(f"{expected}, got a {type(module).__name__}, which has no forward")


def _dimensions(image: Any) -> int:
    return image.dim() if isinstance(image, Tensor) else len(image.shape)


def _kinds_of(args: tuple[Any, ...]) -> str:
    """What was given, and for the name of a file how it is opened."""
    kinds = ", ".join(type(arg).__name__ for arg in args) or "an empty tuple"
    named = any(isinstance(arg, (str, os.PathLike)) for arg in args)
    return kinds + ("; a file is opened first: numpy.load(path, mmap_mode='r')" if named else "")


class Arguments:
    """arrays: whether array-likes may be images. dim: of the images, the dimension along which they are cut.

    dims: their spatial dimensions, from 2 on, with that one first. Of dim=0, the batch, they follow it. Of images that
    are cut between ranks, `shared`, the dimension along which they are is the second one.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, arrays: bool = False, dim: int = 2,
        owner: str = "tile",
    ) -> None:  # fmt: skip
        self._given = (args, kwargs or {})
        leaves, self._spec = tree_flatten(self._given)
        sizes = [_dimensions(leaf) if isinstance(leaf, Tensor) or (arrays and is_array(leaf)) else 0 for leaf in leaves]
        most = max(sizes, default=0)
        if not most:
            raise ValueError(
                f"{owner}: expected x to be a tensor, an array-like such as numpy.memmap, or a tuple of the module's "
                f"arguments with one of these in it, got {_kinds_of(args)}"
            )
        if most < 3:
            raise ValueError(f"{owner}: expected x to have 3 dimensions or more, such as (N, C, H, W), got {most}")
        if not is_served(dim) or least_dimensions(dim) > most:
            raise ValueError(
                f"{owner}: expected dim to be from 2 to {most - 1} or from {2 - most} to -1, a spatial dimension of x, "
                f"or 0, its batch, got {dim!r}"
            )
        self._leaves = leaves
        self._places = [i for i, size in enumerate(sizes) if size == most]
        self.images: list[Any] = [leaves[i] for i in self._places]
        self.dims = [dim % most, *(d for d in range(2, most) if d != dim % most)]
        self.shared: Shared | None = None
        self._find_shared(owner)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for image in self.images:
            if isinstance(image, Tensor) and (image.layout != torch.strided or image.is_nested):
                layout = "nested" if image.is_nested else f"of layout {image.layout}"
                raise ValueError(f"{owner}: expected x to be a dense tensor, got one that is {layout}")

    def _find_shared(self, owner: str) -> None:
        if any(isinstance(leaf, SpatialTensor) for i, leaf in enumerate(self._leaves) if i not in self._places):
            raise NotServed(
                f"{owner}: parts of tensors with fewer dimensions than the images are not served: "
                "hand them in whole, the same on every rank"
            )
        found = shared_by(owner, self.images)
        if found is None:
            return
        cut, self.shared = found
        others = [d for d in self.dims if d != cut]
        if not others:
            raise NotServed(f"{owner}: images whose only spatial dimension is cut between ranks are not served")
        self.dims = [others[0], cut, *others[1:]]

    def parts(self) -> list[Any]:
        """The images; of those that are cut between ranks, what this one has."""
        return [image.to_local() if isinstance(image, SpatialTensor) else image for image in self.images]

    def rest(self) -> Any:
        """All but the images, to tell calls apart; None where it holds tensors or objects."""
        rest = [None if i in self._places else leaf for i, leaf in enumerate(self._leaves)]
        return None if any(isinstance(leaf, Tensor) for leaf in rest) else (str(self._spec), tuple(map(repr, rest)))

    def objects(self) -> list[Any]:
        """Those that the module gets as they are, and may change."""
        return objects(self._leaves)

    def record(self, module: Callable[..., Any], images: Sequence[Recorded]) -> tuple[Any, dict[int, dict[Any, Any]]]:
        """The result of module(*arguments) with other images, and the lists and mappings among the arguments that it
        has changed: by their numbers, what they hold now. The caller's own are as they were.
        """
        leaves = list(self._leaves)
        for place, image in zip(self._places, images, strict=True):
            leaves[place] = image
        args, kwargs = tree_unflatten(leaves, self._spec)
        own = containers((args, tuple(kwargs.values())))
        before = list(map(contents, own))
        kept = [one for values in before for one in values.values() if isinstance(one, Recorded)]
        versions = [one._index for one in kept]
        result = module(*args, **kwargs)
        if any(one._lost or one._index != version for one, version in zip(kept, versions, strict=True)):
            raise NotServed("tile: writing into a tensor that is handed in in a list or mapping is not served")
        changed = {}
        for number, (container, old) in enumerate(zip(own, before, strict=True)):
            now = contents(container)
            if not same(now, old):
                changed[number] = change_of(now, old)
        caller = self._containers()
        if changed and len(set(map(id, caller))) < len(caller):
            raise NotServed("tile: changing lists or mappings of which one is handed in twice is not served")
        return result, changed

    def change(self, changed: dict[int, dict[Any, Any]]) -> None:
        """Does to the caller's lists and mappings what a recorded call did to its own."""
        caller = self._containers()
        for number, values in changed.items():
            change(caller[number], values)

    def _containers(self) -> list[Any]:
        args, kwargs = self._given
        return containers((args, tuple(kwargs.values())))
