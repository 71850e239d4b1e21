"""Runs a function as the ranks of one process group, each in a new process, and returns what each rank found."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .measure import function_named, processes

Found = list[list[dict[str, Any] | None]]
"""What each rank found, job by job."""


def backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _serve(rank: int, ranks: int, folder: str, jobs: str, timeout: float, target: str, threads: int) -> None:
    """One rank, in a process of its own: writes what "module:function" returns, and what it prints."""
    with open(Path(folder, f"rank{rank}.log"), "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend(), init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )  # fmt: skip
    try:
        found = function_named(target)(json.loads(jobs))
        Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def launch(jobs: list[dict[str, Any]], ranks: int, timeout: float, target: str, total: float = 3600.0) -> Found:
    """What each of `ranks` new processes finds. RuntimeError as soon as one of them fails, or after `total` seconds;
    the others are ended then. timeout: seconds that a rank waits for another.
    """
    threads = max(1, torch.get_num_threads() // ranks)
    with tempfile.TemporaryDirectory() as folder:
        started: list[Any] = []
        try:
            for rank in range(ranks):
                given = (rank, ranks, folder, json.dumps(jobs), timeout, target, threads)
                started.append(processes().Process(target=_serve, args=given))
                started[-1].start()
            end = time.monotonic() + total
            while any(process.exitcode is None for process in started):
                if any(process.exitcode for process in started) or time.monotonic() > end:
                    break
                time.sleep(0.02)
            codes = [process.exitcode for process in started]
        finally:
            for process in started:
                process.kill()
                process.join()
        if any(code != 0 for code in codes):
            states, logs = [], ""
            for rank, code in enumerate(codes):
                states.append(f"rank {rank} " + ("was not done" if code is None else f"ended with {code}"))
                log = Path(folder, f"rank{rank}.log")
                if code != 0 and log.exists():
                    logs += f"\n--- rank {rank}\n{log.read_text(errors='replace')[-3000:]}"
            raise RuntimeError(f"{target} with {jobs}: {'; '.join(states)}{logs}")
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
