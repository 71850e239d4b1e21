"""What every report reads from a trace: the tree of modules, rows of tables, shorter curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .records import PHASES, Held, ModuleFacts, Stretch, Trace

STATIC = ("parameters", "buffers", "gradients", "optimizer", "inputs", "other")
"""Kinds of memory before and after the step, in the order of the tables."""
COLUMNS = ("parameters", "saved", "forward peak", "backward peak")
"""The numbers of a module in a text, in a terminal and in Markdown; `numbers` gives them."""
ROWS = 120
"""Modules in a tree whose depth was not given: a larger tree is cut at the depth that leaves at most this many."""


@dataclass
class Node:
    """A module in the tree."""

    facts: ModuleFacts
    depth: int
    children: list[Node] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The last part of the name."""
        return self.facts.name.rpartition(".")[2] or "(model)"

    def walk(self, depth: int | None = None) -> Iterator[Node]:
        """This module and all inside it, parents first, down to `depth`."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if depth is None or node.depth <= depth:
                yield node
                waiting.extend(reversed(node.children))

    def own_saved_by(self) -> dict[str, int]:
        """Bytes that this module's own code saved, by operator: its `saved_by` without that of its children."""
        inside: dict[str, int] = {}
        for child in self.children:
            for operator, count in child.facts.saved_by.items():
                inside[operator] = inside.get(operator, 0) + count
        own = {operator: count - inside.get(operator, 0) for operator, count in self.facts.saved_by.items()}
        return {operator: count for operator, count in own.items() if count > 0}


def forest(trace: Trace) -> list[Node]:
    """The modules as trees. There is one, with the model at its root, unless the trace lacks the model itself."""
    nodes = {facts.name: Node(facts, 0) for facts in trace.modules}
    roots = []
    for name, node in nodes.items():
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            if parent in nodes:
                break
        if name and parent in nodes:
            node.depth = nodes[parent].depth + 1
            nodes[parent].children.append(node)
        else:
            roots.append(node)
    return roots


def model(trace: Trace) -> ModuleFacts:
    """The model itself; empty facts if the trace has none."""
    return next((facts for facts in trace.modules if facts.name == ""), ModuleFacts("", ""))


def parameters(trace: Trace) -> int:
    """Bytes of the model's parameters."""
    return trace.static.get("parameters", 0) or model(trace).parameters


def parts(trace: Trace) -> list[Node]:
    """The modules that get colours: the model's children, or those of the first module that has several."""
    level = forest(trace)
    while len(level) == 1 and level[0].children:
        level = level[0].children
    return level


def fitting_depth(trees: list[Node]) -> int | None:
    """The depth down to which there are at most ROWS modules, at least 1. None: all of them fit."""
    depths = sorted(node.depth for tree in trees for node in tree.walk())
    return None if len(depths) <= ROWS else max(1, depths[ROWS] - 1)


def numbers(facts: ModuleFacts) -> tuple[int | None, ...]:
    """A module's values for COLUMNS."""
    return facts.parameters, facts.saved, peak_of(facts, "forward"), peak_of(facts, "backward")


def peak_of(facts: ModuleFacts, phase: str) -> int | None:
    """The highest memory inside a module in a phase. "backward" includes what a checkpoint recomputes there."""
    names = ("backward", "recompute") if phase == "backward" else (phase,)
    return max((s.peak for s in facts.stretches if s.phase in names), default=None)


def static_kinds(*tables: dict[str, int]) -> list[str]:
    """The kinds in these tables of memory before or after the step, without those that are zero in all of them."""
    names = [*STATIC, *(name for table in tables for name in table)]
    return [name for name in dict.fromkeys(names) if any(table.get(name) for table in tables)]


def log(trace: Trace) -> list[tuple[ModuleFacts | None, int, Stretch]]:
    """Every stretch in order of its start, with its module and its number among that module's of the same phase.

    The module is None for a phase of the whole step.
    """
    rows: list[tuple[ModuleFacts | None, int, Stretch]] = []
    owners: list[tuple[ModuleFacts | None, list[Stretch]]] = [(None, trace.phases)]
    owners += [(facts, facts.stretches) for facts in trace.modules]
    for facts, stretches in owners:
        counts = dict.fromkeys(PHASES, 0)
        for stretch in stretches:
            counts[stretch.phase] = counts.get(stretch.phase, 0) + 1
            rows.append((facts, counts[stretch.phase], stretch))
    return sorted(rows, key=lambda row: (row[2].start, -row[2].stop))  # stable: outer modules first


def thinned(curve: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """About `most` points of a curve at the most: the lowest, the highest and the last point of equal spans of time."""
    if len(curve) <= max(most, 4):
        return list(curve)
    first, last = curve[0][0], curve[-1][0]
    buckets = max(1, (most - 1) // 3)
    step = (last - first) / buckets or 1.0
    kept, lowest, highest, current = [0], 0, 0, 0
    for index, (time, count) in enumerate(curve):
        bucket = min(int((time - first) / step), buckets - 1)
        if bucket != current:
            kept += sorted({lowest, highest, index - 1})
            lowest = highest = index
            current = bucket
        if count < curve[lowest][1]:
            lowest = index
        if count > curve[highest][1]:
            highest = index
    kept += [*sorted({lowest, highest, len(curve) - 1})]
    return [curve[index] for index in dict.fromkeys(kept)]


def largest(held: Sequence[Held], most: int) -> tuple[list[Held], int, int]:
    """The `most` largest rows of what was alive at the peak, and the bytes and the number of the other rows."""
    ordered = sorted(held, key=lambda one: -one.bytes)
    rest = ordered[most:]
    return ordered[:most], sum(one.bytes for one in rest), len(rest)
