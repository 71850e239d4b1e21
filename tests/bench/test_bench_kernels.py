"""bench.gpu on the memory-bound kernels: its sections time what they name. No speed is tested."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from bench import gpu, gpu_jobs, gpu_kernels, gpu_norms, report_gpu


def test_sections_name_what_they_leave_out() -> None:
    for section, jobs in gpu_kernels.SECTIONS.items():
        rows: list[Any] = []
        missing = gpu_kernels.measure_section(section, "full", "cpu", rows, lambda: None, lambda: 0.0)
        assert rows == [] and missing == [f"{section}: {job}" for job in jobs("full")]
        assert len(set(missing)) == len(missing) and all(line.startswith(f"{section}:") for line in missing)


def passes_over(job: gpu_jobs.Job) -> int:
    """How often a job must read or write its tensor, or one as large, where no cache helps."""
    if job.name == "add + ReLU":
        return 3
    if "group" in job.name or "training" in job.name:
        return {"forward": 3, "backward": 5}[job.pass_]
    return 2


def test_a_cache_saves_the_second_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read twice and fits is read from memory once: forward x, backward x and its gradient."""
    for held, floors in ((1, {"forward": 2, "backward": 5}), (2, {"forward": 2, "backward": 3})):
        for job in gpu_norms.norms("tiny"):
            monkeypatch.setattr(gpu_norms, "cached", lambda number, device, most=held * job.bytes: number <= most)
            if passes_over(job) > 2 and job.name != "add + ReLU":
                assert job.bind(job, "cpu").floor == floors[job.pass_] * job.bytes


def test_what_is_allocated_besides_the_results_is_told() -> None:
    job = next(gpu_norms.norms("tiny"))
    least, most = (job.facts | {"workspace": {"ours": bytes}, "allowed": 2**16} for bytes in (2**16, 2**16 + 2**19))
    assert report_gpu.allocations([least]) == "Of 1 rows 0 allocate more than they may besides their results"
    assert report_gpu.allocations([least, most, job.facts | {"error": "OOM"}]) == (
        "Of 2 rows 1 allocate more than they may besides their results; batch norm + ReLU, eval forward float32 NCHW "
        "0.0625 MiB: 0.56 MiB instead of 0.06"
    )


@pytest.mark.parametrize("section", gpu_kernels.SECTIONS)
def test_both_sides_of_a_section_compute_the_same(section: str) -> None:
    """And the floor is the bytes that ours reads and writes, and the tensor as large as it says."""
    for job in gpu_kernels.SECTIONS[section]("tiny"):
        bound = job.bind(job, "cpu")
        assert job.tensor("cpu").nbytes == job.bytes
        least = passes_over(job) * job.bytes
        assert least <= bound.floor <= least + job.bytes // 16 or job.name in gpu_kernels.WINDOWS
        if "in place" in job.name:
            continue  # their results are the bits, and nothing
        results = [[r] if isinstance(r, torch.Tensor) else list(r) for r in (bound.ours(), bound.stock())]
        ours, stock = (r[0] for r in results)
        assert ours.stride() == stock.stride()
        for one, other in list(zip(*results, strict=job.pass_ == "backward"))[1:]:
            if section == "norms":  # gradients of parameters: sums over the tensor
                eps, size = torch.finfo(one.dtype).eps, float(other.abs().max())
                torch.testing.assert_close(one, other, rtol=0, atol=4 * max(eps, 2.0**-20) * size)
        if job.name == "dropout":  # by two masks
            assert ours.shape == stock.shape and ours.dtype == stock.dtype and 0.4 < (ours == 0).float().mean() < 0.6
        else:
            eps = torch.finfo(ours.dtype).eps * (4 if section == "norms" else 2)
            torch.testing.assert_close(ours, stock, rtol=eps, atol=eps)


def test_verdicts_on_kernels() -> None:
    job = next(job for job in gpu_kernels.masks("full") if job.pass_ == "backward")
    times = {"of_copy": 0.95, "of_stock": 1.34, "met": {"of_copy": True, "of_stock": False}}
    better = times | {"of_stock": 1.36, "met": {"of_copy": True, "of_stock": True}}
    label = "relu backward float32 dense 256 MiB"
    assert report_gpu.kernel_targets([job.facts | times, job.facts | better]).rows == [
        ["relu backward", "share of copy's rate", ">= 0.9", "2 of 2", f"0.95 ({label})", "pass"],
        ["relu backward", "stock's time in units of ours", ">= 1.35", "1 of 2", f"1.34 ({label})", "FAIL"],
    ]
    failed = job.facts | {"error": "OOM"}
    lines = list(report_gpu.kernel_targets([failed]).rows)
    assert lines[0][3:] == ["0 of 1", "not measured", "FAIL"] and lines[-1][4:] == [f"{label}: OOM", "FAIL"]
    *_, all_rows = report_gpu.kernels("masks", [failed])
    (line,) = all_rows.rows
    assert line[5] == "OOM" and len(line) == len(all_rows.head)


@pytest.mark.parametrize("code", [0, 99, None])
def test_sanitizers(code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tools run, the race check on our kernels alone, and what one of them finds is the part's exit code."""
    commands = []

    def finished(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[str, int | None]:
        commands.append(command)
        race = "racecheck" in command
        return ("RACECHECK SUMMARY: 1 hazard", code) if race else ("ERROR SUMMARY: 0 errors", 0)

    one = gpu.Run(argparse.Namespace(device="cpu", size="tiny", out=tmp_path, budget=10.0))
    one.device = "cuda"
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(gpu, "_finished", finished)
    gpu.sanitizer(one)
    assert [command[2] for command in commands] == ["memcheck", "racecheck"]
    assert "kns=patchconv" in commands[1] and "kns=patchconv" not in commands[0]
    assert all(command[-len(gpu.FEW) :] == gpu.FEW for command in commands)
    text = "not finished in time" if code is None else "RACECHECK SUMMARY: 1 hazard"
    assert one.data["sanitizer"]["summary"] == f"memcheck: ERROR SUMMARY: 0 errors; racecheck: {text}"
    assert one.data["sanitizer"]["exit"] == code
