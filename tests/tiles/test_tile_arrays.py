"""`tile` on array-likes and into them: read and written strip by strip, with the numbers of one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

numpy = pytest.importorskip("numpy")


class OfBytes(nn.Module):
    """Takes pixels as they are in a file."""

    def __init__(self, bytes_out: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes_out = bytes_out
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, 2, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x.float() / 255)
        return (y.clamp(0, 1) * 255).to(torch.uint8) if self.bytes_out else y


class Scales(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 255


class Strict:
    """An array-like that can do nothing but what is asked of one."""

    def __init__(self, data: Any) -> None:
        self.data, self.shape, self.dtype = data, data.shape, data.dtype
        self.read: list[int] = []
        self.written: list[int] = []

    def __getitem__(self, where: Any) -> Any:
        self.read.append(where[2].stop - where[2].start)
        return self.data[where]

    def __setitem__(self, where: Any, rows: Any) -> None:
        assert isinstance(rows, numpy.ndarray)
        self.written.append(where[2].stop - where[2].start)
        self.data[where] = rows


def pixels(*shape: int) -> Any:
    return numpy.random.default_rng(0).integers(0, 256, shape, dtype=numpy.uint8)


def zarr_array(path: Path, data: Any) -> Any:
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(str(path), shape=data.shape, dtype=data.dtype, chunks=(1, 3, 16, 16))
    array[...] = data
    return array


def h5_array(path: Path, data: Any) -> Any:
    h5py = pytest.importorskip("h5py")
    return h5py.File(path, "w").create_dataset("x", data=data)


def mapped(path: Path, data: Any) -> Any:
    numpy.save(path.with_suffix(".npy"), data)
    return numpy.load(path.with_suffix(".npy"), mmap_mode="r")


ARRAYS = {
    "ndarray": lambda path, data: data,
    "columns first": lambda path, data: numpy.asfortranarray(data),
    "memmap": mapped,
    "strict": lambda path, data: Strict(data),
    "zarr": zarr_array,
    "h5py": h5_array,
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("model", [OfBytes(), OfBytes(bytes_out=True), Scales()])
@torch.no_grad()
def test_arrays_of_bytes_give_what_one_call_gives(tmp_path: Path, kind: str, model: nn.Module) -> None:
    data = pixels(2, 3, 61, 40)
    got = pc.tile(model, ARRAYS[kind](tmp_path / "x", data), tile=7)
    want = model(torch.from_numpy(data))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.double(), want.double(), atol=1 if got.dtype == torch.uint8 else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">u2", "<f8", "?"])
@torch.no_grad()
def test_dtypes_and_the_order_of_bytes(dtype: str) -> None:
    data = pixels(1, 3, 24, 10).astype(dtype)
    native = torch.from_numpy(data.astype(numpy.dtype(dtype).newbyteorder("=")))
    assert torch.equal(pc.tile(lambda x: x.float() * 2, data, tile=5), native.float() * 2)


@torch.no_grad()
def test_strips_are_read_and_written_and_nothing_larger() -> None:
    model, x = OfBytes(), Strict(pixels(1, 3, 96, 32))
    out = Strict(numpy.zeros((1, 2, 48, 16), numpy.float32))
    assert pc.tile(model, x, tile=6, out=out) is out
    assert max(x.read) <= 12 + 2 and max(out.written) <= 7 and sum(out.written) == 48
    torch.testing.assert_close(torch.from_numpy(out.data), model(torch.from_numpy(x.data)))


def pages_of(path: Path) -> int:
    """Bytes of a file that are mapped into this process and in memory."""
    parts = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(1024 * int(part.partition("Rss:")[2].split()[0]) for part in parts)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
@torch.no_grad()
def test_mapped_files_do_not_fill_the_process(tmp_path: Path) -> None:
    numpy.save(tmp_path / "x.npy", pixels(1, 3, 900, 800))
    x = numpy.load(tmp_path / "x.npy", mmap_mode="r")[:, :, 20:]
    out = numpy.lib.format.open_memmap(tmp_path / "out.npy", "w+", numpy.float32, (1, 2, 440, 400))
    model, seen = OfBytes(), []
    pc.tile(model, x, tile=8, out=out, progress=lambda *_: seen.append(pages_of(tmp_path)))
    assert len(seen) > 9 and max(seen) < (x.nbytes + out.nbytes) // 4
    torch.testing.assert_close(torch.from_numpy(out), model(torch.from_numpy(numpy.array(x))))
    assert pages_of(tmp_path) > out.nbytes // 2  # both are read now


@torch.no_grad()
def test_changes_to_a_copy_of_mapped_pages_stay(tmp_path: Path) -> None:
    numpy.save(tmp_path / "x.npy", pixels(1, 3, 90, 80))
    x = numpy.load(tmp_path / "x.npy", mmap_mode="c")
    x[:, :, 40:] = 7
    want = OfBytes()(torch.from_numpy(numpy.array(x)))
    torch.testing.assert_close(pc.tile(OfBytes(), x, tile=8), want)
    assert (x[:, :, 40:] == 7).all()


@pytest.mark.parametrize("with_out", [False, True])
@torch.no_grad()
def test_the_budget_counts_everything(with_out: bool) -> None:
    model, x = OfBytes(), pixels(1, 3, 512, 128)
    result = numpy.zeros((1, 2, 256, 64), numpy.float32)
    out = result if with_out else None
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile(model, x, budget=1, out=out)
    least = refused.value.least
    assert (least < result.nbytes) if with_out else (least > result.nbytes)
    found: list[Any] = []
    assert allocated_peak(lambda: found.append(pc.tile(model, x, budget=least, out=out))) <= least
    torch.testing.assert_close(torch.as_tensor(found[0]), model(torch.from_numpy(x)))
    with pytest.raises(pc.BudgetError):
        pc.tile(model, x, budget=least - 1, out=out)
    assert with_out or "count here" in str(pc.tile_plan(model, x, out=out))


@torch.no_grad()
def test_results_that_are_written_at_once_or_are_the_image() -> None:
    x = structured((1, 3, 30, 8)).float()
    array = x.numpy()
    pooled = numpy.zeros((1, 3, 1, 1), numpy.float32)
    pc.tile(nn.AdaptiveAvgPool2d(1), array, tile=4, out=pooled)
    torch.testing.assert_close(torch.from_numpy(pooled), x.mean((2, 3), keepdim=True))
    same = numpy.zeros_like(array)
    assert pc.tile(nn.Identity(), array, out=same) is same and (same == array).all()
    assert torch.equal(pc.tile(nn.Identity(), array), x)
    mean = pc.tile(lambda a, b: {"mean": (a + b).mean((2, 3)), "sum": a + b}, (x, array), tile=3)
    torch.testing.assert_close(mean["mean"], 2 * x.mean((2, 3)))


@torch.no_grad()
def test_out_may_be_a_tensor() -> None:
    net, x = nn.InstanceNorm2d(3), structured((2, 3, 30, 8)).float()
    out = torch.empty(2, 3, 30, 8, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    assert pc.tile(net, x, tile=4, out=out) is out
    torch.testing.assert_close(out, net(x))
    wide = torch.empty(2, 3, 30, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(pc.tile(lambda x: x.bfloat16() * 3, x, tile=4, out=wide), x.bfloat16() * 3)


def read_only() -> Any:
    made = numpy.zeros((1, 3, 12, 10), numpy.float32)
    made.flags.writeable = False
    return made


IMAGE = structured((1, 3, 12, 10)).float()
REFUSED = {
    "shape": (nn.ReLU(), numpy.zeros((1, 3, 12, 9), numpy.float32), r"out to have the shape \(1, 3, 12, 10\), got"),
    "dtype": (nn.ReLU(), numpy.zeros((1, 3, 12, 10)), "out to have the dtype torch.float32, got torch.float64"),
    "bfloat16": (
        lambda x: x.bfloat16(), numpy.zeros((1, 3, 12, 10), numpy.float32), r"numpy has no bfloat16: .*\.float\(\)",
    ),
    "no dtype": (nn.ReLU(), numpy.zeros((1, 3, 12, 10), "M8[s]"), "a dtype that numpy and torch both have"),
    "several": (lambda x: (x + 1, x), numpy.zeros((1, 3, 12, 10)), "one tensor, got one that returns tuple"),
    "list": (nn.ReLU(), [1, 2], "expected out to be a tensor or an array-like, got list"),
    "read-only": (nn.ReLU(), read_only(), "one that is read-only"),
    "x": (nn.ReLU(), IMAGE[:, :, :], "expected out to have memory of its own"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_cannot_be_written_into_is_refused_before_anything_is_computed(name: str) -> None:
    module, out, text = REFUSED[name]
    seen: list[int] = []
    with pytest.raises(ValueError, match=text):
        pc.tile(module, IMAGE, out=out, progress=lambda done, of: seen.append(done))
    assert seen == []


@torch.no_grad()
def test_arrays_without_a_dtype_of_torch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected x to have a dtype .*numpy has no bfloat16"):
        pc.tile(nn.ReLU(), numpy.zeros((1, 3, 12, 10), "M8[s]"))
    with pytest.raises(ValueError, match="expected x to have 3 dimensions or more"):
        pc.tile(nn.ReLU(), numpy.zeros((12, 10)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_images_in_the_hosts_memory_go_to_the_gpu_strip_by_strip() -> None:
    model, data = OfBytes().cuda(), pixels(1, 3, 512, 256)
    want = model(torch.from_numpy(data).cuda())
    for x in (data, torch.from_numpy(data)):
        torch.testing.assert_close(pc.tile(model, x, tile=16), want)
        out = torch.empty(want.shape)
        torch.testing.assert_close(pc.tile(model, x, tile=16, out=out, store="cpu"), want.cpu())
