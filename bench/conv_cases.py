"""The convolutions that bench.gpu times in its section "convs": the cases of bench/cases.py for GPUs, and layers of
networks, in bfloat16 and in float32 with TF32 allowed, in both layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import cases
from .cases import LAYOUTS, Case
from .measure import GIB

DTYPES = {"bfloat16": torch.bfloat16, "tf32": torch.float32}
PASSES = ("fprop", "dgrad", "wgrad")
NATIVE, AUTO = "ours, native", "ours, auto"  # sides
AT_MOST = ("memory_mib", "peak_gib", "error")  # targets that are bounds from above
# What an H100 reaches, measured by others (bench/NOTES.md): TFLOP/s of products and TB/s of a copy.
REFERENCE = {"bfloat16": 798e12, "tf32": 399e12, "bytes": 3.0e12}


@dataclass(frozen=True)
class ConvJob(Case):
    dtype: str = "bfloat16"
    source: str = ""
    """Where it is from."""

    @property
    def name(self) -> str:
        return self.shape

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} {self.layout}"

    @property
    def elements(self) -> int:
        """Of the larger of input and output."""
        return max(prod(self.input_size), prod(self.output_size))

    @property
    def floor_ms(self) -> float:
        """On an H100."""
        return 1e3 * max(self.flop / REFERENCE[self.dtype], self.bytes / REFERENCE["bytes"])

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name}

    def tensors(self, device: str, content: str = "noise") -> tuple[Tensor, Tensor, Tensor]:
        """Input, weight and bias. Contents: noise, or a folded ramp, which every type holds exactly."""
        generator = torch.Generator().manual_seed(0)
        weight = torch.empty(self.weight_size).uniform_(-1, 1, generator=generator)
        weight = (weight / (weight[0].numel() ** 0.5)).to(device, DTYPES[self.dtype])
        bias = torch.empty(self.outputs).uniform_(-1, 1, generator=generator).to(device, DTYPES[self.dtype])
        x = self.filled(self.input_size, device, content)
        return x, weight.contiguous(memory_format=LAYOUTS[self.layout]), bias

    def filled(self, size: tuple[int, int, int, int], device: str, content: str = "noise") -> Tensor:
        x = torch.empty(size, dtype=DTYPES[self.dtype], device=device, memory_format=LAYOUTS[self.layout])
        generator = torch.Generator(device).manual_seed(1)
        rows, columns = (torch.arange(n, device=device) for n in size[2:])
        ramp = 2 * rows.view(-1, 1) + 3 * columns
        for number, image in enumerate(x):
            first = 0
            for part in image.split(max(1, 2**27 // image[0].numel())):  # numbers of wider types are made first
                if content == "noise":
                    part.copy_(torch.randn(part.shape, device=device, generator=generator))
                else:
                    channels = torch.arange(first, first + len(part), device=device).view(-1, 1, 1)
                    part.copy_((ramp + 5 * channels + 7 * number) % 64 / 8.0 - 3)
                first += len(part)
        return x


def _of_cases() -> list[ConvJob]:
    order = [*cases.ROOFLINE, *cases.PATCH_CONV_PEAKS, *cases.PATCH_CONV_SPEED, *cases.PATCH_CONV_SWEEP]
    jobs = [ConvJob(**asdict(case) | {"dtype": "bfloat16", "source": "bench.cases"}) for case in order]
    return list(dict.fromkeys(jobs))


def resnet50(batch: int = 32) -> list[ConvJob]:
    """Every distinct convolution of torchvision's at 224 squared."""
    jobs = []

    def add(channels: int, outputs: int, side: int, kernel: int, stride: int = 1) -> None:
        jobs.append(
            ConvJob(channels, outputs, side, side, kernel, stride=stride, batch=batch, source="ResNet-50")
        )  # fmt: skip

    add(3, 64, 224, 7, 2)
    before = 64
    for width, side, stride in ((64, 56, 1), (128, 28, 2), (256, 14, 2), (512, 7, 2)):
        add(before, width, side * stride, 1)
        add(width, width, side * stride, 3, stride)
        add(width, 4 * width, side, 1)
        add(before, 4 * width, side * stride, 1, stride)
        add(4 * width, width, side, 1)
        add(width, width, side, 3)
        before = 4 * width
    return list(dict.fromkeys(jobs))


