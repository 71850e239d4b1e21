"""What every view of a trace needs: its module tree, shorter curves, and bytes, moments and names in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .records import PHASES, Held, ModuleFacts, Peak, Stretch, Trace

KINDS = ("parameters", "buffers", "gradients", "optimizer", "inputs", "other")
"""Of static memory, in the order they are shown in."""
OUTSIDE = "(model or step)"
"""Code of the model itself or of the step around it: both have no name."""


def moment(trace: Trace, time: float) -> str:
    """A time on the trace's clock."""
    if trace.clock == "operators":
        return f"operator {time:,.0f}"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(time) >= 0.9995 * unit:
            return f"{time / unit:.3g} {name}" if abs(time) < 999.5 * unit else f"{time / unit:.0f} {name}"
    return f"{time / 1e-6:.3g} µs"


def where(peak: Peak) -> str:
    """The module, phase and operator of the peak."""
    return ", ".join(word for word in (peak.module or OUTSIDE, peak.phase, peak.operator) if word)


def setting(trace: Trace) -> str:
    """The device and the kind of step."""
    words = [trace.device]
    if trace.amp:
        words.append(f"autocast to {trace.amp}")
    if trace.fake:
        words.append("fake tensors: nothing was computed")
    return ", ".join(words)


def kinds(*tables: dict[str, int]) -> list[str]:
    """The names in these tables of static memory, the known ones first, without those that are nothing in all."""
    names = [*KINDS, *(name for table in tables for name in table)]
    return [name for name in dict.fromkeys(names) if any(table.get(name) for table in tables)]


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
        """This one and all inside of it, parents first, no deeper than `depth`."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if depth is None or node.depth <= depth:
                yield node
                waiting.extend(reversed(node.children))

    def own_saved_by(self) -> dict[str, int]:
        """What this module's own code saved, by operator: its bytes less those of the modules inside of it."""
        inside: dict[str, int] = {}
        for child in self.children:
            for operator, count in child.facts.saved_by.items():
                inside[operator] = inside.get(operator, 0) + count
        own = {operator: count - inside.get(operator, 0) for operator, count in self.facts.saved_by.items()}
        return {operator: count for operator, count in own.items() if count > 0}


def forest(trace: Trace) -> list[Node]:
    """The modules as trees: one, under the model itself, unless it is not in the trace."""
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
    """The model itself; one without facts where the trace has none."""
    return next((facts for facts in trace.modules if facts.name == ""), ModuleFacts("", ""))


def parts(trace: Trace) -> list[Node]:
    """The modules worth a colour: the children of the model, or of the only module in it that has any."""
    level = forest(trace)
    while len(level) == 1 and level[0].children:
        level = level[0].children
    return level


def peak_of(facts: ModuleFacts, phase: str) -> int | None:
    """The most inside of a module; of backward, with what a checkpoint runs again."""
    names = ("backward", "recompute") if phase == "backward" else (phase,)
    return max((s.peak for s in facts.stretches if s.phase in names), default=None)


def log(trace: Trace) -> list[tuple[ModuleFacts | None, int, Stretch]]:
    """Every stretch by its start, with its module (None: of the whole step) and its number of that phase there."""
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
    """At most about `most` points of a curve: the lowest, highest and last of equal parts of its time."""
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


def grouped(held: Sequence[Held], most: int) -> tuple[list[Held], int, int]:
    """The largest of what was alive; and bytes and number of the rest."""
    ordered = sorted(held, key=lambda one: -one.bytes)
    rest = ordered[most:]
    return ordered[:most], sum(one.bytes for one in rest), len(rest)


def flat(text: str) -> str:
    """A text on one line, without characters that would steer a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def shortened(text: str, width: int) -> str:
    """A text on one line of at most `width` characters, without its middle where it is longer."""
    text = flat(text)
    if len(text) <= width:
        return text
    if width < 3:
        return text[:width]
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
