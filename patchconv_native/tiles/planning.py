"""What `tile` would do: a call is recorded, and the ways to compute it in a budget are planned. Nothing is computed."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from .._bytes import parse_bytes
from ..spatial import NotServed
from .arguments import Arguments
from .arrays import Source, check_out, is_array, on_host, share_memory
from .at_once import AtOnce, StepAtOnce
from .fold import copied_weights, fold_norms, in_channels_last, keep_onednn
from .graded import Graded
from .gradients import find_needs
from .graph import Graph, refs
from .kept import plan_of_form
from .kinds import kinds_of
from .outside import Outside
from .plan import TilePlan, Wishes
from .prepare import prepare_for_rows
from .ranks import check_parts, check_shared
from .record import record
from .stores import Where, check_store
from .sweeps import bytes_of
from .transfers import serves
from .ways import Bands, Strips, least_of

MUCH_MORE = 1.5
"""Without a budget nothing is cut where strips would take more than so many times what the module's calls take."""
_RECORDING = threading.RLock()
"""Hooks that are those of all threads are set while a module is recorded."""


def plan_call(
    owner: str, module: Any, forward: Callable[..., Any], arguments: Arguments, budget: int | str | None,
    tile: int | tuple[int, ...] | None = None, store: Where = "device", out: Any = None, keep_changes: bool = False,
    out_later: bool = False,
) -> TilePlan:  # fmt: skip
    """Records forward(*arguments), of a module or of a function, and plans it. out_later: `out` follows at the call."""
    room = budget_of(owner, budget)
    tiles = _tile_sizes(owner, tile, arguments.dims)
    check_store(owner, store, _device_of(module, arguments.images[0]))
    graph = record_call(owner, module, forward, arguments, keep_changes)
    if out_later:
        graph.kept = []  # of a module that is not called again

    def planned() -> TilePlan:
        return plan_graph(owner, module, graph, arguments, room, tiles, store, out, out_later)

    plain = all(isinstance(image, Tensor) for image in arguments.images) and store == "device"
    if room is None or tiles or out is not None or out_later or not plain:
        return planned()
    return plan_of_form(module, graph, arguments, room, planned)


def budget_of(owner: str, budget: int | str | None) -> int | None:
    room = None if budget is None else parse_bytes(budget, f"{owner}: budget")
    if room is not None and room < 1:
        raise ValueError(f"{owner}: budget: expected at least 1 byte, got {budget!r}")
    return room


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """For values without data. Without inference mode they may be viewed like others; gradients are on if they were
    outside of that mode. They and what autograd saves of them are not for the caller's modes and hooks, such as those
    of a memory trace and of a checkpoint.
    """
    with_gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(with_gradients))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it looks at numbers
        stack.enter_context(_disable_current_modes())
        if with_gradients and torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved))
        yield


@_unseen()
def record_call(
    owner: str, module: Any, forward: Callable[..., Any], arguments: Arguments, keep_changes: bool
) -> Graph:
    if any(math.prod(image.shape) == 0 for image in arguments.images):
        shapes = [tuple(image.shape) for image in arguments.images]
        raise ValueError(f"{owner}: expected images with elements, got {shapes}")
    for name, tensor in _tensors_of(module):
        if is_lazy(tensor):
            raise ValueError(f"{owner}: expected parameters with memory, got {name} without: run the model once first")
        if tensor.is_meta:
            advice = "module.to_empty(device='cpu') is enough for a plan"
            raise ValueError(f"{owner}: expected parameters and buffers with memory, got {name} on meta: {advice}")
    device = _device_of(module, arguments.images[0])
    sources = [Source(owner, image, device) for image in arguments.images]
    asked = [getattr(part, "requires_grad", False) for part in arguments.parts()]
    with _RECORDING:
        graph = record(
            module, [(source.shape, source.dtype, source.strides) for source in sources], asked, device,
            lambda values: arguments.record(forward, values), arguments.objects(), keep_changes,
        )  # fmt: skip
    with graph.undone_on_error():
        written = {call.inputs[0] for call in graph.calls if call.writes} & set(graph.inputs)
        for v, image in zip(graph.inputs, arguments.images, strict=True):
            others = (other for other in arguments.images if other is not image)
            twice = sum(other is image for other in arguments.images) > 1
            if v in written and (twice or any(share_memory(image, other) for other in others)):
                raise NotServed("tile: writing into an image that is handed in twice, or a part of it, is not served")
        fold_norms(graph)
        keep_onednn(graph)
        prepare_for_rows(graph, arguments.dims)
        find_needs(graph, arguments.parts())
    return graph


