"""A process that computes one stage with one library, and the class by which the demo drives it.

Commands and answers go through a pipe. A worker that runs out of memory, or that the system kills, ends only itself,
and the demo learns of it. A second pipe connects the two workers of a stage: stock's result is sent through it in
strips and compared, so that no process holds two results.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import multiprocessing.forkserver
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import TYPE_CHECKING, Any

import torch

from .._bytes import MIB
from ..commands.errors import out_of_memory
from .filters import Orientation, orientation
from .measure import Measurement, available_memory, measure, meter_for
from .stages import Stage, stock_bands

if TYPE_CHECKING:
    from typing_extensions import Self

STRIP_BYTES = 32 * MIB  # of a result, sent and compared at once
REPEATS = {"cpu": 1, "cuda": 5}


class OutOfMemory(Exception):
    """The worker ran out of memory, or the system killed it to free some."""


class WorkerError(Exception):
    """The worker failed for another reason. The text is its traceback."""


@dataclass(frozen=True)
class Outcome:
    """What a run returns. The worker keeps the result itself."""

    measured: Measurement
    path: str  # how the convolution was computed
    largest: float  # the largest absolute value of the result, for comparison with a difference


@dataclass(frozen=True)
class Difference:
    """How much two results differ."""

    largest: float
    where: str  # which part was compared; empty: all


class _Job:
    """A stage computed by one library. Every public method is a command."""

    def __init__(self, stage: Stage, converted: bool, device: str, peer: Connection, watch: Callable[[int], None]):
        self._stage, self._converted, self._device = stage, converted, device
        self._peer, self._watch = peer, watch
        self._module = stage.module().to(device)  # here, because it imports torchvision, which must not be measured
        self._result = torch.empty(0)

    def available(self) -> int:
        """Bytes that are free on the device."""
        return available_memory(self._device)

    def compute(self) -> Outcome:
        """Runs the stage, measures it and keeps the result."""
        import patchconv_native as pc

        module = self._module
        if self._converted:
            module = pc.convert(copy.deepcopy(module))
        with torch.no_grad():
            # A small first call loads the libraries of the kernels, whose memory is not the convolution's.
            module(torch.zeros(1, self._stage.channels, 256, 256, device=self._device))
            input = self._stage.input(self._device)
            repeats = REPEATS[self._device]
            result, measured = measure(partial(module, input), meter_for(self._device), repeats, self._watch)
        path = _path(pc.last_path()) if self._converted else "stock"
        self._result = result.cpu()  # so that the two workers of a stage do not fill the GPU
        del result, input
        if self._device == "cuda":
            torch.cuda.empty_cache()
        return Outcome(measured, path, _largest(self._result))

    def send(self) -> None:
        """Sends the result to the other worker, which runs `compare`."""
        with open(self._peer.fileno(), "wb", buffering=0, closefd=False) as pipe:
            for strip in _strips(self._result):
                left = strip.numpy().view("uint8").data
                while left:
                    left = left[pipe.write(left) :]

    def compare(self) -> Difference:
        """Compares the result with the one that the other worker sends."""
        largest = 0.0
        buffer = torch.empty(STRIP_BYTES // self._result.itemsize, dtype=self._result.dtype)
        with open(self._peer.fileno(), "rb", buffering=0, closefd=False) as pipe:
            for strip in _strips(self._result):
                other = buffer[: strip.numel()]
                left = other.numpy().view("uint8").data
                while left:
                    received = pipe.readinto(left)
                    if not received:
                        raise EOFError("the other worker ended before it had sent all of its result")
                    left = left[received:]
                largest = max(largest, _largest(torch.sub(strip, other, out=other)))
        return Difference(largest, "")

    def compare_bands(self) -> Difference:
        """Compares bands of the result with stock's, which are computed here from the rows that they depend on."""
        with torch.no_grad():
            input = self._stage.input(self._device)
            bands = stock_bands(self._module, input, self._result.shape[2])
        largest, rows = 0.0, 0
        for top, values in bands:
            part = self._result[:, :, top : top + values.shape[2]]
            largest = max(largest, _largest(part - values.cpu()))
            rows += values.shape[2]
        return Difference(largest, f"in {rows} of {self._result.shape[2]} rows")

    def small_orientation(self, step: int) -> Orientation:
        """The whole picture's orientation at 1/step of its size."""
        return orientation(self._result[0], step)

    def orientation(self, top: int, left: int, height: int, width: int) -> Orientation:
        """The orientation of a window of the picture at its own size."""
        return orientation(self._result[0, :, top : top + height, left : left + width])

    def forget(self) -> None:
        """Frees the result."""
        self._result = torch.empty(0)


def _strips(result: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A result as flat pieces of STRIP_BYTES."""
    return result.contiguous().view(-1).split(STRIP_BYTES // result.itemsize)


def _largest(values: torch.Tensor) -> float:
    """The largest absolute value. Infinite if there is a NaN, which compares as nothing."""
    low, high = map(float, torch.aminmax(values))
    return math.inf if math.isnan(low) else max(-low, high)


def _path(taken: dict[str, Any]) -> str:
    return f"in {taken['count']} tiles" if taken["path"] == "tiled" else "handed to stock: it fits"


def _context(device: str) -> SpawnContext | ForkServerContext:
    """How processes start on a device.

    For the CPU they are forked from a server that has imported torch, torchvision and this package. It has computed
    nothing, so it has no threads that a fork would lose. After a fork CUDA cannot be used: there, each imports anew.
    """
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["patchconv_native.demo.preload"])
    return context


def start_server(device: str) -> None:
    """Starts the server that the device's workers are forked from, if there is one, and does not wait for it."""
    if _context(device).get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def _serve(commands: Connection, peer: Connection, stage: Stage, converted: bool, device: str) -> None:
    """Runs in the worker's process: answers commands with (kind, value) until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C ends the demo, which then closes the pipe
    torch.backends.cudnn.allow_tf32 = False  # compute in float32, as differences are reported
    job = _Job(stage, converted, device, peer, lambda used: commands.send(("using", used)))
    while True:
        try:
            name, arguments = commands.recv()
        except EOFError:
            return
        try:
            commands.send(("done", getattr(job, name)(*arguments)))
        except Exception as error:  # the demo decides what a failure means
            if out_of_memory(error):
                commands.send(("out of memory", str(error).splitlines()[0]))
            else:
                commands.send(("failed", traceback.format_exc()))


class Worker:
    """Starts a process for one stage and one library. A context manager that ends it."""

    def __init__(
        self, stage: Stage, converted: bool, device: str, peer: Connection, watch: Callable[[int], None]
    ) -> None:
        context = _context(device)
        self._commands, theirs = context.Pipe()
        self._watch = watch
        self._process = context.Process(target=_serve, args=(theirs, peer, stage, converted, device), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe closes when the process ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._commands.close()
        self._process.join(timeout=5 if exception[0] is None else 0)
        self._process.kill()
        self._process.join()

    def ask(self, command: str, *arguments: Any) -> Any:
        """Sends a command and waits for its answer."""
        self.start(command, *arguments)
        return self.answer()

    def start(self, command: str, *arguments: Any) -> None:
        """Sends a command."""
        try:
            self._commands.send((command, arguments))
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> Any:
        """Waits for the answer to a command given by `start`.

        Raises OutOfMemory or WorkerError if the worker failed or has ended.
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
