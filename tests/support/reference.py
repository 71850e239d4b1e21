"""The oracle: convolutions in float64, written to be read and not to be fast.

`conv` asks, for every output position and every tap of the kernel, which input element lies under it; the
padding mode answers with an index, or with "none" (a zero). `conv_transpose` adds every input element, times
the kernel, to a canvas and cuts off the border. Everything is plain tensor arithmetic in float64, so autograd
differentiates it, once or twice, and no convolution of PyTorch's takes part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Ints = int | Sequence[int]

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def per_dimension(value: Ints, dims: int) -> list[int]:
    """An int means the same number in every spatial dimension."""
    return [value] * dims if isinstance(value, int) else list(value)


def padding_pairs(padding: Ints | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """(before, after) of each spatial dimension, first dimension first.

    'same' puts the odd element behind, as torch.nn.functional does; a list of 2*D entries is read as pairs.
    """
    dims = len(kernel)
    if padding == "valid":
        return [(0, 0)] * dims
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    assert not isinstance(padding, str), f"unknown padding {padding!r}"
    numbers = per_dimension(padding, dims)
    if len(numbers) == 2 * dims:
        return [(numbers[2 * d], numbers[2 * d + 1]) for d in range(dims)]
    assert len(numbers) == dims
    return [(p, p) for p in numbers]


def source_index(position: int, size: int, mode: str) -> int | None:
    """Which element of a line of `size` elements a padded position shows; None where it shows a zero."""
    if 0 <= position < size:
        return position
    if mode == "zeros":
        return None
    if mode == "replicate":
        return 0 if position < 0 else size - 1
    if mode == "circular":
        return position % size
    assert mode == "reflect", f"unknown padding_mode {mode!r}"
    return -position if position < 0 else 2 * (size - 1) - position


def output_size(size: int, kernel: int, stride: int, pair: tuple[int, int], dilation: int) -> int:
    return (size + pair[0] + pair[1] - dilation * (kernel - 1) - 1) // stride + 1


def transposed_output_size(size: int, kernel: int, stride: int, padding: int, extra: int, dilation: int) -> int:
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1


# Letters of the einsums: n batch, c input channels, k output channels; pqo positions and rst taps, one of
# each a dimension.
POSITIONS, TAPS = "pqo", "rst"


def _by_group(equation: str, data: Tensor, weight: Tensor, groups: int, weight_axis: int) -> Tensor:
    """`equation` for each group of channels, the results put side by side along axis 1."""
    parts = zip(data.chunk(groups, dim=1), weight.chunk(groups, dim=weight_axis), strict=True)
    return torch.cat([torch.einsum(equation, d, w) for d, w in parts], dim=1)


def conv(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Ints = 1, padding: Ints | str = 0,
    dilation: Ints = 1, groups: int = 1, padding_mode: str = "zeros",
) -> Tensor:  # fmt: skip
    """Cross-correlation in float64 for 1 to 3 spatial dimensions; an unbatched input gives an unbatched output."""
    kernel = list(weight.shape[2:])
    dims = len(kernel)
    strides, dilations = per_dimension(stride, dims), per_dimension(dilation, dims)
    pairs = padding_pairs(padding, kernel, dilations)
    patches = input.double()
    unbatched = patches.dim() == dims + 1
    if unbatched:
        patches = patches.unsqueeze(0)

    # Each spatial dimension becomes two: the output's positions and, under each, the kernel's taps.
    for d in range(dims):
        axis, size = 2 + 2 * d, patches.shape[2 + 2 * d]
        count = output_size(size, kernel[d], strides[d], pairs[d], dilations[d])
        starts, places = [position * strides[d] - pairs[d][0] for position in range(count)], range(kernel[d])
        seen = [source_index(start + tap * dilations[d], size, padding_mode) for start in starts for tap in places]
        index = torch.tensor([s or 0 for s in seen], dtype=torch.long, device=patches.device)
        shown = torch.tensor([s is not None for s in seen], device=patches.device)
        shape = [1] * patches.dim()
        shape[axis] = len(seen)
        patches = torch.where(shown.view(shape), patches.index_select(axis, index), 0.0)
        patches = patches.unflatten(axis, (count, kernel[d]))

    p, r = POSITIONS[:dims], TAPS[:dims]
    both = "".join(a + b for a, b in zip(p, r, strict=True))
    result = _by_group(f"nc{both},kc{r}->nk{p}", patches, weight.double(), groups, weight_axis=0)
    if bias is not None:
        result = result + bias.double().view([-1] + [1] * dims)
    return result.squeeze(0) if unbatched else result


def conv_transpose(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Ints = 1, padding: Ints = 0,
    output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:  # fmt: skip
    """Transposed convolution in float64: every input element adds its kernel to a canvas, whose border is cut off."""
    kernel = list(weight.shape[2:])
    dims = len(kernel)
    strides, dilations = per_dimension(stride, dims), per_dimension(dilation, dims)
    paddings, extras = per_dimension(padding, dims), per_dimension(output_padding, dims)
    data = input.double()
    unbatched = data.dim() == dims + 1
    if unbatched:
        data = data.unsqueeze(0)

    p, r = POSITIONS[:dims], TAPS[:dims]
    both = "".join(a + b for a, b in zip(p, r, strict=True))
    canvas = _by_group(f"nc{p},ck{r}->nk{both}", data, weight.double(), groups, weight_axis=0)
    for d in range(dims):
        axis, size = 2 + d, data.shape[2 + d]
        length = transposed_output_size(size, kernel[d], strides[d], 0, extras[d], dilations[d])
        places = [i * strides[d] + tap * dilations[d] for i in range(size) for tap in range(kernel[d])]
        # A matrix of zeros and ones says which places every contribution is added to.
        adds_to = canvas.new_zeros(length, len(places))
        adds_to[places, range(len(places))] = 1.0
        canvas = torch.tensordot(canvas.flatten(axis, axis + 1), adds_to, ([axis], [1])).movedim(-1, axis)
        canvas = canvas.narrow(axis, paddings[d], length - 2 * paddings[d])
    if bias is not None:
        canvas = canvas + bias.double().view([-1] + [1] * dims)
    return canvas.squeeze(0) if unbatched else canvas


def gradients(output: Tensor, leaves: Sequence[Tensor | None], grad_output: Tensor, create_graph=False) -> list:
    """d<output, grad_output>/d(leaf) for each leaf that requires a gradient, None for the others."""
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = torch.autograd.grad(output, wanted, grad_output, create_graph=create_graph) if wanted else ()
    remaining = iter(found)
    return [next(remaining) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
