"""Every CUDA kernel keeps its budget of registers and shared memory and spills nothing; and what looks after that
notices where one does not. Needs the CUDA toolkit, no GPU."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.pairs import FULL, only_full
from support.seeds import SWEEP_SEED

from bench import kernels
from bench.kernels import Budget, Toolkit, Use

SPACE = "_ZN9patchconv7kernels39_GLOBAL__N__2a07bc25_7_mask_cu_d15a6f32"
MASK = f"{SPACE}20mask_backward_kernelINS0_8BFloat16EEEvNS0_12MaskBackwardEb"
SPILLING = f"{SPACE}15spilling_kernelIfEEvPKT_PS3_"

# What ptxas of CUDA 13.0 printed.
FINE = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{MASK}' for 'sm_80'
ptxas info    : Function properties for {MASK}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 54 registers, used 0 barriers, 393 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 62.310 ms
ptxas info    : Compiling entry function '_Z12table_kernelILi256EEvPKiPf' for 'sm_80'
ptxas info    : Function properties for _Z12table_kernelILi256EEvPKiPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 1024 bytes smem, 368 bytes cmem[0]
ptxas info    : Compile time = 3.709 ms
"""
SPILLS = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{SPILLING}' for 'sm_80'
ptxas info    : Function properties for {SPILLING}
    344 bytes stack frame, 376 bytes spill stores, 380 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 344 bytes cumulative stack size, 368 bytes cmem[0]
ptxas info    : Compile time = 19.646 ms
"""
CALLS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5callsPfi' for 'sm_120'
ptxas info    : Function properties for _Z5callsPfi
    128 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers, 128 bytes cumulative stack size
ptxas info    : Compile time = 10.304 ms
ptxas info    : Function properties for _Z6calledILi3EEfPfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
SASS = f"""\
	.section	.text.{MASK},"ax",@progbits
