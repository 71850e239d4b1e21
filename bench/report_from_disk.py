"""The table of what bench.from_disk measured."""

from __future__ import annotations

from collections.abc import Iterator

from .measure import MIB
from .tables import Row, Section, mib

TITLES = {
    "read": "a plain read of the file", "means": "means of 32x32 pixels, into a file",
    "features": "ResNet-18's features, into a file",
}  # fmt: skip


def sections(data: Row) -> Iterator[Section]:
    side, count = data["side"], data["bytes"]
    yield Section(
        f"(1, 3, {side}, {side}), bytes in a .npy file of {count / MIB:.0f} MiB; `pc.tile` reads numpy.memmap and "
        f"writes numpy.memmap, budget {data['budget']}, float32. Process: how far the process's resident memory grew "
        "above libraries and model, pages of the files included. Difference: the largest one "
        "from stock's call on 1024 rows and columns of the middle, of the largest value there."
    )
    yield Section("", ["", "process, MiB", "seconds", "megapixels/s", "MiB/s", "difference"], map(_line, _with(data)))


def _with(data: Row) -> list[Row]:
    return [row | {"side": data["side"], "bytes": data["bytes"]} for row in data["rows"]]


def _line(row: Row) -> list[str]:
    seconds = row["seconds"]
    return [
        TITLES[row["case"]], mib(row["process"]) if "process" in row else "", f"{seconds:.1f}",
        f"{row['side'] ** 2 / 1e6 / seconds:.1f}", f"{row['bytes'] / MIB / seconds:.0f}",
        f"{row['difference']:.1e}" if "difference" in row else "",
    ]  # fmt: skip
