"""Kernels on the CPU without races: two threads never use a byte of shared memory, one of them to write it, with no
barrier between them (tests/host_cuda/races.h). And mistakes of this kind that the checker must find.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support import kernels
from support.conv_kernels import Problem, case
from support.kernels import Call
from support.pairs import FULL, todays

pytestmark = pytest.mark.skipif(bool(kernels.HOW), reason="runs the program that it needs itself")

# Several chunks of channels, tiles, taps and outputs.
TILES = Problem((5, 19), (3, 3), 72, 72, padding=((1, 1), (1, 1)))
ONE_TILE = Problem((16, 16), (3, 3), 72, 8, padding=((1, 1), (1, 1)))  # in 99 KiB, for two blocks
DEPTHWISE = Problem((3, 5, 19), (3, 3, 3), 1, 1, groups=24, padding=((1, 1),) * 3)
STEM = Problem((9, 21), (7, 7), 3, 24, stride=(2, 2), padding=((3, 3), (3, 3)))


def calls(dtype: torch.dtype, layout: str) -> list[Call]:
    return [
        case(TILES, "small", dtype, layout).call("conv_tiles"),
        case(TILES, "big", dtype, layout).call("conv_tiles"),
        case(ONE_TILE, "small", dtype, layout).call("conv_tiles"),
        case(TILES, "weight", dtype, layout).call("conv_weight"),
        case(DEPTHWISE, "small", dtype, layout).call("conv_depthwise"),
        case(DEPTHWISE, "weight", dtype, layout).call("conv_depthwise"),
        case(STEM, "small", dtype, layout).call("conv_stem"),
    ]


@pytest.mark.parametrize(
    ("layout", "how", "shared"), todays(itertools.product(["NCHW", "NHWC"], ["races", "races at-once"], [99, 227]), 3)
)
def test_convolutions(layout: str, how: str, shared: int) -> None:
    """Whether asynchronous copies arrive early or late, the results have the same bits."""
    for dtype in (torch.float16, torch.float32) if FULL else (torch.float16,):
        given = calls(dtype, layout)
        for late, found in zip(kernels.run(given, shared=shared), kernels.run(given, how, shared=shared), strict=True):
            for one, other in zip(late, found, strict=True):
                assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@dataclass(frozen=True)
class Mistake:
    source: str
    change: Callable[[str], str]
    call: Callable[[], Call]
    """What shows it."""


def without(text: str, after: str = "") -> Callable[[str], str]:
    """Takes `text` out, where `after` follows."""
    return instead(text + after, after)


def instead(text: str, other: str) -> Callable[[str], str]:
    def change(source: str) -> str:
        assert source.count(text) == 1, (source.count(text), text)
        return source.replace(text, other)

    return change


def a_step_early(source: str) -> str:
    """Weights are copied before the barrier that says that all threads are done with what they replace."""
    barrier, copy = "    block_barrier();\n\n", "    copy_weights(stage_before);"
    return instead(barrier + copy, copy + "\n" + barrier)(source)


def tiles() -> Call:
    return case(TILES, "small", torch.float16, "NHWC").call("conv_tiles")


def one_tile() -> Call:
    return case(ONE_TILE, "small", torch.float16, "NHWC").call("conv_tiles")


def weight() -> Call:
    return case(TILES, "weight", torch.float16, "NHWC").call("conv_weight")


def depthwise() -> Call:
    return case(DEPTHWISE, "small", torch.float16, "NHWC").call("conv_depthwise")


MISTAKES = {
    "no barrier before products": Mistake(
        "conv_tiles.cu", without("    block_barrier();\n", "\n    copy_weights(stage_before)"), tiles
    ),
    "weights copied early": Mistake("conv_tiles.cu", a_step_early, tiles),
    "waits for one group less": Mistake(
        "conv_tiles.cu",
        instead("wait_for_copies<kStages - 3>();\n    if", "wait_for_copies<kStages - 2>();\n    if"),
        tiles,
    ),
    "a ring one stage short": Mistake(
        "conv_tiles.cu",
        instead("return at == tiling.weights + kStages *", "return at == tiling.weights + (kStages - 1) *"),
        tiles,
    ),
    "one tile in place of two": Mistake(
        "conv_tiles.cu", instead("i + 1 < buffers ? (i + 1) * tiling.halo_bytes : 0", "0"), tiles
    ),
    "no barrier before a tile is replaced": Mistake(
        "conv_tiles.cu",
        without("      block_barrier();  // all threads have loaded what they need of the tile\n"),
        one_tile,
    ),
    "no wait for a tile that is replaced": Mistake(
        "conv_tiles.cu", instead("    if (tiling.late) {\n", "    if (false) {\n"), one_tile
    ),
    "no barrier before the results": Mistake("conv_tiles.cu", without("  block_barrier();\n", "  store<T"), tiles),
    "no warp barrier before a store": Mistake(
        "conv_tiles.cu", without("    warp_barrier();\n", "    const int first = down"), tiles
    ),
    "no warp barrier after a store": Mistake("conv_tiles.cu", without("    warp_barrier();\n", "  }\n}"), tiles),
    "no barrier between segments": Mistake(
        "conv_weight.cu", without("      block_barrier();\n", "      if (masked && number"), weight
    ),
    "no barrier between planes": Mistake(
        "conv_depthwise.cu",
        without("    block_barrier();  // the values of the last plane have been used\n"),
        depthwise,
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(tmp_path: Path, name: str) -> None:
    mistake = MISTAKES[name]
    text = (kernels.ROOT / "csrc" / "cuda" / "kernels" / mistake.source).read_text()
    program = kernels.with_kernel(mistake.source, mistake.change(text), tmp_path)
    with pytest.raises(kernels.Fault, match=r"a race: block .* of shared memory, which thread"):
        kernels.run([mistake.call()], "races", program)
