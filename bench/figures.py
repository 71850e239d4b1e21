"""The figures of results files, by matplotlib (imported here when something is drawn, and nowhere else)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import report_article, report_spatial, report_xray
from .measure import GIB

COLOURS = {"stock": "#8d99a6", "patch_conv": "#e0a030", "ours": "#1f6fb4"}
FUSED = {"cudnn_convolution_relu": "#b56576", "cudnn front end": "#6d597a"}  # rivals of fused convolutions
LEAN_COLOURS = {"memsave": "#e0a030", "convert": "#7fb2dc", "functional": "#1f6fb4"}
FLOOR = "#222222"
DPI = 130
PASS_TITLES = {"fprop": "forward", "dgrad": "gradient of the input", "wgrad": "gradient of the weight"}
PASS_TITLES["backward"] = "whole backward"


def draw(data: dict[str, Any], path: Path) -> Path | None:
    """The figure of a results file, at `path`; None for a kind that has none, or while there is no data."""
    makers = {"conv_memory": conv_memory, "conv_speed": conv_speed, "padding": padding, "lean": lean, "gpu": gpu}
    makers |= {"article": report_article.figure, "xray": report_xray.figure, "spatial": report_spatial.figure}
    maker = makers.get(data["bench"])
    figure = maker(data) if maker else None
    if figure is None:
        return None
    figure.savefig(path, dpi=DPI, bbox_inches="tight", facecolor="white")
    return path


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    # Without pyplot: no window system, and nothing kept open.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _foot(figure: Any, data: dict[str, Any]) -> None:
    info = data["hardware"]
    what = info.get("gpu") or f"{info['cpu']}, {info['threads']} threads, {info['isa']}"
    text = f"{what}; torch {info['torch']}; {data['date']}"
    if data["size"] != "full":
        text += f"; size {data['size']}: a trial, not a measurement"
    figure.supxlabel(text, fontsize=7, color="#666666")


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def conv_memory(data: dict[str, Any]) -> Any:
    """Bars of all memory in use at the peak; across them the floor: input, weight and result."""
    rows = data["rows"]
    if not any("workspace" in row for row in rows):
        return None
    passes = [p for p in PASS_TITLES if any(row["pass"] == p for row in rows)]
    groups = list(dict.fromkeys((row["name"], row["layout"]) for row in rows))
    figure, axes = _figure(1, len(passes), 2.6 + 3.6 * len(passes), 1.4 + 0.62 * len(groups))
    for column, pass_ in enumerate(passes):
        ax = axes[0][column]
        for place, group in enumerate(groups):
            mine = [r for r in rows if (r["name"], r["layout"]) == group and r["pass"] == pass_]
            for offset, row in zip(
                (-0.27, 0.0, 0.27),
                sorted(mine, key=lambda row: list(COLOURS).index(row["implementation"])),
                strict=False,
            ):
                # Every pass holds one tensor of the input's size and one of the output's.
                floor = (row["input_bytes"] + row["output_bytes"]) / GIB
                if "error" in row:
                    ax.text(0, place + offset, f" {row['error']}", va="center", fontsize=6.5)
                    continue
                total = floor + row["workspace"] / GIB
                ax.barh(place + offset, total, 0.25, color=COLOURS[row["implementation"]])
                extra = row["workspace"] / 2**20
                text = f"+{extra / 1024:.2f} GiB" if extra >= 1000 else f"+{extra:.0f} MiB"
                ax.text(total, place + offset, f" {text}", va="center", fontsize=6.5)
                ax.plot([floor, floor], [place - 0.42, place + 0.42], color=FLOOR, lw=1.1)
        ax.set_title(PASS_TITLES[pass_], fontsize=9)
        ax.set_yticks(range(len(groups)), [f"{name}\n{layout}" for name, layout in groups] if column == 0 else [])
        ax.tick_params(labelsize=7)
        ax.invert_yaxis()
        ax.set_xlim(0, ax.get_xlim()[1] * 1.2)
        ax.set_xlabel("GiB at the peak", fontsize=8)
        _bare(ax)
    _legend(
        figure,
        [side for side in COLOURS if any(r["implementation"] == side for r in rows)],
        "floor: input + weight + result",
    )
    _foot(figure, data)
    return figure


def _legend(figure: Any, sides: list[str], floor: str | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=(COLOURS | FUSED)[side], label=side) for side in sides]
    if floor:
        handles.append(Line2D([], [], color=FLOOR, lw=1.1, label=floor))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)


def conv_speed(data: dict[str, Any]) -> Any:
    """Time in units of stock's: medians of the pairs, with the range of the pairs, and the target of each."""
    passes = list(dict.fromkeys(row["pass"] for row in data["rows"]))
    if not passes:
        return None
    groups = [(r["name"], r["layout"], s) for r in data["rows"] if r["pass"] == passes[0] for s in r["targets"]]
    figure, axes = _figure(1, len(passes), 2.8 + 2.6 * len(passes), 1.3 + 0.42 * len(groups))
    for column, pass_ in enumerate(passes):
        ax = axes[0][column]
        for place, (name, layout, side) in enumerate(groups):
            row = next(
                (r for r in data["rows"] if (r["name"], r["layout"], r["pass"]) == (name, layout, pass_)),
                None,
            )
            if row is None:
                continue
            ratio, target = row["ratio"][side], row["targets"][side]
            reach = [[ratio["median"] - ratio["least"]], [ratio["most"] - ratio["median"]]]
            ax.barh(place, ratio["median"], 0.6, color=COLOURS["ours"], alpha=1.0 if side == "ours" else 0.6)
            ax.errorbar(ratio["median"], place, xerr=reach, color=FLOOR, lw=0.8, capsize=2)
            ax.plot([target, target], [place - 0.42, place + 0.42], color="#c0392b", lw=1.4)
            ax.text(0.02, place, f"{ratio['median']:.2f}", va="center", fontsize=7, color="white")
        ax.axvline(1, color=COLOURS["stock"], lw=1, ls=":")
        ax.set_title(PASS_TITLES[pass_], fontsize=9)
        ax.set_yticks(range(len(groups)), [f"{n}\n{la}, {s}" for n, la, s in groups] if column == 0 else [])
        ax.tick_params(labelsize=7)
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.set_xlabel("time / stock's (red: target)", fontsize=8)
        _bare(ax)
    _foot(figure, data)
    return figure