@_unseen()
def plan_graph(
    owner: str, module: Any, graph: Graph, arguments: Arguments, room: int | None, tiles: tuple[int, ...] = (),
    store: Where = "device", out: Any = None, out_later: bool = False,
) -> TilePlan:  # fmt: skip
    """Plans a graph of `record_call`. room: the budget. tiles: as of `_tile_sizes`."""
    with graph.undone_on_error():
        return _planned(owner, module, graph, arguments, room, tiles, store, out, out_later)


def _planned(
    owner: str, module: Any, graph: Graph, arguments: Arguments, room: int | None, tiles: tuple[int, ...], store: Where,
    out: Any, out_later: bool,
) -> TilePlan:  # fmt: skip
    images = arguments.images
    device = _device_of(module, images[0])
    sources = [Source(owner, image, device) for image in images]
    if out is not None:
        check_out(owner, out, graph, images)
    if graph.needs:
        _check_graded(owner, graph, out is not None or out_later)
    shared = arguments.shared
    if shared is not None:
        check_shared(owner, graph, arguments, device, out is not None or out_later)
    name = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "the function")
    written = out_later or (out is not None and on_host(out))
    copied = shared is None and serves(device) and (written or store != "device" or any(map(on_host, images)))

    def wishes(graph: Graph, ahead: bool | None) -> Wishes:
        copies = {
            v: source.copies + (graph.fakes[v].stride() != source.strides)
            for v, source in zip(graph.inputs, sources, strict=True)
        }
        host = {v for v, image in zip(graph.inputs, images, strict=True) if on_host(image)}
        counts = out is None and not out_later and any(map(is_array, images))
        outside = Outside(store, copies, counts, ahead, host, written, shared)
        return Wishes(room, tiles, outside, device.type, name, out is not None or out_later)

    in_memory = out is None and not out_later and store == "device" and not any(map(is_array, images))
    stays_whole = not tiles and shared is None and not (graph.needs and room is None)
    at_once = (StepAtOnce if graph.needs else AtOnce)(graph, wishes(graph, None)) if stays_whole else None
    whole = at_once.fitting() if at_once is not None and graph.needs else None
    if whole is not None:
        return whole  # tiles would compute all of the forward pass twice
    ways: list[Strips] = []
    last = in_channels_last(graph)
    for one in [graph] if last is None else [last, graph]:
        kinds = _kinds_of_ways(one, arguments, room is not None, bool(tiles))
        for (kind, along), ahead in itertools.product(kinds, [True, False] if copied else [None]):
            way = kind(one, along, wishes(one, ahead))
            if one is last and (not way.cuts_results or copied_weights(last) > (room or math.inf)):
                continue  # whole results are returned as they are
            ways.append(way)
            if shared is not None:
                check_parts(owner, graph, shared, way.kinds)
            plan = way.fitting()
            if plan is None and len(ways) == 1 and at_once is not None:
                plan = at_once.fitting()  # nothing is computed twice
            if plan is not None and room is None and at_once is not None and in_memory:
                whole = at_once.least()[0]
                return whole if plan.peak > MUCH_MORE * whole.peak else plan
            if plan is not None:
                return plan
    return least_of(owner, ways, at_once)


