"""bench.tile runs, and its rows are what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.pairs import only_full

from bench import measure, tile, tile_speed


@only_full
def test_it_runs(results: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")

    def here(target: str, timeout: float, **arguments: Any) -> Any:
        return getattr(tile, target.partition(":")[2])(**arguments)

    monkeypatch.setattr(measure, "in_fresh_process", here)
    monkeypatch.setattr(tile, "STOCK_FITS", 8 * 2**20)
    data = results("tile", "--only", "unet", "features")
    forms = ["stock", "tile", "tile, 192MiB", "stock", "tile", "tile, 64MiB"]
    assert [row["form"] for row in data["rows"]] == [*forms[:3] * 2, *forms[3:] * 2]
    stock = [row for row in data["rows"] if row["form"] == "stock" and row["case"] == "unet"]
    assert [row.get("predicted", False) for row in stock] == [False, True]
    assert all(row["seconds"] > 0 and row["peak"] > 0 for row in data["rows"] if not row.get("predicted"))
    assert 0 < data["errors"]["unet"]["tile"] < 1.5
    assert " (p) |" in data["text"]


def test_values_in_files_are_not_in_the_peak() -> None:
    pytest.importorskip("diffusers")
    in_files, in_memory = (tile.called("decoder", form, 256)["peak"] for form in (tile.FILES, "tile"))
    assert 0 < in_files < in_memory


def test_stock_is_predicted() -> None:
    found = tile.called("unet", "stock", 128)["peak"]
    assert 0.95 < tile.predicted("unet", 128)["peak"] / found < 1.05


@only_full
def test_speed_runs(results: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    fresh = measure.in_fresh_process

    def measured(target: str, timeout: float, kept: bool = False, **given: Any) -> dict[str, Any]:
        if kept and given["name"] == "U-Net":  # the settings are the process's
            return fresh(target, timeout, kept=True, **given)
        return tile_speed.measured(**given)

    monkeypatch.setattr(measure, "in_fresh_process", measured)
    data = results("tile_speed", "--only", "U-Net", "MobileNetV2")
    assert [(row["net"], row["layout"]) for row in data["rows"]] == [
        (net, layout) for net in ("U-Net", "MobileNetV2") for layout in ("NCHW", "channels_last")
    ]
    assert all(row["ms"]["tile"]["least"] > 0 and row["peaks"]["tile"] > 0 for row in data["rows"])
    assert [row["target"] for row in data["rows"]] == [None, None, 0.4, 0.45]
    assert "| MobileNetV2 | 128 | NCHW |" in data["text"]
