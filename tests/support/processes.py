"""Runs a function, or one of the library's commands, in a process that is forked from one with torch imported.

A new Python takes seconds of the processor to import torch; a fork takes hundredths. The parent of the forks is the
server of `multiprocessing`'s "forkserver" method: it imports PRELOADED, runs nothing, and so has no threads that a
fork would lose. Every process of the tests (each worker of pytest-xdist) has a server of its own.

What tests the start of a program itself (`python -m patchconv_native`) still starts one, with `subprocess`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120.0
PRELOADED = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch._dynamo",
    "patchconv_native",
    "patchconv_native.distributed",
    "patchconv_native.__main__",
]


class Failed(RuntimeError):
    """What a function raised in another process, with its traceback; or that the process died."""


@functools.cache
def context() -> Any:
    """The context of `multiprocessing` whose processes are forks of a server that has imported PRELOADED."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # the server finds the package wherever it is started
        patch.setenv("PYTHONPATH", str(ROOT))
        forkserver.ensure_running()
    return found


@dataclass
class Started:
    """A process that was started, and the pipe from which its result comes."""

    process: Any
    pipe: Any

    def result(self, timeout: float = TIMEOUT) -> tuple[str, Any]:
        """("ok", what the function returned), ("error", text and traceback) or ("died", None). Ends the process."""
        try:
            if not self.pipe.poll(timeout):
                raise EOFError
            return torch.load(io.BytesIO(self.pipe.recv_bytes()), weights_only=False)
        except EOFError:
            return "died", None
        finally:
            self.end(10)

    def end(self, patience: float) -> None:
        """Waits so many seconds for the process to end, then kills it."""
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def start(function: Callable[..., Any], *args: Any, daemon: bool = True) -> Started:
    """Starts function(*args) in a forked process. A process that is to start others must not be a daemon."""
    ours, theirs = context().Pipe(duplex=False)
    settings = dict(os.environ), torch.get_num_threads()
    process = context().Process(target=_work, args=(settings, theirs, function, args), daemon=daemon)
    process.start()
    theirs.close()
    return Started(process, ours)


def run(function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> Any:
    """What function(*args) returns in a forked process, in the current folder. Raises Failed."""
    kind, value = start(function, *args, daemon=False).result(timeout)
    if kind != "ok":
        raise Failed(f"{kind}: {value}")
    return value


@dataclass(frozen=True)
class Completed:
    """What a command left: its exit code and what it wrote, whole."""

    code: int
    out: str
    err: str


def command(*arguments: str, timeout: float = TIMEOUT) -> Completed:
    """`python -m patchconv_native ARGUMENTS` in a forked process, with files for its output."""
    return run(_command, arguments, timeout=timeout)


def _work(settings: tuple[dict[str, str], int], pipe: Any, function: Callable[..., Any], args: Any) -> None:
    environment, threads = settings
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    try:
        result: Any = ("ok", function(*args))
    except BaseException as error:
        result = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    buffer = io.BytesIO()
    torch.save(result, buffer)
    pipe.send_bytes(buffer.getvalue())
    pipe.close()


def _command(arguments: tuple[str, ...]) -> Completed:
    from patchconv_native.__main__ import main

    with captured() as written:
        try:
            code: Any = main(arguments)
        except SystemExit as stopped:
            code = stopped.code
    return Completed(int(code or 0), *written)


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Fills a list with what is written to standard output and to standard error, by C++ too."""
    written: list[str] = []
    streams = (sys.stdout, sys.stderr)
    with contextlib.ExitStack() as stack:
        files, kept = [], []
        for stream, number in zip(streams, (1, 2), strict=True):
            stream.flush()
            kept.append(os.dup(number))
            files.append(stack.enter_context(tempfile.TemporaryFile("w+b")))
            os.dup2(files[-1].fileno(), number)
        try:
            yield written
        finally:
            for stream, number, file, old in zip(streams, (1, 2), files, kept, strict=True):
                stream.flush()
                os.dup2(old, number)
                os.close(old)
                file.seek(0)
                written.append(file.read().decode())
