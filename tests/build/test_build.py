"""setup.py's decisions: what it takes for a CUDA toolkit, what it says, and which sources it builds. Only the
decision is run, in a process of its own with an environment made for the case; nothing is compiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.version.cuda
RELEASE = "".join(torch.__version__.split(".")[:2])

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in a source tree")
with_cuda_torch = pytest.mark.skipif(CUDA is None, reason="this torch is not a CUDA build")

PROBE = """
import json, runpy
facts = runpy.run_path("setup.py", run_name="probe")
toolkit = facts["toolkit"]
print("PROBE " + json.dumps({
    "version": facts["full_version"],
    "reason": facts["decision"].reason,
    "home": str(toolkit.home) if toolkit else None,
    "sources": facts["read_sources"](cuda=toolkit is not None),
    "archs": __import__("os").environ.get("TORCH_CUDA_ARCH_LIST"),
    "flags": facts["extension"]().extra_compile_args,
}))
"""


def probe(**environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "PATCHCONV", "TORCH_CUDA"))}
    clean |= environment
    return subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, env=clean, capture_output=True, text=True)


def decided(**environment: str) -> dict:
    result = probe(**environment)
    lines = [line for line in result.stdout.splitlines() if line.startswith("PROBE ")]
    assert result.returncode == 0 and lines, result.stdout + result.stderr
    return json.loads(lines[0].removeprefix("PROBE "))


def refused(**environment: str) -> str:
    result = probe(**environment)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stderr


def make_toolkit(home: Path, version: str, nvcc: bool = True, runtime: bool = True) -> Path:
    """A folder that looks like a CUDA toolkit: as much as setup.py looks at."""
    major, minor = (int(part) for part in version.split("."))
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda_runtime.h").touch()
    (home / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {major * 1000 + minor * 10}\n")
    (home / "bin").mkdir()
    if nvcc:
        (home / "bin" / "nvcc").touch()
        (home / "bin" / "nvcc").chmod(0o755)
    (home / "lib64").mkdir()
    if runtime:
        (home / "lib64" / "libcudart.so").touch()
    return home


def test_invalid_choice() -> None:
    assert "patchconv_native: expected PATCHCONV_CUDA to be auto, 0 or 1, got 'yes'" in refused(PATCHCONV_CUDA="yes")


def test_switched_off() -> None:
    facts = decided(PATCHCONV_CUDA="0")
    assert facts["version"].endswith(f"+pt{RELEASE}cpu")
    assert facts["reason"] == "PATCHCONV_CUDA=0"
    assert facts["sources"] and not [s for s in facts["sources"] if s.startswith("csrc/cuda/")]


@pytest.mark.skipif(CUDA is not None, reason="this torch is a CUDA build")
def test_cpu_only_torch(tmp_path: Path) -> None:
    # A toolkit, even a perfect one, is no reason.
    home = str(make_toolkit(tmp_path / "cuda", "13.0"))
    facts = decided(CUDA_HOME=home)
    assert facts["home"] is None and facts["reason"] == f"torch {torch.__version__} is not a CUDA build"
    message = refused(CUDA_HOME=home, PATCHCONV_CUDA="1")
    assert f"PATCHCONV_CUDA=1, but torch {torch.__version__} is not a CUDA build. Install one" in message


@with_cuda_torch
def test_cuda_home_comes_first(tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda", str(CUDA))
    facts = decided(CUDA_HOME=str(home))
    assert facts["home"] == str(home)
    assert facts["version"].endswith(f"+pt{RELEASE}cu{str(CUDA).replace('.', '')}")
    assert facts["reason"].endswith(f"toolkit {CUDA} at {home} (CUDA_HOME)")
    assert "csrc/cuda/kernels/build_facts.cu" in facts["sources"]


@with_cuda_torch
def test_links_are_resolved(tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda-real", str(CUDA))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(home / "bin" / "nvcc")
    facts = decided(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert facts["home"] == str(home) and facts["reason"].endswith("(the folder of nvcc)")


@with_cuda_torch
@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        ({"version": "9.2"}, "is CUDA 9.2"),
        ({"nvcc": False}, "holds no bin/nvcc"),
        ({"version": None}, "holds no include/cuda_runtime.h"),
    ],
)
def test_unusable_toolkits_are_passed_over(tmp_path: Path, flaw: dict, says: str) -> None:
    version = flaw.pop("version", CUDA)
    home = make_toolkit(tmp_path / "cuda", version, **flaw) if version else tmp_path
    script = tmp_path / "bin" / "nvcc"  # a wrapper outside every toolkit
    script.parent.mkdir(exist_ok=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    facts = decided(CUDA_HOME=str(home), PATH=f"{script.parent}:{os.environ['PATH']}")
    assert facts["home"] not in (str(home), str(tmp_path))
    if facts["home"] is None:  # no other toolkit on this machine: then the reason names every candidate
        assert says in facts["reason"]
        message = refused(PATCHCONV_CUDA="1", CUDA_HOME=str(home), PATH=f"{script.parent}:{os.environ['PATH']}")
        assert says in message and f"nvidia-cuda-nvcc=={CUDA}.*" in message


@with_cuda_torch
@pytest.mark.parametrize("choice", ["auto", "1"])
def test_no_toolkit_anywhere(choice: str) -> None:
    """One line that names every place looked at; with 1, an error that names what to install."""
    # setup.py decides when it is imported as well, where this machine's toolkits must not matter.
    code = f"""
