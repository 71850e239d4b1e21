"""What each CUDA kernel does, counted instruction by instruction: `python -m bench.kernel_counts` (no GPU).

The tests' interpreter (tests/ptx) runs the PTX that nvcc writes for sm_80, on layers of ResNet-50's and MobileNetV2's
kind, with a batch of one unless they say more. It counts, for each kernel:

- products of matrices (mma), and how much of them the layer needs: the rest is zeros beside the image or the channels;
- other instructions a warp executes for each 16 of them. A 64-bit sum counts as two, a division as the 20 or 70
  instructions that ptxas makes of it, a move as none. That is an estimate of the machine code. How good it is, a count
  of the whole kernel in both says (`machine`: instructions of sm_80 for one that is counted in PTX);
- how long shared memory is busy, in units of the least that the same loads and stores could take (bank conflicts);
- sectors of 32 bytes of global memory asked for, in units of the least that hold the bytes that a warp asks for.

From these counts and the widths that vendors publish follows which part of a multiprocessor is busy longest. Nothing
here is a time: how well the parts overlap is not counted.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import kernels, measure, ptx, report
from .measure import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from support import conv_kernels
from support import kernels as host
from support.conv_kernels import Problem
from support.kernels import Call, Memory

HALF, FLOAT = torch.float16, torch.float32
SECTOR = 32


@dataclass(frozen=True)
class Architecture:
    """Of a multiprocessor, a cycle: products of halves; bytes of shared memory, of the L2 cache and of memory that it
    gets when all are busy. Shared memory of a block, in KiB.
    """

    name: str
    products: int
    shared_bytes: int
    l2_bytes: float
    memory_bytes: float
    shared: int


# From the vendor's architecture papers: 1024 and 2048 multiply-adds of halves; 5120 bytes of L2 a cycle among 108
# multiprocessors (H100: 5.5 TB/s were measured by others, among 132 at 1.755 GHz); 1.555 and 3.35 TB/s of memory.
ARCHITECTURES = (
    Architecture("A100", 1024, 128, 47, 10.2, 163),
    Architecture("H100", 2048, 128, 24, 14.5, 227),
)


@dataclass
class Counts:
    """Of one kernel in one call."""

    products: int = 0  # multiply-adds by tensor cores
    matrices: int = 0  # instructions mma
    instructions: float = 0.0  # others, by warps
    wavefronts: int = 0
    least_wavefronts: int = 0
    sectors: int = 0
    least_sectors: int = 0
    barriers: int = 0
    by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def busy(self, arch: Architecture) -> dict[str, float]:
        """Cycles of one multiprocessor, if nothing waits."""
        tf32 = 2 if self.matrices and self.products / self.matrices < 2048 else 1
        return {
            "issue": (self.instructions + self.matrices) / 4,
            "tensor cores": self.products * tf32 / arch.products,
            "shared memory": float(self.wavefronts),
            "L2": self.sectors * SECTOR / arch.l2_bytes,
        }


# Instructions of the machine for one of PTX, where it is not one. An and of predicates is part of a comparison;
# addresses of 64 bits are two sums, or one multiply-add.
WEIGHTS = (
    (r"mov\.b32 \{|mov\.b32\s+%r\d+, \{", 1),
    (r"mov|cvta|ld\.param|cvt\.(s64|u64)\.(s32|u32)|cvt\.u32\.u64|and\.pred|not\.pred|or\.pred", 0),
    (r"(div|rem)\.[su]64", 70), (r"div\.[su]32|rem\.[su]32", 20), (r"div\.rn|rcp|sqrt", 8), (r"ex2", 2),
    (r"m(ul|ad)\.lo\.s64", 4),
    (r"(add|sub|shl|shr|selp|and|or|xor|min|max|neg|not)\.?[a-z]*64|setp\.\w+\.[su]64", 2),
)  # fmt: skip
KINDS = (
    ("matrices", r"mma"), ("fragments", r"ldmatrix"), ("copies", r"cp\.async"), ("shared", r"(ld|st)\.shared"),
    ("global", r"(ld|st)\.global|ld\.[a-z]\d"), ("floats", r"\w+\.(\w+\.)*(f32|f64|f16|bf16|tf32)"),
    ("branches", r"bra|setp|bar|ret"), ("integers", r""),
)  # fmt: skip


def weight(text: str) -> float:
    text = re.sub(r"^@\S+\s+", "", text)
    return next((w for pattern, w in WEIGHTS if re.match(pattern, text)), 1)


def kind(text: str) -> str:
    text = re.sub(r"^@\S+\s+", "", text)
    return next(name for name, pattern in KINDS if re.match(pattern, text))


def read(text: str) -> dict[str, Counts]:
    """What tests/ptx wrote (run.h)."""
    found: dict[str, Counts] = {}
    for block in filter(None, text.split("\n\n")):
        name, *lines = block.split("\n")
        counts = found.setdefault(readable(name), Counts())
        for line in lines:
            numbers, instruction = line.split(" ", 5)[:5], line.split(" ", 5)[5]
            executed, sectors, least_sectors, wavefronts, least = map(int, numbers)
            if instruction.startswith("mma"):
                counts.matrices += executed
                counts.products += executed * (2048 if "m16n8k16" in instruction else 1024)
            else:
                counts.instructions += executed * weight(instruction)
            counts.by_kind[kind(instruction)] += executed * weight(instruction)
            counts.barriers += executed * instruction.startswith("bar.sync")
            counts.sectors += sectors
            counts.least_sectors += least_sectors
            counts.wavefronts += wavefronts
            counts.least_wavefronts += least
    return found


def of_machine(source: Path) -> dict[str, float]:
    """Of each kernel in a file: instructions of the machine for one that is counted in its PTX."""
    toolkit, _ = kernels.toolkit_of_torch()
    tool = kernels.disassembler(toolkit) if toolkit else None
    if toolkit is None or tool is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernels.cubin"
        nvcc = str(toolkit.home / "bin" / "nvcc")
        kernels.run_tool([nvcc, *kernels.FLAGS, "-arch=sm_80", f"-I{ROOT / 'csrc'}", str(source), "-o", cubin])
        sass = kernels.run_tool([str(tool), "-c", cubin])
    machine = {}
    for section in sass.split("\t.section\t.text.")[1:]:
        instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!.*\bNOP\b).*;", section, re.MULTILINE)
        machine[readable(section.split(",")[0])] = len(instructions)
    text, counted = (ptx.FOLDER / f"{source.stem}.ptx").read_text(), {}
    for entry in text.split(".entry ")[1:]:
        lines = [re.sub(r"^[{\s]+", "", line).rstrip(" }") for line in entry.split("\n")]
        instructions = [line for line in lines if re.match(r"(@!?%p\d+ )?[a-z].*;$", line)]
        counted[readable(entry.partition("(")[0].strip())] = sum(map(weight, instructions))
    return {name: machine[name] / count for name, count in counted.items() if name in machine}


def readable(function: str) -> str:
    name, arguments = kernels.readable(function)
    return f"{name}<{arguments}>" if arguments else name


# ----------------------------------------------------------------------------------------------------------------------
# Layers


def conv(p: Problem, pass_: str, kernel: str, dtype: torch.dtype = HALF, layout: str = "NHWC", **more: Any) -> Any:
    def make() -> tuple[Call, int]:
        made = conv_kernels.case(p, pass_, dtype, layout, **more)
        places = torch.Size(p.small_shape).numel()
        return made.call(kernel), places * p.sources * torch.Size(p.kernel).numel()

    return make


def mask(count: int) -> Any:
    x = torch.randn(count).half()
    bits = torch.zeros(count // 8, dtype=torch.uint8)
    return lambda: (Call("mask_forward", HALF, (0, count, 0, 0), [Memory(t) for t in (x, None, x.clone(), bits)]), 0)


def norm(kernel: str, images: int, channels: int, pixels: int, channels_last: bool) -> Any:
    def make() -> tuple[Call, int]:
        x = torch.randn(images * channels * pixels).half()
        per_channel = [Memory(torch.rand(channels)) for _ in range(4)]
        numbers = [images, channels, pixels, 0, int(channels_last), 1e-5, 0.1, 1, 1]
        if kernel == "norm_map":
            return Call(kernel, HALF, numbers, [Memory(x), Memory(x.clone()), *per_channel]), 0
        if kernel == "norm_statistics":
            return Call(kernel, HALF, numbers, [Memory(x), *per_channel]), 0
        results = [Memory(x.clone()), *(Memory(torch.rand(channels)) for _ in range(2))]
        return Call(kernel, HALF, numbers, [Memory(x), Memory(x.clone()), *per_channel, *results]), 0

    return make


def pool(kernel: str, dims: tuple[int, int], inner: int) -> Any:
    """3x3 with a stride of 2. dims: planes and their side; inner: channels that lie side by side."""

    def make() -> tuple[Call, int]:
        outer, side, small = *dims, dims[1] // 2
        x, y = torch.randn(outer * inner * side**2).half(), torch.randn(outer * inner * small**2).half()
        window = [0, 3, 2, 1, 1]
        places = [1, 1, 0, 1, 1, 0, 1, side, small, *window, side, small, *window]
        if kernel == "avg_pool":
            return Call(kernel, HALF, [outer, inner, 1, *places, 0], [Memory(x), Memory(y)]), 0
        offsets = Memory(torch.zeros(len(y), dtype=torch.uint8))
        buffers = [Memory(y), offsets, Memory(x)] if "backward" in kernel else [Memory(x), Memory(y), offsets]
        return Call(kernel, HALF, [outer, inner, 1, *places], buffers), 0

    return make


def layer_norm(rows: int, columns: int, backward: bool) -> Any:
    def make() -> tuple[Call, int]:
        x, (mean, rstd) = torch.randn(rows * columns).half(), torch.rand(2, rows)
        weight, bias = torch.rand(2, columns)
        if backward:
            given = [x, x.clone(), mean, rstd, weight, bias, x.clone(), weight.clone(), bias.clone()]
            return Call("layer_norm_backward", HALF, [rows, columns, 1e-5], list(map(Memory, given))), 0
        given = [x, x.clone(), mean, rstd, weight, bias]
        return Call("layer_norm", HALF, [rows, columns, 1e-5], list(map(Memory, given))), 0

    return make


def dropout(count: int) -> Any:
    x, seed = torch.randn(count).half(), torch.tensor([5])
    return lambda: (Call("dropout", HALF, (count, 0.3, 1.4, 0, 0), [Memory(x), Memory(x.clone()), Memory(seed)]), 0)


def conv3(
    side: int, channels: int, pass_: str = "small", dtype: torch.dtype = HALF, layout: str = "NHWC", images: int = 1,
    **more: Any,
) -> Any:  # fmt: skip
    """3x3, padded, as many channels as before."""
    p = Problem((side, side), (3, 3), channels, channels, images=images, padding=((1, 1), (1, 1)))
    return conv(p, pass_, "conv_weight" if pass_ == "weight" else "conv_tiles", dtype, layout, **more)


DOWN = Problem((56, 56), (3, 3), 64, 128, stride=(2, 2), padding=((1, 1), (1, 1)))
STEM = Problem((56, 56), (7, 7), 3, 64, stride=(2, 2), padding=((3, 3), (3, 3)))
DEPTHWISE = Problem((28, 28), (3, 3), 1, 1, groups=96, padding=((1, 1), (1, 1)))
LAYERS: dict[str, Callable[[], tuple[Call, int]]] = {
    "3x3, 64 to 64, 56x56": conv3(56, 64),
    "3x3, 64 to 64, 56x56, NCHW": conv3(56, 64, layout="NCHW"),
    "3x3 stride 2, 64 to 128, 56x56": conv(DOWN, "small", "conv_tiles"),
    "1x1, 256 to 64, 28x28": conv(Problem((28, 28), (1, 1), 256, 64), "small", "conv_tiles"),
    "3x3, 128 to 128, 14x14": conv3(14, 128),
    "3x3, 128 to 128, 7x7": conv3(7, 128),
    "3x3, 128 to 128, 14x14, 8 images": conv3(14, 128, images=8),
    "3x3, 128 to 128, 7x7, 8 images": conv3(7, 128, images=8),
    "3x3, 64 to 64, 7x7, 16 images, NCHW": conv3(7, 64, layout="NCHW", images=16),
    "3x3, 64 to 64, 28x28, float32 by one product": conv3(28, 64, dtype=FLOAT),
    "3x3, 64 to 64, 28x28, float32 strictly": conv3(28, 64, dtype=FLOAT, strict=True),
    "gradient of the input, 3x3, 64, 28x28": conv3(28, 64, "big"),
    "gradient of the weight, 3x3, 64, 28x28": conv3(28, 64, "weight"),
    "7x7 stride 2, 3 to 64, 56x56": conv(STEM, "small", "conv_stem"),
    "depthwise 3x3, 96, 28x28": conv(DEPTHWISE, "small", "conv_depthwise"),
    "depthwise 3x3, 96, 28x28, NCHW": conv(DEPTHWISE, "small", "conv_depthwise", HALF, "NCHW"),
    "ReLU and its bits, 2^18": mask(2**18),
    "batch norm's statistics, NHWC": norm("norm_statistics", 2, 64, 784, True),
    "batch norm, NHWC": norm("norm_map", 2, 64, 784, True),
    "batch norm, NCHW": norm("norm_map", 2, 64, 784, False),
    "batch norm's gradients, NHWC": norm("norm_backward", 2, 64, 784, True),
    "batch norm's gradients, NCHW": norm("norm_backward", 2, 64, 784, False),
    "dropout, 2^18": dropout(2**18),
    "max pool 3x3 stride 2, 64, 56x56, NHWC": pool("max_pool", (1, 56), 64),
    "max pool 3x3 stride 2, 64, 56x56, NCHW": pool("max_pool", (64, 56), 1),
    "its gradient, NHWC": pool("max_pool_backward", (1, 56), 64),
    "average pool 3x3 stride 2, 64, 56x56, NHWC": pool("avg_pool", (1, 56), 64),
    "layer norm, 392 rows of 512": layer_norm(392, 512, False),
    "layer norm's gradients, 392 rows of 512": layer_norm(392, 512, True),
}


def count(layer: str, arch: Architecture) -> dict[str, Any]:
    call, products = LAYERS[layer]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts"
        host.run([call], how="ptx", shared=arch.shared, counts=path)
        found = read(path.read_text())
    rows = []
    for name, counts in found.items():
        busy = counts.busy(arch)
        rows.append({"kernel": name, **vars(counts), "busy": busy, "binds": max(busy, key=busy.__getitem__)})
    return {"layer": layer, "arch": arch.name, "products": products, "kernels": rows}


def tells(layer: str, arch: Architecture) -> bool:
    """Whether its counts are others than those for the first architecture: plans depend on shared memory."""
    return arch is ARCHITECTURES[0] or "3x3" in layer or "1x1" in layer


def measure_all(size: str) -> dict[str, Any]:
    toolkit, reason = kernels.toolkit_of_torch()
    if toolkit is None:
        raise SystemExit(f"bench.kernel_counts: {reason}")
    layers = list(LAYERS)[:: 1 if size == "full" else 6]
    found = [count(layer, arch) for layer in layers for arch in ARCHITECTURES if tells(layer, arch)]
    ran = {row["kernel"].partition("<")[0] for layer in found for row in layer["kernels"]}
    sources = [source for source in kernels.listed() if ran & kernels.budgets(source).keys()]
    machine = {name: ratio for source in sources for name, ratio in of_machine(source).items()}
    for row in (row for layer in found for row in layer["kernels"]):
        row["machine"] = machine.get(row["kernel"])
    return measure.report_head("kernel_counts", size) | {"counts": found}


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
