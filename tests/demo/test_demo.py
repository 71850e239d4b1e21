"""The demo: its network, its tiles and its picture, its measurements and processes, and the whole at a small size."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

try:
    for name in ("numpy", "PIL", "matplotlib", "rich", "skimage"):
        importlib.import_module(name)
except ImportError as error:
    pytest.skip(f"the demo's packages are not all here: {error}", allow_module_level=True)

import numpy as np
from PIL import Image
from support import processes

from patchconv_native import __main__ as cli
from patchconv_native.commands.errors import Mistake, out_of_memory
from patchconv_native.demo import blended, figures, measure, network, picture, show
from patchconv_native.demo.worker import OutOfMemory, Worker, WorkerError

MIB = 2**20


@pytest.fixture
def forked_workers() -> None:
    """The demo's workers are forks of the tests' server; a server that the demo starts would be one more."""
    processes.context()


def small_photo(height: int = 128, width: int = 192, size: tuple[int, int] | None = None) -> picture.Photo:
    pixels = np.random.default_rng(5).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return picture.Photo("noise", pixels, size or (height, width), (height, width))


class TestNetwork:
    def test_training_learns_and_a_seed_gives_the_same_weights(self) -> None:
        photo, state = picture.load(None, 0.1), torch.get_rng_state()
        raw, one, again, other = (
            network.train(photo, seed, steps) for seed, steps in ((0, 1), (0, 40), (0, 40), (1, 40))
        )
        assert torch.equal(state, torch.get_rng_state())
        weights = [torch.cat([p.flatten() for p in net.parameters()]) for net in (one, again, other)]
        assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
        assert self._error(one, photo) < 0.7 * self._error(raw, photo)

    @staticmethod
    def _error(net: network.Restorer, photo: picture.Photo) -> float:
        dark = np.zeros((1, 3, *photo.size), np.uint8)
        network.write_dark(photo, 0, dark)
        clean = torch.tensor(photo.crop(0, 0, *photo.size)).permute(2, 0, 1) / 255
        return float((net(torch.from_numpy(dark))[0] - clean).square().mean().sqrt())

    def test_the_dark_picture(self) -> None:
        photo = small_photo(64, 96, size=(256, 384))
        dark = np.zeros((1, 3, 256, 384), np.uint8)
        network.write_dark(photo, 0, dark)
        clean = photo.crop(0, 0, 256, 384).transpose(2, 0, 1)
        assert dark.mean() == pytest.approx(network.SHOWN * clean.mean(), rel=0.05)
        assert (dark[0, :, 128:].astype(float) - network.SHOWN * clean[:, 128:]).std() > 2  # noise, in every strip


class TestBlended:
    @pytest.mark.parametrize("size", [(64, 64), (256, 384), (200, 328), (64, 104), (48, 400)])
    def test_tiles_add_up(self, size: tuple[int, int]) -> None:
        """What looks at single pixels gives the same tile by tile: every pixel is there, and weights add up to 1."""
        image = np.random.default_rng(0).random((1, 3, *size), np.float32)
        out = np.zeros_like(image)
        blended.blend(torch.nn.Identity(), image, out, 64)
        np.testing.assert_allclose(out, image, rtol=1e-5)

    def test_a_norm_sees_one_tile(self) -> None:
        image = np.zeros((1, 4, 256, 256), np.float32)
        image[..., 128:] = 1
        norm, out = torch.nn.InstanceNorm2d(4), np.zeros_like(image)
        blended.blend(norm, image, out, 64)
        assert np.abs(out - norm(torch.from_numpy(image)).numpy()).max() > 0.5

    def test_side(self) -> None:
        assert blended.tile_side((5656, 8496)) == 1024 and blended.tile_side((256, 384)) == 64


def load_without_a_network() -> None:
    def refuse(*words: object, **names: object) -> None:
        raise OSError("no network")

    for name in ("pooch", "skimage"):
        sys.modules.pop(name, None)
    socket.socket.connect = socket.getaddrinfo = refuse  # type: ignore[assignment, method-assign]
    assert picture.load(None, 1).pixels.size
    assert "pooch" not in sys.modules and "skimage" not in sys.modules


class TestPicture:
    def test_bundled(self) -> None:
        photo = picture.load(None, 48)
        assert photo.size[0] * photo.size[1] >= 48e6
        assert photo.size[0] % 8 == photo.size[1] % 8 == 0
        assert photo.pixels.shape == (*photo.opened_size, 3) and photo.pixels.std() > 20
        assert photo.size[0] / photo.size[1] == pytest.approx(photo.opened_size[0] / photo.opened_size[1], rel=0.01)

    def test_the_bundled_one_is_not_downloaded(self) -> None:
        processes.run(load_without_a_network)

    @pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "I;16", "I", "F"])
    def test_modes(self, mode: str, tmp_path: Path) -> None:
        grey = np.tile(np.arange(40, dtype=np.uint8) * 6, (30, 1))
        if mode in ("I;16", "I", "F"):
            kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
            made = Image.fromarray(grey.astype(kind) * kind(200))
        else:
            made = Image.fromarray(grey).convert("RGB").convert(mode)
        assert made.mode == mode
        made.save(file := tmp_path / "it.tiff")
        pixels = picture.load(file, 0.1).pixels
        assert pixels.shape == (30, 40, 3) and pixels.dtype == np.uint8
        assert pixels[:, :4].mean() < 40 and pixels[:, -4:].mean() > 200

    def test_what_is_transparent_is_white(self, tmp_path: Path) -> None:
        Image.new("RGBA", (40, 30), (255, 0, 0, 0)).save(file := tmp_path / "clear.png")
        assert (picture.load(file, 0.1).pixels == 255).all()

    def test_camera_orientation(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6  # turn a quarter clockwise to view
        Image.new("RGB", (60, 30)).save(file := tmp_path / "turned.jpg", exif=exif)
        photo = picture.load(file, 0.1)
        assert photo.opened_size == (60, 30) and photo.size[0] > photo.size[1]

    def test_a_larger_picture_is_made_smaller(self, tmp_path: Path) -> None:
        Image.effect_noise((900, 600), 40).save(file := tmp_path / "large.png")
        photo = picture.load(file, 0.25)
        assert photo.pixels.shape[:2] == photo.size and 250e3 <= photo.size[0] * photo.size[1] < 260e3
        assert photo.scale == 1 and photo.opened_size == (600, 900)

    def test_narrow(self, tmp_path: Path) -> None:
        Image.new("L", (6500, 16)).save(file := tmp_path / "band.png")
        assert picture.load(file, 0.1).size == (16, 6376)
        Image.new("L", (6700, 16)).save(file)
        with pytest.raises(Mistake, match=r"6472 x 16 at 0\.1 megapixels; .* at least 1/400 of the other"):
            picture.load(file, 0.1)

    def test_past_pillows_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        Image.new("L", (100, 100)).save(file := tmp_path / "it.png")
        assert picture.load(file, 0.1).opened_size == (100, 100)
        assert Image.MAX_IMAGE_PIXELS == 100  # for everybody else it stays

    def test_crop(self) -> None:
        photo = small_photo(size=(256, 384))
        np.testing.assert_array_equal(small_photo().crop(30, 50, 20, 40), small_photo().pixels[30:50, 50:90])
        assert photo.crop(31, 50, 20, 41).shape == (20, 41, 3)


def measure_after_a_hole_in_the_heap() -> tuple[int, int]:
    """The peak, and what is left at the end."""
    torch.ones(1 << 20)  # a first call, whose code is loaded outside of the measurement
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: everything goes to the heap
    hole, _ = libc.malloc(200 * MIB), libc.malloc(1000)
    libc.free(hole)
    measured = measure.measure(TestMeasure._work, measure.HostMeter())[1]
    return measured.peak, measured.curve[-1][1]


def measure_on_the_host() -> tuple[int, measure.Measurement]:
    """In a process that does nothing else, as the meter asks for: workers of pytest free what earlier tests left."""
    torch.ones(1 << 20)  # a first call, whose code is loaded outside of the measurement
    result, measured = measure.measure(TestMeasure._work, measure.HostMeter())
    return result.nbytes, measured


class TestMeasure:
    def test_host(self) -> None:
        size, measured = processes.run(measure_on_the_host)
        assert size == measured.result == 32 * MIB
        assert measured.workspace == pytest.approx(96 * MIB, abs=4 * MIB)
        assert measured.peak == pytest.approx(128 * MIB, abs=4 * MIB)
        # The curve is what the thread saw: it climbs to the peak, and what is left at the end is the result.
        assert max(value for _, value in measured.curve) == pytest.approx(measured.peak, abs=4 * MIB)
        assert measured.curve[-1][1] == pytest.approx(32 * MIB, abs=4 * MIB)
        times = [seconds for seconds, _ in measured.curve]
        assert times == sorted(times) and len(times) > 5 and times[-1] == pytest.approx(measured.seconds)
        assert 0.1 <= measured.seconds < 5

    def test_free_memory_kept_by_the_heap_does_not_count(self) -> None:
        """Blocks that fit into a hole of the heap stay resident when they are freed."""
        peak, left = processes.run(measure_after_a_hole_in_the_heap)
        assert peak == pytest.approx(128 * MIB, abs=4 * MIB) and left == pytest.approx(32 * MIB, abs=4 * MIB)

    def test_an_earlier_peak_does_not_count(self) -> None:
        torch.ones(256 * MIB // 4).sum()
        assert measure.measure(self._work, measure.HostMeter())[1].peak < 140 * MIB

    def test_a_peak_below_the_result_is_no_negative_workspace(self) -> None:
        """Where the result goes into memory that the process already occupied."""
        assert measure.Measurement(0.1, peak=5 * MIB, result=7 * MIB, curve=[(0.0, 0)]).workspace == 0

    def test_median_of_repeats_and_watching(self) -> None:
        calls: list[int] = []
        told: list[int] = []

        def work() -> torch.Tensor:
            calls.append(0)
            time.sleep(0.25 if len(calls) == 1 else 0.01)
            return torch.ones(4)

        _, measured = measure.measure(work, measure.HostMeter(), repeats=3, watch=told.append)
        assert len(calls) == 3 and measured.seconds < 0.2 and measured.curve[-1][0] >= 0.25
        assert told and all(value > 10 * MIB for value in told)

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    def test_gpu(self) -> None:
        _, measured = measure.measure(lambda: self._work("cuda"), measure.CudaMeter(), repeats=2)
        assert measured.workspace == 96 * MIB and measured.result == 32 * MIB

    def test_a_containers_limit_counts(self, tmp_path: Path) -> None:
        assert 100 * MIB < measure.available_memory("cpu") < 2**50
        (tmp_path / "memory.max").write_text("1000\n")
        (tmp_path / "memory.current").write_text("700\n")
        (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 50\n")
        assert measure._left_in_group(tmp_path, "memory.max", "memory.current") == 500
        (tmp_path / "memory.max").write_text("max\n")
        assert measure._left_in_group(tmp_path, "memory.max", "memory.current") > 2**60

    def test_out_of_memory_is_recognised(self) -> None:
        for work, expected in ((lambda: torch.empty(2**55), True), (lambda: torch.ones(2) @ torch.ones(3), False)):
            with pytest.raises(RuntimeError) as caught:
                work()
            assert out_of_memory(caught.value) == expected

    @staticmethod
    def _work(device: str = "cpu") -> torch.Tensor:
        held = torch.ones(96 * MIB // 4, device=device)
        result = torch.ones(32 * MIB // 4, device=device)
        time.sleep(0.1)
        del held
        return result


@pytest.mark.usefixtures("forked_workers")
class TestWorker:
    def test_a_failure_carries_its_traceback(self) -> None:
        with self._worker() as worker:
            with pytest.raises(WorkerError, match=r"AttributeError.*fly"):
                worker.ask("fly")
            assert worker.ask("available") > 0  # and it goes on working

    def test_killed_is_out_of_memory(self) -> None:
        with self._worker() as worker:
            assert worker.ask("available") > 0
            pid = worker._process.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(OutOfMemory, match="killed by the system"):
                worker.ask("available")

    def test_another_end_is_a_failure(self) -> None:
        with self._worker() as worker:
            worker.ask("available")
            worker._process.terminate()
            with pytest.raises(WorkerError, match="ended with exit code -15"):
                worker.ask("available")

    def test_ways_agree_and_a_difference_is_found(self, tmp_path: Path) -> None:
        image, out = tmp_path / "dark.npy", tmp_path / "out.npy"
        np.save(image, np.random.default_rng(0).integers(0, 256, (1, 3, 96, 128), np.uint8))
        np.save(out, np.zeros((1, 3, 96, 128), np.float32))
        with self._worker() as worker:
            compared = worker.ask("compare", image, 0, 0, 96, 128, 8 * MIB)
            assert compared.levels <= 1 and compared.error < 1e-5 and compared.stock.peak >= 0
            worker.ask("tile", image, out, 8 * MIB)
            ours = np.load(out)
            np.save(out, np.zeros_like(ours))
            worker.ask("blend", image, out, 64)
        whole = self._network()(torch.from_numpy(np.load(image))).numpy()
        assert np.abs(ours - whole).max() < 1e-5 * np.abs(whole).max()
        apart = show._apart(ours, np.load(out))
        expected = np.abs(np.load(out).clip(0, 1) - ours.clip(0, 1))
        assert apart.largest == pytest.approx(255 * expected.max()) and apart.largest > 1
        assert apart.mean == pytest.approx(255 * expected.mean(), rel=1e-4)

    @staticmethod
    def _network() -> network.Restorer:
        torch.manual_seed(0)
        return network.Restorer().requires_grad_(False).eval()

    @classmethod
    def _worker(cls) -> Worker:
        return Worker(cls._network(), "cpu", lambda used: None)


class TestFigures:
    def test_the_window_lies_on_the_false_edge(self) -> None:
        ours = np.zeros((200, 300, 3), np.float32)
        ours[:, 60:] = 1  # an edge that both have
        blend = ours.copy()
        blend[120:160, 200:] -= 0.3
        top, left, height, width = figures.choose_window(blend, ours, 4, 128, (800, 1200))
        assert top < 560 < top + height and left < 800 < left + width and left > 240
        assert top >= 0 and top + height <= 800 and left + width <= 1200

    @pytest.mark.parametrize("size", [(16, 1000), (1000, 16), (16, 6400), (6400, 16)])
    def test_a_window_fits_into_the_narrowest_picture(self, size: tuple[int, int]) -> None:
        step = max(1, size[1] // figures.SHRUNK)
        flat = np.zeros((size[0] // step, size[1] // step, 3), np.float32)
        top, left, height, width = figures.choose_window(flat, flat, step, blended.tile_side(size), size)
        assert height > 0 and width > 0 and 0 <= top <= size[0] - height and 0 <= left <= size[1] - width

    def test_shrink_in_strips_is_the_average(self) -> None:
        image = np.random.default_rng(0).random((1, 3, 300, 96), np.float32)
        means = image[0].reshape(3, 100, 3, 32, 3).mean((2, 4)).transpose(1, 2, 0)
        np.testing.assert_allclose(figures.shrink(image, 3), means, rtol=1e-4)


def lively(file: Path) -> np.ndarray:
    """A picture's pixels, after a look at whether there is anything on it."""
    pixels = np.asarray(Image.open(file).convert("RGB")).astype(np.float32)
    assert min(pixels.shape[:2]) > 400
    assert pixels.std() > 15 and len(np.unique(pixels.reshape(-1, 3)[::53], axis=0)) > 50
    return pixels


