"""How large strips and tiles should be where speed alone counts."""

from __future__ import annotations

import torch

from .._bytes import MIB
from .graph import Graph
from .sweeps import bytes_of

STRIP, STRIP_OF_GPU = 16 * MIB, 512 * MIB
"""Of the largest value of a sweep, what one strip should hold: on a CPU so that strips stay in its caches, on a GPU so
that a call's work takes longer than to launch it."""
STEP_OF_GPU = 2e10
"""A GPU's arithmetic in the time that it takes to launch a step: 0.6 ms of an H100, float32."""
STEP_OF_STRIP, STEP_OF_TILE = 2e7, 4e7
"""A CPU's arithmetic in about half a millisecond and a millisecond: what a step of a strip, and of a tile in a backward
pass, costs besides its own."""
STEP_OF_CALL = 1e6
"""The same of a call of a function, outside of strips."""
STRIPS_OF_TILE = 4
"""What a tile of the backward pass has of the largest value, in strips, where speed alone counts."""


def strip_bytes(graph: Graph) -> int:
    """Of the largest value, what a strip should have where speed alone counts."""
    return STRIP if graph.device.type == "cpu" else STRIP_OF_GPU


def tile_step_work(graph: Graph) -> float:
    """What a step of a tile costs in the backward pass besides its arithmetic, in the same units: there and back."""
    return STEP_OF_TILE if graph.device.type == "cpu" else 2 * STEP_OF_GPU


def strip_step_work(graph: Graph) -> float:
    """What a step of a strip costs besides its arithmetic, in the same units."""
    return STEP_OF_STRIP if graph.device.type == "cpu" else STEP_OF_GPU


def step_work(graph: Graph) -> float:
    """The same, as far as strips are chosen by it: a CPU takes those that fit into its caches."""
    return 0.0 if graph.device.type == "cpu" else STEP_OF_GPU


def tile_bytes(graph: Graph) -> int:
    """Of the largest value, what a tile of the backward pass should have where speed alone counts."""
    return STRIPS_OF_TILE * strip_bytes(graph)


def is_best_uncut(graph: Graph) -> bool:
    """Whether no more than one strip is wanted for speed: every value fits into one. Tiles compute again what one call
    keeps for its backward pass, so on a GPU, whose memory is there for it, all values may have half of that.
    """
    if all(bytes_of(graph, v) <= strip_bytes(graph) for v in range(len(graph.fakes))):
        return True
    device = graph.device
    if not graph.needs or device.type != "cuda":
        return False
    memories = {fake.untyped_storage()._cdata: fake.untyped_storage().nbytes() for fake in graph.fakes}
    return sum(memories.values()) <= torch.cuda.get_device_properties(device).total_memory // 2
