"""bench.tune: rules follow from measurements, made up here; points are measured as they say. No speed is tested."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import patchconv_native as pc
from bench import gpu_measure, measure, report, tune, tune_rules
from bench.tune_rules import Box, Point, boxes, derive
from patchconv_native import _C, conv_rules

needs_kernels = pytest.mark.skipif(not pc.build_info()["cuda"], reason="this build has no CUDA kernels")
SMALL, LARGE = 100_352, 2**20
ARCH = 70  # of no GPU that this package is built for


def point(c: int, ratio: float | None, places: int = LARGE, **changes: Any) -> Point:
    return replace(Point("fprop", "bfloat16", "NCHW", 1, c, c, 9, 1, places, ratio), **changes)


@pytest.fixture(autouse=True)
def no_rules_stay() -> Iterator[None]:
    yield
    _C.set_conv_rules(ARCH, None)


def test_channels_that_won_are_one_range() -> None:
    points = [point(c, r) for c, r in ((16, 0.9), (64, 1.0), (128, 1.5), (256, 0.99), (512, 2.0))]
    assert boxes(points) == [Box(64, 128, LARGE, None), Box(512, 512, LARGE, None)]


def test_one_loss_ends_a_range_of_places() -> None:
    points = [point(c, r, n) for c, n, r in ((64, SMALL, 0.8), (64, LARGE, 2), (128, SMALL, 1.2), (128, LARGE, 1.2))]
    assert boxes(points) == [Box(128, 128, SMALL, None), Box(64, 128, LARGE, None)]
    assert boxes([point(64, 2.0, SMALL), point(64, 0.9, LARGE)]) == [], "a loss at more places is a loss"


def test_unequal_channels_count_too() -> None:
    points = [point(64, 2.0), point(128, 2.0), point(256, 2.0), point(256, 0.5, sources=64)]
    assert boxes(points) == [Box(64, 128, LARGE, None), Box(256, 256, LARGE, None)]


def test_what_was_not_measured_is_not_taken() -> None:
    assert boxes([point(64, None)]) == []
    assert boxes([point(64, 2.0), point(128, None), point(256, 2.0)]) == [
        Box(64, 64, LARGE, None), Box(256, 256, LARGE, None),
    ]  # fmt: skip
    assert boxes([point(64, 2.0, SMALL), point(64, None, LARGE)]) == [Box(64, 64, SMALL, SMALL)]
    assert boxes([point(64, 2.0, SMALL), point(64, None, LARGE), point(64, 2.0, 4 * LARGE)]) == [
        Box(64, 64, SMALL, None)
    ]
    assert derive([]) == []


def test_rules_of_the_kinds() -> None:
    (dense,) = derive([point(64, 2.0)])
    assert dense == {
        "native": True, "pass": "fprop", "dtype": "bfloat16", "layout": "NCHW", "groups": [1, 1],
        "sources": [64, 64], "outputs": [64, 64], "taps": [9, 9], "stride": [1, 1], "places": [LARGE, None],
    }  # fmt: skip
    (depthwise,) = derive([point(1, 2.0, groups=g) for g in (32, 64)])
    assert (depthwise["groups"], depthwise["sources"], depthwise["outputs"]) == ([32, 64], [1, 1], [1, 1])
    (first,) = derive([point(3, 2.0, outputs=c) for c in (32, 64)])
    assert (first["groups"], first["sources"], first["outputs"]) == ([1, 1], [3, 3], [32, 64])


def test_rules_that_differ_in_one_thing_are_joined() -> None:
    everywhere = [
        point(64, 2.0, pass_=pass_, dtype=dtype, layout=layout, taps=taps, stride=stride)
        for pass_ in tune_rules.PASSES for dtype in tune_rules.DTYPES for layout in tune_rules.LAYOUTS
        for taps in (1, 9, 25) for stride in (1, 2)
    ]  # fmt: skip
    (rule,) = derive(everywhere)
    assert not {"pass", "dtype", "layout"} & set(rule) and (rule["taps"], rule["stride"]) == ([1, 25], [1, 2])
    lost = [replace(p, ratio=0.5) if (p.taps, p.stride) == (9, 1) else p for p in everywhere]
    assert sorted((r["taps"], r["stride"]) for r in derive(lost)) == [
        ([1, 1], [1, 2]), ([9, 9], [2, 2]), ([25, 25], [1, 2]),
    ]  # fmt: skip
    lost = [replace(p, ratio=0.5) if p.dtype == "tf32" else p for p in everywhere]
    assert sorted(r["dtype"] for r in derive(lost)) == ["bfloat16", "float16", "float32"]


def taken(p: Point) -> bool:
    return _C.prefers_native_kernel(
        ARCH, pass_=p.pass_, dtype=p.dtype, layout=p.layout, groups=p.groups, sources=p.sources, outputs=p.outputs,
        taps=p.taps, stride=p.stride, places=p.places,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_no_rule_takes_a_loss(seed: int) -> None:
    """On the whole grid with times by chance: what is taken was won, there and at more places; and what was won from
    some places on is taken if its channels are equal."""
    chance = random.Random(seed)
    shapes = [s for s in tune.grid("full") if s.dtype in ("bfloat16", "tf32") and s.stride == 1][:1500]
    likely = chance.choice((0.5, 0.9, 0.99))
    points = [s.point(None if chance.random() < 0.02 else 1.2 if chance.random() < likely else 0.8) for s in shapes]
    rules = derive(points)
    _C.set_conv_rules(ARCH, rules)
    same: dict[tuple[Any, ...], list[Point]] = {}
    for p in points:
        same.setdefault((p.of_class, p.groups, p.sources, p.outputs), []).append(p)
    for members in same.values():
        for p in members:
            later = [q.ratio for q in members if q.places >= p.places and q.ratio is not None]
            won = p.ratio is not None and min(later) >= 1
            if p.ratio is not None:
                assert taken(p) <= won, p
            if won and p.channels[0] == p.channels[1]:
                assert taken(p), p
    assert 0 < len(rules) < len(same)


def test_the_grid() -> None:
    shapes = tune.grid("full")
    assert len(set(shapes)) == len(shapes)
    assert {(s.dtype, s.layout, s.pass_, s.stride) for s in shapes} == {
        (d, lo, p, s) for d in tune.DTYPES for lo in tune.LAYOUTS for p in tune.PASSES for s in (1, 2)
    }
    assert {s.kernel for s in shapes} == {1, 3, 5, 7} and min(s.sources for s in shapes if s.sources > 1) == 3
    assert {s.point(None).kind for s in shapes} == set(tune_rules.KINDS)
    assert {(s.images, s.side) for s in shapes} == set(tune.SIZES["full"])
    classes = [s.point(None).of_class for s in shapes]
    assert classes[0] == ("fprop", "bfloat16", "NCHW", "dense", 9, 1)
    changes = sum(a != b for a, b in itertools.pairwise(classes))
    assert changes + 1 == len(set(classes)), "a class is measured as a whole"
    assert all(max(s.images * s.side**2 for s in shapes if s.sources == c) >= tune_rules.FULL for c in tune.CHANNELS)


@needs_kernels
def test_points_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU the project's kernel never runs, and no point is a win; where it is said to, both sides are timed."""
    shapes = tune.grid("tiny")[::7]
    rows = tune.measure_all(shapes, "cpu", 1, lambda: 1.0)
    assert all(row["refused"] == "native: computed by cuDNN" and not row["won"] for row in rows)
    assert derive(tune.points_of(shapes, rows)) == []
    sides = iter([False, True] * len(shapes))
    monkeypatch.setattr(tune, "own_kernel_ran", lambda call, pass_: (call(), next(sides))[1])
    rows = tune.measure_all(shapes, "cpu", 2, lambda: 1.0)
    for shape, row in zip(shapes, rows, strict=True):
        assert row["ratio"] == pytest.approx(row["ms"]["auto"] / row["ms"]["native"], rel=0.02), row
        assert (row["kernel"], row["groups"]) == (shape.kernel, shape.groups)
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(shapes)


