"""`bench` on the command line: what it measures and says, on models that take no time; every mistake in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.command_line import Commands, commands

import patchconv_native as pc
from patchconv_native.commands import bench, models

__all__ = ["commands"]
SMALL = ("--size", "16", "--device", "cpu", "--rounds", "2", "--quiet", "--json", "out.json")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LEAST", 0.001)


def measured(commands: Commands, *words: str) -> dict:
    text = commands("bench", *words, *SMALL)
    assert text.code == 0 and text.err == "", text.err
    return json.loads(Path("out.json").read_text())


class TestBench:
    def test_model(self, commands: Commands) -> None:
        found = measured(commands, "%tiny", "--batch", "2")
        assert found["what"] == "models.py:tiny" and found["input"] == [2, 3, 16, 16] and found["device"] == "cpu"
        assert [len(found["seconds"][side]) for side in ("stock", "converted")] == [2, 2]
        pairs = zip(found["seconds"]["stock"], found["seconds"]["converted"], strict=True)
        ratios = sorted(ours / stock for stock, ours in pairs)
        assert [found["ratio"][name] for name in ("least", "most")] == ratios
        assert found["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
        assert found["converted_layers"] == 5 and found["threads"] == torch.get_num_threads()
        assert found["saved"]["converted"] < found["saved"]["stock"] < found["peak"]["stock"]

    def test_memory_is_that_of_a_trace(self, commands: Commands) -> None:
        found = measured(commands, "%tiny", "--optimizer", "adam")
        model = models.find("models.py:tiny").build()
        report = pc.memory.trace(model, torch.randn(1, 3, 16, 16), optimizer=torch.optim.Adam)
        assert found["peak"]["stock"] == report.peak and found["transient"]["stock"] == report.transient

    def test_convolution(self, commands: Commands) -> None:
        found = measured(commands, "--conv", "4x8x5")
        assert found["what"] == "a convolution of 4 to 8 channels, 5 x 5" and found["input"] == [1, 4, 16, 16]
        assert found["converted_layers"] == 1
        assert measured(commands)["what"] == "a convolution of 64 to 64 channels, 3 x 3"

    def test_convolution_has_an_input_gradient(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        monkeypatch.setattr(bench, "sum_of", lambda output: seen.append(output.grad_fn) or output.sum())
        measured(commands, "--conv", "4x8x5")
        assert all(node.next_functions[0][0] is not None for node in seen)
        seen.clear()
        measured(commands, "%whole")
        assert seen

    def test_step(self, commands: Commands) -> None:
        found = measured(commands, "%tiny", "--eval", "--amp", "bfloat16", "--channels-last")
        assert found["step"] == {
            "eval": True, "amp": "bfloat16", "optimizer": None, "channels_last": True
        }  # fmt: skip
        assert found["saved"] == {"stock": 0, "converted": 0}

    def test_says(self, commands: Commands) -> None:
        text = commands("bench", "%tiny", *SMALL)
        lines = text.out.splitlines()
        assert lines[0].startswith("models.py:tiny, input 1 x 3 x 16 x 16 (cpu, ")
        assert lines[1].split() == ["stock", "converted", "ratio"]
        assert lines[2].startswith("time of a step, median ") and lines[3].startswith("peak memory ")
        assert "5 layers were converted" in lines and lines[-1] == "wrote out.json"
        found = json.loads(Path("out.json").read_text())["ratio"]
        assert ("the rounds do not agree" in text.out) == (found["least"] <= 1 <= found["most"])

    def test_takes_turns(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        turns = []

        def seconds(side: bench.Side, times: int, device: torch.device) -> float:
            turns.append("ours" if pc.convert_report(side.model).converted else "stock")
            return float(len(turns))

        monkeypatch.setattr(bench, "_seconds", seconds)
        found = measured(commands, "%tiny")
        assert turns == ["stock", *["stock", "ours"] * 2]
        assert found["seconds"] == {"stock": [2, 4], "converted": [3, 5]}
        assert found["ratio"] == {"median": 1.375, "least": 1.25, "most": 1.5}

    def test_progress(self, commands: Commands) -> None:
        words = [word for word in SMALL if word != "--quiet"]
        text = commands("bench", "%tiny", *words)
        assert text.err.splitlines() == ["building", "warming up", "timing", "counting memory"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (("%tiny", "--conv", "4x4x3"), "expected either MODEL or --conv, got both"),
            (("--conv", "4x4"), "--conv: expected INxOUTxK such as 64x64x3, got '4x4'"),
            (("--conv", "0x4x3"), "--conv: expected INxOUTxK"),
            (("--conv", "4x4x3", "--channels", "5"), "--channels: a convolution of 4 channels has an input of 4"),
            (("--size", "8x8x8"), "--size: expected two numbers for a convolution"),
            (("--rounds", "0"), "--rounds: expected a whole number from 1 to 1000, got '0'"),
            (("--rounds", "5000"), "--rounds: expected a whole number from 1 to 1000"),
            (("--json", "nowhere/x"), "there is no folder nowhere"),
            (("--eval", "--optimizer", "sgd"), "expected either --eval or --optimizer"),
            (("%tinny",), "did you mean tiny?"),
            (("--round", "0"), "--rounds: expected"),
            (("--fake",), "unrecognized arguments: --fake"),
        ],
    )
    def test_words(self, words: tuple[str, ...], text: str, commands: Commands) -> None:
        assert text in commands("bench", *words).mistake("bench")

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (("%Hungry",), "out of memory with an input of 1 x 3 x 16 x 16: RuntimeError"),
            (("%tiny", "--channels", "4"), "a step failed with an input of 1 x 4 x 16 x 16: RuntimeError: Given"),
            (("%raises",), "models.py:raises did not make a model: ValueError: no such luck"),
            (("%Frozen",), "expected an output that requires a gradient"),
        ],
    )
    def test_failures(self, words: tuple[str, ...], text: str, commands: Commands) -> None:
        assert text in commands("bench", *words, *SMALL).failure("bench")
