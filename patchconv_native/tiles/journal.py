"""How far a call of `tile` has come, in a file, so that another process can go on from there.

The file holds what a strip leaves behind, but for what lies in files already: the rows of the result, and stored values
where they are kept in a folder. What strips keep for the next one is not in it: going on, those rows are computed again
(`resumed`). Before the first strip it says that the call has begun, and after the last one that it is finished.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .graph import Graph
from .kinds import Kinds
from .reach import reach_of
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
    """path: of the file. identity: all that the result follows from, by name, as it is or as a digest; a file with
    another one is not read.
    """

    path: Path
    identity: dict[str, str]
    every: float = EVERY
    state: State | None = None
    """From where to go on; None: from the beginning."""
    finished: bool = False
    """Whether the call has come to its end."""
    _last: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """For files of this call."""
        return hashlib.sha256(repr(sorted(self.identity.items())).encode()).hexdigest()[:16]

    def load(self) -> bool:
        """Whether there is a file; ValueError where it is of another call, or broken."""
        if not self.path.exists():
            return False
        try:
            found = torch.load(self.path, weights_only=True)
            identity, state, finished = dict(found["identity"]), found["state"], found["finished"]
        except (RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.path} is no journal of tile") from error
        names = dict.fromkeys([*self.identity, *identity])
        differs = [name for name in names if identity.get(name) != self.identity.get(name)]
        if differs:
            raise ValueError(f"{self.path} is of another call, which differs in {', '.join(differs)}")
        self.state, self.finished = None if state is None else State(**state), finished
        return True

    def due(self) -> bool:
        return time.monotonic() - self._last >= self.every

    def begin(self) -> None:
        self._write(None, finished=False)

    def save(self, state: State) -> None:
        """In place of the entry before, at once. What the state stands for has been flushed."""
        self._write(vars(state), finished=False)

    def finish(self) -> None:
        self._write(None, finished=True)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, state: dict[str, Any] | None, finished: bool) -> None:
        part = self.path.with_name(self.path.name + ".part")
        with open(part, "wb") as file:
            torch.save({"identity": self.identity, "state": state, "finished": finished}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path)
        self._last = time.monotonic()


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
