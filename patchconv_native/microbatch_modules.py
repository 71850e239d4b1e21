"""`microbatch_modules`: modules of a model whose forward runs in micro-batches (see wrap.py)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .microbatch import check_chunks, microbatch_call
from .wrap import Model, Which, Wrapped, temporary_forward, wrap_modules

OWNER = "microbatch_modules"


class _Microbatched(Wrapped):
    """A module whose forward runs in micro-batches. There is a kind for each number of them."""

    _patchconv_rank = 1
    _patchconv_names = OWNER, "microbatched"
    _patchconv_chunks: int

    def forward(self, x: Tensor) -> Any:
        inner = super().forward

        def run(chunk: Tensor) -> Any:
            # If this module is a batch norm, microbatch gives it another forward for a while.
            return (temporary_forward(self) or inner)(chunk)

        batch = len(x) if isinstance(x, Tensor) and x.dim() else self._patchconv_chunks
        return microbatch_call(type(self).__name__, self, run, x, max(1, min(self._patchconv_chunks, batch)))


@functools.cache
def _kind(chunks: int) -> type[_Microbatched]:
    return type(
        "_Microbatched", (_Microbatched,), {"_patchconv_chunks": chunks, "_patchconv_made_by": (_kind, (chunks,))}
    )


def microbatch_modules(model: Model, which: Which | Mapping[str, int], chunks: int | None = None) -> Model:
    """Runs the forwards of the modules `which`, and of no others, in `microbatch`es, in place; returns the model.

    which: names of modules (as in named_modules(); one or several), a module class or several, a function
    (name, module) -> bool, or, without `chunks`, a mapping of names to numbers of chunks. chunks: the number of
    micro-batches; a batch of fewer samples, as the last of an epoch, is cut into as many as it has. The modules must be
    called with one tensor. `microbatch_modules(model, ())` undoes it. Parameters,
    hooks of these modules (which run once, outside), optimizers and state_dict stay. The model can be converted,
    reverted and checkpointed before or after. A module that is checkpointed too runs its micro-batches inside of the
    checkpoint.

    ValueError for names that the model does not have and for chunks below 1. TypeError for another `which` or chunks,
    and for modules that are scripted or lazy, without a forward, or with a forward of the instance. Nothing has been
    changed then.
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
