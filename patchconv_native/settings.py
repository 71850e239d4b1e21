"""The settings of the process, and a record of how convolutions were computed.

The values are in the native library: Python, TorchScript and C++ see the same ones, on every thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from . import _library
from ._bytes import parse_bytes

_C = _library.load()


class _Set(AbstractContextManager[Any]):
    """Sets a value. As a context manager it sets the earlier one again at the block's end."""

    def __init__(self, value: Any, getter: Callable[[], Any], setter: Callable[[Any], None]) -> None:
        self._value, self._earlier, self._setter = value, getter(), setter
        setter(value)

    def __enter__(self) -> Any:
        return self._value

    def __exit__(self, *exception: object) -> None:
        self._setter(self._earlier)

    def __repr__(self) -> str:
        return repr(self._value)


def workspace_limit(limit: int | str | None = None) -> Any:
    """The transient memory, in bytes, that one convolution with automatic splits may use besides its result.

    Without an argument returns it. With one (a number or text such as "64MiB"; at least 1) sets it for the process;
    `with workspace_limit("8MiB"):` sets it for the block. A convolution that needs more for a single output position is
    computed all the same. ValueError for other values.
    """
    if limit is None:
        return _C.workspace_limit()
    return _Set(parse_bytes(limit, "workspace_limit"), _C.workspace_limit, _C.set_workspace_limit)


def recompute(on: bool | None = None) -> Any:
    """Whether layers compute an input again in backward, where its producer can, instead of saving it (default: True).

    Without an argument returns it. With True or False sets it for the process; `with recompute(False):` sets it for the
    block. The setting during the forward pass counts. TypeError for other values.
    """
    if on is None:
        return _C.recompute()
    if not isinstance(on, bool):
        raise TypeError(f"recompute: expected True or False, got {on!r}")
    return _Set(on, _C.recompute, _C.set_recompute)


def backend(name: str | None = None) -> Any:
    """Which code computes. Without an argument returns it; with one sets it for the process, or for a block by `with`.

    "auto" (default): the fastest code that is exact. "aten": tiles are cut, computed and joined by stock operators
    alone. "native": as "auto", and on CUDA this project's own kernels for convolutions, masks, sums with ReLU, dropout,
    pools and norms. "auto" uses those for convolutions where they were measured to be faster. What backward computes
    again is computed by the code that computed it first, whatever is set by then. ValueError for other names, and for
    "native" in a build without CUDA.
    """
    if name is None:
        return _C.backend()
    if not isinstance(name, str):
        raise ValueError(f"backend: expected 'auto', 'aten' or 'native', got {name!r}")
    return _Set(name, _C.backend, _C.set_backend)


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


# Getter and setter of what a second run of a forward must find as the first found it.
_ALL: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (_C.backend, _C.set_backend),
    (_C.recompute, _C.set_recompute),
    (_C.workspace_limit, _C.set_workspace_limit),
]
for _where in (("cuda", "conv"), ("cuda", "matmul"), ("mkldnn", "conv"), ("mkldnn", "matmul")):
    _ALL.append(
        (
            functools.partial(torch._C._get_fp32_precision_getter, *_where),
            functools.partial(torch._C._set_fp32_precision_setter, *_where),
        )
    )


def all_settings() -> list[Any]:
    """This package's settings and those of torch that its operators depend on, for `set_all_settings`."""
    return [get() for get, _ in _ALL]


def set_all_settings(values: list[Any]) -> None:
    """Sets those that differ from now."""
    for (get, setter), value in zip(_ALL, values, strict=True):
        if get() != value:
            setter(value)
