"""Turns the events of a census into stretches, the curve and the peak.

Frames are nested like the calls of the step: outermost its phase, in it the modules that are called, in forward or, in
the backward pass, in recompute. In backward a frame is also opened for each module whose nodes run. A node belongs to
the module that made it: autograd numbers nodes in the order of their making, so that each call of a module in the
forward pass covers a range of numbers.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from .records import PHASES, Held, Peak, Stretch

MEMORY, ENTER, LEAVE, NODE, REFUSED = range(5)
"""Kinds of events, as in csrc/memory/census.h."""
STEP = {phase: -1 - i for i, phase in enumerate(PHASES)}
"""Marks of the phases of the whole step. The mark of a module is its number."""
_PHASE = {mark: phase for phase, mark in STEP.items()}

Call = tuple[int, int]
"""A module's number, and the number of its call."""


@dataclass
class _Frame:
    mark: int
    """A module's number, or a phase's mark."""
    call: Call | None
    stretch: Stretch
    backward: bool = False
    """Opened by a node in the backward pass, not by a call."""


@dataclass
class Timeline:
    """What `timeline` finds."""

    stretches: dict[int, list[Stretch]] = field(default_factory=lambda: defaultdict(list))
    """By the number of the module."""
    phases: list[Stretch] = field(default_factory=list)
    curve: list[tuple[float, int]] = field(default_factory=list)
    peak: Peak = field(default_factory=lambda: Peak(0, 0.0, "", "", ""))
    duration: float = 0.0
    refused: tuple[int, str, str] | None = None
    """An allocation that failed: bytes, operator and module."""


class _Replay:
    """Goes through the events in order and keeps the open frames."""

    def __init__(self, events: dict[str, Any], base: int, scale: float, names: list[str]) -> None:
        self.events, self.scale, self.names = events, scale, names
        self.base = base
        self.found = Timeline()
        self.frames: list[_Frame] = []
        self.current = base
        self.now = 0.0
        self.calls: dict[int, int] = defaultdict(int)
        # Nodes numbered bounds[i] and above, below bounds[i + 1], were made while the calls in chains[i] were open.
        self.bounds: list[int] = []
        self.chains: list[tuple[Call, ...]] = []

    def where(self) -> tuple[str, str]:
        """The innermost open module and the phase."""
        phase = self.frames[-1].stretch.phase if self.frames else ""
        module = next((f.mark for f in reversed(self.frames) if f.mark >= 0), None)
        return "" if module is None else self.names[module], phase

    def open(self, mark: int, phase: str, call: Call | None = None, backward: bool = False) -> None:
        stretch = Stretch(phase, self.now, self.now, self.current, self.current, self.current)
        self.frames.append(_Frame(mark, call, stretch, backward))

    def close(self) -> None:
        frame = self.frames.pop()
        stretch = frame.stretch
        stretch.stop, stretch.after = self.now, self.current
        if self.frames:
            outer = self.frames[-1].stretch
            outer.peak = max(outer.peak, stretch.peak)
        (self.found.phases if frame.mark < 0 else self.found.stretches[frame.mark]).append(stretch)

    def step_phase(self) -> str:
        return next((f.stretch.phase for f in self.frames if f.mark < 0), "")

    def enter(self, mark: int, node: int) -> None:
        if mark < 0:
            self.open(mark, _PHASE[mark])
            return
        forward = self.step_phase() != "backward"
        call = (mark, self.calls[mark])
        self.calls[mark] += forward
        self.open(mark, "forward" if forward else "recompute", call)
        if forward:
            self.bound(node)

    def leave(self, mark: int, node: int) -> None:
        # Frames opened by nodes end with the phase. Frames that an error left open end with the frame around them.
        if any(f.mark == mark and not f.backward for f in self.frames):
            while self.frames[-1].mark != mark or self.frames[-1].backward:
                self.close()
            self.close()
        if mark >= 0 and self.step_phase() != "backward":
            self.bound(node)

    def bound(self, node: int) -> None:
        self.bounds.append(node)
        self.chains.append(tuple(f.call for f in self.frames if f.call is not None))

    def node(self, number: int) -> None:
        if number < 0 or not self.bounds or self.step_phase() != "backward":
            return  # accumulating a gradient belongs to the module that ran before it
        place = bisect_right(self.bounds, number) - 1
        chain = self.chains[place] if place >= 0 else ()
        opened = [f.call for f in self.frames if f.backward]
        if any(f.mark >= 0 and not f.backward for f in self.frames):
            return  # inside a recompute
        same = 0
        while same < min(len(chain), len(opened)) and chain[same] == opened[same]:
            same += 1
        for _ in opened[same:]:
            self.close()
        for call in chain[same:]:
            self.open(call[0], "backward", call, backward=True)


