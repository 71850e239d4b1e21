"""`checkpoint_modules`: modules of a model whose forward runs in a checkpoint (see wrap.py)."""

from __future__ import annotations

from typing import Any

from torch import nn

from .checkpoint import checkpoint_call
from .wrap import Model, Which, Wrapped, wrap_modules


class _Checkpointed(Wrapped):
    """A module whose forward runs in a checkpoint."""

    _patchconv_rank = 2
    _patchconv_names = "checkpoint_modules", "checkpointed"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint_call(super().forward, args, kwargs)


def is_checkpointed(module: nn.Module) -> bool:
    return isinstance(module, _Checkpointed)


def checkpoint_modules(model: Model, which: Which) -> Model:
    """Runs the forwards of the modules `which`, and of no others, in a `checkpoint`, in place; returns the model.

    which: names of modules (as in named_modules(); one or several), a module class or several, or a function
    (name, module) -> bool. `checkpoint_modules(model, ())` undoes it. Parameters, hooks (which run once, outside of the
    checkpoint), optimizers and state_dict stay. The model can be converted and reverted before or after. A checkpoint
    inside of a checkpoint is served. Without gradients a forward just runs. With gradients it is a checkpoint in eval
    mode too.

    ValueError for names that the model does not have. TypeError for another `which`, and for modules that cannot be
    checkpointed: scripted or lazy ones, without a forward, or with a forward of the instance. Nothing has been changed
    then.
    """
    return wrap_modules("checkpoint_modules", "checkpoint", model, which, _Checkpointed, lambda name: _Checkpointed)
