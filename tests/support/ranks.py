"""Runs a function on several processes of one gloo group, and gives what each of them returned."""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch is built without gloo"
)
TIMEOUT = 120.0


class Failed(RuntimeError):
    """What a rank raised, with its traceback."""


def _context() -> Any:
    """Processes come from a server that has torch loaded and has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "patchconv_native", "patchconv_native.distributed"])
    return context


def _work(rank: int, world: int, folder: str, timeout: float, pipe: Any, function: Any, args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    try:
        result: Any = ("ok", function(rank, world, *args))
    except BaseException as error:
        result = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    buffer = io.BytesIO()
    torch.save(result, buffer)
    pipe.send_bytes(buffer.getvalue())
    pipe.close()
    dist.destroy_process_group()


def run(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, errors: bool = False
) -> list[Any]:
    """function(rank, world, *args) on every rank. errors: give what was raised, as text, in a result's place; None for
    a process that died. Otherwise Failed is raised.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            given = (rank, world, str(Path(folder)), timeout, theirs, function, args)
            processes.append(context.Process(target=_work, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        results = []
        for pipe in pipes:
            try:
                if not pipe.poll(timeout + 60):
                    raise EOFError
                results.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
            except EOFError:
                results.append(("died", None))
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    if errors:
        return [value for _, value in results]
    for rank, (kind, value) in enumerate(results):
        if kind != "ok":
            raise Failed(f"rank {rank}: {kind}: {value}")
    return [value for _, value in results]
