"""How far a call of `tile` has come, in a file, so that another process can go on from there.

The file holds what a strip leaves behind, but for what lies in files already: the rows of the result, and stored values
where they are kept in a folder. What strips keep for the next one is not in it: going on, those rows are computed again
(`resumed`).
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from .kinds import Kinds
from .reach import reach_of
from .record import Graph
from .stores import FileRows, Kept
from .sweeps import Sweep

EVERY = 5.0
"""Seconds between two entries."""


@dataclass
class State:
    """After some strips of a sweep."""

    sweep: int
    strip: int
    """Of all its bands, one after the other."""
    shares: dict[int, list[Tensor]]
    answers: dict[int, list[Tensor]]
    whole: dict[int, Tensor]
    stored: dict[int, list[int]]
    """Of each value in files, its rows in each band."""


@dataclass
class Journal:
    """path: of the file. identity: of all that the result follows from; a file with another one is not read."""

    path: Path
    identity: str
    every: float = EVERY
    state: State | None = None
    """From where to go on."""
    _last: float = field(default_factory=time.monotonic)

    def load(self) -> bool:
        """Whether there is a file; ValueError where it is of another call, or broken."""
        if not self.path.exists():
            return False
        try:
            found = torch.load(self.path, weights_only=True)
            identity, parts = found.pop("identity"), found
        except (RuntimeError, EOFError, KeyError, AttributeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.path} is no journal of tile") from error
        if identity != self.identity:
            raise ValueError(f"{self.path} is of another model, input, output or plan")
        self.state = State(**parts)
        return True

    def due(self) -> bool:
        return time.monotonic() - self._last >= self.every

    def save(self, state: State) -> None:
        """In place of the entry before, at once. What the state stands for has been flushed."""
        part = self.path.with_name(self.path.name + ".part")
        with open(part, "wb") as file:
            torch.save({"identity": self.identity, **vars(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path)
        self._last = time.monotonic()

    def finish(self) -> None:
        self.path.unlink(missing_ok=True)


def rows_in_files(stored: Mapping[int, Sequence[Kept]]) -> dict[int, list[int]] | None:
    """How many rows of each band of each stored value are in files, flushed; None where one is not in a file."""
    found: dict[int, list[int]] = {}
    for v, bands in stored.items():
        for rows in bands:
            if not isinstance(rows, FileRows):
                return None
            rows.flush()
            found.setdefault(v, []).append(rows.end)
    return found


def resumed(graph: Graph, kinds: Kinds, sweep: Sweep, done: int) -> tuple[Sweep, dict[int, int]]:
    """The sweep without what the first `done` strips of a band have left behind, and the first row that is computed of
    each value: of what strips keep for the next one, the rows that are still read are computed again, in the strips
    that computed them, so that none is larger than planned.
    """
    needed: dict[int, int] = {}
    begins: dict[int, int] = {}
    steps = []
    for step in reversed(sweep.steps):
        table, end = reach_of(graph, kinds, step.call), step.rows[done - 1][1]
        made = [] if step.asks else [v for v in graph.calls[step.last].outputs if v in kinds.dims]
        first = min([end, *(needed[v] for v in made if v in needed)])
        if first < end:
            first = first // table.cell * table.cell
        begins.update(dict.fromkeys(made, first))
        rows = [(max(low, first), max(high, first)) for low, high in step.rows]
        reads = {}
        for v in step.reads:
            reads[v] = table.reads_of_strips(v, rows)
            needed[v] = min(needed.get(v, 2**62), table.reads_from(v, first))
        steps.append(replace(step, rows=rows, reads=reads))
    return replace(sweep, steps=steps[::-1], rooms=set()), begins
