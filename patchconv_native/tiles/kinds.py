"""What each call of a recorded module needs: which values are cut into strips, and what needs the whole image first.

Level 0 can be computed in the first sweep over the image. A call that needs numbers of the whole image (the statistics
of a norm, a global mean) asks for them in one sweep, and its result can be computed in the next.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..spatial import Axes, NotServed, Range, SpatialTensor
from ..spatial.layout import cut_out
from ..spatial.rules import RULES
from .graph import Call, Graph
from .own_backward import OwnBackward
from .strips import Asked, axis_of, part_cuts, run_part, with_values

_MIX = (
    "baddbmm addmm addbmm cdist unfold fold grid_sample max_unpool1d max_unpool2d max_unpool3d "
    "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d_with_indices rot90 "
    "take_along_dim gather lstm gru rnn_tanh rnn_relu cumprod cummax cummin outer tril triu diagonal "
    "multi_head_attention_forward fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 "
    "fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift scatter scatter_ scatter_add scatter_add_ "
    "scatter_reduce scatter_reduce_ index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_put "
    "index_put_ masked_scatter masked_scatter_ take put quantile nanquantile kthvalue mode nanmedian nansum nanmean "
    "aminmax count_nonzero logcumsumexp renorm dist pairwise_distance trapezoid tensordot inner cross bucketize "
    "searchsorted broadcast_tensors kl_div stft istft affine_grid_generator grid_sampler linalg_norm "
    "linalg_matrix_norm linalg_cross linalg_vecdot linalg_inv linalg_det linalg_solve linalg_svd linalg_qr linalg_eigh "
    "linalg_cholesky t histc msort cumsum_ cumprod_ cumulative_trapezoid column_stack block_diag kron "
    "pdist put_ slice_scatter select_scatter diagonal_scatter mv dot vdot bilinear embedding_bag isin frexp vander "
    "nll_loss poisson_nll_loss soft_margin_loss multi_margin_loss multilabel_soft_margin_loss hsplit vsplit dsplit "
    "hinge_embedding_loss margin_ranking_loss cosine_embedding_loss triplet_margin_loss "
    "triplet_margin_with_distance_loss upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
)
_of_c: Any = torch._C
ON_WHOLE = {
    getattr(place, name) for name in _MIX.split()
    for place in (torch, Tensor, F, _of_c._fft, _of_c._nn, _of_c._linalg) if hasattr(place, name)
}  # fmt: skip
"""Functions that mix places and have no rule. They get their arguments whole, as a function does whose rule refuses."""


_WORDS = re.compile(r"not served on a SpatialTensor: | is not served: ")
"""Before the reason in an error's text: where a call gets its arguments whole, it is served."""

Region = tuple[Range, ...]
"""A part of a cut value: a range along each of `Kinds.axes`, rows first."""


@dataclass
class Kinds:
    axis: str = "rows"
    """Along which axis values are cut: the name of its `spatial.Axis`."""
    others: list[Kinds] = field(default_factory=list)
    """Of the other axes, where values are cut into bands too. They have their own `dims`, `scaled` and `fetches`."""
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
    alike: list[int] = field(default_factory=list)
    """Of each call a number, the same one for calls that differ in the values of parameters alone."""
    wholes: dict[int, Region] = field(default_factory=dict, repr=False, compare=False)
    """What `whole_region` has found."""

    @property
    def axes(self) -> list[Kinds]:
        return [self, *self.others]

    def done(self, call: int) -> int:
        """The sweep in which a call with a cut result can be computed."""
        return self.start[call] + self.questions[call]


def kinds_of(graph: Graph, dims: Sequence[int]) -> Kinds:
    """dims: along which dimensions the graph's inputs are cut: into strips, and, from the second on, into bands.
    NotServed for a function without a rule.
    """
    kinds = kinds_of_inputs(graph, dims)
    for call in graph.calls:
        add_call(graph, kinds, call)
    kinds.alike = _alike(graph, kinds)
    return kinds


def kinds_of_inputs(graph: Graph, dims: Sequence[int]) -> Kinds:
    """Those to which calls are added."""
    kinds = Kinds(others=[Kinds(f"dimension {dim}") for dim in dims[1:]])
    for one, dim in zip(kinds.axes, dims, strict=True):
        one.dims = dict.fromkeys(graph.inputs, dim)
    kinds.level = dict.fromkeys(graph.inputs, 0)
    return kinds


def parted(graph: Graph, kinds: Kinds, begins: Sequence[int]) -> Kinds:
    """The same, with the calls in parts. begins: the first call of each part but the first. What a part makes, the next
    ones read in a later sweep: it can be stored, so that a tile need not compute it again.
    """
    found = dataclasses.replace(kinds, level=dict.fromkeys(graph.inputs, 0), start=[])
    parts: dict[int, int] = {}
    for place, call in enumerate(graph.calls):
        part = bisect.bisect_right(begins, place)
        there = [found.level[v] + (v in kinds.dims and parts.get(v, part) < part) for v in call.inputs]
        found.start.append(max(there, default=0))
        after = found.start[place] + (1 if kinds.gathers[place] else kinds.questions[place])
        found.level.update(dict.fromkeys(call.outputs, after))
        parts.update(dict.fromkeys(call.outputs, part))
    return found


