"""Numbers of bytes, written for a reader and read from text. Needs Python alone, so that every module may import it."""

from __future__ import annotations

import contextlib
import operator
import re
from fractions import Fraction
from typing import SupportsIndex

KIB, MIB, GIB, TIB = (2 ** (10 * power) for power in (1, 2, 3, 4))

_PARSED = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _PARSED |= {_letter: 2 ** (10 * _power), f"{_letter}ib": 2 ** (10 * _power), f"{_letter}b": 10 ** (3 * _power)}


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


def parse_bytes(value: SupportsIndex | float | str, what: str) -> int:
    """The number of bytes in text such as "64MiB", "1.5 GiB" or "500MB"; a whole number is returned as an int.

    Units, in small or capital letters: KiB, MiB, GiB, TiB and their short forms K, M, G, T are powers of 1024; KB, MB,
    GB, TB powers of 1000. Numbers may be numpy's, and floats that are whole, as 1e9 is. A float that is not whole is
    refused: it is often a number of GiB. Raises ValueError for anything else, in a message that begins with `what`.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*", value)
        if match is not None and match[2].lower() in _PARSED:
            return int(Fraction(match[1]) * _PARSED[match[2].lower()])
    elif isinstance(value, float):
        if value.is_integer():
            return int(value)
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise ValueError(f"{what}: expected a number of bytes such as 67108864, '64MiB' or '1.5GiB', got {value!r}")
