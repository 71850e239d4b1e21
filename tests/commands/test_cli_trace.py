"""`trace` on the command line: every option, where models come from, every mistake in one line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import processes
from support.command_line import Commands, commands, needs
from support.processes import ROOT

import patchconv_native as pc
from patchconv_native.commands import models

__all__ = ["commands"]
SMALL = ("--size", "32", "--plain", "--device", "cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def traced(commands: Commands, *words: str) -> dict:
    """The trace that these words give, by way of its file."""
    text = commands("trace", *words, *SMALL, "--json", "out.json")
    assert text.code == 0 and text.out.endswith("wrote out.json\n"), text.err
    return json.loads((commands.folder / "out.json").read_text())


class TestReport:
    def test_plain(self, commands: Commands) -> None:
        text = commands("trace", "%tiny", *SMALL)
        assert text.code == 0 and text.err == ""
        lines = text.out.splitlines()
        assert lines[:2] == ["models.py:tiny, input 1 x 3 x 32 x 32", "Sequential (cpu)"]
        assert lines[2].startswith("peak ") and any(line.startswith("  1  ") for line in lines)

    @needs("rich")
    def test_in_colour(self, commands: Commands) -> None:
        text = commands("trace", "%tiny", "--size", "32", "--device", "cpu")
        assert text.code == 0 and "└─ 4" in text.out

    def test_without_rich(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "rich", None)
        text = commands("trace", "%tiny", "--size", "32", "--device", "cpu")
        assert text.code == 0 and "└─" not in text.out and "BatchNorm2d" in text.out

    def test_depth(self, commands: Commands) -> None:
        assert "BatchNorm2d" not in commands("trace", "%tiny", *SMALL, "--depth", "0").out
        assert "BatchNorm2d" in commands("trace", "%tiny", *SMALL, "--depth", "1").out

    @needs("matplotlib")
    def test_files(self, commands: Commands) -> None:
        words = [f"--{name}={name}.{end}" for name, end in (("html", "html"), ("csv", "csv"), ("plot", "svg"))]
        text = commands("trace", "%tiny", *SMALL, *words, "--json=a.json")
        assert text.code == 0, text.err
        assert {line for line in text.out.splitlines() if line.startswith("wrote ")} == {
            f"wrote {name}" for name in ("html.html", "csv.csv", "plot.svg", "a.json")
        }
        assert Path("html.html").read_text().lower().startswith("<!doctype html>")
        assert Path("plot.svg").read_text().startswith("<?xml")
        rows = csv.DictReader(Path("csv.csv").read_text().splitlines())
        assert {row["phase"] for row in rows} == {"forward", "backward"}
        assert pc.memory.MemoryReport.load("a.json").finished

    def test_is_what_the_library_says(self, commands: Commands) -> None:
        data = traced(commands, "%tiny", "--fake", "--batch", "2")
        x = torch.empty(2, 3, 32, 32, device="meta")
        expected = pc.memory.trace(models.find("models.py:tiny").build(), x, fake=True)
        assert data["peak"]["bytes"] == expected.peak and data["saved"] == expected.saved


class TestStep:
    def test_input(self, commands: Commands) -> None:
        def inputs(*words: str) -> int:
            return traced(commands, *words)["static"]["inputs"]

        assert inputs("%tiny", "--batch", "2") == 2 * 3 * 32 * 32 * 4
        assert inputs("%half") == 3 * 32 * 32 * 2
        words = ("trace", "%tiny", "--plain", "--device", "cpu")
        assert "input 1 x 3 x 16 x 48" in commands(*words, "--size", "16x48").out
        assert "input 1 x 3 x 4 x 8 x 8" in commands("trace", "%deep", *words[2:], "--size", "4x8x8").out
        assert "input 1 x 3 x 224 x 224" in commands(*words, "--fake").out

    def test_phases(self, commands: Commands) -> None:
        def phases(*words: str) -> list[str]:
            return [one["phase"] for one in traced(commands, "%tiny", *words)["phases"]]

        assert phases() == ["forward", "backward"]
        assert phases("--eval") == ["forward"]
        assert phases("--optimizer", "adam") == ["forward", "backward", "optimizer"]

    @pytest.mark.parametrize(("name", "copies"), [("sgd", 1), ("adam", 2), ("adamw", 2)])
    @pytest.mark.parametrize("fake", [False, True])
    def test_optimizers(self, name: str, copies: int, fake: bool, commands: Commands) -> None:
        data = traced(commands, "%tiny", "--optimizer", name, *(["--fake"] if fake else []))
        least = copies * data["static"]["parameters"]
        assert least <= data["after"]["optimizer"] <= least + 100

    def test_amp(self, commands: Commands) -> None:
        assert traced(commands, "%tiny")["amp"] is None
        assert traced(commands, "%tiny", "--amp", "bfloat16")["amp"] == "bfloat16"
        assert traced(commands, "%tiny", "--amp", "float16", "--fake")["amp"] == "float16"

    def test_converted(self, commands: Commands) -> None:
        saved = {word: traced(commands, "%tiny", *word.split())["saved"] for word in ("", "--convert")}
        assert saved["--convert"] < saved[""]

    def test_checkpoints(self, commands: Commands) -> None:
        stock = traced(commands, "%blocks")
        some = traced(commands, "%blocks", "--checkpoint", "1", "2", "--checkpoint", "3")
        assert some["saved"] < stock["saved"] / 2
        assert traced(commands, "%blocks", "--fake", "--checkpoint", "1", "2", "3")["saved"] == some["saved"]

    @pytest.mark.parametrize("fake", [(), ("--fake",)])
    def test_channels_last(self, fake: tuple[str, ...], commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def look(model: torch.nn.Module, x: torch.Tensor, **options: object) -> None:
            weight = next(model.parameters())
            seen.extend(
                (weight.is_contiguous(memory_format=layout), x.is_contiguous(memory_format=layout))
                for layout in (torch.channels_last, torch.contiguous_format)
            )
            raise RuntimeError("seen")

        monkeypatch.setattr(pc.memory, "trace", look)
        assert commands("trace", "%tiny", *SMALL, "--channels-last", *fake).code == 1
        assert seen == [(True, True), (False, False)]

    def test_fake_takes_no_memory(self, commands: Commands) -> None:
        words = ("--size", "30000x40000", "--batch", "99", "--plain", "--device", "cpu")
        text = commands("trace", "%tiny", "--fake", *words)
        assert text.code == 0 and text.err == "" and "TiB" in text.out

    def test_fake_cuda(self, commands: Commands) -> None:
        text = commands("trace", "%tiny", "--fake", "--size", "32", "--plain", "--device", "cuda")
        assert text.code == 0 and "Sequential (cuda, fake tensors" in text.out

    @pytest.mark.parametrize(("name", "why"), [("Mixed", "does not run as built"), ("Reads", "cannot be built")])
    def test_fake_with_a_real_model(self, name: str, why: str, commands: Commands) -> None:
        text = commands("trace", f"%{name}", "--fake", *SMALL)
        assert text.code == 0 and "nothing was computed" in text.out
        assert text.err.startswith(f"note: the model {why} on the meta device (") and text.err.count("\n") == 1
        assert text.err.endswith("): its parameters take memory\n")


class TestModels:
    @needs("torchvision")
    def test_torchvision(self, commands: Commands) -> None:
        data = traced(commands, "torchvision:squeezenet1_1", "--fake")
        assert data["title"] == "SqueezeNet" and data["static"]["parameters"] == 1235496 * 4

    @needs("torchvision")
    def test_backbones_are_not_downloaded(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *args, **kwargs: pytest.fail("downloads"))
        with torch.device("meta"):
            assert models.find("torchvision:lraspp_mobilenet_v3_large").build()

    @needs("timm")
    def test_timm(self, commands: Commands) -> None:
        assert traced(commands, "timm:resnet10t", "--fake", "--batch", "2")["title"] == "ResNet"

    def test_module(self, commands: Commands) -> None:
        Path("models.py").rename("own_models.py")
        assert traced(commands, "own_models:tiny")["title"] == "Sequential"
        assert traced(commands, "own_models:Nest.inner")["title"] == "Sequential"

    def test_class_and_instance(self, commands: Commands) -> None:
        assert traced(commands, "%Mixed")["title"] == "Mixed"
        assert traced(commands, "%whole")["title"] == "Sequential"
        assert traced(commands, "%whole", "--fake")["fake"]

    def test_file_elsewhere_with_a_neighbour(self, commands: Commands) -> None:
        folder = commands.folder / "sub.folder"
        folder.mkdir()
        (folder / "parts_nearby.py").write_text("from torch import nn\nmake = nn.Identity\n")
        (folder / "net.py").write_text(
            "from parts_nearby import make\nfrom torch import nn\n"
            "def net():\n    return nn.Sequential(nn.Conv2d(3, 2, 1), make())\n"
        )
        assert traced(commands, "sub.folder/net.py:net")["title"] == "Sequential"
        assert traced(commands, f"{folder}/net.py:net")["title"] == "Sequential"


class TestMistakes:
    @pytest.mark.parametrize(
        ("model", "text"),
        [
            ("nothing", "expected MODEL to be torchvision:NAME, timm:NAME, module:callable or file.py:callable, got"),
            (":tiny", "expected MODEL to be"),
            ("models.py:", "expected MODEL to be"),
            ("modles:tiny", "expected a module that can be imported from here, got 'modles'; did you mean models?"),
            ("..:tiny", "expected a module's name, got '..'"),
            ("modles.py:tiny", "expected a Python file, got 'modles.py', which is not there; did you mean models.py?"),
            ("no/such/folder/x.py:tiny", "which is not there"),
            ("%tinny", "expected models.py to have a 'tinny', got none; did you mean tiny?"),
            ("%Nest.iner", "did you mean inner?"),
            ("%number", "expected models.py:number to return a torch.nn.Module, got int"),
            ("%limit", "expected models.py:limit to be a callable that returns a torch.nn.Module, got int"),
            ("%wants", "a callable without arguments, got one that says: missing a required argument: 'width'"),
        ],
    )
    def test_models(self, model: str, text: str, commands: Commands) -> None:
        for more in ((), ("--fake",)):
            assert text in commands("trace", model, *SMALL, *more).mistake("trace")

    @needs("torchvision", "timm")
    @pytest.mark.parametrize(
        ("model", "text"),
        [
            ("torchvision:resnet_18", "expected a model of torchvision, got 'resnet_18'; did you mean torchvision:"),
            ("timm:convnext_tinny", "expected a model of timm, got 'convnext_tinny'; did you mean timm:convnext_tiny"),
            ("torchvison:resnet18", "did you mean torchvision?"),
            ("squeezenet1_1", "did you mean torchvision:squeezenet1_1?"),
        ],
    )
    def test_names(self, model: str, text: str, commands: Commands) -> None:
        assert text in commands("trace", model).mistake("trace")

    @pytest.mark.parametrize("library", ["torchvision", "timm"])
    def test_library_not_installed(self, library, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, library, None)
        text = commands("trace", f"{library}:resnet18").mistake("trace")
        assert f"got {library}: pip install {library}" in text

    def test_library_for_another_torch(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str) -> None:
            raise RuntimeError("operator torchvision::nms does not exist\nand more")

        monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: True)
        monkeypatch.setattr(models.importlib, "import_module", fail)
        text = commands("trace", "torchvision:resnet18").mistake("trace")
        assert "does not work with this torch (RuntimeError: operator torchvision::nms does not exist)" in text

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ((), "required: MODEL"),
            (("%tiny", "--size", "0"), "--size: expected a size such as 512 or 512x768 (height x width), got '0'"),
            (("%tiny", "--size", "512X512"), "--size: expected a size"),
            (("%tiny", "--size", "-5"), "--size: expected"),
            (("%tiny", "--size", "1x2x3x4"), "--size: expected a size"),
            (("%tiny", "--batch", "0"), "--batch: expected a whole number of 1 or more, got '0'"),
            (("%tiny", "--batch", "1.5"), "--batch: expected a whole number"),
            (("%tiny", "--channels", "many"), "--channels: expected a whole number"),
            (("%tiny", "--depth", "-1"), "--depth: expected"),
            (("%tiny", "--device", "tpu"), "--device: expected cpu, cuda or cuda:N, got 'tpu'"),
            (("%tiny", "--device", "cdua"), "did you mean cuda?"),
            (("%tiny", "--amp", "int8"), "--amp: invalid choice: 'int8'"),
            (("%tiny", "--optimizer", "adamm"), "--optimizer: invalid choice: 'adamm'"),
            (("%tiny", "--eval", "--optimizer", "sgd"), "expected either --eval or --optimizer"),
            (("%tiny", "--chekpoint", "1"), "unrecognized arguments: --chekpoint 1; did you mean --checkpoint"),
            (("%tiny", "--plot", "x.jpeg"), "--plot: expected a file that ends in .png, .svg, .pdf, got 'x.jpeg'"),
            (("%tiny", "--json", "nowhere/x.json"), "--json nowhere/x.json: there is no folder nowhere"),
            (("%tiny", "--html", "."), "--html .: expected a file, got a folder"),
            (("%tiny", "--checkpoint", "9"), "--checkpoint: expected the name of a module, got '9'"),
            (("%blocks", "--checkpoint", "1.O"), "got '1.O'; did you mean 1."),
        ],
    )
    def test_words(self, words: tuple[str, ...], text: str, commands: Commands) -> None:
        assert text in commands("trace", *words).mistake("trace")

    @no_gpu
    def test_no_gpu(self, commands: Commands) -> None:
        text = commands("trace", "%tiny", "--device", "cuda").mistake("trace")
        assert "--device cuda: expected a device that is here, and torch finds no GPU" in text

    def test_no_such_gpu(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        for more in ((), ("--fake",)):
            text = commands("trace", "%tiny", "--device", "cuda:3", *more).mistake("trace")
            assert "--device cuda:3: torch finds 1 GPUs here" in text

    def test_no_matplotlib(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        text = commands("trace", "%tiny", "--plot", "x.png").mistake("trace")
        assert "--plot needs matplotlib: pip install 'patchconv_native[report]'" in text

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (("%raises",), "models.py:raises did not make a model: ValueError: no such luck"),
            (("%asks",), "models.py:asks did not make a model: SystemError"),
            (("broken.py:x",), "running broken.py failed: SyntaxError: "),
            (("broken:x",), "importing broken failed: SyntaxError: "),
            (("needy:x",), "importing needy failed: ModuleNotFoundError: No module named 'not_here_at_all'"),
            (("%tiny", "--channels", "4"), "a step with an input of 1 x 4 x 32 x 32 failed: RuntimeError: Given"),
            (("%Frozen",), "expected an output that requires a gradient"),
            (("%deep", "--channels-last"), "cannot be brought to"),
        ],
    )
    def test_failures(self, words: tuple[str, ...], text: str, commands: Commands) -> None:
        Path("broken.py").write_text("def x(:\n")
        Path("needy.py").write_text("import not_here_at_all\n")
        for more in ((), ("--fake",)):
            done = commands("trace", *words, *SMALL, *more)
            assert text in done.failure("trace")
            assert done.out == ""

    def test_out_of_memory(self, commands: Commands) -> None:
        done = commands("trace", "%Hungry", *SMALL, "--json", "part.json")
        assert "out of memory with an input of 1 x 3 x 32 x 32: RuntimeError" in done.failure("trace")
        assert "what follows is as far as it came" in done.out and "Conv2d" in done.out
        assert not pc.memory.MemoryReport.load("part.json").finished

    def test_no_memory_for_the_input(self, commands: Commands) -> None:
        done = commands("trace", "%tiny", "--device", "cpu", "--size", "100000000", "--batch", "1000")
        assert "there is no memory for an input of 1000 x 3 x 100000000 x 100000000" in done.failure("trace")

    def test_file_that_cannot_be_written(self, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(self: object, path: Path) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(pc.memory.MemoryReport, "to_json", full)
        text = commands("trace", "%tiny", *SMALL, "--json", "x.json").failure("trace")
        assert "cannot write x.json: OSError: [Errno 28] No space left on device" in text

    def test_interrupt(self, commands: Commands) -> None:
        done = commands("trace", "%Stops", *SMALL)
        assert done.code == 130 and done.err.endswith(" trace: interrupted\n")


def modules_of_the_help() -> set[str]:
    processes.command_here("trace", "--help")
    return set(sys.modules)


class TestProcess:
    def test_of_its_own(self, commands: Commands) -> None:
        words = ["trace", "models:tinny", *SMALL]
        environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
        command = [sys.executable, "-m", "patchconv_native", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == (
            "patchconv_native trace: expected models to have a 'tinny', got none; did you mean tiny?\n"
        )

    def test_help_imports_nothing_heavy(self) -> None:
        assert not processes.run(modules_of_the_help) & {"rich", "matplotlib", "torchvision", "timm", "PIL"}

    def test_reader_that_leaves(self) -> None:
        started = subprocess.Popen(
            [sys.executable, "-m", "patchconv_native", "info", "--plain"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert started.stdout is not None and started.stderr is not None
        started.stdout.close()
        assert started.wait(120) == 1 and started.stderr.read() == ""
        started.stderr.close()
