"""Kernels on the CPU: builds tests/host_cuda and runs lists of cases through it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

import bench.kernels
import bench.ptx

ROOT = Path(__file__).resolve().parents[2]
TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16", torch.float64: "double"}


def built(build: Path, *options: str, target: str = "all") -> Path:
    """The folder, in which CMake has built tests/host_cuda: what changed since the last time is compiled again."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    build.mkdir(parents=True, exist_ok=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    with FileLock(build / ".lock"):
        for command in (
            ["cmake", "-S", ROOT / "tests" / "host_cuda", "-B", build, *generator, *options],
            ["cmake", "--build", build, "--target", target, "--parallel", os.cpu_count() or 1],
        ):
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return build


HOW = os.environ.get("PATCHCONV_HOST_CUDA", "")
"""Which program runs the kernels: "" the one with sanitizers; "races" or "races at-once" the one that finds races, in
which asynchronous copies arrive when they are waited for, or at once; "ptx" or "ptx at-once" runs what nvcc writes.
"""


@lru_cache(None)
def program(races: bool = False) -> Path:
    """The program, built once."""
    if races:
        return built(ROOT / "build" / "host_races", target="host_races") / "host_races"
    return built(ROOT / "build" / "host_cuda") / "host_cuda"


# The files whose kernels a call runs, where they are not one file of its name.
SOURCES = {
    "mask_forward": "activation", "mask_backward": "activation", "layer_norm": "norm_layer",
    "layer_norm_backward": "norm_layer", "norm_backward": "norm_backward norm_sums", "avg_pool": "pool_avg",
    "avg_pool_backward": "pool_avg", "max_pool": "pool_max", "max_pool_take": "pool_max",
    "max_pool_backward": "pool_max", "conv_tiles": "conv_tiles conv_pack",
    "conv_depthwise": "conv_depthwise conv_depthwise_weight",
}  # fmt: skip


def ptx(calls: Sequence[Call]) -> Path:
    """The folder with the PTX of the kernels that these calls run."""
    for kernel in {"selftest" if call.kernel.startswith("selftest") else call.kernel for call in calls}:
        for stem in SOURCES.get(kernel, kernel).split():
            _compiled(stem)
    return bench.ptx.FOLDER


@lru_cache(None)
def _compiled(stem: str) -> None:
    toolkit, reason = bench.kernels.toolkit_of_torch()
    if toolkit is None:
        pytest.skip(reason)
    folder = bench.ptx.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        source = ROOT / "csrc" / "cuda" / "kernels" / f"{stem}.cu"
        if stem == "selftest":  # apart from the arch.cuh that lies beside it
            source = folder / "selftest.cpp"
            for name in (source.name, "selftest.h"):
                shutil.copy(ROOT / "tests" / "host_cuda" / name, folder)
        bench.ptx.compiled(toolkit, source)


def with_kernel(source: str, text: str, folder: Path) -> Path:
    """The program that finds races, with `text` in place of this file of csrc/cuda/kernels."""
    build = program(races=True).parent
    commands = json.loads((build / "compile_commands.json").read_text())
    of_source = [e for e in commands if e["file"].endswith(f"/kernels/{source}")]
    (entry,) = [e for e in of_source if "kernels_seen.dir" in e["command"]]
    mine, compiled = folder / source, folder / "kernel.o"
    mine.write_text(text)
    words = shlex.split(entry["command"])
    replaced = build / words[words.index("-o") + 1]
    words[words.index("-o") + 1], words[words.index(entry["file"])] = str(compiled), str(mine)
    objects = [str(path) for path in build.rglob("*.o") if path != replaced]
    objects = [path for path in objects if re.search(r"/(kernels_seen|host_races|ptx)\.dir/", path)]
    found = folder / "host_races"
    for command in (words, ["c++", *objects, str(compiled), "-o", str(found)]):
        done = subprocess.run(command, capture_output=True, text=True, cwd=entry["directory"])
        assert done.returncode == 0, done.stderr
    return found


class Fault(AssertionError):
    """What the executor or a sanitizer found."""


@dataclass
class Memory:
    """A buffer: a tensor's elements in the order they lie in, at an address this many bytes off an aligned one. With
    `elements`, the end of one that is larger.
    """

    values: Tensor | None
    off: int = 0
    elements: int | None = None

    def words(self) -> str:
        if self.values is None:
            return "-1 0 0"
        whole = self.values.nbytes if self.elements is None else self.elements * self.values.element_size()
        return f"{whole} {self.off} {self.values.nbytes}"


def off(dtype: torch.dtype, i: int) -> int:
    """Every third buffer lies one element off."""
    return dtype.itemsize if i % 3 == 1 else 0


@dataclass
class Call:
    kernel: str
    dtype: torch.dtype
    numbers: Sequence[float]
    buffers: Sequence[Memory]
    last_blocks: int = 0

    def line(self) -> str:
        words = [self.kernel, TYPES[self.dtype], self.last_blocks, len(self.numbers), *map(repr, self.numbers)]
        return " ".join([*map(str, words), str(len(self.buffers)), *(memory.words() for memory in self.buffers)])


def run(
    calls: Sequence[Call],
    how: str | None = None,
    by: Path | None = None,
    shared: int = 99,
    counts: Path | None = None,
) -> list[list[Tensor | None]]:
    """What each call's buffers hold afterwards. Fails on any error that the sanitizers or the executor see. how: as
    HOW, which it is if it is None. by: the program, if it is another one. shared: the shared memory that a block may
    have, in KiB. counts: what was executed is written there, by PTX.
    """
    how = HOW if how is None else how
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "cases.txt").write_text("".join(call.line() + "\n" for call in calls))
        with open(place / "data", "wb") as data:
            for call in calls:
                for memory in call.buffers:
                    if memory.values is not None:
                        data.write(_bytes(memory.values))
        kind, *more = how.split() or [""]
        options = [f"ptx={ptx(calls)}"] if kind == "ptx" else []
        command = [str(by or program(kind == "races")), folder, *options, *more, str(shared)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Fault(done.stderr)
        if kind == "ptx":
            counted = (place / "counts").read_text()
            bench.ptx.note_ran([block.partition("\n")[0] for block in counted.split("\n\n") if block.strip()])
            if counts is not None:
                counts.write_text(counted)
        result = memoryview((place / "result").read_bytes())
    found: list[list[Tensor | None]] = []
    for call in calls:
        found.append([])
        for memory in call.buffers:
            if memory.values is None:
                found[-1].append(None)
                continue
            size = memory.values.nbytes
            raw = torch.frombuffer(bytearray(result[:size]) or bytearray(1), dtype=torch.uint8)[:size]
            found[-1].append(raw.view(memory.values.dtype).view(memory.values.shape))
            result = result[size:]
    assert not len(result)
    return found


def _bytes(values: Tensor) -> bytes:
    return bytes(values.contiguous().flatten().view(torch.uint8).numpy().tobytes())
