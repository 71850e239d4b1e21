"""A call of `tile` with gradients, as one autograd node.

The forward pass runs the plan's sweeps, without history. The node keeps the images, the parameters, what the plan
stores between sweeps, whole values and the shares of numbers of the whole image: all of them by `save_for_backward`, so
that hooks for saved tensors and checks of versions work. The backward pass (`backward.py`) needs nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..settings import all_settings, settings_set
from ..spatial import NotServed
from ..spatial.norms import TRACKING
from .backward import Backward
from .calls import Progress, computed
from .graph import DETACHES, Graph
from .plan import TilePlan
from .rows import Rows
from .run import Run
from .stores import Store


def refuse_transforms(owner: str, images: Iterable[Any]) -> None:
    if torch._C._functorch.maybe_current_level() is not None:
        raise NotServed(f"{owner}: transforms of torch.func are not served")
    if forward_ad._current_level >= 0:
        tensors = (image for image in images if isinstance(image, Tensor))
        if any(forward_ad.unpack_dual(image).tangent is not None for image in tensors):
            raise NotServed(f"{owner}: forward-mode gradients are not served")


def find_needs(graph: Graph, images: Sequence[Any]) -> None:
    """Finds `graph.needs`, of a graph that was recorded with gradients on."""
    if not torch.is_grad_enabled():
        return
    needs = {v for v, image in zip(graph.inputs, images, strict=True) if getattr(image, "requires_grad", False)}
    asked = bool(needs)
    for call in graph.calls:
        asked = asked or any(constant.requires_grad for constant in call.constants)
        if call.writes and not call.history and call.inputs[0] in needs:
            why = "it writes without gradients into a tensor that has some"
            raise NotServed(f"tile: {call.where} is not served: {why}")
        needs |= graph.needing(call, needs)
    graph.needs = needs if asked else set()


def _constants(graph: Graph, questions: Sequence[int]) -> list[Tensor]:
    """Parameters, and other tensors that the result follows from. Not the running statistics of norms in training."""
    found = {
        id(constant): constant
        for place, call in enumerate(graph.calls)
        for constant in call.constants
        if constant.requires_grad or not (call.function in TRACKING and questions[place])
    }
    return list(found.values())


def _by_nothing(graph: Graph, results: Iterable[int]) -> set[int]:
    """The values, and the ids of constants, that results follow from by way of a tensor without elements. They have a
    gradient, of zeros where there is no other way, although no tile leads to them.
    """
    reached = {v for v in results if v in graph.needs}
    found: set[int] = set()
    for call in reversed(graph.calls):
        made = reached.intersection(call.outputs)
        if not made or not call.history or call.name in DETACHES:
            continue
        reached.update(graph.needs.intersection(call.inputs))
        if any(v in found or graph.fakes[v].numel() == 0 for v in made):
            found.update(graph.needs.intersection(call.inputs), map(id, call.constants))
    return found


@dataclass
class _Taped:
    """What the node keeps besides tensors."""

    plan: TilePlan
    constants: list[Tensor]
    store: Store
    images: dict[int, Any] = field(default_factory=dict)
    """Those that are no tensors."""
    run: Run | None = None
    """Without what was saved."""
    spec: Any = None
    """How what was saved was taken apart."""
    settings: list[Any] = field(default_factory=all_settings)
    """Those of the forward pass, under which the backward pass runs."""


class _Tiled(Function):
    @staticmethod
    def forward(ctx: Any, taped: _Taped, progress: Any, outputs: list[int], *given: Tensor) -> tuple[Tensor, ...]:
        """given: images that are tensors, and constants. outputs: is filled with the numbers of the results."""
        plan, graph = taped.plan, taped.plan.graph
        of_tensors = [v for v in graph.inputs if v not in taped.images]
        images = taped.images | dict(zip(of_tensors, given, strict=False))
        run = computed(plan, images, taped.store, None, progress)
        read = {v for call in graph.calls for v in call.inputs}
        results = {v: run.results[v].x for v in run.results}
        for v in dict.fromkeys(graph.results):
            if v not in images and v not in results:
                results[v] = run.whole[v].clone() if v in read else run.whole[v]
        kept = {
            "given": list(given),
            "rows": {v: [rows.pieces for rows in bands if isinstance(rows, Rows)] for v, bands in run.stored.items()},
            "whole": {v: value for v, value in run.whole.items() if v in read},
            "answers": run.answers,
        }
        leaves, taped.spec = tree_flatten(kept)
        for bands in run.stored.values():
            for rows in bands:
                if isinstance(rows, Rows):
                    rows.close()
        run.inputs, run.results, run.whole, run.answers, taped.run = {}, {}, {}, {}, run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        ctx.taped, ctx.outputs = taped, list(results)
        ctx.mark_non_differentiable(*(value for v, value in results.items() if v not in graph.needs))
        outputs.extend(results)
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotServed("tile: second derivatives (create_graph=True) are not served where the image is cut")
        taped: _Taped = ctx.taped
        kept = tree_unflatten(list(ctx.saved_tensors), taped.spec)
        once = not torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.maybe_clear_saved_tensors()
        given = [
            one.detach().requires_grad_(need) for one, need in zip(kept["given"], ctx.needs_input_grad[3:], strict=True)
        ]
        of_tensors = [v for v in taped.plan.graph.inputs if v not in taped.images]
        images = dict(zip(of_tensors, given, strict=False))
        constants = given[len(images) :]
        swaps = {id(old): new for old, new in zip(taped.constants, constants, strict=True)}
        found = Backward(taped.plan, _run_again(taped, kept, images), swaps, once)
        del kept
        with settings_set(taped.settings):
            found.run({v: grad for v, grad in zip(ctx.outputs, grads, strict=True) if grad is not None})
        own = [found.grads.get(v) for v in images] + [found.of_constant(constant) for constant in constants]
        keys = [*images, *map(id, taped.constants)]
        zeros = _by_nothing(
            taped.plan.graph, [v for v, grad in zip(ctx.outputs, grads, strict=True) if grad is not None]
        )
        for place, (key, one) in enumerate(zip(keys, given, strict=True)):
            if own[place] is None and one.requires_grad and key in zeros:
                own[place] = torch.zeros_like(one)
        return None, None, None, *own


def _run_again(taped: _Taped, kept: dict[str, Any], images: dict[int, Tensor]) -> Run:
    """The run as it was after the forward pass."""
    assert taped.run is not None
    stored: dict[int, list[Any]] = {}
    for v, bands in taped.run.stored.items():
        pieces: Iterator[list[Tensor]] = iter(kept["rows"][v])
        stored[v] = [rows.again(next(pieces)) if isinstance(rows, Rows) else rows for rows in bands]
    return taped.run.again(taped.images | images, stored, dict(kept["whole"]), kept["answers"])


def with_history(plan: TilePlan, images: dict[int, Any], progress: bool | Progress) -> dict[int, Any]:
    """The module's results, by their numbers, as those of one autograd node."""
    graph = plan.graph
    tensors = {v: image for v, image in images.items() if isinstance(image, Tensor)}
    others = {v: image for v, image in images.items() if v not in tensors}
    taped = _Taped(plan, _constants(graph, plan.kinds.questions), Store(plan.store), others)
    close = weakref.finalize(taped, taped.store.__exit__, None)
    outputs: list[int] = []
    try:
        found = _Tiled.apply(taped, progress, outputs, *tensors.values(), *taped.constants)
    except BaseException:
        close()
        raise
    return dict(zip(outputs, found, strict=True))
