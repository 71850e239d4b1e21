"""The command line: what `info` says; every mistake is one line and exit code 2, never a traceback."""

from __future__ import annotations

import importlib
import io
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import processes
from support.processes import ROOT

import patchconv_native as pc
from patchconv_native import __main__ as cli
from patchconv_native import info


def usable(*modules: str) -> bool:
    try:
        return all(importlib.import_module(name) for name in modules)
    except Exception:  # a torchvision beside another torch fails in ways of its own
        return False


needs_demo = pytest.mark.skipif(
    not usable("numpy", "PIL", "matplotlib", "rich", "skimage"),
    reason="the packages of the extra 'demo' are not all here",
)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """`python -m patchconv_native WORDS`, in a new Python."""
    command = [sys.executable, "-m", "patchconv_native", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=150)


def without_packages() -> processes.Completed:
    for name in ("rich", "matplotlib", "PIL", "torchvision", "skimage"):
        sys.modules[name] = None  # type: ignore[assignment]
    return processes.command_here("info")


def as_a_script() -> processes.Completed:
    sys.argv[0] = "/usr/bin/patchconv"
    importlib.reload(cli)
    return processes.command_here("trace", "--help")


def fails_in_one_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command that has to fail as the user's mistake, and returns what it says."""
    assert cli.main(words) == 2
    text = capsys.readouterr()
    assert text.err.count("\n") == 1 and text.err.startswith("patchconv_native demo: "), text.err
    return text.err


class TestInfo:
    def test_says_what_was_built_and_what_runs(self) -> None:
        done = run("info", "--plain")
        assert done.returncode == 0 and done.stderr == ""
        facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.split("\n\n")[0].splitlines())
        built = pc.build_info()
        assert facts["package"] == built["version"] == pc.__version__
        assert facts["torch"] == f"{torch.__version__} (built with {built['torch']})"
        assert (torch.version.cuda or "none") in facts["CUDA"] and (built["cuda"] or "none") in facts["CUDA"]
        assert facts["workspace limit"] == "64 MiB" and facts["backend"] == "auto"
        assert (facts["GPU"] == "none") == (not torch.cuda.is_available())
        assert re.match(r"[1-9]\d* in an operator", facts["threads"])

    def test_lists_every_operator_with_its_keys(self) -> None:
        table = info.operators()
        kinds = itertools.product(("", "_transpose"), (1, 2, 3))
        for kind, dimensions in kinds:
            keys = set(table[f"patchconv::conv{kind}{dimensions}d"])
            assert {"CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"} <= keys
        names = {"patchconv::_convolution", "patchconv::_convolution_fused", "patchconv::_convolution_backward"}
        cuda = {"CUDA", "AutocastCUDA"} if pc.build_info()["cuda"] else set()
        for name in names:
            assert {"CPU", "Meta", "Autograd"} | (cuda & {"CUDA"}) <= set(table[name]), name
        assert {"AutocastCPU"} | cuda <= set(table["patchconv::_convolution"])
        # The listing asks the dispatcher; its own dump has to agree.
        for name, keys in table.items():
            dump = torch._C._dispatch_dump(name)
            for key in ("CPU", "CUDA", "Meta", "AutocastCPU", "AutocastCUDA", "FuncTorchDynamicLayerFrontMode"):
                assert (re.search(rf"^{key}: ", dump, re.MULTILINE) is not None) == (key in keys), (name, key)

    def test_prints_the_table_it_found(self) -> None:
        plain = processes.command("info", "--plain").out
        pretty = processes.command("info").out
        for name, keys in info.operators().items():
            for printed in (plain, pretty):
                line = next(line for line in printed.splitlines() if line.split()[:1] == [name])
                assert line.split()[1:] == keys

    def test_needs_torch_alone(self) -> None:
        done = processes.run(without_packages)
        assert done.code == 0 and done.err == ""
        assert "patchconv::conv2d " in done.out and pc.__version__ in done.out


