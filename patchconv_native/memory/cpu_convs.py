"""The workspace of torch's convolutions on the CPU: what torch 2.14 was observed to allocate.

torch says by which library it computes one. oneDNN reorders the weight, and NCHW tensors too, into blocks of channels;
the others fill a column buffer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Channels in a block of oneDNN's layouts."""
MOST_COLUMNS = 2**20
"""Bytes of the columns that oneDNN fills for a thread, at most."""
PAGE = 4096
"""What oneDNN rounds its scratch memory up to: bytes, and also elements."""


@dataclass
class Conv:
    """A call: shapes, and a number for each spatial dimension. last: whether it is in channels_last."""

    input: Sequence[int]
    weight: Sequence[int]
    output: Sequence[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int]
    groups: int
    transposed: bool
    dtype: torch.dtype
    last: bool

    @property
    def taps(self) -> int:
        return math.prod(self.weight[2:])

    @property
    def strided(self) -> bool:
        return max(self.stride) > 1

    @property
    def channels(self) -> tuple[int, int]:
        """Of the input and of the output, in one group."""
        return self.input[1] // self.groups, self.output[1] // self.groups

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.channels == (1, 1)

    @property
    def few(self) -> bool:
        """Whether oneDNN reads an NCHW input as it is."""
        return self.groups == 1 and self.channels[0] < BLOCK and self.taps > 1

    @property
    def by_columns(self) -> bool:
        """Whether oneDNN fills columns for each thread, since the channels of a group do not fill a block."""
        return self.groups > 1 and not self.depthwise and not self.last and any(one % 4 for one in self.channels)

    @property
    def padded_far(self) -> bool:
        """Whether the padding is wider than the rows that oneDNN's kernels take at once: it fills columns then too."""
        return self.groups == 1 and not self.last and self.taps > 1 and self.padding[-1] > min(self.output[-1], 28)

    def by_onednn(self) -> bool:
        """Whether torch has oneDNN compute it. Asked with tensors of one element, expanded to the sizes."""
        one = torch.empty(1, dtype=self.dtype)
        found = torch._C._select_conv_backend(
            one.expand(tuple(self.input)), one.expand(tuple(self.weight)), None, self.stride, self.padding,
            self.dilation, self.transposed, self.output_padding, self.groups, None,
        )  # fmt: skip
        return any(part in str(found) for part in ("Mkldnn", "?"))  # of a transposed one it has no name


def up(number: int, block: int) -> int:
    """To the next multiple."""
    return -(-number // block) * block


def blocked(shape: Sequence[int]) -> int:
    """Elements of a tensor in blocks of channels."""
    return shape[0] * up(shape[1], BLOCK) * math.prod(shape[2:])


def forward_bytes(conv: Conv) -> int:
    """The workspace of the forward pass, above its result."""
    if conv.by_onednn():
        elements, more = (_transposed if conv.transposed else _onednn)(conv)
    else:
        elements, more = _columns(conv), 0
    return elements * conv.dtype.itemsize + more


def of_a_tile(conv: Conv) -> int:
    """What this package's own pass over tiles takes besides the bytes that it plans with: oneDNN's order of weights."""
    if conv.dtype == torch.float64 or conv.transposed:
        return 0
    return _weights(dataclasses.replace(conv, last=True)) * conv.dtype.itemsize + 4096 + 4120 * torch.get_num_threads()


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
        return weights, 0 if conv.depthwise else 4096 + 4120 * threads
    if conv.by_columns or conv.padded_far:
        columns = given * conv.taps * math.prod(conv.output[-2:] if len(conv.output) == 5 else conv.output[2:])
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


def _transposed(conv: Conv) -> tuple[int, int]:
    """Elements, and bytes besides them."""
    (given, made), threads = conv.channels, torch.get_num_threads()
    result, more = math.prod(conv.output), 4224 + 4120 * threads
    if conv.strided and (conv.groups == 1 or given > BLOCK // 2):
        weights = conv.groups * conv.taps * given * up(made, BLOCK if made <= 2 * BLOCK else 4 * BLOCK)
        read = 0 if conv.last or conv.input[1] == 1 else math.prod(conv.input)
        copies = 0 if conv.last or conv.output[1] == 1 else 2 * result
        scratch, more = _spread(conv)
        return max(read + weights + scratch, copies), more
    if conv.last and conv.groups == 1:
        read = math.prod(conv.input) if conv.taps == 1 and max(conv.padding) > 0 else 0
        return read + conv.taps * given * up(made, min(up(made, BLOCK), 4 * BLOCK)), more
    weights = conv.groups * conv.taps * up(given, BLOCK) * up(made, BLOCK)
    if conv.last and conv.taps == 1 and max(conv.padding) > 0:  # columns of one group, and what they give
        places = math.prod(conv.input[2:]) + math.prod(conv.output[2:])
        return math.prod(conv.weight) + min(threads, conv.input[0]) * made * places, 384
    if conv.last:
        return weights, more
    read, out = blocked(conv.input), blocked(conv.output)
    if conv.groups > 1 and not conv.by_columns:
        return max(read + weights + out - result, out), more
    columns = threads * made * conv.taps * math.prod(conv.input[-2:]) * conv.by_columns
    return max(columns, read + weights + out - result, out), more


def _spread(conv: Conv) -> tuple[int, int]:
    """Where a transposed convolution has a stride, oneDNN copies the input with borders for each thread. Elements, and
    bytes besides them.
    """
    threads, spatial = torch.get_num_threads(), zip(
        conv.input[2:], conv.weight[2:], conv.stride, conv.padding, conv.output_padding, conv.dilation, strict=True
    )  # fmt: skip
    places = 1
    for size, kernel, stride, padding, extra, dilation in spatial:
        reach = (kernel - 1) * dilation
        places *= size + max(0, reach - padding) // stride + max(0, reach - padding + extra) // stride
    elements, bookings = up(places * conv.input[1], PAGE), 3
    if conv.output[-1] % conv.stride[-1]:  # rows of the result that are cut where they end
        elements += up(up(conv.output[-1], conv.stride[-1]) * conv.stride[-1] * conv.output[1], PAGE)
        bookings += 1
    return threads * elements, 2 * PAGE * threads + PAGE * (bookings - 1) + 128 + 4120 * threads
