"""The demo: its filters and its picture, its measurements and processes, and the whole at a small size."""

from __future__ import annotations

import ctypes
import importlib
import math
import multiprocessing
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
    for name in ("numpy", "PIL", "matplotlib", "rich", "skimage", "torchvision"):
        importlib.import_module(name)
except Exception as error:  # a torchvision beside another torch fails in ways of its own
    pytest.skip(f"the demo's packages are not all usable here: {error}", allow_module_level=True)

import numpy as np
from PIL import Image
from support import processes

from patchconv_native import __main__ as cli
from patchconv_native.commands.errors import out_of_memory
from patchconv_native.demo import DemoError, figures, filters, measure, picture, report, show, stages
from patchconv_native.demo.worker import Difference, Outcome, OutOfMemory, Worker, WorkerError

MIB = 2**20
AS_IT_IS = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)  # mean and deviation of a picture that is not changed


def grating(direction: float, wavelength: float, phase: float = 0.3, size: int = 96) -> torch.Tensor:
    """Stripes that run in `direction` (radians, counterclockwise as seen on a screen), (1, 1, size, size)."""
    down, right = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    across = right * math.sin(direction) + down * math.cos(direction)
    return torch.sin(2 * math.pi * across / wavelength + phase)[None, None]


def seen(image: torch.Tensor, dilation: int = 1) -> filters.Orientation:
    return filters.orientation(torch.nn.functional.conv2d(image, filters.gabor_bank(), dilation=dilation)[0])


def turned(one: float, other: float) -> float:
    """The angle between two lines."""
    return abs((one - other + math.pi / 2) % math.pi - math.pi / 2)


@pytest.fixture
def forked_workers() -> None:
    """The demo's workers are forks of the tests' server; a server that the demo starts would be one more."""
    processes.context()


def small_photo(height: int = 128, width: int = 192, size: tuple[int, int] | None = None) -> picture.Photo:
    pixels = np.random.default_rng(5).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return picture.Photo("noise", pixels, size or (height, width), (height, width))