.text.{MASK}:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0560*/                   LDG.E.128 R12, desc[UR4][R4.64] ;
        /*0570*/                   STS.128 [R7], R12 ;
	.section	.text._Z5callsPfi,"ax",@progbits
        /*0560*/                   STL [R15], R14 ;
        /*0630*/              @!P0 LDL.64 R4, [R4] ;
        /*0640*/                   BRA `(.L_x_LDL) ;
"""


@pytest.fixture
def toolkit() -> Toolkit:
    found, reason = kernels.toolkit_of_torch()
    if found is None:
        if os.environ.get("PATCHCONV_CUDA") == "1":
            pytest.fail(f"PATCHCONV_CUDA=1, but {reason}")
        pytest.skip(reason)
    return found


@pytest.fixture
def checked(toolkit: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[str]]:
    """Compiles a source of this name and text, for a cache of its own, and gives what is wrong with its kernels."""
    monkeypatch.setattr(kernels, "CACHE", tmp_path / "cache")

    def check(name: str, text: str) -> list[str]:
        (tmp_path / name).write_text(text)
        return kernels.check(kernels.Compiler(toolkit), [tmp_path / name])[1]

    return check


@only_full
@pytest.mark.timeout(1800)
def test_every_kernel_keeps_its_budget(toolkit: Toolkit) -> None:
    command = [sys.executable, "-m", "bench.kernels"]
    done = subprocess.run(command, cwd=kernels.ROOT, text=True, capture_output=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    for source in kernels.listed():
        for name in kernels.budgets(source):
            assert f" {name} " in done.stdout
    assert "mask_forward_kernel" in done.stdout and "No offences." in done.stdout


def test_some_kernels_keep_their_budget(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the oldest architecture; other files every day. nvcc takes minutes for all of them."""
    monkeypatch.setattr(kernels, "ARCHS", kernels.ARCHS[:1])
    some = random.Random(SWEEP_SEED).sample(kernels.listed(), 2)
    _, wrong = kernels.check(kernels.Compiler(toolkit), some)
    # A budget is that of the architecture that takes most.
    assert [line for line in wrong if not line.endswith(": lower it")] == []


# What the readable names of arch.cuh become, in the kernels that the CPU executor is tested with.
INSTRUCTIONS = {
    "HMMA.16816.F32", "HMMA.16816.F32.BF16", "HMMA.1688.F32.TF32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS",
    "VOTE",
}  # fmt: skip


@pytest.mark.parametrize("arch", kernels.ARCHS if FULL else kernels.ARCHS[:1])
def test_instructions_of_the_tensor_cores(toolkit: Toolkit, tmp_path: Path, arch: str) -> None:
    """The kernels of tests/host_cuda/selftest.cpp compile for GPUs as well, to the instructions that they name."""
    if (tool := kernels.disassembler(toolkit)) is None:
        pytest.skip("no nvdisasm as new as the toolkit")
    for name in ("selftest.cpp", "selftest.h"):  # apart from the arch.cuh that lies beside them
        shutil.copy(kernels.ROOT / "tests" / "host_cuda" / name, tmp_path)
    cubin = tmp_path / "selftest.cubin"
    tools = [str(toolkit.home / "bin" / "nvcc"), "-x", "cu", f"-arch={arch}", f"-I{kernels.ROOT / 'csrc'}"]
    command = [*tools, *kernels.FLAGS, str(tmp_path / "selftest.cpp"), "-o", str(cubin)]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    sass = subprocess.run([str(tool), "-c", str(cubin)], text=True, capture_output=True, check=True).stdout
    missing = {word for word in INSTRUCTIONS if not re.search(rf"\b{re.escape(word)}\b", sass)}
    assert not missing


LOCAL = """\
// Budget: 8 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(256, (1 + 1))
    table_kernel(const int* at, T* y) {
  T table[64];
  for (int i = 0; i < 64; ++i) table[i] = y[i];
  for (int i = 0; i < 64; ++i) table[at[i]] += table[at[i + threadIdx.x]];
  for (int i = 0; i < 64; ++i) y[i] = table[i];
}
template __global__ void table_kernel<float>(const int*, float*);

__global__ void plain_kernel(int* y) { *y = 1; }
"""


def test_a_kernel_in_local_memory_is_found(toolkit, checked, monkeypatch) -> None:
    """From source to complaint, with the compiler itself; and the second time from the cache."""
    monkeypatch.setattr(kernels, "ARCHS", ("sm_80",))
    wrong = checked("local.cu", LOCAL)
    expected = [
        "plain_kernel has no budget; right above it should stand: // Budget: ",
        "table_kernel<float> on sm_80 has a stack frame of 256 bytes",
        "table_kernel<float> on sm_80 takes ",
    ]
    if kernels.Compiler(toolkit).disassembler:
        expected.insert(2, "table_kernel<float> on sm_80 loads from local memory or stores to it in ")
    assert len(wrong) == len(expected), wrong
    for line, start in zip(sorted(wrong), expected, strict=True):
        assert line.startswith(f"local.cu: {start}")

    monkeypatch.setattr(kernels, "parse", None)
    assert checked("local.cu", LOCAL) == wrong


def test_shared_memory_of_the_launch_is_seen(toolkit, checked) -> None:
    if kernels.disassembler(toolkit) is None:
        pytest.skip("no nvdisasm as new as the toolkit")
    budget = "// Budget: 16 registers, {} bytes of shared memory.\n"
    given = "{ extern __shared__ int s[]; s[y[0]] = y[1]; __syncthreads(); y[2] = s[y[3]]; }\n"
    declared = given.replace("extern __shared__ int s[]", "__shared__ int s[64]")
    for numbers, wrong in (
        ((4096, 256, 0), []),
        ((0, 255, 8), [
            "given has a budget of 0 bytes of shared memory and uses some",
            "none has a budget of 8 bytes of shared memory and uses no",
            *[f"declared on {arch} takes 256 bytes of shared memory, its budget is 255" for arch in kernels.ARCHS],
        ]),
    ):  # fmt: skip
        bodies = {"given": given, "declared": declared, "none": "{ y[2] = y[3]; }\n"}
        texts = zip(numbers, bodies.items(), strict=True)
        text = "".join(f"{budget.format(n)}__global__ void {name}(int* y) {body}" for n, (name, body) in texts)
        assert sorted(checked("shared.cu", text)) == sorted(f"shared.cu: {line}" for line in wrong)


def test_code_that_does_not_compile_is_an_error(checked, tmp_path: Path) -> None:
    with pytest.raises(kernels.Failed, match="nothing_of_this_name"):
        checked("wrong.cu", "__global__ void wrong_kernel(int* y) { *y = nothing_of_this_name; }\n")
    assert not list((tmp_path / "cache").iterdir())


def test_without_a_toolkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels.torch.version, "cuda", "13.0")
    monkeypatch.setattr(kernels, "find_toolkit", lambda major: (None, ["/nowhere holds no bin/nvcc"]))
    assert kernels.main([]) == 2
    text = capsys.readouterr()
    said = "bench.kernels: no CUDA 13 toolkit with nvcc was found: /nowhere holds no bin/nvcc"
    assert text.out == "" and text.err.splitlines() == [said]
    monkeypatch.setattr(kernels.torch.version, "cuda", None)
    assert kernels.main([]) == 2 and "is not a CUDA build" in capsys.readouterr().err


def test_what_ptxas_prints() -> None:
    mask, table = kernels.parse(FINE, "sm_80")
    assert mask == Use(MASK, "sm_80", registers=54)
    assert (mask.name, mask.arguments) == ("mask_backward_kernel", "BFloat16")
    assert mask.where == "mask_backward_kernel<BFloat16> on sm_80"
    assert (table.name, table.arguments, table.registers, table.shared) == ("table_kernel", "256", 24, 1024)
    (spilling,) = kernels.parse(SPILLS, "sm_80")
    assert (spilling.stack, spilling.spill_stores, spilling.spill_loads, spilling.registers) == (344, 376, 380, 64)
    calls, called = kernels.parse(CALLS, "sm_120")
    assert (calls.name, calls.arguments, calls.kernel, calls.stack) == ("calls", "", True, 128)
    assert (called.name, called.kernel, called.registers) == ("called", False, 0)


@pytest.mark.parametrize("words", ["bytes stack frame", "Used 54"])
def test_a_silent_compiler_is_an_error(words: str) -> None:
    """A later ptxas may print another text: that must not read as no spills."""
    text = "\n".join(line for line in FINE.splitlines() if words not in line)
    with pytest.raises(kernels.Failed, match="does not say"):
        kernels.parse(text, "sm_80")
    with pytest.raises(kernels.Failed, match="not for sm_90a"):
        kernels.parse(FINE, "sm_90a")


def test_memory_in_machine_code() -> None:
    assert kernels.accesses(SASS) == {MASK: {"shared": 1}, "_Z5callsPfi": {"local": 2}}


GOOD = Use(MASK, "sm_80", registers=54, shared=2048, shares=True)
PLAIN = Use(MASK, "sm_80", registers=54, shares=False)
SOURCE = Path("mask.cu")


@pytest.mark.parametrize(
    ("use", "budget", "says"),
    [
        (GOOD, Budget(54, 2048), None),
        (GOOD, Budget(70, 9000), None),
        (PLAIN, Budget(54, 0), None),
        (replace(PLAIN, shares=None), Budget(54, 1), None),
        (replace(PLAIN, shares=True), Budget(54, 1), None),
        (GOOD, Budget(53, 2048), "mask_backward_kernel<BFloat16> on sm_80 takes 54 registers, its budget is 53"),
        (GOOD, Budget(71, 2048), "mask_backward_kernel has a budget of 71 registers and takes 54 at most: lower it"),
        (GOOD, Budget(54, 2047), "takes 2048 bytes of shared memory, its budget is 2047"),
        (PLAIN, Budget(54, 1), "has a budget of 1 bytes of shared memory and uses no"),
        (replace(PLAIN, shares=True), Budget(54, 0), "has a budget of 0 bytes of shared memory and uses some"),
        (replace(PLAIN, matrices=True), Budget(54, 0, True), None),
        (replace(PLAIN, matrices=True), Budget(54, 0), "has instructions of tensor cores, unlike its budget"),
        (replace(PLAIN, matrices=False), Budget(54, 0, True), "has no instructions of tensor cores, unlike its budget"),
        (GOOD, None, "no budget; right above it should stand: // Budget: 56 registers, 2048 bytes of shared memory."),
    ],
)
def test_budgets(use: Use, budget: Budget | None, says: str | None) -> None:
    found = kernels.offences(SOURCE, [use], {"mask_backward_kernel": budget})
    assert len(found) == (says is not None)
    assert says is None or (found[0].startswith("mask.cu: mask_backward_kernel") and says in found[0])


def test_the_worst_instance_counts() -> None:
    both = [GOOD, Use(MASK.replace("8BFloat16", "4Half"), "sm_120", registers=80)]
    assert kernels.offences(SOURCE, both, {"mask_backward_kernel": Budget(80, 2048)}) == []
    assert kernels.offences(SOURCE, both, {"mask_backward_kernel": Budget(79, 2048)}) == [
        "mask.cu: mask_backward_kernel<Half> on sm_120 takes 80 registers, its budget is 79"
    ]


def test_spills_and_local_memory_are_offences() -> None:
    found = kernels.offences(SOURCE, kernels.parse(SPILLS, "sm_80"), {"spilling_kernel": Budget(64, 0)})
    assert found == [
        "mask.cu: spilling_kernel<float> on sm_80 spills 376 bytes and loads 380 back",
        "mask.cu: spilling_kernel<float> on sm_80 has a stack frame of 344 bytes",
    ]
    local = Use(MASK, "sm_80", registers=54, local=16, accesses=3)
    assert len(kernels.offences(SOURCE, [local], {"mask_backward_kernel": Budget(54, 0)})) == 2
    called = Use("_Z6calledILi3EEfPfi", "sm_80", kernel=False, spill_loads=4)
    assert len(kernels.offences(SOURCE, [called], {})) == 1


def test_budgets_in_sources(tmp_path: Path) -> None:
    source = tmp_path / "some.cu"
    source.write_text(LOCAL)
    assert kernels.budgets(source) == {"table_kernel": Budget(8, 0), "plain_kernel": None}
    for wrong in (LOCAL.replace("0 bytes of shared", "no shared"), LOCAL.replace("memory.\n", "memory.\n\n", 1)):
        source.write_text(wrong)
        with pytest.raises(kernels.Failed, match="1 of 1 budgets do not read"):
            kernels.budgets(source)


def test_a_kernel_that_nothing_compiles_is_an_offence(checked, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "ARCHS", ("sm_80",))
    text = "// Budget: 8 registers, 0 bytes of shared memory.\ntemplate <int n> __global__ void left_over() {}\n"
    assert checked("template.cu", text) == ["template.cu: left_over is never compiled"]