@needs_kernels
@pytest.mark.parametrize("pass_", tune.PASSES)
@pytest.mark.parametrize("stride", [1, 2])
def test_a_point_is_the_pass_that_it_names(pass_: str, stride: int) -> None:
    shape = tune.Shape(pass_, "bfloat16", "channels_last", 4, 1, 1, 3, stride, 2, 6)
    found = tune.calls_of(shape, "cpu")[tune.CUDNN]()
    result = found if pass_ == "fprop" else found[0]
    want = {"fprop": (2, 4, 6, 6), "dgrad": (2, 4, 6 * stride, 6 * stride), "wgrad": (4, 1, 3, 3)}[pass_]
    assert tuple(result.shape) == want
    assert shape.flop == 2 * 2 * 36 * 4 * 9


def test_what_there_was_no_time_for_is_named() -> None:
    shapes = tune.grid("full")
    times = iter([1.0] * 0)
    rows = tune.measure_all(shapes, "cpu", 1, lambda: next(times, 0.0))
    said = list(tune.unmeasured(shapes, rows))
    assert len(said) == len({s.point(None).of_class for s in shapes})
    assert said[0] == "fprop bfloat16 NCHW dense 9 taps stride 1: 52 of 52 points"
    assert derive(tune.points_of(shapes, rows)) == []


