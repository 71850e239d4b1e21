"""The benchmarks run, measure what they say and write what they promise. No speed is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import (
    cases,
    census,
    correct,
    gpu,
    gpu_kernels,
    gpu_measure,
    measure,
    report,
)  # fmt: skip
from bench.cases import Case

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("matplotlib")


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # One thread: several tests run at once, and thread pools that wait for each other take seconds a call.
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", f"bench.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300)


def results(module: str, out: Path, *arguments: str) -> dict[str, Any]:
    """Runs a script at its tiniest size and returns its results, having checked what all of them share."""
    done = run(module, "--size", "tiny", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr
    data = json.loads((out / f"{module}.json").read_text())
    assert data["bench"] == module and data["size"] == "tiny"
    assert data["hardware"]["torch"] == torch.__version__ and data["hardware"]["cpu"]
    assert data["rows"] and len(done.stdout.splitlines()) == len(data["rows"])
    text = (out / f"{module}.md").read_text()
    assert data["hardware"]["cpu"] in text and "trial of the script" in text
    return data


# ----------------------------------------------------------------------------------------------------------
# Scripts


def test_conv_memory(tmp_path: Path) -> None:
    data = results("conv_memory", tmp_path)
    assert {row["implementation"] for row in data["rows"]} == {"stock", "patch_conv", "ours"}
    for row in data["rows"]:
        if row["implementation"] == "patch_conv" and measure.installed("patch_conv") is None:
            assert row["error"] == "not installed"
            continue
        assert row["result"] == row["output_bytes"] and row["workspace"] > -measure.MIB
        assert row.get("pass_bound") == (row["workspace"] <= data["bound"] if row["implementation"] == "ours" else None)
    assert (tmp_path / "conv_memory.png").stat().st_size > 1000


def test_conv_speed(tmp_path: Path) -> None:
    data = results("conv_speed", tmp_path, "--passes", "fprop", "backward", "--large-kernel")
    assert {(row["layout"], row["pass"], row["kernel"]) for row in data["rows"]} == {
        (layout, pass_, kernel) for layout in cases.LAYOUTS for pass_ in ("fprop", "backward") for kernel in (3, 7)
    }
    for row in data["rows"]:
        assert row["rounds"] >= 3
        for side, target in row["targets"].items():
            assert row["met"][side] == (row["ratio"][side]["median"] <= target)
        assert ("ours, splits=16" in row["targets"]) == (row["layout"] == "channels_last")
    forced = [row["paths"]["ours, splits=16"] for row in data["rows"] if row["layout"] == "channels_last"]
    assert all("16 tiles" in path for path in forced), forced


def test_overhead(tmp_path: Path) -> None:
    data = results("overhead", tmp_path)
    for row in data["rows"]:
        assert row["us"]["stock"]["least"] > 0 and row["us"]["ours"]["least"] > 0
        assert ("met" in row) == (row["mode"] != "forward and backward")


def test_padding(tmp_path: Path) -> None:
    data = results("padding", tmp_path)
    paths = {(row["kernel"], row["padding"]): row["path"] for row in data["rows"]}
    assert paths[3, 0] == paths[9, 0] == "stock" and paths[3, 5] == "tiled", "tiles bring wide padding with them"
    assert data["missing"] == 0


def test_half(tmp_path: Path) -> None:
    data = results("half", tmp_path)
    assert {(row["dtype"], row["pass"], row["path"]) for row in data["rows"]} == {
        (dtype, pass_, "stock") for dtype in ("bfloat16", "float16") for pass_ in ("fprop", "dgrad", "wgrad")
    }, "this little work is handed to stock"
    assert all(row["ms"]["stock"] > 0 and row["ms"]["ours"] > 0 for row in data["rows"])


@pytest.mark.slow
def test_resnet(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    data = results("resnet", tmp_path)
    assert [(row["mode"], row["batch"]) for row in data["rows"]] == [
        ("forward", 1), ("forward", 8), ("training step", 1), ("training step", 8),
    ]  # fmt: skip


@pytest.mark.slow
def test_lean(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    done = run("lean", "--size", "tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "lean.json").read_text())
    (row,) = data["floors"]
    assert 0 < row["functional"]["held"] < row["convert"]["held"] < 0.8 * row["stock"]["held"]
    assert 0 < data["toy"]["convert"]["peak"] < data["toy"]["stock"]["peak"]
    assert "resnet18" in (tmp_path / "lean.md").read_text() and (tmp_path / "lean.png").stat().st_size > 1000


def test_lean_error(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    (row,) = results("lean_error", tmp_path)["rows"]
    assert row["same_without_recompute"] and 0 < row["median"]["functional"] < 10 * row["median"]["stock"]


def test_lean_speed(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    done = run("lean_speed", "--size", "tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "lean_speed.json").read_text())
    assert [row["layout"] for row in data["steps"]] == ["NCHW", "channels_last"]
    assert [row["pass"] for row in data["relu"]] == ["forward", "forward in place", "backward"]
    assert all(row["rate"] > 0 for row in data["relu"])
    assert "resnet18" in (tmp_path / "lean_speed.md").read_text()


def test_census() -> None:
    """What is kept, by three counts: an activation's output, a product's operands, and what a hook cannot see."""
    x = torch.randn(64, 1024, requires_grad=True)
    counts = (census.saved_bytes, census.held_bytes)
    assert [count(lambda: torch.relu(x)) for count in counts] == [x.nbytes, x.nbytes]
    assert [count(lambda: (x * 1) * (x * 2)) for count in counts] == [2 * x.nbytes, 2 * x.nbytes]
    assert [count(lambda: x + 1) for count in counts] == [0, 0]
    assert census.saved_bytes(lambda: x * x, apart_from=[x]) == 0 and census.saved_bytes(lambda: x * x) == x.nbytes
    assert x.nbytes <= census.heap_bytes(lambda: torch.relu(x)) <= x.nbytes + 2**16

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = x + 1
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.kept

    assert [count(lambda: Hidden.apply(x)) for count in counts] == [0, x.nbytes]
    text = census.table({"relu": (lambda: torch.relu(x), torch.nn.Identity())})
    assert text.splitlines()[-1].startswith("| relu | 0.25 (1.000) | 0.25 (1.000) | ")


def test_smoke_runs_leave_real_results_alone() -> None:
    parser = measure.parser("x")
    assert measure.folder(parser.parse_args([])) == measure.RESULTS
    assert measure.folder(parser.parse_args(["--size", "tiny"])) == measure.SMOKE_RESULTS


# ----------------------------------------------------------------------------------------------------------
# The command for a GPU


def test_gpu_command_without_a_gpu() -> None:
    done = run("gpu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [gpu.NO_GPU]


@pytest.mark.slow
def test_gpu_logic_on_the_cpu(tmp_path: Path) -> None:
    """All parts but the tests', each in its process, into one file, which then holds every variant."""
    fused = hasattr(torch.ops.patchconv, "conv2d_fused")
    for part in (part for part in gpu.PARTS if part != "tests" and (fused or part not in ("correct", "convs"))):
        options = ("--only", part, "--budget", "100", "--out", str(tmp_path))
        done = run("gpu", "--device", "cpu", "--size", "tiny", *options)
        assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "cpu.json").read_text())
    if fused:
        assert data["correct"]["failures"] == [] and data["correct"]["checked"] == data["correct"]["of"] > 30
        assert data["convs"]["rows"] and not any("error" in row for row in data["convs"]["rows"])
    wanted = [(c.name, p, v.name) for c, p, variants in gpu_measure.work("tiny") for v in variants]
    for part in ("memory", "speed"):
        assert [(row["name"], row["pass"], row["variant"]) for row in data[part]] == wanted
        for row in data[part]:
            assert "error" not in row or row["implementation"] == "patch_conv", row
        forced = [row for row in data[part] if row["implementation"] == "ours" and row["splits"]]
        assert forced and all(row["path"] == "tiled" for row in forced)
    for section, jobs in gpu_kernels.SECTIONS.items():
        rows = data["kernels"][section]
        facts = ("name", "pass", "dtype", "layout", "mib", "targets")
        assert [{key: row[key] for key in facts} for row in rows] == [job.facts for job in jobs("tiny")]
        assert all(row["met"].keys() == row["targets"].keys() and min(row["calls"].values()) >= 10 for row in rows)
    assert not data.get("missing")
    text = (tmp_path / "cpu.md").read_text()
    assert all(variant.name in text for variant in gpu_measure.VARIANTS)
    assert all(f"## {section.capitalize()}: time" in text for section in gpu_kernels.SECTIONS)


