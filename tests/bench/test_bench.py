"""The benchmarks run, measure what they say and write what they promise. No speed is tested."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import SUMS_IN_BFLOAT16

from bench import (
    cases,
    conv_cases,
    conv_memory,
    conv_rivals,
    gpu,
    gpu_kernels,
    gpu_measure,
    gpu_steps,
    gpu_tile,
    kept,
    measure,
    report,
)
from bench.cases import Case

Results = Callable[..., dict[str, Any]]


def test_conv_memory(results: Results) -> None:
    data = results("conv_memory")
    assert {row["implementation"] for row in data["rows"]} == {"stock", "patch_conv", "ours"}
    for row in data["rows"]:
        if row["implementation"] == "patch_conv" and measure.installed("patch_conv") is None:
            assert row["error"] == "not installed"
            continue
        assert row["result"] == row["output_bytes"] and -measure.MIB < row["workspace"] < conv_memory.BOUND


@pytest.mark.parametrize(("over", "verdict"), [(0, "pass"), (1, "FAIL")])
def test_verdict_on_memory(over: int, verdict: str, results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"workspace": conv_memory.BOUND + over, "result": 1, "seconds": 1.0, "path": "tiled", "tiles": 9}
    monkeypatch.setattr(measure, "in_fresh_process", lambda *_, **__: dict(found))
    data = results("conv_memory")
    ours = [row for row in data["rows"] if row["implementation"] == "ours"]
    assert ours and all(row["pass_bound"] is (verdict == "pass") for row in ours)
    assert f"| 9 (tiled) | {verdict} |" in data["text"] and f"bound 96 MiB: {verdict}" in data["printed"][1]


def test_conv_speed(results: Results) -> None:
    data = results("conv_speed", "--passes", "fprop", "backward", "--large-kernel")
    assert {(row["layout"], row["pass"], row["kernel"]) for row in data["rows"]} == {
        (layout, pass_, kernel) for layout in cases.LAYOUTS for pass_ in ("fprop", "backward") for kernel in (3, 7)
    }
    for row in data["rows"]:
        assert row["rounds"] >= 3
        assert ("ours, splits=16" in row["targets"]) == (row["layout"] == "channels_last")
    forced = [row["paths"]["ours, splits=16"] for row in data["rows"] if row["layout"] == "channels_last"]
    assert all("16 tiles" in path for path in forced), forced


def test_verdict_on_speed(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """One side right at its target, one behind it."""
    seconds = {"stock": [1.0] * 3, "ours": [1.0, 1.05, 9.0], "ours, splits=16": [1.2, 1.26, 1.3]}
    timed = lambda calls, budget: measure.Paired({side: seconds[side] for side in calls})  # noqa: E731
    monkeypatch.setattr(measure, "paired", timed)
    data = results("conv_speed", "--passes", "fprop")
    met = {row["layout"]: row["met"] for row in data["rows"]}
    assert met == {"NCHW": {"ours": False}, "channels_last": {"ours": True, "ours, splits=16": False}}
    assert data["text"].count("| <= 1.05 | pass |") == 1 and data["text"].count("| FAIL |") == 2


def test_overhead(results: Results) -> None:
    for row in results("overhead")["rows"]:
        assert row["us"]["stock"]["least"] > 0 and row["us"]["ours"]["least"] > 0
        assert ("met" in row) == (row["mode"] != "forward and backward")


def test_padding(results: Results) -> None:
    data = results("padding")
    paths = {(row["kernel"], row["padding"]): row["path"] for row in data["rows"]}
    assert paths[3, 0] == paths[9, 0] == "stock" and paths[3, 5] == "tiled", "tiles bring wide padding with them"
    assert data["missing"] == 0


def test_half(results: Results) -> None:
    data = results("half")
    assert {(row["dtype"], row["pass"], row["path"]) for row in data["rows"]} == {
        (dtype, pass_, "stock") for dtype in ("bfloat16", "float16") for pass_ in ("fprop", "dgrad", "wgrad")
    }, "this little work is handed to stock"
    assert all(row["ms"]["stock"] > 0 and row["ms"]["ours"] > 0 for row in data["rows"])


def test_resnet(results: Results) -> None:
    pytest.importorskip("torchvision")
    assert [(row["mode"], row["batch"]) for row in results("resnet")["rows"]] == [
        ("forward", 1), ("forward", 8), ("training step", 1), ("training step", 8),
    ]  # fmt: skip


def test_lean(results: Results) -> None:
    pytest.importorskip("torchvision")
    data = results("lean")
    (row,) = data["floors"]
    assert 0 < row["convert"]["held"] < row["layers"]["held"] < 0.8 * row["stock"]["held"]
    assert 0 < data["toy"]["layers"]["peak"] < data["toy"]["stock"]["peak"]
    assert "resnet18" in data["text"]


def test_lean_error(results: Results) -> None:
    pytest.importorskip("torchvision")
    (row,) = results("lean_error")["rows"]
    assert row["same_without_recompute"] and 0 < row["median"]["convert"] < 10 * row["median"]["stock"]


def test_lean_speed(results: Results) -> None:
    pytest.importorskip("torchvision")
    data = results("lean_speed")
    assert [row["layout"] for row in data["steps"]] == ["NCHW", "channels_last"]
    assert [row["pass"] for row in data["relu"]] == ["forward", "forward in place", "backward"]
    assert all(row["rate"] > 0 for row in data["relu"])
    assert "resnet18" in data["text"]


def test_what_is_kept() -> None:
    """What is kept, by three counts: an activation's output, a product's operands, and what a hook cannot see."""
    x = torch.randn(64, 1024, requires_grad=True)
    counts = (kept.saved_bytes, kept.held_bytes)
    assert [count(lambda: torch.relu(x)) for count in counts] == [x.nbytes, x.nbytes]
    assert [count(lambda: (x * 1) * (x * 2)) for count in counts] == [2 * x.nbytes, 2 * x.nbytes]
    assert [count(lambda: x + 1) for count in counts] == [0, 0]
    assert kept.saved_bytes(lambda: x * x, apart_from=[x]) == 0 and kept.saved_bytes(lambda: x * x) == x.nbytes
    assert x.nbytes <= kept.heap_bytes(lambda: torch.relu(x)) <= x.nbytes + 2**16

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.more = x + 1
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.more

    assert [count(lambda: Hidden.apply(x)) for count in counts] == [0, x.nbytes]
    text = kept.table({"relu": (lambda: torch.relu(x), torch.nn.Identity())})
    assert text.splitlines()[-1].startswith("| relu | 0.25 (1.000) | 0.25 (1.000) | ")


def test_smoke_runs_leave_real_results_alone() -> None:
    parser = measure.parser("x")
    assert measure.folder(parser.parse_args([])) == measure.RESULTS
    assert measure.folder(parser.parse_args(["--size", "tiny"])) == measure.SMOKE_RESULTS


def test_gpu_command_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert capsys.readouterr() == ("", gpu.NO_GPU + "\n")


def test_gpu_logic_on_the_cpu(tmp_path: Path) -> None:
    """All parts but the tests', one after another into one file, which then holds every variant."""
    one = gpu.Run(Namespace(device="cpu", size="tiny", out=tmp_path, budget=1000.0))
    for part, (work, _) in gpu.PARTS.items():
        if part not in gpu.TESTS:
            work(one)
    one.save()
    data = gpu.Run(Namespace(device="cpu", size="tiny", out=tmp_path, budget=100.0)).data  # a later part's
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
    check_convs(data["convs"])
    check_networks(data["networks"])
    check_steps(data["steps"])
    assert not data.get("missing")
    written, picture = report.render(one.path)
    text = written.read_text()
    assert all(variant.name in text for variant in gpu_measure.VARIANTS)
    assert all(f"## {section.capitalize()}: time" in text for section in gpu_kernels.SECTIONS)
    assert "## Whole networks" in text and "## Training steps of whole models" in text
    for title in ("targets", "rivals", "time, memory, error", "large tensors"):
        assert f"## Convolutions: {title}" in text
    assert picture.stat().st_size > 1000


