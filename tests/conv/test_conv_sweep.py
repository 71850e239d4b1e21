"""Random calls: hypothesis draws them from the whole space of arguments, and makes a failing one as small as it can.

Other calls are drawn every day; pytest's header prints the seed, and PATCHCONV_SEED chooses one. `make check` draws
more, and `python tests/fuzz.py` as many as one likes. A failure prints a Configuration that `python tests/fuzz.py
--replay` takes.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from support import configurations
from support.checks import check
from support.pairs import FULL
from support.seeds import SWEEP_SEED

EXAMPLES = 140 if FULL else 100
SHARDS = 3 if FULL else 1  # so that pytest -n can spread them
WITHOUT_AVX512 = 1500 if FULL else 300
SETTINGS = settings(
    max_examples=EXAMPLES, deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
)
OPERATORS = [(dims, transposed) for dims in (1, 2, 3) for transposed in (False, True)]


class HypothesisChooser:
    """Smaller and earlier choices are the simpler ones, so failures shrink towards plain calls."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def pick(self, options: Sequence[configurations.T]) -> configurations.T:
        return options[self._draw(st.integers(0, len(options) - 1))]

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


@st.composite
def drawn(draw: st.DrawFn, dims: int, transposed: bool) -> configurations.Configuration:
    return configurations.draw(HypothesisChooser(draw), dims, transposed)


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("dims,transposed", OPERATORS, ids=[f"{d}d{'t' if t else ''}" for d, t in OPERATORS])
def test_sweep(device, dims, transposed, shard):
    ran, tiled = 0, 0

    @seed(SWEEP_SEED + shard)
    @settings(SETTINGS)
    @given(drawn(dims, transposed))
    def sweep(c: configurations.Configuration) -> None:
        nonlocal ran, tiled
        note(repr(c))
        ran += 1
        path = check(c, device)
        tiled += path["path"] == "tiled"
        assert_path(c, path)

    sweep()
    assert ran >= EXAMPLES, f"only {ran} configurations ran"
    # About half of what is drawn is cut, for any seed: this notices a generator that cuts next to nothing.
    assert tiled >= EXAMPLES // 8, f"only {tiled} of {ran} configurations were tiled"


def assert_path(c: configurations.Configuration, path: dict[str, object]) -> None:
    """Explicit splits are obeyed, up to one piece a coordinate."""
    if c.batch == 0:
        return  # nothing to compute, nothing recorded
    assert path["op"] == c.operator
    if c.splits is None:
        return
    asked = (c.splits, *[1] * (c.dims - 1)) if isinstance(c.splits, int) else c.splits
    if max(asked) > 1:
        assert path["path"] == "tiled", path
        pieces = path["tiles"]
        assert isinstance(pieces, list) and all(1 <= got <= want for got, want in zip(pieces, asked, strict=True)), path


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="there is one set of instructions")
def test_sweep_without_avx512():
    """Weight gradients are computed another way on processors without AVX-512, and oneDNN has other kernels there."""
    fuzz = [sys.executable, str(Path(__file__).resolve().parents[1] / "fuzz.py"), "--n", str(WITHOUT_AVX512)]
    command = [*fuzz, "--seed", str(SWEEP_SEED), "--threads", "1"]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{WITHOUT_AVX512} of {WITHOUT_AVX512}" in done.stdout and ", 0 failed" in done.stdout
