"""Compiles every CUDA kernel for every architecture and holds it to its budget: `python -m bench.kernels [--all]`.

No GPU is needed, only the toolkit that setup.py finds. Each .cu under csrc/cuda/kernels that csrc/sources.txt lists
becomes one cubin per architecture, in parallel. What ptxas reports of each kernel, and the loads and stores of local
memory in its machine code, are compared with the comment above the kernel, in its .cu or in a header that this
includes:

    // Budget: 64 registers, 0 bytes of shared memory.
    template <typename T>
    __global__ void some_kernel(...)

The budget is for the worst instance on the worst architecture. Its shared memory is what the kernel declares plus what
its launch asks for. The launch is not seen here: only what is declared is checked, and that a kernel with a budget of 0
uses none. `, tensor cores` follows where a kernel multiplies by them. Errors: a kernel without a budget or that is
never compiled, more than the budget, registers far below it (so that budgets stay true), spills, a stack frame, local
memory, tensor cores that are not used, or used and not in the budget. Exit code 1 for any of these, 2 without a
toolkit. Results are cached in build/kernels by a hash of sources, flags and compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from .measure import ROOT

if TYPE_CHECKING:
    from patchconv_native._cuda_toolkit import Toolkit, find_toolkit
else:  # by its path: importing the package would load the library, which no kernel needs
    finder = runpy.run_path(str(ROOT / "patchconv_native" / "_cuda_toolkit.py"))
    Toolkit, find_toolkit = finder["Toolkit"], finder["find_toolkit"]

ARCHS = ("sm_80", "sm_90a", "sm_120")
FLAGS = ("-cubin", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v")
OLDEST = (12, 8)  # the first toolkit that knows sm_120
CACHE = ROOT / "build" / "kernels"
SLACK = 16  # registers that a budget may lie above the use


class Failed(RuntimeError):
    """A tool did not do what it should: nothing is known of the kernels."""


@dataclass(frozen=True)
class Budget:
    registers: int
    shared: int
    matrices: bool = False  # tensor cores multiply


@dataclass(frozen=True)
class Use:
    """What one function of a cubin takes. One that kernels call, not inlined, is no kernel itself but may spill too."""

    function: str  # as the linker knows it
    arch: str
    kernel: bool = True
    registers: int = 0
    shared: int = 0  # bytes, as the rest
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    local: int = 0
    accesses: int = 0  # instructions that load from local memory or store to it
    shares: bool | None = None  # uses shared memory, declared or given by the launch; None: not known
    matrices: bool | None = None  # has instructions of tensor cores

    @property
    def name(self) -> str:
        return readable(self.function)[0]

    @property
    def arguments(self) -> str:
        return readable(self.function)[1]

    @property
    def where(self) -> str:
        return f"{self.name}{f'<{self.arguments}>' if self.arguments else ''} on {self.arch}"


# ----------------------------------------------------------------------------------------------------------------------
# Names


@functools.cache
def readable(function: str) -> tuple[str, str]:
    """Name and template arguments of a function, without the namespaces that all of them share."""
    text = re.sub(r"\bpatchconv::|\bkernels::|\(anonymous namespace\)::", "", _demangled(function))
    before = re.split(r"[<(]", text, maxsplit=1)[0]  # the result's type, of templates, and the name
    name, rest, depth = before.split(" ")[-1], text[len(before) :], 0
    for place, letter in enumerate(rest):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if depth == 0:
            return name, rest[1:place]
    return name, ""


def _demangled(function: str) -> str:
    """By the C++ runtime, which is there wherever torch is."""
    runtime, status = ctypes.CDLL("libstdc++.so.6"), ctypes.c_int()
    demangle = runtime.__cxa_demangle
    demangle.restype = ctypes.c_void_p
    text = demangle(function.encode(), None, None, ctypes.byref(status))
    if not text:
        return function  # extern "C": the name itself
    result = ctypes.string_at(text).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Sources and their budgets

_KERNEL = re.compile(
    r"^(?P<comment>(?://[^\n]*\n)*)"
    r"(?:template\b[^;{}]*?)?__global__\s+"
    r"(?:(?:void|static|__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\))\s+)*"
    r"(?P<name>\w+)\s*\(",
    re.MULTILINE,
)
_BUDGET = re.compile(r"^// Budget: (\d+) registers, (\d+) bytes of shared memory(, tensor cores)?\.$")


def listed() -> list[Path]:
    """The files of kernels that a build compiles."""
    lines = (ROOT / "csrc" / "sources.txt").read_text().splitlines()
    names = [line.split("#")[0].strip() for line in lines]
    return [ROOT / name for name in names if name.startswith("csrc/cuda/kernels/") and name.endswith(".cu")]


def with_headers(source: Path) -> list[Path]:
    """A file and the headers of this project that it includes, each once."""
    found = [source]
    for path in found:
        names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
        headers = [ROOT / "csrc" / name for name in names]
        found += [header for header in dict.fromkeys(headers) if header not in found and header.is_file()]
    return found


def budgets(path: Path) -> dict[str, Budget | None]:
    """The budget of every kernel that a file defines, None where it has none."""
    text = path.read_text()
    result: dict[str, Budget | None] = {}
    for kernel in _KERNEL.finditer(text):
        above = _BUDGET.match((kernel["comment"].splitlines() or [""])[-1])
        result[kernel["name"]] = Budget(int(above[1]), int(above[2]), bool(above[3])) if above else None
    meant, understood = len(re.findall(r"//\s*budget\b", text, re.IGNORECASE)), len(list(filter(None, result.values())))
    if meant != understood:
        form = "// Budget: 64 registers, 0 bytes of shared memory."
        raise Failed(f"{path}: {meant - understood} of {meant} budgets do not read `{form}` right above a kernel")
    return result


# ----------------------------------------------------------------------------------------------------------------------
# What the compiler says

_STACK = re.compile(r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def parse(text: str, arch: str) -> list[Use]:
    """The functions of a cubin from what `ptxas -v` prints. Raises where it leaves out what is looked for."""
    found: dict[str, dict[str, Any]] = {}
    kernel = function = ""
    for line in text.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            kernel = entry[1]
            if entry[2] != arch:
                raise Failed(f"ptxas compiled {kernel} for {entry[2]}, not for {arch}")
            found.setdefault(kernel, {})["kernel"] = True
        elif properties := re.search(r"Function properties for (\S+)", line):
            function = properties[1]
        elif stack := _STACK.match(line):
            numbers = zip(("stack", "spill_stores", "spill_loads"), map(int, stack.groups()), strict=True)
            found.setdefault(function, {"kernel": False}).update(numbers)
        elif used := re.search(r"Used (\d+) registers", line):
            facts = found.setdefault(kernel, {"kernel": False})
            facts["registers"] = int(used[1])
            for key, unit in (("shared", "smem"), ("local", "lmem")):
                size = re.search(rf"(\d+)(?:\+(\d+))? bytes {unit}", line)
                facts[key] = sum(int(n) for n in size.groups() if n) if size else 0
    for name, facts in found.items():
        if "stack" not in facts or (facts["kernel"] and "registers" not in facts):
            raise Failed(f"ptxas -v does not say what {name} takes on {arch}: {text[:1000]}")
    return [Use(name, arch, **facts) for name, facts in found.items()]


_ACCESSES = {
    "local": re.compile(r"\b(?:LDL|STL)\b"),
    "shared": re.compile(r"\b(?:LDS|STS|ATOMS|LDSM|STSM|LDGSTS|UBLKCP|UTMALDG)\b"),
    "matrices": re.compile(r"\bH(?:G)?MMA\b"),
}


def accesses(sass: str) -> dict[str, Counter[str]]:
    """Instructions of each function that touch local or shared memory, from what nvdisasm prints."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    function = ""
    for line in sass.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([^,\s]+)", line):
            function = section[1]
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            found[function].update(memory for memory, word in _ACCESSES.items() if word.search(line))
    return found


