"""Builds patchconv_native._C from the sources that csrc/sources.txt names.

Whether CUDA is part of the build is decided here, once, from what the build needs (a CUDA build of torch
and a usable toolkit), never from whether a GPU happens to be present; `PATCHCONV_CUDA=auto|0|1` overrides.
What was decided and why is printed in one line. What was built is written to _build_info.json, which the
package reads before it loads the library. A build serves one torch minor release and one CUDA major, so the
wheel's version says which (0.1.0+pt214cu130) and its metadata pins it.

Most of the time a C++ file takes is PyTorch's headers, so several files of a room are compiled as one (`joined`).
PATCHCONV_JOIN=0 compiles each by itself, which is quicker where one file is changed again and again.

Environment: PATCHCONV_CUDA, PATCHCONV_JOIN, CUDA_HOME, TORCH_CUDA_ARCH_LIST, MAX_JOBS, CC, CXX. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setuptools import setup
from setuptools.command.build import build

try:
    import torch
except ModuleNotFoundError:
    raise SystemExit(
        "patchconv_native: building needs torch, which is not installed here. Either let pip provide it:\n"
        "  pip install .\n"
        "or install the torch you want and build for that one:\n"
        "  pip install torch setuptools wheel ninja && pip install --no-build-isolation ."
    ) from None

ROOT = Path(__file__).resolve().parent
NAME = "patchconv_native"
VERSION = "0.1.0"  # CMakeLists.txt reads this line
# A source distribution is for every torch, so neither its version nor its requirements name one.
SDIST = "sdist" in sys.argv

if TYPE_CHECKING:
    from patchconv_native._cuda_toolkit import Toolkit, cudart_library, find_toolkit, nvidia_packages
else:  # by its path: importing the package would load the library, which is not built yet
    finder = runpy.run_path(str(ROOT / NAME / "_cuda_toolkit.py"))
    cudart_library, find_toolkit = finder["cudart_library"], finder["find_toolkit"]
    nvidia_packages = finder["nvidia_packages"]


# --------------------------------------------------------------------------------------------------------
# The decision: CUDA or not


@dataclass(frozen=True)
class Decision:
    toolkit: Toolkit | None  # None: a CPU-only build
    reason: str


def decide() -> Decision:
    choice = os.environ.get("PATCHCONV_CUDA", "") or "auto"
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"{NAME}: expected PATCHCONV_CUDA to be auto, 0 or 1, got {choice!r}")
    if choice == "0":
        return Decision(None, "PATCHCONV_CUDA=0")
    if torch.version.cuda is None:
        if choice == "1":
            raise SystemExit(
                f"{NAME}: PATCHCONV_CUDA=1, but torch {torch.__version__} is not a CUDA build. Install one, "
                "with the command that https://pytorch.org/get-started/locally names for your CUDA version"
            )
        return Decision(None, f"torch {torch.__version__} is not a CUDA build")
    major = int(torch.version.cuda.split(".")[0])
    toolkit, rejected = find_toolkit(major)
    if toolkit is None:
        why = f"no usable CUDA {major} toolkit for torch {torch.__version__}: " + "; ".join(rejected)
        if choice == "1":
            raise SystemExit(
                f"{NAME}: PATCHCONV_CUDA=1, but there is {why}.\n"
                f"Install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME to its folder "
                f"(https://developer.nvidia.com/cuda-downloads), or run\n  {pip_toolkit_command()}"
            )
        return Decision(None, why)
    home = f"toolkit {toolkit.version[0]}.{toolkit.version[1]} at {toolkit.home} ({toolkit.found})"
    return Decision(toolkit, f"PATCHCONV_CUDA={choice}, torch {torch.__version__}, {home}")


def pip_toolkit_command() -> str:
    """The packages that make the folder of torch's nvidia packages a whole toolkit."""
    parts = ("cuda-nvcc", "cuda-crt", "cuda-cccl", "nvvm")
    return "pip install " + " ".join(f"'nvidia-{part}=={torch.version.cuda}.*'" for part in parts)


def default_archs(toolkit: Toolkit) -> str:
    """Ampere, Hopper and consumer Blackwell, with PTX of the newest so that later GPUs can run it as well."""
    return "8.0+PTX;9.0a;12.0+PTX" if toolkit.version >= (12, 8) else "8.0+PTX;9.0a;9.0+PTX"


# --------------------------------------------------------------------------------------------------------
# The extension


def read_sources(cuda: bool) -> list[str]:
    """csrc/sources.txt without comments; what lies under csrc/cuda/ is part of CUDA builds only."""
    lines = (ROOT / "csrc" / "sources.txt").read_text().splitlines()
    sources = [line.split("#")[0].strip() for line in lines]
    return [source for source in sources if source and (cuda or not source.startswith("csrc/cuda/"))]


torch_release = ".".join(torch.__version__.split(".")[:2])
if tuple(int(part) for part in torch_release.split(".")) < (2, 11):
    raise SystemExit(f"{NAME}: expected torch 2.11 or later, got {torch.__version__}")
