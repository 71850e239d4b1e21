"""This package's settings, and a record of how convolutions were computed.

The values are in the native library: Python, TorchScript and C++ see the same ones. A setting has a value for the
process, and in a `with` block one that is the thread's own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from . import _library
from ._bytes import parse_bytes

_C = _library.load()


class _Set(AbstractContextManager[Any]):
    """Sets a value: of the process, or inside of a `with` block the thread's own. As a context manager it takes that
    back, and sets the thread's own value until the block's end.
    """

    def __init__(self, setting: _Setting, value: Any) -> None:
        self._setting, self._value = setting, value
        self._own = setting.own()
        self._of_process = self._own is None
        if self._of_process:
            setting.set_for_process(self, value)
        else:
            setting.set_own(value)

    def __enter__(self) -> Any:
        if self._of_process:
            self._setting.take_back(self)
            self._own = self._setting.own()
        self._setting.set_own(self._value)
        return self._value

    def __exit__(self, *exception: object) -> None:
        self._setting.set_own(self._own)

    def __repr__(self) -> str:
        return repr(self._value)


class _Setting:
    """One setting, and the calls that set it for the process and may be taken back, in order: each with the value
    before it.
    """

    NAMES = ("workspace_limit", "backend", "recompute")

    def __init__(self, name: str) -> None:
        self.get: Callable[[], Any] = getattr(_C, name)
        self._set: Callable[[Any], None] = getattr(_C, f"set_{name}")
        self._place = self.NAMES.index(name)
        self._lock = threading.Lock()
        self._calls: list[tuple[weakref.ref[_Set], Any]] = []

    def own(self) -> Any:
        """This thread's own value, or None."""
        return _C.own_settings()[self._place]

    def set_own(self, value: Any) -> None:
        values = list(_C.own_settings())
        values[self._place] = value
        _C.set_own_settings(*values)

    def set_for_process(self, call: _Set, value: Any) -> None:
        with self._lock:
            before = self.get()
            self._set(value)
            self._calls = [*self._that_may_be_taken_back(), (weakref.ref(call), before)]

    def take_back(self, call: _Set) -> None:
        """What other calls have set since stays."""
        with self._lock:
            self._calls = self._that_may_be_taken_back()
            for i, (made, before) in enumerate(self._calls):
                if made() is call:
                    del self._calls[i]
                    if i == len(self._calls):
                        self._set(before)
                    else:
                        self._calls[i] = self._calls[i][0], before
                    return

    def _that_may_be_taken_back(self) -> list[tuple[weakref.ref[_Set], Any]]:
        """A call whose object is gone stays, and hides those before it."""
        gone = [i for i, (made, _) in enumerate(self._calls) if made() is None]
        return self._calls[gone[-1] + 1 :] if gone else self._calls


_workspace_limit, _backend, _recompute = map(_Setting, _Setting.NAMES)


def workspace_limit(limit: int | str | None = None) -> Any:
    """The transient memory, in bytes, that one convolution with automatic splits may use besides its result.

    Without an argument returns it. With one (a number or text such as "64MiB"; at least 1) sets it for the process;
    `with workspace_limit("8MiB"):` sets it for the block, on this thread alone, and for the backward passes of what was
    computed in the block. A convolution that needs more for a single output position is computed all the same.
    ValueError for other values.
    """
    if limit is None:
        return _workspace_limit.get()
    return _Set(_workspace_limit, parse_bytes(limit, "workspace_limit"))


def recompute(on: bool | None = None) -> Any:
    """Whether layers compute an input again in backward, where its producer can, instead of saving it (default: True).

    Without an argument returns it. With True or False sets it for the process; `with recompute(False):` sets it for the
    block, on this thread alone. The setting during the forward pass counts. TypeError for other values.
    """
    if on is None:
        return _recompute.get()
    if not isinstance(on, bool):
        raise TypeError(f"recompute: expected True or False, got {on!r}")
    return _Set(_recompute, on)


def backend(name: str | None = None) -> Any:
    """Which code computes. Without an argument returns it; with one sets it for the process, or by `with` for a block
    of this thread.

    "auto" (default): the fastest code that is exact. "aten": tiles are cut, computed and joined by stock operators
    alone. "native": as "auto", and on CUDA this project's own kernels for convolutions, masks, sums with ReLU, dropout,
    pools and norms. "auto" uses those for convolutions where they were measured to be faster. What backward computes
    again is computed by the code that computed it first, whatever is set by then. ValueError for other names, and for
    "native" in a build without CUDA.
    """
    if name is None:
        return _backend.get()
    if not isinstance(name, str):
        raise ValueError(f"backend: expected 'auto', 'aten' or 'native', got {name!r}")
    return _Set(_backend, name)


def last_path() -> dict[str, Any]:
    """How the last convolution of this process was computed.

    Keys: op ("conv2d", ...), pass ("fprop": forward, "dgrad": gradient of the input, "wgrad": of the weight), path
    ("stock": one call of the stock operator, "tiled", or "native": a kernel of this project), kernel (its name with
    "native", else None), tiles (pieces a spatial dimension), batch_step (images a tile), count (tiles computed), views
    (how many of the tiles read their input in place).
    """
    return _C.last_path()


@contextmanager
def record_paths() -> Iterator[list[dict[str, Any]]]:
    """A list that holds, after the block's end, one record like last_path()'s for every pass inside the block."""
    records: list[dict[str, Any]] = []
    _C.start_path_log()
    try:
        yield records
    finally:
        records += _C.stop_path_log()


# Getter and setter of what a second run of a forward must find as the first found it: torch's, of the process.
_OF_TORCH: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
]
for _where in (("cuda", "conv"), ("cuda", "matmul"), ("mkldnn", "conv"), ("mkldnn", "matmul")):
    _OF_TORCH.append(
        (
            functools.partial(torch._C._get_fp32_precision_getter, *_where),
            functools.partial(torch._C._set_fp32_precision_setter, *_where),
        )
    )


def all_settings() -> list[Any]:
    """This package's settings on this thread and those of torch that its operators depend on, for `settings_set`."""
    return [_C.workspace_limit(), _C.backend(), _C.recompute(), *(get() for get, _ in _OF_TORCH)]


@contextmanager
def settings_set(values: list[Any]) -> Iterator[None]:
    """Sets what `all_settings` gave, for the block: this package's on this thread."""
    own, torchs = _C.own_settings(), [get() for get, _ in _OF_TORCH]
    try:
        _C.set_own_settings(*values[: len(own)])
        _set_torchs(values[len(own) :])
        yield
    finally:
        _C.set_own_settings(*own)
        _set_torchs(torchs)


def _set_torchs(values: list[Any]) -> None:
    """Sets those that differ from now."""
    for (get, setter), value in zip(_OF_TORCH, values, strict=True):
        if get() != value:
            setter(value)
