"""New processes that run a function of this package's as the ranks of one group, and what each of them finds."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .measure import ROOT

Found = list[list[dict[str, Any] | None]]
"""Of each rank what it found, job for job."""


def backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def serve(target: str, arguments: str) -> None:
    """One rank, in a process of its own: writes what "module:function" returns."""
    given = json.loads(arguments)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    module, _, function = target.partition(":")
    store = f"file://{given['folder']}/rendezvous"
    timeout = datetime.timedelta(seconds=given["timeout"])
    dist.init_process_group(backend(), init_method=store, rank=rank, world_size=world, timeout=timeout)
    try:
        found = getattr(importlib.import_module(module), function)(given["jobs"])
        Path(given["folder"], f"rank{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def launch(jobs: list[dict[str, Any]], ranks: int, timeout: float, target: str, total: float = 3600.0) -> Found:
    """What each of `ranks` new processes finds. RuntimeError as soon as one of them fails, or after `total` seconds;
    the others are ended then. timeout: seconds that a rank waits for another.
    """
    threads = str(max(1, torch.get_num_threads() // ranks))
    with tempfile.TemporaryDirectory() as folder:
        arguments = json.dumps({"folder": folder, "timeout": timeout, "jobs": jobs})
        command = [sys.executable, "-m", "bench.launch", target, arguments]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                settings = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": threads}
                with open(Path(folder, f"rank{rank}.log"), "wb") as log:
                    processes.append(
                        subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stdout=log, stderr=log)
                    )
            end = time.monotonic() + total
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes) or time.monotonic() > end:
                    break
                time.sleep(0.02)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(code != 0 for code in codes):
            states = "; ".join(
                f"rank {rank} " + ("was not done" if code is None else f"ended with {code}")
                for rank, code in enumerate(codes)
            )
            logs = "".join(
                f"\n--- rank {rank}\n{Path(folder, f'rank{rank}.log').read_text(errors='replace')[-3000:]}"
                for rank, code in enumerate(codes) if code != 0
            )  # fmt: skip
            raise RuntimeError(f"{target} with {jobs}: {states}{logs}")
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]


if __name__ == "__main__":
    serve(*sys.argv[1:])
