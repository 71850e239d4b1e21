"""The convolutions that are measured, by name, and the three ways to compute them.

A case is one square-kernel convolution with a bias, stride 1 and padding k // 2, as the systems we compare
with measured it: their published shapes, the shapes of the roofline table, and those that the CPU is judged
by. Bytes and floating-point operations follow from the shape; times and memory are measured elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
PASSES = ("fprop", "dgrad", "wgrad", "backward")
STOCK, PATCH_CONV, OURS = "stock", "patch_conv", "ours"
TYPES = DTYPES | {"tf32": torch.float32}
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def backend(name: str, device: str) -> contextlib.AbstractContextManager[Any]:
    """The package's backend on a GPU; the default on the CPU, where the project's kernels are not."""
    import patchconv_native as pc

    return pc.backend(name if device == "cuda" else "auto")


@dataclass(frozen=True)
class Case:
    """One square-kernel convolution with padding k // 2, in one type and layout."""

    channels: int
    outputs: int
    height: int
    width: int
    kernel: int
    dtype: str = "float32"
    layout: str = "NCHW"
    batch: int = 1
    stride: int = 1
    groups: int = 1

    @property
    def shape(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        ends = f"{self.channels} depthwise" if self.groups > 1 else f"{self.channels}->{self.outputs}"
        stride = f" s{self.stride}" if self.stride > 1 else ""
        return f"{batch}{ends} {self.height}x{self.width} k{self.kernel}{stride}"

    @property
    def name(self) -> str:
        return f"{self.shape} {self.dtype}"

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def input_size(self) -> tuple[int, int, int, int]:
        return self.batch, self.channels, self.height, self.width

    @property
    def output_size(self) -> tuple[int, int, int, int]:
        high, wide = ((n + 2 * self.padding - self.kernel) // self.stride + 1 for n in (self.height, self.width))
        return self.batch, self.outputs, high, wide

    @property
    def weight_size(self) -> tuple[int, int, int, int]:
        return self.outputs, self.channels // self.groups, self.kernel, self.kernel

    @property
    def input_bytes(self) -> int:
        return prod(self.input_size) * TYPES[self.dtype].itemsize

    @property
    def output_bytes(self) -> int:
        return prod(self.output_size) * TYPES[self.dtype].itemsize

    @property
    def weight_bytes(self) -> int:
        """Of weight and bias."""
        return (prod(self.weight_size) + self.outputs) * TYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """The floor: input, weight, bias and output."""
        return self.input_bytes + self.weight_bytes + self.output_bytes

    @property
    def flop(self) -> int:
        """Of one pass: a multiplication and an addition a product."""
        return 2 * prod(self.output_size) * prod(self.weight_size[1:])

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def module(self, implementation: str = STOCK, splits: int | None = None, device: str = "cpu") -> nn.Module:
        """The convolution by one of the implementations; all have the same weights."""
        generator = torch.Generator().manual_seed(0)
        ends = (self.channels, self.outputs)
        conv = nn.Conv2d(*ends, self.kernel, self.stride, self.padding, groups=self.groups)
        with torch.no_grad():
            for parameter in conv.parameters():
                parameter.uniform_(-1, 1, generator=generator).div_(self.channels**0.5 * self.kernel)
        conv = conv.to(device, TYPES[self.dtype]).to(memory_format=LAYOUTS[self.layout])
        if implementation == PATCH_CONV:
            import patch_conv

            return patch_conv.convert_model(conv, splits=splits or 4)  # 4 is its default
        if implementation == OURS:
            import patchconv_native as pc

            return pc.convert(conv, splits=splits)
        return conv

    def input(self, device: str = "cpu") -> Tensor:
        return self._filled(self.input_size, device)

    def gradient(self, device: str = "cpu") -> Tensor:
        """Of the output."""
        return self._filled(self.output_size, device)

    def _filled(self, size: tuple[int, int, int, int], device: str) -> Tensor:
        """Noise, the same block over and over: fresh random numbers by the gigabyte take too long."""
        flat = torch.empty(prod(size), dtype=TYPES[self.dtype], device=device)
        block = torch.randn(min(flat.numel(), 1_000_003), device=device).to(flat.dtype)
        for begin in range(0, flat.numel(), block.numel()):
            part = flat[begin : begin + block.numel()]
            part.copy_(block[: part.numel()])
        if self.layout == "channels_last":
            batch, channels, height, width = size
            return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)
        return flat.view(size)


def prepare(case: Case, module: nn.Module, pass_: str, device: str = "cpu") -> Callable[[], Any]:
    """A call that computes one pass and returns its results; it can be repeated.

    "fprop": the output, without a graph. "dgrad", "wgrad": one gradient, by autograd, from a forward pass in
    which only that one was asked for, its output freed. "backward": the gradients of input, weight and bias
    together.
    """
    return prepare_with(module, case.input(device), lambda: case.gradient(device), pass_)


def prepare_with(module: nn.Module, x: Tensor, gradient: Callable[[], Tensor], pass_: str) -> Callable[[], Any]:
    """`prepare` with a given input, which several implementations may share."""
    if pass_ == "fprop":

        def forward() -> Tensor:
            with torch.no_grad():
                return module(x)

        return forward
    parameters = dict(module.named_parameters())
    weights = [p for name, p in parameters.items() if name.endswith("weight")]
    for parameter in parameters.values():
        parameter.requires_grad_(pass_ == "backward")
    leaf = x.detach()
    choices: dict[str, list[Tensor]] = {
        "dgrad": [leaf],
        "wgrad": [*weights],
        "backward": [leaf, *parameters.values()],
    }
    wanted = choices[pass_]
    for tensor in wanted:
        tensor.requires_grad_()
    edge = torch.autograd.graph.get_gradient_edge(module(leaf))
    grad = gradient()

    def backward() -> Any:
        return torch.autograd.grad([edge], wanted, [grad], retain_graph=True)

    return backward


# ------------------------------------------------------------------------------------------------------------
# CPU. Inputs of 1 GiB and more: 2048 squared with 64 channels, 4096 squared with 16 (the same bytes, less
# arithmetic for the large kernel), 2 GiB, and 4 GiB, from where on patch_conv splits at all (2^30 elements).
MEMORY = {
    "full": [
        Case(64, 64, 2048, 2048, 3),
        Case(16, 16, 4096, 4096, 7),
        Case(32, 32, 4096, 4096, 3),
    ],
    "small": [Case(64, 64, 1024, 512, 3), Case(16, 16, 1024, 2048, 7)],
    "tiny": [Case(16, 16, 512, 256, 3)],
}
PATCH_CONV_MEMORY = {"full": [Case(64, 16, 4096, 4096, 3)], "small": [], "tiny": []}

SPEED = {
    "full": [Case(64, 64, 1024, 1024, 3), Case(64, 64, 2048, 2048, 3)],
    "small": [Case(64, 64, 256, 256, 3)],
    "tiny": [Case(8, 8, 48, 48, 3)],
}
SPEED_LARGE_KERNEL = {
    "full": [Case(64, 64, 1024, 1024, 7)],
    "small": [Case(64, 64, 128, 128, 7)],
    "tiny": [Case(8, 8, 32, 32, 7)],
}

# ------------------------------------------------------------------------------------------------------------
# GPU, the most important first: a run that meets its time limit has measured the front of the list. bfloat16
# where a roofline is known, float16 where patch_conv's authors measured.
ROOFLINE = [
    Case(64, 64, 4096, 4096, 3, "bfloat16"),
    Case(128, 128, 2048, 2048, 3, "bfloat16"),
    Case(64, 64, 2048, 2048, 7, "bfloat16"),
    Case(64, 64, 4096, 4096, 7, "bfloat16"),
    Case(64, 64, 56, 56, 3, "bfloat16", batch=32),
]
PATCH_CONV_SPEED = [Case(c, c, side, side, k, "float16") for c, side in ((64, 4096), (256, 2048)) for k in (3, 5, 7)]
PATCH_CONV_PEAKS = [Case(c, c, side, side, k, "float16") for c, side in ((512, 2048), (256, 4096)) for k in (3, 5, 7)]
# 256 to 512 channels at growing width: stock's memory used to jump where the output passes 2^31 elements.
PATCH_CONV_SWEEP = [Case(256, 512, 2048, w, 3, "float16") for w in (2560, 512, 2048, 4608, 1536, 3584)]
GPU = {
    "full": [
        *ROOFLINE[:3],
        *PATCH_CONV_PEAKS[::3],
        *ROOFLINE[3:],
        *PATCH_CONV_SPEED,
        *PATCH_CONV_SWEEP,
        *PATCH_CONV_PEAKS[1:3],
        *PATCH_CONV_PEAKS[4:],
    ],
    "tiny": [Case(8, 8, 40, 40, 3, "bfloat16"), Case(8, 8, 40, 40, 7, "float16")],
}
