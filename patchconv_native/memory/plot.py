"""Figures of traces. matplotlib is imported when something is drawn, not before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._bytes import byte_unit, format_bytes
from . import labels, views
from .chart import COLOURS, Band, bands
from .records import Trace

DARK, DIM, MAIN, PEAK, OTHER = "#1b222c", "#5b6675", "#0b6e99", "#c2410c", "#c9ced6"
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of runs and operators: Okabe and Ito's colours, which the colour-blind can tell apart."""
DPI = 150
POINTS = 4000
"""Of a curve, at most about."""
LANES = 3
"""Levels of modules below the curve."""
BARS = 24
"""Modules in `plot_saved`; the others share one bar."""
ALIKE = 3.0
"""How many times another's operators a run may have for both to be drawn over their number."""


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of that many inches. ImportError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib: pip install matplotlib, or pip install 'patchconv_native[report]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")  # without pyplot: no window, nothing kept open
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path | None) -> Any:
    """Writes the figure to `path` if one is given, and returns it."""
    if path is not None:
        figure.savefig(path, dpi=DPI, facecolor="white")
    return figure


def _plain(text: str, width: int = 10**6) -> str:
    """The text with its dollar signs escaped: matplotlib reads what stands between two of them as mathematics."""
    return labels.shortened(text, width).replace("$", r"\$")


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, drawn: dict[str, Any], **style: Any) -> None:
    """Names what was drawn, below the axes. The artists are given: matplotlib leaves out labels that begin with "_"."""
    if drawn:
        names = [_plain(name, 40) for name in drawn]
        figure.legend(list(drawn.values()), names, loc="outside lower center", frameon=False, **style)


