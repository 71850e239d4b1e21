"""Calls of `tile` on images of which each rank holds a part: what is not served, and what all ranks must have alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..spatial import NotServed, SpatialTensor
from .arguments import Arguments
from .draws import default_sources
from .graph import Call, Graph, Ref, refs
from .kinds import Kinds
from .plan import TilePlan
from .shared import Shared
from .without_data import are_fake

Plan = TypeVar("Plan", TilePlan, TilePlan | None)
CLOSE = 0.01
"""Of a tensor's norm: how far its sums on two ranks may be apart."""
GOLDEN = 0.6180339887
"""Multiples of the golden ratio, modulo 1, are far from each other."""
NAN = 1e30
"""What stands for a NaN where numbers are held against each other."""


def check_shared(owner: str, graph: Graph, arguments: Arguments, device: torch.device, out: bool) -> None:
    if out:
        raise NotServed(f"{owner}: out is not served where images are cut between ranks")
    if any(part.device != device for part in arguments.parts()):
        raise NotServed(f"{owner}: parts of images on another device than the module's, {device}, are not served")
    if refs([change for _, change in graph.kept]):
        raise NotServed(f"{owner}: a module that keeps tensors for its next call is not served on parts of an image")


def check_parts(owner: str, graph: Graph, shared: Shared, kinds: Kinds) -> None:
    """Every rank must have a part of what is asked of the whole image, and of results."""
    asking = (v for place, call in enumerate(graph.calls) if kinds.questions[place] for v in call.inputs)
    for v in (*asking, *graph.results):
        dims = kinds.others[0].dims
        if v in dims and graph.fakes[v].size(dims[v]) < shared.count:
            raise NotServed(
                f"{owner}: expected one coordinate or more along dimension {dims[v]} for each of {shared.count} ranks, "
                f"got {graph.fakes[v].size(dims[v])}"
            )


def planned_together(owner: str, arguments: Arguments, planned: Callable[[], Plan]) -> Plan:
    """What `planned` returns. Where it fails on one rank, it fails on all: no rank waits for another one's messages."""
    if arguments.shared is None or are_fake(arguments.parts()):
        return planned()
    device = arguments.parts()[0].device
    try:
        plan = planned()
    except Exception:
        arguments.shared.failed(True, device)
        raise
    ranks = arguments.shared.failed(False, device)
    if ranks:
        if plan is not None:
            plan.graph.undo()
        raise ValueError(
            f"{owner}: refused on rank {', '.join(map(str, ranks))} of {arguments.shared.count}: see there"
        )
    return plan


def check_alike(plan: TilePlan, shared: Shared) -> None:
    """ValueError, on every rank, where they would not do the same, or would draw other random numbers."""
    graph = plan.graph
    device = graph.device
    cuts = [
        (sweep.number, sweep.strips, sweep.bands, *((step.call, step.rows, step.across) for step in sweep.steps))
        for sweep in plan.sweeps
    ]
    plans = repr((cuts, sorted(plan.stored), sorted(graph.needs), sorted(plan.tiles.items()), plan.stretches))
    state = default_sources(device)[-1].before if graph.drew else b""
    constants = {id(one): one.detach() for call in graph.calls for one in call.constants}
    values = [(fake.shape, fake.dtype) for fake in graph.fakes]
    calls = repr((values, [_as_text(call, bool(graph.needs)) for call in graph.calls])).encode()
    found = shared.alike({"calls": calls, "plans": plans.encode(), "random states": state}, device)
    if not found and not shared.close(_looked_at(list(constants.values()), device)):
        found = ["parameters, buffers or whole arguments"]
    if found:
        raise ValueError(
            f"tile: expected the same arguments, module and random state on every rank, got other {' and '.join(found)}"
        )


def _as_text(call: Call, gradients: bool) -> Any:
    """The same on every rank that makes the same call: addresses and numbers of devices are left out."""

    def named(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one.shape, one.dtype, gradients and one.requires_grad
        if isinstance(one, torch.device):
            return one.type
        plain = isinstance(one, (Ref, int, float, complex, str, bytes, torch.dtype, type(None)))
        return repr(one) if plain else type(one).__name__

    return call.where, call.autocast, tree_map(named, (call.args, call.kwargs, call.result))


def _looked_at(tensors: list[Tensor], device: torch.device) -> Tensor:
    """A number for each tensor that others hardly have, and how far it may be off: on ranks that have computed a
    parameter each by itself, it can differ by rounding. Without copies of the tensors.
    """
    rows = [torch.zeros(2, device=device)]
    for one in tensors:
        if one.is_complex():
            one = torch.view_as_real(one.resolve_conj())
        if one.is_floating_point() and one.dtype.itemsize > 1:
            rows.append(torch.stack([_weighted(one), CLOSE * torch.linalg.vector_norm(one)]).to(rows[0]))
        elif one.numel():
            bits = torch.hash_tensor(one.view(torch.uint8) if one.dtype.itemsize == 1 else one).view(torch.int64)
            rows.append(torch.stack([bits % 2**24, bits * 0]).to(rows[0]))
    return torch.stack(rows).nan_to_num(nan=NAN)


def _weighted(tensor: Tensor) -> Tensor:
    """The sum, each number with a weight of its place."""
    total = tensor.sum()
    for dim, size in enumerate(tensor.shape):
        others = [d for d in range(tensor.dim()) if d != dim]
        along = tensor.sum(others) if others else tensor
        total = total + along @ (torch.arange(size, device=tensor.device) * GOLDEN % 1 - 0.5).to(tensor)
    return total


def as_part(plan: TilePlan, shared: Shared, v: int, local: Tensor) -> Tensor:
    """Of a result that is cut between ranks, what this one has."""
    if v not in plan.kinds.dims:
        return local
    dim = plan.kinds.others[0].dims[v]
    return SpatialTensor(local, {dim: shared.axis.cut_at(shared.cuts(plan.graph.fakes[v].size(dim)))})
