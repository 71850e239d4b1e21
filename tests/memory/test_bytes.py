"""Numbers of bytes as text, and text as numbers of bytes."""

from __future__ import annotations

import math

import pytest
import torch

import patchconv_native as pc
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
    [
        *[("64MiB", 64 * MIB), (" 1.5 GiB ", 3 * GIB // 2), ("500MB", 5 * 10**8), ("12", 12), ("7 b", 7), (7, 7)],
        *[("64K", 64 * KIB), ("64M", 64 * MIB), ("64 g", 64 * GIB), ("2T", 2 * TIB), ("2TiB", 2 * TIB)],
        *[("2TB", 2 * 10**12), ("9007199254740993", 2**53 + 1), (1e9, 10**9), (torch.tensor(7), 7), (-1, -1)],
    ],
)
def test_parse(text: int | float | str, count: int) -> None:
    found = parse_bytes(text, "here")
    assert found == count and type(found) is int


def test_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    for number in (numpy.int32(64), numpy.uint64(64), numpy.float64(64), numpy.array(64)):
        assert parse_bytes(number, "here") == 64
    with pytest.raises(ValueError, match="here: expected a number of bytes"):
        parse_bytes(numpy.array([64, 64]), "here")
    assert type(parse_bytes(numpy.int64(64), "here")) is int
    assert pc.tile_plan(torch.nn.ReLU(), torch.zeros(1, 3, 20, 20), budget=numpy.int64(2**20)).budget == 2**20
    with pc.workspace_limit(numpy.int64(2**20)):
        assert pc.workspace_limit() == 2**20


@pytest.mark.parametrize(
    "text",
    [
        *["", "MiB", "1 PiB", "1 gig", "-1MiB", "1.MiB", "1e3", "9" * 400, True, 1.5, math.inf, math.nan, None, [1]],
        torch.tensor([1, 2]),
    ],
)
def test_parse_refuses(text: object) -> None:
    said = r"^here: expected a number of bytes such as 67108864, '64MiB' or '1\.5GiB', got "
    with pytest.raises(ValueError, match=said):
        parse_bytes(text, "here")  # type: ignore[arg-type]
