"""Calls of `tile` on images of which each rank holds a part: what is not served, and what all ranks must have alike."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spatial import NotServed, SpatialTensor
from .arguments import Arguments
from .draws import default_sources
from .graph import Graph, refs
from .kinds import Kinds
from .plan import TilePlan
from .shared import Shared

CLOSE = 0.01
"""Of a tensor's norm: how far its sums on two ranks may be apart."""


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


def check_alike(plan: TilePlan, shared: Shared) -> None:
    """ValueError, on every rank, where they would not do the same, or would draw other random numbers."""
    graph = plan.graph
    device = graph.fakes[graph.inputs[0]].device
    cuts = [
        (sweep.number, sweep.strips, sweep.bands, *((step.call, step.rows, step.across) for step in sweep.steps))
        for sweep in plan.sweeps
    ]
    plans = repr((cuts, sorted(plan.stored), sorted(graph.needs), sorted(plan.tiles.items()), plan.stretches))
    state = default_sources(device)[-1].before if graph.drew else b""
    constants = {id(one): one.detach() for call in graph.calls for one in call.constants}
    found = shared.alike({"plans": plans.encode(), "random states": state}, device)
    if not found and not shared.close(_looked_at(list(constants.values()), device)):
        found = ["parameters, buffers or whole arguments"]
    if found:
        raise ValueError(
            f"tile: expected the same arguments, module and random state on every rank, got other {' and '.join(found)}"
        )


def _looked_at(tensors: list[Tensor], device: torch.device) -> Tensor:
    """A number for each tensor that others hardly have, and how far it may be off: on ranks that have computed a
    parameter each by itself, it can differ by rounding. Without copies of the tensors.
    """
    rows = [torch.zeros(2, device=device)]
    for one in tensors:
        if one.is_complex():
            one = torch.view_as_real(one.resolve_conj())
        if one.is_floating_point() and one.dtype.itemsize > 1:
            rows.append(torch.stack([one.sum(), CLOSE * torch.linalg.vector_norm(one)]).to(rows[0]))
        elif one.numel():
            bits = torch.hash_tensor(one.view(torch.uint8) if one.dtype.itemsize == 1 else one).view(torch.int64)
            rows.append(torch.stack([bits % 2**24, bits * 0]).to(rows[0]))
    return torch.stack(rows)


def as_part(plan: TilePlan, shared: Shared, v: int, local: Tensor) -> Tensor:
    """Of a result that is cut between ranks, what this one has."""
    if v not in plan.kinds.dims:
        return local
    dim = plan.kinds.others[0].dims[v]
    return SpatialTensor(local, {dim: shared.axis.cut_at(shared.cuts(plan.graph.fakes[v].size(dim)))})
