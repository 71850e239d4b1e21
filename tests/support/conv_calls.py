"""Arguments of the operators that the public convolutions call, above all `_convolution_backward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Ints = int | Sequence[int]


def numbers(
    dims: int, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1, output_padding: Ints = 0, groups: int = 1,
    transposed: bool = False, padding_mode: str = "zeros", splits: Sequence[int] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """What follows the tensors of `_convolution`."""

    def each(value: Ints) -> list[int]:
        return [value] * dims if isinstance(value, int) else list(value)

    pads = [pad for pad in each(padding) for _ in range(2)]
    more = each(output_padding) if transposed else []
    return each(stride), pads, each(dilation), more, list(splits or []), groups, transposed, padding_mode


def backward_arguments(
    grad: Tensor, input: Tensor | None, weight: Tensor | None, input_size: Sequence[int], weight_size: Sequence[int],
    mask: Sequence[bool] = (True, True, True), bits: Tensor | None = None, **given: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """All arguments of `_convolution_backward`. given: as of `numbers`."""
    middle = numbers(len(weight_size) - 2, **given)
    return (grad, input, weight, list(input_size), list(weight_size), *middle, list(mask), bits)
