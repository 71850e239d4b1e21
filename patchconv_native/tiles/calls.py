"""Runs all sweeps of a plan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .arrays import Sink, Source
from .heap import give_back
from .journal import Journal
from .kinds import part_of
from .plan import TilePlan
from .run import Run, move_statistics, run_between
from .run_sweep import run_sweep, take_up
from .stores import Store
from .sweeps import Sweep

Progress = Callable[[int, int], None]


def computed(
    plan: TilePlan, images: dict[int, Any], store: Store, out: Any = None, progress: bool | Progress = False,
    journal: Journal | None = None,
) -> Run:  # fmt: skip
    """What is there when all sweeps are done."""
    graph, kinds = plan.graph, plan.kinds
    device = graph.device
    results = {v: Sink(_result(plan, v) if out is None else out) for sweep in plan.sweeps for v in sweep.results}
    inputs = {v: Source("tile", image, device) for v, image in images.items()}
    total, done = sum(map(_strips, plan.sweeps)) // plan.outside.ranks or 1, 0

    def advance() -> None:
        nonlocal done
        done += 1
        report(progress, done, total)

    state = None if journal is None else journal.state
    run = Run(graph, kinds, plan.read_later, results, store, inputs=inputs, outside=plan.outside)
    run.whole = {v: source.read({}) for v, source in inputs.items() if v not in kinds.dims}
    with run.copies(device):
        sweeps = {sweep.number: sweep for sweep in plan.sweeps}
        if state is None:
            store.clear()  # of a call that was broken off, and is begun again
        else:
            take_up(run, plan.sweeps, state)
            done = state.strip + sum(map(_strips, (one for one in plan.sweeps if one.number < state.sweep)))
        for number in range(0 if state is None else state.sweep, max(kinds.level.values(), default=0) + 1):
            if state is None or number > state.sweep:
                run_between(run, number, plan.last)
            if number in sweeps:
                run_sweep(run, sweeps[number], advance, journal)
                give_back(plan)
    move_statistics(run)
    if not plan.sweeps:
        advance()
    return run


def _result(plan: TilePlan, v: int) -> Tensor:
    """To be written into: a result, or this rank's part of it."""
    graph, fake = plan.graph, plan.graph.fakes[v]
    like = torch.empty_strided(fake.shape, graph.strides.get(v, fake.stride()), device="meta")
    if plan.outside.shared is not None:
        own = plan.outside.own_part(graph, plan.kinds, v, plan.outside.shared.index)
        like = part_of(plan.kinds, v, like, ((0, like.size(plan.kinds.dims[v])), *own))
    strides = like.stride()
    if like.untyped_storage().nbytes() != like.nbytes:  # of a part of a tensor, or an expanded one
        strides = torch.empty_like(like).stride()
    return torch.empty_strided(like.shape, strides, dtype=fake.dtype, device=fake.device)


def _strips(sweep: Sweep) -> int:
    return sweep.strips * sweep.bands


def report(progress: bool | Progress, done: int, total: int) -> None:
    if callable(progress):
        progress(done, total)
    elif progress:
        print(f"\rtile: strip {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
