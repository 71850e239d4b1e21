"""Finds the CUDA toolkit: setup.py builds with it, bench/kernels.py compiles kernels with it.

A folder counts only if it holds what a build needs: the headers, nvcc and the CUDA runtime. Both users run without a
built package, so they load this file by its path, and it imports nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple


class Toolkit(NamedTuple):
    home: Path
    version: tuple[int, int]
    found: str  # how it was found, for the one-line statement


def nvidia_packages() -> list[Path]:
    """Folders of the nvidia-* packages that come with torch's CUDA builds: site-packages/nvidia/cu13, ..."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    folders = [folder for root in roots if os.path.isdir(root) for folder in sorted(Path(root).iterdir())]
    # The folder that holds the whole CUDA release goes first: it is the one that can serve as a toolkit.
    return sorted((f for f in folders if f.is_dir()), key=lambda f: not re.fullmatch(r"cu\d+", f.name))


def toolkit_version(home: Path) -> tuple[int, int] | None:
    header = home / "include" / "cuda_runtime_api.h"
    if not header.is_file():
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return (int(match[1]) // 1000, int(match[1]) % 1000 // 10) if match else None


def candidate_homes() -> list[tuple[str, Path]]:
    """Where a toolkit may be, best first. Links are resolved: nvcc on PATH is often a link or a wrapper."""
    candidates = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append((variable, Path(os.environ[variable])))
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.append(("the folder of nvcc", Path(nvcc).resolve().parent.parent))
    candidates.append(("/usr/local/cuda", Path("/usr/local/cuda")))
    candidates += [("pip's nvidia packages", f) for f in nvidia_packages() if re.fullmatch(r"cu\d+", f.name)]
    return [(found, home.resolve()) for found, home in candidates]


def find_toolkit(major: int) -> tuple[Toolkit | None, list[str]]:
    """The first usable toolkit of that CUDA major, and for every other candidate what it lacks."""
    rejected = []
    for found, home in candidate_homes():
        version = toolkit_version(home)
        if not (home / "include" / "cuda_runtime.h").is_file() or version is None:
            rejected.append(f"{home} ({found}) holds no include/cuda_runtime.h")
        elif not (home / "bin" / "nvcc").is_file():
            rejected.append(f"{home} ({found}) holds no bin/nvcc")
        elif version[0] != major:
            rejected.append(f"{home} ({found}) is CUDA {version[0]}.{version[1]}")
        elif cudart_library(home, major) is None:
            rejected.append(f"{home} ({found}) comes without libcudart.so.{major}")
        else:
            return Toolkit(home, version, found), rejected
    return None, list(dict.fromkeys(rejected))


def cudart_library(home: Path, major: int) -> Path | None:
    """The CUDA runtime to link with. pip's packages carry it without the development link (libcudart.so)."""
    folders = [home / "lib64", home / "lib"] + [folder / "lib" for folder in nvidia_packages()]
    names = ("libcudart.so", f"libcudart.so.{major}")
    return next((folder / name for folder in folders for name in names if (folder / name).exists()), None)
