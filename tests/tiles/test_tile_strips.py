"""Counting rows strip by strip (core/strips.h) against the rows that `Rows` keeps, and against a plain count."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from patchconv_native import _library
from patchconv_native.tiles.rows import Rows

strips = _library.load().strips
WIDTH = 3
"""Numbers of a row, in both."""


class Plain:
    """Rows of a value, each with the number of the piece that holds it."""

    def __init__(self, together: bool) -> None:
        self.together, self.piece, self.end, self.below = together, dict[int, int](), 0, 0

    @property
    def bytes(self) -> int:
        return len(self.piece) * WIDTH

    def add(self, length: int) -> int:
        self.piece.update(dict.fromkeys(range(self.end, self.end + length), self.end))
        self.end += length
        return length * WIDTH

    def room(self, length: int) -> int:
        rest = [row for row in self.piece if row >= self.below]
        if not 0 < 2 * len(rest) <= length:
            return 0
        self.piece = dict.fromkeys(range(rest[0], self.end + length), rest[0])
        self.end += length
        return self.bytes

    def copied(self, low: int, high: int, views: bool) -> int:
        if high <= self.end and all(row in self.piece for row in range(low, high)):
            holding = {self.piece[row] for row in range(low, high)}
            whole = [row for row, piece in self.piece.items() if piece in holding]
            if len(holding) == 1 and (views or self.together or whole == [*range(low, high)]):
                return 0
        return (high - low) * WIDTH

    def drop(self, below: int) -> tuple[int, int]:
        before, held, self.below = self.bytes, 0, below
        for piece in sorted(set(self.piece.values())):
            rows = [row for row in self.piece if self.piece[row] == piece]
            rest = [row for row in rows if row >= below]
            if not rest:
                self.piece = {row: one for row, one in self.piece.items() if one != piece}
                continue
            if len(rest) < len(rows) and 2 * len(rest) <= len(rows):
                held = len(rows) * WIDTH
                self.piece = {row: below if one == piece else one for row, one in self.piece.items() if row not in rows
                              or row >= below}  # fmt: skip
            break
        return before - self.bytes, held


def plain_peak(steps: list[dict[str, Any]], rows: list[Plain], count: int) -> tuple[int, int]:
    most = there = 0
    for strip in range(count):
        for step in steps:
            low, high = step["rows"][strip]
            if low < high:
                copied = 0
                for read in step["reads"]:
                    a, b = read["ranges"][strip]
                    copied += (b - a) * read["copies"]
                    copied += rows[read["rows"]].copied(a, b, step["views"]) if read["rows"] >= 0 else 0
                most = max(most, there + copied + max(step["peak"], step["result"] + step["aside"]))
                before = rows[step["room"]].bytes if step["room"] >= 0 else 0
                if step["asks"]:
                    there += 2 * step["result"]
                elif step["room"] >= 0 and (room := rows[step["room"]].room(high - low)):
                    most = max(most, there + copied + step["result"] + room)
                    there += room - before
                else:
                    there += sum(rows[number].add(high - low) * counts for number, counts in step["keeps"])
            for read in step["reads"]:
                if read["drops"] >= 0:
                    gone, beside = rows[read["drops"]].drop(read["keep"][strip])
                    there -= gone
                    most = max(most, there + beside)
    return most, there


def random_steps(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """A chain: each step reads the rows of the one before it, and keeps its own; every other one what came first."""
    ends = [[*sorted(rng.sample(range(1, 90), count - 1)), 90] for _ in range(4)]
    for before, after in itertools.pairwise(ends):
        after[:] = [min(a, b) for a, b in zip(before, after, strict=True)]
    steps = []
    for place, end in enumerate(ends):
        rows = [*zip([0, *end], end, strict=False)]
        reads = []
        for v in {max(place - 1, 0), 0} if place else set():
            ranges = [(max(low - 2, 0), min(high + 2, ends[v][k])) if low < high else (0, 0)
                      for k, (low, high) in enumerate(rows)]  # fmt: skip
            last = (v == place - 1 and v > 0) or (v == 0 and place == len(ends) - 1)
            reads.append({"ranges": ranges, "copies": rng.choice([0, 0, WIDTH]), "rows": v,
                          "drops": v if last else -1, "keep": [max(high - 2, 0) for _, high in rows]})  # fmt: skip
        asks = place == 3 and rng.random() < 0.5
        steps.append({
            "rows": rows, "peak": rng.randrange(300), "result": rng.randrange(200), "aside": rng.randrange(50),
            "asks": asks, "views": rng.random() < 0.5, "room": place if rng.random() < 0.4 else -1,
            "keeps": [] if asks else [(place, rng.random() < 0.8)], "reads": reads,
        })  # fmt: skip
    return steps


@pytest.mark.parametrize("seed", range(30))
def test_peaks_are_those_of_a_plain_count(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 30)
    steps, together = random_steps(rng, count), [rng.random() < 0.5 for _ in range(4)]
    made = [strips.Step(**{**step, "reads": [strips.Read(**read) for read in step["reads"]]}) for step in steps]
    counted = [strips.CountedRows(WIDTH, one) for one in together]
    plain = [Plain(one) for one in together]
    assert strips.peak(made, counted, count) == plain_peak(steps, plain, count)
    assert [one.bytes for one in counted] == [one.bytes for one in plain]


@pytest.mark.parametrize("seed", range(10))
def test_counted_rows_hold_the_bytes_that_rows_hold(seed: int) -> None:
    rng = random.Random(seed)
    counted, real = strips.CountedRows(WIDTH * 8), Rows(2)
    end = below = 0
    for _ in range(40):
        rows = torch.zeros(1, WIDTH, rng.randint(1, 9), 1, dtype=torch.float64)
        counted.add(rows.size(2))
        real.add(rows)
        end += rows.size(2)
        below = rng.randint(below, end)
        strips.peak([strips.Step(
            rows=[(0, 0)], peak=0, result=0, aside=0, asks=False, views=False, room=-1, keeps=[],
            reads=[strips.Read(ranges=[(0, 0)], copies=0, rows=-1, drops=0, keep=[below])],
        )], [counted], 1)  # fmt: skip
        real.drop(below)
        assert counted.bytes == sum(piece.untyped_storage().nbytes() for _, piece in real._pieces)
        copy = strips.CountedRows(counted)
        assert copy.state() == counted.state()
        copy.add(1)
        assert copy.state() != counted.state()
