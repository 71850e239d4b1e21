"""Where the project's convolution kernels are faster than cuDNN in row strips on this GPU: `python -m bench.tune`.

Measures both over a grid of convolutions, derives the rules by which backend "auto" chooses (bench/tune_rules.py),
prints and writes them to patchconv_native/conv_rules.json, where other GPUs' entries stay, and the measurements
beside the other results. Both sides are called in turns, each behind a flushed level-2 cache; a ratio is of medians.
A point counts only if the project's kernel computed it, by the record of paths. cuDNN's benchmark mode is on. With
too little time (--budget) the less important classes are left out and named, and no rule takes them. Without a
GPU: one line, exit code 2.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native import conv_rules

from . import cases, measure, report, tune_rules
from .conv_rivals import under
from .gpu_measure import Timer, guarded
from .tune_rules import DTYPES, LAYOUTS, PASSES, Point

NO_GPU = "bench.tune: torch sees no CUDA device here; rules are measured on the GPU that they are for"
CUDNN, OWN = "auto", "native"  # backends; without rules, "auto" is cuDNN in row strips
ROUNDS = {"full": 7, "tiny": 1}
CHANNELS = (64, 128, 256, 32, 512, 16, 8, 4)  # the most important first
UNEQUAL = ((64, 256), (256, 64), (128, 512), (512, 128), (512, 256))
KERNELS = (("dense", 3), ("depthwise", 3), ("first layer", 7), ("dense", 1), ("first layer", 3), ("dense", 7),
           ("dense", 5), ("depthwise", 5), ("depthwise", 7))  # fmt: skip
KINDS = tuple(dict.fromkeys(kind for kind, _ in KERNELS))
SIZES = {"full": ((1, 1024), (32, 56), (1, 2048), (1, 512)), "tiny": ((2, 12),)}  # images, side of the output
MOST_FLOP = 3e13  # of a point at full size: 512 channels, 7x7, at 1024 squared


@dataclass(frozen=True)
class Shape:
    """A convolution and one of its passes."""

    pass_: str
    dtype: str
    layout: str
    groups: int
    sources: int  # a group
    outputs: int
    kernel: int
    stride: int
    images: int
    side: int  # of the output

    @property
    def flop(self) -> float:
        return 2.0 * self.point(None).places * self.groups * self.sources * self.outputs * self.kernel**2

    def __str__(self) -> str:
        ends = f"{self.groups} depthwise" if self.groups > 1 else f"{self.sources}->{self.outputs}"
        return (
            f"{self.pass_} {self.dtype} {self.layout} {ends} k{self.kernel} stride {self.stride}, "
            f"{self.images}x{self.side}x{self.side}"
        )

    def point(self, ratio: float | None) -> Point:
        return Point(self.pass_, self.dtype, self.layout, self.groups, self.sources, self.outputs, self.kernel**2,
                     self.stride, self.images * self.side**2, ratio)  # fmt: skip

    def _noise(self, channels: int, side: int, device: str) -> Tensor:
        x = torch.randn(self.images, channels, side, side, dtype=cases.TYPES[self.dtype], device=device)
        return x.contiguous(memory_format=cases.LAYOUTS[self.layout])

    def input(self, device: str) -> Tensor:
        return self._noise(self.groups * self.sources, self.side * self.stride, device)

    def gradient(self, device: str) -> Tensor:
        return self._noise(self.groups * self.outputs, self.side, device)

    def module(self, device: str) -> nn.Module:
        conv = nn.Conv2d(self.groups * self.sources, self.groups * self.outputs, self.kernel, self.stride,
                         self.kernel // 2, groups=self.groups, bias=False)  # fmt: skip
        return pc.convert(conv.to(device, cases.TYPES[self.dtype]).to(memory_format=cases.LAYOUTS[self.layout]))


def ends_of(kind: str, size: str) -> list[tuple[int, int, int]]:
    """(groups, sources, outputs) of a kind."""
    channels = CHANNELS if size == "full" else (4, 8)
    if kind == "depthwise":
        return [(c, 1, 1) for c in channels]
    if kind == "first layer":
        return [(1, 3, c) for c in ((64, 32, 128) if size == "full" else (4,))]
    return [(1, c, c) for c in channels] + [(1, *ends) for ends in (UNEQUAL if size == "full" else ())]


def grid(size: str, only: Collection[str] = KINDS) -> list[Shape]:
    """Class by class, the most important first: a class is of use as a whole only."""
    kinds = tuple(kind for kind in (KERNELS if size == "full" else KERNELS[:2]) if kind[0] in only)
    dtypes = DTYPES if size == "full" else ("bfloat16", "tf32")
    axes: tuple[tuple[Any, ...], ...] = (dtypes, kinds, (1, 2), LAYOUTS, PASSES)
    classes = list(itertools.product(*axes))

    def rank(found: tuple[Any, ...]) -> int:
        return sum(axis.index(value) for axis, value in zip(axes, found, strict=True))

    shapes = []
    for dtype, (kind, kernel), stride, layout, pass_ in sorted(classes, key=rank):
        for (groups, sources, outputs), (images, side) in itertools.product(ends_of(kind, size), SIZES[size]):
            shape = Shape(pass_, dtype, layout, groups, sources, outputs, kernel, stride, images, side)
            if shape.flop <= MOST_FLOP:
                shapes.append(shape)
    return shapes


def calls_of(shape: Shape, device: str) -> dict[str, Callable[[], Any]]:
    """The same pass by both."""
    module, x = shape.module(device), shape.input(device)
    gradient = shape.gradient(device) if shape.pass_ != "fprop" else x

    def made(backend: str) -> Callable[[], Any]:
        with cases.backend(backend, device):
            call = cases.prepare_with(module, x, lambda: gradient, shape.pass_)
        return under(backend, call, device)

    return {side: made(side) for side in (CUDNN, OWN)}


def own_kernel_ran(call: Callable[[], Any], pass_: str) -> bool:
    with pc.record_paths() as records:
        call()
    return any(record["pass"] == pass_ and record["path"] == "native" for record in records)


def _who(call: Callable[[], Any], pass_: str) -> dict[str, Any]:
    return {"own": own_kernel_ran(call, pass_)}


def first_calls(calls: dict[str, Callable[[], Any]], pass_: str, device: str) -> dict[str, str]:
    """What keeps a side from being timed."""
    wrong = {}
    for side, call in calls.items():
        found = guarded(partial(_who, call, pass_), device, tidy=False)
        if "error" in found:
            wrong[side] = found["error"]
        elif found["own"] != (side == OWN):
            wrong[side] = "computed by cuDNN" if side == OWN else "computed by the project's kernel"
    return wrong


def measured(shape: Shape, device: str, timer: Timer, rounds: int) -> dict[str, Any]:
    """Medians of both sides in turns, and their ratio; or who won without a time, and why."""
    torch.backends.cudnn.allow_tf32 = shape.dtype == "tf32"
    calls = calls_of(shape, device)
    wrong = first_calls(calls, shape.pass_, device)
    if wrong:
        refused = "; ".join(f"{side}: {why}" for side, why in wrong.items())
        if set(wrong.values()) == {"OOM"} and len(wrong) == 2:
            return {"error": "OOM"}
        return {"refused": refused, "won": wrong == {CUDNN: "OOM"}}  # where cuDNN alone lacks memory
    for call in calls.values():
        call()  # cuDNN has tried its algorithms by now
    taken: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(rounds):
        for side, call in calls.items():
            taken[side].append(timer.once(call))
    ms = {side: statistics.median(times) for side, times in taken.items()}
    return {"ms": {side: round(value, 5) for side, value in ms.items()}, "ratio": round(ms[CUDNN] / ms[OWN], 4)}


def measure_all(shapes: list[Shape], device: str, rounds: int, left: Callable[[], float]) -> list[dict[str, Any]]:
    """A row per shape: empty where there was no time, "error" where neither side can compute it."""
    timer = Timer(device)
    rows = []
    for shape in shapes:
        row: dict[str, Any] = {}
        if left() > 0:
            row = guarded(partial(measured, shape, device, timer, rounds), device, tidy=False)
            print(line(shape, row), flush=True)
        rows.append(asdict(shape) | row)
    return rows


def line(shape: Shape, row: dict[str, Any]) -> str:
    if "ms" in row:
        return f"{shape!s:<72} cuDNN {row['ms'][CUDNN]:9.3f} ms  own {row['ms'][OWN]:9.3f} ms  {row['ratio']:.2f}"
    return f"{shape!s:<72} {row.get('error') or row['refused']}"


def ratio_of(row: dict[str, Any]) -> float | None:
    """cuDNN's time in units of ours; an error other than a lack of memory is a loss."""
    if "error" in row:
        return 0.0
    if "won" in row:
        return math.inf if row["won"] else 0.0
    return row.get("ratio")


