"""`plan` on the command line: a plan, the frontier, the largest batch and size; every mistake in one line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support.command_line import Commands, commands, needs

import patchconv_native as pc
from patchconv_native.commands import models, progress

__all__ = ["commands"]
SMALL = ("--size", "32", "--device", "cpu", "--quiet")


def data(name: str = "out.json") -> dict:
    return json.loads(Path(name).read_text())


class TestPlan:
    def test_fits_as_it_is(self, commands: Commands) -> None:
        text = commands("plan", "%blocks", *SMALL, "--budget", "1GiB")
        assert text.code == 0 and text.err == ""
        lines = text.out.splitlines()
        assert lines[0] == "models.py:blocks, input 1 x 3 x 32 x 32"
        assert lines[2] == "budget  1 GiB" and lines[-1] == "do      no change to the model"

    def test_has_to_do_something(self, commands: Commands) -> None:
        words = ("plan", "%blocks", "--size", "96", "--device", "cpu", "--batch", "2", "--quiet")
        model = models.find("models.py:blocks").build()
        x = torch.empty(2, 3, 96, 96, device="meta")
        stock = pc.memory.trace(model, x, fake=True).peak
        text = commands(*words, "--budget", str(stock), "--json", "plan.json")
        assert text.code == 0, text.err
        assert text.out.endswith("wrote plan.json\n") and "convert" in text.out
        plan = pc.Plan.load("plan.json")
        assert plan.needs <= plan.budget == stock and plan.strategy.convert
        with_it = pc.memory.trace(plan.apply(model), x, fake=True).peak
        assert with_it == plan.peak

    def test_nothing_fits(self, commands: Commands) -> None:
        text = commands("plan", "%blocks", *SMALL, "--budget", "1KiB")
        line = text.failure("plan")
        assert text.out == "" and "no plan fits into 1 KiB (1024 bytes): the least that was found is " in line
        least = re.search(r"\((\d+) bytes: ", line)
        assert least is not None
        assert commands("plan", "%blocks", *SMALL, "--budget", f"{least[1]}B").code == 0
        assert commands("plan", "%blocks", *SMALL, "--budget", f"{int(least[1]) // 2}B").code == 1

    def test_a_share_of_what_the_model_takes(self, commands: Commands) -> None:
        x = torch.empty(2, 3, 96, 96, device="meta")
        stock = pc.memory.trace(models.find("models.py:blocks").build(), x, fake=True).peak
        words = ("plan", "%blocks", "--size", "96", "--device", "cpu", "--batch", "2", "--quiet", "--json", "plan.json")
        for share, text in ((0.8, "80%"), (1.25, "125 %")):
            assert commands(*words, "--budget", text).code == 0
            plan = pc.Plan.load("plan.json")
            assert plan.budget == int(share * stock) and plan.needs <= plan.budget
        assert "(1 bytes)" in commands(*words, "--budget", "0.00000001%").failure("plan")
        model = models.find("models.py:blocks").build()
        for bad in ("0%", "half", "-5%"):
            with pytest.raises(ValueError, match=r"^plan(, budget)?: expected"):
                pc.plan(model, x, budget=bad)

    def test_model_without_blocks(self, commands: Commands) -> None:
        assert "no plan fits" in commands("plan", "%Mixed", *SMALL, "--budget", "1KiB").err

    def test_step(self, commands: Commands) -> None:
        words = ("plan", "%tiny", "--budget", "1GiB", "--quiet", "--json", "out.json")
        assert commands(*words, "--size", "16x32", "--batch", "3", "--eval", "--device", "cuda").code == 0
        plan = data()
        assert plan["device"] == "cuda" and plan["train"] is False and plan["margin"] == 0.1
        peaks = []
        for optimizer in ((), ("--optimizer", "sgd"), ("--optimizer", "adamw"), ("--channels-last",)):
            assert commands(*words, "--size", "2", "--device", "cpu", *optimizer).code == 0
            peaks.append(data()["peak"])
        assert peaks[0] <= peaks[1] < peaks[2] and peaks[3] > 0

    def test_amp_and_offload_are_allowed(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: dict = {}

        def plan(model: object, x: object, **options: object) -> None:
            seen.update(options)
            raise RuntimeError("seen")

        monkeypatch.setattr(pc, "plan", plan)
        words = ("--amp", "bfloat16", "--offload", "--device", "cuda", "--budget", "6GiB", "--optimizer", "adam")
        assert commands("plan", "%tiny", *words).code == 1
        assert seen["amp"] is torch.bfloat16 and seen["offload"] is True and seen["budget"] == 6 * 2**30
        assert seen["device"] == torch.device("cuda") and seen["train"] is True

    def test_amp_where_nothing_exact_fits(self, commands: Commands) -> None:
        words = ("plan", "%blocks", "--size", "64", "--device", "cpu", "--quiet", "--no-tiles")
        exact = re.search(r"\((\d+) bytes: ", commands(*words, "--budget", "1KiB").err)
        half = re.search(r"\((\d+) bytes: ", commands(*words, "--budget", "1KiB", "--amp", "bfloat16").err)
        assert exact is not None and half is not None and int(half[1]) < int(exact[1])
        text = commands(*words, "--budget", half[1], "--amp", "bfloat16")
        assert text.code == 0 and "autocast to bfloat16" in text.out


class TestFrontier:
    def test_alone(self, commands: Commands) -> None:
        text = commands("plan", "%blocks", *SMALL, "--frontier", "--no-tiles", "--json", "out.json")
        assert text.code == 0 and text.out.splitlines()[1].split() == ["peak", "time", "do"]
        found = data()
        assert found["plan"] is None and found["frontier"]
        peaks = [one["peak"] for one in found["frontier"]]
        assert peaks == sorted(peaks, reverse=True)

    @needs("matplotlib")
    def test_with_a_budget_and_a_figure(self, commands: Commands) -> None:
        text = commands(
            "plan", "%tiny", *SMALL, "--budget", "1GiB", "--plot", "out.png", "--no-tiles", "--json", "out.json"
        )
        assert text.code == 0 and "budget  1 GiB" in text.out and text.out.endswith("wrote out.png\n")
        assert data()["plan"]["budget"] == 2**30 and data()["frontier"]
        assert Path("out.png").read_bytes().startswith(b"\x89PNG")


class TestLargest:
    def test_batch(self, commands: Commands) -> None:
        words = ("plan", "%blocks", *SMALL, "--max-batch", "--budget", "2MiB", "--json", "out.json")
        text = commands(*words)
        assert text.code == 0 and text.err == ""
        plain = data()
        found = plain["max_batch"]
        assert f"models.py:blocks (cpu): the largest batch is {found}, with the unchanged model in 2 MiB" in text.out
        assert plain["input"] == [found, 3, 32, 32] and plain["budget"] == 2 * 2**20 and plain["planned"] is False
        model = models.find("models.py:blocks").build()
        assert found == pc.max_batch(model, torch.empty(1, 3, 32, 32), budget="2MiB")
        assert commands(*words, "--planned").code == 0
        assert data()["max_batch"] > found and data()["planned"] is True

    def test_size(self, commands: Commands) -> None:
        words = ("--device", "cpu", "--quiet", "--json", "out.json")
        text = commands("plan", "%blocks", "--size", "32x64", "--max-size", "--budget", "8MiB", *words)
        assert text.code == 0, text.err
        height, width = data()["max_size"]
        assert width == 2 * height and height % 32 == 0 and f"largest size is {height} x {width}," in text.out

    @pytest.mark.parametrize(("option", "text"), [("batch", "a batch of 1"), ("size", "the smallest size")])
    def test_nothing_fits(self, option: str, text: str, commands: Commands) -> None:
        done = commands("plan", "%tiny", *SMALL, f"--max-{option}", "--budget", "1KiB")
        assert f"not even {text} fits into 1 KiB" in done.failure("plan")


class TestProgress:
    def test_lines(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pc, "max_batch", lambda *values, **options: 3)
        words = ("plan", "%tiny", "--size", "16", "--device", "cpu", "--budget", "1GiB")
        lines = commands(*words).err.splitlines()
        assert len(lines) > 1 and all(line.startswith("trying ") for line in lines)
        assert commands(*words, "--max-batch").err == "looking for the largest batch\n"

    @needs("rich")
    def test_bar(self, commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        for total in (None, 2):
            with progress.Progress(False, total) as bar:
                bar.next("one")
                bar.next("two [x]")
            text = capsys.readouterr()
            assert text.out == "" and "two [x]" in text.err
        with progress.Progress(True) as bar:
            bar.next("one")
        assert capsys.readouterr().err == ""


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (("%tiny",), "expected --budget, such as --budget 6GiB, or --frontier"),
            (("%tiny", "--max-batch"), "expected --budget, such as --budget 6GiB\n"),
            (("%tiny", "--budget", "much"), "--budget: expected a number of bytes such as 6GiB, 500MB or 10737"),
            (("%tiny", "--budget", "0"), "--budget: expected a number of bytes"),
            (("%tiny", "--budget", "-1GiB"), "--budget: expected a number of bytes such as 6GiB, 500MB or 107"),
            (("%tiny", "--budget", "-3GB", "--frontier"), "--budget: expected a number of bytes such as 6GiB, 500MB"),
            (("%tiny", "--budget", "6"), "--budget: expected a unit, such as 6GiB, got '6' (bytes: 6B)"),
            (("%tiny", "--budget", "50%", "--max-batch"), "--max-batch and --max-size: expected a number of bytes"),
            (("%tiny", "--budget", "6 GB/s"), "--budget: expected a number of bytes"),
            (("%tiny", "--budget", "9" * 400), "--budget: expected a number of bytes"),
            (("%tiny", "--budget", "1GiB", "--planned"), "--planned: expected --max-batch or --max-size with it"),
            (("%tiny", "--budget", "1GiB", "--max-batch", "--max-size"), "not allowed with argument --max-batch"),
            (("%tiny", "--budget", "1GiB", "--max-batch", "--frontier"), "expected none of --frontier"),
            (("%tiny", "--budget", "1GiB", "--max-size", "--amp", "float16"), "expected none of --frontier"),
            (("%tiny", "--budget", "1GiB", "--max-size", "--size", "4x4x4"), "--max-size: expected a size of two"),
            (("%tiny", "--budget", "1GiB", "--offload", "--device", "cpu"), "--offload: expected --device cuda"),
            (("%tiny", "--budget", "1GiB", "--eval", "--optimizer", "sgd"), "expected either --eval or --optimizer"),
            (("%tiny", "--budget", "1GiB", "--json", "nowhere/x"), "there is no folder nowhere"),
            (("%tiny", "--frontier", "--plot", "x.txt"), "--plot: expected a file that ends in"),
            (("%tinny", "--budget", "1GiB"), "did you mean tiny?"),
            (("%number", "--budget", "1GiB"), "expected models.py:number to return a torch.nn.Module, got int"),
            (("%tiny", "--bugdet", "1GiB"), "unrecognized arguments: --bugdet 1GiB; did you mean --budget"),
        ],
    )
    def test_words(self, words: tuple[str, ...], text: str, commands: Commands) -> None:
        assert text in commands("plan", *words).mistake("plan")

    @pytest.mark.parametrize("more", [(), ("--max-batch",), ("--max-size",)])
    def test_failures(self, more: tuple[str, ...], commands: Commands) -> None:
        words = (*SMALL, "--budget", "1GiB", *more)
        text = commands("plan", "%tiny", "--channels", "4", *words).failure("plan")
        assert "a step with an input of 1 x 4 x 32 x 32 failed: " in text and "have 3 channels" in text
        text = commands("plan", "%raises", *words).failure("plan")
        assert "models.py:raises did not make a model: ValueError: no such luck" in text