def bytes_axis(axis: Any, most: float, label: str = "") -> None:
    """Gives an axis of bytes, up to `most`, ticks at round numbers of one unit. Its label ends with the unit."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    scale, name = byte_unit(most)

    class InUnit(MaxNLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            return [tick * scale for tick in super().tick_values(vmin / scale, vmax / scale)]

    axis.set_major_locator(InUnit(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda count, _: f"{count / scale:g}"))
    axis.set_label_text(f"{label}{name}")


def _time_axis(axes: Any, operators: bool, last: float) -> None:
    from matplotlib.ticker import FuncFormatter

    if operators:
        axes.set_xlabel("operator")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time:,.0f}"))
    elif last >= 1:
        axes.set_xlabel("seconds")
    else:
        axes.set_xlabel("milliseconds")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{1e3 * time:g}"))


def _steps(trace: Trace) -> tuple[list[float], list[int]]:
    """Times and bytes of the curve, up to the end of the step."""
    curve = views.thinned(trace.curve, POINTS)
    if curve and trace.duration > curve[-1][0]:
        curve.append((trace.duration, curve[-1][1]))
    return [time for time, _ in curve], [count for _, count in curve]


def _last(trace: Trace) -> float:
    """Where the axis of time ends."""
    return max(trace.duration, trace.peak.time, *(time for time, _ in trace.curve[-1:]), 0.0) or 1.0


def plot(trace: Trace, path: str | Path | None = None) -> Any:
    """Draws memory over the step with its peak and, below, when each module ran. Returns the figure."""
    figure = new_figure(12, 5.6)
    last = _last(trace)
    drawn = bands(trace, LANES, last / 1500)
    lanes = max((band.lane for band in drawn), default=-1) + 1
    if lanes:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 0.075 * lanes])
    else:
        axes, below = figure.subplots(), None
    most = max(trace.peak.bytes, *(count for _, count in trace.curve), 1, 1)
    title = _plain(trace.title or "Memory of one step", 95)
    axes.set_title(title, loc="left", weight="bold")
    beside = 140 - int(1.45 * len(title))  # letters of the smaller size that fit beside the title
    if beside > 12:
        axes.set_title(_plain(labels.setting(trace), beside), loc="right", fontsize=9, color=DIM)
    axes.set_xlim(0, last)
    axes.set_ylim(0, 1.24 * most)
    for index, phase in enumerate(trace.phases):
        axes.axvspan(phase.start, phase.stop, color="#eef1f5" if index % 2 == 0 else "#ffffff", linewidth=0, zorder=0)
        if phase.stop - phase.start > 0.011 * len(phase.phase) * last:
            middle = (phase.start + phase.stop) / 2
            axes.text(
                middle, 1.21 * most, _plain(phase.phase), ha="center", va="top", fontsize=10, color=DIM, weight="bold"
            )
    times, counts = _steps(trace)
    axes.fill_between(times, 0, counts, step="post", color=MAIN, alpha=0.16, linewidth=0)
    axes.step(times, counts, where="post", color=MAIN, linewidth=1.6)
    _mark_static(axes, trace, last)
    _mark_peak(axes, trace, last)
    bytes_axis(axes.yaxis, most)
    _bare(axes)
    axes.grid(axis="y", alpha=0.3, linewidth=0.8)
    if below is not None:
        _draw_lanes(below, drawn, lanes, last)
    _time_axis(axes if below is None else below, trace.clock == "operators", last)
    if trace.error:
        figure.supxlabel(_plain(f"not finished: {trace.error.strip()}", 130), fontsize=9.5, color=PEAK)
    return save_figure(figure, path)


def _mark_static(axes: Any, trace: Trace, last: float) -> None:
    static = sum(trace.static.values())
    if static:
        clear = static > 0.07 * trace.peak.bytes  # whether a line of text fits between it and the axis
        axes.axhline(static, color=DIM, linestyle="--", linewidth=1)
        axes.annotate(
            f"before the step {format_bytes(static)}",
            (last, static),
            xytext=(-5, -4 if clear else 3),
            textcoords="offset points",
            ha="right",
            va="top" if clear else "bottom",
            fontsize=9,
            color=DIM,
        )


def _mark_peak(axes: Any, trace: Trace, last: float) -> None:
    peak = trace.peak
    if not peak.bytes:
        return
    share = peak.time / last
    axes.plot(peak.time, peak.bytes, "o", color=PEAK, markersize=6, clip_on=False, zorder=5)
    axes.annotate(
        f"peak {format_bytes(peak.bytes)}: {_plain(labels.where(peak), 80)}",
        (peak.time, peak.bytes),
        xytext=(0, 8),
        textcoords="offset points",
        ha="left" if share < 0.3 else "right" if share > 0.7 else "center",
        color=PEAK,
        fontsize=9.5,
        weight="bold",
        path_effects=_halo(),
    )


def _halo() -> list[Any]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=4, foreground="white")]


def _draw_lanes(axes: Any, drawn: list[Band], lanes: int, last: float) -> None:
    for colour in range(len(COLOURS)):
        for lane in range(lanes):
            stretches = [b.stretch for b in drawn if b.colour == colour and b.lane == lane]
            axes.broken_barh(
                [(s.start, s.stop - s.start) for s in stretches],
                (lanes - lane - 0.94, 0.88),
                facecolors=COLOURS[colour],
                alpha=1 - 0.22 * lane,
                edgecolor="white",
                linewidth=0.5,
            )
    for band in drawn:
        # About 165 letters of this size fit across the axes.
        letters = int(165 * (band.stretch.stop - band.stretch.start) / last)
        if letters >= min(len(band.label), 6):
            middle = (band.stretch.start + band.stretch.stop) / 2
            text = _plain(band.label, letters)
            axes.text(middle, lanes - band.lane - 0.5, text, ha="center", va="center_baseline", fontsize=8, color=DARK)
    axes.set_ylim(0, lanes)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_ylabel("modules", fontsize=9, color=DIM)


def plot_saved(trace: Trace, path: str | Path | None = None) -> Any:
    """Draws a bar for each module: what its own code saves for backward, by operator. Returns the figure."""
    nodes = [node for tree in views.forest(trace) for node in tree.walk() if node.facts.own_saved > 0]
    largest = {node.facts.name for node in sorted(nodes, key=lambda node: -node.facts.own_saved)[:BARS]}
    rows, rest = [], []
    for node in nodes:
        if node.facts.name in largest:
            rows.append((node.facts.name or "(model)", node.own_saved_by(), node.facts.own_saved))
        else:
            rest.append(node.facts.own_saved)
    if rest:
        rows.append((f"{len(rest):,} more modules", {}, sum(rest)))
    totals: dict[str, int] = {}
    for _, by, _ in rows:
        for operator, count in by.items():
            totals[operator] = totals.get(operator, 0) + count
    operators = sorted(totals, key=lambda operator: -totals[operator])[: len(RUNS) - 1]
    figure = new_figure(10, 1.5 + 0.27 * max(len(rows), 3))
    axes = figure.subplots()
    most = max((total for *_, total in rows), default=1)
    drawn: dict[str, Any] = {}
    for row, (_, by, total) in enumerate(rows):
        left = 0
        cuts = [(operator, min(by.get(operator, 0), total)) for operator in operators]
        for operator, count in [*cuts, ("others", total - sum(count for _, count in cuts))]:
            if count > 0:
                colour = RUNS[operators.index(operator)] if operator in operators else OTHER
                drawn[operator] = axes.barh(row, count, left=left, height=0.72, color=colour)
                left += count
        axes.text(
            total + 0.008 * most, row, format_bytes(total), va="center", fontsize=8.5, color=DARK, path_effects=_halo()
        )
    axes.set_yticks(range(len(rows)), [_plain(name, 48) for name, *_ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * most)
    bytes_axis(axes.xaxis, most)
    _bare(axes)
    axes.grid(axis="x", alpha=0.3, linewidth=0.8)
    axes.set_axisbelow(True)
    title = _plain(trace.title or "one step", 60)
    axes.set_title(
        f"Saved for backward, {format_bytes(trace.saved)} in all: {title}", loc="left", weight="bold", fontsize=11
    )
    _legend(figure, drawn, ncols=3, fontsize=9)
    return save_figure(figure, path)


def plot_runs(runs: Mapping[str, Trace], path: str | Path | None = None) -> Any:
    """Draws the curves of several runs over each other, and bars of their peaks and of what they save.

    Runs with other clocks, or one of several times another's operators, go by percent of the step.
    """
    figure = new_figure(12, 4.8)
    axes, bars = figure.subplots(1, 2, width_ratios=[2.6, 1])
    clocks = {trace.clock for trace in runs.values()}
    most = max([1, *(trace.peak.bytes for trace in runs.values())])
    lasts = [_last(trace) for trace in runs.values()] or [1.0]
    last = max(lasts)
    one_axis = len(clocks) == 1 and (clocks != {"operators"} or last <= ALIKE * min(lasts))
    drawn: dict[str, Any] = {}
    for index, (name, trace) in enumerate(runs.items()):
        colour = RUNS[index % len(RUNS)]
        scale = 1.0 if one_axis else 100 / _last(trace)
        times, counts = _steps(trace)
        times = [time * scale for time in times]
        axes.fill_between(times, 0, counts, step="post", color=colour, alpha=0.08, linewidth=0)
        (drawn[name],) = axes.step(times, counts, where="post", color=colour, linewidth=1.7)
        axes.plot(trace.peak.time * scale, trace.peak.bytes, "o", color=colour, markersize=6, zorder=5)
        for row, count in enumerate((trace.peak.bytes, trace.saved)):
            at = row * (len(runs) + 0.9) + index
            bars.barh(at, count, height=0.8, color=colour)
            text = format_bytes(count) + ("" if trace.error is None else ", not finished")
            bars.text(count + 0.02 * most, at, text, va="center", fontsize=9, color=DARK)
    if one_axis:
        _time_axis(axes, clocks == {"operators"}, last)
    else:
        axes.set_xlabel("percent of the step")
    axes.set_xlim(0, last if one_axis else 100)
    axes.set_ylim(0, 1.06 * most)
    bytes_axis(axes.yaxis, most)
    axes.grid(axis="y", alpha=0.3, linewidth=0.8)
    axes.set_title("Memory over the step, dots at the peaks", loc="left", weight="bold", fontsize=11)
    middle = (len(runs) - 1) / 2
    bars.set_yticks([middle, middle + len(runs) + 0.9], ["peak", "saved for\nbackward"])
    bars.tick_params(axis="y", length=0)
    bars.set_ylim(2 * len(runs) + 0.5, -0.7)
    bars.set_xlim(0, (1.4 if all(trace.error is None for trace in runs.values()) else 1.85) * most)
    bytes_axis(bars.xaxis, most)
    for one in (axes, bars):
        _bare(one)
    _legend(figure, drawn, ncols=min(len(runs), 4))
    return save_figure(figure, path)
