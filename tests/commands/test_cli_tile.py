"""`tile` on the command line: images on disk, a call that is killed and goes on, and every mistake in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import Commands, CommandText, commands
from support.processes import ROOT
from torch import Tensor

from patchconv_native.commands import models, tile
from patchconv_native.tiles import journal

__all__ = ["commands"]
numpy = pytest.importorskip("numpy")
QUIET = ("--device", "cpu", "--quiet")

NORMS = """
import os, time, torch
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        return x.float() / 255

def norms():
    torch.manual_seed(0)
    return nn.Sequential(
        Slow(), nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 3, padding=1),
    )

def convs():
    torch.manual_seed(0)
    return nn.Sequential(
        Slow(), nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 5, padding=2), nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 2, 3, padding=1),
    )

def random():
    return nn.Sequential(Slow(), nn.Conv2d(3, 2, 1))

def two():
    class Two(nn.Module):
        def forward(self, x):
            return x, x * 2
    return Two()

def wide():
    return nn.Sequential(Slow(), nn.Conv2d(3, 2, 1)).append(Bf())

class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls += 1
        return x.float() * self.calls

def counted():
    return nn.Sequential(Counted(), nn.Conv2d(3, 2, 1), Counted())

class Bf(nn.Module):
    def forward(self, x):
        return x.bfloat16()
