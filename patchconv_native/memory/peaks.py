"""The peak of any call, without a report on it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from .. import _library


def allocated_peak(call: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator has given out during the call, above what was there before.

    Counts what this process allocates on all threads. Memory that is not torch's, and CUDA's, does not count.
    """
    gc.collect()
    census = _library.load().Census("cpu", False, events=False)
    try:
        call()
    finally:
        census.stop()
    return int(census.peak())