def test_gpu_run_keeps_within_its_time(tmp_path: Path) -> None:
    """With no time at all nothing is measured, and all of it is named as missing."""
    rows: list[Any] = []
    limits = {"copy_gb_s": 1.0, "bf16_tflop_s": 1.0}
    missing = gpu_measure.memory("full", "cpu", limits, rows, lambda: None, lambda: 0.0)
    assert rows == [] and len(missing) == len(list(gpu_measure.work("full")))


def test_gpu_parts_share_less_than_eight_minutes() -> None:
    assert gpu.SHARES.keys() == gpu.PARTS.keys() and sum(gpu.SHARES.values()) + 10 < 8 * 60
    assert list(gpu.PARTS)[-1] == "speed", "what is left goes to the last"


def test_running_out_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 44.00 GiB.")

    def refused() -> dict[str, Any]:
        raise RuntimeError("cuDNN says no\nand more")

    def broken() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    collected = []
    monkeypatch.setattr(gpu_measure.gc, "collect", lambda: collected.append(1))
    assert gpu_measure.guarded(dict, "cpu", tidy=False) == {} and not collected
    assert gpu_measure.guarded(out_of_memory, "cpu", tidy=False) == {"error": "OOM"} and len(collected) == 1
    assert gpu_measure.guarded(dict, "cpu") == {} and len(collected) == 2
    assert gpu_measure.guarded(out_of_memory, "cpu") == {"error": "OOM"}
    assert gpu_measure.guarded(refused, "cpu") == {"error": "cuDNN says no"}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu_measure.guarded(broken, "cpu")


