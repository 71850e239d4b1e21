"""The page of a memory report: what is in it, read by a parser, and what its script does, in a browser."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser

import pytest
from support import browser, memory_traces
from support.memory_traces import HOSTILE

from patchconv_native._bytes import format_bytes
from patchconv_native.memory import Trace
from patchconv_native.memory.chart import BANDS
from patchconv_native.memory.html import OPEN_ROWS, page

VOID = {"meta", "input"}


class Reader(HTMLParser):
    """Tags, attributes and texts of a page; a tag that is closed by another name is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def rows(self) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == "tr" and "data-depth" in attributes]


class TestText:
    def test_nothing_comes_from_elsewhere(self, trace: Trace) -> None:
        """No attribute names a resource, no style or script loads one; the only names of places are of namespaces."""
        text = page(trace)
        found = Reader(text)
        for tag, attributes in found.tags:
            assert tag not in ("link", "img", "iframe", "object", "embed", "base", "image", "use", "a"), tag
            assert not {"src", "href", "srcset", "action", "data", "xlink:href"} & attributes.keys(), (tag, attributes)
            assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        own = "".join(found.texts["style"] + found.texts["script"])
        assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|innerHTML|eval\(", own)
        assert set(re.findall(r"\w+://[^\s\"']+", own)) <= {"http://www.w3.org/2000/svg"}
        assert "prefers-color-scheme: dark" in own

    def test_every_module_is_a_row(self, trace: Trace) -> None:
        found = Reader(page(trace))
        assert [row["data-name"] for row in found.rows()] == [facts.name for facts in trace.modules]
        assert all(int(row["data-depth"] or 0) >= bool(row["data-name"]) for row in found.rows())

    def test_names_are_text(self) -> None:
        """What looks like a tag in a name is shown as it is, and makes none."""
        trace = memory_traces.hostile()
        found, plain = Reader(page(trace)), Reader(page(memory_traces.resnet()))
        assert [tag for tag, _ in found.tags].count("script") == [tag for tag, _ in plain.tags].count("script") == 2
        assert HOSTILE not in page(trace)
        assert "window.broken" not in found.texts["script"][1]
        assert HOSTILE in json.loads(found.texts["script"][0])["phases"]
        assert found.texts["title"][0] == found.texts["h1"][0] == trace.title
        assert found.texts["li"] == trace.notes and found.texts["pre"] == [trace.error]
        heads = set(found.texts["th"])
        assert {one.module for one in trace.peak.held[:20]} <= heads
        assert set(trace.modules[0].saved_by) <= heads
        assert {facts.type for facts in trace.modules} <= set(found.texts["td"])

    def test_the_numbers_are_there(self) -> None:
        trace = memory_traces.resnet()
        text = page(trace)
        found = Reader(text)
        assert format_bytes(trace.peak.bytes) in found.texts["b"] and format_bytes(trace.saved) in found.texts["b"]
        cells = [attributes["data-v"] for tag, attributes in found.tags if tag == "td" and "data-v" in attributes]
        assert {str(facts.saved) for facts in trace.modules} <= set(cells)
        assert str(trace.saved - trace.modules[0].saved) in cells, "what the loss saved is not in the table"
        data = json.loads(found.texts["script"][0])
        assert len(data["stretches"]) == sum(len(facts.stretches) for facts in trace.modules)
        assert max(count for _, count in data["curve"]) == trace.peak.bytes

    def test_a_huge_one_is_quick_and_small(self) -> None:
        trace = memory_traces.huge()
        start = time.perf_counter()
        text = page(trace)
        assert time.perf_counter() - start < 10
        assert len(text.encode()) < 5e6
        found = Reader(text)
        assert len(found.rows()) == 2000
        assert len([1 for tag, attributes in found.tags if tag == "rect" and attributes["class"] == "band"]) <= BANDS
        data = json.loads(found.texts["script"][0])
        assert max(count for _, count in data["curve"]) == trace.peak.bytes and len(data["curve"]) < 4000

    def test_operators_on_the_clock(self) -> None:
        fake, timed = (page(memory_traces.resnet(fake=fake)) for fake in (True, False))
        assert ">operator</text>" in fake and ">milliseconds</text>" not in fake
        assert ">milliseconds</text>" in timed and ">operator</text>" not in timed


@pytest.mark.skipif(browser.carried() is None, reason="no browser: kaleido 0.2.1, whose wheel carries one, is missing")
class TestScript:
    HELP = """
      const rows = function () { return Array.from(document.querySelectorAll("#tree tbody tr")); };
      const shown = function () { return rows().filter(function (row) { return row.offsetHeight > 0; }); };
      const names = function (list) { return list.map(function (row) { return row.dataset.name; }); };
      const row = function (name) { return rows().find(function (one) { return one.dataset.name === name; }); };
      const twist = function (name) { row(name).querySelector(".twist").click(); };
      const head = function (text) {
        return Array.from(document.querySelectorAll("#tree thead th")).find(function (one) {
          return one.textContent === text;
        });
      };
      const sort = function (text) { head(text).querySelector("button").click(); };
      const find = function (text) {
        const field = document.getElementById("filter");
        field.value = text;
        field.dispatchEvent(new Event("input"));
      };
      const readout = document.getElementById("readout");
      const svg = document.querySelector("#chart svg");
      const point = function (share) {
        const box = svg.getBoundingClientRect(), scale = box.width / 1200;
        const at = box.left + scale * (76 + share * (1184 - 76));
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: at, clientY: box.top + 99, bubbles: true }));
      };
    """

    def run(self, trace: Trace, script: str) -> dict:
        """What a script of statements that fill `out` finds; no error may have come up by then."""
        text = f"(async function () {{ {self.HELP} const out = {{}}; {script}; out.errors = errors; return out; }})()"
        found = browser.run(page(trace), text)
        assert found["errors"] == []
        return found

    def test_errors_are_seen(self) -> None:
        """The harness itself: an error of a page comes back, also one in a handler."""
        handler = 'document.querySelector("button").onclick = function () { also.missing = 1; };'
        text = f"<html><head></head><body><button>x</button><script>{handler} missing();</script></body></html>"
        found = browser.run(text, '(document.querySelector("button").click(), errors)')
        assert len(found) == 2 and "missing is not defined" in found[0] and "also is not defined" in found[1]

    def test_it_runs(self, trace: Trace) -> None:
        script = """out.rows = rows().length; out.shown = shown().length; out.broken = window.broken || 0;
            point(0.5); out.readout = !readout.hidden; if (head("saved")) sort("saved");
            out.loaded = performance.getEntriesByType("resource").length"""
        found = self.run(trace, script)
        assert found["rows"] == found["shown"] == len(trace.modules) <= OPEN_ROWS
        assert found["broken"] == found["loaded"] == 0
        assert found["readout"] == bool(trace.curve)

    def test_collapsing(self) -> None:
        trace = memory_traces.resnet()
        script = """out.all = names(shown()); twist("layer1.0"); out.one = names(shown());
            twist("layer1"); out.two = names(shown()); out.said = row("layer1").querySelector(".twist")
              .getAttribute("aria-expanded"); twist("layer1"); out.again = names(shown());
            document.getElementById("close").click(); out.closed = names(shown());
            document.getElementById("open").click(); out.open = names(shown())"""
        found = self.run(trace, script)
        every = [facts.name for facts in trace.modules]
        assert found["all"] == found["open"] == every
        assert found["one"] == found["again"] == [name for name in every if not name.startswith("layer1.0.")]
        assert found["two"] == [name for name in every if not name.startswith("layer1.")]
        assert found["said"] == "false"
        assert found["closed"] == [name for name in every if "." not in name]

    def test_sorting(self) -> None:
        trace = memory_traces.resnet()
        script = """sort("saved"); out.down = names(rows()); out.said = head("saved").getAttribute("aria-sort");
            sort("saved"); out.up = names(rows()); sort("saved"); out.none = names(rows());
            sort("type"); out.type = names(rows()); out.others = head("saved").getAttribute("aria-sort");
            sort("module"); out.module = names(rows())"""
        found = self.run(trace, script)
        every = [facts.name for facts in trace.modules]
        facts = {one.name: one for one in trace.modules}
        inside = [name for name in every if name and "." not in name]
        block = [name for name in every if name.startswith("layer1.0.")]

        def of(order: list[str], some: list[str]) -> list[str]:
            return [name for name in order if name in some]

        for some in (inside, block):
            assert of(found["down"], some) == sorted(some, key=lambda name: -facts[name].saved) != some
            assert of(found["up"], some) == sorted(some, key=lambda name: facts[name].saved)
            assert of(found["type"], some) == sorted(some, key=lambda name: facts[name].type.lower())
            assert of(found["module"], some) == sorted(some)
        assert found["none"] == every
        assert found["said"] == "descending" and found["others"] == "none"
        for order in (found["down"], found["up"], found["type"]):
            assert sorted(order) == sorted(every)
            for name in every[1:]:  # a module stays inside of its own
                parent = name.rpartition(".")[0]
                before = order[: order.index(name)]
                since, inside = before[before.index(parent) + 1 :], f"{parent}." if parent else ""
                assert parent in before and all(one.startswith(inside) for one in since)

    def test_finding(self) -> None:
        script = """find("LAYER2.1.conv"); out.name = names(shown()); find("maxpool2d"); out.type = names(shown());
            find("nothing at all"); out.nothing = names(shown()); find(""); out.all = shown().length"""
        found = self.run(memory_traces.resnet(), script)
        assert found["name"] == ["", "layer2", "layer2.1", "layer2.1.conv1", "layer2.1.conv2"]
        assert found["type"] == ["", "maxpool"]
        assert found["nothing"] == [] and found["all"] == 59

    def test_the_readout(self) -> None:
        trace = memory_traces.resnet()
        stay = next(one for one in trace.modules if one.name == "layer1.0.conv2").stretches[0]
        now = stay.start + (stay.stop - stay.start) / 4
        count = [count for time, count in trace.curve if time <= now][-1]
        script = f"""out.before = readout.offsetWidth; point({now / trace.duration}); out.text = readout.innerText;
            const box = readout.getBoundingClientRect(), whole = svg.parentElement.getBoundingClientRect();
            out.inside = box.left >= whole.left && box.right <= whole.right && box.height > 40;
            point(0.999); const far = readout.getBoundingClientRect(); out.far = far.right <= whole.right;
            out.optimizer = readout.innerText;
            svg.dispatchEvent(new PointerEvent("pointerleave")); out.after = readout.offsetWidth;
            svg.dispatchEvent(new KeyboardEvent("keydown", {{ key: "ArrowLeft" }})); out.key = readout.offsetWidth"""
        found = self.run(trace, script)
        lines = found["text"].split("\n")
        assert lines[0] == format_bytes(count) and lines[2:] == ["layer1.0.conv2", "Conv2d, forward"]
        assert float(lines[1].split()[0]) == pytest.approx(now * 1e3, abs=0.2) and lines[1].endswith("ms")
        assert found["inside"] and found["far"] and found["optimizer"].endswith("optimizer")
        assert found["before"] == found["after"] == 0 < found["key"]

    def test_pointing_at_a_row_marks_its_stretches(self) -> None:
        script = """const marks = function () { return document.querySelectorAll("#marked rect").length; };
            out.none = marks(); row("layer2.0").dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
            out.some = marks(); document.querySelector("#tree tbody").dispatchEvent(new PointerEvent("pointerleave"));
            out.left = marks()"""
        found = self.run(memory_traces.resnet(), script)
        assert (found["none"], found["some"], found["left"]) == (0, 2, 0)

    def test_a_huge_tree_is_shown_closed(self) -> None:
        trace = memory_traces.huge()
        script = """out.rows = rows().length; out.shown = names(shown()); const start = performance.now();
            sort("saved"); document.getElementById("open").click(); point(0.3); out.took = performance.now() - start;
            out.open = shown().length"""
        found = self.run(trace, script)
        top = [facts.name for facts in trace.modules if "." not in facts.name]
        assert found["rows"] == found["open"] == 2000 and sorted(found["shown"]) == sorted(top)
        assert found["took"] < 5000
