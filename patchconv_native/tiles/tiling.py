"""`tile`: a module on an image of any size, strip by strip, in a budget of bytes, with the numbers of one call."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .._bytes import parse_bytes
from ..spatial import NotServed
from .arguments import Arguments, check_called
from .arrays import Sink, Source, check_out, is_array, on_host, share_memory
from .at_once import AtOnce, StepAtOnce
from .calls import Progress, computed, report
from .draws import default_sources
from .fold import copied_weights, fold_norms, in_channels_last, keep_onednn
from .graded import Graded
from .gradients import find_needs, refuse_transforms, with_history
from .graph import Graph, Ref, refs
from .journal import Journal
from .kept import plan_of_form
from .kinds import kinds_of
from .outside import Outside
from .plan import TilePlan, Wishes
from .prepare import prepare_for_rows
from .ranks import as_part, check_alike, check_parts, check_shared, planned_together
from .record import record
from .recorded import Recorded
from .state import change
from .stores import Store, Where, check_store
from .sweeps import bytes_of
from .transfers import serves
from .ways import Bands, Strips, least_of
from .whole import computed_whole
from .without_data import are_fake, results_of

LONG = 2.0
"""Seconds of planning after which the progress line says so."""
MUCH_MORE = 1.5
"""Without a budget nothing is cut where strips would take more than so many times what the module's calls take."""
_RECORDING = threading.RLock()
"""Hooks that are those of all threads are set while a module is recorded."""


def tile(
    module: Callable[..., Any], x: Any, budget: int | str | None = None,
    tile: int | tuple[int, ...] | None = None, store: Where = "device", out: Any = None,
    progress: bool | Progress = False, dim: int = 2,
) -> Any:  # fmt: skip
    """module(x), computed strip by strip: the same result to rounding, in `budget` bytes above x, the parameters and
    the result.

    Strips go down the image. Of each layer the rows that the next strip reads are kept, so that nothing is computed
    twice (Alwani et al., "Fused-layer CNN accelerators", MICRO 2016). Norms whose statistics are over the image, global
    pools and attention need the whole image first: the image is gone over again for each. What must be kept
    until then is stored, or computed again where the budget asks for it.

    module: an nn.Module, or any function of tensors, such as `lambda z: vae.decode(z).sample`. x: a tensor, (N, C, H,
    W) or with one or three spatial dimensions, or a tuple of the module's arguments. Of several tensors those of the
    most dimensions are images; others, numbers and flags are handed on as they are. Tensors may be in lists and
    mappings, which the module may change: its caller's then hold what they hold after one call of the module. An
    image in the host's memory is copied to a module on a GPU strip by strip, each while another is computed. It may be
    an array-like, with a shape, a dtype and slices, as of numpy (memmap too), zarr and h5py: it is read strip by strip,
    and reaches the module in its own dtype. A function, which has no parameters, gets it on the CPU. The budget then
    counts the strips that are read and, without `out`, the result. Parts of images (`distributed.scatter`, along one
    dimension): each rank computes its part, in a budget of its own, in step with the others.
    budget: bytes, as a number or as text: "512MiB", "512M" (the same), "512MB". None: strips are chosen for speed
    alone. Where strips as wide as the image do not keep it, the image is cut into bands as well, and what these read of
    each other is computed again.
    tile: rows of the result that a strip has, in place of the choice; (256, 512): and columns of a band.
    store: where values are kept from one sweep over the image to the next: "device", within the budget; "cpu", in
    the host's memory, for a model on a GPU; or a folder (a str with a separator, or a path), in files that are removed
    as soon as they are not needed, also after an error. Values in the host's memory and in files are not in the budget.
    out: a tensor or an array-like of the shape and dtype of the result, which must be one tensor. The result is written
    into it strip by strip, and `out` is returned.
    progress: True for a line on stderr, or a function that is called with how much of how much is done.
    dim: along which dimension of the images strips are cut: 2 for the rows of (N, C, H, W), 3 or -1 for its columns. Of
    a video, (N, C, T, H, W), 2 is the time, and -2 the rows. 0: the batch, some samples at a time; `tile` then counts
    samples, rows and columns. To keep a budget, a batch is cut whatever `dim` is.

    Gradients: the budget is then that of both passes, above the gradients of the images and of the parameters too. In
    one that a step of the module keeps, with 10 % to spare, nothing is cut; else the call is one autograd node. With
    `out` gradients are not served. A call inside of a module that is tiled is part of that one, in its budget.

    Raises NotServed, a NotImplementedError, naming the function and its module, where a
    function has no rule, or where what the module does depends on the values of pixels; BudgetError (with `least`, in
    bytes) for a budget that cannot be kept. Both before anything is computed.
    """
    if torch.compiler.is_compiling():  # a graph break
        return torch.compiler.disable(_tile)(module, x, budget, tile, store, out, progress, dim)
    check_called("tile", module)
    given = x if isinstance(x, tuple) else (x,)
    if any(isinstance(leaf, Recorded) for leaf in tree_leaves(given)):
        if out is not None:
            raise NotServed("tile: out is not served in a call of tile that is inside of another one")
        return module(*given)  # the outer one tiles it
    arguments = Arguments(given, arrays=True, dim=dim)
    refuse_transforms("tile", arguments.parts())
    if any(isinstance(one, Tensor) and one.is_meta for one in (*arguments.images, out)):
        raise ValueError("tile: expected x and out to have memory, got a tensor on meta: tile_plan takes it")
    if not (callable(progress) or isinstance(progress, bool)):
        raise ValueError(f"tile: expected progress to be True, False or a function, got {progress!r}")

    def planned() -> TilePlan:
        return plan_call("tile", module, module, arguments, budget, tile, store, out, keep_changes=True)

    with _said_while_long(progress):
        plan = planned_together("tile", arguments, planned)
    return run_plan(plan, arguments, out, progress)


