"""Counts what a rank sends."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Traffic:
    """Counts what this rank sends while it is open: `messages` and `bytes` of parts of images, `reduced` bytes of what
    is summed or merged over ranks. `transfers`: of each exchange, when (time.perf_counter) its messages were "posted",
    first "waited" for, and "there".
    """

    _open: list[Traffic] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.messages = self.bytes = self.reduced = 0
        self.transfers: list[dict[str, float]] = []

    def __enter__(self) -> Traffic:
        self._open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.remove(self)


def count_sent(tensors: list[Tensor]) -> None:
    for traffic in Traffic._open:
        traffic.messages += len(tensors)
        traffic.bytes += sum(t.nbytes for t in tensors)


def count_reduced(values: Tensor) -> None:
    for traffic in Traffic._open:
        traffic.reduced += values.nbytes


def add_transfer(times: dict[str, float]) -> None:
    for traffic in Traffic._open:
        traffic.transfers.append(times)