decision = decide()
toolkit = decision.toolkit
cuda_version = torch.version.cuda if toolkit else None
build_tag = "".join(["pt", torch_release, f"cu{cuda_version}" if cuda_version else "cpu"]).replace(".", "")
full_version = VERSION if SDIST else f"{VERSION}+{build_tag}"

# ninja installed by pip is found even where the environment's commands are not on PATH.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
if toolkit:
    # torch's helper reads both when it is imported. Left alone it takes the folder of a wrapper script for a
    # toolkit, and raises an IndexError for an empty list of architectures on a machine without a GPU.
    os.environ["CUDA_HOME"] = str(toolkit.home)
    os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_archs(toolkit)

from torch.utils import cpp_extension  # noqa: E402


def extension() -> Any:
    # No value depends on -fno-trapping-math. Without it GCC makes jumps of comparisons in loops, in place of vector
    # code: the signs before a ReLU cannot be predicted.
    host = ["-O3", "-std=c++20", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math", "-g0"]
    options: dict[str, Any] = {
        "name": f"{NAME}._C",
        "sources": read_sources(cuda=toolkit is not None or SDIST),
        # Headers are not sources, but a source distribution must carry them.
        "depends": [str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").rglob("*")) if p.is_file()],
        "include_dirs": [str(ROOT / "csrc"), str(ROOT / "csrc" / "ops")],
        "define_macros": [("PATCHCONV_VERSION", f'"{full_version}"')],
        "extra_link_args": ["-fopenmp"],
        "language": "c++",
    }
    if toolkit is None:
        return cpp_extension.CppExtension(**options, extra_compile_args={"cxx": host})
    # Behind every other folder, so that they fill the gaps of a partial toolkit (cusparse.h, ...)
    # while their headers, which can be of another minor release, never shadow the toolkit's own.
    behind = [str(folder / "include") for folder in nvidia_packages() if (folder / "include").is_dir()]
    nvcc = ["-O3", "-std=c++20", "-Xcompiler", "-fvisibility=hidden"]
    for folder in behind:
        host += ["-idirafter", folder]
        nvcc += ["-Xcompiler", f"-idirafter,{folder}"]
    built = cpp_extension.CUDAExtension(**options, extra_compile_args={"cxx": host, "nvcc": nvcc})
    cudart = cudart_library(toolkit.home, toolkit.version[0])
    assert cudart is not None  # find_toolkit() rejects a toolkit without it
    built.libraries = [library for library in built.libraries if library != "cudart"]
    built.extra_link_args.append(str(cudart))
    return built


JOINED_ROOMS = ("csrc/autograd", "csrc/ops", "csrc/tiled", "csrc/cuda")
JOINED_FILES = 5


def joined(sources: list[str], folder: Path) -> list[str]:
    """`sources`, with the C++ files of some rooms replaced by files in `folder` that include several of them each."""
    rooms = {room: [s for s in sources if s.endswith(".cpp") and str(Path(s).parent) == room] for room in JOINED_ROOMS}
    result = [source for source in sources if source not in {s for files in rooms.values() for s in files}]
    for room, files in rooms.items():
        parts = -(-len(files) // JOINED_FILES)
        for part in range(parts):
            path = folder / f"{Path(room).name}_{part + 1}.cpp"
            text = "".join(f'#include "{ROOT / file}"\n' for file in files[part::parts])
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            result.append(str(path.relative_to(ROOT)))
    return result


def compiler_name() -> str:
    command = os.environ.get("CXX", "c++").split()
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        return run.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return " ".join(command)


class Build(build):
    """Wheels start from an empty folder: a module deleted since the last build must not be packed again."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExtension(cpp_extension.BuildExtension):
    """torch's, with an object folder for each torch, toolkit and Python, and the facts beside the result."""

    build_temp: str

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # always link, since what lies in the tree can be of another torch
        key = "\n".join([str(Path(torch.__file__)), sys.executable, str(toolkit.home if toolkit else None)])
        self.build_temp += f"-{build_tag}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def run(self) -> None:
        kind = f"CUDA build for {os.environ['TORCH_CUDA_ARCH_LIST']}" if toolkit else "CPU-only build"
        print(f"{NAME} {full_version}: {kind} ({decision.reason})", flush=True)
        if os.environ.get("PATCHCONV_JOIN", "1") != "0":
            for built in self.extensions:
                built.sources = joined(built.sources, ROOT / self.build_temp / "joined")
        super().run()
        facts = {
            "version": full_version,
            "torch": torch.__version__.split("+")[0],
            "cuda": cuda_version,
            "archs": os.environ["TORCH_CUDA_ARCH_LIST"] if toolkit else None,
            "python": ".".join(platform.python_version_tuple()[:2]),
            "compiler": compiler_name(),
        }
        folder = ROOT / NAME if self.inplace else Path(self.build_lib) / NAME
        (folder / "_build_info.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    setup(
        version=full_version,
        install_requires=["torch>=2.11"] if SDIST else [f"torch=={torch_release}.*"],
        ext_modules=[extension()],
        cmdclass={"build": Build, "build_ext": BuildExtension},
    )
