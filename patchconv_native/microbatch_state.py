"""What a module may not leave behind where it runs in chunks: it would be of one chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .tiles.state import Held


class LeftBehind:
    """A block in which a module runs. An error in it puts attributes back, and lists and mappings in them."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())

    def _held(self) -> Held:
        return Held(map(vars, self._parts))

    def __enter__(self) -> LeftBehind:
        self._before = self._held()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:
            self._before.put_back()

    @contextlib.contextmanager
    def none_but_first(self, looks: bool) -> Iterator[None]:
        """For a chunk that is not the first: what it leaves that the ones before have not left is refused. So what is
        made once, as a grid of coordinates, may be kept. looks: whether to look at all.
        """
        held = self._held() if looks else None
        yield
        for container, change in [] if held is None else held.changes():
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(change)):
                owner = next((part for part in self._parts if vars(part) is container), self._parts[0])
                raise TypeError(
                    "microbatch: expected module to keep no tensors of its call, got one in attributes of "
                    f"{type(owner).__name__}, which would be of one chunk: return it"
                )
