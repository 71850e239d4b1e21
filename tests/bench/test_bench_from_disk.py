"""bench.from_disk runs, and what it writes is what the networks give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from bench import from_disk, measure


def test_it_runs(results: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")

    def here(target: str, timeout: float, **arguments: Any) -> Any:
        return getattr(from_disk, target.partition(":")[2])(**arguments)

    monkeypatch.setattr(measure, "in_fresh_process", here)
    data = results("from_disk")
    assert [row["case"] for row in data["rows"]] == ["read", "means", "features"]
    assert all(row["seconds"] > 0 for row in data["rows"])
    assert all(row["difference"] < 1e-5 for row in data["rows"][1:])


@torch.no_grad()
def test_other_values_are_told_apart() -> None:
    net = from_disk.network("means")
    image = numpy.random.default_rng(0).integers(0, 256, (1, 3, 2112, 2112), dtype="uint8")
    out = net(torch.from_numpy(image)).numpy()
    assert from_disk.difference(net, image, out) < 1e-6
    out[0, 1, 33, 20] += 0.5
    assert from_disk.difference(net, image, out) > 0.3
