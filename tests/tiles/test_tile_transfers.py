"""Copies between the host and a device while strips are computed, on a device that `support.streams` plays: whatever
order its streams keep to, the numbers are those of one call, and all that is written is there in time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL, todays
from support.seeds import SWEEP_SEED
from support.spatial_chains import chain, structured
from support.streams import Streams
from support.transfers import ORDERS, Attention, Device, Strict, Twice, alike, as_a_device, norms, planned
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles import strip_sizes
from patchconv_native.tiles.arguments import Arguments
from patchconv_native.tiles.outside import largest_read
from patchconv_native.tiles.plan import TilePlan
from patchconv_native.tiles.tiling import run_plan

numpy = pytest.importorskip("numpy")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return as_a_device(monkeypatch)


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


@pytest.mark.parametrize(("name", "way"), todays(itertools.product(NETWORKS, WAYS)))
@torch.no_grad()
def test_networks(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str) -> None:
    monkeypatch.setattr(strip_sizes, "STRIP", 20_000)
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
    monkeypatch.setattr(strip_sizes, "STRIP", 20_000)
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


@torch.no_grad()
def test_arrays_may_keep_what_they_are_given(device: Device) -> None:
    class Keeps(Strict):
        def __setitem__(self, where: Any, rows: Any) -> None:
            self.written.append(rows)

    x = structured((1, 3, 60, 8))
    out = Keeps(numpy.zeros(x.shape))
    with device(None):
        pc.tile(lambda x: x * 2, x, tile=10, out=out)
    assert torch.equal(torch.from_numpy(numpy.concatenate(out.written, 2)), x * 2)


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
