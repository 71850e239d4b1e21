"""libpatchconv without Python: CMake builds it, its C++ tests pass, and a program that knows only the installed package
loads a TorchScript module saved here and computes the same output and gradients.

In a built tree CMake links the objects that setup.py compiled (tests/cpp/built_objects.py). `make check` compiles.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from support.pairs import FULL

import patchconv_native

pytestmark = [pytest.mark.cpp, pytest.mark.timeout(3000)]  # what compiles the library takes minutes of every core

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=2700)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def launchers() -> list[str]:
    """CMake's arguments for the use of the objects that setup.py compiled; none where there are none."""
    tag = patchconv_native.build_info()["version"].partition("+")[2]
    libraries = sorted(ROOT.glob(f"build/temp.*-{tag}-*/csrc/library.o"), key=os.path.getmtime)
    if FULL or not libraries:
        return []
    script = ROOT / "tests" / "cpp" / "built_objects.py"
    launcher = f"{sys.executable};-S;{script};{ROOT / 'csrc'};{libraries[-1].parent}"
    return [f"-DCMAKE_{language}_COMPILER_LAUNCHER={launcher}" for language in ("CXX", "CUDA")]


@pytest.fixture(scope="module")
def installed() -> Path:
    """Configures, builds and installs libpatchconv. The folder is kept, so that a second run is quick."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    key = hashlib.sha256(f"{torch.__file__} {torch.__version__}".encode()).hexdigest()[:8]
    given = launchers()
    build = ROOT / "build" / f"cmake-{key}{'-linked' if given else ''}"
    build.mkdir(parents=True, exist_ok=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    cuda = "1" if patchconv_native.build_info()["cuda"] else "0"
    with FileLock(build / ".lock"):  # the workers of a parallel run share the folder
        run(
            "cmake", "-S", ROOT, "-B", build, *generator, f"-DPATCHCONV_CUDA={cuda}",
            f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
            f"-DCMAKE_INSTALL_PREFIX={build / 'installed'}",
            "-DTORCH_CUDA_ARCH_LIST=8.0",  # setup.py builds for the others
            *given,
        )  # fmt: skip
        run("cmake", "--build", build, "--parallel", str(os.cpu_count() or 1))
        run("cmake", "--install", build)
    return build


def test_core(installed: Path) -> None:
    program = installed / "tests" / "cpp" / "patchconv_core_test"
    assert "0 failed" in run(program)
    # core/ is plain C++: nothing of torch may have crept in.
    assert "torch" not in run("ldd", program)


class Convolution(torch.nn.Module):
    """What the program expects: parameters, stock PyTorch's numbers for them, a forward pass by name."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = torch.nn.Parameter(torch.randn(5, 3, 3, 3, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(5, generator=generator))
        self.register_buffer("input", torch.randn(2, 3, 19, 23, generator=generator))
        x = self.input.clone().requires_grad_()
        output = torch.nn.functional.conv2d(x, self.weight, self.bias, padding=1)
        gradients = torch.autograd.grad(output.square().sum(), [x, self.weight, self.bias])
        for name, value in zip(("input", "weight", "bias"), gradients, strict=True):
            self.register_buffer(f"grad_{name}", value)
        self.register_buffer("output", output.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.patchconv.conv2d(
            x, self.weight, self.bias, [1, 1], [1, 1], [1, 1], 1, padding_mode="zeros", splits=[4, 2]
        )


@pytest.fixture(scope="module")
def program(installed: Path) -> Path:
    build = installed / "consumer"
    package = installed / "installed" / "lib" / "cmake" / "patchconv"
    with FileLock(installed / ".lock"):
        run("cmake", "-S", ROOT / "tests" / "cpp" / "consumer", "-B", build, f"-Dpatchconv_DIR={package}")
        run("cmake", "--build", build)
    return build / "consumer"


def test_program_runs_a_saved_module(program: Path, tmp_path: Path) -> None:
    torch.jit.script(Convolution()).save(tmp_path / "module.pt")
    printed = run(program, tmp_path / "module.pt", cwd=tmp_path)
    # The numbers in the file are stock PyTorch's, computed in Python.
    for what in ("output", "grad_input", "grad_weight", "grad_bias", "patchconv::conv2d"):
        assert f"{what:<16} as in Python" in printed
    assert "refused as it should: conv2d: expected weight to have 4 dimensions" in printed
    # It really is a program without Python.
    assert "libpython" not in run("ldd", program)


def test_program_notices_other_numbers(program: Path, tmp_path: Path) -> None:
    """The comparison of the test above can fail."""
    module = Convolution()
    module.output += 1
    torch.jit.script(module).save(tmp_path / "wrong.pt")
    result = subprocess.run([program, tmp_path / "wrong.pt"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert f"{'output':<16} DIFFERS" in result.stdout
