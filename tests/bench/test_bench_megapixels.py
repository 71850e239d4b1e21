"""bench.megapixels runs the example and writes what it said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.pairs import only_full


@only_full
def test_it_runs(results: Callable[..., dict[str, Any]]) -> None:
    pytest.importorskip("PIL")
    data = results("megapixels")
    assert len(data["losses"]) == len(data["seconds"]) == 3 and data["losses"][-1] < data["losses"][0]
    assert data["process"] > 100e6 and data["libraries"] > 100e6 and data["stock"] > 0
    assert "megapixels_discs.jpg" in data["text"]
