"""Every convolution operator, every kernel and their gradients against float64, on random and structured inputs.

The tests ask the same in far more configurations; this is the short form that fits into minutes on a new
device, and that a memory checker can run: `python -m bench.correct --device cuda [--few]`. Exit code 1 if
anything is off. Here are the convolutions, by stock operators and under pc.backend("native") in shapes that its kernels
divide in different ways (bench/correct_convs.py); bench/correct_kernels.py and bench/correct_norms.py have the rest.

Exact values come from stock PyTorch in float64 on the CPU, fed with the rounded tensors that the device gets.
An error may be 1.1 times stock's largest on the same device in the same type, plus what rounding the result
and another order of summation can make. Structure (ramps, steps, a single spike) shows mistakes at seams that
noise hides.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import patchconv_native as pc

from . import correct_convs, correct_kernels, correct_norms
from .cases import CONTENTS, UNIT, contents

RESULTS = ("output", "grad_input", "grad_weight", "grad_bias")
SIZES = {1: (53,), 2: (19, 23), 3: (7, 9, 11)}
BATCH, CHANNELS = 2, 4
SMALL_LIMIT = 4096  # bytes: with it, automatic splits cut these small tensors too


@dataclass(frozen=True)
class Check:
    dims: int
    transposed: bool
    kernel: tuple[int, ...]
    stride: int = 1
    padding: tuple[int, ...] = (1,)  # one number, or (before, after) of each dimension
    output_padding: int = 0
    dilation: int = 1
    groups: int = 1
    mode: str = "zeros"
    dtype: torch.dtype = torch.float32
    content: str = "noise"
    channels_last: bool = False
    splits: int | None = None
    channels: int = CHANNELS
    outputs: int | None = None
    sizes: tuple[int, ...] | None = None
    native: bool = False  # by the project's own kernels, where there is a GPU
    tf32: bool = False  # allowed

    @property
    def name(self) -> str:
        return f"conv{'_transpose' if self.transposed else ''}{self.dims}d"

    def __str__(self) -> str:
        return (
            f"{'native ' if self.native else ''}{self.name} {self.channels}->{self.outputs or 'some'} "
            f"{self.sizes or SIZES[self.dims]} kernel {self.kernel} stride {self.stride} padding {self.padding} "
            f"{self.mode} output_padding {self.output_padding} dilation {self.dilation} groups {self.groups} "
            f"{self.dtype}{' TF32' if self.tf32 else ''} {self.content} "
            f"{'channels_last' if self.channels_last else 'contiguous'} splits {self.splits}"
        )

    def ours(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        call = getattr(pc.functional, self.name)
        if self.transposed:
            return call(
                x, w, b, self.stride, self.padding[0], self.output_padding, self.groups, self.dilation,
                splits=self.splits,
            )  # fmt: skip
        return call(
            x, w, b, self.stride, list(self.padding), self.dilation, self.groups,
            padding_mode=self.mode, splits=self.splits,
        )  # fmt: skip

    def stock(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        call = getattr(F, self.name)
        if self.transposed:
            return call(x, w, b, self.stride, self.padding[0], self.output_padding, self.groups, self.dilation)
        if self.mode == "zeros" and len(self.padding) == 1:
            return call(x, w, b, self.stride, self.padding[0], self.dilation, self.groups)
        pairs = self.padding if len(self.padding) > 1 else self.padding * (2 * self.dims)
        last_first = [n for d in reversed(range(self.dims)) for n in pairs[2 * d : 2 * d + 2]]
        padded = F.pad(x, last_first, mode="constant" if self.mode == "zeros" else self.mode)
        return call(padded, w, b, self.stride, 0, self.dilation, self.groups)

    def tensors(self) -> list[Tensor]:
        """Input, weight and bias on the CPU, in the type of the check."""
        generator = torch.Generator().manual_seed(7)
        channels, outputs = self.channels, self.outputs or (2 * CHANNELS if self.groups > 1 else 6)
        ends = (channels, outputs // self.groups) if self.transposed else (outputs, channels // self.groups)
        x = contents((BATCH, channels, *(self.sizes or SIZES[self.dims])), self.content, generator)
        w = torch.randn((*ends, *self.kernel), generator=generator) / 6
        b = torch.randn(outputs, generator=generator)
        return [t.to(self.dtype) for t in (x, w, b)]


def checks(few: bool = False) -> Iterator[Check]:
    """Every kind of argument in every type; layouts, contents and ways of splitting take turns."""
    turns = itertools.cycle(itertools.product(CONTENTS, (False, True), (3, None, 50, 1)))
    dtypes = (torch.float32, torch.float16) if few else tuple(UNIT)
    for dims, transposed in itertools.product((1, 2, 3), (False, True)):
        base = Check(dims, transposed, (3,) * dims)
        kinds = [
            base,
            replace(base, kernel=(1,) * (dims - 1) + (5,), padding=(0,)),
            replace(base, kernel=(2,) * dims, stride=2, padding=(0,)),
            replace(base, stride=2, groups=2),
            replace(base, groups=CHANNELS, dilation=2, padding=(2,)),
            replace(base, kernel=(1,) * dims, stride=3, padding=(0,)),
        ]
        if transposed:
            kinds += [replace(base, stride=2, output_padding=1), replace(base, stride=3, output_padding=2)]
        else:
            kinds += [replace(base, mode=mode, padding=(2,)) for mode in ("reflect", "replicate", "circular")]
            kinds += [
                replace(base, padding=tuple(range(2 * dims))),
                replace(base, kernel=(5,) * dims, padding=(4,)),
            ]
        for kind in kinds[:: 3 if few else 1]:
            for dtype in dtypes:
                for content, last, splits in itertools.islice(turns, 1 if few else 2):
                    yield replace(kind, dtype=dtype, content=content, channels_last=last, splits=splits)


def native_checks(few: bool = False) -> Iterator[Check]:
    """The project's own convolution kernels: every kind in every type, contents and layouts take turns."""
    turns = itertools.cycle(itertools.product(CONTENTS, (False, True)))
    types = correct_convs.TYPES[:: 2 if few else 1]
    for kind, (dtype, tf32) in itertools.product(correct_convs.KINDS[:: 3 if few else 1], types):
        for content, last in itertools.islice(turns, 1 if few else 3):  # 3 and 8 have no common divisor
            yield Check(**kind, dtype=dtype, tf32=tf32, content=content, channels_last=last, native=True)


