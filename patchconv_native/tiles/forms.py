"""What the plan of a recorded module depends on: graphs of the same form have the same plan, whatever the values of
their parameters. A training step changes these, and so records the module again, but does not plan it again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..settings import all_settings
from .graph import Call, Graph, is_differentiable, refs
from .keys import digest_of
from .plan import TilePlan

_OF_CLASSES = {F.cross_entropy, F.nll_loss, F.embedding, F.one_hot}
"""Functions that take whole numbers for classes, not for places."""


def form_of(graph: Graph) -> str:
    """Equal for two graphs that differ in the values of tensors alone: not of whole numbers that may be places."""
    numbers: dict[int, int] = {}

    def named(tensor: Tensor) -> tuple[Any, ...]:
        number = numbers.setdefault(id(tensor), len(numbers))
        return number, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf

    def of_call(call: Call) -> tuple[Any, ...]:
        given = tree_map_only(Tensor, named, (call.args, call.kwargs))
        return id(call.function), call.name, given, call.result, call.autocast, call.history, call.in_place is None

    values = [(fake.shape, fake.stride(), fake.dtype, fake.device) for fake in graph.fakes]
    changes = refs((graph.changed, [change for _, change in graph.kept]))
    calls = [call for call in graph.calls if call.function not in _OF_CLASSES]
    whole = [one for call in calls for one in call.constants if not is_differentiable(one)]
    rest = (
        digest_of(whole),
        graph.inputs,
        tree_leaves(graph.result),
        graph.strides,
        changes,
        graph.made,
        sorted(graph.needs),
    )
    return repr(([of_call(call) for call in graph.calls], values, rest, all_settings(), torch.get_num_threads()))


def emptied(plan: TilePlan) -> TilePlan:
    """Without the graph, which holds the module's tensors."""
    return _of_graph(plan, Graph())


def filled(plan: TilePlan, graph: Graph) -> TilePlan:
    """A plan of `emptied`, for a graph of the same form."""
    return _of_graph(plan, graph)


def _of_graph(plan: TilePlan, graph: Graph) -> TilePlan:
    reaches = [dataclasses.replace(one, graph=graph) for one in plan.reaches]
    return dataclasses.replace(plan, graph=graph, reaches=reaches)
