"""Calls on other threads, and with so many of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def on_threads(call: Callable[[], Any], count: int = 1) -> list[Any]:
    """What the call gives on so many threads at once, which have ended."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(call) for _ in range(count)]]


@contextlib.contextmanager
def threads(most: int) -> Iterator[None]:
    """So many threads for each of PyTorch's operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(before)
