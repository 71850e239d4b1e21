"""A compiler launcher of CMake: takes an object that setup.py compiled from the same source, or calls the compiler.

    cmake -DCMAKE_CXX_COMPILER_LAUNCHER="python;built_objects.py;SOURCES;OBJECTS" ...

The sources of libpatchconv are those of the Python module, compiled with the same switches. Where the tests run from a
built tree, its objects save minutes of compiling; all that CMake does besides is as in any other build. An object that
is older than its source, or is not there, is compiled.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path


def main(sources: str, objects: str, *command: str) -> None:
    arguments = dict(itertools.pairwise(command))  # of a switch: what follows it
    source, result = (Path(arguments.get(switch, "")).resolve() for switch in ("-c", "-o"))
    # Not for patchconv_core_test: that core/ compiles without torch's headers is one of its tests.
    if "-c" in arguments and source.is_relative_to(sources) and "patchconv.dir" in result.parts:
        built = Path(objects) / source.relative_to(sources).with_suffix(".o")
        if built.exists() and built.stat().st_mtime >= source.stat().st_mtime:
            shutil.copyfile(built, result)
            # When setup.py compiles the source again, ninja is to ask for this object again.
            Path(arguments["-MF"]).write_text(f"{arguments['-o']}: {built}\n")
            return
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
