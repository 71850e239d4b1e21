"""bench.gpu on convolutions: cases are the networks', probes notice mistakes, rows are judged. No speed is tested."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.checks import SUMS_IN_BFLOAT16

pytest.importorskip("matplotlib")

from bench import conv_cases, conv_errors, conv_gpu, conv_rivals, report_gpu
from bench.conv_cases import ConvJob

LAYOUTS = ("NCHW", "channels_last")


def layers(model: torch.nn.Module, side: int) -> set[tuple[Any, ...]]:
    """(channels, outputs, side, kernel, stride, groups) of a model's convolutions."""
    found = set()

    def note(module: Any, inputs: Any) -> None:
        found.add((module.in_channels, module.out_channels, inputs[0].shape[2], module.kernel_size[0],
                   module.stride[0], module.groups))  # fmt: skip

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            assert module.padding[0] == module.kernel_size[0] // 2
            module.register_forward_pre_hook(note)
    with torch.device("meta"):
        model(torch.empty(1, 3, side, side))
    return found


def test_layers_are_those_of_the_networks() -> None:
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        resnet, mobilenet = models.resnet50().eval(), models.mobilenet_v2().eval()

    def facts(jobs: list[ConvJob]) -> list[tuple[Any, ...]]:
        return [(j.channels, j.outputs, j.height, j.kernel, j.stride, j.groups) for j in jobs]

    wide = {one for one in layers(mobilenet, 224) if one[-1] > 1}
    for jobs, of_model in ((conv_cases.resnet50(), layers(resnet, 224)), (conv_cases.mobilenet_v2(), wide)):
        assert sorted(facts(jobs)) == sorted(of_model) and {job.batch for job in jobs} == {32}


def test_jobs() -> None:
    jobs = list(conv_cases.jobs("full"))
    assert len({str(job) for job in jobs}) == len(jobs)
    assert {(job.dtype, job.layout) for job in jobs} == {(d, lo) for d in conv_cases.DTYPES for lo in LAYOUTS}
    first = jobs[: conv_gpu.AHEAD : 4]
    assert [job.name for job in first] == ["64->64 4096x4096 k3", "128->128 2048x2048 k3", "64->64 2048x2048 k7"]
    large = [job for job in jobs if job.source == "64-bit"]
    assert [job.dtype for job in large] == ["bfloat16", "tf32"]
    assert all(job.elements > 2**31 and job.groups == job.channels for job in large)
    assert jobs[0].floor_ms == pytest.approx(1.55, abs=0.005) == jobs[4].floor_ms
    assert replace(jobs[4], dtype="tf32").floor_ms == pytest.approx(2 * jobs[4].floor_ms)
    sources = {job.source for job in jobs}
    assert sources == {"bench.cases", "64-bit", "ResNet-50", "MobileNetV2", "diffusion decoder"}


def test_targets() -> None:
    of = {job.name + job.layout: conv_cases.targets(job, "fprop") for job in conv_cases.jobs("full")
          if job.dtype == "bfloat16"}  # fmt: skip
    assert of["64->64 4096x4096 k3channels_last"]["of_rival"] == 1.0
    assert of["64->64 4096x4096 k3NCHW"]["of_rival"] == 1.3
    assert of["64 depthwise 6144x6144 k3channels_last"]["of_rival"] == 2.0
    assert "of_rival" not in of["128->128 2048x2048 k3channels_last"]
    assert {name for name, asked in of.items() if "tflop_s" in asked} >= {"128->128 2048x2048 k3channels_last"}
    peaks = {name: asked["peak_gib"] for name, asked in of.items() if "peak_gib" in asked}
    assert len(peaks) == 12 and set(peaks.values()) == {8.1, 16.1}
    assert peaks["512->512 2048x2048 k3NCHW"] == 8.1 and peaks["256->256 4096x4096 k7NCHW"] == 16.1
    assert all(asked["memory_mib"] == 64 and asked["auto_of_rival"] == 0.95 for asked in of.values())
    assert "of_rival" not in conv_cases.targets(next(conv_cases.jobs("full")), "dgrad")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kernel", "stride", "groups"), [(3, 1, 1), (3, 2, 4), (7, 2, 1), (1, 2, 2), (5, 1, 4)])
