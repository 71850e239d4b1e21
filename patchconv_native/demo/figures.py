"""Draws demo.png, the picture of directions, and memory.png, memory over time.

In the picture of directions the hue of a pixel is the dominant direction of its lines, the brightness their strength.
The hues lie on a circle in the OKLCh colour space (Ottosson, 2020), where equal angles look equally different and all
hues equally bright.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from .._bytes import GIB, format_bytes
from . import filters, report
from .filters import Orientation
from .picture import Photo
from .report import NoResult, StageResult
from .worker import Outcome

DARK, LIGHT, DIM = "#0c0e13", "#eceff4", "#9aa3b2"
STOCK, OURS, FLOOR = "#d1495b", "#00798c", "#6b7280"
ZOOM = 0.2  # width of the close-up as a share of the picture's


@dataclass(frozen=True)
class Views:
    """What the picture of directions is drawn from."""

    whole: Orientation  # at 1/step of the picture's size
    step: int
    window: Orientation  # a window at the picture's own size
    place: tuple[int, int, int, int]  # where that is: top, left, height, width


def colours(direction: np.ndarray, brightness: np.ndarray) -> np.ndarray:
    """Directions in radians and brightnesses 0 to 1 as sRGB, float (h, w, 3)."""
    hue = 2 * direction + math.radians(20)
    lightness = 0.05 + 0.78 * brightness
    chroma = 0.18 * np.sqrt(brightness)
    a, b = chroma * np.cos(hue), chroma * np.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = np.stack(
        [
            4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
            -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
            -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
        ],
        axis=-1,
    ).clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def render(view: Orientation, strong: float) -> np.ndarray:
    """An orientation as a picture. Lines of strength `strong` are bright; stronger ones saturate slowly."""
    brightness = 1 - np.exp(-2 * view.strength() / max(strong, 1e-12))
    return colours(view.direction(), brightness)


def _shape(photo: Photo) -> float:
    """Height over width of the small pictures: that of the photograph, within limits."""
    return min(max(photo.size[0] / photo.size[1], 0.5), 1.2)


def choose_window(photo: Photo, whole: Orientation, step: int) -> tuple[int, int, int, int]:
    """The window for the close-up, as (top, left, height, width) in the picture.

    It lies around the photograph's focus if it has one. Otherwise it lies where lines are strong, keep their direction
    over some distance (unlike noise) and have many directions: where the lengths of the averaged orientations have a
    large sum, and the orientations themselves a small one.
    """
    cell = 4 * step
    width = max(1, round(photo.size[1] * ZOOM / cell))
    height = max(1, min(round(width * _shape(photo)), photo.size[0] // cell))
    if photo.focus is None:
        vectors = torch.from_numpy(np.stack([whole.real, whole.imag]))[None]
        vectors = vectors / torch.hypot(vectors[:, :1], vectors[:, 1:]).clamp(min=1e-12).sqrt()
        cells = torch.nn.functional.avg_pool2d(vectors, 4)
        cells = torch.nn.functional.avg_pool2d(cells, 5, stride=1, padding=2)
        together = torch.cat([torch.hypot(cells[:, :1], cells[:, 1:]), cells], dim=1)
        sums = torch.nn.functional.avg_pool2d(together, (height, width), stride=1)[0]
        interest = sums[0] - torch.hypot(sums[1], sums[2])
        row, column = divmod(int(interest.argmax()), interest.shape[1])
    else:
        row = int(photo.size[0] * photo.focus[0]) // cell - height // 2
        column = int(photo.size[1] * photo.focus[1]) // cell - width // 2
    return row * cell, column * cell, height * cell, width * cell


def draw_demo(file: Path, photo: Photo, views: Views, results: list[StageResult]) -> None:
    """Writes demo.png: the directions of the whole picture; below it the photograph, a window, the bank."""
    strong = float(np.quantile(views.whole.strength(), 0.99))
    top, left, height, width = views.place
    aspect = photo.size[0] / photo.size[1]
    across, gap, head, foot = 14.0, 0.14, 0.98, 0.4
    tile = (across - 5 * gap) / 4
    main, row = across * min(aspect, 1.1), tile * min(_shape(photo), 1.0)
    total = head + main + gap + row + foot
    figure = Figure(figsize=(across, total), dpi=144, facecolor=DARK)

    def panel(x: float, y: float, w: float, h: float, picture: np.ndarray | None = None) -> Axes:
        """Axes at inches from the top left corner, with a picture in them."""
        axes = figure.add_axes((x / across, 1 - (y + h) / total, w / across, h / total))
        axes.set_axis_off()
        if picture is not None:
            if picture.dtype != np.uint8:  # bytes are drawn much faster
                picture = (picture * 255 + 0.5).astype(np.uint8)
            axes.imshow(picture, interpolation="antialiased")
        return axes

    def text(words: str, x: float, y: float, **style: Any) -> None:
        figure.text(x / across, 1 - y / total, words, va="center", **style)

    text(_title(photo), 0.22, 0.34, color=LIGHT, fontsize=18, weight="bold")
    text(_subtitle(results), 0.22, 0.71, color=DIM, fontsize=11.5)
    hero = panel(0, head, across, main, render(views.whole, strong))
    _outline(hero, left / views.step, top / views.step, width / views.step, height / views.step)

    y = head + main + gap
    smaller = max(1, photo.size[1] // 1000)
    tiles = {
        "the photograph": _thumbnail(photo, smaller),
        "the marked window": photo.crop(*views.place),
        "its directions": render(views.window, strong),
        "the filters, and the colour of every direction": None,
    }
    for index, (name, picture) in enumerate(tiles.items()):
        x = gap + index * (tile + gap)
        axes = panel(x, y, tile, row, picture)
        text(name, x + tile / 2, y + row + foot / 2, color=DIM, fontsize=10.5, ha="center")
        if index == 0:
            _outline(axes, left / smaller, top / smaller, width / smaller, height / smaller)
        if picture is None:
            _draw_bank(axes)
    figure.savefig(file, facecolor=DARK, pil_kwargs={"compress_level": 3})


def _title(photo: Photo) -> str:
    return f"Every line in {report.megapixels(photo)}, coloured by its direction"


def _subtitle(results: list[StageResult]) -> str:
    bank = results[0]
    took = bank.ours.measured
    text = f"{bank.stage.description}: patchconv_native took {format_bytes(took.workspace)} "
    text += f"above input and result, {report.seconds(took.seconds)}"
    if isinstance(bank.stock, NoResult):
        return f"{text}; stock PyTorch: {bank.stock.what}"
    stock = bank.stock.measured
    return f"{text}; stock PyTorch {format_bytes(stock.workspace)}, {report.seconds(stock.seconds)}"


def _outline(axes: Axes, left: float, top: float, width: float, height: float) -> None:
    x, y = [left, left + width, left + width, left, left], [top, top, top + height, top + height, top]
    axes.plot(x, y, color="white", linewidth=1.4, scalex=False, scaley=False)


def _thumbnail(photo: Photo, step: int) -> np.ndarray:
    """The whole photograph at 1/step of its size."""
    height, width = photo.size[0] // step, photo.size[1] // step
    small = torch.from_numpy(photo.pixels).permute(2, 0, 1)[None].float()
    small = torch.nn.functional.interpolate(small, size=(height, width), mode="bilinear", antialias=True)
    return small[0].permute(1, 2, 0).byte().numpy()


def _draw_bank(axes: Axes) -> None:
    """The cosine and the sine filter of every direction in its colour, and a rosette of all directions."""
    bank = filters.gabor_bank()[:, 0].numpy()
    theta = filters.directions().numpy()
    gap, taps = 5, filters.TAPS
    sheet = np.zeros((2 * (2 * (taps + gap)), 4 * (taps + gap), 3))
    peak = np.abs(bank).max()
    for index in range(2 * filters.DIRECTIONS):
        phase, direction = divmod(index, filters.DIRECTIONS)
        row, column = 2 * (direction // 4) + phase, direction % 4
        brightness = (np.abs(bank[index]) / peak) ** 0.8
        tile = colours(np.full_like(brightness, theta[direction]), brightness)
        y, x = row * (taps + gap), column * (taps + gap)
        sheet[y : y + taps, x : x + taps] = tile
    axes.imshow(sheet, interpolation="antialiased", extent=(0, 4, 0, 4))
    angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    centre = np.array([6.0, 2.0])
    ray = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    segments = np.stack([centre + 0.45 * ray, centre + 1.7 * ray], axis=1)
    shades = colours(angles[None], np.full((1, angles.size), 0.9))[0]
    axes.add_collection(LineCollection(list(segments), colors=shades, linewidths=4))
    axes.set_xlim(-0.1, 7.9)
    axes.set_ylim(-0.05, 4.05)


def draw_memory(file: Path, photo: Photo, device: str, results: list[StageResult]) -> None:
    """Writes memory.png: one panel a stage, memory over time with either library, and its floor."""
    figure = Figure(figsize=(12, 4.9), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    where = "GPU memory allocated" if device == "cuda" else "resident memory"
    figure.suptitle(
        f"Memory while computing, {report.megapixels(photo)}, float32 ({where})", weight="bold", fontsize=13
    )
    for axes, result in zip(panels, results, strict=True):
        _draw_stage(axes, result)
    panels[0].set_ylabel("GiB: input, weights and all that came after")
    figure.savefig(file)


def _draw_stage(axes: Axes, result: StageResult) -> None:
    shapes = result.shapes
    given = shapes.input + shapes.weight
    runs = [("patchconv_native", OURS, result.ours)]
    if isinstance(result.stock, Outcome):
        runs.insert(0, ("stock PyTorch", STOCK, result.stock))
    longest = max(run.measured.seconds for _, _, run in runs)
    for name, colour, run in runs:
        took = run.measured
        times = np.array([point[0] for point in took.curve])
        used = (given + np.array([point[1] for point in took.curve])) / GIB
        axes.fill_between(times, 0, used, color=colour, alpha=0.10, linewidth=0)
        axes.plot(times, used, color=colour, linewidth=2, label=name, solid_joinstyle="round")
        at = int(used.argmax())
        peak = (given + took.peak) / GIB
        axes.plot(times[at], peak, "o", color=colour, markersize=5)
        axes.annotate(
            f"peak {peak:.2f} GiB: {format_bytes(took.workspace)} above the floor",
            (times[at], peak),
            xytext=(0, 7 if took.workspace > shapes.floor / 10 else 20),  # clear of the floor's label
            textcoords="offset points",
            ha="right" if times[at] > longest / 2 else "left",
            color=colour,
            fontsize=9.5,
            weight="bold",
            path_effects=[withStroke(linewidth=4, foreground="white")],
        )
    floor = shapes.floor / GIB
    axes.axhline(floor, color=FLOOR, linestyle="--", linewidth=1.2)
    axes.text(0, floor, " input + weights + result", color=FLOOR, fontsize=9, va="bottom")
    axes.axhline(given / GIB, color=FLOOR, linestyle=":", linewidth=1)
    axes.text(longest, given / GIB, "input + weights ", color=FLOOR, fontsize=9, va="bottom", ha="right")
    if isinstance(result.stock, NoResult):
        axes.text(
            0.5,
            0.6,
            f"stock PyTorch: {result.stock.what}",
            transform=axes.transAxes,
            ha="center",
            color=STOCK,
        )
    axes.set_title(result.stage.name, fontsize=11.5)
    axes.set_xlabel("seconds")
    axes.set_xlim(0, longest * 1.02)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.18)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="upper left", frameon=False, ncols=2)