def check_networks(data: dict[str, Any]) -> None:
    asked = [(work.case, work.train, form) for work in gpu_tile.works("tiny") for form in gpu_tile.forms(work)]
    assert [(row["case"], row["train"], row["form"]) for row in data["rows"]] == asked
    for row in data["rows"]:
        assert row.get("error", "refused: at least").startswith("refused: at least"), row
        assert ("error" in row and row["form"] in gpu_tile.SHARES) or row["seconds"] > 0
    assert data["errors"].keys() == {"unet"} and data["errors"]["unet"]["tile"] < 10


def check_steps(rows: list[dict[str, Any]]) -> None:
    asked = [(name, amp, form) for name, amp in gpu_steps.works("tiny") for form in gpu_steps.forms("cpu")]
    assert [(row["model"], row["amp"] and getattr(torch, row["amp"]), row["form"]) for row in rows] == asked
    for row in rows:
        assert row["predicted"] > 0 and row["ms"]["median"] > 0, row
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=0.02)


def check_convs(data: dict[str, Any]) -> None:
    jobs = [(job, pass_) for job in conv_cases.jobs("tiny") for pass_ in conv_cases.PASSES]
    for row, (job, pass_) in zip(data["rows"], jobs, strict=True):
        facts = ("name", "dtype", "layout")
        assert [row[key] for key in facts] == [getattr(job, key) for key in facts] and row["pass"] == pass_
        assert "error" not in row and row["figures"]["error"] > 0 and row["fastest_rival"], row
        assert row["met"].keys() == row["targets"].keys() == conv_cases.targets(job, pass_).keys()
        assert min(side["calls"] for side in row["sides"].values() if "ms" in side) >= 10
        assert row["sides"][conv_cases.NATIVE]["path"] in ("stock", "tiled", "native")
        assert (pass_ == "fprop") == (conv_rivals.CUDNN in row["sides"])
    wrong = [probe["wrong"] for probe in data["probes"]]
    assert wrong and not any(found and not (SUMS_IN_BFLOAT16 and found.startswith("grad_")) for found in wrong), wrong


