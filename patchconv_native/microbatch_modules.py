"""`microbatch_modules`: modules of a model whose forward runs in micro-batches, by their class (`wrapped`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .microbatch import check_chunks, microbatch_call
from .wrapped import Model, Which, Wrapped, wrap_modules

OWNER = "microbatch_modules"


class _Microbatched(Wrapped):
    """A module whose forward runs in micro-batches; their number is its class's."""

    _rank = 0
    _called = OWNER, "microbatched"
    _chunks: int

    def forward(self, x: Tensor) -> Any:
        return microbatch_call(type(self).__name__, self, super().forward, x, self._chunks)


@functools.cache
def _kind(chunks: int) -> type[_Microbatched]:
    return type("_Microbatched", (_Microbatched,), {"_chunks": chunks, "_recipe": (_kind, (chunks,))})


def microbatch_modules(model: Model, which: Which | Mapping[str, int], chunks: int | None = None) -> Model:
    """Runs the forwards of the modules `which`, and of no others, in `microbatch`es, in place, and returns the model.

    which: names of modules (as in named_modules(); one or several), a module class or several, a function
    (name, module) -> bool, or, without `chunks`, a mapping of names to numbers of chunks. The modules must be called
    with one tensor. `microbatch_modules(model, ())` undoes it. Parameters, hooks of these modules (which run once,
    outside), optimizers and state_dict stay, and so they do where the model is converted, reverted or checkpointed,
    before or after. A checkpoint of such a module is around it, and of a module inside of it, inside.

    ValueError for names that the model has not and for chunks below 1, TypeError for another `which` or chunks and for
    modules that are scripted, lazy, without a forward or with one of the instance. Nothing has been changed then.
    """
    counts = which if isinstance(which, Mapping) else {}
    if isinstance(which, Mapping):
        if chunks is not None:
            raise TypeError(f"{OWNER}: expected chunks to be None where which says them, got {chunks!r}")
        for count in counts.values():
            check_chunks(OWNER, count)
    elif chunks is not None or not isinstance(which, (tuple, list)) or which:
        check_chunks(OWNER, chunks)
    return wrap_modules(
        OWNER, "microbatch", model, list(counts) if isinstance(which, Mapping) else which, _Microbatched,
        lambda name: _kind(counts.get(name, chunks)),
    )  # fmt: skip
