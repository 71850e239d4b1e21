"""Draws demo.png, the pictures and what is wrong with blended tiles, and memory.png, memory over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .._bytes import GIB, MIB, format_bytes
from .network import STRIP_ROWS
from .picture import Photo
from .report import Results, megapixels, seconds
from .worker import as_bytes

DARK, LIGHT, DIM = "#0c0e13", "#eceff4", "#9aa3b2"
STOCK, OURS, FLOOR = "#d1495b", "#00798c", "#6b7280"
ACROSS = 14.0  # inches
SHRUNK, CLOSE = 1000, 400  # pixels, about: the width of a whole picture, of a close-up (so that noise averages out)
AMPLIFIED = 4  # the difference of two results
FLAT = 4 / 255  # a range that counts as none
FILLED, MOST_STRETCHED = 1.0, 8  # of the range, by what a close-up shows; the largest factor for that
SHOWN_AT = 0.45  # brightness of what is middling in a close-up
MOMENTS = 120  # of a memory curve, each with its highest sample

Place = tuple[int, int, int, int]  # of a window: top, left, height, width


def shrink(image: Any, step: int) -> np.ndarray:
    """An image of a file, (1, 3, H, W), at 1/step of its size: (h, w, 3), in its own values, as float32."""
    rows = max(1, STRIP_ROWS // step) * step
    height = image.shape[2] // step * step
    parts = []
    for top in range(0, height, rows):
        strip = torch.tensor(image[:, :, top : min(top + rows, height)]).float()
        parts.append(torch.nn.functional.avg_pool2d(strip, step))
    return torch.cat(parts, 2)[0].permute(1, 2, 0).numpy()


def close_ups(images: list[Any], place: Place) -> tuple[list[np.ndarray], int]:
    """A part of each image of a file, as bytes (h, w, 3), and how many times its contrast was stretched.

    All are stretched alike, around their common middle, so far that what is in them fills much of the range. The middle
    keeps its hue and gets the brightness SHOWN_AT.
    """
    top, left, height, width = place
    step = max(1, width // CLOSE)
    parts = [shrink(image[:, :, top : top + height, left : left + width], step).clip(0, 1) for image in images]
    low, high = np.percentile(np.stack(parts), (1, 99), axis=(0, 1, 2))
    factor = int(np.clip(FILLED / max(float((high - low).max()), 1e-6), 1, MOST_STRETCHED))
    middle = (low + high) / 2
    shown = middle * (SHOWN_AT / max(float(middle.mean()), 1e-6))
    return [as_bytes(shown + factor * (part - middle)) for part in parts], factor


def difference(blended: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """The signed difference of two pictures of values 0 to 1, amplified, on grey: as bytes."""
    return as_bytes(0.5 + AMPLIFIED * (blended.clip(0, 1) - ours.clip(0, 1)))


def choose_window(blended: np.ndarray, ours: np.ndarray, step: int, side: int, size: tuple[int, int]) -> Place:
    """The window for the close-up: flat in `ours`, with false tones in `blended`. It is several tiles wide.

    Both are at 1/step of the picture's size.
    """
    height, width = (min(part, whole) for part, whole in zip((3 * side // 2, 4 * side), size, strict=True))
    grey = torch.from_numpy(np.stack([blended, ours]).clip(0, 1).mean(3)).double()
    window = max(1, min(height // step, grey.shape[1])), max(1, min(width // step, grey.shape[2]))
    every = max(1, side // (4 * step))
    false = _deviation(grey[:1] - grey[1:], window, every)
    true = _range(grey[1:], window, every)
    row, column = divmod(int((false / (true + FLAT)).argmax()), false.shape[1])
    top, left = (
        min(at * every * step, whole - part)
        for at, whole, part in zip((row, column), size, (height, width), strict=True)
    )
    return top, left, height, width


def _deviation(values: Tensor, window: tuple[int, int], every: int) -> Tensor:
    """The standard deviation in each window of values (1, h, w)."""
    mean, square = (torch.nn.functional.avg_pool2d(part, window, every)[0] for part in (values, values**2))
    return (square - mean**2).clamp(min=0).sqrt()


def _range(values: Tensor, window: tuple[int, int], every: int) -> Tensor:
    """The largest value less the smallest in each window of values (1, h, w)."""
    highest, lowest = (torch.nn.functional.max_pool2d(sign * values, window, every)[0] for sign in (1, -1))
    return highest + lowest


class _Sheet:
    """A figure whose panels are placed in inches from the top left corner."""

    def __init__(self, height: float) -> None:
        self._height = height
        self.figure = Figure(figsize=(ACROSS, height), dpi=144, facecolor=DARK)

    def panel(self, picture: np.ndarray, x: float, y: float, width: float, height: float) -> Axes:
        place = (x / ACROSS, 1 - (y + height) / self._height, width / ACROSS, height / self._height)
        axes = self.figure.add_axes(place)
        axes.set_axis_off()
        axes.imshow(
            picture, interpolation="bilinear" if picture.shape[1] < SHRUNK // 2 else "antialiased", aspect="auto"
        )
        return axes

    def text(self, words: str, x: float, y: float, **style: Any) -> None:
        self.figure.text(x / ACROSS, 1 - y / self._height, words, va="center", **style)


def draw_demo(file: Path, photo: Photo, results: Results, dark: Any, ours: Any, blended: Any) -> None:
    """Writes demo.png: the picture before and after, blended tiles and their fault, and a seam close up."""
    step = max(1, photo.size[1] // SHRUNK)
    small = {"ours": shrink(ours, step), "blended": shrink(blended, step)}
    place = choose_window(small["blended"], small["ours"], step, results.side, photo.size)
    (near, near_blended), factor = close_ups([ours, blended], place)
    gap, label, head = 0.2, 0.42, 1.25
    wide = (ACROSS - 3 * gap) / 2
    high = wide * min(max(photo.size[0] / photo.size[1], 0.4), 1.2)
    close = wide * place[2] / place[3]
    sheet = _Sheet(head + 2 * (high + label) + close + label + gap)
    sheet.text(_title(photo, results), gap, 0.4, color=LIGHT, fontsize=19, weight="bold")
    sheet.text(_subtitle(results), gap, 0.87, color=DIM, fontsize=12)
    side = results.side
    rows = [
        (high, "the input: dark and noisy", as_bytes(shrink(dark, step) / 255)),
        (high, f"pc.tile: no seams, {format_bytes(results.ours.peak)}", as_bytes(small["ours"])),
        (high, f"the usual way: tiles of {side} x {side}, blended", as_bytes(small["blended"])),
        (high, f"its error, {AMPLIFIED} times (grey: none)", difference(small["blended"], small["ours"])),
        (close, f"pc.tile, the marked part, brighter, contrast x {factor}", near),
        (close, f"blended tiles, the marked part, brighter, contrast x {factor}", near_blended),
    ]
    y = head
    for index, (tall, name, picture) in enumerate(rows):
        x = gap + index % 2 * (wide + gap)
        sheet.text(name, x, y + label / 2, color=LIGHT, fontsize=13)
        axes = sheet.panel(picture, x, y + label, wide, tall)
        if index in (1, 2, 3):
            _outline(axes, *(length / step for length in place))
        y += (tall + label) * (index % 2)
    sheet.figure.savefig(file, facecolor=DARK, pil_kwargs={"compress_level": 3})


def _title(photo: Photo, results: Results) -> str:
    budget, need = format_bytes(results.budget), format_bytes(results.stock_peak)
    return f"A whole network on {megapixels(photo.size)} in {budget}: one stock call needs {need}"


def _subtitle(results: Results) -> str:
    apart = results.apart
    return (
        f"pc.tile: largest difference from one call {results.compared.levels} of 255 levels. Blended tiles: up to "
        f"{apart.largest:.0f} levels, {apart.mean:.1f} on average: a norm over a tile does not see the picture."
    )


def _outline(axes: Axes, top: float, left: float, height: float, width: float) -> None:
    x, y = [left, left + width, left + width, left, left], [top, top, top + height, top + height, top]
    axes.plot(x, y, color="white", linewidth=1.4, scalex=False, scaley=False)


def draw_memory(file: Path, photo: Photo, device: str, results: Results) -> None:
    """Writes memory.png: memory over time beside what one stock call needs, and the same close up."""
    figure = Figure(figsize=(12, 4.9), dpi=150, layout="constrained")
    far, near = figure.subplots(1, 2)
    where = "GPU memory allocated" if device == "cuda" else "growth of the process"
    figure.suptitle(
        f"Memory: a whole network on {megapixels(photo.size)}, float32 ({where})", weight="bold", fontsize=13
    )
    need, budget = results.stock_peak / GIB, results.budget / MIB
    _curve(far, results, GIB)
    far.axhline(need, color=STOCK, linewidth=2, linestyle="--")
    words = f"one stock call: {format_bytes(results.stock_peak)} (predicted; not run)"
    far.text(0, need, f" {words}", color=STOCK, fontsize=11, weight="bold", va="bottom")
    words = f"pc.tile: {format_bytes(results.ours.peak)} (measured), {seconds(results.ours.seconds)}"
    far.text(0, results.ours.peak / GIB + need / 40, f" {words}", color=OURS, fontsize=11, weight="bold", va="bottom")
    far.set_ylim(0, need * 1.12)
    far.set_ylabel("GiB")
    far.set_title("beside one call of stock PyTorch", fontsize=11.5)
    _curve(near, results, MIB)
    near.axhline(budget, color=FLOOR, linewidth=1.4, linestyle="--")
    near.text(0, budget, f" the budget: {format_bytes(results.budget)}", color=FLOOR, fontsize=11, va="bottom")
    time, peak = max(_highest(results.ours.curve), key=lambda point: point[1])
    beyond = time > results.ours.seconds / 2
    words = f" peak: {format_bytes(results.ours.peak)} "
    near.plot(time, peak / MIB, "o", color=OURS)
    near.text(
        time, peak / MIB, words, color=OURS, fontsize=11, weight="bold", ha="right" if beyond else "left", va="bottom"
    )
    near.set_ylim(0, max(budget, results.ours.peak / MIB) * 1.15)
    near.set_ylabel("MiB")
    near.set_title("pc.tile close up: the highest of each moment, and its budget", fontsize=11.5)
    figure.savefig(file)


def _highest(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most MOMENTS points of a curve: the highest of each moment, those of equal length."""
    last = max(curve[-1][0], 1e-9)
    highest: dict[int, tuple[float, int]] = {}
    for point in curve:
        moment = min(int(point[0] / last * MOMENTS), MOMENTS - 1)
        if moment not in highest or point[1] > highest[moment][1]:
            highest[moment] = point
    return list(highest.values())


def _curve(axes: Axes, results: Results, unit: int) -> None:
    took = results.ours
    times, used = np.array(_highest(took.curve)).T
    axes.fill_between(times, 0, used / unit, color=OURS, alpha=0.15, linewidth=0)
    axes.plot(times, used / unit, color=OURS, linewidth=1.8)
    axes.set_xlabel("seconds")
    axes.set_xlim(0, took.seconds * 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