def decoder(side: int) -> list[ConvJob]:
    """The 3x3 convolutions of an AutoencoderKL's decoder for an image of this side."""
    ends = [(512, 512, 8), (512, 512, 4), (512, 512, 2), (512, 256, 2), (256, 256, 2), (256, 256, 1), (256, 128, 1),
            (128, 128, 1), (128, 3, 1)]  # fmt: skip
    return [ConvJob(c, k, side // part, side // part, 3, source="diffusion decoder") for c, k, part in ends]


def mobilenet_v2(batch: int = 32) -> list[ConvJob]:
    """Every distinct depthwise convolution of torchvision's at 224 squared."""
    layers = [(32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2), (192, 28, 1), (192, 28, 2), (384, 14, 1),
              (576, 14, 1), (576, 14, 2), (960, 7, 1)]  # fmt: skip
    return [
        ConvJob(c, c, side, side, 3, batch=batch, stride=stride, groups=c, source="MobileNetV2")
        for c, side, stride in layers
    ]


# Over 2^31 elements.
LARGE_DEPTHWISE = ConvJob(64, 64, 6144, 6144, 3, layout="channels_last", groups=64, source="64-bit")


def jobs(size: str) -> Iterator[ConvJob]:
    """The most important first."""
    if size == "tiny":
        for layout in LAYOUTS:
            yield ConvJob(8, 8, 20, 20, 3, layout=layout, source="tiny")
            yield ConvJob(8, 8, 20, 20, 3, "tf32", layout, stride=2, groups=8, source="tiny")
        return
    published = _of_cases()
    layers = [*resnet50(), *mobilenet_v2(), *decoder(1024), *decoder(2048)]
    shapes: dict[str, ConvJob] = {}  # each once, from where it comes first
    for job in [*published[:5], *layers, *published[5:]]:
        shapes.setdefault(job.name, job)
    wanted = list(shapes.values())
    yield from _in_all(wanted[:5])
    yield from (replace(LARGE_DEPTHWISE, dtype=dtype) for dtype in DTYPES)
    yield from _in_all(wanted[5:])


def _in_all(wanted: list[ConvJob]) -> Iterator[ConvJob]:
    for job in wanted:
        for dtype in DTYPES:
            for layout in LAYOUTS:
                yield replace(job, dtype=dtype, layout=layout)


def targets(job: ConvJob, pass_: str) -> dict[str, float]:
    """What is asked of the project's kernel, and of what "auto" takes. Names are titles in report_gpu."""
    asked = {"memory_mib": 64.0, "error": 1.1, "auto_of_rival": 0.95}
    if pass_ != "fprop":
        return asked
    least = []
    if job.channels == 64 and job.groups == 1:
        least.append(1.0)
    if job.layout == "NCHW":
        least.append(1.3)
    if job.groups > 1 and job.elements > 2**31 and job.layout == "channels_last":
        least.append(2.0)
    if least:
        asked["of_rival"] = max(least)
    shape = (job.channels, job.outputs, job.kernel, job.stride, job.groups, job.dtype)
    if shape == (128, 128, 3, 1, 1, "bfloat16"):
        asked["tflop_s"] = 300.0
    whole = {(512, 512, 2048, 2048): 8.1, (256, 256, 4096, 4096): 16.1}
    ends = (job.channels, job.outputs, job.height, job.width)
    if ends in whole and job.dtype == "bfloat16":
        asked["peak_gib"] = whole[ends]
    return asked


def peak_gib(job: ConvJob, workspace: int) -> float:
    return (job.bytes + workspace) / GIB
