"""Figures of memory traces, their bands and ticks, and comparisons of runs."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import memory_traces
from support.memory_traces import OUT_OF_MEMORY

from patchconv_native import memory
from patchconv_native.memory import MemoryReport, chart, compare, views


class TestChart:
    @pytest.mark.parametrize(
        ("span", "found"),
        [((0, 1.3), [0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2]), ((0, 900), [0, 200, 400, 600, 800]), ((3, 3), [3])],
    )
    def test_ticks(self, span: tuple[float, float], found: list[float]) -> None:
        assert chart.ticks(*span, 7) == pytest.approx(found)

    @pytest.mark.parametrize("last", [1e-5, 0.7, 1, 999, 12345, 1e12])
    def test_number_of_ticks(self, last: float) -> None:
        assert 3 <= len(chart.ticks(0, last, 6)) <= 7

    def test_bands_lie_in_their_parents(self, resnet: MemoryReport) -> None:
        found = chart.bands(resnet.trace, 3, 0.0)
        assert {band.lane for band in found} == {0, 1, 2}
        assert len({band.colour for band in found if band.lane == 0}) == len(chart.COLOURS)
        for band in found:
            if band.lane:
                around = [one for one in found if one.lane == band.lane - 1 and band.name.startswith(one.name + ".")]
                stay = band.stretch
                assert any(one.stretch.start <= stay.start and stay.stop <= one.stretch.stop for one in around)
                assert {one.colour for one in around} == {band.colour}

    def test_a_wrapper_is_looked_into(self, resnet: MemoryReport) -> None:
        """Where the model has one part only, its parts are drawn."""
        for facts in resnet.trace.modules[1:]:
            facts.name = f"module.{facts.name}"
        resnet.trace.modules.insert(1, memory.ModuleFacts("module", "ResNet"))
        assert [node.label for node in views.parts(resnet.trace)][:2] == ["conv1", "bn1"]


class TestFigures:
    @pytest.fixture(autouse=True)
    def strict(self) -> Any:
        pytest.importorskip("matplotlib")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    def texts(self, figure: Any) -> list[Any]:
        from matplotlib.text import Text

        figure.draw_without_rendering()
        beyond = set()  # labels of ticks out of sight
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            first, last = sorted(axis.get_view_interval())
            beyond |= {tick.label1 for tick in axis.get_major_ticks() if not first <= tick.get_loc() <= last}
        found = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
        return [text for text in found if text not in beyond]

    @pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
    def test_files(self, report: MemoryReport, tmp_path: Path, suffix: str) -> None:
        path = report.save(tmp_path / f"step{suffix}")
        start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
        assert path.read_bytes().startswith(start) and path.stat().st_size > 2000

    def test_axes(self, resnet: MemoryReport) -> None:
        figure = resnet.plot()
        top, lanes = figure.axes
        assert top.get_ylabel() == "GiB" and lanes.get_xlabel() == "milliseconds"
        assert [label.get_text() for label in top.get_yticklabels()][:3] == ["0", "0.5", "1"]
        assert resnet.peak < top.get_ylim()[1] and top.get_xlim() == (0, resnet.duration)
        text = [text.get_text() for text in self.texts(figure)]
        assert "peak 1.22 GiB: avgpool, backward, aten::empty" in text and "before the step 148 MiB" in text
        assert {"forward", "backward", "layer1", "layer4"} <= set(text)
        fake = MemoryReport(memory_traces.resnet(0.5, fake=True)).plot()
        assert fake.axes[0].get_ylabel() == "MiB" and fake.axes[-1].get_xlabel() == "operator"

    @pytest.mark.parametrize("kind", ["resnet", "fake", "checkpointed", "unfinished"])
    def test_nothing_lies_on_anything(self, kind: str) -> None:
        """No two texts overlap, and none is cut off."""
        figure = MemoryReport(memory_traces.TRACES[kind]()).plot()
        boxes = [(text.get_text(), text.get_window_extent()) for text in self.texts(figure)]
        for index, (one, box) in enumerate(boxes):
            for other, around in boxes[index + 1 :]:
                assert not box.shrunk(0.9, 0.8).overlaps(around.shrunk(0.9, 0.8)), (one, other)
        for _, box in boxes:
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 + 1

    def test_saved(self, resnet: MemoryReport, tmp_path: Path) -> None:
        from patchconv_native.memory.plot import BARS, plot_saved

        figure = plot_saved(resnet.trace, tmp_path / "saved.png")
        (axes,) = figure.axes
        drawn = sum(bar.get_width() for bar in axes.patches)
        assert drawn == sum(facts.own_saved for facts in resnet.trace.modules)
        assert len(axes.get_yticks()) == BARS + 1 and axes.get_yticklabels()[-1].get_text().endswith("more modules")
        names = [text.get_text() for text in figure.legends[0].get_texts()]
        assert names[:2] == ["aten::convolution", "aten::native_batch_norm"]
        assert plot_saved(memory_traces.empty())

    def test_dollars_and_underscores_are_text(self, resnet: MemoryReport, tmp_path: Path) -> None:
        from patchconv_native.memory.plot import plot_saved

        resnet.trace.title = "a $\\frac{$ title$"
        for facts in resnet.trace.modules:
            facts.name = facts.name.replace("layer1", "$x_$")
            facts.saved_by = {f"_${operator}$": count for operator, count in facts.saved_by.items()}
        resnet.plot(tmp_path / "one.png")
        figure = plot_saved(resnet.trace, tmp_path / "two.png")
        assert len(figure.legends[0].get_texts()) == 5

    def test_a_huge_one(self, tmp_path: Path) -> None:
        report = MemoryReport(memory_traces.huge())
        figure = report.plot(tmp_path / "huge.svg")
        highest = max(line.get_ydata().max() for line in figure.axes[0].lines if len(line.get_ydata()) > 2)
        assert highest == report.peak and (tmp_path / "huge.svg").stat().st_size < 5e6

    def test_without_matplotlib(self, resnet: MemoryReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.setitem(sys.modules, name, None)
        for work in (resnet.plot, lambda: resnet.save(tmp_path / "a.png"), lambda: compare({"a": resnet}).plot()):
            with pytest.raises(ImportError, match=r"pip install matplotlib.*patchconv_native\[report\]"):
                work()


class TestComparison:
    def runs(self) -> dict[str, MemoryReport]:
        traces = {"stock": {}, "half|`*": {"scale": 0.5}, "too large": {"error": OUT_OF_MEMORY}}
        return {name: MemoryReport(memory_traces.resnet(**options)) for name, options in traces.items()}

    def test_table(self) -> None:
        runs = self.runs()
        lines = str(compare(runs)).splitlines()
        assert len(lines) == 4 and max(map(len, lines)) <= 150
        stock, half, large = (re.split(r"  +", line) for line in lines[1:])
        assert stock[:5] == ["stock", "1.22 GiB", "1.00", "1.08 GiB", "1.00"]
        peak, saved = (getattr(runs["half|`*"], name) / getattr(runs["stock"], name) for name in ("peak", "saved"))
        assert float(half[2]) == pytest.approx(peak, abs=0.006) and float(half[4]) == pytest.approx(saved, abs=0.006)
        assert large[1].startswith("over ") and "0." not in large[2], "a step that was not finished has no ratio"

    def test_markdown(self, tmp_path: Path) -> None:
        text = compare(self.runs()).to_markdown(tmp_path / "runs.md")
        assert (tmp_path / "runs.md").read_text() == text
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines()} == {8}

    def test_figure(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        runs = self.runs()
        compare(runs, tmp_path / "runs.png")
        assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
        curves, bars = compare(runs).plot().axes
        assert sorted(bar.get_width() for bar in bars.patches) == sorted(
            count for report in runs.values() for count in (report.peak, report.saved)
        )
        assert curves.get_xlabel() == "milliseconds" and curves.get_ylabel() == bars.get_xlabel() == "GiB"

    def test_other_clocks(self) -> None:
        """Seconds and operators do not fit one axis: parts of the step do."""
        pytest.importorskip("matplotlib")
        both = {"real": MemoryReport(memory_traces.resnet()), "fake": MemoryReport(memory_traces.resnet(fake=True))}
        curves, _ = compare(both).plot().axes
        assert curves.get_xlabel() == "percent of the step" and curves.get_xlim() == (0, 100)
        assert all(line.get_xdata()[-1] == pytest.approx(100) for line in curves.lines if len(line.get_xdata()) > 2)

    def test_lengths_that_are_far_apart(self) -> None:
        """A short run beside a long one would be a line at the edge."""
        pytest.importorskip("matplotlib")
        long = MemoryReport(memory_traces.resnet(fake=True))
        short = memory.trace(torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8), fake=True)
        for other, label in ((short, "operator"), (long, "percent of the step")):
            assert compare({"one": short, "two": other}).plot().axes[0].get_xlabel() == label

    def test_nothing_to_compare(self) -> None:
        with pytest.raises(ValueError, match="no reports"):
            compare({})