def disassembler(toolkit: Toolkit) -> Path | None:
    """An nvdisasm no older than the toolkit: of the toolkit, on PATH, or in the triton that torch brings."""
    triton = importlib.util.find_spec("triton")
    roots = list(triton.submodule_search_locations or []) if triton else []
    places = [toolkit.home / "bin" / "nvdisasm", shutil.which("nvdisasm")]
    places += [Path(root) / "backends" / "nvidia" / "bin" / "nvdisasm" for root in roots]
    for place in places:
        if place is not None and Path(place).is_file():
            release = re.search(r"release (\d+)\.(\d+)", run_tool([str(place), "--version"]))
            if release and (int(release[1]), int(release[2])) >= toolkit.version:
                return Path(place)
    return None


def run_tool(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}\nended with code {done.returncode}:\n{done.stdout.strip()}")
    return done.stdout


class Compiler:
    """nvcc with the flags above. Its results are cached."""

    def __init__(self, toolkit: Toolkit) -> None:
        if toolkit.version < OLDEST:
            raise Failed(f"CUDA {'.'.join(map(str, OLDEST))} or later is needed for sm_120, {toolkit.home} is older")
        self._nvcc = str(toolkit.home / "bin" / "nvcc")
        self._version = run_tool([self._nvcc, "--version"])
        self.disassembler = disassembler(toolkit)

    def uses(self, source: Path, arch: str) -> list[Use]:
        command = [self._nvcc, *FLAGS, f"-arch={arch}", f"-I{ROOT / 'csrc'}", str(source)]
        parts = [" ".join(command), self._version, str(self.disassembler is None), Path(__file__).read_text()]
        parts += [path.read_text() for path in with_headers(source)]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        cached = CACHE / f"{source.stem}.{arch}.{key}.json"
        if cached.is_file():
            return [Use(**facts) for facts in json.loads(cached.read_text())]
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            cubin = Path(folder) / "kernels.cubin"
            found = parse(run_tool([*command, "-o", str(cubin)]), arch)
            if self.disassembler is not None and found:
                seen = accesses(run_tool([str(self.disassembler), "-c", str(cubin)]))
                known = {use.function for use in found}
                found += [Use(function, arch, kernel=False) for function in seen if function not in known]
                found = [
                    replace(
                        use,
                        accesses=seen[use.function]["local"],
                        shares=seen[use.function]["shared"] > 0,
                        matrices=seen[use.function]["matrices"] > 0,
                    )
                    for use in found
                ]
            draft = Path(folder) / "uses.json"
            draft.write_text(json.dumps([asdict(use) for use in found]))
            draft.replace(cached)
        return found

    def all_uses(self, sources: Sequence[Path]) -> dict[Path, list[Use]]:
        """Of every source on every architecture, as many at once as there are cores."""
        # A file that does not say __global__ anywhere has no kernel.
        work = [s for s in sources if any("__global__" in path.read_text() for path in with_headers(s))]
        pairs = [(source, arch) for source in work for arch in ARCHS]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = list(pool.map(lambda pair: self.uses(*pair), pairs))
        result: dict[Path, list[Use]] = {}
        for (source, _), uses in zip(pairs, done, strict=True):
            result.setdefault(source, []).extend(uses)
        return result


