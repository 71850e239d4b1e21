"""One call of a convolution on the CPU, as the rules for its workspace see it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

BLOCK = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Channels in a block of oneDNN's layouts."""
AT_ONCE = 28 if BLOCK == 16 else 3
"""Places of a row that oneDNN's direct kernels take at once, at most."""
PAGE = 4096
"""What oneDNN rounds its scratch memory up to: bytes, and also elements."""
BOOKING = 128
"""Bytes by which oneDNN aligns each part of its scratch memory."""
BARRIER = 2 * PAGE
"""Bytes by which threads wait for each other."""


@dataclass
class Conv:
    """A call: shapes, and a number for each spatial dimension. last: whether it is in channels_last. bias: whether it
    adds one.
    """

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
    bias: bool = False

    @property
    def taps(self) -> int:
        return math.prod(self.weight[2:])

    @property
    def strided(self) -> bool:
        return max(self.stride) > 1

    @property
    def dilated(self) -> bool:
        return max(self.dilation) > 1

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
    def reach(self) -> list[int]:
        """Of the kernel, along each dimension."""
        return [(kernel - 1) * step + 1 for kernel, step in zip(self.weight[2:], self.dilation, strict=True)]

    @property
    def pads(self) -> list[tuple[int, int]]:
        """Of a convolution that is not transposed: before the image, and behind it as far as the kernel gets."""
        return [
            (before, (made - 1) * stride + reach - given - before)
            for given, made, stride, reach, before in zip(
                self.input[2:], self.output[2:], self.stride, self.reach, self.padding, strict=True
            )
        ]

    @property
    def by_columns(self) -> bool:
        """Whether oneDNN fills columns for each thread, since the channels of a group do not fill a block."""
        return self.groups > 1 and not self.depthwise and not self.last and any(one % 4 for one in self.channels)

    @property
    def padded_far(self) -> bool:
        """Whether the padding is wider than the rows that oneDNN's kernels take at once: it fills columns then too."""
        if self.groups > 1 or self.last:
            return False
        if any(pad >= reach for pad, reach in zip(self.padding, self.reach, strict=True)):
            return True
        if BLOCK < 16 and self.weight[-1] > 7 and self.strided and max(self.padding[-2:]) > 0:
            return True
        return self.taps > 1 and self.padding[-1] > min(self.output[-1], AT_ONCE)

    def turned(self) -> Conv:
        """The convolution from this one's result to its input, which computes the gradient of that."""
        return dataclasses.replace(self, input=self.output, output=self.input, transposed=not self.transposed)

    def as_image(self) -> Conv:
        """A signal as an image of one row, which is how torch hands it over."""
        if len(self.input) > 3:
            return self
        input, weight, output = ((*shape[:2], 1, shape[2]) for shape in (self.input, self.weight, self.output))
        stride, padding, dilation, more = [1, *self.stride], [0, *self.padding], [1, *self.dilation], [0]
        return Conv(
            input, weight, output, stride, padding, dilation, more + self.output_padding, self.groups, self.transposed,
            self.dtype, self.last,
        )  # fmt: skip

    def by_onednn(self) -> bool:
        """Whether torch has oneDNN compute it."""
        numbers = (self.input, self.weight, self.stride, self.padding, self.dilation, self.output_padding)
        enabled = torch._C._get_mkldnn_enabled(), torch.get_num_threads()
        return _by_onednn(*map(tuple, numbers), self.transposed, self.groups, self.dtype, enabled)


@functools.lru_cache(4096)
def _by_onednn(
    input: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], output_padding: tuple[int, ...], transposed: bool, groups: int, dtype: torch.dtype,
    settings: Any,
) -> bool:  # fmt: skip
    """Asked with tensors of one element, expanded to the sizes. settings: what else torch goes by."""
    with _disable_current_modes():
        one = torch.empty(1, dtype=dtype)
        found = torch._C._select_conv_backend(
            one.expand(input), one.expand(weight), None, stride, padding, dilation, transposed, output_padding, groups,
            None,
        )  # fmt: skip
    return any(part in str(found) for part in ("Mkldnn", "?"))  # of a transposed one it has no name


def up(number: int, block: int) -> int:
    """To the next multiple."""
    return -(-number // block) * block


def blocked(shape: Sequence[int], block: int = BLOCK) -> int:
    """Elements of a tensor in blocks of channels."""
    return shape[0] * up(shape[1], block) * math.prod(shape[2:])


def pointers(conv: Conv) -> int:
    """Bytes of the addresses of the matrices that oneDNN multiplies at once, whole pages of 40 bytes each."""
    return torch.get_num_threads() * up(up(40 * conv.taps, PAGE), 40)
