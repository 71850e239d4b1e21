"""Reports of memory traces: text, a coloured tree, files that are read back."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import sys
from pathlib import Path

import pytest
from support import memory_traces
from support.memory_traces import HOSTILE, MIB, OUT_OF_MEMORY

from patchconv_native import memory
from patchconv_native._bytes import format_bytes
from patchconv_native.memory import MemoryReport, labels, views
from patchconv_native.memory.report import LOG
from patchconv_native.memory.views import ROWS


class TestViews:
    def test_moment(self) -> None:
        trace = memory_traces.empty()
        texts = [labels.moment(trace, time) for time in (12.345, 0.0123, 0.9999, 2e-5)]
        assert texts == ["12.3 s", "12.3 ms", "1 s", "20 µs"]
        trace.clock = "operators"
        assert labels.moment(trace, 12345.0) == "operator 12,345"

    @pytest.mark.parametrize("text", ["a", "layer1.0.conv1", HOSTILE, "x" * 500, "two\nlines\x1b[31m"])
    @pytest.mark.parametrize("width", [1, 2, 3, 10, 80])
    def test_shortened(self, text: str, width: int) -> None:
        short = labels.shortened(text, width)
        assert len(short) == min(width, len(text)) and short.isprintable()
        if width >= 3:
            assert short[0] == text[0] and short[-1] == text[-1]

    def test_the_tree(self, resnet: MemoryReport) -> None:
        (root,) = views.forest(resnet.trace)
        assert [node.facts for node in root.walk()] == resnet.trace.modules
        assert [node.label for node in root.walk(1)][:3] == ["(model)", "conv1", "bn1"]
        assert {node.depth for node in root.walk()} == {0, 1, 2, 3}
        assert sum(sum(node.own_saved_by().values()) for node in root.walk()) == root.facts.saved

    def test_a_tree_without_its_model(self, resnet: MemoryReport) -> None:
        """Modules whose parents are not there hang on the next one that is."""
        kept = [facts for facts in resnet.trace.modules if facts.name not in ("", "layer1.0")]
        resnet.trace.modules = kept
        trees = views.forest(resnet.trace)
        assert sum(1 for tree in trees for _ in tree.walk()) == len(kept)
        (layer,) = (tree for tree in trees if tree.facts.name == "layer1")
        assert "layer1.0.conv1" in [child.facts.name for child in layer.children]
        assert str(resnet) and resnet.to_markdown()

    def test_the_log_is_in_order(self, resnet: MemoryReport) -> None:
        starts = [stay.start for _, _, stay in views.log(resnet.trace)]
        assert starts == sorted(starts)
        first = [facts.name if facts else None for facts, _, _ in views.log(resnet.trace)[:3]]
        assert first == [None, "", "conv1"]


class TestThinned:
    @pytest.mark.parametrize("most", [5, 50, 999])
    @pytest.mark.parametrize("seed", range(5))
    def test_the_extremes_stay(self, most: int, seed: int) -> None:
        draw = random.Random(seed)
        times = sorted(draw.random() for _ in range(5000))
        curve = [(time, draw.randrange(10**6)) for time in times]
        at = draw.randrange(5000)
        curve[at] = (curve[at][0], 10**9)
        thin = views.thinned(curve, most)
        assert len(thin) <= most + 3
        assert curve[at] in thin and thin[0] == curve[0] and thin[-1] == curve[-1]
        assert min(count for _, count in thin) == min(count for _, count in curve)
        assert thin == sorted(thin, key=lambda point: point[0]) and set(thin) <= set(curve)

    def test_levels_that_hold_are_right(self) -> None:
        """After a spike the curve lies low for long: so does the shorter one."""
        curve = [(index * 1e-6, (index % 2) * 1000) for index in range(1001)] + [(1.0, 7)]
        thin = views.thinned(curve, 30)
        assert [count for time, count in thin if time <= 0.5][-1] == 0

    @pytest.mark.parametrize("curve", [[], [(0.0, 5)], [(1.0, 5)] * 4, [(float(i), i) for i in range(100)]])
    def test_short_ones_are_left_alone(self, curve: list[tuple[float, int]]) -> None:
        assert views.thinned(curve, 100) == curve

    def test_all_at_one_time(self) -> None:
        assert (2.0, 99) in views.thinned([(2.0, index % 100) for index in range(1000)], 10)


class TestNumbers:
    def test_properties(self, resnet: MemoryReport) -> None:
        trace = resnet.trace
        assert resnet.peak == max(count for _, count in trace.curve) and resnet.saved == trace.saved
        assert resnet.static == 148 * MIB and resnet.transient == resnet.peak - 148 * MIB
        assert resnet.parameters == resnet.gradients == 45 * MIB and resnet.optimizer == 90 * MIB
        assert resnet.duration == trace.duration and resnet.finished
        assert resnet.module("layer1.0.bn2").type == "BatchNorm2d"
        with pytest.raises(KeyError, match="no module 'layer9'"):
            resnet.module("layer9")
        assert "1.22 GiB" in repr(resnet)

    def test_fits(self, resnet: MemoryReport) -> None:
        assert resnet.fits(resnet.peak) and not resnet.fits(resnet.peak - 1)
        assert resnet.fits("1.3GiB") and not resnet.fits("1.2 GiB")
        with pytest.raises(ValueError, match="number of bytes"):
            resnet.fits("much")
        resnet.trace.error = OUT_OF_MEMORY
        assert not resnet.finished and not resnet.fits(2**50)

    def test_backward_has_what_is_run_again(self) -> None:
        facts = memory_traces.resnet(checkpoint=True).modules
        block = next(one for one in facts if one.name == "layer1.0")
        block.stretches = [one for one in block.stretches if one.phase != "backward"]
        assert views.peak_of(block, "backward") == block.peak("recompute") is not None
        assert views.peak_of(block, "optimizer") is None


class TestText:
    @pytest.mark.parametrize("width", [70, 80, 110, 200])
    def test_no_line_is_too_long(self, report: MemoryReport, width: int) -> None:
        lines = report.text(width=width).split("\n")
        assert max(map(len, lines)) <= width
        assert all(line.isprintable() for line in lines)
        assert max(map(len, str(report).split("\n"))) <= 110

    def test_what_it_says(self, resnet: MemoryReport) -> None:
        text = str(resnet)
        assert text.startswith("ResNet-18, 8 images of 448 × 448, SGD with momentum (NVIDIA H100)\n")
        assert "\npeak    1.22 GiB at 51 ms: avgpool, backward, aten::empty\n" in text
        assert "\nbefore  148 MiB: parameters 45 MiB, buffers 1 MiB, optimizer 90 MiB, inputs 12 MiB\n" in text
        assert "\nafter   193 MiB: parameters 45 MiB" in text and "gradients 45 MiB" in text
        assert re.search(r"alive at the peak:\n +148 MiB  \(model or step\): \(before the step\)\n +98 MiB ", text)
        assert "note: Memory of cuDNN's handle" in text and "not finished" not in text
        (row,) = (line for line in text.splitlines() if line.startswith("  layer1 "))
        assert row.split() == ["layer1", "Sequential", "578", "KiB", "416", "MiB", "885", "MiB", "932", "MiB"]
        assert sum(line.startswith("    ") and "BasicBlock" in line for line in text.splitlines()) == 8

    def test_unfinished(self) -> None:
        text = str(MemoryReport(memory_traces.resnet(error=OUT_OF_MEMORY)))
        error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 49.00 MiB. <GPU 0>"
        assert f"not finished: {error}\n" in text
        assert "as far as it came" in text and "\nafter " not in text

    def test_a_fake_one_with_autocast(self, resnet: MemoryReport) -> None:
        resnet.trace.fake, resnet.trace.amp, resnet.trace.clock = True, "bfloat16", "operators"
        text = resnet.text(width=200)
        assert "(NVIDIA H100, autocast to bfloat16, fake tensors: nothing was computed)" in text
        assert re.search(r"peak    1.22 GiB at operator \d+: ", text)

    def test_depth(self, resnet: MemoryReport) -> None:
        text = resnet.text(depth=1)
        assert "layer4" in text and "BasicBlock" not in text
        assert len(resnet.text(depth=3).splitlines()) == len(str(resnet).splitlines())
        deeper = len([facts for facts in resnet.trace.modules if "." in facts.name])
        assert text.endswith(f"{deeper} modules lie deeper: text(depth=...) shows them")

    def test_a_huge_one_is_cut(self) -> None:
        lines = str(MemoryReport(memory_traces.huge(points=1000))).splitlines()
        assert 20 < len(lines) < ROWS + 30 and "modules lie deeper" in lines[-1]


class TestTerminal:
    def printed(self, report: MemoryReport, width: int, depth: int | None = None) -> str:
        console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=width, color_system=None)
        report.print(depth, console)
        return console.file.getvalue()

    @pytest.mark.parametrize("width", [80, 120])
    def test_tree(self, report: MemoryReport, width: int) -> None:
        lines = self.printed(report, width).split("\n")
        assert max(map(len, lines)) <= width
        rows = [line for line in lines if re.match(r" [│├└ ]*[├└]─ ", line)]
        assert len(rows) == max(len(report.trace.modules) - 1, 0)

    def test_numbers_are_whole_on_eighty_columns(self, resnet: MemoryReport) -> None:
        text = self.printed(resnet, 80)
        assert re.search(r"├─ layer1 +Sequential +578 KiB +416 MiB +885 MiB +932 MiB", text)
        assert "saved by" not in text and "saved by" in self.printed(resnet, 120)

    def test_depth(self, resnet: MemoryReport) -> None:
        assert "BasicBlock" in self.printed(resnet, 100, 2) and "BasicBlock" not in self.printed(resnet, 100, 1)

    def test_names_are_no_markup(self) -> None:
        text = self.printed(MemoryReport(memory_traces.hostile()), 2000)
        assert "[red]</script>" in text and f"Block[{HOSTILE}]".replace("\u2028", " ") in text

    def test_colours(self, resnet: MemoryReport) -> None:
        console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=100, color_system="standard")
        console._force_terminal = True
        resnet.print(console=console)
        assert "\x1b[1;31m" in console.file.getvalue()

    def test_without_rich(self, resnet: MemoryReport, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.delitem(sys.modules, "patchconv_native.memory.terminal", raising=False)
        monkeypatch.delattr(memory, "terminal", raising=False)
        with pytest.raises(ImportError, match=r"pip install rich.*patchconv_native\[report\]"):
            resnet.print()


class TestFiles:
    def test_json_and_back(self, report: MemoryReport, tmp_path: Path) -> None:
        path = report.to_json(tmp_path / "step.json")
        assert MemoryReport.load(path).trace == report.trace
        assert MemoryReport.from_dict(report.to_dict()).trace == report.trace
        json.dumps(report.to_dict())

    def test_what_is_no_report(self, resnet: MemoryReport, tmp_path: Path) -> None:
        path = tmp_path / "other.json"
        later = {**resnet.to_dict(), "version": 99}
        torn = {name: value for name, value in resnet.to_dict().items() if name != "peak"}
        for written, refusal in (
            ('{"some": 1}', "this is no patchconv_native memory trace"),
            ("[1, 2]", "this is no patchconv_native memory trace"),
            (json.dumps(later), "version 99"),
            (json.dumps(torn), "peak"),
            ("no json", "other.json"),
        ):
            path.write_text(written)
            with pytest.raises(ValueError, match=refusal):
                MemoryReport.load(path)

    def test_csv(self, report: MemoryReport, tmp_path: Path) -> None:
        with report.to_csv(tmp_path / "log.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        trace = report.trace
        assert len(rows) == len(trace.phases) + sum(len(facts.stretches) for facts in trace.modules)
        assert all(tuple(row) == LOG for row in rows)
        for facts in trace.modules:
            mine = [row for row in rows if row["module"] == (facts.name or "(model)") and row["type"] == facts.type]
            stretches = sorted(facts.stretches, key=lambda one: one.start)
            assert [int(row["peak"]) for row in mine] == [one.peak for one in stretches]
            assert all(int(row["rise"]) == int(row["peak"]) - int(row["before"]) for row in mine)
            assert {int(row["saved"]) for row in mine} <= {facts.saved}
            for phase in ("forward", "backward", "recompute"):
                calls = [int(row["call"]) for row in mine if row["phase"] == phase]
                assert calls == list(range(1, len(calls) + 1))
        assert [row["phase"] for row in rows if row["type"] == "(step)"] == [stay.phase for stay in trace.phases]
        for row in rows:
            assert float(row["start"]) <= float(row["stop"])

    def test_markdown(self, report: MemoryReport, tmp_path: Path) -> None:
        text = report.to_markdown(tmp_path / "step.md")
        assert (tmp_path / "step.md").read_text(encoding="utf-8") == text
        rows = [line for line in text.split("\n") if line.startswith("|")]
        assert len(rows) == len(report.trace.modules) + 2
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {7}
        assert "<" not in text and not re.search(r"(?<!\\)`", text)
        assert format_bytes(report.peak) in text
        assert len(report.to_markdown(depth=1)) <= len(text)

    @pytest.mark.parametrize("suffix", [".json", ".csv", ".md", ".html", ".HTML"])
    def test_save(self, resnet: MemoryReport, tmp_path: Path, suffix: str) -> None:
        path = resnet.save(tmp_path / f"step{suffix}")
        start = {".json": "{", ".csv": "module,type", ".md": "**ResNet", ".html": "<!doctype html>"}[suffix.lower()]
        assert path.read_text(encoding="utf-8").startswith(start)

    @pytest.mark.parametrize("name", ["step.txt", "step", "step.html.gz"])
    def test_other_suffixes(self, resnet: MemoryReport, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match=r"one of \.json, \.csv, \.md, \.html, \.png, \.svg, \.pdf"):
            resnet.save(tmp_path / name)
        assert not list(tmp_path.iterdir())