# ----------------------------------------------------------------------------------------------------------------------
# The judgement


def offences(source: Path, uses: Sequence[Use], limits: dict[str, Budget | None]) -> list[str]:
    """One line for everything in a file's kernels that must not be."""
    found = []
    for use in uses:
        for size, what in (
            (use.spill_stores + use.spill_loads, f"spills {use.spill_stores} bytes and loads {use.spill_loads} back"),
            (use.stack, f"has a stack frame of {use.stack} bytes"),
            (use.local, f"takes {use.local} bytes of local memory"),
            (use.accesses, f"loads from local memory or stores to it in {use.accesses} instructions"),
        ):
            if size:
                found.append(f"{use.where} {what}")
    by_name: dict[str, list[Use]] = {}
    for use in uses:
        if use.kernel:
            by_name.setdefault(use.name, []).append(use)
    for name, instances in by_name.items():
        most, shared = (max(getattr(use, of) for use in instances) for of in ("registers", "shared"))
        budget = limits.get(name)
        if budget is None:
            cores = ", tensor cores" if any(use.matrices for use in instances) else ""
            line = f"// Budget: {-(-most // 8) * 8} registers, {shared} bytes of shared memory{cores}."
            found.append(f"{name} has no budget; right above it should stand: {line}")
            continue
        for use in instances:
            if use.registers > budget.registers:
                found.append(f"{use.where} takes {use.registers} registers, its budget is {budget.registers}")
            if use.matrices is not None and use.matrices != budget.matrices:
                found.append(
                    f"{use.where} has {'' if use.matrices else 'no '}instructions of tensor cores, unlike its budget"
                )
            if use.shared > budget.shared:
                found.append(f"{use.where} takes {use.shared} bytes of shared memory, its budget is {budget.shared}")
        if budget.registers > most + SLACK:
            found.append(f"{name} has a budget of {budget.registers} registers and takes {most} at most: lower it")
        shares = [use.shares for use in instances]
        if None not in shares and (budget.shared > 0) != any(shares):
            uses_it = "no" if budget.shared else "some"
            found.append(f"{name} has a budget of {budget.shared} bytes of shared memory and uses {uses_it}")
    return [f"{source.name}: {text}" for text in found]


