"""`tile` with what it keeps between sweeps in files: the same numbers, the budget, and nothing left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pairs import FULL
from support.spatial_chains import Gate, structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles.stores import FileRows, HostRows


def norms(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.InstanceNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(4, width), nn.SiLU(), Gate(width), nn.Conv2d(width, 2, 3, padding=1),
    ).eval()  # fmt: skip


class Attention(nn.Module):
    """Each place with all others, and a skip past it: read whole by one call, and by strips later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        places = x.flatten(2).transpose(1, 2).unsqueeze(1)  # one head
        mixed = torch.nn.functional.scaled_dot_product_attention(places, places, places)
        return self.last(x + mixed.squeeze(1).transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("dtype,last", [(torch.float32, True), (torch.bfloat16, False)][: 2 if FULL else 1])
@torch.no_grad()
def test_values_in_files_are_those_of_one_call_and_cost_no_budget(tmp_path: Path, last: bool, dtype: Any) -> None:
    model, x = norms().to(dtype), structured((2, 3, 160, 60)).to(dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    exact, stock = norms()(x.float()), model(x)
    with pytest.raises(pc.BudgetError, match="with store=") as refused:
        pc.tile(model, x, budget=1, store=tmp_path)
    least = refused.value.least
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile(model, x, budget=1)
    assert least < 0.8 * refused.value.least or pc.tile_plan(model, x, budget=refused.value.least).arithmetic > 1.2
    found: list[Tensor] = []
    peak = allocated_peak(lambda: found.append(pc.tile(model, x, budget=least, store=tmp_path)))
    assert peak - found[0].nbytes <= least or dtype == torch.bfloat16  # whose convolutions take memory of their own
    assert found[0].stride() == stock.stride() and found[0].dtype == dtype
    assert (found[0] - exact).abs().max() <= 1.5 * (stock - exact).abs().max() + 1e-5
    assert list(tmp_path.iterdir()) == []
    plan = pc.tile_plan(model, x, store=tmp_path)
    assert plan.stored and str(tmp_path) in str(plan)


@torch.no_grad()
def test_values_that_a_call_gets_whole_may_be_in_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), structured((1, 3, 40, 22)).float()
    found: list[Tensor] = []
    in_files = allocated_peak(lambda: found.append(pc.tile(model, x, tile=4, store=tmp_path)))
    assert in_files - found[0].nbytes <= pc.tile_plan(model, x, tile=4, store=tmp_path).needs
    assert in_files < allocated_peak(lambda: model(x)) / 5  # stock computes all scores at once
    torch.testing.assert_close(found[0], model(x))
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def test_files_are_there_during_a_call_and_gone_after_an_error(tmp_path: Path) -> None:
    seen: list[int] = []

    def progress(done: int, of: int) -> None:
        seen.append(sum(file.stat().st_size for file in tmp_path.rglob("*.rows")))
        if len(seen) == 12:
            raise KeyboardInterrupt

    model, x = norms(), structured((1, 3, 64, 32)).float()
    with pytest.raises(KeyboardInterrupt):
        pc.tile(model, x, tile=8, store=f"{tmp_path}{os.sep}", progress=progress)
    assert seen[0] > 0 and seen[7] >= 16 * 64 * 32 * 4
    assert list(tmp_path.iterdir()) == []


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no line Anonymous")


@torch.no_grad()
def test_stored_values_are_not_in_the_processs_memory(tmp_path: Path) -> None:
    if not os.path.exists("/proc/self/smaps_rollup"):
        pytest.skip("this system does not tell")
    x = structured((1, 3, 512, 1024)).float()  # 16 channels of it are 32 MiB
    model = norms()
    pc.tile(model, x[:, :, :64], tile=16, store=tmp_path)  # what a first call leaves in the process
    most, size = [0], [0]

    def progress(done: int, of: int) -> None:
        if done % 8 == 0:
            most[0] = max(most[0], anonymous())
            size[0] = max(size[0], sum(file.stat().st_size for file in tmp_path.rglob("*.rows")))

    before = anonymous()
    pc.tile(model, x, tile=16, store=tmp_path, progress=progress)
    assert size[0] >= 32 * 2**20
    assert most[0] - before < size[0] / 2 + x.nbytes


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("width", [3, 50_000])
def test_rows_of_files_are_read_as_they_were_written(tmp_path: Path, dim: int, layout: Any, width: int) -> None:
    x = torch.randn(2, 5, 6, width).contiguous(memory_format=layout)
    rows = FileRows(tmp_path / "rows", dim, x)
    size = x.size(dim)
    for begin in range(0, size, 2):
        rows.add(x.narrow(dim, begin, min(2, size - begin)))
    for low, high in ((0, size), (1, size - 1), (2, 3), (1, 1)):
        got = rows.read(low, high)
        assert torch.equal(got, x.narrow(dim, low, high - low))
        assert low == high or got.is_contiguous(memory_format=layout)
    with pytest.raises(RuntimeError, match="not all of them are there"):
        rows.read(0, size + 1)
    rows.close()
    rows.close()
    assert list(tmp_path.iterdir()) == []


def test_rows_in_the_hosts_memory_come_back_to_their_device() -> None:
    x = torch.randn(1, 2, 6, 3)
    rows = HostRows(2, torch.device("meta"))
    rows.add(x[:, :, :4])
    rows.add(x[:, :, 4:])
    assert rows.read(1, 5).device.type == "meta" and rows.read(1, 5).shape == (1, 2, 4, 3)


@torch.no_grad()
def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match=r"tile: No space left on device: .*\.rows"):
        pc.tile(norms(), structured((1, 3, 64, 32)).float(), tile=8, store=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("store", "text"), [
    ("cpu", "tile: store='cpu' is the same as 'device' for a model on the CPU; give a folder"),
    ("tape", r"tile: expected store to be 'device', 'cpu' or a folder that exists, such as './scratch', got 'tape'"),
    ("./nowhere", "got './nowhere', which is not a folder"),
    (Path("nowhere"), "got 'nowhere', which is not a folder"),
    (3, "or a folder that exists, .* got 3"),
])  # fmt: skip
@torch.no_grad()
def test_stores_are_checked(store: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pc.tile(nn.ReLU(), structured((1, 3, 12, 10)).float(), store=store)


@pytest.mark.parametrize("in_files", [False, True])
@torch.no_grad()
def test_shares_of_numbers_of_a_wide_image_are_in_the_budget(tmp_path: Path, in_files: bool) -> None:
    model, x, store = norms(), structured((1, 3, 32, 512)).float(), tmp_path if in_files else "device"
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile(model, x, budget=1, store=store)
    least, found = refused.value.least, []
    peak = allocated_peak(lambda: found.append(pc.tile(model, x, budget=least, store=store)))
    assert peak - found[0].nbytes <= least
