"""Copies between the host and a device while strips are computed, on a device that `support.streams` plays: whatever
order its streams keep to, the numbers are those of one call, and all that is written is there in time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL
from support.seeds import SWEEP_SEED
from support.spatial_chains import Gate, chain, structured
from support.streams import Streams
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles import choices, tiling, transfers
from patchconv_native.tiles.arguments import Arguments
from patchconv_native.tiles.journal import Journal, State
from patchconv_native.tiles.outside import largest_read
from patchconv_native.tiles.plan import TilePlan
from patchconv_native.tiles.tiling import plan_call, run_plan
from patchconv_native.tiles.transfers import Transfers

numpy = pytest.importorskip("numpy")

ORDERS = [None, *range(SWEEP_SEED, SWEEP_SEED + (6 if FULL else 1))]
"""Copies as late as can be, and at random times."""
Device = Callable[..., Streams]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Makes the CPU a device of its own, with streams that keep to an order."""
    monkeypatch.setattr(transfers, "SERVED", {"cpu"})
    monkeypatch.setattr(tiling, "check_store", lambda *given: None)

    def make(order: int | None) -> Streams:
        streams = Streams(order)
        monkeypatch.setattr(transfers, "device_copies", lambda device: streams)
        return streams

    return make


def alike(got: Any, want: Any) -> bool:
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    return bool(pairs) and all(
        a.shape == b.shape and bool((torch.as_tensor(a) - b).abs().max() <= 1e-9 * b.abs().max() + 1e-300)
        for a, b in pairs
    )


def planned(module: Any, x: Any, **more: Any) -> TilePlan:
    arguments = Arguments(x if isinstance(x, tuple) else (x,), arrays=True, dim=more.pop("dim", 2))
    return plan_call("tile", module, module, arguments, more.pop("budget", None), **more)


class Strict:
    """An array-like that can do nothing but what is asked of one, and tells which rows it was asked for."""

    def __init__(self, data: Any) -> None:
        self.data, self.shape, self.dtype = data, data.shape, data.dtype
        self.read: list[int] = []
        self.written: list[int] = []
        self.fail_at = 10**9

    def _check(self) -> None:
        if len(self.read) + len(self.written) > self.fail_at:
            raise OSError("no disk")

    def __getitem__(self, where: Any) -> Any:
        self.read.append(where[2].stop)
        self._check()
        return self.data[where]

    def __setitem__(self, where: Any, rows: Any) -> None:
        self.written.append(where[2].stop)
        self._check()
        self.data[where] = rows


def norms(width: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.InstanceNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1),
        nn.GroupNorm(2, width), nn.SiLU(), Gate(width), nn.Conv2d(width, 2, 3, padding=1),
    )  # fmt: skip


class Twice(nn.Module):
    """Reads its image in several places of a strip, in parts of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.down, self.last = nn.Conv2d(3, 3, 7, padding=3), nn.Conv2d(3, 3, 3, 2, 1), nn.Conv2d(6, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.wide(x)) + x
        small = F.interpolate(self.down(y), size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.last(torch.cat([y * x.mean((2, 3), keepdim=True), small - x], 1))


class Attention(nn.Module):
    """Each place with all others, and a skip past it: read whole by one call, and by strips later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, 2, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        places = x.flatten(2).transpose(1, 2).unsqueeze(1)  # one head
        mixed = F.scaled_dot_product_attention(places, places, places)
        return self.last(x + mixed.squeeze(1).transpose(1, 2).reshape(x.shape))