def points_of(shapes: list[Shape], rows: list[dict[str, Any]]) -> list[Point]:
    """What the rules are derived from. What neither side had the memory for says nothing."""
    pairs = zip(shapes, rows, strict=True)
    return [shape.point(ratio_of(row)) for shape, row in pairs if row.get("error") != "OOM"]


def unmeasured(shapes: list[Shape], rows: list[dict[str, Any]]) -> Iterator[str]:
    """Classes that there was no time for, with the number of their points."""
    counts: dict[tuple[Any, ...], list[bool]] = {}
    for shape, row in zip(shapes, rows, strict=True):
        counts.setdefault(shape.point(None).of_class, []).append(ratio_of(row) is None)
    for (pass_, dtype, layout, kind, taps, stride), missed in counts.items():
        if any(missed):
            yield f"{pass_} {dtype} {layout} {kind} {taps} taps stride {stride}: {sum(missed)} of {len(missed)} points"


def write(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Replaces one architecture's entry; the rest of the file stays. A rule is a line."""
    found = conv_rules.read(path) | {name: entry}
    text = json.dumps(found, indent=1)
    text = re.sub(r"\n\s+(?=[-\d\]]|null)", " ", text)  # ranges
    text = re.sub(r"\{\n\s+\"native\"", '{"native"', text)
    text = re.sub(r"\n {5}(?=\")|\n {4}(?=\})", " ", text)
    draft = path.with_suffix(".json.part")
    draft.write_text(text + "\n")
    if json.loads(draft.read_text()) != found:
        raise AssertionError(f"{draft} does not hold what was to be written")
    draft.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__, sizes=("full", "tiny"))
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds (default: %(default).0f)")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="no rule takes the other kinds")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, write nothing")
    parser.add_argument("--rules", type=Path, default=conv_rules.PATH, help="the file (default: the package's)")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_properties(0)
    name = f"sm_{gpu.major}{gpu.minor}"
    torch.backends.cudnn.benchmark = True
    conv_rules.remove(name)  # so that "auto" is cuDNN
    end = time.perf_counter() + arguments.budget
    shapes = grid(arguments.size, arguments.only)
    rows = measure_all(shapes, "cuda", ROUNDS[arguments.size], lambda: end - time.perf_counter())
    rules = tune_rules.derive(points_of(shapes, rows))
    entry = {"device": gpu.name, "date": datetime.date.today().isoformat(), "torch": torch.__version__,
             "cudnn": torch.backends.cudnn.version(), "rules": rules}  # fmt: skip
    missing = list(unmeasured(shapes, rows))
    data = measure.report_head("tune", arguments.size, "cuda") | {"rows": rows, "rules": rules, "missing": missing}
    print(report.markdown(data))
    if arguments.dry_run:
        return 0
    if arguments.size == "full":
        write(arguments.rules, name, entry)
        print(f"written: {arguments.rules}")
    device = re.sub(r"[^A-Za-z0-9]+", "-", gpu.name).strip("-").lower()
    print(*report.store(data, arguments, f"tune-{device}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