class TestFilters:
    def test_bank(self) -> None:
        bank = filters.gabor_bank()
        assert bank.shape == (16, 1, 31, 31) and bank.dtype == torch.float32
        torch.testing.assert_close(bank.sum((1, 2, 3)), torch.zeros(16), atol=1e-5, rtol=0)
        torch.testing.assert_close(bank.square().sum((1, 2, 3)), torch.ones(16))
        turned = bank.flip(2, 3)  # a cosine wave looks the same from either side, a sine wave is its own opposite
        torch.testing.assert_close(turned[:8], bank[:8])
        torch.testing.assert_close(turned[8:], -bank[8:])

    @pytest.mark.parametrize("degrees", [0, 10, 22.5, 45, 60, 90, 110, 135, 157.5, 175])
    def test_direction_of_a_grating(self, degrees: float) -> None:
        view = seen(grating(math.radians(degrees), filters.WAVELENGTH))
        for found in view.direction().ravel()[::97]:
            assert math.degrees(turned(float(found), math.radians(degrees))) < 2.5

    @pytest.mark.parametrize("index", range(filters.DIRECTIONS))
    def test_the_filter_of_that_direction_answers_most(self, index: int) -> None:
        direction = float(filters.directions()[index])
        answers = torch.nn.functional.conv2d(grating(direction, filters.WAVELENGTH), filters.gabor_bank())[0]
        energy = (answers[:8].square() + answers[8:].square()).mean((1, 2))
        assert int(energy.argmax()) == index

    def test_energy_does_not_depend_on_the_phase(self) -> None:
        strengths = [seen(grating(0.4, filters.WAVELENGTH, phase)).strength() for phase in (0.0, 0.9, 2.2)]
        for strength in strengths:
            assert strength.std() < 0.02 * strength.mean()
        assert strengths[0].mean() == pytest.approx(strengths[1].mean(), rel=0.01)

    def test_flat_areas_give_nothing(self) -> None:
        assert seen(torch.full((1, 1, 64, 64), 0.8)).strength().max() < 1e-3
        assert seen(grating(0.4, filters.WAVELENGTH)).strength().min() > 1

    def test_dilation_is_a_larger_filter(self) -> None:
        view = seen(grating(1.1, 3 * filters.WAVELENGTH, size=160), dilation=3)
        assert turned(float(view.direction().mean()), 1.1) < math.radians(2.5)
        assert view.strength().mean() == pytest.approx(
            seen(grating(1.1, filters.WAVELENGTH)).strength().mean(), rel=0.02
        )

    @pytest.mark.parametrize("step", [1, 3, 64, 100])
    def test_small_orientation_is_the_average(self, step: int) -> None:
        responses = torch.randn(16, 210, 323)
        whole, small = filters.orientation(responses), filters.orientation(responses, step)
        rows, columns = 210 // step, 323 // step
        assert small.real.shape == (rows, columns)
        for large, average in ((whole.real, small.real), (whole.imag, small.imag)):
            squares = large[: rows * step, : columns * step].reshape(rows, step, columns, step)
            np.testing.assert_allclose(average, squares.mean((1, 3)), rtol=1e-3, atol=1e-4)


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
        with pytest.raises(DemoError, match=r"6472 x 16 at 0\.1 megapixels; .* at least 1/400 of the other"):
            picture.load(file, 0.1)

    def test_past_pillows_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        Image.new("L", (100, 100)).save(file := tmp_path / "it.png")
        assert picture.load(file, 0.1).opened_size == (100, 100)
        assert Image.MAX_IMAGE_PIXELS == 100  # for everybody else it stays

    def test_tensors(self) -> None:
        photo = small_photo(size=(256, 384))
        colour, grey = photo.normalized(*AS_IT_IS, "cpu"), photo.luminance("cpu")
        assert colour.shape == (1, 3, 256, 384) and grey.shape == (1, 1, 256, 384)
        mixed = (colour * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
        torch.testing.assert_close(grey, mixed, atol=1e-4, rtol=0)
        plain = small_photo()
        torch.testing.assert_close(
            plain.normalized(*AS_IT_IS, "cpu")[0, 1] * 255, torch.from_numpy(plain.pixels[..., 1]).float()
        )

    def test_crop(self) -> None:
        photo = small_photo(size=(256, 384))
        np.testing.assert_array_equal(small_photo().crop(30, 50, 20, 40), small_photo().pixels[30:50, 50:90])
        assert photo.crop(31, 50, 20, 41).shape == (20, 41, 3)


def measure_after_a_hole_in_the_heap() -> tuple[int, int]:
    """The peak, and what is left at the end."""
    torch.ones(1 << 20)  # a first call, whose code is loaded outside of the measurement
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: everything goes to the heap
    hole, _ = libc.malloc(200 * MIB), libc.malloc(1000)
    libc.free(hole)
    measured = measure.measure(TestMeasure._work, measure.HostMeter())[1]
    return measured.peak, measured.curve[-1][1]


class TestMeasure:
    def test_host(self) -> None:
        result, measured = measure.measure(self._work, measure.HostMeter())
        assert result.nbytes == measured.result == 32 * MIB
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

    def test_available(self) -> None:
        assert 100 * MIB < measure.available_memory("cpu") < 2**50

    def test_a_containers_limit_counts(self, tmp_path: Path) -> None:
        (tmp_path / "memory.max").write_text("1000\n")
        (tmp_path / "memory.current").write_text("700\n")
        (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 50\n")
        assert measure._left_in_group(tmp_path, "memory.max", "memory.current") == 500
        (tmp_path / "memory.max").write_text("max\n")
        assert measure._left_in_group(tmp_path, "memory.max", "memory.current") > 2**60

    def test_out_of_memory_is_recognised(self) -> None:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2**55)
        assert out_of_memory(caught.value)
        with pytest.raises(RuntimeError) as caught:
            torch.ones(2) @ torch.ones(3)
        assert not out_of_memory(caught.value)

    @staticmethod
    def _work(device: str = "cpu") -> torch.Tensor:
        held = torch.ones(96 * MIB // 4, device=device)
        result = torch.ones(32 * MIB // 4, device=device)
        time.sleep(0.1)
        del held
        return result


class TestStages:
    @pytest.mark.parametrize("index", [0, 1])
    def test_shapes_are_those_of_the_tensors(self, index: int) -> None:
        stage = stages.stages(small_photo(size=(512, 768)), seed=0)[index]
        module, values = stage.module(), stage.input("cpu")
        with torch.no_grad():
            result = module(values)
        weights = sum(parameter.nbytes for parameter in module.parameters())
        assert stage.shapes() == stages.Shapes(values.nbytes, weights, result.nbytes)
        assert result.shape[0] == 1 and values.shape[1] == stage.channels

    def test_the_bank_gives_one_value_a_pixel(self) -> None:
        photo = small_photo(64, 96, size=(512, 768))
        bank = stages.GaborBank(photo)
        module = bank.module()
        assert isinstance(module, torch.nn.Conv2d) and module.dilation == (2, 2)
        assert module(bank.input("cpu")).shape == (1, 16, 512, 768)

    @pytest.mark.parametrize("index", [0, 1])
    def test_bands_are_parts_of_the_whole(self, index: int) -> None:
        stage = stages.stages(small_photo(), seed=0)[index]
        module, values = stage.module(), stage.input("cpu")
        with torch.no_grad():
            whole = module(values)
            bands = stages.stock_bands(module, values, whole.shape[2])
        assert len(bands) == stages.BANDS
        for top, band in bands:
            assert top >= 0 and band.shape[2] == stages.BAND_ROWS
            torch.testing.assert_close(band, whole[:, :, top : top + band.shape[2]], atol=2e-6, rtol=1e-5)
        assert bands[0][0] < 4 and bands[-1][0] + stages.BAND_ROWS > whole.shape[2] - 4

    def test_seed(self) -> None:
        photo = small_photo()
        state = torch.get_rng_state()
        weights = [next(stages.ResnetStem(photo, seed).module().parameters()) for seed in (0, 0, 1)]
        assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
        assert torch.equal(state, torch.get_rng_state())


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

    def test_a_difference_is_found(self) -> None:
        """Two workers with unlike weights: the comparison has to see what is there."""
        photo, (one, other) = small_photo(), multiprocessing.Pipe()
        mine, theirs = (stages.ResnetStem(photo, seed) for seed in (0, 1))
        with (
            Worker(mine, True, "cpu", one, lambda used: None) as first,
            Worker(theirs, False, "cpu", other, lambda used: None) as second,
        ):
            outcome = first.ask("compute")
            second.ask("compute")
            second.start("send")
            difference = first.ask("compare")
            second.answer()
        with torch.no_grad():
            results = [stage.module()(stage.input("cpu")) for stage in (mine, theirs)]
        assert difference.largest == pytest.approx(float((results[0] - results[1]).abs().max()), abs=1e-5)
        assert difference.largest > 0.1 and difference.where == ""
        assert outcome.largest == pytest.approx(float(results[0].abs().max()), abs=1e-5)

    @staticmethod
    def _worker() -> Worker:
        return Worker(stages.ResnetStem(small_photo(), 0), False, "cpu", multiprocessing.Pipe()[0], lambda used: None)


class TestFigures:
    def test_colours(self) -> None:
        angles = np.linspace(0, np.pi, 181)[None]
        full = figures.colours(angles, np.ones_like(angles))
        assert full.min() >= 0 and full.max() <= 1
        np.testing.assert_allclose(full[0, 0], full[0, -1], atol=1e-6)  # a line turned by 180 degrees is the same line
        apart = np.linalg.norm(full[0, 30:] - full[0, :-30], axis=-1)
        assert apart.min() > 0.15  # 30 degrees on is another colour
        assert figures.colours(angles, np.zeros_like(angles)).max() < 0.05

    def test_the_window_goes_where_the_lines_are(self) -> None:
        """A ring on noise, beside stripes that are stronger but all of one direction."""
        down, right = np.mgrid[:400, :600]
        radius = np.hypot(right - 420, down - 130)
        image = 0.02 * np.random.default_rng(1).standard_normal((400, 600))
        image += np.sin(2 * np.pi * radius / filters.WAVELENGTH) * (radius < 45)
        image[300:, :300] += 2 * np.sin(2 * np.pi * right[300:, :300] / filters.WAVELENGTH)
        padded = torch.nn.functional.pad(torch.from_numpy(image).float()[None, None], [15] * 4, mode="replicate")
        top, left, height, width = figures.choose_window(small_photo(400, 600), seen(padded), step=1)
        assert top < 130 < top + height and left < 420 < left + width
        assert top >= 0 and left >= 0 and top + height <= 400 and left + width <= 600

    @pytest.mark.parametrize("width", [16, 1000, 6400, 11184, 40000])
    @pytest.mark.parametrize("turned", [False, True])
    def test_a_window_fits_into_the_narrowest_picture(self, width: int, turned: bool) -> None:
        narrow = max(picture.SMALLEST_SIDE, 8 * math.ceil(width / picture.NARROWEST / 8))
        size = (width, narrow) if turned else (narrow, width)
        assert picture.workable(size)
        photo = picture.Photo("band", np.zeros((1, 1, 3), np.uint8), size, size)
        step = show.whole_step(photo)
        flat = np.zeros((size[0] // step, size[1] // step), np.float32)
        top, left, height, across = figures.choose_window(photo, filters.Orientation(flat, flat), step)
        assert height > 0 and across > 0 and top + height <= size[0] and left + across <= size[1]

    def test_the_window_follows_the_focus(self) -> None:
        photo = picture.load(None, 2)
        flat = filters.Orientation(np.zeros((300, 450), np.float32), np.zeros((300, 450), np.float32))
        top, left, height, width = figures.choose_window(photo, flat, step=4)
        assert photo.focus is not None
        assert top < photo.focus[0] * photo.size[0] < top + height
        assert left < photo.focus[1] * photo.size[1] < left + width


class TestVerdict:
    def test_a_sentence(self) -> None:
        (line,) = report.verdict([self._result(96 * MIB, 10 * MIB)])
        assert line == "resnet18 stem: 10 MiB above the result where stock takes 96 MiB, in 0.50 of its time"

    def test_below_nothing_is_nothing(self) -> None:
        (line,) = report.verdict([self._result(10 * MIB, -2 * MIB)])
        assert "stem: 0 B above the result where stock takes 10 MiB" in line

    @pytest.mark.parametrize(("stock", "ours"), [(-2, -1), (0, 0), (MIB - 1, MIB - 1), (-2 * MIB, MIB // 2)])
    def test_no_sentence_on_noise(self, stock: int, ours: int) -> None:
        assert report.verdict([self._result(stock, ours)]) == []

    @pytest.mark.parametrize(("stock", "ours"), [(MIB, 0), (0, MIB)])
    def test_one_that_is_no_noise_is_told(self, stock: int, ours: int) -> None:
        assert len(report.verdict([self._result(stock, ours)])) == 1

    @staticmethod
    def _result(stock: int, ours: int) -> report.StageResult:
        """What a stage gave with these peaks above the result; stock took twice the time."""
        stage = stages.ResnetStem(small_photo(), 0)
        shapes = stage.shapes()
        one, other = (
            Outcome(measure.Measurement(seconds, shapes.result + above, shapes.result, [(0.0, 0)]), "stock", 1.0)
            for seconds, above in ((2.0, stock), (1.0, ours))
        )
        return report.StageResult(stage, shapes, one, other, Difference(0.0, ""))


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
    def test_beside_stock(self, tmp_path: Path, forked_workers: None, capfd: pytest.CaptureFixture[str]) -> None:
        lines = demo(capfd, tmp_path, "--megapixels", "2")
        printed = "\n".join(lines)
        assert lines[0].startswith("Chelsea the cat, 451 x 300, enlarged 3.")
        stock = [line for line in lines if "stock PyTorch" in line]
        ours = [line for line in lines if "  patchconv_native " in line]
        assert len(stock) == len(ours) == 2
        for theirs, mine in zip(stock, ours, strict=True):
            result, workspace = sizes(mine)
            (stock_workspace,) = sizes(theirs)
            assert result > 120 and workspace <= 96  # MiB: the promise
            assert stock_workspace > 0.6 * result  # stock works on a reordered copy
            assert float(mine.split()[-1]) <= 2e-5  # the largest difference, of values up to 2
        assert len(re.findall(r"in \d+ tiles", printed)) == 2, "patchconv_native did not tile"
        assert printed.count("above the result where stock takes") == 2

        picture_pixels = lively(tmp_path / "demo.png")
        hero = picture_pixels[300 : 300 + 1000]
        assert (hero.max(2) - hero.min(2)).mean() > 25  # it is in colour
        curve_pixels = lively(tmp_path / "memory.png")
        for colour in (figures.STOCK, figures.OURS):
            wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
            assert (np.abs(curve_pixels - wanted).max(2) < 8).sum() > 2000, "a curve is missing"

    def test_own_picture_where_stock_does_not_fit(
        self, tmp_path: Path, forked_workers: None, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Stock is not run, the table says so, and the results are compared with stock's in bands of rows."""
        rings = np.hypot(*np.mgrid[-150:150, -100:100])
        Image.fromarray((127 + 120 * np.sin(rings)).astype(np.uint8)).save(tmp_path / "rings.png")
        out = tmp_path / "new" / "folder"
        lines = demo(capfd, out, "--image", str(tmp_path / "rings.png"), "--megapixels", "2", "--memory", "0.49")
        printed = "\n".join(lines)
        assert lines[0].startswith("rings.png, 200 x 300, enlarged 5.")
        assert all("not run" in line and not sizes(line) for line in lines if "stock PyTorch" in line)
        assert len(re.findall(r"stock not run: needs about .* and 502 MiB is available", printed)) == 2
        ours = [line for line in lines if "  patchconv_native " in line]
        assert len(ours) == 2 and all(float(line.split()[-1]) <= 2e-5 for line in ours)
        assert len(re.findall(r"in 128 of \d+ rows", printed)) == 2
        lively(out / "demo.png")
        lively(out / "memory.png")

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    def test_on_a_gpu(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "patchconv_native", "demo", "--megapixels", "8", "--out", str(tmp_path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=processes.ROOT, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        ours = [line for line in done.stdout.splitlines() if "  patchconv_native " in line]
        assert len(ours) == 2 and all(sizes(line)[1] <= 96 for line in ours)
        lively(tmp_path / "demo.png")


def test_demo_errors_are_one_line() -> None:
    with pytest.raises(DemoError) as caught:
        picture.load(Path("/nowhere/at all"), 48)
    assert "\n" not in str(caught.value)
