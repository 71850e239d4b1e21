"""bench.xray: every way trains as its reference does, ranks that fail end the command, pictures show their findings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pairs import FULL, only_full
from support.ranks import needs_gloo

from bench import launch, report_xray, xray, xray_model, xray_ways

OPTIONS = ("--dtype", "float64", "--timeout", "60")
Results = Callable[..., dict[str, Any]]


def check(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What holds of every row; the rows by their names."""
    rows = {row["way"]: row for row in data["rows"]}
    for name, row in rows.items():
        assert len(row["losses"]) == data["steps"] and row["coincides"], (name, row["off"])
        assert row["off"] < 1e-9 and row["reference"] == ("one" if row["chunks"] == 1 else f"one in {row['chunks']}")
        # A batch norm that sees less shows, and so would wrong gradients.
        assert (row["off_one"] < 1e-9) == (row["chunks"] == 1), name
        assert len(row["peaks"]) == row["ranks"]
        assert all(peak > kept > 0 for peak, kept in zip(row["peaks"], row["kept"], strict=True)), name
        assert row["seconds"]["least"] > 0
        assert row["largest"] > 0 and row["largest"] % xray.STRIDE == 0
    first, third = rows["one"]["losses"][0], rows["one"]["losses"][xray_ways.SETS]
    assert abs(first / third - 1) > 1e-5, "training moves nothing"
    return rows


WAYS = {  # of these ranks, one of each kind; every one under `make check`
    "2": ["checkpoint", "data sync", "fsdp", "model", "spatial lean"],
    "4": ["both", "data spatial"],
}
ALL = {"2": ["all"], "4": ["both", "both whole", "data spatial"]}


@needs_gloo
@pytest.mark.slow
def test_two_ranks(results: Results) -> None:
    data = results("xray", *OPTIONS, "--ranks", "2", "--how", *(ALL if FULL else WAYS)["2"])
    rows = check(data)
    wanted = {*xray_ways.WAYS, "one in 2"} if FULL else {"one", "one in 2", *WAYS["2"]}
    assert set(rows) | set(data["left_out"]) == wanted
    assert set(data["left_out"]) == ({"both", "both whole", "data spatial"} if FULL else set())
    one = max(rows["one"]["peaks"])
    for name, row in rows.items():
        if name not in ("one", "one in 2"):
            assert max(row["peaks"]) < (0.7 if name.startswith("spatial") else 1) * one, name
    if FULL:
        assert max(rows["model"]["peaks"]) < max(rows["model whole"]["peaks"]), "two micro-batches keep less"
    # The least of the ranks: what gloo's threads release unseen counts as kept on now one rank, now the other.
    assert min(rows["fsdp"]["kept"]) < 0.6 * max(rows["data sync"]["kept"]), "shards"
    for name in ("one", "checkpoint"):
        assert 0.5 < rows[name]["predicted"] / rows[name]["peaks"][0] < 2
    text = data["text"]
    assert ("needs 4 ranks" in text) == FULL and text.count("\n| ") == 2 * (2 + len(rows)) and "FAIL" not in text


@needs_gloo
@only_full
@pytest.mark.slow
def test_four_ranks(results: Results) -> None:
    how = (ALL if FULL else WAYS)["4"]
    rows = check(results("xray", *OPTIONS, "--ranks", "4", "--how", *how))
    assert rows["both"]["mesh"] == {"data": 2, "stage": 2}
    assert rows["data spatial"]["mesh"] == {"data": 2, "spatial": 2}
    for name in how:
        assert max(rows[name]["peaks"]) < 0.7 * max(rows["one"]["peaks"]), name