def _check_graded(owner: str, graph: Graph, written: bool) -> None:
    """NotServed for what is not served with gradients. written: whether the result is, into memory that is given."""
    if written:
        raise NotServed(f"{owner}: gradients are not served with out; call it under torch.no_grad()")
    keys = [str(key) for _, change in graph.kept for key, value in change.items() if refs(value)]
    if keys:
        kept = f"keeps tensors for its next call (in {', '.join(keys)})"
        raise NotServed(f"{owner}: gradients of a module that {kept} are not served")


def _kinds_of_ways(
    graph: Graph, arguments: Arguments, budget: bool, tiles: bool
) -> list[tuple[type[Strips], Sequence[int]]]:
    """Ways to plan, each with the dimensions along which images may be cut: also a batch, where there is a budget and
    `tile` asks for nothing else.
    """
    dims, images = arguments.dims, arguments.images
    small: type[Strips] = Graded if graph.needs and budget else Bands
    first: list[tuple[type[Strips], Sequence[int]]] = [] if small is Graded else [(Strips, dims)]
    if tiles:
        return first or [(small, dims)]
    of_images = [(small, dims)] if len(dims) > 1 or small is Graded else []
    rows = dims[:1]
    in_strips_too = small is Graded and _gathers_much(graph, dims, rows) and arguments.shared is None
    if in_strips_too:
        of_images.append((small, rows))
    if 0 in dims or not budget or any(image.shape[0] < 2 for image in images):
        return [*first, *of_images]
    first_ones = 1 if arguments.shared is None else 2
    both = [*dims[:first_ones], 0, *dims[first_ones:]]
    if _gathered(graph, both) <= max(_gathered(graph, dims), max(bytes_of(graph, v) for v in graph.inputs) // 4):
        return [*first, (small, both), *([(small, [*rows, 0])] if in_strips_too else [])]
    if arguments.shared is not None:
        return [*first, *of_images]
    with contextlib.suppress(NotServed):  # of a function that has no rule where the batch alone is cut
        kinds_of(graph, [0])
        of_images.append((Graded if small is Graded else Strips, [0]))
    return [*first, *of_images]


def _gathers_much(graph: Graph, dims: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether something large is whole where images are cut along all dimensions, and not where they are along the
    rows alone, as with rows and columns in one dimension.
    """
    if len(dims) == 1:
        return False
    largest = max(bytes_of(graph, v) for v in range(len(graph.fakes)))
    return _gathered(graph, dims) > max(_gathered(graph, rows), largest // 4)


def _gathered(graph: Graph, dims: Sequence[int]) -> int:
    """Bytes of the largest value that some call gets whole, or gives for that, where images are cut along these
    dimensions.
    """
    kinds = kinds_of(graph, dims)
    calls = [call for place, call in enumerate(graph.calls) if kinds.gathers[place]]
    return max((bytes_of(graph, v) for call in calls for v in (*call.inputs, *call.outputs)), default=0)


def _tile_sizes(owner: str, tile: Any, dims: Sequence[int]) -> tuple[int, ...]:
    """Along each of the dimensions `dims`, of which the first is that of strips."""
    if tile is None:
        return ()
    several = isinstance(tile, (tuple, list))
    try:
        sizes = [0 if isinstance(n, bool) else operator.index(n) for n in (tile if several else (tile,))]
    except TypeError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{owner}: expected tile to be a positive number of rows, or a tuple of several, got {tile!r}")
    if not several:
        return (sizes[0],)
    if len(sizes) != len(dims):
        raise ValueError(
            f"{owner}: expected tile to have a number for each of {len(dims)} spatial dimensions, got {tile!r}"
        )
    return tuple(sizes[sorted(dims).index(d)] for d in dims)


def _device_of(module: Any, image: Any) -> torch.device:
    """Where strips are computed: what is in the host's memory or has no device goes to that of the module."""
    own = image.device if isinstance(image, Tensor) else torch.device("cpu")
    if own.type not in ("cpu", "meta"):
        return own
    return next((t.device for _, t in _tensors_of(module) if not t.is_meta), torch.device("cpu"))


def _tensors_of(module: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(module, nn.Module):
        yield from itertools.chain(module.named_parameters(), module.named_buffers())