"""


@pytest.fixture
def image(commands: Commands) -> Any:
    Path("nets.py").write_text(NORMS)
    data = numpy.random.default_rng(0).integers(0, 256, (1, 3, 96, 40), dtype=numpy.uint8)
    numpy.save("in.npy", data)
    return data


@torch.no_grad()
def expected(name: str, data: Any) -> Tensor:
    return models.find(f"nets.py:{name}").build().eval()(torch.from_numpy(data))


def check(path: str, want: Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(numpy.load(path)), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["convs", "norms"])
def test_npy(commands: Commands, image: Any, name: str) -> None:
    text = commands("tile", f"nets.py:{name}", "in.npy", "out.npy", "--budget", "1MiB", *QUIET)
    assert (text.code, text.out, text.err) == (0, "wrote out.npy\n", "")
    check("out.npy", expected(name, image))
    assert not Path("out.npy.journal").exists()


def test_a_buffer_that_the_model_changes(commands: Commands, image: Any) -> None:
    torch.save(models.find("nets.py:counted").build().state_dict(), "weights.pt")
    words = ("tile", "nets.py:counted", "in.npy", "out.npy", "--tile", "8", "--weights", "weights.pt", *QUIET)
    assert commands(*words).code == 0
    model = models.find("nets.py:counted").build()
    model.load_state_dict(torch.load("weights.pt"))
    with torch.no_grad():
        check("out.npy", model(torch.from_numpy(image)))


@pytest.mark.parametrize("dim", ["3", "-1"])
def test_columns(commands: Commands, image: Any, dim: str) -> None:
    words = ("tile", "nets.py:norms", "in.npy", "out.npy", "--tile", "8", "--device", "cpu", "--dim", dim)
    text = commands(*words)
    assert text.code == 0 and text.err.splitlines()[-1] == "strip 15 of 15"
    check("out.npy", expected("norms", image))


def test_progress_and_weights(commands: Commands, image: Any) -> None:
    torch.manual_seed(7)
    other = models.find("nets.py:convs").build()
    torch.save({k: v + 1 for k, v in other.state_dict().items()}, "weights.pt")
    text = commands(
        "tile", "nets.py:convs", "in.npy", "out.npy", "--tile", "4", "--weights", "weights.pt", "--device", "cpu"
    )
    assert text.code == 0, text.err
    assert text.err.splitlines()[-1] == "strip 26 of 26" and " s left" in text.err
    other.load_state_dict(torch.load("weights.pt"))
    with torch.no_grad():
        check("out.npy", other.eval()(torch.from_numpy(image)))


@pytest.mark.parametrize("layout", ["CYX", "YXS", "CYX in tiles"])
def test_tiff(commands: Commands, image: Any, layout: str) -> None:
    tifffile = pytest.importorskip("tifffile")
    tiles: dict[str, Any] = {}
    if layout == "CYX in tiles":
        pytest.importorskip("zarr")
        layout, tiles = "CYX", {"tile": (16, 16)}
    data = image[0] if layout == "CYX" else image[0].transpose(1, 2, 0).copy()
    tifffile.imwrite("in.tif", data, photometric="minisblack" if layout == "CYX" else "rgb", **tiles)
    text = commands("tile", "nets.py:convs", "in.tif", "out.tif", "--tile", "8", *QUIET)
    assert text.code == 0, text.err
    got = torch.from_numpy(tifffile.imread("out.tif").reshape(1, 2, 96, 40))
    torch.testing.assert_close(got, expected("convs", image), rtol=1e-4, atol=1e-5)


def test_zarr(commands: Commands, image: Any) -> None:
    zarr = pytest.importorskip("zarr")
    zarr.create_array("in.zarr", shape=image.shape, dtype=image.dtype, chunks=(1, 3, 16, 16))[...] = image
    text = commands("tile", "nets.py:norms", "in.zarr", "out.zarr", "--tile", "8", "--store", ".", *QUIET)
    assert text.code == 0, text.err
    got = torch.from_numpy(zarr.open_array("out.zarr", mode="r")[...])
    torch.testing.assert_close(got, expected("norms", image), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Going on.


def stopped_after(monkeypatch: pytest.MonkeyPatch, entries: int) -> list[int]:
    """Every strip is written down; after so many entries the work is broken off. The list gets one for each."""
    real, seen = journal.Journal.save, [0]

    def save(self: Any, state: Any) -> None:
        real(self, state)
        seen[0] += 1
        if seen[0] == entries:
            raise KeyboardInterrupt

    monkeypatch.setattr(journal.Journal, "save", save)
    monkeypatch.setattr(journal.Journal, "due", lambda self: True)
    return seen


@pytest.mark.parametrize(
    ("name", "tile", "strips"), [("convs", "8", 13), ("norms", "8", 36), ("convs", "8x9", 65), ("norms", "12x15", 72)]
)
@pytest.mark.parametrize("part", [0.1, 0.4, 0.7, 0.99])
def test_a_call_that_is_broken_off_goes_on(
    commands: Commands, image: Any, monkeypatch: pytest.MonkeyPatch, name: str, tile: str, strips: int, part: float
) -> None:
    words = ("tile", f"nets.py:{name}", "in.npy", "out.npy", "--tile", tile, "--store", ".", *QUIET)
    entries = max(1, int(part * strips))
    seen = stopped_after(monkeypatch, entries)
    assert commands(*words).code == 130
    assert Path("out.npy.journal").exists() and seen == [entries]
    assert list(Path().glob("patchconv-tile-*/*.rows")) or name == "convs"
    text = commands(*words, "--resume")
    assert text.code == 0 and text.err == "" and seen == [strips]
    check("out.npy", expected(name, image))
    assert left() == ["out.npy", "out.npy.journal"] and Path("out.npy.journal").stat().st_size < 4096


def left() -> list[str]:
    """What a call has left in the folder."""
    return sorted(path.name for path in Path().iterdir() if path.name[0] in "op")


def test_a_call_that_is_finished_is_not_computed_again(
    commands: Commands, image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("tile", "nets.py:norms", "in.npy", "out.npy", "--tile", "8", "--store", ".", *QUIET)
    text = commands(*words, "--resume")
    assert (text.code, text.out) == (0, "wrote out.npy\n")
    assert text.err == "note: nothing is written down in out.npy.journal: beginning\n"
    state = os.stat("out.npy").st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(tile, "run_plan", None)
        text = commands(*words, "--resume")
    assert (text.code, text.out) == (0, "")
    assert text.err.startswith("note: out.npy is finished already: nothing is computed; without --resume, tile begins")
    assert os.stat("out.npy").st_mtime_ns == state
    check("out.npy", expected("norms", image))
    with_another = commands(*words, "--resume", "--tile", "9").mistake("tile")
    assert "out.npy.journal is of another call, which differs in the strips (--budget" in with_another
    assert os.stat("out.npy").st_mtime_ns == state
    Path("out.npy").unlink()
    text = commands(*words, "--resume")
    assert text.code == 0 and text.err == "note: out.npy is gone: beginning again\n"
    check("out.npy", expected("norms", image))
    assert commands(*words).code == 0 and left() == ["out.npy"]


def test_an_output_without_a_journal_is_not_written_over(commands: Commands, image: Any) -> None:
    words = ("tile", "nets.py:convs", "in.npy", "out.npy", "--tile", "8", *QUIET)
    assert commands(*words).code == 0
    Path("out.npy").write_bytes(b"of another program")
    text = commands(*words, "--resume").mistake("tile")
    assert "--resume: there is no out.npy.journal that says how far out.npy has come: it was finished by a call" in text
    assert Path("out.npy").read_bytes() == b"of another program" and left() == ["out.npy"]


def test_a_call_that_cannot_begin_leaves_the_journal_of_another(
    commands: Commands, image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("nets.py:convs", "in.npy", "out.npy", "--tile", "8", *QUIET)
    seen = stopped_after(monkeypatch, 5)
    assert commands("tile", *words).code == 130
    assert "numpy has no bfloat16" in said(commands("tile", "nets.py:wide", *words[1:]))
    assert commands("tile", *words, "--resume").code == 0 and seen == [13]
    check("out.npy", expected("convs", image))


def test_what_is_another_call_is_refused(commands: Commands, image: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["tile", "nets.py:convs", "in.npy", "out.npy", *QUIET, "--resume", "--tile", "8"]
    seen = stopped_after(monkeypatch, 2)
    assert commands(*words).code == 130

    def differs(*others: str) -> str:
        text = commands(*words, *others).mistake("tile")
        begin, end = "--resume: out.npy.journal is of another call, which differs in ", "without --resume, tile begins"
        assert begin in text and end in text
        return text.partition(begin)[2].partition(f"; {end}")[0]

    strips, weights = "the strips (--budget, --tile or --dim)", "the weights"
    assert differs("--tile", "6") == strips
    assert differs("--dim", "3") == strips
    assert differs("--store", ".") == "--store"
    torch.save({k: v + 1 for k, v in models.find("nets.py:convs").build().state_dict().items()}, "weights.pt")
    assert differs("--weights", "weights.pt").split("; ")[0] == weights
    words[1] = "nets.py:norms"
    assert differs().split("; ")[0] == f"MODEL, the model's layers, {weights}, {strips}"
    words[1] = "nets.py:convs"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "3.0")
        assert differs() == "torch's version"
    state = os.stat("in.npy")
    Path("in.npy").touch()
    assert differs() == "INPUT's contents"
    os.utime("in.npy", ns=(state.st_atime_ns, state.st_mtime_ns))
    numpy.save("other.npy", image)
    os.utime("other.npy", ns=(state.st_atime_ns, state.st_mtime_ns))
    words[2] = "other.npy"
    assert differs() == "INPUT's path"
    words[2] = "in.npy"
    kept = Path("out.npy.journal").read_bytes()
    Path("out.npy.journal").write_bytes(b"half an ent")
    assert "out.npy.journal is no journal of tile" in commands(*words).mistake("tile")
    torch.save({"identity": "of an earlier version"}, "out.npy.journal")
    assert "out.npy.journal is no journal of tile" in commands(*words).mistake("tile")
    Path("out.npy.journal").write_bytes(kept)
    assert commands(*words).code == 0 and seen == [13]
    check("out.npy", expected("convs", image))


def test_random_weights_are_told(commands: Commands, image: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("tile", "nets.py:random", "in.npy", "out.npy", "--tile", "8", *QUIET, "--resume")
    stopped_after(monkeypatch, 2)
    assert commands(*words).code == 130
    text = commands(*words).mistake("tile")
    assert "which differs in the weights; models from a library have random weights without --weights; without" in text


def test_without_a_folder_a_network_that_stores_values_begins_again(
    commands: Commands, image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("tile", "nets.py:norms", "in.npy", "out.npy", "--tile", "8", *QUIET)
    seen = stopped_after(monkeypatch, 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(tile, "run_plan", broken_off)
        assert commands(*words).code == 130
    assert left() == ["out.npy", "out.npy.journal"]
    text = commands(*words, "--resume")
    assert text.code == 0 and "note: nothing is written down in out.npy.journal: beginning" in text.err
    assert seen == [0]  # no strip, since values are kept in memory
    check("out.npy", expected("norms", image))


def broken_off(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_a_process_that_is_killed_goes_on(commands: Commands, image: Any) -> None:
    """With half a strip written, as nothing says that it is whole."""
    folder, environment = os.getcwd(), {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["tile", "nets.py:norms", "in.npy", "out.npy", "--tile", "2", "--store", "."]
    program = (
        "import sys, time; from patchconv_native.tiles import journal\n"
        "journal.Journal.due = lambda self: time.sleep(0.1) is None\n"  # a strip takes a while
        "from patchconv_native.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *words, "--device", "cpu", "--quiet"]
    process = subprocess.Popen(command, cwd=folder, env=environment)
    deadline = time.monotonic() + 120
    while not list(Path().glob("patchconv-tile-*/*.rows")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    text = commands(*words, "--resume", "--device", "cpu")
    assert text.code == 0 and "beginning" not in text.err, text.err
    check("out.npy", expected("norms", image))


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes.


def said(text: CommandText) -> str:
    return text.mistake("tile") if text.code == 2 else text.failure("tile")


@pytest.mark.parametrize(("words", "text"), [
    (("nets.py:convs", "no.npy", "out.npy"), "INPUT no.npy: is not there"),
    (("nets.py:convs", "in.jpg", "out.npy"), "INPUT in.jpg: expected a name that ends in .npy, .zarr, .tif or .tiff"),
    (("nets.py:convs", "in.npy", "out.raw"), "OUTPUT out.raw: expected a name that ends in"),
    (("nets.py:convs", "in.npy", "no/out.npy"), "there is no folder no"),
    (("nets.py:convs", "in.npy", "in.npy"), "another file than INPUT"),
    (("nets.py:convs", "in.npy", "out.npy", "--budget", "1KiB"), "a budget of 1 KiB is too small for Sequential here"),
    (("nets.py:convs", "in.npy", "out.npy", "--store", "nowhere"), "--store nowhere: expected a folder that is there"),
    (("nets.py:convs", "in.npy", "out.npy", "--store", "cpu"), "store='cpu' is the same as 'device'"),
    (("nets.py:convs", "in.npy", "out.npy", "--weights", "in.npy"), "--weights in.npy: "),
    (("nets.py:convs", "in.npy", "out.npy", "--dim", "1"), "--dim: expected a dimension from 2 to 4 or from -3 to -1"),
    (("nets.py:convs", "in.npy", "out.npy", "--dim", "4"), "expected dim to be from 2 to 3 or from -2 to -1"),
    (("nets.py:convs", "in.npy", "out.npy", "--dim", "-3"), "dimension of x, or 0, its batch, got -3"),
    (("nets.py:convs", "in.npy", "out.npy", "--budget", "1 gig"), "--budget: expected a number of bytes such as 6GiB"),
    (("nets.py:two", "in.npy", "out.npy"), "one tensor, got one that returns tuple"),
    (("nets.py:wide", "in.npy", "out.npy"), "numpy has no bfloat16"),
    (("%tiny", "in.npy", "out.npy"), "the model failed on in.npy: "),
])  # fmt: skip
def test_mistakes(commands: Commands, image: Any, words: tuple[str, ...], text: str) -> None:
    assert text in said(commands("tile", *words, *QUIET))
    assert not Path("out.npy").exists() and not Path("out.npy.journal").exists()


def test_packages_that_are_missing_are_named(commands: Commands, image: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("out.zarr", "zarr"), ("out.tiff", "tifffile")):
        text = said(commands("tile", "nets.py:convs", name, "out.npy", *QUIET))
        assert f"needs {package}: pip install 'patchconv_native[{package}]'" in text
