"""Numbers of bytes, written for a reader and read from text. Needs nothing, so that every module may import it."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = (2 ** (10 * power) for power in (1, 2, 3, 4))

_PARSED = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def byte_unit(count: float) -> tuple[int, str]:
    """The unit in which to write `count` bytes, and its name: (2**20, "MiB").

    The largest in which three digits show at least 1: 1023.9 KiB is 1 MiB.
    """
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= 0.9995 * unit:
            return unit, name
    return 1, "B"


def format_bytes(count: float) -> str:
    """Bytes as three digits and a unit: "1.21 GiB", "45 MiB", "1000 KiB"."""
    unit, name = byte_unit(count)
    value = count / unit
    return f"{value:.3g} {name}" if abs(value) < 999.5 else f"{value:.0f} {name}"


def parse_bytes(value: int | str, what: str) -> int:
    """The number of bytes in text such as "64MiB", "1.5 GiB" or "500MB"; an int is returned as it is.

    Raises ValueError for anything else, in a message that begins with `what`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _PARSED:
        raise ValueError(f"{what}: expected a number of bytes such as 67108864, '64MiB' or '1.5GiB', got {value!r}")
    return int(float(match[1]) * _PARSED[match[2].lower()])
