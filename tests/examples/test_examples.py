"""The programs of examples/ run at a small size and say what they promise. None is longer than a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import needs_gloo

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str, ranks: int = 0) -> str:
    """What the program prints. It finds the package that is built in place."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_under_80_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


def test_there_are_these() -> None:
    assert [path.stem for path in sorted(EXAMPLES.glob("*.py"))] == [
        "large_image", "several_devices", "train_megapixels", "train_unet", "where_is_the_memory",
    ]  # fmt: skip


def test_large_image() -> None:
    pytest.importorskip("torchvision")
    text = run("large_image", "--side", "256", "--limit", "1MiB")
    means = re.findall(r"(stock|converted) +grew by +[\d.]+ MiB, mean of the features ([\d.]+)", text)
    assert [name for name, _ in means] == ["stock", "converted"]
    assert abs(float(means[0][1]) - float(means[1][1])) < 1e-5
    assert "tiles" in text, "the first convolution is explained"


@pytest.mark.parametrize("how", [("--stock",), ("--checkpoint",), ("--budget", "12MiB")], ids=lambda how: how[0][2:])
def test_train_unet(how: tuple[str, ...]) -> None:
    text = run("train_unet", "--side", "64", "--steps", "2", *how)
    peak = int(re.search(r"peak of a step: (\d+) MiB", text)[1])  # type: ignore[index]
    assert peak <= 12 if "--budget" in how else peak < 60
    first, second = (float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", text))
    assert second < first


def test_train_megapixels(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    picture = tmp_path / "discs.png"
    given = ("--side", "96", "--steps", "4", "--budget", "2MiB", "--picture", str(picture))
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", run("train_megapixels", *given))]
    assert len(losses) == 4 and losses[-1] < losses[0] and picture.stat().st_size > 10_000


@needs_gloo
@pytest.mark.parametrize("more", [(), ("--budget", "768KiB")])
def test_several_devices(more: tuple[str, ...]) -> None:
    text = run("several_devices", "--side", "64", "--steps", "2", *more, ranks=2)
    off = float(re.search(r"gradients: at most (\S+) from those of one process", text)[1])  # type: ignore[index]
    assert off < 1e-5 and "(1, 3, 32, 64) on this rank" in text


def test_where_is_the_memory(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    page = tmp_path / "step.html"
    text = run("where_is_the_memory", "--batch", "1", "--side", "64", "--html", str(page))
    assert "stock" in text and "converted" in text and page.stat().st_size > 10_000
    text = run("where_is_the_memory", "--model", "alexnet", "--batch", "64", "--fake", "--budget", "1MiB")
    assert "no plan fits into 1" in text
