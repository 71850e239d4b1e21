"""Tables of what kernels do, counted without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .tables import Section


def sections(data: dict[str, Any]) -> Iterator[Section]:
    yield Section(
        "Of PTX for sm_80. Counts, not times; not measured on a GPU. `others`: instructions of a warp that are no "
        "product of matrices, for 16 that are, as PTX has them. `machine`: how many of sm_80's machine code there are "
        "for one of PTX, over the whole kernel. `shared` and `sectors`: how long shared memory is busy, and sectors of "
        "global memory, in units of the least. `binds`: which part of a multiprocessor is busy longest, and in the "
        "last column how long its tensor cores are busy in units of it."
    )
    for arch in dict.fromkeys(layer["arch"] for layer in data["counts"]):
        layers = [layer for layer in data["counts"] if layer["arch"] == arch]
        products = [_products(layer, row) for layer in layers for row in layer["kernels"] if row["matrices"]]
        head = [
            "layer",
            "kernel",
            "mma",
            "of them needed",
            "others",
            "machine",
            "shared",
            "sectors",
            "barriers",
            "binds",
            "tensor cores",
        ]
        yield Section("Kernels that multiply matrices.", head, products, title=arch)
        others = [_other(layer, row) for layer in layers for row in layer["kernels"] if not row["matrices"]]
        yield Section(
            "Other kernels.", ["layer", "kernel", "instructions", "machine", "shared", "sectors", "binds"], others
        )


def _products(layer: dict[str, Any], row: dict[str, Any]) -> list[object]:
    passes = 3 if "<float, true" in row["kernel"] else 1  # products of tf32 for one of float32, computed strictly
    return [
        layer["layer"], f"`{row['kernel']}`", row["matrices"], f"{layer['products'] * passes / row['products']:.2f}",
        f"{16 * row['instructions'] / row['matrices']:.0f}", _machine(row),
        _ratio(row["wavefronts"], row["least_wavefronts"]),
        _ratio(row["sectors"], row["least_sectors"]), row["barriers"], row["binds"],
        f"{row['busy']['tensor cores'] / row['busy'][row['binds']]:.2f}",
    ]  # fmt: skip


def _other(layer: dict[str, Any], row: dict[str, Any]) -> list[object]:
    return [
        layer["layer"], f"`{row['kernel']}`", f"{row['instructions']:.0f}", _machine(row),
        _ratio(row["wavefronts"], row["least_wavefronts"]),
        _ratio(row["sectors"], row["least_sectors"]), row["binds"],
    ]  # fmt: skip


def _machine(row: dict[str, Any]) -> str:
    return f"{row['machine']:.2f}" if row["machine"] else ""


def _ratio(what: int, least: int) -> str:
    return f"{what / least:.2f}" if least else ""
