"""What each call of a recorded module needs: which values are cut into strips, and what needs the whole image first.

Level 0 can be computed in the first sweep over the image. A call that needs numbers of the whole image (the statistics
of a norm, a global mean) asks for them in one sweep, and its result can be computed in the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spatial import NotServed, SpatialTensor
from ..spatial.rules import RULES
from .record import Call, Graph
from .strips import Asked, rows_of, run_part

_MIX = (
    "baddbmm addmm addbmm cdist unfold fold grid_sample max_unpool1d max_unpool2d max_unpool3d "
    "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d_with_indices rot90 "
    "take_along_dim gather lstm gru rnn_tanh rnn_relu cumprod cummax cummin outer tril triu diagonal "
    "multi_head_attention_forward fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 "
    "fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift"
)
_fft: Any = torch._C._fft  # type: ignore[attr-defined]
ON_WHOLE = {
    getattr(place, name) for name in _MIX.split() for place in (torch, Tensor, F, _fft, torch._C._nn)
    if hasattr(place, name)
}  # fmt: skip
"""Functions that mix places and have no rule. They get their arguments whole, as a function does whose rule refuses."""


@dataclass
class Kinds:
    dims: dict[int, int] = field(default_factory=dict)
    """The dimension along which a value is cut; a value that is not here is whole, such as a global mean."""
    level: dict[int, int] = field(default_factory=dict)
    """The first sweep in which a cut value can be computed, or at whose beginning a whole one is there."""
    start: list[int] = field(default_factory=list)
    """Of each call, the first sweep in which all that it reads is there."""
    questions: list[int] = field(default_factory=list)
    """How many numbers of the whole image a call asks for, one a sweep. It can be computed `questions` sweeps later."""
    gathers: list[bool] = field(default_factory=list)
    """Whether a call gets its arguments whole."""
    scaled: list[bool] = field(default_factory=list)
    """Whether the rows of a call's result follow from those of its arguments by a factor alone, as in a shuffle."""
    fetches: list[bool] = field(default_factory=list)
    """Whether a call's rule says itself which rows it reads, or where its result is cut."""
    why: dict[int, str] = field(default_factory=dict)
    """Why a call gets its arguments whole."""

    def done(self, call: int) -> int:
        """The sweep in which a call with a cut result can be computed."""
        return self.start[call] + self.questions[call]


def kinds_of(graph: Graph, dims: Sequence[int]) -> Kinds:
    """dims: along which dimension each input of the graph is cut. NotServed for a function without a rule."""
    kinds = Kinds()
    for index, dim in zip(graph.inputs, dims, strict=True):
        kinds.dims[index], kinds.level[index] = dim, 0
    for call in graph.calls:
        _add(graph, kinds, call)
    return kinds


def _add(graph: Graph, kinds: Kinds, call: Call) -> None:
    number = len(kinds.start)
    start = max((kinds.level[v] for v in call.inputs), default=0)
    cut = [v for v in call.inputs if v in kinds.dims]
    kinds.start.append(start)
    questions, gathers, scaled, fetches = 0, False, False, False
    results: list[Any] = []
    if cut:
        try:
            asked = Asked(probing=True)
            with graph.mode, torch.no_grad():
                results = run_part(call, asked, given_whole(graph, kinds, call))
            questions, fetches = asked.questions, asked.placed or bool(asked.reads)
            _check(graph, call, results)
            if any(isinstance(one, SpatialTensor) for one in results):
                sizes = {graph.fakes[v].size(kinds.dims[v]) for v in cut}
                made = {one.size(next(iter(one.axes))) for one in results if isinstance(one, SpatialTensor)}
                if len(made) > 1:
                    raise NotServed(f"{call.where}: results of several sizes")
                scaled = not asked.placed and sizes != made
        except NotServed as error:
            if call.function not in ON_WHOLE and call.function not in RULES:
                raise
            gathers, questions = True, 0
            kinds.why[number] = str(error).partition(". pc.tile_plan")[0]
    kinds.questions.append(questions)
    kinds.gathers.append(gathers)
    kinds.scaled.append(scaled)
    kinds.fetches.append(fetches)
    for index, result in zip(call.outputs, results or [None] * len(call.outputs), strict=True):
        if isinstance(result, SpatialTensor):
            kinds.dims[index] = next(iter(result.axes))
            kinds.level[index] = start + questions
        else:
            kinds.level[index] = start + (1 if gathers else questions)


def _check(graph: Graph, call: Call, results: list[Any]) -> None:
    for index, result in zip(call.outputs, results, strict=True):
        if tuple(result.shape) != tuple(graph.fakes[index].shape):
            raise NotServed(
                f"tile: {call.where} is not served: its rule gives {tuple(result.shape)} for "
                f"{tuple(graph.fakes[index].shape)}"
            )


def rows_lie_together(graph: Graph, kinds: Kinds, v: int) -> bool:
    """Whether some rows of a value are contiguous in memory, as those of one image in channels_last are."""
    fake, dim = graph.fakes[v], kinds.dims[v]
    return all(d == dim or fake.size(d) == 1 or fake.stride(d) < fake.stride(dim) for d in range(fake.dim()))


def given_whole(graph: Graph, kinds: Kinds, call: Call) -> dict[int, Any]:
    """Of each of a call's values its fake: of a cut one, all rows."""
    given: dict[int, Any] = {}
    for v in call.inputs:
        fake = graph.fakes[v]
        if v in kinds.dims:
            given[v] = fake, kinds.dims[v], rows_of(0, fake.size(kinds.dims[v]))
        else:
            given[v] = fake
    return given


# ----------------------------------------------------------------------------------------------------------------------
# What is computed between sweeps. A place in time is the sweep that follows, and the call before that sweep; the sweep
# itself comes after all its calls.

Time = tuple[int, int]


def calls_between(graph: Graph, kinds: Kinds, number: int) -> list[int]:
    """The calls with whole results that are computed before sweep `number`."""
    return [
        place
        for place, call in enumerate(graph.calls)
        if any(v not in kinds.dims and kinds.level[v] == number for v in call.outputs)
    ]


def on_whole(graph: Graph, kinds: Kinds, place: int) -> bool:
    """Whether a call with a whole result gets whole arguments. Else its result follows from numbers of the image."""
    return kinds.gathers[place] or not any(v in kinds.dims for v in graph.calls[place].inputs)


def last_uses(graph: Graph, kinds: Kinds, results: set[int], in_sweeps: Iterable[tuple[int, int]]) -> dict[int, Time]:
    """Of whole values and of those that a call gets whole: when they are read last. in_sweeps: numbers of sweeps, and
    calls that these compute.
    """
    last: dict[int, Time] = dict.fromkeys(results, (2**31, 0))
    for place, call in enumerate(graph.calls):
        whole = [kinds.level[v] for v in call.outputs if v not in kinds.dims]
        if whole:
            for v in call.inputs:
                if v not in kinds.dims or kinds.gathers[place]:
                    last[v] = max(last.get(v, (0, 0)), (max(whole), place))
    for number, place in in_sweeps:
        for v in graph.calls[place].inputs:
            if v not in kinds.dims:
                last[v] = max(last.get(v, (0, 0)), (number, 2**31))
    return last
