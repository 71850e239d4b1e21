"""What a module is told about gradients while it is recorded: what one call of it would be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .graph import Graph

IN_TILES = "what is inside of the module has its gradients tile by tile, never whole"

_tensor: Any = Tensor
_NEEDS, _IS_LEAF, _NODE = _tensor.requires_grad.__get__, _tensor.is_leaf.__get__, _tensor.grad_fn.__get__
QUESTIONS = {_NEEDS, _IS_LEAF, _NODE}
USES = {
    _tensor.register_hook, _tensor.register_post_accumulate_grad_hook, _tensor.backward, torch.autograd.grad,
}  # fmt: skip
"""Functions that want gradients, or give them."""


class History:
    """Of a graph that grows."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._needing, self._looked_at = graph, set[int](), 0

    def ask(self, asked: Sequence[bool]) -> None:
        """asked: whether images require gradients."""
        self._needing = {v for v, one in zip(self._graph.inputs, asked, strict=True) if one}

    def needs(self, v: int) -> bool:
        """Whether the gradient of a value is needed."""
        for call in self._graph.calls[self._looked_at :]:
            self._needing |= self._graph.needing(call, self._needing)
        self._looked_at = len(self._graph.calls)
        return v in self._needing

    def answer(self, question: Any, v: int) -> Any:
        """To one of QUESTIONS. NotImplemented where it is an object of autograd, which is not there."""
        needs, is_image = self.needs(v), v in self._graph.inputs
        node = NotImplemented if needs and not is_image else None
        return {_NEEDS: needs, _IS_LEAF: is_image or not needs, _NODE: node}[question]
