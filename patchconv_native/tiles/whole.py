"""Runs a recorded module on whole values, call after call, as the module makes them. With gradients parts of it can be
checkpoints: of these autograd keeps what they are given, and they are computed again in the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..checkpoint import checkpoint
from ..lean import lean
from .graph import Graph, Ref
from .kinds import Kinds, last_uses
from .run import Run, run_between
from .stores import Store


def uncut(graph: Graph) -> Kinds:
    """Of a graph of which no value is cut."""
    count = len(graph.calls)
    return Kinds(
        level=dict.fromkeys(range(len(graph.fakes)), 0), start=[0] * count, questions=[0] * count,
        gathers=[True] * count,
    )  # fmt: skip


def parts_of(graph: Graph, begins: Sequence[int]) -> list[Graph]:
    """Its calls from each of these places to the next one, as graphs: results are what is read after a part's end."""
    found: list[Graph] = []
    wanted = set(graph.results)
    for begin, end in zip(reversed(begins), [len(graph.calls), *reversed(begins[1:])], strict=True):
        calls = graph.calls[begin:end]
        made = dict.fromkeys(v for call in calls for v in call.outputs)
        inputs = [v for v in dict.fromkeys(v for call in calls for v in call.inputs) if v not in made]
        result = [Ref(v) for v in made if v in wanted]
        found.insert(0, replace(graph, calls=calls, inputs=inputs, result=result, changed={}, kept=[]))
        wanted.update(inputs)
    return found


def computed_whole(graph: Graph, images: dict[int, Tensor], begins: Sequence[int], in_lean: bool) -> dict[int, Tensor]:
    """The results, by their numbers, with the history that autograd makes. begins: of parts, which are checkpoints but
    for the last one. in_lean: this package's functions are called in place of stock's, as in `lean`.
    """
    values, results = dict(images), set(graph.results)
    parts = parts_of(graph, begins)
    with lean() if in_lean else contextlib.nullcontext():
        for number, part in enumerate(parts):
            run: Any = functools.partial(_computed, part)
            if part is not parts[-1]:
                run = functools.partial(checkpoint, run)
            found = run(*[values[v] for v in part.inputs])
            later = results.union(*[one.inputs for one in parts[number + 1 :]])
            values = {v: value for v, value in values.items() if v in later}
            values.update(zip(part.results, found, strict=True))
            del found
    return values


def _computed(graph: Graph, *given: Tensor) -> list[Tensor]:
    run = Run(graph, uncut(graph), set(), {}, Store("device"))
    run.whole = dict(zip(graph.inputs, given, strict=True))
    run_between(run, 0, last_uses(graph, run.kinds, set(graph.results), []))
    return [run.whole[v] for v in graph.results]
