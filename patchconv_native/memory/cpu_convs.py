"""The workspace of torch's convolutions on the CPU: what torch 2.14 was observed to allocate.

torch says by which library it computes one. oneDNN reorders the weight, and NCHW tensors too, into blocks of channels;
the others fill a column buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .cpu_conv_calls import BLOCK, PAGE, Conv, blocked, pointers, up
from .cpu_conv_gradients import of_input, of_weight

_PROCESSOR: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
MOST_COLUMNS = 2**20 if BLOCK == 16 else _PROCESSOR.get("l2_cache_size") or 2**20
"""Bytes of the columns that oneDNN fills for a thread, at most: what a core's cache holds, where that was seen."""


def forward_bytes(conv: Conv) -> int:
    """The workspace of the forward pass, above its result."""
    return onednn_bytes(conv) if conv.by_onednn() else _columns(conv) * conv.dtype.itemsize


def gradients_bytes(conv: Conv, wanted: Sequence[bool]) -> int:
    """The workspace of the gradients of the input, the weight and the bias, of which some are wanted, above these."""
    size = conv.dtype.itemsize
    if not conv.by_onednn():
        return _gradient_columns(conv, wanted) * size
    conv = conv.as_image()
    sizes = [math.prod(conv.input) * size, math.prod(conv.weight) * size, conv.output[1] * size]
    peak = there = 0
    if wanted[0]:
        there = sizes[0]
        peak = there + onednn_bytes(conv.turned())
    if wanted[1] or wanted[2]:  # oneDNN has that of the bias with that of the weight
        peak = max(peak, there + sizes[1] + 2 * sizes[2] * wanted[2] + of_weight(conv, wanted[2]))
    return max(0, peak - sum(one for one, asked in zip(sizes, wanted, strict=True) if asked))


def turned_bytes(conv: Conv) -> int:
    """The workspace of the input's gradient by a convolution of its own, as where the input was not kept."""
    found = max(forward_bytes(conv.turned()), gradients_bytes(conv, [True, False, False]))
    large = conv.dilated and min(conv.weight[2:]) > 3
    if conv.depthwise or not (conv.groups > 1 or large):
        return found
    big, small = (conv.output, conv.input) if conv.transposed else (conv.input, conv.output)
    columns = big[1] // conv.groups * conv.taps * math.prod(small[2:])  # oneDNN may fill them for each thread
    return max(found, torch.get_num_threads() * columns * conv.dtype.itemsize)


def onednn_bytes(conv: Conv) -> int:
    """The same, of one that oneDNN computes."""
    conv = conv.as_image()
    if conv.transposed:
        return of_input(conv)
    elements, more = _onednn(conv)
    return elements * conv.dtype.itemsize + more


def of_a_tile(conv: Conv) -> int:
    """What this package's own pass over tiles takes besides the bytes that it plans with: oneDNN's order of weights."""
    if conv.dtype == torch.float64 or conv.transposed:
        return 0
    in_float32 = conv.dtype.itemsize == 2 and not _multiplies(conv.dtype)
    size = 4 if in_float32 else conv.dtype.itemsize
    return _weights(dataclasses.replace(conv, last=True)) * size + PAGE + pointers(conv)


def of_a_gradients_tile(conv: Conv) -> int:
    """The same of its pass for the input's gradient: in float32, of weights that are flipped before."""
    if conv.dtype.itemsize != 2 or _multiplies(conv.dtype) or conv.transposed or conv.strided:
        return 0
    return of_a_tile(conv) + _weights(dataclasses.replace(conv, last=True)) * conv.dtype.itemsize


@functools.cache
def _multiplies(half: torch.dtype) -> bool:
    """Whether oneDNN multiplies this half precision on this processor."""
    asked = torch.ops.mkldnn
    return bool(asked._is_mkldnn_bf16_supported() if half == torch.bfloat16 else asked._is_mkldnn_fp16_supported())


