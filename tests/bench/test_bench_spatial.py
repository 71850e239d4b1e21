"""bench.spatial: what is sent is the least, counted apart; peaks and the model are in its report."""

from __future__ import annotations

from typing import Any

import pytest
from support.ranks import needs_gloo

spatial = pytest.importorskip("bench.spatial")
from bench import report_spatial  # noqa: E402


@needs_gloo
def test_what_is_sent_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spatial, "NETWORKS", {"U-Net": spatial.UNet})
    monkeypatch.setattr(spatial, "LAYOUTS", {"channels_last": spatial.LAYOUTS["channels_last"]})
    monkeypatch.setattr(spatial, "RANKS", (1, 2, 4))
    data = spatial.measure_all("tiny")
    assert len(data["rows"]) == 3
    for row in data["rows"]:
        for ranks in ("2", "4"):
            found = row["of"][ranks]
            assert found["sent"] == found["least"] and min(found["least"]) > 0, (row, ranks)
            assert 0 < found["peak"] < row["of"]["1"]["peak"]
    for rank in data["timeline"]:
        assert rank["events"]
        for event in rank["events"]:
            assert 0 <= event["posted"] <= event["waited"] <= event["there"] <= rank["seconds"]
    names = [section.title for section in report_spatial.sections(data)]
    assert names == ["Peak memory of a rank", "What is sent", "A model of many GPUs"]
    assert report_spatial.figure(data) is not None


def test_the_model_counts_arithmetic() -> None:
    """On one GPU nothing is waited for; on several at least a latency for each norm and exchange."""
    one, eight = spatial.modelled(8, 256, 1), spatial.modelled(8, 256, 8)
    assert one["waited"] == 0 and eight["waited"] > 10 * spatial.RATES["latency"]
    assert eight["computed"] == pytest.approx(one["computed"] / 8)


def test_a_height_that_does_not_divide_is_no_case_of_the_count() -> None:
    job: dict[str, Any] = {"network": "chain", "channels": 4, "side": 30, "ranks": 4, "train": False}
    with pytest.raises(ValueError, match="multiple of 4, got 30"):
        spatial.least_bytes(job)