def dies(jobs: list[Any]) -> None:
    """Rank 1 is killed, rank 0 would wait for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def raises(jobs: list[Any]) -> None:
    raise ValueError(f"no way of rank {dist.get_rank()}")


def sleeps(jobs: list[Any]) -> None:
    """Rank 1 does not come to where rank 0 waits for it."""
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.barrier()


@needs_gloo
@pytest.mark.parametrize(
    ("target", "timeout", "what"),
    [("dies", 60, r"rank 1 ended with -9"), ("raises", 60, "no way of rank"), ("sleeps", 2, "rank 0 ended with 1")],
)
def test_a_failed_rank_is_an_error_not_a_hang(target: str, timeout: float, what: str) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=what):
        launch.launch([], 2, timeout, f"tests.bench.test_bench_xray:{target}")
    assert time.monotonic() - start < 55


def test_a_failure_ends_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    def fail(jobs: Any, ranks: int, timeout: float, target: str) -> Any:
        raise RuntimeError("rank 1 ended with -9")

    monkeypatch.setattr(xray, "launch", fail)
    assert xray.main(["--size", "tiny", "--how", "data", "--out", str(tmp_path)]) == 1
    assert "rank 1 ended with -9" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_full_network_is_densenet169() -> None:
    models = pytest.importorskip("torchvision.models")
    theirs, ours = models.densenet169(num_classes=xray_model.FINDINGS), xray_model.network(xray_model.NETS["full"])
    # One channel in, where theirs has three.
    assert sum(p.numel() for p in theirs.parameters()) - 2 * 64 * 49 == sum(p.numel() for p in ours.parameters())
    assert xray_model.NETS["full"].depth == 169


def test_stages_are_the_network() -> None:
    model = xray_model.network(xray_model.NETS["tiny"])
    first, second = xray_model.stages(model)
    x = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(second(first(x)), model(x), rtol=0, atol=0)
    assert [*first._modules, *second._modules] == list(model._modules)


def test_pictures_show_their_findings() -> None:
    pictures, findings = xray_model.radiographs(0, 24, 96)
    assert pictures.dtype == findings.dtype == torch.uint8 and pictures.shape == (24, 1, 96, 96)
    again, _ = xray_model.radiograph(5, 96)
    assert torch.equal(pictures[5, 0], again)
    assert all(0 < int(column.sum()) < 24 for column in findings.T), "each finding is there, and is not"
    place = [name for names in xray_model.HEADS.values() for name in names].index("pacemaker")
    # A box of metal: the brightest there is, and nothing else in the upper left is.
    for picture, found in zip(pictures[:, 0], findings, strict=True):
        assert bool((picture[10:36, 16:34] == 255).any()) == bool(found[place])
    # Structure, not noise: neighbours are alike.
    values = pictures.float()
    assert (values[..., 1:] - values[..., :-1]).abs().mean() < 0.2 * values.std()


def test_meshes_and_chunks() -> None:
    ways = xray_ways.WAYS
    assert ways["both"].mesh(2) is None and ways["both"].mesh(4) == {"data": 2, "stage": 2}
    assert ways["model"].mesh(4) == {"stage": 2} and ways["data"].mesh(4) == {"data": 4}
    assert [ways[name].chunks(4) for name in ("one", "data", "data sync", "model", "both", "both whole")] == [
        1, 4, 1, 2, 4, 1,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="do not suit"):
        xray_ways.train({"way": "both", "ranks": 2, "batch": 4})


def test_the_largest_side_is_where_the_line_meets_the_budget() -> None:
    peaks = {64: 1000 + 3 * 64**2, 128: 1000 + 3 * 128**2}
    assert xray.largest_side(peaks, 1000 + 3 * 256**2) == 256
    assert xray.largest_side(peaks, 999 + 3 * 256**2) == 256 - xray.STRIDE
    assert xray.largest_side(peaks, 1000) == 0


def test_losses_are_told_as_they_are() -> None:
    row: dict[str, Any] = {
        "way": "one", "title": "", "ranks": 1, "chunks": 1, "losses": [1.0, 0.9, 0.8], "reference": "one", "off": 0.0,
        "off_one": 0.0, "coincides": True, "peaks": [100], "kept": [1], "largest": 64, "by_side": [[32, 50], [64, 100]],
        "seconds": {"median": 1.0, "least": 1.0, "most": 1.0}, "threads": 1, "load": 0,
    }  # fmt: skip
    worse = row | {"way": "data", "off": 0.5, "coincides": False, "peaks": [90, 120], "ranks": 2}
    worse["seconds"] = {"median": 2.0, "least": 2.0, "most": 2.0}
    data = {
        "rows": [row, worse], "depth": 13, "batch": 4, "side": 64, "sets": 2, "steps": 3, "rate": 0.1, "ranks": 2,
        "dtype": "float32", "backend": "gloo", "tolerance": 1e-4, "left_out": {}, "budget": 100, "watched": 2,
        "hardware": {},
    }  # fmt: skip
    losses, memory = report_xray.sections(data)
    assert "Not within 1e-04 of their references: `data`." in losses.text and "FAIL" in list(losses.rows)[1]
    assert "No less than one process on some rank: `data`." in memory.text
    assert "`data`, 2.00 of one's time" in memory.text and "None is faster" in memory.text