def add_call(graph: Graph, kinds: Kinds, call: Call) -> None:
    number = len(kinds.start)
    start = max((kinds.level[v] for v in call.inputs), default=0)
    cut = [v for v in call.inputs if v in kinds.dims]
    kinds.start.append(start)
    results: list[Any] = []
    questions, gathers = 0, False
    alone = [(False, False)] * len(kinds.axes)
    if cut:
        try:
            questions, results, alone = _probed(graph, kinds, call)
        except NotServed as error:
            known = call.function in ON_WHOLE or call.function in RULES
            if not known and not isinstance(call.function, OwnBackward):
                raise
            gathers = True
            kinds.why[number] = _WORDS.split(str(error).partition(". pc.tile_plan")[0])[-1]
    kinds.questions.append(questions)
    kinds.gathers.append(gathers)
    for one, (scaled, fetches) in zip(kinds.axes, alone, strict=True):
        one.scaled.append(scaled)
        one.fetches.append(fetches)
    for index, result in zip(call.outputs, results or [None] * len(call.outputs), strict=True):
        if isinstance(result, SpatialTensor):
            for one in kinds.axes:
                one.dims[index] = _dim_of(result, one)
            kinds.level[index] = start + questions
        else:
            kinds.level[index] = start + (1 if gathers else questions)


def _probed(graph: Graph, kinds: Kinds, call: Call) -> tuple[int, list[Any], list[tuple[bool, bool]]]:
    """How many numbers of the whole image the call's rule asks for, its results where all of the image is one part, and
    of each axis `scaled` and `fetches`.
    """
    found = []
    for one in kinds.axes:
        asked, results = _as_one_part(graph, [one], call)
        sizes = {graph.fakes[v].size(one.dims[v]) for v in call.inputs if v in one.dims}
        made = {result.size(_dim_of(result, one)) for result in results if isinstance(result, SpatialTensor)}
        if len(made) > 1:
            raise NotServed(f"{call.where}: results of several sizes")
        scaled = bool(made) and not asked.placed and sizes != made
        found.append((asked.questions, (scaled, asked.placed or bool(asked.reads))))
    if kinds.others:
        asked, results = _as_one_part(graph, kinds.axes, call)
        if any(isinstance(one, SpatialTensor) and len(one.axes) != len(kinds.axes) for one in results):
            raise NotServed(f"{call.where}: its result has not all of the cut dimensions")
        if any(questions != asked.questions for questions, _ in found):
            raise NotServed(f"{call.where}: it needs numbers of the whole image along one dimension")
    return asked.questions, results, [one for _, one in found]


def _as_one_part(graph: Graph, axes: Sequence[Kinds], call: Call) -> tuple[Asked, list[Any]]:
    asked = Asked(probing=True)
    with graph.mode, torch.no_grad():
        results = run_part(call, asked, given_whole(graph, axes, call))
    _check(graph, call, results)
    return asked, results


def _dim_of(result: SpatialTensor, kinds: Kinds) -> int:
    return next(d for d, axis in result.axes.items() if axis.name == kinds.axis)


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


def given_whole(graph: Graph, axes: Sequence[Kinds], call: Call) -> dict[int, Any]:
    """Of each of a call's values its fake: of a cut one, all of it as one part."""
    given: dict[int, Any] = {}
    for v in call.inputs:
        fake = graph.fakes[v]
        if v in axes[0].dims:
            given[v] = fake, {one.dims[v]: axis_of(one.axis, (0, fake.size(one.dims[v])), 0) for one in axes}
        else:
            given[v] = fake
    return given


def _alike(graph: Graph, kinds: Kinds) -> list[int]:
    numbers: dict[Any, int] = {}
    found = []
    for place, call in enumerate(graph.calls):
        names = {v: f"value {n}" for n, v in enumerate(call.inputs)}
        args = with_values((call.args, call.kwargs), names.__getitem__)
        kept = [(id(t), call.autocast[1]) in graph.casts for t in call.constants]
        args = tree_map_only(Tensor, lambda t: (t.shape, t.dtype, t.stride()), args)
        values = [
            (fake.shape, fake.stride(), fake.dtype, v in graph.inputs, *(one.dims.get(v) for one in kinds.axes))
            for v, fake in ((v, graph.fakes[v]) for v in (*call.inputs, *call.outputs))
        ]
        axes = [(one.scaled[place], one.fetches[place]) for one in kinds.axes]
        key = call.function, repr(args), repr(values), call.autocast, repr(kept), repr(axes), kinds.questions[place]
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def axes_at(graph: Graph, kinds: Kinds, v: int, region: Region) -> Axes:
    """For `run_part`: where a part of a value is."""
    found = {}
    for one, (low, high) in zip(kinds.axes, region, strict=True):
        dim = one.dims[v]
        found[dim] = axis_of(one.axis, part_cuts(low, high, graph.fakes[v].size(dim)), 1)
    return found


def part_of(kinds: Kinds, v: int, x: Tensor, region: Region, within: Region | None = None) -> Tensor:
    """A view of this part of a value. within: what part of it x is; the whole, if None."""
    for one, (low, high), (begin, _) in zip(kinds.axes, region, within or [(0, 0)] * len(region), strict=True):
        x = cut_out(x, one.dims[v], low - begin, high - low)
    return x


def box_shape(graph: Graph, kinds: Kinds, v: int, region: Region) -> list[int]:
    """The shape of a part of a value."""
    shape = list(graph.fakes[v].shape)
    for one, (low, high) in zip(kinds.axes, region, strict=True):
        shape[one.dims[v]] = high - low
    return shape


def is_empty(region: Region) -> bool:
    return any(low >= high for low, high in region)


def whole_region(graph: Graph, kinds: Kinds, v: int) -> Region:
    if v not in kinds.wholes:
        kinds.wholes[v] = tuple([(0, graph.fakes[v].size(one.dims[v])) for one in kinds.axes])
    return kinds.wholes[v]


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
