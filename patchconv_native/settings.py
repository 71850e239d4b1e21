"""Process-wide settings, and the record of which path calls took.

The values live in the library: Python, TorchScript and C++ programs see the same ones, on every thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from . import _library
from ._bytes import parse_bytes

_C = _library.load()


class _Restore(AbstractContextManager[Any]):
    """What a setter returns: in a `with` statement it brings the earlier value back at the end."""

    def __init__(self, value: Any, earlier: Any, setter: Callable[[Any], None]) -> None:
        self._value, self._earlier, self._setter = value, earlier, setter

    def __enter__(self) -> Any:
        return self._value

    def __exit__(self, *exception: object) -> None:
        self._setter(self._earlier)

    def __repr__(self) -> str:
        return repr(self._value)


def workspace_limit(limit: int | str | None = None) -> Any:
    """The transient memory, in bytes, that automatic splits allow one convolution besides its result.

    Without an argument returns it. With one (an int or text such as "64MiB"; at least 1) sets it for the process;
    `with workspace_limit("8MiB"):` sets it for the block. A call that does not fit one tile of one row and one column
    into the limit is computed all the same.
    """
    if limit is None:
        return _C.workspace_limit()
    earlier = _C.workspace_limit()
    value = parse_bytes(limit, "workspace_limit")
    _C.set_workspace_limit(value)
    return _Restore(value, earlier, _C.set_workspace_limit)


def recompute(on: bool | None = None) -> Any:
    """Whether layers make an input again in backward instead of saving it, where its producer can (at first, yes).

    Without an argument returns it. With True or False sets it for the process, at once; `with recompute(False):` sets
    it back at the block's end. What counts is the setting during the forward pass.
    """
    if on is None:
        return _C.recompute()
    if not isinstance(on, bool):
        raise TypeError(f"recompute: expected True or False, got {on!r}")
    earlier = _C.recompute()
    _C.set_recompute(on)
    return _Restore(on, earlier, _C.set_recompute)


def backend(name: str | None = None) -> Any:
    """Which code computes. Without an argument returns it, with one sets it; also for a block by `with`.

    "auto": whatever is fastest of what is exact. "aten": tiles are cut, computed and put together by stock operators
    alone. "native": as "auto", and on CUDA the project's own kernels for convolutions, packed masks, sums with ReLU,
    dropout, pools and norms. They have not been measured on a GPU yet, and "auto" leaves them out. A build without CUDA
    raises ValueError for it. What backward makes again is made by the code that made it first, whatever is set by then.
    """
    if name is None:
        return _C.backend()
    if not isinstance(name, str):
        raise ValueError(f"backend: expected 'auto', 'aten' or 'native', got {name!r}")
    earlier = _C.backend()
    _C.set_backend(name)
    return _Restore(name, earlier, _C.set_backend)


def last_path() -> dict[str, Any]:
    """What the last convolution pass of this process did.

    Keys: op ("conv2d"), pass ("fprop", "dgrad", "wgrad"), path ("stock": one call of the stock operator, "tiled", or
    "native": a kernel of this project's), kernel (its name under "native", else None), tiles (pieces a spatial
    dimension), batch_step (images a tile), count (tiles computed), views (of them, tiles whose
    input was read in place).
    """
    return _C.last_path()


@contextmanager
def record_paths() -> Iterator[list[dict[str, Any]]]:
    """Collects one record like last_path()'s for every pass inside the block, in order; filled when the block ends."""
    records: list[dict[str, Any]] = []
    _C.start_path_log()
    try:
        yield records
    finally:
        records += _C.stop_path_log()