def padding(data: dict[str, Any]) -> Any:
    """Maps of how many times slower stock is, by kernel and columns of padding; rows of maps by threads."""
    rows = [row for row in data["rows"] if row["direction"] == "columns" and not row["large"]]
    if not rows:
        return None
    import matplotlib
    from matplotlib.colors import LogNorm

    threads = sorted({row["threads"] for row in rows})
    channels = sorted({row["channels"] for row in rows})
    kernels, widths = sorted({row["kernel"] for row in rows}), sorted({row["padding"] for row in rows})
    most = max(10.0, max(row["stock_over_ours"]["median"] for row in rows))
    width = 1.2 + 0.42 * len(widths) * len(channels)
    figure, axes = _figure(len(threads), len(channels), width, 0.6 + len(threads) * (1 + 0.3 * len(kernels)))
    norm = LogNorm(1 / most, most)
    image: Any = None
    for line, used in zip(axes, threads, strict=True):
        for ax, count in zip(line, channels, strict=True):
            mine = [row for row in rows if (row["threads"], row["channels"]) == (used, count)]
            if not mine:
                ax.set_visible(False)
                continue
            cells = {(row["kernel"], row["padding"]): row["stock_over_ours"]["median"] for row in mine}
            values = [[cells.get((k, w), float("nan")) for w in widths] for k in kernels]
            image = ax.imshow(values, cmap=matplotlib.colormaps["RdYlBu_r"], norm=norm, aspect="auto")
            for (kernel, columns), value in cells.items():
                text = f"{value:.0f}" if value >= 9.5 else f"{value:.1f}"
                colour = "white" if value > most**0.6 else "black"
                place = widths.index(columns), kernels.index(kernel)
                ax.text(*place, text, ha="center", va="center", fontsize=6, color=colour)
            many = "1 thread" if used == 1 else f"{used or data['hardware']['threads']} threads"
            ax.set_title(f"{count} channel{'s' if count > 1 else ''} to {data['outputs']}, {many}", fontsize=9)
            ax.set_xticks(range(len(widths)), widths)
            ax.set_yticks(range(len(kernels)), kernels)
            ax.set_xlabel("columns of padding", fontsize=8)
            ax.tick_params(labelsize=7)
        line[0].set_ylabel("kernel", fontsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("stock's time / ours", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    _foot(figure, data)
    return figure


def lean(data: dict[str, Any]) -> Any:
    """Bars of what training keeps, in units of stock's: models, and the cases of memsave's paper."""
    panels = [([(row["model"], row) for row in data["floors"]], "everything trained, batch 2", True)]
    cases = [row for row in data["cases"] if row["batch"] == max(r["batch"] for r in data["cases"])]
    if cases:
        named = [(f"{row['model']}\n{row['case']}", row) for row in cases]
        panels.append((named, f"memsave's cases, batch {cases[0]['batch']}", False))
    longest = max(len(rows) for rows, _, _ in panels)
    figure, axes = _figure(1, len(panels), 5.2 * len(panels), 1.2 + 0.52 * longest)
    for ax, (rows, title, floors) in zip(axes[0], panels, strict=True):
        for place, (_, row) in enumerate(rows):
            sides = [side for side in LEAN_COLOURS if side in row and "error" not in row[side]]
            for line, side in enumerate(sides):
                value = row[side]["held"] / row["stock"]["held"]
                at = place + (line - (len(sides) - 1) / 2) * 0.28
                ax.barh(at, value, 0.26, color=LEAN_COLOURS[side])
                ax.text(value, at, f" {value:.2f}", va="center", fontsize=6)
            if floors:
                ax.plot([row["floor"]] * 2, [place - 0.42, place + 0.42], color=FLOOR, lw=1.1)
        ax.axvline(1, color=COLOURS["stock"], lw=1, ls=":")
        ax.set_yticks(range(len(rows)), [name for name, _ in rows])
        ax.tick_params(labelsize=7)
        ax.invert_yaxis()
        ax.set_title(title, fontsize=9)
        ax.set_xlabel(
            "bytes kept for backward / stock's" + (" (line: the floor aimed at)" if floors else ""), fontsize=8
        )
        _bare(ax)
    used = [side for side in LEAN_COLOURS if any(side in row for rows, _, _ in panels for _, row in rows)]
    _lean_legend(figure, used)
    _foot(figure, data)
    return figure


def _lean_legend(figure: Any, sides: list[str]) -> None:
    from matplotlib.patches import Patch

    names = {"memsave": "memsave_torch", "convert": "convert(model)", "functional": "convert(model, functional=True)"}
    handles = [Patch(color=LEAN_COLOURS[side], label=names[side]) for side in sides]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)


def fused_bars(rows: list[dict[str, Any]], most: int = 8) -> list[dict[str, Any]]:
    """A bar a way that was timed, of the forward passes of the first cases."""
    chosen = [row for row in rows if row["pass"] == "fprop" and "sides" in row]
    cases = list(dict.fromkeys((row["name"], row["dtype"]) for row in chosen))[:most]
    return [
        {"name": f"{row['name']} {row['dtype']}", "variant": f"{side} {row['layout']}", "layout": row["layout"],
         "implementation": side.partition(",")[0], "floor_ms": row.get("floor_ms"), "ms": found["ms"]}
        for row in chosen if (row["name"], row["dtype"]) in cases
        for side, found in row["sides"].items() if "ms" in found
    ]  # fmt: skip


def gpu(data: dict[str, Any]) -> Any:
    """Memory at the peak and time of the forward pass, each case a group of bars; and of fused convolutions."""
    memory = [row for row in data.get("memory", []) if row["pass"] == "fprop"]
    speed = [row for row in data.get("speed", []) if row["pass"] == "fprop"]
    fused = fused_bars(data.get("convs", {}).get("rows", []))
    kinds = ((memory, "memory"), (speed, "speed"), (fused, "fused"))
    panels = [(rows, kind) for rows, kind in kinds if rows]
    if not panels:
        return None
    longest = max(len({row["name"] for row in rows}) for rows, _ in panels)
    figure, axes = _figure(1, len(panels), 7.5 * len(panels), 1.6 + 0.95 * longest)
    for ax, (rows, kind) in zip(axes[0], panels, strict=True):
        names = list(dict.fromkeys(row["name"] for row in rows))
        variants = list(dict.fromkeys(row["variant"] for row in rows))
        step = 0.84 / len(variants)
        for place, name in enumerate(names):
            for row in (r for r in rows if r["name"] == name):
                floor = row["floor_bytes"] / GIB if kind == "memory" else row["floor_ms"]
                at = place - 0.42 + step * (variants.index(row["variant"]) + 0.5)
                colour = (COLOURS | FUSED)[row["implementation"]]
                if "error" in row:
                    ax.text(
                        0,
                        at,
                        f" {row['variant']}: {row['error'][:40]}",
                        va="center",
                        fontsize=5,
                        color="#c0392b",
                    )
                    continue
                value = floor + row["workspace"] / GIB if kind == "memory" else row["ms"]["median"]
                ax.barh(at, value, step * 0.9, color=colour, alpha=1.0 if row["layout"] == "NCHW" else 0.65)
                ax.text(value, at, f" {row['variant']} {value:.2f}", va="center", fontsize=5)
                if floor is None:  # of no H100
                    continue
                ax.plot([floor, floor], [place - 0.45, place + 0.45], color=FLOOR, lw=1)
        ax.set_yticks(range(len(names)), names)
        ax.tick_params(labelsize=7)
        ax.invert_yaxis()
        ax.set_xlim(0, ax.get_xlim()[1] * 1.15)
        names_of = {"memory": "GiB at the peak", "speed": "ms", "fused": "ms, with bias and ReLU in one call"}
        ax.set_xlabel(names_of[kind], fontsize=8)
        _bare(ax)
    _legend(figure, [*COLOURS, *(FUSED if fused else ())], "floor (paler: channels_last)")
    _foot(figure, data)
    return figure
