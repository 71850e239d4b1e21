"""Tables and figures of what was measured of single convolutions on the CPU, of calls, and of ResNet-18."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .drawing import COLOURS, FLOOR, bars, canvas, foot, legend
from .measure import GIB, MIB
from .tables import Row, Rows, Section, mib, spread, verdict

PASS_TITLES = {"fprop": "forward", "dgrad": "gradient of the input", "wgrad": "gradient of the weight",
               "backward": "whole backward"}  # fmt: skip


def conv_memory(data: Row) -> Iterator[Section]:
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in data["rows"]:
        groups.setdefault((row["name"], row["layout"], row["pass"]), {})[row["implementation"]] = row
    lines = []
    for case, sides in groups.items():
        one = next(iter(sides.values()))
        ours = sides.get("ours", {})
        lines.append(
            [
                *case, f"{one['input_bytes'] / GIB:.2f}",
                *(_workspace(sides.get(side)) for side in ("stock", "patch_conv", "ours")),
                f"{ours['tiles']} ({ours['path']})" if "tiles" in ours else "",
                verdict(ours["pass_bound"]) if "pass_bound" in ours else "",
            ]
        )  # fmt: skip
    yield Section(
        "Peak above input, weight and result, MiB. dgrad, wgrad: gradient of the input, of the weight.",
        ["case", "layout", "pass", "input GiB", "stock", "patch_conv", "ours", "tiles",
         f"<= {data['bound'] // MIB} MiB"],
        lines,
    )  # fmt: skip


def _workspace(row: Row | None) -> str:
    return "" if row is None else row.get("error") or mib(row["workspace"], 1)


def conv_memory_figure(data: Row) -> Any:
    """Bars of all memory in use at the peak; across them the floor: input, weight and result."""
    from patchconv_native._bytes import format_bytes

    rows = data["rows"]
    if not any("workspace" in row for row in rows):
        return None
    passes = [p for p in PASS_TITLES if any(row["pass"] == p for row in rows)]
    groups = list(dict.fromkeys((row["name"], row["layout"]) for row in rows))
    figure, axes = canvas(1, len(passes), 2.6 + 3.6 * len(passes), 1.4 + 0.62 * len(groups))
    for column, pass_ in enumerate(passes):
        ax = axes[0][column]
        for place, group in enumerate(groups):
            mine = [r for r in rows if (r["name"], r["layout"]) == group and r["pass"] == pass_]
            mine.sort(key=lambda row: list(COLOURS).index(row["implementation"]))
            for offset, row in zip((-0.27, 0.0, 0.27), mine, strict=False):
                # Every pass holds one tensor of the input's size and one of the output's.
                floor = (row["input_bytes"] + row["output_bytes"]) / GIB
                if "error" in row:
                    ax.text(0, place + offset, f" {row['error']}", va="center", fontsize=6.5)
                    continue
                total = floor + row["workspace"] / GIB
                ax.barh(place + offset, total, 0.25, color=COLOURS[row["implementation"]])
                ax.text(total, place + offset, f" +{format_bytes(row['workspace'])}", va="center", fontsize=6.5)
                ax.plot([floor, floor], [place - 0.42, place + 0.42], color=FLOOR, lw=1.1)
        ax.set_title(PASS_TITLES[pass_], fontsize=9)
        names = ["" if column else f"{name}\n{layout}" for name, layout in groups]
        bars(ax, names, "GiB at the peak", 1.2)
    sides = {side: colour for side, colour in COLOURS.items() if any(r["implementation"] == side for r in rows)}
    legend(figure, sides, "floor: input + weight + result")
    foot(figure, data)
    return figure


def conv_speed(data: Row) -> Iterator[Section]:
    yield Section(
        "Median (least to most) of paired rounds; ratio: ours in units of stock's time, round by round.",
        ["case", "layout", "pass", "stock ms", "side", "ms", "ratio", "target", "", "path"],
        [
            [
                row["name"], row["layout"], row["pass"], spread(row["ms"]["stock"], 0), side,
                spread(row["ms"][side], 0), spread(row["ratio"][side]), f"<= {target:.2f}",
                verdict(row["met"][side]), row["paths"][side],
            ]
            for row in data["rows"] for side, target in row["targets"].items()
        ],
    )  # fmt: skip


def conv_speed_figure(data: Row) -> Any:
    """Time in units of stock's: medians of the pairs, with the range of the pairs, and the target of each."""
    rows = {(r["name"], r["layout"], r["pass"]): r for r in data["rows"]}
    passes = list(dict.fromkeys(pass_ for _, _, pass_ in rows))
    if not passes:
        return None
    groups = [(*case[:2], side) for case, row in rows.items() if case[2] == passes[0] for side in row["targets"]]
    figure, axes = canvas(1, len(passes), 2.8 + 2.6 * len(passes), 1.3 + 0.42 * len(groups))
    for column, pass_ in enumerate(passes):
        ax = axes[0][column]
        for place, (name, layout, side) in enumerate(groups):
            row = rows.get((name, layout, pass_))
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
        names = ["" if column else f"{name}\n{layout}, {side}" for name, layout, side in groups]
        bars(ax, names, "time / stock's (red: target)")
    foot(figure, data)
    return figure