def passes(call: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor | None) -> list[Tensor]:
    """[output, grad_input, grad_weight, grad_bias]. Without a gradient, that of ones."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    output = call(*leaves)
    ones = torch.ones_like(output) if grad is None else grad
    return [output.detach(), *torch.autograd.grad(output, leaves, ones)]


def excess(check: Check, device: str) -> tuple[float, str]:
    """The largest error in units of its bound, and what was wrong besides ("" if nothing)."""
    leaves = check.tensors()
    shape = check.stock(*(t.double() for t in leaves)).shape
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(11)).to(check.dtype)
    exact = passes(check.stock, [t.double() for t in leaves], grad.double())
    sizes = passes(check.stock, [t.double().abs() for t in leaves], grad.double().abs())

    there = [t.to(device) for t in leaves]
    if check.channels_last and check.dims > 1:
        last: Any = torch.channels_last if check.dims == 2 else torch.channels_last_3d
        there[0] = there[0].contiguous(memory_format=last)
    limit = contextlib.nullcontext() if check.splits or check.native else pc.workspace_limit(SMALL_LIMIT)
    kernels = correct_kernels.native(device) if check.native else contextlib.nullcontext()
    with correct_convs.allowed(check.tf32):
        with limit, kernels, pc.record_paths() as records:
            ours = passes(check.ours, there, grad.to(device))
        try:
            stock: list[Tensor] | None = passes(check.stock, there, grad.to(device))
        except RuntimeError:
            stock = None  # stock does not serve this type here: the bound is that of rounding alone

    wrong = correct_convs.not_native(records) if check.native and device == "cuda" else ""
    pieces = max((r["count"] for r in records if r["pass"] == "fprop"), default=0)
    if check.splits in (3, 50) and pieces < 2:
        wrong = f"asked for {check.splits} splits, computed in {pieces} tiles"
    worst = 0.0
    terms = max(BATCH * shape[2:].numel(), leaves[1].numel()) ** 0.5
    accumulator = UNIT[check.dtype if check.dtype == torch.float64 else torch.float32]
    for index, (got, wanted, size) in enumerate(zip(ours, exact, sizes, strict=True)):
        if got.shape != wanted.shape or got.dtype != check.dtype:
            return float("inf"), f"{RESULTS[index]}: {got.dtype} {tuple(got.shape)}"
        theirs = (stock[index].cpu().double() - wanted).abs().max() if stock else torch.zeros(())
        products = 2 * terms * accumulator + (correct_convs.TF32 if check.tf32 else 0.0)
        bound = 1.1 * theirs + UNIT[check.dtype] * wanted.abs() + products * size + 1e-300
        if check.dtype == torch.float16:
            bound = bound + 2.0**-25  # half a step between denormal numbers
        ratio = float(((got.cpu().double() - wanted).abs() / bound).nan_to_num(float("inf")).max())
        if ratio > 1 and not wrong:
            wrong = f"{RESULTS[index]}: error {ratio:.3g} times its bound"
        worst = max(worst, ratio)
    return worst, wrong


def probe_large(
    device: str, width: int = 8200, rows: int = 8192, channels: int = 33, splits: int | None = None
) -> tuple[float, str]:
    """A forward pass and an input gradient of over 2^31 elements (bfloat16), at telling rows."""
    generator = torch.Generator(device).manual_seed(3)
    x = torch.empty(1, channels, rows, width, dtype=torch.bfloat16, device=device)
    for channel in x[0]:
        channel.copy_(torch.randn(rows, width, device=device, generator=generator))
    w = (torch.randn(2, channels, 3, 3, device=device, generator=generator) / 17).bfloat16()
    worst = 0.0
    with torch.no_grad():
        # The forward pass reads the large tensor, the pass in which input and output change roles writes it.
        y = pc.functional.conv2d(x, w, None, 1, 1, splits=splits)
        back = pc.functional.conv_transpose2d(y, w, None, 1, 1, splits=splits)
        middle = 2**31 // width % rows  # the row in which the 2^31st element lies
        for top in (0, min(middle, rows - 4), rows - 4):
            band = slice(max(0, top - 1), min(rows, top + 5))
            pad = (1, 1, int(top == 0), int(top + 4 == rows))
            exact = F.conv2d(F.pad(x[:, :, band].double(), pad), w.double())
            exact_back = F.conv2d(F.pad(y[:, :, band].double(), pad), w.double().transpose(0, 1).flip(2, 3))
            for got, wanted in ((y, exact), (back, exact_back)):
                error = (got[:, :, top : top + 4].double() - wanted).abs()
                bound = UNIT[torch.bfloat16] * wanted.abs() + 1e-4
                worst = max(worst, float((error / bound).nan_to_num(float("inf")).max()))
    return worst, "" if worst <= 1 else f"above 2^31 elements: error {worst:.3g} times its bound"


def run(
    device: str, few: bool = False, budget: float = float("inf"), large: bool = False, only: str = "all"
) -> dict[str, Any]:
    """Runs the checks that fit into `budget` seconds; the result says how many that were."""
    # Comparisons are with float64: TensorFloat-32 would be an error of our own making.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted: list[tuple[str, Callable[[str], tuple[float, str]]]] = []
    if only in ("all", "kernels"):
        wanted += [("kernels, large", correct_kernels.probe_large), ("norms, large", correct_norms.probe_large)] * large
        wanted += itertools.chain(correct_kernels.checks(few), correct_norms.checks(few))
    if only in ("all", "kernels", "native"):
        wanted += correct_convs.fused_checks(few)
        wanted += [(str(check), partial(excess, check)) for check in native_checks(few)]
    if only in ("all", "convolutions"):
        wanted += [("large", probe_large)] * large
        wanted += [(str(check), partial(excess, check)) for check in checks(few)]
    start = time.perf_counter()
    report: dict[str, Any] = {"checked": 0, "of": len(wanted), "worst": 0.0, "failures": []}
    for name, check in wanted:
        if time.perf_counter() - start > budget:
            break
        try:
            worst, wrong = check(device)
        except RuntimeError as error:
            if "CUDA error" in str(error):
                raise  # nothing that this process computes from here on means anything
            worst, wrong = float("inf"), f"{type(error).__name__}: {str(error).splitlines()[0]}"
        report["checked"] += 1
        report["worst"] = max(report["worst"], worst if worst < float("inf") else 1e9)
        if wrong:
            report["failures"].append(f"{name}: {wrong}")
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--few", action="store_true", help="fewer kinds, two types: for slow memory checkers")
    parser.add_argument("--only", choices=("all", "convolutions", "kernels", "native"), default="all",
                        help="native: the convolution kernels, a part of kernels")  # fmt: skip
    arguments = parser.parse_args(argv)
    found = run(arguments.device, arguments.few, only=arguments.only)
    print(f"{found['checked']} checks of {found['of']}, largest error {found['worst']:.3f} of its bound")
    for failure in found["failures"]:
        print(failure)
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
