"""What oneDNN 3.12 takes on the CPU for the weight's gradient of a convolution in bfloat16: it sums up in float32."""

from __future__ import annotations

import math

import torch

from .cpu_conv_calls import BARRIER, BLOCK, BOOKING, Conv, up

WHOLE_IMAGE = 48 * 1024
"""Bytes of the rows of operands that meet under a kernel, up to which oneDNN takes each image as a whole."""


def direct(conv: Conv, weights: int, few: bool, bias: bool) -> int:
    """Bytes of scratch memory of the direct kernel: sums in float32, and both operands with pairs of pixels
    interleaved. weights: elements of the weight in blocks.
    """
    (given, made), volume = conv.channels, conv.input[2] if len(conv.input) == 5 else 1
    ins, outs = 1 if few else -(-given // BLOCK), -(-made // BLOCK)
    border = up(max(conv.padding[-1], conv.pads[-1][1] + 1, 1), 2)
    wide = up(-(-conv.input[-1] // conv.stride[-1]) + border, 2) * conv.stride[-1]
    width = given if few else BLOCK
    read = width * wide * conv.input[-2] * volume
    written = BLOCK * up(conv.output[-1], 2) * math.prod(conv.output[2:-1])
    shares, waits = _shares(conv, ins, outs, read, written)
    if few and not (conv.last and given > 1):
        read = 0  # it is read as it is
    if len(conv.input) == 5 and conv.weight[-1] == conv.stride[-1] == 1 and not conv.dilated:
        read = written = 0
    operands = 2 * (shares * conv.groups * (ins * read + outs * written) + border)
    sums = 4 * shares * (weights + conv.groups * outs * BLOCK * bias)
    return sums + operands + (1 + waits) * BARRIER + 3 * BOOKING


def by_image_of_few(conv: Conv) -> bool:
    """Whether the direct kernel takes an input of few channels as it is."""
    kernel, behind = conv.reach[-1], conv.pads[-1][1]
    whole = conv.last or conv.channels[1] % BLOCK == 0
    if not whole or max(conv.padding[-1], behind) >= 28 or kernel > conv.input[-1] + 1:
        return False
    return conv.output[-1] <= 28 or kernel <= conv.output[-1]


def _shares(conv: Conv, ins: int, outs: int, read: int, written: int) -> tuple[int, int]:
    """Of how many shares of the images the sums are added, and whether threads that share one wait for each other.
    read and written: elements of a block of either operand.
    """
    batch, each = conv.input[0], torch.get_num_threads() // conv.groups
    rows = conv.output[2] if not _by_image(conv, read + written) else 1
    sums = ins * outs * BLOCK**2 * conv.taps
    scale = 0.25 * batch * (ins * read + outs * written) / sums
    of_read, of_written = max(ins / outs, 1.0) * (4 if scale < 1 else 1), max(outs / ins, 1.0)
    least, best = math.inf, (1, 1, 1)
    for shares in range(1, min(each, batch * rows) + 1):
        for split in range(1, min(each // shares, outs) + 1):
            others = min(each // shares // split, ins)
            a, b, part = -(-ins // others), -(-outs // split), -(-batch * rows // shares) / rows
            cost = of_read * part * a * read / math.prod(conv.stride) + of_written * part * b * written
            cost += max(scale, 1) * a * b * BLOCK**2 * conv.taps
            if cost <= least:
                least, best = cost, (shares, split, others)
    return best[0], (best[1] > 1) + (best[2] > 1)


def _by_image(conv: Conv, elements: int) -> bool:
    """Whether oneDNN takes each image as a whole, rather than rows of it."""
    plain = len(conv.input) == 4 and not conv.strided and not conv.dilated and 1 not in conv.weight[2:]
    same = all(2 * pad == kernel - 1 for pad, kernel in zip(conv.padding, conv.weight[2:], strict=True))
    rows = max(1, *conv.pads[-2]) * 2 * elements // conv.input[-2]
    return plain and same and up(conv.channels[0], BLOCK) >= 128 and rows <= WHOLE_IMAGE


def pointwise(conv: Conv, weights: int, shares: int, bias: bool) -> int:
    """The same of the kernel of one tap. shares: of the images, whose sums are added."""
    (given, made), threads, places = conv.channels, torch.get_num_threads(), math.prod(conv.output[2:])
    ins, outs = -(-given // BLOCK), -(-made // BLOCK)
    bytes_ = 4 * shares * (weights + conv.groups * outs * BLOCK * bias) + 2 * BOOKING + BARRIER * (shares > 1)
    interleaved = conv.last or min(conv.output[-2:]) <= 14 or (len(conv.output) == 5 and made > 4 * BLOCK)
    if interleaved:
        blocks = _divider(outs, BLOCK) + _divider(ins, 5)
        bytes_ += threads * 2 * up(places, 2) * BLOCK * blocks + 2 * BOOKING
    if conv.strided:
        bytes_ += 2 * threads * (given if conv.last else up(given, BLOCK)) * places
    return bytes_


def _divider(number: int, least: int) -> int:
    """The smallest divider that is not below `least`, or the number itself."""
    return next((one for one in range(least, number) if number % one == 0), number)
