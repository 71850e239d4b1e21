"""`tile` on a GPU with images, results and stored values in the host's memory: copied while strips are computed, with
the numbers of one call, in the budget. In which orders copies may happen is tested in tiles/test_tile_transfers.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.spatial_chains import Gate, structured
from torch import Tensor, nn

import patchconv_native as pc

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
WAYS: dict[str, dict[str, Any]] = {
    "strips": {"tile": 16}, "bands": {"tile": (24, 50)}, "kept by the host": {"tile": 16, "store": "cpu"},
    "bands kept by the host": {"tile": (24, 50), "store": "cpu"}, "in files": {"tile": 16, "store": "files"},
    "chosen": {"store": "cpu"},
}  # fmt: skip


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.InstanceNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, padding=1),
        nn.GroupNorm(4, 16), nn.SiLU(), Gate(16), nn.Conv2d(16, 4, 3, padding=1),
    ).eval()  # fmt: skip


def given(kind: str, x: Tensor, folder: Path) -> Any:
    """An image as a tensor, an array or a file."""
    if kind == "file":
        numpy.save(folder / "x.npy", x.numpy())
        return numpy.load(folder / "x.npy", mmap_mode="r")
    return x if kind == "tensor" else x.numpy()


@pytest.mark.parametrize("kind", ["tensor", "array", "file"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("own_stream", [False, True])
@torch.no_grad()
def test_results_are_those_of_one_call(tmp_path: Path, way: str, kind: str, own_stream: bool) -> None:
    module, x = norms(), structured((2, 3, 333, 250))
    want = copy.deepcopy(module).double()(x)
    more = dict(WAYS[way])
    if more.get("store") == "files":
        (tmp_path / "store").mkdir()
        more["store"] = tmp_path / "store"
    module, image = module.cuda(), given(kind, x.float(), tmp_path)
    out = torch.full(want.shape, torch.nan) if kind == "tensor" else numpy.full(want.shape, numpy.nan, numpy.float32)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert "while strips are computed" in str(pc.tile_plan(module, image, out=out, **more))
        for _ in range(3):  # memory that was used before, too
            assert pc.tile(module, image, out=out, **more) is out
            torch.testing.assert_close(torch.as_tensor(out).double(), want, atol=1e-4, rtol=1e-4)
            on_device = pc.tile(module, image, **more)
            assert on_device.is_cuda
            torch.testing.assert_close(on_device.double().cpu(), want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_bits_do_not_depend_on_when_strips_are_copied() -> None:
    """Many strips of little work: the copies are what takes the time."""
    module, x = nn.PReLU(init=0.5).cuda(), torch.randn(1, 8, 4096, 1024)
    out = torch.full_like(x, torch.nan)
    for _ in range(3):
        pc.tile(module, x, tile=64, out=out.fill_(torch.nan))
        assert torch.equal(out, torch.where(x > 0, x, x * 0.5))


@pytest.mark.parametrize("kept", ["device", "cpu"])
@torch.no_grad()
def test_the_budget_is_kept(kept: str) -> None:
    """Without convolutions, whose libraries take memory of their own."""
    layers = nn.AvgPool2d(5, 1, 2), nn.GroupNorm(4, 16), nn.SiLU(), nn.PReLU(16), nn.MaxPool2d(3, 2)
    module = nn.Sequential(*layers).cuda()
    x = torch.randn(1, 16, 2048, 1024)
    want = module(x.cuda()).cpu()
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile(module, x, budget=1, store=kept, out=torch.empty_like(want))
    least, seen = refused.value.least, set()
    for budget in (least, 2 * least, 4 * least, 16 * least):
        out = torch.full_like(want, torch.nan)
        plan = pc.tile_plan(module, x, budget=budget, store=kept, out=out)
        seen.add("in order" in str(plan))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        pc.tile(module, x, budget=budget, store=kept, out=out)
        assert torch.cuda.max_memory_allocated() - before <= budget, str(plan)
        torch.testing.assert_close(out, want)
    assert False in seen


class Broken(Exception):
    pass


@torch.no_grad()
def test_what_was_computed_is_there_after_an_error() -> None:
    module, x = nn.PReLU(init=0.5).cuda(), torch.randn(1, 8, 512, 512)
    out = torch.full_like(x, torch.nan)

    def progress(done: int, of: int) -> None:
        if done == 4:
            raise Broken

    with pytest.raises(Broken):
        pc.tile(module, x, tile=64, out=out, progress=progress)
    assert torch.equal(out[:, :, :256], torch.where(x > 0, x, x * 0.5)[:, :, :256]) and out[:, :, 256:].isnan().all()
