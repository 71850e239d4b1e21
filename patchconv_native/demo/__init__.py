"""Filters a very large photograph with stock PyTorch and with this library, side by side.

A photograph is brought to 48 megapixels and goes through two stages: a bank of 16 oriented Gabor filters of
31 x 31 taps, and the stem of torchvision's resnet18 (first convolution, folded batch norm, ReLU; its weights are
random, drawn from a seed, since nothing is downloaded). Each library computes each stage in a process of its own.
Printed: peak memory above input, weights and result; time; the largest difference. Written: demo.png and
memory.png.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from .errors import DemoError
from .packages import check_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", type=Path, metavar="FILE", help="your own picture (otherwise: Chelsea the cat)")
    parser.add_argument(
        "--megapixels",
        type=_megapixels,
        default=48.0,
        metavar="N",
        help="size the picture is brought to (48)",
    )
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the pictures go (here)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to compute (the GPU, if there is one)")
    parser.add_argument(
        "--memory",
        type=_gibibytes,
        metavar="GIB",
        help="do not run what would need more than this (otherwise: more than is free)",
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the stem's random weights (0)")


def run(arguments: argparse.Namespace) -> int:
    try:
        check_installed(bundled_photo=arguments.image is None)
        from .show import show

        return show(arguments)
    except DemoError as error:
        print(f"patchconv_native demo: {error}", file=sys.stderr)
        return 2


def _megapixels(text: str) -> float:
    value = _number(text)
    if not 0.1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 1000 megapixels, got {text}")
    return value


def _gibibytes(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a positive number of GiB, got {text}")
    return value


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 2**64
    if not -(2**63) <= value < 2**64:  # what torch.manual_seed takes
        raise argparse.ArgumentTypeError(f"expected a whole number from -2^63 to 2^64 - 1, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value
