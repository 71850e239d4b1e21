"""`checkpoint_modules`: modules of a model whose forward runs in a checkpoint, by their class (`wrapped`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from .checkpoint import checkpoint_call
from .wrapped import Model, Which, Wrapped, wrap_modules


class _Checkpointed(Wrapped):
    """A module whose forward runs in a checkpoint."""

    _rank = 1
    _called = "checkpoint_modules", "checkpointed"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint_call(super().forward, args, kwargs)


def _kind() -> type[Wrapped]:
    return _Checkpointed


_Checkpointed._recipe = _kind, ()


def is_checkpointed(module: nn.Module) -> bool:
    return isinstance(module, _Checkpointed)


def checkpoint_modules(model: Model, which: Which) -> Model:
    """Makes `checkpoint`s of the forwards of the modules `which`, and of no others, in place, and returns the model.

    which: names of modules (as in named_modules(); one or several), a module class or several, or a function
    (name, module) -> bool. `checkpoint_modules(model, ())` undoes it. Parameters, hooks (which run once, outside),
    optimizers and state_dict stay; so they do where the model is converted or reverted, before or after: `lean()` of a
    converted module is inside of its checkpoint. A checkpoint in a checkpoint is served. Without gradients a forward
    just runs; in eval mode with gradients it is a checkpoint too.

    ValueError for names that the model has not, TypeError for another `which` and for modules that cannot be
    checkpointed: scripted, lazy, without a forward or with one of the instance. Nothing has been changed then.
    """
    return wrap_modules("checkpoint_modules", "checkpoint", model, which, _Checkpointed, lambda name: _Checkpointed)
