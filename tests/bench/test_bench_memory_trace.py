"""bench.memory_trace runs, and its tables say what was measured, also where that is bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pairs import only_full

from bench import memory_trace, report

pytest.importorskip("torchvision")


@only_full
def test_it_runs(results: Callable[..., dict[str, Any]]) -> None:
    data = results("memory_trace")
    models = {row["model"] for row in data["predictions"]}
    assert len(data["printed"]) == len(data["rows"]) + len(models) + len(data["plans"])
    for row in data["rows"]:
        assert row["rounds"] >= 3 and row["events"] > 100
        # The whole call has the step in it, and the clock of the trace runs.
        assert row["ms"]["call"]["median"] > row["ms"]["watched"]["median"] > 0.5 * row["ms"]["bare"]["median"]
    cases = {(row["form"], row["layout"]) for row in data["predictions"]}
    assert len(cases) == 6 and len(data["predictions"]) == 6 * len(memory_trace.PREDICTED["tiny"])
    for row in data["predictions"]:
        assert row["ratio"] == pytest.approx(1, abs=0.05) and row["same_saved"]
    for row in data["plans"]:
        assert row["predicted"] == pytest.approx(row["peak"], rel=0.05) and row["peak"] < row["stock_peak"]
        assert row["ratio"]["plan"]["least"] > 0
    assert len(data["convolutions"]) == memory_trace.DRAWN["tiny"]
    assert not data["plans"][-1]["fits"] and not data["plans"][-1]["kept"]
    # Losses are in the tables.
    data["rows"][0]["met"] = False
    data["predictions"][0] |= {"ratio": 0.8, "same_saved": False}
    data["convolutions"][1]["ratio"] = 1.0625
    data["plans"][0] |= {"fits": True, "kept": False}
    text = report.markdown(data)
    assert "| FAIL |" in text and "| NO |" in text and "wrong in 1 cases" in text
    assert "20.00% at worst; 1 by more than the target of 5% (squeezenet1_1, stock, NCHW: 0.800)" in text
    assert "1 by more than the target of 5%. These:" in text and "| 1.062 |" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## What watching costs", "## Predictions", "## Predictions of one convolution", "## Plans",
    ]  # fmt: skip


def test_models_start_from_the_same_weights() -> None:
    one, other = (memory_trace.network("squeezenet1_1") for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert one.training
