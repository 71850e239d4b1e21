"""Figures of traces, by matplotlib, which is imported when something is drawn and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._bytes import byte_unit, format_bytes
from . import words
from .chart import COLOURS, bands

if TYPE_CHECKING:
    from .report import MemoryReport

DARK, DIM, MAIN, PEAK, OTHER = "#1b222c", "#5b6675", "#0b6e99", "#c2410c", "#c9ced6"
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of runs: Okabe and Ito's colours, told apart by the colour-blind."""
DPI = 150
POINTS = 4000
LANES = 3
SHOWN = 24
"""Modules in the bars of what is saved."""


def _figure(width: float, height: float) -> Any:
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


def _save(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        figure.savefig(path, dpi=DPI, facecolor="white")
    return figure


def _plain(text: str, width: int = 10**6) -> str:
    """A text for matplotlib, which takes what stands between dollars for mathematics."""
    return words.shortened(text, width).replace("$", r"\$")


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, drawn: dict[str, Any], **style: Any) -> None:
    """Names of what was drawn, below the axes. (Of labels matplotlib would leave out those that begin with "_".)"""
    if drawn:
        names = [_plain(name, 40) for name in drawn]
        figure.legend(list(drawn.values()), names, loc="outside lower center", frameon=False, **style)


def _bytes_axis(axis: Any, most: float) -> None:
    """Ticks of an axis of bytes in one unit, at round numbers of it."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    scale, name = byte_unit(most)

    class InUnit(MaxNLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            return [tick * scale for tick in super().tick_values(vmin / scale, vmax / scale)]

    axis.set_major_locator(InUnit(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda count, _: f"{count / scale:g}"))
    axis.set_label_text(name)


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


def _steps(report: MemoryReport) -> tuple[list[float], list[int]]:
    """The curve, to the step's end."""
    curve = words.thinned(report.trace.curve, POINTS)
    if curve and report.duration > curve[-1][0]:
        curve.append((report.duration, curve[-1][1]))
    return [time for time, _ in curve], [count for _, count in curve]


def _last(report: MemoryReport) -> float:
    trace = report.trace
    return max(trace.duration, trace.peak.time, *(time for time, _ in trace.curve[-1:]), 0.0) or 1.0


def plot(report: MemoryReport, path: str | Path | None = None) -> Any:
    """Memory over the step, its peak, and below it when which module was at work. Returns the figure."""
    trace = report.trace
    figure = _figure(12, 5.6)
    last = _last(report)
    shown = bands(trace, LANES, last / 1500)
    lanes = max((band.lane for band in shown), default=-1) + 1
    if lanes:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 0.075 * lanes])
    else:
        axes, below = figure.subplots(), None
    most = max(report.peak, *(count for _, count in trace.curve), 1, 1)
    title = _plain(trace.title or "Memory of one step", 95)
    axes.set_title(title, loc="left", weight="bold")
    beside = 140 - int(1.45 * len(title))  # letters of the smaller size that have room there
    if beside > 12:
        axes.set_title(_plain(words.setting(trace), beside), loc="right", fontsize=9, color=DIM)
    axes.set_xlim(0, last)
    axes.set_ylim(0, 1.24 * most)
    for index, stay in enumerate(trace.phases):
        axes.axvspan(stay.start, stay.stop, color="#eef1f5" if index % 2 == 0 else "#ffffff", linewidth=0, zorder=0)
        if stay.stop - stay.start > 0.011 * len(stay.phase) * last:
            middle = (stay.start + stay.stop) / 2
            axes.text(
                middle, 1.21 * most, _plain(stay.phase), ha="center", va="top", fontsize=10, color=DIM, weight="bold"
            )
    times, counts = _steps(report)
    axes.fill_between(times, 0, counts, step="post", color=MAIN, alpha=0.16, linewidth=0)
    axes.step(times, counts, where="post", color=MAIN, linewidth=1.6)
    _mark_static(axes, report, last)
    _mark_peak(axes, report, last)
    _bytes_axis(axes.yaxis, most)
    _bare(axes)
    axes.grid(axis="y", alpha=0.3, linewidth=0.8)
    if below is not None:
        _draw_lanes(below, shown, lanes, last)
    _time_axis(axes if below is None else below, trace.clock == "operators", last)
    if trace.error:
        figure.supxlabel(_plain(f"not finished: {trace.error.strip()}", 130), fontsize=9.5, color=PEAK)
    return _save(figure, path)


def _mark_static(axes: Any, report: MemoryReport, last: float) -> None:
    if report.static:
        clear = report.static > 0.07 * report.peak  # of the axis below
        axes.axhline(report.static, color=DIM, linestyle="--", linewidth=1)
        axes.annotate(
            f"before the step {format_bytes(report.static)}",
            (last, report.static),
            xytext=(-5, -4 if clear else 3),
            textcoords="offset points",
            ha="right",
            va="top" if clear else "bottom",
            fontsize=9,
            color=DIM,
        )


