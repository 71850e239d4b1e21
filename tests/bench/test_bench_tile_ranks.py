"""bench.tile_ranks runs, and its rows are what they say."""

from __future__ import annotations

import pytest
from support.pairs import only_full
from support.ranks import needs_gloo

tile_ranks = pytest.importorskip("bench.tile_ranks")
from bench import report_tile_ranks  # noqa: E402


@only_full
@needs_gloo
def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_ranks, "CASES", ("frozen",))
    monkeypatch.setattr(tile_ranks, "FORMS", ("spatial", "tile, 1/2"))
    data = tile_ranks.measure_all("tiny")
    stock, spatial, ours = data["rows"]
    assert 0 < ours["peak"] <= ours["budget"] == spatial["peak"] // 2 < stock["peak"] // 3
    assert all(abs(loss - stock["losses"][0]) < 1e-5 for row in (spatial, ours) for loss in row["losses"])
    text, table = report_tile_ranks.sections(data)
    assert "a half or a quarter" in text.text and [line[1] for line in table.rows] == ["stock", "spatial", "tile, 1/2"]