def _columns(conv: Conv) -> int:
    """Elements where a column buffer is filled, group by group; the groups' results are joined."""
    (given, made), (batch, *_), volume = conv.channels, conv.input, len(conv.input) == 5
    if conv.transposed:
        columns = made * conv.taps * math.prod(conv.input[2:])
        columns = columns + math.prod(conv.input) if volume else batch * columns
    else:
        columns = given * conv.taps * math.prod(conv.output[2:])
        if conv.taps == 1 and tuple(conv.input[2:]) == tuple(conv.output[2:]):
            columns = 0  # it is the input itself
        if max(conv.dilation) == 1:
            columns *= batch
            if volume:
                return columns * conv.groups
    if conv.groups == 1:
        return columns
    part = math.prod(conv.input) // conv.groups if batch > 1 or conv.last else 0
    return max(part + columns, math.prod(conv.output))


def _gradient_columns(conv: Conv, wanted: Sequence[bool]) -> int:
    """Elements where a column buffer is filled for gradients, group by group; the groups' gradients are joined."""
    batch, volume = conv.input[0], len(conv.input) == 5
    big, small = (conv.output, conv.input) if conv.transposed else (conv.input, conv.output)
    columns = big[1] // conv.groups * conv.taps * math.prod(small[2:])
    whole = volume and (wanted[0] or conv.groups > 1)
    if conv.taps == 1 and not (conv.strided or whole) and tuple(big[2:]) == tuple(small[2:]):
        columns = 0  # they are the image itself
    copies = 0
    if volume and conv.last:  # all operands are brought into the other layout
        copies = math.prod(conv.output) + max(math.prod(conv.input) * wanted[1], math.prod(conv.weight))
    if not conv.transposed and not conv.dilated:
        columns *= batch
        if volume:
            return columns * conv.groups + copies
        columns *= wanted[1]
    if conv.groups == 1:
        return columns + copies
    parts = (math.prod(conv.input) + math.prod(conv.output)) // conv.groups if batch > 1 or conv.last else 0
    joined = sum(math.prod(shape) for shape, asked in zip((conv.input, conv.weight), wanted, strict=False) if asked)
    return max(parts + columns, joined)


def _weights(conv: Conv) -> int:
    """Elements of the weight, reordered."""
    given, made = conv.channels
    if conv.depthwise:
        return up(conv.groups, BLOCK) * conv.taps
    if conv.last:
        made = up(made, min(up(made, BLOCK), 4 * BLOCK))
    elif conv.groups == 1:
        made = up(made, BLOCK)
    if conv.groups > 1 if conv.last else conv.groups == 1 and not conv.few:
        given = up(given, BLOCK)
    else:
        given = up(given, 4 // conv.dtype.itemsize)  # two of half precision
    return conv.groups * conv.taps * given * made


def _onednn(conv: Conv) -> tuple[int, int]:
    """Elements, and bytes besides them."""
    (given, made), threads = conv.channels, torch.get_num_threads()
    weights, result, places = _weights(conv), math.prod(conv.output), math.prod(conv.output[2:])
    if conv.last:
        direct = conv.depthwise or (conv.groups > 1 and given <= BLOCK)
        return weights, 0 if direct else PAGE + pointers(conv)
    if conv.by_columns or conv.padded_far:
        columns = given * conv.taps * math.prod(conv.output[-2:] if len(conv.output) == 5 else conv.output[2:])
        if conv.taps == 1 and not conv.strided and max(conv.padding) == 0:
            columns = 0
        if len(conv.output) < 5:
            columns = min(columns, MOST_COLUMNS // conv.dtype.itemsize)
        return max(threads * columns, result), 128
    read, out = 0 if conv.few else blocked(conv.input), blocked(conv.output)
    if conv.groups > 1 and not conv.depthwise:
        read, out = math.prod(conv.input), result
    scratch = more = 0
    if conv.taps == 1 and conv.groups == 1:  # for each thread, the places that are read, and sums in float32
        scratch = threads * up(given, BLOCK) * places * conv.strided
        more = threads * up(made, BLOCK) * places * 4 * (conv.dtype.itemsize == 2) + 256
    copies = 2 if conv.depthwise and len(conv.output) == 5 else 1  # of the result
    return max(read + scratch + weights + out - result, out + (copies - 1) * result), more
