"""What the figures share, by matplotlib (imported here when something is drawn, and nowhere else)."""

from __future__ import annotations

from typing import Any

COLOURS = {"stock": "#8d99a6", "patch_conv": "#e0a030", "ours": "#1f6fb4"}
FLOOR = "#222222"


def canvas(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure of this size in inches, and its axes in rows."""
    from patchconv_native.memory.plot import new_figure

    figure = new_figure(width, height)
    return figure, figure.subplots(rows, columns, squeeze=False)


def foot(figure: Any, data: dict[str, Any]) -> None:
    """Names the machine, and what is only a trial."""
    info = data["hardware"]
    what = info.get("gpu") or f"{info['cpu']}, {info['threads']} threads, {info['isa']}"
    text = f"{what}; torch {info['torch']}; {data['date']}"
    if data["size"] != "full":
        text += f"; size {data['size']}: a trial, not a measurement"
    figure.supxlabel(text, fontsize=7, color="#666666")


def bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def megapixels(axes: Any, measured: list[float]) -> None:
    """A logarithmic axis of image sizes, with those that were measured on it."""
    axes.set_xscale("log")
    at = sorted(set(measured))
    axes.set_xticks(at, [f"{pixels:.2g}" if pixels < 100 else f"{pixels:.0f}" for pixels in at])
    axes.minorticks_off()
    axes.set_xlabel("megapixels", fontsize=8)


def bars(axes: Any, names: list[str], label: str, room: float = 1.0) -> None:
    """Axes of horizontal bars from the top down, with `room` at the right for numbers."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(labelsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * room)
    axes.set_xlabel(label, fontsize=8)
    bare(axes)


def legend(figure: Any, colours: dict[str, str], floor: str = "") -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if floor:
        handles.append(Line2D([], [], color=FLOOR, lw=1.1, label=floor))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)


def save(figure: Any, path: Any) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white")