def operator_name(name: str) -> str:
    """The name of a node or operator without C++ namespaces and templates."""
    if inner := re.search(r"CppNode<(.*)>", name):
        name = inner[1]
    return name.replace("(anonymous namespace)::", "").replace("torch::autograd::", "")


def timeline(events: dict[str, Any], base: int, names: list[str], scale: float, static: dict[str, int]) -> Timeline:
    """The stretches, curve and peak of a step.

    events: from `Census.events()`. base: bytes before the step; `static` divides them into kinds. names: of modules, by
    number. scale: one tick of the events' clock in units of the trace's.
    """
    replay = _Replay(events, base, scale, names)
    found = replay.found
    kinds, times, sizes, ids, ops = (events[key] for key in ("kind", "time", "bytes", "id", "op"))
    operators = [operator_name(name) for name in events["names"]]
    deltas = _deltas(kinds, sizes, ids)
    levels = list(accumulate(deltas, initial=base))
    top = max(range(len(levels)), key=levels.__getitem__) - 1
    live: dict[int, tuple[str, str, str, int]] = {}
    found.curve.append((0.0, base))
    if top < 0:
        found.peak = Peak(base, 0.0, "", "", "", _held(live, static))
    for i, (kind, size, block) in enumerate(zip(kinds, sizes, ids, strict=True)):
        replay.now = times[i] * scale
        if kind == MEMORY:
            replay.current += deltas[i]
            if replay.frames:
                stretch = replay.frames[-1].stretch
                stretch.peak = max(stretch.peak, replay.current)
            found.curve.append((replay.now, replay.current))
            if i <= top:
                if size > 0:
                    live[block] = (*replay.where(), operators[ops[i]], size)
                else:
                    live.pop(block, None)
            if i == top:
                module, phase = replay.where()
                found.peak = Peak(replay.current, replay.now, module, operators[ops[i]], phase, _held(live, static))
        elif kind == ENTER:
            replay.enter(block, size)
        elif kind == LEAVE:
            replay.leave(block, size)
        elif kind == NODE:
            replay.node(size)
        elif kind == REFUSED:
            found.refused = size, operators[ops[i]], replay.where()[0]
    found.duration = replay.now
    while replay.frames:
        replay.close()
    for stretches in found.stretches.values():
        stretches.sort(key=lambda stretch: stretch.start)
    return found


def _deltas(kinds: list[int], sizes: list[int], blocks: list[int]) -> list[int]:
    """By how much each event changes the bytes held. A block that is given out again while it seems to be held was
    released by a thread that the census does not see, such as gloo's: it counts once.
    """
    deltas = []
    live: dict[int, int] = {}
    for kind, size, block in zip(kinds, sizes, blocks, strict=True):
        if kind != MEMORY:
            deltas.append(0)
            continue
        unseen = live.pop(block, 0)
        deltas.append(size if size < 0 else size - unseen)
        if size > 0:
            live[block] = size
    return deltas


def _held(live: dict[int, tuple[str, str, str, int]], static: dict[str, int]) -> list[Held]:
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for module, phase, operator, size in live.values():
        groups[module, operator, phase].append(size)
    held = [Held(module, op, phase, sum(s), len(s)) for (module, op, phase), s in groups.items()]
    held += [Held("", "(before the step)", what, size, 1) for what, size in static.items() if size]
    return sorted(held, key=lambda one: -one.bytes)
