"""Numbers of bytes as text, and text as numbers of bytes."""

from __future__ import annotations

import pytest

from patchconv_native._bytes import GIB, KIB, MIB, TIB, byte_unit, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *[(0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (45 * MIB, "45 MiB")],
        *[(1000 * MIB, "1000 MiB"), (1024 * MIB - 1, "1 GiB"), (1234 * MIB, "1.21 GiB"), (3 * TIB, "3 TiB")],
        *[(-5 * MIB, "-5 MiB"), (12345 * TIB, "12345 TiB")],
    ],
)
def test_format(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_the_unit_of_an_axis() -> None:
    assert [byte_unit(count) for count in (0, 999, KIB, 3 * MIB, 1.5 * GIB, 1e15)] == [
        *[(1, "B"), (1, "B"), (KIB, "KiB"), (MIB, "MiB"), (GIB, "GiB"), (TIB, "TiB")]
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [("64MiB", 64 * MIB), (" 1.5 GiB ", 3 * GIB // 2), ("500MB", 5 * 10**8), ("12", 12), ("7 b", 7), (7, 7), (-1, -1)],
)
def test_parse(text: int | str, count: int) -> None:
    assert parse_bytes(text, "here") == count


@pytest.mark.parametrize("text", ["", "MiB", "1 PiB", "-1MiB", "1.MiB", "1e3", True, 1.5, None])
def test_parse_refuses(text: object) -> None:
    said = r"^here: expected a number of bytes such as 67108864, '64MiB' or '1\.5GiB', got "
    with pytest.raises(ValueError, match=said):
        parse_bytes(text, "here")  # type: ignore[arg-type]
