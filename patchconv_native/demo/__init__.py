"""Runs a whole network on a very large photograph with `pc.tile`, beside the ways there are without it.

A photograph is brought to 48 megapixels, and made dark and noisy. A small U-Net with group norms, trained here in
seconds on views of the photograph, restores it: with `pc.tile` in a budget of 256 MiB, and as tiles that are blended,
as is usual. What one stock call would need is predicted, and measured on a part. Printed: peaks, times, differences.
Written: demo.png and memory.png. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from .packages import check_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", type=Path, metavar="FILE", help="your own picture (otherwise: a rocket at dusk)")
    parser.add_argument(
        "--megapixels",
        type=_megapixels,
        default=48.0,
        metavar="N",
        help="size the picture is brought to (48)",
    )
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the pictures go (here)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to compute (the GPU, if there is one)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the training and of the noise (0)")


def run(arguments: argparse.Namespace) -> int:
    check_installed(bundled_photo=arguments.image is None)
    from .show import show

    return show(arguments)


def _megapixels(text: str) -> float:
    value = _number(text)
    if not 0.1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 1000 megapixels, got {text}")
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
