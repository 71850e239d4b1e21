"""The process that computes one stage with one library, and the handle by which the demo drives it.

Commands go down a pipe and answers come back, so that a worker that runs out of memory, or that the system
kills, is an answer too. A second pipe joins the two workers of a stage: over it stock's result goes to the
other's in strips, to be compared without either being held twice.
"""

from __future__ import annotations

import copy
import multiprocessing
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from .._bytes import MIB
from .filters import Orientation, orientation
from .measure import Measurement, available_memory, is_out_of_memory, measure, meter_for
from .stages import Stage, stock_bands

if TYPE_CHECKING:
    from typing_extensions import Self

STRIP_BYTES = 32 * MIB  # of a result, sent or compared at once
REPEATS = {"cpu": 1, "cuda": 5}


class OutOfMemory(Exception):
    """The worker could not get the memory it needed, or was killed for it."""


class WorkerError(Exception):
    """The worker failed in another way; the text is its traceback."""


@dataclass(frozen=True)
class Outcome:
    """What a run gives besides its result, which stays with the worker."""

    measured: Measurement
    path: str  # how the convolution was computed
    largest: float  # the largest value of the result, to judge differences by


@dataclass(frozen=True)
class Difference:
    """How far two results are apart."""

    largest: float
    where: str  # empty if everything was compared


class _Job:
    """A stage in the hands of one library; every public method is a command."""

    def __init__(self, stage: Stage, converted: bool, device: str, peer: Connection, watch: Callable[[int], None]):
        self._stage, self._converted, self._device = stage, converted, device
        self._peer, self._watch = peer, watch
        self._module = stage.module().to(device)  # now, while nothing is measured: it imports torchvision
        self._result = torch.empty(0)

    def available(self) -> int:
        """Bytes this worker can have where it computes."""
        return available_memory(self._device)

    def compute(self) -> Outcome:
        """Runs the stage once under measurement and keeps the result."""
        import patchconv_native as pc

        module = self._module
        if self._converted:
            module = pc.convert(copy.deepcopy(module))
        with torch.no_grad():
            # A first call on little loads the kernels' libraries, which are not the convolution's memory.
            module(torch.zeros(1, self._stage.channels, 256, 256, device=self._device))
            input = self._stage.input(self._device)
            repeats = REPEATS[self._device]
            result, measured = measure(partial(module, input), meter_for(self._device), repeats, self._watch)
        path = _path(pc.last_path()) if self._converted else "stock"
        self._result = result.cpu()  # workers of a stage never hold two results on a GPU
        del result, input
        if self._device == "cuda":
            torch.cuda.empty_cache()
        return Outcome(measured, path, _largest(self._result))

    def send(self) -> None:
        """Sends the result to the other worker in strips."""
        for strip in _strips(self._result):
            self._peer.send_bytes(strip.contiguous().numpy().reshape(-1).view("uint8").data)

    def compare(self) -> Difference:
        """Compares the result with the one that the other worker sends."""
        largest = 0.0
        for strip in _strips(self._result):
            other = torch.frombuffer(bytearray(self._peer.recv_bytes()), dtype=strip.dtype).view(strip.shape)
            largest = max(largest, _difference(strip, other))
        return Difference(largest, "")

    def compare_bands(self) -> Difference:
        """Compares bands of the result with stock's, computed here from the rows they depend on."""
        with torch.no_grad():
            input = self._stage.input(self._device)
            bands = stock_bands(self._module, input, self._result.shape[2])
        largest, rows = 0.0, 0
        for top, values in bands:
            part = self._result[:, :, top : top + values.shape[2]]
            largest = max(largest, _difference(part, values.cpu()))
            rows += values.shape[2]
        return Difference(largest, f"in {rows} of {self._result.shape[2]} rows")

    def small_orientation(self, step: int) -> Orientation:
        """The whole picture's orientation at 1/step of its size."""
        return orientation(self._result[0], step)

    def orientation(self, top: int, left: int, height: int, width: int) -> Orientation:
        """The orientation of a window of the picture at its own size."""
        return orientation(self._result[0, :, top : top + height, left : left + width])

    def forget(self) -> None:
        """Lets the result go."""
        self._result = torch.empty(0)


def _strips(result: torch.Tensor) -> list[torch.Tensor]:
    """Views of rows of a (1, C, H, W) result, about STRIP_BYTES each."""
    rows = max(1, STRIP_BYTES // (result.nbytes // result.shape[2]))
    return list(result.split(rows, dim=2))


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference; NaN, which compares as nothing, counts as infinitely far."""
    apart = (one - other).abs_()
    return float(apart.nan_to_num_(nan=float("inf"), posinf=float("inf")).max())


def _largest(result: torch.Tensor) -> float:
    return max(float(strip.abs().max()) for strip in _strips(result))


def _path(taken: dict[str, Any]) -> str:
    return f"in {taken['count']} tiles" if taken["path"] == "tiled" else "handed to stock: it fits"


def _serve(commands: Connection, peer: Connection, stage: Stage, converted: bool, device: str) -> None:
    """The worker's process: answers commands until the pipe closes. Answers are (kind, value)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the demo, which closes the pipe
    torch.backends.cudnn.allow_tf32 = False  # float32 is meant, and differences are looked at
    job = _Job(stage, converted, device, peer, lambda used: commands.send(("using", used)))
    while True:
        try:
            name, words = commands.recv()
        except EOFError:
            return
        try:
            commands.send(("done", getattr(job, name)(*words)))
        except Exception as error:  # every failure is for the asker to judge
            if is_out_of_memory(error):
                commands.send(("out of memory", str(error).splitlines()[0]))
            else:
                commands.send(("failed", traceback.format_exc()))


class Worker:
    """A process working on one stage with one library; a context manager that ends it."""

    def __init__(
        self, stage: Stage, converted: bool, device: str, peer: Connection, watch: Callable[[int], None]
    ) -> None:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self._commands, theirs = context.Pipe()
        self._watch = watch
        self._process = context.Process(target=_serve, args=(theirs, peer, stage, converted, device), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._commands.close()
        self._process.join(timeout=5 if exception[0] is None else 0)
        self._process.kill()
        self._process.join()

    def ask(self, command: str, *words: Any) -> Any:
        """Gives a command and waits for its answer."""
        self.start(command, *words)
        return self.answer()

    def start(self, command: str, *words: Any) -> None:
        try:
            self._commands.send((command, words))
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> Any:
        """Waits for the answer to a command given by `start`.

        Raises OutOfMemory or WorkerError for a worker that failed or that is no more.
        """
        while True:
            try:
                kind, value = self._commands.recv()
            except (EOFError, ConnectionResetError):
                raise self._ended() from None
            if kind == "done":
                return value
            if kind == "out of memory":
                raise OutOfMemory(value)
            if kind == "failed":
                raise WorkerError(value)
            self._watch(value)

    def _ended(self) -> Exception:
        self._process.join()
        if self._process.exitcode == -signal.SIGKILL:
            return OutOfMemory("killed by the system, which does that when memory runs out")
        return WorkerError(f"the worker ended with exit code {self._process.exitcode}")
