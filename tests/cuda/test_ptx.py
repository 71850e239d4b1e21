"""The kernels as nvcc writes them: PTX, executed on the CPU by tests/ptx. `make check` runs all tests of kernels so.

Products of matrices are cut as tensor cores cut them, products and sums are one multiply-add wherever ptxas may make
them one, exponentials are off by as much as the manual allows. Every access is checked for alignment, bounds, memory
that nobody wrote, and races.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_kernels
import test_layer_norm_kernels
import test_norm_kernels
import torch
from support import conv_kernels, kernels
from support.conv_kernels import Problem, case
from support.kernels import Call, Memory
from support.pairs import todays

pytestmark = [
    pytest.mark.timeout(1200),  # the first that runs compiles
    pytest.mark.skipif(bool(kernels.HOW), reason="sets by itself what runs the kernels"),
]

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
TILES = Problem((5, 19), (3, 3), 72, 72, padding=((1, 1), (1, 1)))
STEM = Problem((9, 21), (7, 7), 3, 24, stride=(2, 2), padding=((3, 3), (3, 3)))
DEPTHWISE = Problem((5, 19), (3, 3), 1, 1, groups=24, padding=((1, 1), (2, 0)), mode="reflect")
CONVOLUTIONS = {
    "conv_tiles": [(TILES, "small", HALF, False), (TILES, "big", BFLOAT, False), (TILES, "small", FLOAT, True)],
    "conv_weight": [(TILES, "weight", HALF, False), (TILES, "weight", FLOAT, True)],
    "conv_stem": [(STEM, "small", HALF, False), (STEM, "small", FLOAT, True)],
    "conv_depthwise": [(DEPTHWISE, "small", FLOAT, False), (DEPTHWISE, "weight", HALF, False)],
    "conv_plain": [(STEM, "small", FLOAT, False), (DEPTHWISE, "big", HALF, False)],
}


@pytest.fixture(autouse=True)
def by_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HOW", "ptx")


@pytest.mark.parametrize("kernel", ["conv_tiles", *todays([k for k in CONVOLUTIONS if k != "conv_tiles"])])
def test_convolutions(kernel: str) -> None:
    cases = [
        case(p, pass_, dtype, layout, strict=strict)
        for p, pass_, dtype, strict in CONVOLUTIONS[kernel]
        for layout in ("NCHW", "NHWC")
    ]
    conv_kernels.check_all(kernel, cases)


def test_other_kernels() -> None:
    test_kernels.test_mask_forward("relu", HALF)
    test_kernels.test_dropout(FLOAT, 0.3, (0.0, 0.0))
    test_norm_kernels.test_map(True, "silu", BFLOAT)
    test_layer_norm_kernels.test_backward(HALF, "all")


FAULTS = {
    "barrier": (0, "lanes of a warp wait for others that do not come"),
    "shuffle": (1, "lanes of a warp wait for others that do not come"),
    "shared": (2, "outside of shared memory"),
    "global": (3, "outside of any buffer"),
    "never written": (4, "what nobody wrote is used"),
    "not waited for": (5, "a race: "),
    "different operations": (6, "lanes of a warp wait for others that do not come"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    number, text = FAULTS[fault]
    with pytest.raises(kernels.Fault, match=text):
        kernels.run([Call("selftest_fault", FLOAT, [number], [Memory(torch.zeros(96))])])


# What is changed in the PTX of conv_tiles, and what it leads to.
MISTAKES = {
    "no barriers": (r"\tbar\.sync \t0;", "", "a race: |nobody wrote"),
    "no barriers of warps": (r"\tbar\.warp\.sync \t-1;", "", "a race: "),
    "no wait for copies": (r"cp\.async\.wait_group \d", "cp.async.wait_group 9", "a race: |under way"),
    "an address two bytes on": (r"(ldmatrix\S+ \{.*\}, \[%r\d+)\]", r"\1+2]", "an address that is not aligned"),
    "no bounds": (r"setp\.(lt|ge|gt|le)\.s32", "setp.eq.s32", "outside|aligned|a race|nobody wrote|do not come"),
    "the other half of a fragment": (r"(mma\.sync.*, )\{(%r\d+), (%r\d+)\}(, \{%f)", r"\1{\3, \2}\4", None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a check, or (None) by the results."""
    pattern, replacement, found = MISTAKES[mistake]
    wrong = case(TILES, "small", HALF, "NHWC")
    folder = kernels.ptx([wrong.call("conv_tiles")])
    text, count = re.subn(pattern, replacement, (folder / "conv_tiles.ptx").read_text())
    assert count
    (tmp_path / "conv_tiles.ptx").write_text(text)
    monkeypatch.setattr(kernels, "ptx", lambda calls: tmp_path)
    with pytest.raises(kernels.Fault if found else AssertionError, match=found):
        conv_kernels.check_all("conv_tiles", [wrong])


def test_counts(tmp_path: Path) -> None:
    """Of a kernel whose work is known: 32 numbers to a warp, 4 bytes each, in 4 sectors."""
    x, y = torch.ones(32), torch.zeros(32)
    kernels.run([Call("selftest_votes", FLOAT, [], [Memory(x), Memory(y)])], counts=tmp_path / "counts")
    counted = [line.split() for line in (tmp_path / "counts").read_text().splitlines() if "global.f32" in line]
    assert [(line[:3], line[5]) for line in counted] == [
        (["1", "4", "4"], "ld.global.f32"), (["1", "4", "4"], "st.global.f32")
    ]  # fmt: skip