import os, pathlib, runpy, sys
os.environ["PATCHCONV_CUDA"] = "0"
facts = runpy.run_path("setup.py", run_name="probe")
places = [("CUDA_HOME", pathlib.Path("/nowhere")), ("/usr/local/cuda", pathlib.Path("/no"))]
facts["find_toolkit"].__globals__["candidate_homes"] = lambda: places
os.environ["PATCHCONV_CUDA"] = "{choice}"
print(facts["decide"]().reason)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    why = (
        f"no usable CUDA {str(CUDA).split('.')[0]} toolkit for torch {torch.__version__}: "
        "/nowhere (CUDA_HOME) holds no include/cuda_runtime.h; "
        "/no (/usr/local/cuda) holds no include/cuda_runtime.h"
    )
    if choice == "auto":
        assert result.stdout.splitlines()[-1:] == [why], result.stderr
    else:
        assert result.returncode == 1 and f"PATCHCONV_CUDA=1, but there is {why}.\n" in result.stderr
        assert f"pip install 'nvidia-cuda-nvcc=={CUDA}.*'" in result.stderr


@with_cuda_torch
def test_architectures(tmp_path: Path) -> None:
    home = str(make_toolkit(tmp_path / "cuda", str(CUDA)))
    assert decided(CUDA_HOME=home)["archs"] == "8.0+PTX;9.0a;12.0+PTX"
    assert decided(CUDA_HOME=home, TORCH_CUDA_ARCH_LIST="8.6")["archs"] == "8.6"


@with_cuda_torch
def test_packages_fill_gaps_from_behind(tmp_path: Path) -> None:
    """Folders of the nvidia packages come with -idirafter, never with -I, which would shadow the toolkit."""
    flags = decided(CUDA_HOME=str(make_toolkit(tmp_path / "cuda", str(CUDA))))["flags"]
    for option in flags["cxx"] + flags["nvcc"]:
        assert not re.match(r"-I.*nvidia", option)
    behind = [b for a, b in zip(flags["cxx"], flags["cxx"][1:], strict=False) if a == "-idirafter"]
    assert [f"-idirafter,{folder}" for folder in behind] == [f for f in flags["nvcc"] if "-idirafter" in f]


def test_every_source_is_listed_once_and_exists() -> None:
    lines = (ROOT / "csrc" / "sources.txt").read_text().splitlines()
    listed = [line.split("#")[0].strip() for line in lines]
    listed = [line for line in listed if line]
    assert len(listed) == len(set(listed))
    on_disk = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu")}
    assert set(listed) == on_disk


def test_every_package_is_listed() -> None:
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    folders = {p.parent.relative_to(ROOT) for p in (ROOT / "patchconv_native").rglob("__init__.py")}
    assert listed and set(re.findall(r'"(.*?)"', listed[1])) == {".".join(f.parts) for f in folders}


def test_every_data_file_is_listed() -> None:
    """What lies in a package and is no Python; the build writes its facts itself."""
    text = (ROOT / "pyproject.toml").read_text()
    for package in {p.parent for p in (ROOT / "patchconv_native").rglob("__init__.py")}:
        name = ".".join(package.relative_to(ROOT).parts)
        listed = re.search(rf'^"?{re.escape(name)}"? = \[(.*?)\]', text, re.M)
        found = {p.name for p in package.iterdir() if p.is_file() and p.suffix not in (".py", ".so")}
        assert set(re.findall(r'"(.*?)"', listed[1]) if listed else ()) == found - {"_build_info.json"}, name


def test_walls_between_the_rooms() -> None:
    """core/ and kernels include nothing of PyTorch; nothing outside cuda/ names it, not even in an #ifdef."""
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix not in (".cpp", ".h", ".cu", ".cuh"):
            continue
        text, where = path.read_text(), path.relative_to(ROOT / "csrc").as_posix()
        if where.startswith(("core/", "cuda/kernels/")):
            assert not re.search(r'#include [<"](torch|ATen|c10|pybind11)/', text), where
        if not where.startswith("cuda/"):
            assert not re.search(r"#\s*if.*CUDA", text), where
            assert "cuda_runtime" not in text and not re.search(r'#include "cuda/', text), where
        if path.suffix in (".cu", ".cuh"):
            assert where.startswith("cuda/kernels/"), where
