"""Random configurations of the convolutions: the generator that the sweep (hypothesis) and tests/fuzz.py
share.

A `Configuration` is a frozen dataclass whose repr recreates it, so that a failure can be pasted into a test
or given to `python tests/fuzz.py --replay`. It is drawn through a `Chooser`: hypothesis supplies one that
shrinks, random.Random one that is fast. Sizes are drawn after kernel and padding, so that every configuration
drawn is a valid call.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYOUTS = ("contiguous", "channels_last", "transposed", "sliced", "strided", "expanded")
GRAD_LAYOUTS = ("contiguous", "channels_last", "transposed", "sliced", "expanded")
CONTENTS = ("noise", "ramp", "checkerboard", "spike", "offset")


class Chooser(Protocol):
    def pick(self, options: Sequence[T]) -> T: ...

    def integer(self, low: int, high: int) -> int: ...


class RandomChooser:
    """Draws from random.Random(seed)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


@dataclass(frozen=True)
class Configuration:
    transposed: bool
    batch: int | None  # None: unbatched
    channels: int
    outputs: int
    groups: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]  # D entries, or 2*D entries (before, after)
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: str
    dtype: str
    bias: bool
    layout: str
    weight_layout: str
    grad_layout: str
    content: str
    requires_grad: tuple[bool, bool, bool]
    splits: int | tuple[int, ...] | None
    limit: int | None  # workspace limit in bytes; None: leave it as it is
    seed: int

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def operator(self) -> str:
        return f"conv{'_transpose' if self.transposed else ''}{self.dims}d"

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that the oracle and the operator share."""
        common = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        if self.transposed:
            return common | {"output_padding": self.output_padding}
        return common | {"padding_mode": self.padding_mode}


SIZES = {1: (37,), 2: (17, 13), 3: (9, 8, 7)}
SPLITS = {1: [(4,)], 2: [(4, 1), (1, 3), (4, 3)], 3: [(3, 1, 1), (1, 1, 2), (3, 2, 2)]}


EACH_DIMENSION = ("sizes", "kernel", "stride", "padding", "output_padding", "dilation")


def plain(dims: int = 2, **changes: Any) -> Configuration:
    """A plain call with every gradient, cut into tiles along each dimension, which a test changes in some respects. One
    number for all dimensions will do, apart from splits.
    """
    values = {
        "transposed": False, "batch": 2, "channels": 4, "outputs": 6, "groups": 1, "sizes": SIZES[dims], "kernel": 3,
        "stride": 1, "padding": 1, "output_padding": 0, "dilation": 1, "padding_mode": "zeros", "dtype": "float32",
        "bias": True, "layout": "contiguous", "weight_layout": "contiguous", "grad_layout": "contiguous",
        "content": "noise", "requires_grad": (True, True, True), "splits": SPLITS[dims][-1], "limit": None, "seed": 1,
    } | changes  # fmt: skip
    values |= {name: (values[name],) * dims for name in EACH_DIMENSION if isinstance(values[name], int)}
    return Configuration(**values)


def draw(choose: Chooser, dims: int | None = None, transposed: bool | None = None) -> Configuration:
    """One valid configuration. Rare values (big kernels, empty batches) are drawn rarely on purpose."""
    dims = choose.pick((1, 2, 2, 3)) if dims is None else dims
    transposed = choose.pick((False, False, True)) if transposed is None else transposed

    groups, channels, outputs = _draw_channels(choose)
    kernel = _draw_kernel(choose, dims)
    stride = tuple(choose.pick((1, 1, 2, 3)) for _ in range(dims))
    dilation = tuple(choose.pick((1, 1, 1, 2, 3)) for _ in range(dims))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]

    padding_mode = "zeros" if transposed else choose.pick(("zeros", "zeros", "reflect", "replicate", "circular"))
    padding: str | tuple[int, ...]
    output_padding = (0,) * dims
    extra = {1: 40, 2: 9, 3: 4}[dims]
    if transposed:
        output_padding = tuple(choose.integer(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        padding = tuple(choose.integer(0, min(r, 6)) for r in reach)
        sizes = []
        for d in range(dims):
            # The smallest input whose output has at least one element.
            missing = 1 + 2 * padding[d] - reach[d] - output_padding[d]
            sizes.append(max(1, 1 + -(-missing // stride[d])) + choose.integer(0, extra))
    else:
        padding, pairs = _draw_padding(choose, kernel, stride, reach)
        sizes = []
        for d in range(dims):
            least = max(1, reach[d] - sum(pairs[d]))
            if padding_mode == "reflect":
                least = max(least, max(pairs[d]) + 1)
            elif padding_mode == "circular":
                least = max(least, *pairs[d])
            sizes.append(least + choose.integer(0, extra))

    splits: int | tuple[int, ...] | None = None
    limit: int | None = None
    if choose.pick(("asked", "asked", "asked", "automatic")) == "asked":
        each = tuple(choose.pick((1, 2, 3, 5, 100)) for _ in range(dims))
        splits = each[0] if choose.pick(("int", "tuple")) == "int" else each
    else:
        limit = choose.pick((None, 1, 2_000, 20_000))

    return Configuration(
        transposed=transposed, batch=choose.pick((None, 0, 1, 1, 2, 2, 3)), channels=channels, outputs=outputs,
        groups=groups, sizes=tuple(sizes), kernel=kernel, stride=stride, padding=padding,
        output_padding=output_padding, dilation=dilation, padding_mode=padding_mode,
        dtype=choose.pick(("float32", "float32", "float64", "float16", "bfloat16")), bias=choose.pick((True, False)),
        layout=choose.pick(LAYOUTS), weight_layout=choose.pick(LAYOUTS), grad_layout=choose.pick(GRAD_LAYOUTS),
        content=choose.pick(CONTENTS), requires_grad=choose.pick((REQUIRES[0], *REQUIRES)), splits=splits,
        limit=limit, seed=choose.integer(0, 2**31 - 1),
    )  # fmt: skip


REQUIRES = (
    (True, True, True), (True, False, False), (False, True, False), (False, False, True), (True, False, True),
    (False, True, True), (False, False, False),
)  # fmt: skip


def _draw_channels(choose: Chooser) -> tuple[int, int, int]:
    kind = choose.pick(("full", "full", "grouped", "depthwise"))
    if kind == "full":
        return 1, choose.integer(1, 6), choose.integer(1, 6)
    groups = choose.integer(2, 4)
    if kind == "depthwise":
        return groups, groups, groups * choose.integer(1, 2)
    return groups, groups * choose.integer(1, 3), groups * choose.integer(1, 3)


def _draw_kernel(choose: Chooser, dims: int) -> tuple[int, ...]:
    kind = choose.pick(("ones", "threes", "even", "line", "mixed", "mixed", "big"))
    if kind == "ones":
        return (1,) * dims
    if kind == "threes":
        return (3,) * dims
    if kind == "even":
        return tuple(choose.pick((2, 4)) for _ in range(dims))
    if kind == "line":
        along = choose.integer(0, dims - 1)
        length = choose.integer(2, 7)
        return tuple(length if d == along else 1 for d in range(dims))
    if kind == "big":
        longest = {1: 31, 2: 9, 3: 5}[dims]
        return tuple(choose.integer(longest // 2, longest) for _ in range(dims))
    return tuple(choose.integer(1, 5 if dims < 3 else 3) for _ in range(dims))


Pads = tuple[str | tuple[int, ...], list[tuple[int, int]]]


def _draw_padding(choose: Chooser, kernel: tuple[int, ...], stride: tuple[int, ...], reach: list[int]) -> Pads:
    """The padding argument, and the pairs it means."""
    dims = len(kernel)
    kind = choose.pick(("none", "half", "any", "any", "asymmetric", "same", "valid"))
    if kind == "same" and all(s == 1 for s in stride):
        return "same", [((r - 1) // 2, r - 1 - (r - 1) // 2) for r in reach]
    if kind == "valid":
        return "valid", [(0, 0)] * dims
    if kind == "none":
        return (0,) * dims, [(0, 0)] * dims
    if kind == "asymmetric":
        pairs = [(choose.integer(0, min(r, 6)), choose.integer(0, min(r, 6))) for r in reach]
        return tuple(n for pair in pairs for n in pair), pairs
    if kind == "half":
        numbers = tuple(r // 2 for r in reach)
    else:
        numbers = tuple(choose.integer(0, min(r + 2, 7)) for r in reach)
    return numbers, [(n, n) for n in numbers]


def make_tensor(shape: Sequence[int], content: str, generator: torch.Generator) -> Tensor:
    """Float64 values of order one on the CPU. Structure shows mistakes at seams and borders that noise hides."""
    shape = list(shape)
    if content == "noise" or 0 in shape:
        return torch.randn(shape, dtype=torch.float64, generator=generator)
    if content == "offset":
        return 3 + torch.randn(shape, dtype=torch.float64, generator=generator)
    if content == "spike":
        flat = torch.zeros(shape, dtype=torch.float64).flatten()
        flat[torch.randint(flat.numel(), (1,), generator=generator)] = 1.0
        return flat.view(shape)
    place = torch.zeros(shape, dtype=torch.float64)
    for axis, size in enumerate(shape):
        view = [1] * len(shape)
        view[axis] = size
        steps = torch.arange(size, dtype=torch.float64)
        if content == "ramp":
            steps = (axis + 1) * steps / max(size - 1, 1) / len(shape)
        place = place + steps.view(view)
    if content == "ramp":
        return place - 0.5
    assert content == "checkerboard"
    return 1.0 - 2.0 * (place % 2)


def lay_out(values: Tensor, layout: str) -> Tensor:
    """The same shape and dtype in another memory layout. "expanded" repeats the first channel or image."""
    if layout == "channels_last" and values.dim() in (4, 5):
        last = torch.channels_last if values.dim() == 4 else torch.channels_last_3d
        return values.contiguous(memory_format=last)
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        wide = values.new_full([size + 2 for size in values.shape], float("nan"))
        inner = wide[tuple(slice(1, size + 1) for size in values.shape)]
        return inner.copy_(values)
    if layout == "strided":
        wide = values.new_full([2 * size for size in values.shape], float("nan"))
        inner = wide[(slice(None, None, 2),) * values.dim()]
        return inner.copy_(values)
    if layout == "expanded":
        axis = 0 if values.dim() > 1 and values.shape[0] > 1 else min(1, values.dim() - 1)
        if values.shape[axis] > 0:
            return values.narrow(axis, 0, 1).clone().expand(values.shape)
    return values.contiguous()


@dataclass
class Tensors:
    """What a configuration is applied to."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None


