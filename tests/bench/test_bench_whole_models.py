"""bench.whole_models runs, and its forms are what they are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pairs import only_full

import patchconv_native as pc
from bench import measure, whole_models

pytest.importorskip("matplotlib")


@only_full
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: starting one for each form would take a minute."""

    def here(target: str, timeout: float, **arguments: Any) -> Any:
        return getattr(whole_models, target.partition(":")[2])(**arguments)

    monkeypatch.setattr(measure, "in_fresh_process", here)
    wanted = ["unet", "unet step"]
    assert whole_models.main(["--size", "tiny", "--rounds", "1", "--out", str(tmp_path), "--only", *wanted]) == 0
    rows = json.loads((tmp_path / "whole_models.json").read_text())["rows"]
    expected = [(name, form) for name in wanted for form in whole_models.CASES[name].forms]
    assert [(row["case"], row["form"]) for row in rows] == expected
    peaks = {row["form"]: row["peak"] for row in rows if row["case"] == "unet step"}
    assert 0 < peaks["convert"] < peaks["stock"] and peaks["plan"] < peaks["stock"]
    for row in rows:
        assert row["ms"]["least"] > 0 and ("error" in row) == (row["case"] == "unet")
        assert "error" not in row or row["error"]["rms"] < 1e-5
    # Other cases keep what they have.
    assert whole_models.main(["--size", "tiny", "--rounds", "0", "--out", str(tmp_path), "--only", "unet"]) == 0
    again = json.loads((tmp_path / "whole_models.json").read_text())["rows"]
    assert [row["form"] for row in again] == [row["form"] for row in rows]
    text = (tmp_path / "whole_models.md").read_text()
    assert "trial of the script" in text and text.count("\n## ") == 2 and "budget" in text


def test_the_blocks_are_checkpointed() -> None:
    model, _, _ = whole_models.prepared("unet step", "convert, pc checkpoints", "tiny")
    assert isinstance(model, whole_models.UNet)
    blocks = [*model.down, *model.join]
    assert all(type(block) is not whole_models.Block for block in blocks)
    assert len(pc.convert_report(model).converted) > len(blocks)


@pytest.mark.parametrize("form", whole_models.CHECKPOINTED)
def test_forms_compute_the_same(form: str) -> None:
    model, x, _ = whole_models.prepared("unet step", form, "tiny")
    stock, given, _ = whole_models.prepared("unet step", "stock", "tiny")
    assert torch.equal(x, given)
    torch.testing.assert_close(model(x), stock(given))