def sizes(line: str) -> list[float]:
    """The memory sizes in a line, in MiB."""
    units = {"B": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 2**10}
    return [float(value) * units[unit] for value, unit in re.findall(r"([\d.]+) ((?:[KMG]i)?B)\b", line)]


def demo(capfd: pytest.CaptureFixture[str], out: Path, *words: str) -> list[str]:
    assert cli.main(["demo", "--device", "cpu", "--out", str(out), *words]) == 0
    written = capfd.readouterr()
    assert written.err == ""
    return written.out.splitlines()


class TestWhole:
    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        train = network.train
        monkeypatch.setattr(show, "train", lambda photo, seed: train(photo, seed, steps=8))

    def test_the_three_ways(self, tmp_path: Path, forked_workers: None, capfd: pytest.CaptureFixture[str]) -> None:
        lines = demo(capfd, tmp_path, "--megapixels", "0.5")
        assert lines[0].startswith("a rocket at dusk, 640 x 427, enlarged 1.3")
        (stock,) = (line for line in lines if "one call, stock PyTorch" in line)
        (ours,) = (line for line in lines if "pc.tile, budget 256 MiB" in line)
        (tiles,) = (line for line in lines if "tiles of 96 x 96, blended" in line)
        assert 100 < sizes(stock)[0] < 200 and "predicted" in stock
        found = re.search(r"(\d) of 255 levels \(float32: (.*)\)", ours)
        assert found and int(found[1]) <= 1 and float(found[2]) < 1e-5
        found = re.search(r"up to (\d+), (\d+\.\d) on average", tiles)
        assert found and int(found[1]) >= 1
        assert len(list(tmp_path.iterdir())) == 2  # the files of the run are gone

        lively(tmp_path / "demo.png")
        curve_pixels = lively(tmp_path / "memory.png")
        for colour in (figures.STOCK, figures.OURS):
            wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
            assert (np.abs(curve_pixels - wanted).max(2) < 8).sum() > 1000, "a curve is missing"

    def test_own_picture(self, tmp_path: Path, forked_workers: None, capfd: pytest.CaptureFixture[str]) -> None:
        rings = np.hypot(*np.mgrid[-150:150, -100:100])
        Image.fromarray((127 + 120 * np.sin(rings)).astype(np.uint8)).save(tmp_path / "rings.png")
        out = tmp_path / "new" / "folder"
        lines = demo(capfd, out, "--image", str(tmp_path / "rings.png"), "--megapixels", "0.2")
        assert lines[0].startswith("rings.png, 200 x 300, enlarged 1.8")
        lively(out / "demo.png")

    def test_too_little_memory(self, tmp_path: Path, forked_workers: None, monkeypatch, capsys) -> None:
        monkeypatch.setattr(show, "SLACK", 2**50)
        assert cli.main(["demo", "--device", "cpu", "--out", str(tmp_path), "--megapixels", "0.1"]) != 0
        text = capsys.readouterr().err
        assert re.search(r"needs about .* at this size and .* is available; use a smaller --megapixels", text)
        assert not list(tmp_path.iterdir())

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    def test_on_a_gpu(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "patchconv_native", "demo", "--megapixels", "8", "--out", str(tmp_path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=processes.ROOT, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        (ours,) = (line for line in done.stdout.splitlines() if "pc.tile, budget" in line)
        assert sizes(ours)[1] <= 256
        lively(tmp_path / "demo.png")
