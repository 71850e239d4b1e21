"""A bank of oriented Gabor filters, and the direction of every pixel from its responses.

A Gabor filter is a wave under a Gaussian: it responds to lines of one direction and width. Two of them a
quarter of a wave apart (a quadrature pair) give an energy that does not depend on where on the wave a line
lies. Over the directions theta of the bank, sum(energy * exp(2i theta)) is the orientation of a pixel: its
angle is twice the dominant direction (twice, so that a line turned by 180 degrees is the same line), its
length says how much one direction dominates (Bigun and Granlund, 1987).

Directions are seen on the screen: 0 is horizontal, and angles turn counterclockwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

DIRECTIONS = 8
TAPS = 31
WAVELENGTH = 11.0  # in taps
ACROSS, ALONG = (
    4.8,
    8.0,
)  # standard deviations of the Gaussian, in taps, across and along the lines it answers to


def directions() -> torch.Tensor:
    """The bank's directions in radians, 0 up to but not including pi."""
    return torch.arange(DIRECTIONS, dtype=torch.float64) * (math.pi / DIRECTIONS)


def gabor_bank() -> torch.Tensor:
    """The filters, float32 (2 * DIRECTIONS, 1, TAPS, TAPS): all cosine phases, then all sine phases.

    Every filter has mean zero, so that flat areas give 0 at any brightness, and unit energy.
    """
    ticks = torch.arange(TAPS, dtype=torch.float64) - (TAPS - 1) / 2
    down, right = torch.meshgrid(ticks, ticks, indexing="ij")
    theta = directions()[:, None, None]
    along = right * theta.cos() - down * theta.sin()
    across = right * theta.sin() + down * theta.cos()
    window = torch.exp(-0.5 * ((across / ACROSS) ** 2 + (along / ALONG) ** 2))
    phase = 2 * math.pi / WAVELENGTH * across
    bank = torch.cat([phase.cos(), phase.sin()])
    window = torch.cat([window, window])
    mean = (bank * window).sum((1, 2), keepdim=True) / window.sum((1, 2), keepdim=True)
    bank = (bank - mean) * window
    bank = bank / bank.square().sum((1, 2), keepdim=True).sqrt()
    return bank[:, None].float()


def dilation_for(scale: float) -> int:
    """The dilation for a picture enlarged by `scale`, which has no detail between taps that far apart."""
    return min(5, max(1, round(scale / 4)))


@dataclass(frozen=True)
class Orientation:
    """The orientation of every pixel of a picture or of a part of it, float32 (h, w) each."""

    real: np.ndarray
    imag: np.ndarray

    def direction(self) -> np.ndarray:
        """The dominant direction in radians, 0 to pi."""
        return (np.arctan2(self.imag, self.real) / 2) % math.pi

    def strength(self) -> np.ndarray:
        """How strong the lines of that direction are, in the units of the responses."""
        return np.sqrt(np.hypot(self.real, self.imag))


def orientation(responses: torch.Tensor, step: int = 1) -> Orientation:
    """The orientation from the bank's responses (2 * DIRECTIONS, h, w), averaged over step x step pixels.

    Computed a strip of rows at a time: for the whole picture the energies alone would take half the
    responses' size.
    """
    theta = directions().to(responses)
    waves = torch.stack([(2 * theta).cos(), (2 * theta).sin()])
    height = responses.shape[1] // step * step
    parts = []
    for strip in responses[:, :height].split(max(1, 64 // step) * step, dim=1):
        energy = strip[:DIRECTIONS].square().addcmul_(strip[DIRECTIONS:], strip[DIRECTIONS:])
        vectors = torch.mm(waves, energy.flatten(1)).view(2, *strip.shape[1:])
        parts.append(torch.nn.functional.avg_pool2d(vectors, step))
    real, imag = torch.cat(parts, dim=1).numpy()
    return Orientation(real, imag)
