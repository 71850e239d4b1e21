"""Calls of tiled modules on tensors without data: they take the memory that the plan predicts, and compute nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from .graph import Graph
from .plan import TilePlan
from .sweeps import bytes_of


def are_fake(values: Any) -> bool:
    return any(isinstance(value, FakeTensor) for value in values)


def results_of(plan: TilePlan, images: dict[int, Tensor]) -> dict[int, Tensor]:
    """The results, by their numbers. Of those that are asked for gradients, as of one autograd node."""
    graph = plan.graph
    numbers = [v for v in dict.fromkeys(graph.results) if v not in images]
    if not graph.needs:
        results = {v: _made(graph, v) for v in numbers}
        _take(plan, plan.peak)
        return results
    constants = {id(one): one for call in graph.calls for one in call.constants if one.requires_grad}
    found = _Tiled.apply(plan, numbers, *images.values(), *constants.values())
    return dict(zip(numbers, found, strict=True))


def _made(graph: Graph, v: int) -> Tensor:
    fake = graph.fakes[v]
    return torch.empty_strided(fake.shape, graph.strides.get(v, fake.stride()), dtype=fake.dtype, device=fake.device)


def _take(plan: TilePlan, count: int) -> Tensor:
    return torch.empty(max(count, 0), dtype=torch.uint8, device=plan.graph.device)


def _kept(plan: TilePlan) -> int:
    """Bytes that the forward pass keeps for the backward pass."""
    again = {v for stretch in plan.stretches for sweep in stretch.again for v in sweep.stores}
    stored = plan.stored - again if plan.outside.counted else set()
    return sum(bytes_of(plan.graph, v) for v in stored) + plan.graph.made


class _Tiled(Function):
    @staticmethod
    def forward(ctx: Any, plan: TilePlan, numbers: list[int], *given: Tensor) -> tuple[Tensor, ...]:
        results = [_made(plan.graph, v) for v in numbers]
        kept = _take(plan, min(_kept(plan), plan.peak))
        _take(plan, plan.peak - kept.nbytes)
        ctx.plan = plan
        ctx.save_for_backward(kept, *given)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(one for v, one in zip(numbers, results, strict=True) if v not in plan.graph.needs)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        kept, *given = ctx.saved_tensors
        wanted = zip(given, ctx.needs_input_grad[2:], strict=True)
        found = [torch.empty_like(one) if need else None for one, need in wanted]
        _take(ctx.plan, ctx.plan.peak - kept.nbytes)
        return None, None, *found
