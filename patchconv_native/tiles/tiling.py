"""`tile`: a module on an image of any size, strip by strip, in a budget of bytes, with the numbers of one call."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..spatial import NotServed
from .arguments import Arguments, check_called
from .arrays import Sink, Source
from .calls import Progress, computed, report
from .draws import default_sources
from .gradients import refuse_transforms, with_history
from .graph import Graph, Ref, refs
from .journal import Journal
from .plan import TilePlan
from .planning import plan_call
from .ranks import as_part, check_alike, planned_together
from .recorded import Recorded
from .state import change
from .stores import Store, Where
from .whole import computed_whole
from .without_data import are_fake, results_of

LONG = 2.0
"""Seconds of planning after which the progress line says so."""


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
