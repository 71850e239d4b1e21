"""Models in a file of the user's, and commands run on them in this process."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from patchconv_native import __main__ as cli

MODELS = '''
import torch
from torch import nn

limit = 3
whole = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


def tiny():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
    )


def blocks():
    def block():
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 1), nn.SiLU())

    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(block() for _ in range(3)))


def deep():
    return nn.Conv3d(3, 4, 3)


def half():
    return tiny().to(torch.bfloat16)


def raises():
    raise ValueError("no such luck\\nand more")


def asks():
    raise SystemError


def wants(width):
    return nn.Conv2d(3, width, 1)


def number():
    return 7


class Mixed(nn.Module):
    """Has a tensor that is no buffer, which keeps it from running as built on the meta device."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 4, 3), torch.tensor([2.0])

    def forward(self, x):
        return self.conv(x) * self.scale


class Reads(nn.Conv2d):
    """Reads a number from a tensor while it is built, which the meta device has not."""

    def __init__(self):
        super().__init__(3, int(torch.tensor(4).item()), 3)


class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).sum() + torch.empty(2**50).sum()


class Stops(Hungry):
    def forward(self, x):
        raise KeyboardInterrupt


def Frozen():
    return nn.Conv2d(3, 4, 3).requires_grad_(False)


class Nest:
    @staticmethod
    def inner():
        return tiny()
'''


@dataclass
class CommandText:
    """What a command printed."""

    code: int
    out: str
    err: str

    def mistake(self, command: str) -> str:
        """The one line of something impossible."""
        return self._line(command, 2)

    def failure(self, command: str) -> str:
        """The one line of something that failed."""
        return self._line(command, 1)

    def _line(self, command: str, code: int) -> str:
        assert self.code == code, (self.code, self.err)
        assert self.err.count("\n") == 1 and "Traceback" not in self.err, self.err
        assert f" {command}: " in self.err, self.err
        return self.err


class Commands:
    """Runs `patchconv_native WORDS` where `models.py` of the above lies. `%` before a word is that file and a colon."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        (folder / "models.py").write_text(MODELS)

    def __call__(self, *words: str) -> CommandText:
        self._capsys.readouterr()
        try:
            code = cli.main([re.sub("^%", "models.py:", word) for word in words])
        except SystemExit as stopped:
            assert isinstance(stopped.code, int)
            code = stopped.code
        text = self._capsys.readouterr()
        return CommandText(code, text.out, text.err)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    return Commands(tmp_path, capsys)


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skips where a module is not installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed here: {', '.join(absent)}")