def test_probed_places_are_exact(layout: str, kernel: int, stride: int, groups: int) -> None:
    job = ConvJob(4, 8, 9, 12, kernel, "tf32", layout, 2, stride, groups)
    x, weight, bias = job.tensors("cpu", "ramp")
    assert (x.nbytes + weight.nbytes + bias.nbytes) + 4 * torch.Size(job.output_size).numel() == job.bytes
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    y = F.conv2d(*leaves, None, stride, job.padding, 1, groups)
    assert tuple(y.shape) == job.output_size and job.flop == 2 * y.numel() * (4 // groups) * kernel**2
    grad = job.filled(job.output_size, "cpu", "noise")
    grad_x, grad_w = torch.autograd.grad(y, leaves, grad.double())
    out, back, taps = (
        conv_errors.places(job.output_size, layout), conv_errors.places(job.input_size, layout), conv_errors.taps(job)
    )  # fmt: skip
    with_relu = (y + bias.double().view(-1, 1, 1)).relu()
    exact = [
        (conv_errors.at(y, out), conv_errors.forward(job, x, weight, None, out)),
        (conv_errors.at(with_relu, out), conv_errors.forward(job, x, weight, bias, out)),
        (conv_errors.at(grad_x, back), conv_errors.input_gradient(job, grad, weight, back)),
        (conv_errors.at(grad_w, taps), conv_errors.weight_gradient(job, x, grad, taps)),
    ]
    for got, wanted in exact:
        torch.testing.assert_close(got.detach(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_are_beside_the_marks(layout: str) -> None:
    side = conv_errors.LARGE["2^32"]
    found = conv_errors.places((1, 16, side, side), layout)
    for mark in conv_errors.MARKS:
        assert 16 * side * side > mark
        plane = mark // 16 if layout == "channels_last" else mark % side**2
        assert (0, plane // side, plane % side) in found


@pytest.mark.skipif(SUMS_IN_BFLOAT16, reason="stock's gradients are added up in bfloat16 on this CPU")
@pytest.mark.parametrize("what", ["output", "grad_input", "grad_weight"])
def test_the_large_probe_notices_a_mistake(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conv_errors.probe_large("cpu", "channels_last", 24)[1] == ""
    assert conv_errors.probe_large("cpu", "NCHW", 24, groups=16)[1] == ""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            y = F.conv2d(x, weight, None, 1, 1)
            return y.roll(1, 3) if what == "output" else y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            grads = list(torch.ops.aten.convolution_backward(
                grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])[:2])  # fmt: skip
            place = {"grad_input": 0, "grad_weight": 1}.get(what)
            if place is not None:
                grads[place] = grads[place].flip(2)
            return tuple(grads)

    monkeypatch.setattr(conv_errors.pc.functional, "conv2d", lambda x, weight, *_: Off.apply(x, weight))
    worst, wrong = conv_errors.probe_large("cpu", "NCHW", 24)
    assert worst > 1 and wrong.startswith(f"{what}: error") and wrong.count("error") == 1


def sides(**ms: float) -> dict[str, Any]:
    names = {"native": conv_cases.NATIVE, "auto": conv_cases.AUTO, "stock": conv_rivals.STOCK}
    names |= {"cudnn": conv_rivals.CUDNN}
    return {names[name]: {"ms": {"median": value, "least": value, "most": value}, "workspace": 2**20, "path": "native"}
            for name, value in ms.items()}  # fmt: skip


def judged(job: ConvJob, pass_: str = "fprop", error: float = 1.0, h100: bool = False, **ms: float) -> dict[str, Any]:
    errors = {"noise": {conv_cases.NATIVE: error * 2.0**-8, conv_rivals.STOCK: 2.0**-8}}
    row = job.facts() | {"pass": pass_, "sides": sides(**ms), "errors": errors, "floor_bytes": job.bytes}
    return row | conv_gpu.judged(job, pass_, row, h100)


def test_rows_are_judged() -> None:
    job = next(conv_cases.jobs("full"))
    row = judged(job, native=2.0, auto=3.0, stock=5.0, cudnn=2.5)
    assert row["fastest_rival"] == conv_rivals.CUDNN and row["figures"]["of_rival"] == 1.25
    assert row["met"] == {"memory_mib": True, "error": True, "auto_of_rival": False, "of_rival": False}
    assert "floor_ms" not in row and "of_roofline" not in row["sides"][conv_cases.NATIVE]
    row = judged(job, native=1.9, auto=1.9, stock=5.0, cudnn=2.5, error=1.11, h100=True)
    assert row["met"] == {"memory_mib": True, "error": False, "auto_of_rival": True, "of_rival": True}
    assert row["sides"][conv_cases.NATIVE]["of_roofline"] == pytest.approx(1.55 / 1.9, abs=0.01)
    row["sides"][conv_cases.AUTO]["workspace"] = 65 * 2**20
    assert not conv_gpu.judged(job, "fprop", row, False)["met"]["memory_mib"]
    failed = {"sides": {side: {"error": "OOM"} for side in conv_rivals.OURS}, "errors": {"error": "OOM"}}
    assert not any(conv_gpu.judged(job, "fprop", failed, True)["met"].values())


def test_verdicts_and_rivals() -> None:
    job = next(conv_cases.jobs("full"))
    rows = [judged(job, native=2.0, auto=3.0, stock=5.0, cudnn=1.0), judged(job, native=1.0, auto=1.0, stock=5.0)]
    rows[1]["sides"]["CUTLASS"] = rows[0]["sides"]["CUTLASS"] = {"error": "not installed"}
    lines = {(line[0], line[1]): line for line in report_gpu.conv_targets(rows).rows}
    assert lines["fprop", report_gpu.CONV_TITLES["of_rival"]][2:] == [
        ">= 1.3", "1 of 2", "0.50 (64->64 4096x4096 k3 bfloat16 NCHW)", "FAIL",
    ]  # fmt: skip
    assert lines["fprop", report_gpu.CONV_TITLES["memory_mib"]][2:4] == ["<= 64", "2 of 2"]
    by_rival = {line[1]: line[4:] for line in report_gpu.rivals(rows)}
    assert by_rival["stock"] == [2, 2, 0, "3.75", "2.50", "5.00"]
    assert by_rival["cudnn_convolution_relu"] == [1, 0, 1, "0.50", "0.50", "0.50"]
    assert by_rival["CUTLASS"][:2] == [0, "not installed"]
    failed = job.facts() | {"pass": "fprop", "error": "OOM"}
    assert list(report_gpu.conv_targets([*rows, failed]).rows)[-1][3:] == [
        "1", "64->64 4096x4096 k3 bfloat16 NCHW: OOM", "FAIL",
    ]  # fmt: skip
    *_, table = report_gpu.convs({"rows": [*rows, failed]})
    assert {len(line) for line in table.rows} == {len(table.head)} and "OOM" in table.rows[-1]


@pytest.mark.parametrize("pass_", conv_cases.PASSES)
def test_all_ways_compute_the_same(pass_: str) -> None:
    for job in conv_cases.jobs("tiny"):
        tensors = job.tensors("cpu")
        if pass_ == "fprop":
            calls = conv_rivals.forward_calls(job, tensors, "cpu")
        else:
            calls = conv_rivals.gradient_calls(job, pass_, tensors, job.filled(job.output_size, "cpu"), "cpu")
        found = {}
        for side, make in calls.items():
            try:
                found[side] = conv_gpu.one(make()())
            except conv_rivals.Absent as absent:
                assert side not in conv_rivals.OURS and side != conv_rivals.STOCK and str(absent)
        wanted = found[conv_rivals.STOCK]
        assert {*conv_rivals.OURS, conv_rivals.STOCK} <= set(found)
        eps = torch.finfo(wanted.dtype).eps
        for got in found.values():
            torch.testing.assert_close(got, wanted, rtol=2 * eps, atol=2 * eps * float(wanted.abs().max()))


def test_errors_notice_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    job = next(conv_cases.jobs("tiny"))
    for pass_ in conv_cases.PASSES:
        assert conv_gpu.error_ratio(job, conv_gpu.errors(job, pass_, "cpu")) <= 1.1
    fused = conv_rivals.fused
    monkeypatch.setattr(conv_rivals, "fused", lambda *given: fused(*given) * (1 + 2.0**-6))
    assert conv_gpu.error_ratio(job, conv_gpu.errors(job, "fprop", "cpu")) > 1.5


def test_what_there_was_no_time_for_is_named() -> None:
    data: dict[str, Any] = {}
    missing = conv_gpu.measure_section("full", "cpu", data, lambda: None, lambda: 0.0)
    jobs = list(conv_cases.jobs("full"))
    assert data == {"rows": [], "probes": []} and len(set(missing)) == len(missing)
    assert len(missing) == len(jobs) * 3 + len(conv_gpu.PROBES) and all(line.startswith("convs:") for line in missing)


def test_a_front_end_of_another_version_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    job = next(conv_cases.jobs("tiny"))

    def broken(*_: Any) -> Any:
        raise AttributeError("no such thing")

    monkeypatch.setitem(conv_rivals.RIVALS, conv_rivals.FRONT_END, broken)
    timer = conv_gpu.Timer("cpu")
    row = conv_gpu.measured(job, "fprop", "cpu", timer, 0.0)
    assert row["sides"][conv_rivals.FRONT_END] == {"error": "AttributeError: no such thing"}
    monkeypatch.setattr(conv_rivals, "fused", broken)
    with pytest.raises(AttributeError):
        conv_gpu.measured(job, "fprop", "cpu", timer, 0.0)
