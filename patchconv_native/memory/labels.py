"""Short texts about a trace: times, the place of the peak, the kind of step, and text cut to a width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .records import Peak, Trace

OUTSIDE = "(model or step)"
"""Stands for code of the model itself or of the step around it, which have no module name."""


def moment(trace: Trace, time: float) -> str:
    """A time on the trace's clock, with its unit: "12.3 ms", "operator 1,234"."""
    if trace.clock == "operators":
        return f"operator {time:,.0f}"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(time) >= 0.9995 * unit:
            return f"{time / unit:.3g} {name}" if abs(time) < 999.5 * unit else f"{time / unit:.0f} {name}"
    return f"{time / 1e-6:.3g} µs"


def where(peak: Peak) -> str:
    """The module, phase and operator of the peak."""
    return ", ".join(part for part in (peak.module or OUTSIDE, peak.phase, peak.operator) if part)


def setting(trace: Trace) -> str:
    """The device and the kind of step."""
    parts = [trace.device]
    if trace.amp:
        parts.append(f"autocast to {trace.amp}")
    if trace.fake:
        parts.append("fake tensors: nothing was computed")
    return ", ".join(parts)


def aligned(rows: Iterable[Sequence[str]], sides: str) -> str:
    """A table as text: a line a row, and a column for each of `sides`, "<" (left) or ">" (right)."""
    rows = list(rows)
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (zip(row, sides, wide, strict=True) for row in rows)
    return "\n".join("  ".join(f"{cell:{side}{width}}" for cell, side, width in line).rstrip() for line in lines)


def flat(text: str) -> str:
    """The text on one line, without the characters that control a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def shortened(text: str, width: int) -> str:
    """The text on one line of at most `width` characters. A longer one loses its middle."""
    text = flat(text)
    if len(text) <= width:
        return text
    if width < 3:
        return text[:width]
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
