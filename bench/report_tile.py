"""The tables and the figure of what bench.tile and bench.tile_speed measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .drawing import COLOURS, bare, canvas, foot, megapixels
from .measure import MIB
from .tables import Row, Section, mib, spread, verdict

TITLES = {
    "features": "ResNet-18 features", "mobilenet": "MobileNetV2 features", "unet": "U-Net",
    "decoder": "AutoencoderKL decoder",
}  # fmt: skip
RIVAL = "diffusers' tiling"
TEXT = (
    "Float32, NCHW, batch 1, random weights, no gradients. Peak: the most that torch allocates in a call above the "
    "input, the parameters and the result. Process: how far the process's resident memory grew in that call, without "
    "the result. Time: the least of three calls (fewer where they take more than 30 s), each form in a process of its "
    "own, one after the other; planning is done in the call before them, but with files, where each call plans. The "
    "largest images are computed once, and that time includes planning and the counting of memory. (p): predicted, "
    "since stock does not fit. busy: other work ran on the machine meanwhile; alone it takes less time."
)


SPEED = (
    "Float32, batch 1, random weights, no gradients, no budget. Ratio: time of `pc.tile_modules(model)` in units of "
    "stock's, median (least to most) of rounds in turn. Peak: the most that torch allocates in a call above the "
    "input, the parameters and the result. Target: of the ratio, as set before this was measured. Kept: in a process "
    "that keeps the memory that is freed (mallopt: M_MMAP_MAX 0, M_TRIM_THRESHOLD 2 GiB), where the C library "
    "gives large blocks back, and every page of the next one costs a fault."
)


def speed(data: Row) -> Iterator[Section]:
    yield Section(
        SPEED,
        ["network", "side", "layout", "stock, s", "tile, s", "ratio", "target", "kept: stock, s", "tile, s", "ratio",
         "peak, MiB: stock", "tile"],
        [
            [
                row["net"], row["side"], row["layout"], f"{row['ms']['stock']['median'] / 1e3:.2f}",
                f"{row['ms']['tile']['median'] / 1e3:.2f}", spread(row["ratio"]["tile"]),
                "" if row["target"] is None
                else f"{row['target']} ({verdict(row['ratio']['tile']['median'] <= row['target'])})",
                f"{row['kept']['ms']['stock']['median'] / 1e3:.2f}",
                f"{row['kept']['ms']['tile']['median'] / 1e3:.2f}", spread(row["kept"]["ratio"]["tile"]),
                mib(row["peaks"]["stock"]), mib(row["peaks"]["tile"]),
            ]
            for row in data["rows"]
        ],
    )  # fmt: skip


def _pixels(row: Row) -> float:
    return float(row["side"] ** 2 / 1e6)


def sections(data: Row) -> Iterator[Section]:
    yield Section(TEXT)
    for case in dict.fromkeys(row["case"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["case"] == case]
        stock = {row["side"]: row for row in rows if row["form"] == "stock"}
        error = data["errors"].get(case, {})
        said = ", ".join(f"{form} {value:.3g}" for form, value in error.items())
        yield Section(
            f"Root mean square error against float64, in units of stock's own: {said}." if said else "",
            ["megapixels", "form", "peak, MiB", "process, MiB", "seconds", "of stock's"],
            [_line(row, stock.get(row["side"], {})) for row in rows],
            TITLES[case],
        )


def _line(row: Row, stock: Row) -> list[str]:
    line = [f"{_pixels(row):.1f}", row["form"] + ", busy" * row.get("busy", False)]
    if "peak" not in row:
        return [*line, row["error"], "", "", ""]
    seconds = row.get("seconds")
    of = f"{seconds / stock['seconds']:.2f}" if seconds and stock.get("seconds") else ""
    peak = mib(row["peak"]) + " (p)" * row.get("predicted", False)
    return [*line, peak, mib(row["process"]) if "process" in row else "", f"{seconds:.2f}" if seconds else "", of]


def figure(data: Row) -> Any:
    """Peaks against megapixels, a panel a network."""
    cases = list(dict.fromkeys(row["case"] for row in data["rows"]))
    drawn, places = canvas(1, len(cases), 4 * len(cases), 3.6)
    for axes, case in zip(places[0], cases, strict=True):
        rows = [row for row in data["rows"] if row["case"] == case and "peak" in row]
        for form in dict.fromkeys(row["form"] for row in rows):
            mine = list({row["side"]: row for row in rows if row["form"] == form}.values())
            colour = {"stock": COLOURS["stock"], RIVAL: COLOURS["patch_conv"]}.get(form, COLOURS["ours"])
            axes.plot(
                [_pixels(row) for row in mine], [row["peak"] / MIB for row in mine], marker="o", markersize=4,
                linestyle=":" if "," in form else "-", color=colour, label=form,
            )  # fmt: skip
            for one in (one for one in mine if one.get("predicted")):
                axes.plot(_pixels(one), one["peak"] / MIB, marker="o", markersize=6, color="white", mec=colour)
        axes.set_yscale("log")
        megapixels(axes, [_pixels(row) for row in rows])
        axes.set_title(TITLES[case], fontsize=9)
        axes.legend(fontsize=7, frameon=False)
        bare(axes)
    places[0][0].set_ylabel("peak, MiB (hollow: predicted)", fontsize=8)
    foot(drawn, data)
    return drawn


def lightstream(data: Row) -> Iterator[Section]:
    yield Section(
        "ResNet-18's features to layer4 in float32, NCHW, batch 1, norms frozen, without gradients. Peak: MiB above "
        "the parameters, the image and the result. Error: the largest difference from float64, in units of stock's. "
        "Time in units of stock's, in turn. `pc.tile` gets lightstream's peak as its budget, and a quarter of it. "
        f"lightstream's backward pass on this CPU: {data['rows'][-1]['backward']}"
    )
    yield Section(
        "",
        ["image", "form", "budget, MiB", "peak, MiB", "error", "time"],
        [
            [
                f"{row['side']}x{row['side']}",
                form + (f", tiles of {row['tile']}x{row['tile']}" if form == "lightstream" else ""),
                mib(row["budgets"][form]) if form in row["budgets"] else "", mib(peak),
                f"{row['errors'][form] / row['errors']['stock']:.2f}", spread(row["ratio"].get(form)),
            ]
            for row in data["rows"]
            for form, peak in row["peaks"].items()
        ],
    )  # fmt: skip
