"""Finds and loads the native library, and says in plain words when it cannot serve this Python.

C++ autograd nodes tie a build to one torch minor release, and CUDA code to one CUDA major. setup.py writes
what a build is for to _build_info.json; it is compared with what is running *before* the library is loaded,
since afterwards all that is left of the cause is an undefined symbol.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["BuildMismatchError", "NotBuiltError", "build_info", "load", "plain_eager"]

_PACKAGE = Path(__file__).resolve().parent
_INFO = _PACKAGE / "_build_info.json"


class NotBuiltError(ImportError):
    """The package is here, but its native part was never built."""


class BuildMismatchError(ImportError):
    """The native part was built for another torch, CUDA or Python than the one that is running."""


def build_info() -> dict[str, Any]:
    """What the native part was built for: version, torch, cuda and archs (None: CPU only), python, compiler.

    Raises:
        NotBuiltError: there is no native part, or its description cannot be read.
    """
    try:
        info = json.loads(_INFO.read_text())
        for key in ("version", "torch", "cuda", "archs", "python", "compiler"):
            if not isinstance(info[key], str) and not (info[key] is None and key in ("cuda", "archs")):
                raise TypeError(f"{key} is {info[key]!r}")
        return dict(info)
    except FileNotFoundError:
        raise _not_built(f"was never built (there is no {_INFO})") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise _not_built(f"cannot be identified ({_INFO} is damaged: {why})") from error


def load() -> ModuleType:
    """Loads the native library, which registers torch.ops.patchconv.*, and returns the module `_C`.

    Raises:
        NotBuiltError: there is no native part.
        BuildMismatchError: it is for another torch minor release, CUDA major or Python, or does not load.
    """
    info = build_info()
    if problems := _mismatches(info):
        built = ", ".join(f"{what} {built}" for what, built, _ in problems)
        found = ", ".join(f"{what} {found}" for what, _, found in problems)
        torch_alone = [what for what, _, _ in problems] == ["torch"]
        raise _mismatch(info, f"built for {built}, but found {found}", torch_helps=torch_alone)
    if importlib.util.find_spec(f"{__package__}._C") is None:
        raise _not_built(f"is missing (there is no {__package__}._C in {_PACKAGE})")
    try:
        return importlib.import_module(f"{__package__}._C")
    except ImportError as error:
        cuda = f"CUDA {info['cuda']}" if info["cuda"] else "CPU only"
        built = f"torch {info['torch']} ({cuda}), Python {info['python']}"
        raise _mismatch(
            info, f"built for {built}, but does not load with torch {torch.__version__} ({error})"
        ) from error


def _mismatches(info: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What differs between build and process in a way that matters, as (what, built for, found)."""
    found: list[tuple[str, str, str]] = []
    if _release(info["torch"]) != _release(torch.__version__):
        found.append(("torch", f"{_release(info['torch'])}.*", torch.__version__))
    # A CPU-only build serves every torch of its release; a CUDA build needs a torch of its CUDA major.
    cuda = torch.version.cuda
    if info["cuda"] is not None and (cuda is None or info["cuda"].split(".")[0] != cuda.split(".")[0]):
        found.append(("CUDA", info["cuda"], cuda or "none (this torch is CPU-only)"))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if info["python"] != python:
        found.append(("Python", info["python"], python))
    return found


def _release(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


def _not_built(problem: str) -> NotBuiltError:
    text = f"the native part of patchconv_native {problem}. Build it with\n  {_rebuild_command()}"
    # With its name, `python -m patchconv_native` prints the error's text in place of a traceback.
    return NotBuiltError(text, name=__package__)


def _mismatch(info: dict[str, Any], problem: str, torch_helps: bool = False) -> BuildMismatchError:
    text = (
        f"patchconv_native {info['version']} was {problem}. "
        f"Rebuild it for what is installed with\n  {_rebuild_command()}"
    )
    if torch_helps:
        text += (
            "\nor install the torch it was built for with\n"
            f'  {sys.executable} -m pip install "torch=={_release(info["torch"])}.*"'
        )
    return BuildMismatchError(text, name=__package__)


def _rebuild_command() -> str:
    """In a source tree, the build in place; for an installed package, a new build from its source."""
    root = _PACKAGE.parent
    if (root / "setup.py").is_file() and (root / "csrc" / "sources.txt").is_file():
        return f"cd {root} && {sys.executable} setup.py build_ext --inplace"
    return (
        f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps "
        "PATH_OF_THE_PATCHCONV_NATIVE_SOURCES"
    )


# A fake tensor is computed as the tensor that it stands for: predictions of memory rest on that.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))


def plain_eager(*tensors: Any) -> bool:
    """Whether every argument is a plain tensor (or not given), in eager mode: what the operators themselves serve."""
    return all(t is None or type(t) in PLAIN for t in tensors) and not (
        torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()
    )