_tile = tile  # it has an argument of its name


def tile_plan(
    module: Callable[..., Any], x: Any, budget: int | str | None = None, tile: int | tuple[int, ...] | None = None,
    store: Where = "device", out: Any = None, dim: int = 2,
) -> TilePlan:  # fmt: skip
    """What `tile` would do with these arguments; nothing is computed. print() it.

    x may be on the meta device. Errors as of `tile`.
    """
    check_called("tile_plan", module)
    arguments = Arguments(x if isinstance(x, tuple) else (x,), arrays=True, dim=dim, owner="tile_plan")
    return plan_call("tile_plan", module, module, arguments, budget, tile, store, out)


@contextlib.contextmanager
def _said_while_long(progress: bool | Progress) -> Iterator[None]:
    """Has the line on stderr say "planning" where the block takes long. It is gone afterwards."""
    said = threading.Event()

    def say() -> None:
        said.set()
        print("\rtile: planning", end="", file=sys.stderr, flush=True)

    timer = threading.Timer(LONG, say)
    timer.daemon = True
    if progress is True:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if progress is True:
            timer.join()
        if said.is_set():
            print("\r              \r", end="", file=sys.stderr, flush=True)


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
    if graph.needs and (out is not None or out_later):
        raise NotServed(f"{owner}: gradients are not served with out; call it under torch.no_grad()")
    keeps = [key for _, change in graph.kept for key, value in change.items() if refs(value)]
    if graph.needs and keeps:
        where = ", ".join(map(str, keeps))
        raise NotServed(
            f"{owner}: gradients of a module that keeps tensors for its next call (in {where}) are not served"
        )
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

    within = out is None and not out_later and store == "device" and not any(map(is_array, images))
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
            if plan is not None and room is None and at_once is not None and within:
                whole = at_once.least()[0]  # strips of small images can take more
                plan = whole if plan.peak > MUCH_MORE * whole.peak else plan
            if plan is not None:
                return plan
    return least_of(owner, ways, at_once)


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
    if small is Graded and len(dims) > 1 and arguments.shared is None:
        largest = max(bytes_of(graph, v) for v in range(len(graph.fakes)))
        if _gathered(graph, dims) > max(_gathered(graph, dims[:1]), largest // 4):  # as where rows are flattened
            of_images.append((small, dims[:1]))
    if 0 in dims or not budget or any(image.shape[0] < 2 for image in images):
        return [*first, *of_images]
    first_ones = 1 if arguments.shared is None else 2
    both = [*dims[:first_ones], 0, *dims[first_ones:]]
    if _gathered(graph, both) <= max(_gathered(graph, dims), max(bytes_of(graph, v) for v in graph.inputs) // 4):
        return [*first, (small, both)]
    if arguments.shared is not None:
        return [*first, *of_images]
    with contextlib.suppress(NotServed):  # of a function that has no rule where the batch alone is cut
        kinds_of(graph, [0])
        of_images.append((Graded if small is Graded else Strips, [0]))
    return [*first, *of_images]


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


def run_plan(
    plan: TilePlan, arguments: Arguments, out: Any = None, progress: bool | Progress = False,
    journal: Journal | None = None,
) -> Any:  # fmt: skip
    """The module's result, as it returns it, or `out` with the result in it.

    journal: where it is written down how far the call has come, and from where it goes on. `out` and the folder of the
    store are then those of the call that was broken off.
    """
    graph = plan.graph
    images = dict(zip(graph.inputs, arguments.parts(), strict=True))
    with _undone_on_error(graph):
        if plan.outside.shared is not None and not are_fake(images.values()):
            check_alike(plan, plan.outside.shared)
        if plan.kept_by_autograd:
            whole = {v: Source("tile", image, graph.device).all().to(graph.device) for v, image in images.items()}
            found = computed_whole(graph, whole, plan.parts, plan.in_lean)
            report(progress, 1, 1)
        elif are_fake(images.values()):
            found = results_of(plan, images)
        elif plan.graph.needs:
            found = with_history(plan, images, progress)
        else:
            name = None if journal is None else f"patchconv-tile-{journal.name}"
            with torch.no_grad(), Store(plan.store, name) as store:
                run = computed(plan, images, store, out, progress, journal)
            found = {v: sink.x for v, sink in run.results.items()} | run.whole
        if plan.outside.shared is not None:
            found = {v: as_part(plan, plan.outside.shared, v, local) for v, local in found.items()}
            images = dict(zip(plan.graph.inputs, arguments.images, strict=True))
        return _returned(plan.graph, arguments, found, images, out)


@contextlib.contextmanager
def _undone_on_error(graph: Graph) -> Iterator[None]:
    """After an error, what the module changed while it was recorded, running statistics, and torch's generators are as
    they were.
    """
    undo, graph.undo = graph.undo, Graph.undo  # what it held is freed in the end
    before = [(t, t.detach().clone()) for call in graph.calls for t in call.moved]
    generators = default_sources(graph.device)
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, old in before:
                if not torch.equal(tensor, old):
                    tensor.copy_(old)
        for source in generators:
            source.write(source.before)
        undo()
        raise


def _returned(graph: Graph, arguments: Arguments, found: dict[int, Any], images: dict[int, Any], out: Any) -> Any:
    """What the module returns. Does to the caller's lists and mappings, and to attributes, what the module does."""
    device = graph.device

    def value(ref: Ref) -> Any:
        if ref.index in images:
            source = Source("tile", images[ref.index], device)
            if out is None:
                return source.all()
            Sink(out).write_all(source)
        elif out is None or found[ref.index] is out:
            return found[ref.index]
        else:
            Sink(out).write_all(found[ref.index])
        return out

    def given(values: Any) -> Any:
        return tree_map_only(Ref, value, values, is_leaf=lambda leaf: isinstance(leaf, (Ref, torch.Size)))

    result = given(graph.result)
    arguments.change(given(graph.changed))
    for container, values in graph.kept:
        change(container, {key: given(one) if refs(one) else one for key, one in values.items()})
    return result