@needs_kernels
def test_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = tune.grid("tiny")[0]
    for wrong, ratio in (({"auto": "OOM"}, math.inf), ({"native": "OOM"}, 0.0), ({"auto": "x"}, 0.0)):
        monkeypatch.setattr(tune, "first_calls", lambda *_, wrong=wrong: wrong)
        row = tune.measured(shape, "cpu", gpu_measure.Timer("cpu"), 1)
        assert [p.ratio for p in tune.points_of([shape], [row])] == [ratio]
    monkeypatch.setattr(tune, "first_calls", lambda *_: {"auto": "OOM", "native": "OOM"})
    row = tune.measured(shape, "cpu", gpu_measure.Timer("cpu"), 1)
    assert tune.points_of([shape], [row]) == [] and list(tune.unmeasured([shape], [row])) == []
    assert [p.ratio for p in tune.points_of([shape], [{"error": "cuDNN says no"}])] == [0.0]


def test_other_architectures_stay(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text("{}\n")
    rules = derive([point(c, 2.0, layout=lo) for c in (64, 128) for lo in tune_rules.LAYOUTS])
    entry = {"device": "a GPU", "date": "2030-01-02", "torch": "2.14.1", "cudnn": 92400, "rules": rules}
    tune.write(path, "sm_70", entry | {"rules": []})
    tune.write(path, "sm_75", entry)
    tune.write(path, "sm_70", entry | {"rules": rules * 2})
    found = conv_rules.read(path)
    assert list(found) == ["sm_70", "sm_75"] and found["sm_75"] == entry and found["sm_70"]["rules"] == rules * 2
    assert sum('"native"' in line for line in path.read_text().splitlines()) == 3, "a rule is a line"
    try:
        conv_rules.load(path)
        assert taken(point(96, None)) and not taken(point(32, None))
    finally:
        conv_rules.load()
    assert not taken(point(96, None))


def test_rendered(tmp_path: Path) -> None:
    shapes = tune.grid("tiny")[:2]
    rows = [vars(shapes[0]) | {"ms": {"auto": 1.0, "native": 0.8}, "ratio": 1.25}, vars(shapes[1]) | {}]
    data = {"bench": "tune", "date": "2030-01-02", "size": "full", "load": 0, "missing": ["that"], "rows": rows,
            "rules": derive([point(64, 2.0), point(128, 2.0)]),
            "hardware": {"cpu": "x", "cores": 1, "threads": 1, "isa": "x", "memory_gib": 1, "torch": "x", "onednn": "x",
                         "patchconv_native": "x", "patch_conv": None}}  # fmt: skip
    path = tmp_path / "tune.json"
    path.write_text(json.dumps(data))
    text = report.render(path)[0].read_text()
    assert "| 1.25 |" in text and "| no time |" in text and "never taken: that" in text
    assert "| fprop | bfloat16 | NCHW | 1 | 64 to 128 | 64 to 128 | 9 | 1 | 1048576 and more |" in text


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert capsys.readouterr() == ("", tune.NO_GPU + "\n")


@pytest.mark.parametrize("dry", [False, True])
def test_a_run(dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a GPU that is not there and times that were not measured."""

    class Properties:
        name, major, minor = "NVIDIA X 9", 7, 0

    def fake(shapes: list[tune.Shape], device: str, rounds: int, left: Any) -> list[dict[str, Any]]:
        assert device == "cuda" and rounds == tune.ROUNDS["full"] and 0 < left() <= 5
        assert not _C.has_conv_rules(ARCH), "auto is to be cuDNN"
        return [vars(s) | {"ms": {"auto": 2.0, "native": 1.0}, "ratio": 2.0} for s in shapes]

    head = measure.report_head
    shapes = [s for s in tune.grid("full")[:52] if s.sources == s.outputs]
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune.torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(tune.measure, "report_head", lambda bench, size, device: head(bench, size))
    monkeypatch.setattr(tune.torch.backends.cudnn, "version", lambda: 92400)
    monkeypatch.setattr(tune, "grid", lambda size, only=None: shapes)
    monkeypatch.setattr(tune, "measure_all", fake)
    monkeypatch.setattr(tune.torch.backends.cudnn, "benchmark", False)
    _C.set_conv_rules(ARCH, [{"native": True}])
    path = tmp_path / "rules.json"
    path.write_text("{}\n")
    options = ["--budget", "5", "--rules", str(path), "--out", str(tmp_path)] + ["--dry-run"] * dry
    assert tune.main(options) == 0
    said = capsys.readouterr().out
    assert "| fprop | bfloat16 | NCHW | 1 | 4 to 512 | 4 to 512 | 9 | 1 | 100352 and more |" in said
    if dry:
        assert conv_rules.read(path) == {} and len(list(tmp_path.iterdir())) == 1
        return
    entry = conv_rules.read(path)["sm_70"]
    assert entry["device"] == "NVIDIA X 9" and len(entry["rules"]) == 1
    assert json.loads((tmp_path / "tune-nvidia-x-9.json").read_text())["rules"] == entry["rules"]
    assert "own convolution kernels beside cuDNN" in (tmp_path / "tune-nvidia-x-9.md").read_text()