def overhead(data: Row) -> Iterator[Section]:
    yield Section(
        head=["module", "mode", "stock us", "ours us", "added", "added, of the least", f"<= {data['target']:.0f} us"],
        rows=[
            [
                row["name"], row["mode"], spread(row["us"]["stock"]), spread(row["us"]["ours"]),
                f"{row['added']['median']:.2f}", f"{row['added_least']:.2f}",
                verdict(row["met"]) if "met" in row else "",
            ]
            for row in data["rows"]
        ],
    )  # fmt: skip


def padding(data: Row) -> Iterator[Section]:
    yield Section(
        "Stock's time in units of ours: above 1, stock is slower. A cell marked t was computed in tiles; the "
        "others were handed to stock."
    )
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in data["rows"]:
        groups.setdefault((row["direction"], row["threads"], row["large"], row["channels"]), []).append(row)
    for (direction, threads, large, channels), rows in groups.items():
        widths, kernels = (sorted({row[key] for row in rows}) for key in ("padding", "kernel"))
        cells = {(row["kernel"], row["padding"]): row for row in rows}
        used = "one thread" if threads == 1 else f"{threads or data['hardware']['threads']} threads"
        size = f", {rows[0]['side']} squared" if large else ""
        yield Section(
            f"C={channels} to {data['outputs']}, padding of {direction}, {used}{size}",
            ["kernel", *map(str, widths)],
            [[kernel, *(_padding_cell(cells.get((kernel, width))) for width in widths)] for kernel in kernels],
        )
    if data["missing"]:
        yield Section(f"{data['missing']} cells were not reached in time.")


def _padding_cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['stock_over_ours']['median']:.3g}{' t' if row['path'] == 'tiled' else ''}"


def padding_figure(data: Row) -> Any:
    """Maps of how many times slower stock is, by kernel and columns of padding; rows of maps by threads."""
    rows = [row for row in data["rows"] if row["direction"] == "columns" and not row["large"]]
    if not rows:
        return None
    import matplotlib
    from matplotlib.colors import LogNorm

    threads, channels, kernels, widths = (
        sorted({row[key] for row in rows}) for key in ("threads", "channels", "kernel", "padding")
    )
    most = max(10.0, max(row["stock_over_ours"]["median"] for row in rows))
    width = 1.2 + 0.42 * len(widths) * len(channels)
    figure, axes = canvas(len(threads), len(channels), width, 0.6 + len(threads) * (1 + 0.3 * len(kernels)))
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
    foot(figure, data)
    return figure


def half(data: Row) -> Iterator[Section]:
    yield Section(
        "Stock's time in units of ours: above 1, stock is slower. 3x3, padding 1.",
        ["dtype", "multiplied by the processor", "case", "pass", "stock ms", "ours ms", "our path", "stock / ours",
         "rounds"],
        [
            [
                row["dtype"], "yes" if row["native"] else "no", row["name"], row["pass"], f"{row['ms']['stock']:.3f}",
                f"{row['ms']['ours']:.3f}", row["path"], spread(row["stock_over_ours"]), row["rounds"],
            ]
            for row in data["rows"]
        ],
    )  # fmt: skip


def resnet(data: Row) -> Iterator[Section]:
    yield Section(
        head=["mode", "batch", "stock ms", "ours ms", "ratio, median of pairs", "ratio of the least", "rounds",
              f"<= {data['target']}"],
        rows=[
            [
                row["mode"], row["batch"], spread(row["ms"]["stock"]), spread(row["ms"]["ours"]),
                f"{row['ratio']['ours']['median']:.4f}",
                f"{row['ms']['ours']['least'] / row['ms']['stock']['least']:.4f}",
                row["rounds"], verdict(row["met"]),
            ]
            for row in data["rows"]
        ],
    )  # fmt: skip
