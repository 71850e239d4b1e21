"""bench.memory_trace runs, and its tables say what was measured, also where that is bad."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import memory_trace, report, report_memory

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("matplotlib")
pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "bench.memory_trace", "--size", "tiny", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "memory_trace.json").read_text())
    models = {row["model"] for row in found["predictions"]}
    assert len(done.stdout.splitlines()) == len(found["rows"]) + len(models) + len(found["plans"])
    assert "trial of the script" in (out / "memory_trace.md").read_text()
    return found


@pytest.mark.slow
def test_it_runs(data: dict[str, Any]) -> None:
    for row in data["rows"]:
        assert row["rounds"] >= 3 and row["events"] > 100
        # The whole call has the step in it, and the clock of the trace runs.
        assert row["ms"]["call"]["median"] > row["ms"]["watched"]["median"] > 0.5 * row["ms"]["bare"]["median"]
    cases = {(row["form"], row["layout"]) for row in data["predictions"]}
    assert len(cases) == 6 and len(data["predictions"]) == 6 * len(memory_trace.PREDICTED["tiny"])
    for row in data["predictions"]:
        assert row["ratio"] == row["predicted"] / row["peak"] == pytest.approx(1, abs=0.05)
        assert row["same_saved"]
    for row in data["plans"]:
        assert row["predicted"] == pytest.approx(row["peak"], rel=0.05) and row["peak"] < row["stock_peak"]
        assert row["kept"] == (row["peak"] <= row["budget"]) and row["ratio"]["plan"]["least"] > 0
    assert not data["plans"][-1]["fits"] and not data["plans"][-1]["kept"]


@pytest.mark.slow
def test_losses_are_in_the_tables(data: dict[str, Any]) -> None:
    bad = copy.deepcopy(data)
    bad["rows"][0]["met"] = False
    bad["predictions"][0] |= {"ratio": 0.8, "same_saved": False}
    bad["plans"][0] |= {"fits": True, "kept": False}
    text = report.memory_trace(bad)
    assert "| NOT MET |" in text and "| NO |" in text and "wrong in 1 cases" in text
    assert "20.00% at worst; 1 by more than the target of 5% (squeezenet1_1, stock, NCHW: 0.800)" in text
    titles = [title for title, *_ in report_memory.sections(data)]
    assert titles == ["What watching costs", "Predictions", "Plans"]


def test_models_start_from_the_same_weights() -> None:
    one, other = (memory_trace.network("squeezenet1_1") for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert one.training