def table(found: dict[Path, list[Use]], limits: dict[Path, dict[str, Budget | None]], each: bool) -> Table:
    """One line a kernel, with the worst of its instances on every architecture; or one line an instance."""
    result = Table(title="Registers of every kernel" + ("" if each else ", of its worst instance"))
    for head in ("file", "kernel", "template arguments"):
        result.add_column(head)
    for head in (*ARCHS, "budget", "shared", "declared", "spilled", "local", "LDL, STL"):
        result.add_column(head, justify="right")
    for source, uses in found.items():
        groups: dict[tuple[str, str], list[Use]] = {}
        for use in uses:
            if use.kernel:
                groups.setdefault((use.name, use.arguments if each else ""), []).append(use)
        for (name, _), members in sorted(groups.items()):
            worst = max(members, key=lambda use: use.registers)
            count = len({use.arguments for use in members})
            budget = limits[source].get(name)
            most = [max((use.registers for use in members if use.arch == arch), default=None) for arch in ARCHS]
            numbers = [
                *most, budget and budget.registers, budget and budget.shared, max(use.shared for use in members),
                max(use.spill_stores + use.spill_loads for use in members),
                max(max(use.stack, use.local) for use in members), max(use.accesses for use in members),
            ]  # fmt: skip
            cells = ["none" if number is None else str(number) for number in numbers]
            result.add_row(source.name, name, worst.arguments + (f" (of {count})" if count > 1 else ""), *cells)
        result.add_section()
    return result


def check(compiler: Compiler, sources: Sequence[Path], each: bool = False) -> tuple[Table, list[str]]:
    """The table of the sources' kernels, and everything that is wrong with them."""
    found = compiler.all_uses(sources)
    defined = {path: budgets(path) for path in dict.fromkeys(p for source in found for p in with_headers(source))}
    limits = {source: {k: v for path in with_headers(source) for k, v in defined[path].items()} for source in found}
    wrong = [line for source, uses in found.items() for line in offences(source, uses, limits[source])]
    for path, kernels in defined.items():
        compiled = {use.name for source, uses in found.items() if path in with_headers(source) for use in uses}
        wrong += [f"{path.name}: {name} is never compiled" for name in kernels if name not in compiled]
    return table(found, limits, each), wrong


def toolkit_of_torch() -> tuple[Toolkit | None, str]:
    """The toolkit that a build would take, or why there is none."""
    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is not a CUDA build"
    major = int(torch.version.cuda.split(".")[0])
    toolkit, rejected = find_toolkit(major)
    return toolkit, f"no CUDA {major} toolkit with nvcc was found: {'; '.join(rejected)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="every instance of every kernel, not the worst alone")
    arguments = parser.parse_args(argv)
    toolkit, reason = toolkit_of_torch()
    if toolkit is None:
        print(f"bench.kernels: {reason}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    try:
        compiler = Compiler(toolkit)
        shown, wrong = check(compiler, listed(), arguments.all)
    except Failed as error:
        print(f"bench.kernels: {error}", file=sys.stderr)
        return 1
    Console(width=None if sys.stdout.isatty() else 200).print(shown)
    read = "machine code read" if compiler.disassembler else "no nvdisasm as new as the toolkit: machine code not read"
    release = ".".join(map(str, toolkit.version))
    print(f"CUDA {release}, {read}; {time.perf_counter() - start:.0f} s. {len(wrong) or 'No'} offences.")
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