def build(configuration: Configuration, device: str = "cpu") -> Tensors:
    """Input, weight and bias: detached leaves of the configuration's dtype and layouts."""
    c = configuration
    generator = torch.Generator().manual_seed(c.seed)
    dtype = DTYPES[c.dtype]
    batch = [] if c.batch is None else [c.batch]
    per_group = (c.outputs if c.transposed else c.channels) // c.groups
    weight_shape = [c.channels if c.transposed else c.outputs, per_group, *c.kernel]
    terms = per_group * torch.Size(c.kernel).numel()

    values = make_tensor([*batch, c.channels, *c.sizes], c.content, generator)
    weight = make_tensor(weight_shape, "noise", generator) / terms**0.5
    bias = make_tensor([c.outputs], "noise", generator) if c.bias else None

    def leaf(tensor: Tensor, layout: str, wanted: bool) -> Tensor:
        return lay_out(tensor.to(device, dtype), layout).requires_grad_(wanted)

    bias = bias if bias is None else leaf(bias, c.weight_layout, c.requires_grad[2])
    return Tensors(leaf(values, c.layout, c.requires_grad[0]), leaf(weight, c.weight_layout, c.requires_grad[1]), bias)


def build_grad(configuration: Configuration, output: Tensor) -> Tensor:
    """A gradient for `output`; "expanded" is what sum().backward() sends."""
    c = configuration
    generator = torch.Generator().manual_seed(c.seed + 1)
    grad = make_tensor(output.shape, "noise", generator).to(output.device, output.dtype)
    if c.grad_layout == "expanded":
        return grad.new_ones(()).expand(output.shape)
    return lay_out(grad, c.grad_layout)
