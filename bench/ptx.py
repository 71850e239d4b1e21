"""PTX of the CUDA kernels, as nvcc writes it for sm_80: what tests/ptx executes on a CPU.

`python -m bench.ptx` says which kernels, of those that were compiled, have never run: every instance that a launch can
choose should. Tests note what ran in build/ptx/ran.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

from .kernels import FLAGS, Toolkit, readable, run_tool, with_headers
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


def note_ran(functions: list[str]) -> None:
    with open(FOLDER / "ran", "a") as ran:
        ran.write("".join(f"{function}\n" for function in functions))


def main() -> int:
    compiled = {name for path in FOLDER.glob("*.ptx") for name in re.findall(r"\.entry (\w+)\(", path.read_text())}
    ran = {readable(function) for function in (FOLDER / "ran").read_text().split()}
    never = sorted({readable(function) for function in compiled if "host_cuda" not in function} - ran)
    for name, arguments in never:
        print(f"{name}<{arguments}> has never run")
    print(f"{len(compiled)} kernels, {len(never)} never ran")
    return len(never) > 0


if __name__ == "__main__":
    sys.exit(main())
