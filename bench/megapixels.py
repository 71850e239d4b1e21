"""Trains on whole images of 50 megapixels: examples/train_megapixels.py, run as it is, in a process of its own.

Its losses and times as it prints them, the most memory that the process held, libraries and images included, how much
of it is also held where the images are tiny, and what one step of stock would take above images and parameters, which
is predicted.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from typing import Any

import torch

import patchconv_native as pc

from . import measure, report

PROGRAM = measure.ROOT / "examples" / "train_megapixels.py"
RUNS = {"full": (7072, 20, "1.25GiB"), "tiny": (128, 3, "8MiB")}
"""Side of the images, steps and budget."""
LIBRARIES = (128, 2, "8MiB")
"""The same of a run whose images take nothing."""
STEP = re.compile(r"step \d+: loss ([\d.]+), ([\d.]+) s")


def trained(side: int, steps: int, budget: str, picture: str) -> dict[str, Any]:
    given = ["--side", str(side), "--steps", str(steps), "--budget", budget, "--picture", picture]
    settings = {**os.environ, "PYTHONPATH": str(measure.ROOT)}
    losses, seconds = [], []
    command = [sys.executable, str(PROGRAM), *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            if found := STEP.match(line):
                losses.append(float(found[1]))
                seconds.append(float(found[2]))
        _, status, used = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        raise RuntimeError(f"{PROGRAM.name} ended with {run.returncode}")
    return {"losses": losses, "seconds": seconds, "process": used.ru_maxrss * 1024}


def stock(side: int) -> int:
    """Bytes of a step's peak above images, parameters and their gradients: predicted."""
    model = runpy.run_path(str(PROGRAM))["Segmenter"]()
    images = torch.zeros(1, 3, side, side, dtype=torch.uint8), torch.zeros(1, 1, side, side, dtype=torch.uint8)
    found = pc.memory.trace(model, *images, fake=True, loss=lambda y: y)
    fixed = 2 * sum(p.nbytes for p in model.parameters()) + sum(t.nbytes for t in (*model.buffers(), *images))
    return found.peak - fixed


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__, ("full", "tiny"))
    arguments = parser.parse_args(argv)
    side, steps, budget = RUNS[arguments.size]
    data = measure.report_head("megapixels", arguments.size) | {"side": side, "budget": budget}
    data["stock"] = measure.in_fresh_process("bench.megapixels:stock", 600, side=side)
    picture = measure.folder(arguments) / "megapixels_discs.jpg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    data["libraries"] = trained(*LIBRARIES, str(picture))["process"]
    report.store(data | trained(side, steps, budget, str(picture)), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