def test_gpu_cases_are_the_published_ones() -> None:
    names = [case.name for case in cases.GPU["full"]]
    assert len(set(names)) == len(names) == 23
    assert "64->64 4096x4096 k7 bfloat16" in names and "512->512 2048x2048 k5 float16" in names
    assert "256->512 2048x4608 k3 float16" in names and "32x64->64 56x56 k3 bfloat16" in names


# ----------------------------------------------------------------------------------------------------------
# What they are made of


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("kernel", [2, 3])
def test_a_case_knows_its_bytes(layout: str, kernel: int) -> None:
    case = Case(3, 5, 12, 10, kernel, "float16", layout, batch=2)
    module, x = case.module(), case.input()
    y = module(x)
    assert (x.nbytes, y.nbytes) == (case.input_bytes, case.output_bytes)
    assert sum(p.nbytes for p in module.parameters()) == case.weight_bytes
    assert case.gradient().shape == y.shape
    for tensor in (x, y):
        assert tensor.is_contiguous(memory_format=cases.LAYOUTS[layout])
    assert case.flop == 2 * y.numel() * 3 * kernel * kernel


@pytest.mark.parametrize("pass_", cases.PASSES)
def test_implementations_compute_the_same(pass_: str) -> None:
    case = Case(4, 6, 20, 14, 3, layout="channels_last")
    found = []
    for implementation, splits in ((cases.STOCK, None), (cases.OURS, None), (cases.OURS, 4)):
        torch.manual_seed(5)
        result = cases.prepare(case, case.module(implementation, splits), pass_)()
        found.append([result] if isinstance(result, torch.Tensor) else list(result))
    shapes = {"fprop": 1, "dgrad": 1, "wgrad": 1, "backward": 3}
    assert all(len(results) == shapes[pass_] for results in found)
    for results in found[1:]:
        torch.testing.assert_close(results, found[0])


def test_paired_rounds() -> None:
    order: list[str] = []
    timed = measure.paired({s: lambda s=s: order.append(s) for s in "AB"}, budget=0, least=3, warm=1)  # type: ignore[misc]
    assert order == ["A", "B"] * 4 and timed.rounds == 3
    timed = measure.Paired({"A": [1.0, 2.0, 4.0], "B": [2.0, 6.0, 4.0]})
    assert vars(timed.ratio("B", "A")) == {"median": 2.0, "least": 1.0, "most": 3.0}
    assert timed.facts("A")["ms"]["B"] == {"median": 4000.0, "least": 2000.0, "most": 6000.0}


