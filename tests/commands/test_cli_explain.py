"""`explain` on the command line: how each convolution of a model would be computed."""

from __future__ import annotations

import re

import pytest
from support.command_line import Commands, commands

import patchconv_native as pc
from patchconv_native.commands import models

__all__ = ["commands"]
LARGE = ("--size", "2048", "--device", "cpu")


def rows(text: str) -> dict[str, list[str]]:
    """The cells of a table's lines, by the first."""
    cells = [re.split(r"\s{2,}", line) for line in text.splitlines()[2:-1]]
    return {name: rest for name, *rest in cells}


def test_a_line_for_each_convolution(commands: Commands) -> None:
    text = commands("explain", "%blocks", *LARGE)
    assert text.code == 0 and text.err == ""
    assert text.out.startswith("models.py:blocks (cpu), input 1 x 3 x 2048 x 2048, fprop\n")
    model = models.find("models.py:blocks").build()
    found = rows(text.out)
    assert list(found) == ["0", "1.0", "1.2", "2.0", "2.2", "3.0", "3.2"]
    for name, (size, path, *_) in found.items():
        module = model.get_submodule(name)
        expected = pc.explain((1, module.in_channels, 2048, 2048), module)
        assert path == expected.path and size == f"1x{module.in_channels}x2048x2048"
    tiled = sum(path != "stock" for _, path, *_ in found.values())
    assert text.out.endswith(f"{tiled} of 7 not by one stock call; each may take 64 MiB of temporary memory\n")
    assert tiled > 0


def test_one_convolution(commands: Commands) -> None:
    module = models.find("models.py:blocks").build()[1][0]
    for pass_ in ("fprop", "dgrad", "wgrad"):
        text = commands("explain", "%blocks", "1.0", *LARGE, "--pass", pass_)
        assert text.code == 0
        assert text.out.splitlines()[1:] == f"1.0: {pc.explain((1, 8, 2048, 2048), module, pass_=pass_)}".splitlines()


@pytest.mark.parametrize("more", [("--amp", "bfloat16"), ("--channels-last",), ("--device", "cuda"), ("--batch", "3")])
def test_options(more: tuple[str, ...], commands: Commands) -> None:
    text = commands("explain", "%blocks", "--size", "64x48", *more)
    assert text.code == 0 and "64 x 48" in text.out and len(rows(text.out)) == 7


def test_volumes(commands: Commands) -> None:
    text = commands("explain", "%deep", "--size", "8x16x16", "--device", "cpu")
    assert text.code == 0 and list(rows(text.out)) == ["(model)"]


def test_mistakes_and_failures(commands: Commands) -> None:
    assert "expected the name of a convolution, got '1.00'; did you mean 1.0" in commands(
        "explain", "%blocks", "1.00"
    ).mistake("explain")
    text = commands("explain", "%blocks", "--channels", "4").failure("explain")
    assert "a call with an input of 1 x 4 x 224 x 224 failed: " in text