@pytest.mark.parametrize(("printed", "code", "passed"), [("3 passed in 1s", 0, True), ("FAILED a\n1 failed", 1, False)])
def test_gpu_tests(printed: str, code: int, passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def finished(command: list[str], seconds: float, environment: Any) -> tuple[str, int | None]:
        asked.append(command)
        return printed, code

    monkeypatch.setattr(gpu, "_finished", finished)
    one = gpu.Run(Namespace(device="cpu", size="tiny", out=tmp_path, budget=100.0))
    one.device = "cuda"
    gpu.tests("large", one)
    assert "cuda and large" in asked[0] and one.data["large"]["passed"] is passed
    assert one.data["large"]["summary"] == printed.splitlines()[-1]
    assert one.data["large"]["failed"] == [line for line in printed.splitlines() if line.startswith("FAILED")]


def test_gpu_run_keeps_within_its_time(tmp_path: Path) -> None:
    """With no time at all nothing is measured, and all of it is named as missing."""
    rows: list[Any] = []
    limits = {"copy_gb_s": 1.0, "bf16_tflop_s": 1.0}
    missing = gpu_measure.memory("full", "cpu", limits, rows, lambda: None, lambda: 0.0)
    assert rows == [] and len(missing) == len(list(gpu_measure.work("full")))


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
    if how == "late":
        time.sleep(60)
    raise ValueError("of its own accord")


def test_a_fresh_process_that_fails() -> None:
    for how in ("memory", "killed"):
        assert measure.in_fresh_process("tests.bench.test_bench:fail", how=how) == {"error": "out of memory"}
    with pytest.raises(RuntimeError, match="of its own accord"):
        measure.in_fresh_process("tests.bench.test_bench:fail", how="otherwise")
    found = measure.in_fresh_process("tests.bench.test_bench:fail", timeout=0.1, how="late")
    assert found == {"error": "not done in 0 s"}


def test_rendering_again_changes_nothing(tmp_path: Path) -> None:
    row = {"name": "a", "layout": "NCHW", "pass": "fprop", "input_bytes": measure.GIB, "output_bytes": measure.GIB}
    rows = [
        row | {"implementation": "stock", "workspace": 2 * measure.GIB, "path": "stock", "tiles": 1},
        row | {"implementation": "patch_conv", "error": "not installed"},
        row | {"implementation": "ours", "workspace": 16 << 20, "path": "tiled", "tiles": 130, "pass_bound": True},
    ]
    data = measure.report_head("conv_memory", "full") | {"bound": 96 << 20, "rows": rows}
    path = measure.write_results(data, tmp_path)
    written = report.render(path)
    text = written[0].read_text()
    assert "| a | NCHW | fprop | 1.00 | 2048.0 | not installed | 16.0 | 130 (tiled) | pass |" in text
    assert "trial" not in text and len(written) == 2
    assert report.main([str(path)]) == 0 and written[0].read_text() == text
