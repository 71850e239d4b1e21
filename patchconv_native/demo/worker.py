"""A process that runs the demo's network in one way, and the class by which the demo drives it.

Each way has a process of its own, whose memory is measured. Commands and answers go through a pipe. A worker that runs
out of memory, or that the system kills, ends only itself, and the demo learns of it. Images are files, which the
workers map.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._bytes import KIB
from ..commands.errors import out_of_memory
from .blended import blend
from .measure import Measurement, available_memory, measure, meter_for
from .network import Restorer

if TYPE_CHECKING:
    from typing_extensions import Self


STRIP_PIXELS = 400_000
M_MMAP_THRESHOLD = -3  # of mallopt(3)
KEPT_BLOCK = 256 * KIB  # the largest block that comes from the heap


class OutOfMemory(Exception):
    """The worker ran out of memory, or the system killed it to free some."""


class WorkerError(Exception):
    """The worker failed for another reason. The text is its traceback."""


@dataclass(frozen=True)
class Compared:
    """One stock call beside pc.tile, on a part of the picture that fits."""

    stock: Measurement
    levels: int  # the largest difference of the two, of 255
    error: float  # the largest difference of the float32 values, in units of the largest value


class _Job:
    """The network, run in one way. Every public method is a command."""

    def __init__(self, weights: dict[str, Tensor], device: str, watch: Callable[[int], None]) -> None:
        self._network = Restorer().eval().requires_grad_(False)
        self._network.load_state_dict(weights)
        self._network.to(device)
        self._device, self._watch = device, watch

    def available(self) -> int:
        """Bytes that are free on the device."""
        return available_memory(self._device)

    def tile(self, image: Path, out: Path, budget: int) -> Measurement:
        """The image through `pc.tile`, from a file to a file. A strip's rows are given: they need not be searched."""
        import patchconv_native as pc

        self._warm_up()
        source, result = np.load(image, mmap_mode="r"), np.load(out, mmap_mode="r+")
        rows = max(8, STRIP_PIXELS // source.shape[3])
        return self._measured(lambda: pc.tile(self._network, source, budget=budget, tile=rows, out=result))

    def blend(self, image: Path, out: Path, side: int) -> Measurement:
        """Tiles that are blended."""
        self._warm_up()
        source, result = np.load(image, mmap_mode="r"), np.load(out, mmap_mode="r+")
        return self._measured(lambda: blend(self._network, source, result, side, self._device))

    def compare(self, image: Path, top: int, left: int, height: int, width: int, budget: int) -> Compared:
        """One stock call on a window, measured, and `pc.tile` on the same."""
        import patchconv_native as pc

        self._warm_up()
        source = np.load(image, mmap_mode="r")[:, :, top : top + height, left : left + width].copy()
        part = torch.from_numpy(source).to(self._device)
        results: list[Tensor] = []
        stock = self._measured(lambda: results.append(self._network(part)))
        one, other = results[0].cpu(), pc.tile(self._network, part, budget=budget).cpu()
        levels = int(np.abs(as_bytes(one.numpy()).astype(int) - as_bytes(other.numpy())).max())
        return Compared(stock, levels, float((one - other).abs().max() / one.abs().max()))

    def _warm_up(self) -> None:
        """First calls load code of the kernels and of torch, whose memory is not the network's."""
        import patchconv_native as pc

        small = torch.zeros(1, 3, 64, 64, dtype=torch.uint8, device=self._device)
        self._network(small)
        pc.tile(self._network, small, budget="8MiB")

    def _measured(self, work: Callable[[], Any]) -> Measurement:
        return measure(work, meter_for(self._device, mapped=False), watch=self._watch)[1]


def as_bytes(values: np.ndarray) -> np.ndarray:
    """Values 0 to 1 as those of a picture."""
    return (values.clip(0, 1) * 255 + 0.5).astype(np.uint8)


def _context(device: str) -> SpawnContext | ForkServerContext:
    """How processes start on a device.

    For the CPU they are forked from a server that has imported torch and this package. It has computed nothing, so it
    has no threads that a fork would lose. After a fork CUDA cannot be used: there, each imports anew.
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


def _serve(commands: Connection, weights: dict[str, np.ndarray], device: str) -> None:
    """Runs in the worker's process: answers commands with (kind, value) until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C ends the demo, which then closes the pipe
    # Blocks that are freed go back to the system at once; else the C library keeps some, which would count.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
    torch.backends.cudnn.allow_tf32 = False  # compute in float32, as differences are reported
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    with torch.no_grad():
        job = _Job(tensors, device, lambda used: commands.send(("using", used)))
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
    """Starts a process that has the network. A context manager that ends it."""

    def __init__(self, network: Restorer, device: str, watch: Callable[[int], None]) -> None:
        context = _context(device)
        self._commands, theirs = context.Pipe()
        self._watch = watch
        weights = {name: value.cpu().numpy() for name, value in network.state_dict().items()}
        self._process = context.Process(target=_serve, args=(theirs, weights, device), daemon=True)
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
        """Sends a command and waits for its answer. Raises OutOfMemory or WorkerError if the worker fails or ends."""
        try:
            self._commands.send((command, arguments))
        except BrokenPipeError:
            raise self._ended() from None
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
