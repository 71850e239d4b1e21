"""What is found of a recorded graph from the dimension along which it is cut.

Attention over the image: keys and values are there whole, and the queries' rows are computed strip by strip. Dropout:
the mask is made row by row along that dimension, so that it is the same in strips, in bands and at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..spatial.dropout import dropout_by_seed
from ..spatial.rules import NotServed, rule
from .graph import Call, Graph, Ref
from .kinds import ON_WHOLE, kinds_of

_NAMES = ("query", "key", "value")


def keys_or_values(x: Tensor) -> Tensor:
    """All of a value, for a call that reads all of it for each strip."""
    return x


keys_or_values.__name__ = "keys or values of scaled_dot_product_attention"  # for messages


@rule(keys_or_values)
def _refused(x: Any) -> Tensor:
    raise NotServed("every query reads all of them")


ON_WHOLE.add(keys_or_values)


def prepare_for_rows(graph: Graph, dims: Sequence[int]) -> None:
    """Puts a call that gets the keys whole before each attention over the image, and one that gets the values; gives
    each dropout its dimension. dims: as of `kinds_of`.
    """
    if not any(call.function in (F.scaled_dot_product_attention, dropout_by_seed) for call in graph.calls):
        return
    kinds = kinds_of(graph, dims[:1])
    calls: list[Call] = []
    for place, call in enumerate(graph.calls):
        given = dict(zip(_NAMES, call.args, strict=False)) | call.kwargs
        cut = all(isinstance(given.get(name), Ref) and given[name].index in kinds.dims for name in _NAMES)
        over_image = call.function is F.scaled_dot_product_attention and kinds.gathers[place] and cut
        if over_image and given.get("attn_mask") is None and len(call.args) <= len(_NAMES):
            wholes = {name: _whole(graph, call, given[name]) for name in _NAMES[1:]}
            calls += wholes.values()
            results = {name: one.result for name, one in wholes.items()}
            call = dataclasses.replace(call, args=(), kwargs=given | results)
        if call.function is dropout_by_seed and call.inputs[0] in kinds.dims:
            call = dataclasses.replace(call, kwargs={**call.kwargs, "dim": kinds.dims[call.inputs[0]]})
        calls.append(call)
    graph.calls = calls


def _whole(graph: Graph, call: Call, value: Ref) -> Call:
    fake = graph.fakes[value.index]
    if fake.untyped_storage().nbytes() > fake.nbytes:  # a part of a tensor: only that is read
        with graph.mode:
            fake = cast(FakeTensor, torch.empty_like(fake))
    graph.fakes.append(fake)
    return Call(keys_or_values, (value,), {}, call.module, call.autocast, Ref(len(graph.fakes) - 1), call.history)
