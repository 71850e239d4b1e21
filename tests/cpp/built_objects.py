"""A compiler launcher of CMake: takes objects that setup.py compiled from the same sources, or calls the compiler.

    cmake -DCMAKE_CXX_COMPILER_LAUNCHER="python;built_objects.py;SOURCES;OBJECTS" ...

The sources of libpatchconv are those of the Python module, compiled with the same switches but for what is exported.
Where the tests run from a built tree, its objects save minutes of compiling; all that CMake does besides is as in any
other build. What is older than its source, or is not there, is compiled.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path


def built_from(source: Path, sources: Path, objects: Path) -> list[Path]:
    """The objects of a source; of a file that joins a room's sources, those of setup.py's files that join them."""
    if joined := re.fullmatch(r"unity_(\w+)_cxx.cxx", source.name):
        files = [Path(name) for name in re.findall(r'#include "(.+)"', source.read_text())]
        found = sorted(objects.parent.rglob(f"joined/{joined[1]}_*.o"))
    else:
        files = [source]
        found = [objects / source.relative_to(sources).with_suffix(".o")] if source.is_relative_to(sources) else []
    if files[0].is_relative_to(sources / "ops"):
        return []  # what programs call: hidden in the Python module, which setup.py builds
    current = all(one.exists() and one.stat().st_mtime >= file.stat().st_mtime for one in found for file in files)
    return found if current else []


def main(sources: str, objects: str, *command: str) -> None:
    arguments = dict(itertools.pairwise(command))  # of a switch: what follows it
    # Not for patchconv_core_test: that core/ compiles without torch's headers is one of its tests.
    if "-c" in arguments and "patchconv.dir" in Path(arguments["-o"]).parts:
        built = built_from(Path(arguments["-c"]).resolve(), Path(sources), Path(objects))
        if built:
            subprocess.run(["ld", "-r", "-o", arguments["-o"], *built], check=True)
            # When setup.py compiles the sources again, ninja is to ask for these objects again.
            Path(arguments["-MF"]).write_text(f"{arguments['-o']}: {' '.join(map(str, built))}\n")
            return
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
