"""Runs a function on several processes of one gloo group, and gives what each of them returned."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import processes
from support.processes import TIMEOUT, Failed

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch is built without gloo"
)


def _rank(rank: int, world: int, folder: str, timeout: float, function: Callable[..., Any], args: Any) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    result = function(rank, world, *args)
    dist.destroy_process_group()
    return result


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, errors=False) -> list[Any]:
    """function(rank, world, *args) on every rank. errors: give what was raised, as text, in a result's place; None for
    a process that died. Otherwise Failed is raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [processes.start(_rank, rank, world, folder, timeout, function, args) for rank in range(world)]
        results = [rank.result(timeout + 60) for rank in ranks]
    if errors:
        return [value for _, value in results]
    for rank, (kind, value) in enumerate(results):
        if kind != "ok":
            raise Failed(f"rank {rank}: {kind}: {value}")
    return [value for _, value in results]
