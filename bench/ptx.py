"""PTX of the CUDA kernels, as nvcc writes it for sm_80: what tests/ptx executes on a CPU."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .kernels import FLAGS, Toolkit, run_tool, with_headers
from .measure import ROOT

FOLDER = ROOT / "build" / "ptx"


def compiled(toolkit: Toolkit, source: Path) -> Path:
    """A file's PTX, compiled again only if something in it has changed."""
    options = [*(flag for flag in FLAGS if flag not in ("-cubin", "-Xptxas", "-v")), "-arch=compute_80"]
    command = [str(toolkit.home / "bin" / "nvcc"), "-ptx", "-x", "cu", *options, f"-I{ROOT / 'csrc'}", str(source)]
    parts = [" ".join(command), str(toolkit.version), *(path.read_text() for path in with_headers(source))]
    key = f"// {hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}\n"
    to = FOLDER / f"{source.stem}.ptx"
    if to.is_file() and to.read_text().startswith(key):
        return to
    FOLDER.mkdir(parents=True, exist_ok=True)
    draft = to.with_suffix(".draft")
    run_tool([*command, "-o", str(draft)])
    to.write_text(key + draft.read_text())
    draft.unlink()
    return to
