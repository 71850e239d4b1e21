"""`checkpoint_modules`: modules of a model whose forward runs in a checkpoint, by their class, as in `convert`.

The checkpoint's class is derived from the module's own, so that whatever the module does by itself (`lean()` around a
forward, say) is done inside of the checkpoint. `convert` and `revert` take these classes off and put them on again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from .checkpoint import checkpoint_call

Model = TypeVar("Model", bound=nn.Module)
Which = str | type | Iterable[str] | Iterable[type] | Callable[[str, nn.Module], bool]


class _Checkpointed(nn.Module):
    """A module whose forward runs in a checkpoint."""

    _plain: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint_call(super().forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are those of the module's own class, which then get the checkpoint's."""
        cls: Any = type(self)
        self.__class__ = _plain_class(cls)
        try:
            reduced: Any = self.__reduce_ex__(protocol)
        finally:
            self.__class__ = cls
        if isinstance(reduced, str):
            return reduced
        create, arguments, *rest = reduced
        return _restored, (create, arguments), *rest

    def __prepare_scriptable__(self) -> nn.Module:
        """TorchScript gets the module without a checkpoint."""
        cls = _plain_class(type(self))
        module: Any = cls.__new__(cls)
        vars(module).update(vars(self))
        return module.__prepare_scriptable__() if hasattr(module, "__prepare_scriptable__") else module


def is_checkpointed(module: nn.Module) -> bool:
    return isinstance(module, _Checkpointed)


def _restored(create: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    module = create(*arguments)
    module.__class__ = _checkpointed_class(type(module))
    return module


def rebased(cls: type, base: type) -> type:
    """`cls`, a class made at run time by torch.nn.utils.parametrize, over another base."""
    body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (base,), body)


def _is_parametrized(cls: type) -> bool:
    return cls.__module__ == parametrize.__name__ and len(cls.__bases__) == 1


_classes: dict[type, Any] = {}


def _checkpointed_class(cls: type) -> type:
    if issubclass(cls, _Checkpointed):
        return cls
    if _is_parametrized(cls):
        return rebased(cls, _checkpointed_class(cls.__bases__[0]))
    if cls not in _classes:
        body = {"_plain": cls, "__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
        _classes[cls] = type(cls.__name__, (_Checkpointed, cls), body)
    return _classes[cls]


def _plain_class(cls: Any) -> Any:
    """The module's own class, below the checkpoint's. TypeError for classes that others derived from the latter."""
    if not issubclass(cls, _Checkpointed):
        return cls
    plain: Any = cls._plain
    if _classes.get(plain) is cls:
        return plain
    if _is_parametrized(cls):
        return rebased(cls, _plain_class(cls.__bases__[0]))
    raise TypeError(f"checkpoint_modules: {cls.__name__} is a subclass of a checkpointed class and has no plain form")


@contextmanager
def without_checkpoints(model: Any) -> Iterator[None]:
    """Takes the checkpoints off a model's modules, and puts them on again at the end, whatever class they then have."""
    every: list[nn.Module] = list(model.modules()) if isinstance(model, nn.Module) else []
    modules = [module for module in every if isinstance(module, _Checkpointed)]
    for module, cls in [(module, _plain_class(type(module))) for module in modules]:
        module.__class__ = cls
    try:
        yield
    finally:
        for module in modules:
            module.__class__ = _checkpointed_class(type(module))


def _chosen(model: nn.Module, which: Any) -> dict[str, nn.Module]:
    named = list(model.named_modules())
    if callable(which) and not isinstance(which, type):
        return {name: module for name, module in named if which(name, module)}
    wanted: list[Any] = list(which) if isinstance(which, Iterable) and not isinstance(which, (str, type)) else [which]
    if wanted and all(isinstance(one, type) and issubclass(one, nn.Module) for one in wanted):
        classes: Any = tuple(wanted)
        return {name: module for name, module in named if isinstance(module, classes)}
    modules = dict(model.named_modules(remove_duplicate=False))
    for one in wanted:
        if not isinstance(one, str):
            raise TypeError(
                "checkpoint_modules: expected which to be names of modules, module classes or a function of name and "
                f"module, got {one!r}"
            )
        if one not in modules:
            raise ValueError(f"checkpoint_modules: expected which to name modules of the model, got {one!r}")
    return {name: modules[name] for name in wanted}


def _reason_against(module: nn.Module) -> str | None:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module cannot change its class: checkpoint before scripting"
    if isinstance(module, LazyModuleMixin):
        return f"{name} has no weight yet: run the model once, then checkpoint"
    if "forward" in vars(module):
        return f"this {name} was given a forward of its own"
    if type(module).forward is nn.Module.forward:
        return f"{name} has no forward"
    return None


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
    if not isinstance(model, nn.Module):
        raise TypeError(f"checkpoint_modules: expected model to be a torch.nn.Module, got {type(model).__name__}")
    chosen = _chosen(model, which)
    for name, module in chosen.items():
        if reason := _reason_against(module):
            raise TypeError(f"checkpoint_modules, module {name!r}: {reason}")
    ids = {id(module) for module in chosen.values()}
    changes = [
        (module, (_checkpointed_class if id(module) in ids else _plain_class)(type(module)))
        for module in model.modules()
        if id(module) in ids or isinstance(module, _Checkpointed)
    ]
    for module, cls in changes:
        module.__class__ = cls
    return model
