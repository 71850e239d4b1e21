"""Copies beside strips where something goes wrong: an exception, a call that is broken off and goes on. And that these
tests would find a wait that is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.spatial_chains import structured
from support.streams import Streams
from support.transfers import ORDERS, Attention, Device, Strict, alike, as_a_device, norms, planned
from torch import Tensor

import patchconv_native as pc
from patchconv_native.tiles import transfers
from patchconv_native.tiles.arguments import Arguments
from patchconv_native.tiles.journal import Journal, State
from patchconv_native.tiles.tiling import run_plan
from patchconv_native.tiles.transfers import Transfers

numpy = pytest.importorskip("numpy")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return as_a_device(monkeypatch)


class Broken(Exception):
    pass


@pytest.mark.parametrize("order", ORDERS)
@torch.no_grad()
def test_what_was_computed_is_there_after_an_error(device: Device, order: int | None) -> None:
    x = structured((1, 3, 60, 8))

    def progress(done: int, of: int) -> None:
        if done == 4:
            raise Broken

    out = torch.full_like(x, torch.nan)
    with device(order) as streams, pytest.raises(Broken):
        pc.tile(lambda x: x * 2, x, tile=10, out=out, progress=progress)
    assert streams.faults == [] and torch.equal(out[:, :, :40], x[:, :, :40] * 2) and out[:, :, 40:].isnan().all()


@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("at", [0, 1, 3])
@torch.no_grad()
def test_errors_of_arrays_are_raised(device: Device, of_x: bool, at: int) -> None:
    data = structured((1, 3, 60, 8))
    x, out = Strict(data.numpy()), Strict(numpy.zeros((1, 3, 60, 8)))
    (x if of_x else out).fail_at = at
    for order in ORDERS:
        with device(order) as streams, pytest.raises(OSError, match="no disk"):
            pc.tile(lambda x: x * 2, x, tile=10, out=out)
        assert streams.faults == []


class Watched(Journal):
    """Looks at the result when it makes an entry."""

    def see(self, out: Tensor, want: Tensor, rows: Callable[[State], int]) -> Watched:
        self._see, self.right = (out, want, rows), 0
        return self

    def save(self, state: State) -> None:
        out, want, rows = self._see
        if rows(state):
            assert alike(out[:, :, : rows(state)], want[:, :, : rows(state)])
        self.right += rows(state) > 0
        super().save(state)


def resumed(device: Device, folder: Path, order: int | None, bands: bool) -> tuple[Tensor, Tensor]:
    """A result that is computed by calls of which all but the last are broken off."""
    module, x = norms().double().eval(), structured((1, 3, 46, 38))
    want, out = module(x), torch.full(module(x).shape, torch.nan, dtype=torch.float64)
    plan = planned(module, x, tile=(6, 10) if bands else (4, 40), store=folder, out_later=True)
    last = plan.sweeps[-1]
    (rows,) = (step.rows for step in last.steps if step.last == len(plan.graph.calls) - 1)

    def there(state: State) -> int:
        done = state.strip - (last.bands - 1) * last.strips  # with rows of all bands
        return rows[done - 1][1] if state.sweep == last.number and done > 0 else 0

    for stop in (5, 9, 14, None):

        def progress(done: int, of: int, stop: int | None = stop) -> None:
            if done == stop:
                raise Broken

        journal = Watched(folder / "journal", {"call": "this"}, every=0.0).see(out, want, there)
        journal.load()
        with device(order) as streams, contextlib.nullcontext() if stop is None else pytest.raises(Broken):
            run_plan(plan, Arguments((x,), arrays=True), out, progress, journal)
        assert streams.faults == []
    assert journal.right
    return out, want


@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@torch.no_grad()
def test_calls_that_are_broken_off_go_on(device: Device, tmp_path: Path, order: int | None, bands: bool) -> None:
    assert alike(*resumed(device, tmp_path, order, bands))


# Faults that the tests above must find: each takes one wait, or one thing that is held, away.


def waits_of(patch: pytest.MonkeyPatch, whose: Callable[[Streams], Any]) -> None:
    wait = Streams.wait
    patch.setattr(Streams, "wait", lambda own, stream, event: stream is whose(own) or wait(own, stream, event))


def waits_of_what_computes(patch: pytest.MonkeyPatch) -> None:
    waits_of(patch, lambda own: own.computes)


def waits_of_copies_in(patch: pytest.MonkeyPatch) -> None:
    waits_of(patch, lambda own: own.streams[0])


def waits_of_copies_out(patch: pytest.MonkeyPatch) -> None:
    waits_of(patch, lambda own: own.streams[1])


def waits_of_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Streams, "synchronize", lambda own, event: None)


def the_other_buffer(patch: pytest.MonkeyPatch) -> None:
    made = transfers._Ahead
    patch.setattr(transfers, "_Ahead", lambda readings, buffers: made(readings, buffers[:1] * 2))


def the_hold_of_rows(patch: pytest.MonkeyPatch) -> None:
    made = transfers._Behind
    patch.setattr(transfers, "_Behind", lambda rows, *more: made(rows[:0].clone(), *more))


def the_wait_between_sweeps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transfers, "end", lambda own: own._finish())


def the_wait_at_the_end(patch: pytest.MonkeyPatch) -> None:
    the_wait_between_sweeps(patch)
    patch.setattr(Transfers, "__exit__", lambda own, *error: None)


def the_wait_at_an_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transfers, "__exit__", lambda own, *error: own._finish())


def the_wait_before_an_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transfers, "settle", lambda own: None)


def by_strips(device: Device, folder: Path, order: int | None) -> None:
    module, x = norms().double().eval(), structured((1, 3, 46, 38))
    want = module(x)
    out = torch.full_like(want, torch.nan)
    with device(order) as streams:
        pc.tile(module, x, tile=5, out=out, store="cpu")
    assert streams.faults == [] and alike(out, want)


def of_one_sweep(device: Device, folder: Path, order: int | None) -> None:
    x = structured((1, 3, 46, 38))
    out = torch.full_like(x, torch.nan)
    with device(order) as streams:
        pc.tile(lambda x: x * 2, x, tile=5, out=out)
        assert torch.equal(out, x * 2)
    assert streams.faults == []


def with_stored_values(device: Device, folder: Path, order: int | None) -> None:
    module, x = Attention().double().eval(), structured((1, 3, 46, 38))
    with device(order) as streams:
        got = pc.tile(module, x, tile=5, store="cpu")
    assert streams.faults == [] and alike(got, module(x))


def with_an_error(device: Device, folder: Path, order: int | None) -> None:
    test_what_was_computed_is_there_after_an_error(device, order)


def with_a_journal(device: Device, folder: Path, order: int | None) -> None:
    assert alike(*resumed(device, folder, order, False))


MISSING = [
    (waits_of_what_computes, by_strips), (waits_of_copies_in, by_strips), (waits_of_copies_out, by_strips),
    (waits_of_the_host, by_strips), (the_other_buffer, by_strips), (the_hold_of_rows, by_strips),
    (the_wait_at_the_end, of_one_sweep), (the_wait_between_sweeps, with_stored_values),
    (the_wait_at_an_error, with_an_error), (the_wait_before_an_entry, with_a_journal),
]  # fmt: skip


@pytest.mark.parametrize(("missing", "test"), MISSING, ids=lambda one: one.__name__)
@torch.no_grad()
def test_what_is_missing_is_found(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: Any, test: Any
) -> None:
    with monkeypatch.context() as patch:
        missing(patch)
        with pytest.raises((AssertionError, RuntimeError)):
            test(device, tmp_path, None)
