"""Turns measurements into a short list of rules for conv_rules.json, which take the project's kernel only where it won.

A class is all convolutions that share pass, dtype, layout, kind, taps and stride. Within a class a rule is a box: a
range of channels, and a number of output places from which on every measurement inside the box was won. Both ends of
the channels were measured; what lies between two neighbours that won, as 96 between 64 and 128, is taken with them. A
box has no upper end of places if all its channels were measured, and won, at FULL places or more: from there on a GPU
is full, and both sides' time grows with the places. What was not measured is not taken. Boxes that differ in one thing
alone are then joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DTYPES = ("bfloat16", "float16", "tf32", "float32")  # the most important first, here and below
LAYOUTS = ("NCHW", "channels_last")
PASSES = ("fprop", "dgrad", "wgrad")
KINDS = ("dense", "depthwise", "first layer")
ALL = {"dtype": DTYPES, "layout": LAYOUTS, "pass": PASSES}
FULL = 2**20
FIRST = 4  # channels: an input of fewer is a first layer's

Rule = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One measurement. `ratio`: cuDNN's time in units of ours; None: there was no time for it."""

    pass_: str
    dtype: str
    layout: str
    groups: int
    sources: int  # channels a group
    outputs: int
    taps: int
    stride: int
    places: int
    ratio: float | None

    @property
    def kind(self) -> str:
        if self.groups > 1:
            return "depthwise"
        return "first layer" if self.sources < FIRST else "dense"

    @property
    def of_class(self) -> tuple[Any, ...]:
        return self.pass_, self.dtype, self.layout, self.kind, self.taps, self.stride

    @property
    def channels(self) -> tuple[int, int]:
        """The fewest and the most of what a box is a range of."""
        if self.kind == "depthwise":
            return self.groups, self.groups
        if self.kind == "first layer":
            return self.outputs, self.outputs
        return min(self.sources, self.outputs), max(self.sources, self.outputs)


@dataclass(frozen=True)
class Box:
    fewest: int  # channels
    most: int
    start: int  # places
    end: int | None

    def holds(self, other: Box) -> bool:
        ends = self.end is None or (other.end is not None and other.end <= self.end)
        return self.fewest <= other.fewest and other.most <= self.most and self.start <= other.start and ends


def boxes(points: Sequence[Point]) -> list[Box]:
    """Of one class. Fewer places first, then the widest ranges of channels from the fewest on."""
    values = sorted({p.channels[0] for p in points if p.channels[0] == p.channels[1]})
    found: list[Box] = []
    for start in sorted({p.places for p in points}):
        measured = [(p, p.ratio) for p in points if p.places >= start and p.ratio is not None]

        def largest(value: int, among: list[tuple[Point, float]] = measured) -> int:
            return max((p.places for p, _ in among if p.channels == (value, value)), default=0)

        def won(inside: list[int], among: list[tuple[Point, float]] = measured) -> bool:
            ratios = [r for p, r in among if inside[0] <= p.channels[0] and p.channels[1] <= inside[-1]]
            return all(largest(value) for value in inside) and min(ratios) >= 1

        first = 0
        while first < len(values):
            last = first
            while last < len(values) and won(values[first : last + 1]):
                last += 1
            if last > first:
                inside = values[first:last]
                end = min(largest(value) for value in inside)
                box = Box(inside[0], inside[-1], start, None if end >= FULL else end)
                if not any(other.holds(box) for other in found):
                    found.append(box)
            first = max(last, first + 1)
    return found


def rule_of(point: Point, box: Box) -> Rule:
    """The rule of a box in the class of `point`."""
    channels, one = [box.fewest, box.most], [1, 1]
    ranges = {
        "dense": {"groups": one, "sources": channels, "outputs": channels},
        "depthwise": {"groups": channels, "sources": one, "outputs": one},
        "first layer": {"groups": one, "sources": [point.sources] * 2, "outputs": channels},
    }[point.kind]
    return {
        "native": True, "pass": point.pass_, "dtype": point.dtype, "layout": point.layout, **ranges,
        "taps": [point.taps] * 2, "stride": [point.stride] * 2, "places": [box.start, box.end],
    }  # fmt: skip


def _grouped(rules: Iterable[Rule], apart: str) -> list[list[Rule]]:
    """Rules that are the same but for one thing."""
    groups: dict[str, list[Rule]] = {}
    for rule in rules:
        groups.setdefault(repr(sorted((k, v) for k, v in rule.items() if k != apart)), []).append(rule)
    return list(groups.values())


def joined(rules: list[Rule], neighbours: dict[str, list[int]]) -> list[Rule]:
    """Fewer rules that take the same. `neighbours`: the values of taps and stride that were measured, in order."""
    for key in ("stride", "taps"):
        kept: list[Rule] = []
        for group in _grouped(rules, key):
            group = sorted(group, key=lambda rule: rule[key])
            kept.append(group[0])
            for rule in group[1:]:
                order = neighbours[key]
                if order.index(rule[key][0]) == order.index(kept[-1][key][1]) + 1:
                    kept[-1] = kept[-1] | {key: [kept[-1][key][0], rule[key][1]]}
                else:
                    kept.append(rule)
        rules = kept
    for key, choices in ALL.items():
        kept = []
        for group in _grouped(rules, key):
            if {rule.get(key) for rule in group} == set(choices):
                kept.append({name: value for name, value in group[0].items() if name != key})
            else:
                kept += group
        rules = kept
    return rules


def derive(points: Sequence[Point]) -> list[Rule]:
    """The rules of an architecture."""
    classes: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        classes.setdefault(point.of_class, []).append(point)
    rules = [rule_of(members[0], box) for members in classes.values() for box in boxes(members)]
    neighbours = {"taps": sorted({p.taps for p in points}), "stride": sorted({p.stride for p in points})}
    return joined(rules, neighbours)
