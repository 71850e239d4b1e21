"""The package's errors when its native part cannot serve.

Each case runs in a process of its own, on a copy of the package whose _build_info.json was changed. What is to load
starts a new Python. What is to be refused imports the copy in a forked process, after forgetting the package itself.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes

from patchconv_native import _library

PACKAGE = Path(_library.__file__).resolve().parent
RELEASE = ".".join(torch.__version__.split(".")[:2])
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
INSTALL_FROM_SOURCE = (
    f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps "
    "PATH_OF_THE_PATCHCONV_NATIVE_SOURCES"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package alone, as an installation has it: no setup.py beside it."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "patchconv_native", ignore=ignore)
    return tmp_path


def tamper(folder: Path, **changes: Any) -> dict[str, Any]:
    path = folder / "patchconv_native" / "_build_info.json"
    info = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(info))
    return info


def run(folder: Path, code: str = "import patchconv_native") -> subprocess.CompletedProcess[str]:
    # -I would drop the folder from the path, so it is put there explicitly.
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=folder, timeout=120)


def error(folder: Path) -> tuple[str, str]:
    """The type and the text of the error that importing the package raises."""
    return processes.run(_error, str(folder))


def _error(folder: str) -> tuple[str, str]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "patchconv_native"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        import patchconv_native
    except ImportError as problem:
        return type(problem).__name__, str(problem)
    raise AssertionError(f"{patchconv_native.__file__} loads")


def test_an_intact_copy_loads(copy: Path) -> None:
    code = (
        "import patchconv_native as p, torch; x = torch.ones(1, 1, 4, 4); "
        "print(p.__file__, torch.ops.patchconv.conv2d(x, x, None, [1, 1], [0, 0], [1, 1], 1).item())"
    )
    result = run(copy, code)
    assert result.stdout.split() == [str(copy / "patchconv_native" / "__init__.py"), "16.0"], result.stderr


TORCH, CUDA = torch.__version__, torch.version.cuda or "none (this torch is CPU-only)"
OTHERS: dict[str, tuple[dict[str, str], str]] = {
    "torch": ({"torch": "1.7.3"}, f"torch 1.7.*, but found torch {TORCH}"),
    "cuda": ({"cuda": "99.1"}, f"CUDA 99.1, but found CUDA {CUDA}"),
    "python": ({"python": "2.7"}, f"Python 2.7, but found Python {PYTHON}"),
    "all": ({"torch": "1.7.3", "python": "2.7"}, f"torch 1.7.*, Python 2.7, but found torch {TORCH}, Python {PYTHON}"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_built_for_another(copy: Path, what: str) -> None:
    """Everything that differs is named, and another torch only where it would help."""
    changes, text = OTHERS[what]
    info = tamper(copy, **changes)
    other = f'\nor install the torch it was built for with\n  {sys.executable} -m pip install "torch==1.7.*"'
    assert error(copy) == (
        "BuildMismatchError",
        f"patchconv_native {info['version']} was built for {text}. "
        f"Rebuild it for what is installed with\n  {INSTALL_FROM_SOURCE}" + (other if what == "torch" else ""),
    )


@pytest.mark.parametrize("what", ["patch release", "CPU only", "minor of CUDA"])
def test_what_may_differ(copy: Path, what: str) -> None:
    """Another patch release, another minor of CUDA; and a build for CPUs serves every torch of its release."""
    if what == "minor of CUDA" and torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    changes = {
        "patch release": {"torch": f"{RELEASE}.99"},
        "CPU only": {"cuda": None, "archs": None},
        "minor of CUDA": {"cuda": str(torch.version.cuda).split(".")[0] + ".99"},
    }
    tamper(copy, **changes[what])
    assert run(copy).returncode == 0


@pytest.mark.parametrize("source_tree", [False, True])
def test_never_built(copy: Path, source_tree: bool) -> None:
    info = copy / "patchconv_native" / "_build_info.json"
    info.unlink()
    if source_tree:
        (copy / "csrc").mkdir()
        for file in ("csrc/sources.txt", "setup.py"):
            (copy / file).touch()
    build = f"cd {copy} && {sys.executable} setup.py build_ext --inplace" if source_tree else INSTALL_FROM_SOURCE
    said = f"the native part of patchconv_native was never built (there is no {info}). Build it with\n  {build}"
    assert error(copy) == ("NotBuiltError", said)


def test_library_missing(copy: Path) -> None:
    for library in (copy / "patchconv_native").glob("_C*.so"):
        library.unlink()
    name, text = error(copy)
    assert name == "NotBuiltError"
    assert "is missing (there is no patchconv_native._C in " in text and INSTALL_FROM_SOURCE in text


def test_library_that_does_not_load(copy: Path) -> None:
    """A library of another build behind a description that matches: the loader's own words are kept."""
    for library in (copy / "patchconv_native").glob("_C*.so"):
        library.write_bytes(b"\x7fELF")
    info = tamper(copy)
    name, text = error(copy)
    assert name == "BuildMismatchError"
    assert f"was built for torch {info['torch']} (" in text
    assert f"but does not load with torch {torch.__version__} (" in text
    assert "file too short" in text and INSTALL_FROM_SOURCE in text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "JSONDecodeError: Expecting value"),
        ("[]", "TypeError: list indices must be integers"),
        ("{}", "KeyError: 'version'"),
        (
            json.dumps({"version": "1", **dict.fromkeys(("torch", "cuda", "archs", "python"))}),
            "TypeError: torch is None",
        ),
    ],
)
def test_damaged_description(copy: Path, content: str, problem: str) -> None:
    info = copy / "patchconv_native" / "_build_info.json"
    info.write_text(content)
    name, text = error(copy)
    assert name == "NotBuiltError"
    assert f"cannot be identified ({info} is damaged: {problem}" in text and INSTALL_FROM_SOURCE in text


def test_description_and_library_agree() -> None:
    info = _library.build_info()
    library = _library.load()
    built = library.built_with()
    assert library.version() == info["version"]
    assert built["torch"].split("+")[0] == info["torch"]
    assert (built["cuda"] is None) == (info["cuda"] is None) == (built["archs"] is None)
    if info["cuda"]:
        assert built["cuda"].split(".")[0] == info["cuda"].split(".")[0]
        for arch in built["archs"].split(";"):
            assert arch in info["archs"]


def test_description_is_a_copy() -> None:
    _library.build_info()["torch"] = "0.0"
    assert _library.build_info()["torch"] != "0.0"
