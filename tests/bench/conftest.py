"""What the tests of the benches share: scripts run in this process, at their tiniest size."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.threads import threads

pytest.importorskip("matplotlib")

from bench import report


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    """Scripts set what they need for themselves."""
    flags = [(torch.backends.cudnn, "benchmark"), (torch.backends.cudnn, "allow_tf32")]
    flags.append((torch.backends.cuda.matmul, "allow_tf32"))
    before = [getattr(*flag) for flag in flags]
    with threads(1):  # several tests run at once
        yield
    for (place, name), value in zip(flags, before, strict=True):
        setattr(place, name, value)


@pytest.fixture
def results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs a script at its tiniest size and returns its results, having checked what all scripts share."""

    def run(name: str, *options: str) -> dict[str, Any]:
        module = importlib.import_module(f"bench.{name}")
        given = ["--size", "tiny", "--out", str(tmp_path), *options]
        if hasattr(module, "main"):
            assert module.main(given) == 0
        else:
            assert report.script(module.__doc__, module.measure_all, given) == 0
        data = json.loads((tmp_path / f"{name}.json").read_text())
        assert data["bench"] == name and data["size"] == "tiny" and data["hardware"]["torch"] == torch.__version__
        text = (tmp_path / f"{name}.md").read_text()
        assert data["hardware"]["cpu"] in text and "trial of the script" in text
        picture = tmp_path / f"{name}.png"
        assert report.REPORTS[name].figure(data) is None or picture.stat().st_size > 1000
        return data | {"text": text, "printed": capsys.readouterr().out.splitlines()}

    return run
