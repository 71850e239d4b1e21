"""Runs the benchmarks for the CPU, one after another: `python -m bench`, or `--quick` to check that they work.

Wants a machine that does nothing else, and 12 GiB. Results go to bench/results. bench.xray, which trains one network
in many ways, is run by itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from .measure import ROOT

# Each in a process of its own, so that none inherits another's caches and settings.
SCRIPTS = (
    "overhead",
    "resnet",
    "lean",
    "lean_error",
    "lean_speed",
    "checkpointing",
    "padding",
    "half",
    "conv_memory",
    "conv_speed",
    "article",
    "whole_models",
    "tile",
    "tile_speed",
    "lightstream",
    "tile_training",
    "megapixels",
    "tile_ranks",
    "from_disk",
    "memory_trace",
    "spatial",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes; results go to build/bench")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    arguments = parser.parse_args()
    size = ["--size", "tiny" if arguments.quick else "full"]
    failed = []
    for script in arguments.only:
        print(f"== bench.{script}", flush=True)
        start = time.perf_counter()
        if subprocess.run([sys.executable, "-m", f"bench.{script}", *size], cwd=ROOT).returncode != 0:
            failed.append(script)
        print(f"== bench.{script}: {time.perf_counter() - start:.0f} s\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