def known_peak(workspace: int, result: int) -> dict[str, int]:
    """Runs in a process of its own: a call whose memory is known."""

    def call() -> torch.Tensor:
        temporary = torch.ones(workspace, dtype=torch.uint8)
        return torch.ones(result, dtype=torch.uint8) * temporary[0]

    torch.ones(8, dtype=torch.uint8) * torch.ones(8, dtype=torch.uint8)[0]
    peak = measure.peak_of(call)
    return {"workspace": peak.workspace, "result": peak.result}


def test_peak_of_a_known_call() -> None:
    # The ones that the result is multiplied from are a second temporary of the result's size.
    found = measure.in_fresh_process("tests.bench.test_bench:known_peak", workspace=80 << 20, result=32 << 20)
    assert found["result"] == 32 << 20
    assert abs(found["workspace"] - (112 << 20)) < 6 << 20, found


def fail(how: str) -> dict[str, int]:
    if how == "memory":
        torch.empty(1 << 55, dtype=torch.uint8)
    if how == "killed":
        os.kill(os.getpid(), 9)
    raise ValueError("of its own accord")


def test_a_fresh_process_that_fails() -> None:
    for how in ("memory", "killed"):
        assert measure.in_fresh_process("tests.bench.test_bench:fail", how=how) == {"error": "out of memory"}
    with pytest.raises(RuntimeError, match="of its own accord"):
        measure.in_fresh_process("tests.bench.test_bench:fail", how="otherwise")
    given = {"workspace": 1, "result": 1}
    assert measure.in_fresh_process("tests.bench.test_bench:known_peak", timeout=0.1, **given) == {
        "error": "not done in 0 s"
    }


def test_the_checks_notice_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    check = replace(next(iter(correct.checks())), splits=3, content="ramp")
    assert correct.excess(check, "cpu")[1] == ""
    ours = correct.Check.ours

    def off_at_a_seam(self: correct.Check, *tensors: torch.Tensor) -> torch.Tensor:
        y = ours(self, *tensors)
        mask = torch.ones_like(y)
        mask[:, :, y.shape[2] // 3] = 1 + 1e-4
        return y * mask

    monkeypatch.setattr(correct.Check, "ours", off_at_a_seam)
    worst, wrong = correct.excess(check, "cpu")
    assert worst > 1 and "output: error" in wrong
    monkeypatch.setattr(correct.Check, "ours", correct.Check.stock)
    assert "computed in 0 tiles" in correct.excess(check, "cpu")[1], "no check of tiling may pass without tiling"


def test_the_large_probe_notices_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    # Split, since tiles are accumulated in float32 where stock sums in bfloat16 on some processors.
    small = {"width": 40, "rows": 64, "channels": 5, "splits": 4}
    assert correct.probe_large("cpu", **small)[1] == ""
    conv2d = correct.pc.functional.conv2d
    monkeypatch.setattr(correct.pc.functional, "conv2d", lambda *a, **k: conv2d(*a, **k).roll(1, 2))
    assert "2^31" in correct.probe_large("cpu", **small)[1]


def test_rendering_again_changes_nothing(tmp_path: Path) -> None:
    row = {
        "name": "a",
        "layout": "NCHW",
        "pass": "fprop",
        "input_bytes": measure.GIB,
        "output_bytes": measure.GIB,
    }
    rows = [
        row | {"implementation": "stock", "workspace": 2 * measure.GIB, "path": "stock", "tiles": 1},
        row | {"implementation": "patch_conv", "error": "not installed"},
        row
        | {
            "implementation": "ours",
            "workspace": 16 << 20,
            "path": "tiled",
            "tiles": 130,
            "pass_bound": True,
        },
    ]
    data = measure.report_head("conv_memory", "full") | {"bound": 96 << 20, "rows": rows}
    path = measure.write_results(data, tmp_path)
    written = report.render(path)
    text = written[0].read_text()
    assert "| a | NCHW | fprop | 1.00 | 2048.0 | not installed | 16.0 | 130 (tiled) | pass |" in text
    assert "trial" not in text and len(written) == 2
    assert report.main([str(path)]) == 0 and written[0].read_text() == text