class Several(nn.Module):
    """Two images, and a list of results of several sizes, from several sweeps."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.last = nn.Conv2d(4, 6, 5, padding=2), nn.GroupNorm(3, 6), nn.Conv2d(6, 2, 3)

    def forward(self, x: Tensor, other: Tensor) -> list[Tensor]:
        y = self.body(torch.cat([x, other], 1))
        z = self.norm(y)
        return [F.avg_pool2d(y, 3, 2), self.last(z) + other[:, :, 1:-1, 1:-1], z.mean((2, 3)), x * 2]


NETWORKS: dict[str, Callable[[], nn.Module]] = {"norms": norms, "twice": Twice, "attention": Attention}
WAYS: dict[str, dict[str, Any]] = {
    "strips": {"tile": 7}, "bands": {"tile": (6, 9)}, "one row": {"tile": (1, 40)}, "kept by the host": {"tile": 4,
    "store": "cpu"}, "bands kept by the host": {"tile": (5, 8), "store": "cpu"}, "columns": {"tile": 5, "dim": 3,
    "store": "cpu"}, "in files": {"tile": 6, "store": "files"}, "bands in files": {"tile": (9, 11), "store": "files"},
    "waiting for several strips": {"store": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_networks(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str) -> None:
    monkeypatch.setattr(choices, "STRIP", 20_000)
    module, x = NETWORKS[name]().double().eval(), structured((2, 3, 46, 38))
    want = module(x)
    more = dict(WAYS[way])
    if more.get("store") == "files":
        more["store"] = tmp_path
    plan = planned(module, x, **more, out_later=True)
    for order in ORDERS:
        arrays = order is None or order % 2
        out: Any = Strict(numpy.full(want.shape, numpy.nan)) if arrays else torch.full_like(want, torch.nan)
        with device(order) as streams:
            run_plan(plan, Arguments((Strict(x.numpy()) if arrays else x,), arrays=True, dim=more.get("dim", 2)), out)
            assert alike(out.data, want)  # before whatever is still under way
        assert streams.faults == [] and alike(out.data, want)
        assert streams.log.count("in") > 3 and streams.log.count("out") > 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_several_images_and_results(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(choices, "STRIP", 20_000)
    module, x, other = Several().double(), structured((2, 3, 37, 30)), structured((2, 1, 37, 30)).numpy()
    more = {**WAYS[way], "store": tmp_path} if WAYS[way].get("store") == "files" else WAYS[way]
    plan = planned(module, (x, other), **more)
    for order in ORDERS:
        with device(order) as streams:
            got = run_plan(plan, Arguments((x, other), arrays=True, dim=more.get("dim", 2)))
        assert streams.faults == [] and alike(got, module(x, torch.from_numpy(other)))


@pytest.mark.parametrize("seed", range(SWEEP_SEED, SWEEP_SEED + (30 if FULL else 6)))
@torch.no_grad()
def test_chains_of_layers(device: Device, seed: int) -> None:
    model, x = chain(seed, 1, "H")
    model.eval()
    want = model(x)
    for order in (None, seed):
        out = torch.full_like(want, torch.nan)
        with device(order) as streams:
            pc.tile(model, x, tile=(4, 5) if seed % 2 else 3, out=out, store="cpu")
        assert streams.faults == []
        torch.testing.assert_close(out, want, atol=1e-9, rtol=1e-7)


@torch.no_grad()
def test_images_of_bytes_and_half_precision(device: Device) -> None:
    data = numpy.random.default_rng(0).integers(0, 256, (1, 3, 40, 20), dtype=numpy.uint8)
    for x in (data, torch.from_numpy(data), numpy.asfortranarray(data)):
        out = torch.zeros(1, 3, 40, 20, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        with device(None) as streams:
            pc.tile(lambda x: x.bfloat16() * 2, x, tile=6, out=out)
        assert streams.faults == [] and torch.equal(out, torch.from_numpy(data).bfloat16() * 2)


@torch.no_grad()
def test_strips_are_read_ahead_and_written_behind(device: Device) -> None:
    x, out = Strict(structured((1, 3, 60, 8)).numpy()), Strict(numpy.zeros((1, 3, 60, 8)))
    seen: list[tuple[int, int]] = []
    with device(None) as streams:
        pc.tile(
            lambda x: x * 2, x, tile=10, out=out,
            progress=lambda *_: seen.append((max(x.read), max(out.written, default=0))),
        )  # fmt: skip
    assert seen == [(20, 0), (30, 10), (40, 20), (50, 30), (60, 40), (60, 50)]
    assert streams.most_pinned == 3 * 3 * 10 * 8 * 8  # two buffers for what is read, one for the result
    assert max(out.written) == 60 and x.read == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("in_files", [False, True])
@torch.no_grad()
def test_budgets_count_the_strips_that_are_copied(device: Device, tmp_path: Path, in_files: bool) -> None:
    convs = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3))
    module, x = (norms(16) if in_files else convs).double().eval(), structured((1, 3, 160, 48)).numpy()
    want, store = module(torch.from_numpy(x)), tmp_path if in_files else "device"
    device(None)
    with pytest.raises(pc.BudgetError) as refused:
        planned(module, x, budget=1, store=store, out_later=True)
    budget, seen = refused.value.least, set()
    while True not in seen:
        plan = planned(module, x, budget=budget, store=store, out_later=True)
        ahead = plan.outside.ahead
        if ahead not in seen:
            seen.add(ahead)
            text = "while strips are computed" if ahead else "the budget has no room to read a strip ahead"
            assert text in str(plan)
            found = above(device(None), plan, x, want)
            assert found <= budget
        budget = budget * 11 // 10
    assert seen == {True, False}


def above(streams: Streams, plan: TilePlan, x: Any, want: Tensor) -> int:
    """What a plan takes on the device."""
    out, arguments = numpy.full(want.shape, numpy.nan), Arguments((x,), arrays=True)
    with streams:
        peak = allocated_peak(lambda: run_plan(plan, arguments, out))
    ahead, of_files = bool(plan.outside.ahead), 0
    assert alike(out, want) and streams.faults == [] and bool(streams.log) == ahead
    for sweep in plan.sweeps if ahead and not plan.outside.counted else ():  # rows of files, on their way to a buffer
        stored = plan.outside.reads(plan.graph, sweep) - set(plan.graph.inputs)
        of_files = max([of_files, *(largest_read(plan.graph, plan.kinds, sweep, v) for v in stored)])
    return peak - streams.most_pinned - of_files


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

        journal = Watched(folder / "journal", "identity", every=0.0).see(out, want, there)
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


def waits_of_what_computes(patch: pytest.MonkeyPatch) -> None:
    wait = Streams.wait
    patch.setattr(Streams, "wait", lambda own, stream, event: stream is own.computes or wait(own, stream, event))


def waits_of_what_copies(patch: pytest.MonkeyPatch) -> None:
    wait = Streams.wait
    patch.setattr(Streams, "wait", lambda own, stream, event: stream is not own.computes or wait(own, stream, event))


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
    (waits_of_what_computes, by_strips), (waits_of_what_copies, by_strips), (waits_of_the_host, by_strips),
    (the_other_buffer, by_strips), (the_hold_of_rows, by_strips), (the_wait_at_the_end, of_one_sweep),
    (the_wait_between_sweeps, with_stored_values),
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
