"""The peak of any call, without a report on it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from .. import _library
from .timeline import changes


def allocated_peak(call: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator has given out during the call, above what was there before.

    Counts what this process allocates on all threads. Memory that is not torch's, and CUDA's, does not count.
    """
    gc.collect()
    census = _library.load().Census("cpu", False)
    try:
        call()
    finally:
        census.stop()
    events = census.events()
    return max(accumulate(changes(events), initial=0))