def _mark_peak(axes: Any, report: MemoryReport, last: float) -> None:
    peak = report.trace.peak
    if not peak.bytes:
        return
    share = peak.time / last
    axes.plot(peak.time, peak.bytes, "o", color=PEAK, markersize=6, clip_on=False, zorder=5)
    axes.annotate(
        f"peak {format_bytes(peak.bytes)}: {_plain(words.where(peak), 80)}",
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


def _draw_lanes(axes: Any, shown: list[Any], lanes: int, last: float) -> None:
    for colour in range(len(COLOURS)):
        for lane in range(lanes):
            stays = [b.stay for b in shown if b.colour == colour and b.lane == lane]
            axes.broken_barh(
                [(stay.start, stay.stop - stay.start) for stay in stays],
                (lanes - lane - 0.94, 0.88),
                facecolors=COLOURS[colour],
                alpha=1 - 0.22 * lane,
                edgecolor="white",
                linewidth=0.5,
            )
    for band in shown:
        # About so many letters of this size go across the axes.
        letters = int(165 * (band.stay.stop - band.stay.start) / last)
        if letters >= min(len(band.label), 6):
            middle = (band.stay.start + band.stay.stop) / 2
            text = _plain(band.label, letters)
            axes.text(middle, lanes - band.lane - 0.5, text, ha="center", va="center_baseline", fontsize=8, color=DARK)
    axes.set_ylim(0, lanes)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_ylabel("modules", fontsize=9, color=DIM)


def plot_saved(report: MemoryReport, path: str | Path | None = None) -> Any:
    """Bars of what each module's own code keeps for backward, by operator, in the model's order. Returns the figure."""
    nodes = [node for tree in words.forest(report.trace) for node in tree.walk() if node.facts.own_saved > 0]
    shown = {node.facts.name for node in sorted(nodes, key=lambda node: -node.facts.own_saved)[:SHOWN]}
    rows, rest = [], []
    for node in nodes:
        if node.facts.name in shown:
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
    figure = _figure(10, 1.5 + 0.27 * max(len(rows), 3))
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
    _bytes_axis(axes.xaxis, most)
    _bare(axes)
    axes.grid(axis="x", alpha=0.3, linewidth=0.8)
    axes.set_axisbelow(True)
    title = _plain(report.trace.title or "one step", 60)
    axes.set_title(
        f"Kept for backward, {format_bytes(report.saved)} in all: {title}", loc="left", weight="bold", fontsize=11
    )
    _legend(figure, drawn, ncols=3, fontsize=9)
    return _save(figure, path)


def plot_runs(runs: Mapping[str, MemoryReport], path: str | Path | None = None) -> Any:
    """Several runs over each other, and their peaks and what they save side by side. Returns the figure."""
    figure = _figure(12, 4.8)
    axes, bars = figure.subplots(1, 2, width_ratios=[2.6, 1])
    clocks = {report.trace.clock for report in runs.values()}
    most = max([1, *(report.peak for report in runs.values())])
    last = max((_last(report) for report in runs.values()), default=1.0)
    drawn: dict[str, Any] = {}
    for index, (name, report) in enumerate(runs.items()):
        colour = RUNS[index % len(RUNS)]
        scale = 1.0 if len(clocks) == 1 else 100 / _last(report)
        times, counts = _steps(report)
        times = [time * scale for time in times]
        axes.fill_between(times, 0, counts, step="post", color=colour, alpha=0.08, linewidth=0)
        (drawn[name],) = axes.step(times, counts, where="post", color=colour, linewidth=1.7)
        axes.plot(report.trace.peak.time * scale, report.peak, "o", color=colour, markersize=6, zorder=5)
        for row, count in enumerate((report.peak, report.saved)):
            at = row * (len(runs) + 0.9) + index
            bars.barh(at, count, height=0.8, color=colour)
            text = format_bytes(count) + ("" if report.finished else ", not finished")
            bars.text(count + 0.02 * most, at, text, va="center", fontsize=9, color=DARK)
    if len(clocks) == 1:
        _time_axis(axes, clocks == {"operators"}, last)
    else:
        axes.set_xlabel("percent of the step")
    axes.set_xlim(0, last if len(clocks) == 1 else 100)
    axes.set_ylim(0, 1.06 * most)
    _bytes_axis(axes.yaxis, most)
    axes.grid(axis="y", alpha=0.3, linewidth=0.8)
    axes.set_title("Memory over the step, dots at the peaks", loc="left", weight="bold", fontsize=11)
    middle = (len(runs) - 1) / 2
    bars.set_yticks([middle, middle + len(runs) + 0.9], ["peak", "saved for\nbackward"])
    bars.tick_params(axis="y", length=0)
    bars.set_ylim(2 * len(runs) + 0.5, -0.7)
    bars.set_xlim(0, (1.4 if all(report.finished for report in runs.values()) else 1.85) * most)
    _bytes_axis(bars.xaxis, most)
    for one in (axes, bars):
        _bare(one)
    _legend(figure, drawn, ncols=min(len(runs), 4))
    return _save(figure, path)
