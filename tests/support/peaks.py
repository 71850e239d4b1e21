"""The peak of one call, as it is predicted and as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from patchconv_native.memory.fake import FakeMode, Storages
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles.costs import PeakOf


def peaks(call: Callable[..., Any], *given: Tensor) -> tuple[int, int]:
    """Predicted and measured, results included."""
    call(*given)  # what oneDNN makes once
    measured = allocated_peak(lambda: call(*given))
    peak = PeakOf()
    counted = Storages(peak, given[0].device)
    counted.there_before(given)
    with FakeMode() as mode:
        fakes = [mode.from_tensor(t) for t in given]
        counted.there_before(fakes)
        with counted:
            call(*fakes)
    return peak.most, measured