class TestWords:
    def test_help_names_the_commands(self) -> None:
        done = processes.command("--help")
        assert done.code == 0
        for name, module in cli.COMMANDS.items():
            assert re.search(rf"^\s+{name}\s+\w", done.out, re.MULTILINE)
            assert module.__doc__ and module.__doc__.splitlines()[0].endswith(".")

    @pytest.mark.parametrize("command", sorted(cli.COMMANDS))
    def test_help_of_a_command(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0
        assert f"{cli.PROGRAM} {command}" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ((), "required: COMMAND"),
            (("fly",), "expected a command, info, trace, plan, tile, explain, bench, demo, got 'fly' (--help"),
            (("expalin", "torchvision:resnet18"), "got 'expalin'; did you mean explain? (--help explains)"),
            (("info", "--fly"), "unrecognized arguments: --fly"),
            (("demo", "--megapixels", "many"), "--megapixels: expected a number, got 'many'"),
            (("demo", "--megapixels", "0"), "--megapixels: expected 0.1 to 1000 megapixels, got 0"),
            (("demo", "--megapixels", "nan"), "--megapixels: expected a number, got 'nan'"),
            (("demo", "--device", "tpu"), "--device: invalid choice: 'tpu'"),
            (("demo", "--seed", "9" * 23), f"--seed: expected a whole number from -2^63 to 2^64 - 1, got '{'9' * 23}'"),
            (("demo", "--seed", str(2**64)), f"--seed: expected a whole number from -2^63 to 2^64 - 1, got '{2**64}'"),
            (("demo", "--seed", str(-(2**63) - 1)), "--seed: expected a whole number from -2^63 to 2^64 - 1, got '-"),
            (("demo", "--seed", "1.5"), "--seed: expected a whole number from -2^63 to 2^64 - 1, got '1.5'"),
        ],
    )
    def test_mistakes(self, words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 2
        assert text in capsys.readouterr().err

    @pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
    def test_seeds_that_torch_takes(self, seed: int) -> None:
        assert cli.parser().parse_args(["demo", "--seed", str(seed)]).seed == seed
        torch.Generator().manual_seed(seed)

    def test_a_mistake_is_one_line(self) -> None:
        done = processes.command("inof")
        assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
        assert done.err.startswith("python -m patchconv_native: ") and done.err.endswith(" (--help explains)\n")

    def test_script(self) -> None:
        done = processes.run(as_a_script)
        assert done.code == 0 and done.out.startswith("usage: patchconv trace ")
        assert "\n  patchconv trace torchvision:resnet50 " in done.out
        pyproject = (ROOT / "pyproject.toml").read_text()
        assert '[project.scripts]\npatchconv = "patchconv_native.__main__:main"\n' in pyproject

    def test_interrupt(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def stop(arguments: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(info, "run", stop)
        assert cli.main(["info"]) == 130
        assert capsys.readouterr().err == "\npython -m patchconv_native info: interrupted\n"


def png(width: int, height: int) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.effect_noise((width, height), 50).convert("RGB").save(stream, "png")
    return stream.getvalue()


# What is in the file, and what is said of it. The last is a header alone: pixels that nobody is asked to decode.
PICTURES: dict[str, tuple[bytes | Callable[[], bytes] | None, str]] = {
    "nowhere.png": (None, "there is no file FILE"),
    "empty.jpg": (b"", "FILE is not a picture"),
    "notes.jpg": (b"# Title\n\nNo picture at all.\n", "FILE is not a picture"),
    "noise.jpg": (bytes(range(256)) * 20, "FILE is not a picture"),
    "cut.png": (lambda: png(200, 200)[:5000], "FILE cannot be read: "),
    "line.png": (lambda: png(300, 5), "the picture is 300 x 5 pixels; either side must be 16 or more"),
    "huge.pgm": (b"P5 60000 60000 255\n" + bytes(100), "has more than 1074 megapixels"),
}


@needs_demo
class TestDemoMistakes:
    @pytest.mark.parametrize("name", PICTURES)
    def test_pictures(self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content, text = PICTURES[name]
        file, new = tmp_path / name, tmp_path / "new"
        if content is not None:
            file.write_bytes(content if isinstance(content, bytes) else content())
        found = fails_in_one_line(capsys, "demo", "--image", str(file), "--out", str(new))
        assert text.replace("FILE", str(file)) in found and not new.exists()

    def test_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert f"{tmp_path} is a folder" in fails_in_one_line(capsys, "demo", "--image", str(tmp_path))

    @pytest.mark.parametrize(
        ("width", "height", "megapixels", "scaled"),
        [(20000, 16, "0.1", "11184 x 16"), (16, 20000, "0.1", "16 x 11184"), (100000, 16, "0.1", "25000 x 8")],
    )
    def test_narrow_picture(self, width, height, megapixels, scaled, tmp_path: Path, capsys) -> None:
        (file := tmp_path / "band.png").write_bytes(png(width, height))
        words = ("--image", str(file), "--megapixels", megapixels, "--out", str(tmp_path / "new"))
        text = fails_in_one_line(capsys, "demo", *words)
        assert f"the picture is {width} x {height} pixels, {scaled} at {megapixels} megapixels; there " in text
        assert "either side must be 16 or more and at least 1/400 of the other" in text
        assert not (tmp_path / "new").exists()

    def test_out_is_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (out := tmp_path / "out").write_text("taken")
        assert f"cannot write to --out {out}" in fails_in_one_line(capsys, "demo", "--out", str(out))
        assert out.read_text() == "taken"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "torch finds no GPU here" in fails_in_one_line(capsys, "demo", "--device", "cuda")

    @pytest.mark.parametrize("module", ["numpy", "PIL", "matplotlib", "rich", "skimage"])
    def test_missing_package(self, module: str, monkeypatch, capsys) -> None:
        monkeypatch.setitem(sys.modules, module, None)  # what find_spec then takes for absent
        package = {"PIL": "pillow", "skimage": "scikit-image"}.get(module, module)
        text = fails_in_one_line(capsys, "demo")
        assert f"needs {package}, not installed here; install with: pip install 'patchconv_native[demo]'" in text

    def test_own_picture_needs_no_scikit_image(self, tmp_path: Path, monkeypatch, capsys) -> None:
        monkeypatch.setitem(sys.modules, "skimage", None)
        file = tmp_path / "nowhere.png"
        assert "there is no file" in fails_in_one_line(capsys, "demo", "--image", str(file))
