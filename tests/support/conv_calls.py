"""Arguments of the operators that the public convolutions call, above all `_convolution_backward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def numbers(
    dims: int, stride: int = 1, padding: int = 0, dilation: int = 1, output_padding: int = 0, groups: int = 1,
    transposed: bool = False, padding_mode: str = "zeros", splits: Sequence[int] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """What follows the tensors of `_convolution`."""
    more = [output_padding] * dims if transposed else []
    lists = ([stride] * dims, [padding] * 2 * dims, [dilation] * dims, more, list(splits))
    return (*lists, groups, transposed, padding_mode)


def backward_arguments(
    grad: Tensor, input: Tensor | None, weight: Tensor | None, input_size: Sequence[int], weight_size: Sequence[int],
    mask: Sequence[bool] = (True, True, True), bits: Tensor | None = None, **given: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """All arguments of `_convolution_backward`. given: as of `numbers`."""
    middle = numbers(len(weight_size) - 2, **given)
    return (grad, input, weight, list(input_size), list(weight_size), *middle, list(mask), bits)
