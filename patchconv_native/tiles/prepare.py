"""What is found of a recorded graph from the dimension along which it is cut.

What was computed whole and has the shape of an image or of a cut value again, as after attention over all frames of a
video, a shift of windows or a Fourier transform, is cut from there on.
Attention over the image: keys and values are there whole, and the queries' rows are computed strip by strip.
Dropout: the mask is made row by row along that dimension, so that it is the same in strips, in bands and at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from ..spatial import SpatialTensor
from ..spatial.dropout import dropout_by_seed
from ..spatial.operands import aligned, wrap
from ..spatial.rules import NotServed, rule
from .graph import Call, Graph, Ref
from .kinds import ON_WHOLE, Kinds, add_call, kinds_of, kinds_of_inputs

_NAMES = ("query", "key", "value")
_MOVES = {
    "permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "view", "reshape", "unflatten", "contiguous",
}  # fmt: skip
"""Functions by which tokens become an image."""
_MIXES = {
    "roll", "flip", "cumsum", "cumprod", "grid_sample", "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_fftshift",
    "fft_ifftshift",
}  # fmt: skip
"""Functions that may read any place for each, and whose results have the shape of an image again."""


def keys_or_values(x: Tensor) -> Tensor:
    """All of a value, for a call that reads all of it for each strip."""
    return x


keys_or_values.__name__ = "keys or values of scaled_dot_product_attention"  # for messages


@rule(keys_or_values)
def _refused(x: Any) -> Tensor:
    raise NotServed("every query reads all of them")


ON_WHOLE.add(keys_or_values)


def cut_again(x: Tensor, image: Tensor) -> Tensor:
    """A value that was computed whole, from here on in parts as those of the image, or of another cut value."""
    return x


@rule(cut_again)
def _cut_again(x: Tensor, image: SpatialTensor) -> Tensor:
    locals_, axes = aligned("cut_again", (x, image))
    return wrap(locals_[0].clone(), axes)  # a part that may be written into


def prepare_for_rows(graph: Graph, dims: Sequence[int]) -> None:
    """Puts a call before each attention over the image that gets the keys whole, and one that gets the values; a call
    behind what is whole and is to be cut again; gives each dropout its dimension. dims: as of `kinds_of`.
    """
    functions = {call.function for call in graph.calls}
    if F.scaled_dot_product_attention in functions:
        _prepare_attention(graph, kinds_of(graph, dims[:1]))
    if any(call.name in _MIXES or _image_again(graph, call, dims) is not None for call in graph.calls):
        _cut_again_where_whole(graph, dims)
    if dropout_by_seed in functions:
        dim_of = kinds_of(graph, dims[:1]).dims
        for place, call in enumerate(graph.calls):
            if call.function is dropout_by_seed and call.inputs[0] in dim_of:
                given = call.kwargs | {"dim": dim_of[call.inputs[0]]}
                graph.calls[place] = dataclasses.replace(call, kwargs=given)


def _prepare_attention(graph: Graph, kinds: Kinds) -> None:
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
        calls.append(call)
    graph.calls = calls


def _image_again(graph: Graph, call: Call, dims: Sequence[int]) -> Ref | None:
    """An image of whose shape the call's result is, but for channels, where that of its arguments is another."""
    if call.name not in _MOVES or len(call.outputs) != 1 or call.outputs[0] in graph.results:
        return None
    made = graph.fakes[call.outputs[0]]

    def alike(v: int) -> bool:
        fake = graph.fakes[v]
        return fake.dim() == made.dim() and all(fake.size(d) == made.size(d) for d in (0, *dims))

    if made.dim() <= max(dims) or any(map(alike, call.inputs)):
        return None
    return next((Ref(v) for v in graph.inputs if alike(v) and graph.fakes[v].device == made.device), None)


def _value_again(graph: Graph, call: Call, cut: dict[int, int]) -> Ref | None:
    """A cut value that has the shape of the call's result, if its function mixes places: its argument, or the last."""
    if call.name not in _MIXES or len(call.outputs) != 1:
        return None
    made = graph.fakes[call.outputs[0]]
    some = [*(v for v in call.inputs if v in cut), *reversed(cut)]
    return next((Ref(v) for v in some if graph.fakes[v].shape == made.shape), None)


def _cut_again_where_whole(graph: Graph, dims: Sequence[int]) -> None:
    kinds, calls, given = kinds_of_inputs(graph, dims[:1]), list[Call](), dict[int, Ref]()
    last = {v: place for place, call in enumerate(graph.calls) for v in call.inputs}
    for place, call in enumerate(graph.calls):
        calls.append(_renamed(call, given))
        add_call(graph, kinds, calls[-1])
        (old, *more), image = calls[-1].outputs or [-1], None
        if not more and old not in kinds.dims and last.get(old, 0) > place:
            image = _value_again(graph, calls[-1], kinds.dims) or _image_again(graph, calls[-1], dims)
        if image is not None:
            graph.fakes.append(graph.fakes[old])
            given[old] = new = Ref(len(graph.fakes) - 1)
            calls.append(Call(cut_again, (Ref(old), image), {}, call.module, call.autocast, new, call.history))
            add_call(graph, kinds, calls[-1])
    graph.calls = calls


def _renamed(call: Call, given: dict[int, Ref]) -> Call:
    """With other values in place of these."""
    if given.keys().isdisjoint(call.inputs):
        return call
    args, kwargs = tree_map_only(Ref, lambda ref: given.get(ref.index, ref), (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs, in_place=None)


def _whole(graph: Graph, call: Call, value: Ref) -> Call:
    fake = graph.fakes[value.index]
    if fake.untyped_storage().nbytes() > fake.nbytes:  # a part of a tensor: only that is read
        with graph.mode:
            fake = cast(FakeTensor, torch.empty_like(fake))
    graph.fakes.append(fake)
    return Call(keys_or_values, (value,), {}, call.module, call.autocast, Ref(len(graph.fakes) - 1), call.history)
