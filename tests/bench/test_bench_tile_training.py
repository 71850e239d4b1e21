"""bench.tile_training runs, and its rows are what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.pairs import only_full

from bench import measure, tile_training


@only_full
def test_it_runs(results: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def here(target: str, timeout: float, **arguments: Any) -> Any:
        return getattr(tile_training, target.partition(":")[2])(**arguments)

    monkeypatch.setattr(measure, "in_fresh_process", here)
    monkeypatch.setattr(tile_training.Case, "forms", ("stock", "tile, 1/3"))
    data = results("tile_training", "--only", "frozen")
    stock, ours = data["rows"]
    assert (stock["form"], ours["form"]) == ("stock", "tile, 1/3")
    assert 0 < ours["peak"] <= stock["peak"] / 3 * 1.01
    assert min(ours["seconds"], ours["planning"], stock["seconds"]) > 0
    assert 0 < data["errors"]["frozen"]["tile"] < 1e-9
    assert "curves" not in data
    both = results("tile_training", "--only", "unet")  # the other case keeps its rows, and says from where they are
    assert [row for row in both["rows"] if row["case"] == "frozen"] == data["rows"]
    assert both["heads"]["frozen"]["date"] == data["date"] and both["errors"].keys() == {"frozen", "unet"}
    losses = both["curves"]
    assert all(abs(a - b) < 1e-3 for a, b in zip(losses["stock"], losses["tile, 1/4"], strict=True))
    assert "| tile, 1/3 |" in data["text"]


def test_stock_is_predicted() -> None:
    found = tile_training.stepped("unet", "stock", 192, 1, True)["peak"]
    assert 0.95 < tile_training.predicted("unet", 192)["peak"] / found < 1.05
