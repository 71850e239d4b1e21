"""The curve of memory over a step as SVG, with bands of modules and phases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from .._bytes import byte_unit, format_bytes
from . import views
from .labels import shortened, where
from .records import Stretch, Trace
from .views import Node

COLOURS = ("#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#99ddff", "#bbcc33", "#aaaa00")
"""Of neighbouring modules: Paul Tol's light scheme, which the colour-blind can tell apart under dark text."""
POINTS = 3000
"""Of a curve, at most about."""
LANES = 4
"""Levels of modules below the curve."""
BANDS = 2500
"""Bands drawn in them at most: the longest ones."""


def ticks(first: float, last: float, about: int) -> list[float]:
    """Round numbers from first to last."""
    span = last - first
    if span <= 0:
        return [first]
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if span / step <= about)
    start = math.ceil(first / step - 1e-9)
    return [index * step for index in range(start, int(last / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Band:
    """A stretch of a module, drawn in a lane."""

    lane: int
    colour: int
    name: str
    label: str
    stretch: Stretch


def bands(trace: Trace, lanes: int, narrowest: float) -> list[Band]:
    """Stretches of the model's children and of the modules in them, `lanes` levels deep.

    Those shorter than `narrowest` are left out.
    """
    found = []

    def add(node: Node, lane: int, colour: int) -> None:
        facts = node.facts
        for stretch in facts.stretches:
            if stretch.stop - stretch.start >= narrowest:
                found.append(Band(lane, colour, facts.name, node.label, stretch))
        if lane + 1 < lanes:
            for child in node.children:
                add(child, lane + 1, colour)

    for index, node in enumerate(views.parts(trace)):
        add(node, 0, index % len(COLOURS))
    if len(found) > BANDS:
        found = sorted(found, key=lambda band: band.stretch.start - band.stretch.stop)[:BANDS]
    return found


class Chart:
    """Scales and drawing. The picture is 1200 units wide."""

    width, left, right, top = 1200, 76, 1184, 30
    bottom = 310
    lane = 19

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.curve = views.thinned(trace.curve, POINTS)
        stops = [trace.duration, trace.peak.time, *(time for time, _ in self.curve[-1:])]
        self.first = min([0.0, *(time for time, _ in self.curve[:1])])
        self.last = max(stops) if max(stops) > self.first else self.first + 1.0
        self.most = 1.14 * max(trace.peak.bytes, *(count for _, count in self.curve), 1, 1)
        narrowest = (self.last - self.first) / (self.right - self.left) * 0.7
        self.bands = bands(trace, LANES, narrowest)
        self.lanes = max((band.lane for band in self.bands), default=-1) + 1
        self.height = self.bottom + 10 + self.lanes * self.lane + 42

    def x(self, time: float) -> float:
        return self.left + (time - self.first) / (self.last - self.first) * (self.right - self.left)

    def y(self, count: float) -> float:
        return self.bottom - count / self.most * (self.bottom - self.top)

    def svg(self) -> str:
        """The picture as text, with names escaped."""
        name = f"memory over the step, highest {format_bytes(self.trace.peak.bytes)}"
        parts = [*self._phases(), *self._axes(), *self._line(), *self._lanes(), *self._peak()]
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" tabindex="0" aria-label="{escape(name)}">'
            f'{"".join(parts)}<g id="marked"></g>'
            f'<g id="cursor" visibility="hidden"><line y1="{self.top}" y2="{self.height - 42}"/>'
            '<circle r="4.5"/></g></svg>'
        )

    def _phases(self) -> list[str]:
        parts = []
        for index, phase in enumerate(self.trace.phases):
            left, right = self.x(phase.start), self.x(phase.stop)
            shade = "even" if index % 2 else "odd"
            below = self.height - 42 - self.top + 24
            parts.append(
                f'<rect class="phase {shade}" x="{left:.1f}" y="{self.top - 24}" width="{max(right - left, 1):.1f}" '
                f'height="{below}"/>'
            )
            if right - left > 7 * len(phase.phase):
                parts.append(
                    f'<text class="phase" x="{(left + right) / 2:.1f}" y="{self.top - 9}">{escape(phase.phase)}</text>'
                )
        return parts

    def _axes(self) -> list[str]:
        parts = []
        scale, name = byte_unit(self.most)
        for tick in ticks(0, self.most / scale, 6):
            y = self.y(tick * scale)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            unit_name = f" {name}" if tick else ""
            parts.append(f'<text class="tick y" x="{self.left - 8}" y="{y + 4:.1f}">{tick:g}{unit_name}</text>')
        base = self.height - 42
        for tick in ticks(self.first, self.last, 10):
            x = self.x(tick)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 5}"/>')
            parts.append(f'<text class="tick x" x="{x:.1f}" y="{base + 19}">{self.time_tick(tick)}</text>')
        parts.append(
            f'<text class="tick x" x="{(self.left + self.right) / 2}" y="{base + 37}">{self.time_name()}</text>'
        )
        return parts

    def time_name(self) -> str:
        """The unit of the axis of time."""
        return "operator" if self.trace.clock == "operators" else ("seconds" if self.last >= 1 else "milliseconds")

    def time_tick(self, time: float) -> str:
        """A time in the unit of the axis."""
        if self.trace.clock == "operators":
            return f"{time:,.0f}"
        return f"{time if self.last >= 1 else 1e3 * time:.6g}"

    def _line(self) -> list[str]:
        if not self.curve:
            return []
        start, count = self.curve[0]
        steps = [f"M{self.x(start):.1f} {self.y(count):.1f}"]
        for time, count in self.curve[1:]:
            steps.append(f"H{self.x(time):.1f}V{self.y(count):.1f}")
        steps.append(f"H{self.x(self.last):.1f}")
        path = "".join(steps)
        return [
            f'<path class="area" d="{path}V{self.bottom}H{self.x(start):.1f}Z"/>',
            f'<path class="curve" d="{path}"/>',
            f'<line class="axis" x1="{self.left}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>',
        ]

    def _lanes(self) -> list[str]:
        parts = []
        for band in self.bands:
            left, right = self.x(band.stretch.start), self.x(band.stretch.stop)
            y = self.bottom + 10 + band.lane * self.lane
            width = max(right - left - 0.6, 0.6)
            kind = "band again" if band.stretch.phase == "recompute" else "band"
            title = f"{band.name or '(model)'}, {band.stretch.phase}, peak {format_bytes(band.stretch.peak)}"
            parts.append(
                f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{width:.1f}" height="{self.lane - 2}" '
                f'fill="{COLOURS[band.colour]}" fill-opacity="{1 - 0.18 * band.lane:.2f}">'
                f"<title>{escape(title)}</title></rect>"
            )
            letters = int((width - 6) / 6.2)
            if len(band.label) <= letters or letters >= 8:
                label = escape(shortened(band.label, letters))
                parts.append(f'<text class="label" x="{left + width / 2:.1f}" y="{y + 12.5}">{label}</text>')
        return parts

    def _peak(self) -> list[str]:
        peak = self.trace.peak
        if not peak.bytes:
            return []
        x, y = self.x(peak.time), self.y(peak.bytes)
        share = (peak.time - self.first) / (self.last - self.first)
        side = "start" if share < 0.25 else "end" if share > 0.75 else "middle"
        text = shortened(where(peak), 70)
        return [
            f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="5"/>',
            f'<text class="peak" text-anchor="{side}" x="{x:.1f}" y="{y - 11:.1f}">'
            f'peak {format_bytes(peak.bytes)}<tspan class="where">  {escape(text)}</tspan></text>',
        ]
