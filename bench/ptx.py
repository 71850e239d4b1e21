"""PTX of the CUDA kernels, as nvcc writes it for sm_80: what tests/ptx executes on a CPU."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .kernels import FLAGS, Toolkit, run_tool, with_headers
from .measure import ROOT

FOLDER = ROOT / "build" / "ptx"
HOST = "build_facts.cu"  # holds no kernel


def compiled(toolkit: Toolkit, sources: Sequence[Path], folder: Path = FOLDER) -> Path:
    """The folder, in which there is the PTX of each source, compiled again only if something in it has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: _compile(toolkit, source, folder / f"{source.stem}.ptx"), sources))
    return folder


def _compile(toolkit: Toolkit, source: Path, to: Path) -> None:
    options = [*(flag for flag in FLAGS if flag not in ("-cubin", "-Xptxas", "-v")), "-arch=compute_80"]
    command = [str(toolkit.home / "bin" / "nvcc"), "-ptx", "-x", "cu", *options, f"-I{ROOT / 'csrc'}", str(source)]
    parts = [" ".join(command), str(toolkit.version), *(path.read_text() for path in with_headers(source))]
    key = f"// {hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}\n"
    if to.is_file() and to.read_text().startswith(key):
        return
    draft = to.with_suffix(".draft")
    run_tool([*command, "-o", str(draft)])
    to.write_text(key + draft.read_text())
    draft.unlink()
