"""Modules whose forward runs inside of something (a checkpoint, micro-batches), by their class, as in `convert`.

The wrapping class is derived from the module's own, so that whatever the module does by itself (`lean()` around a
forward, say) is done inside. `convert` and `revert` take these classes off and put them on again. A module may have
several, in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

Model = TypeVar("Model", bound=nn.Module)
Which = str | type | Iterable[str] | Iterable[type] | Callable[[str, nn.Module], bool]


class Wrapped(nn.Module):
    """What the kinds of wrapping classes are derived from; a kind has a forward that calls the module's own."""

    _plain: type[nn.Module]
    _rank: int
    """Of several kinds the one of the highest rank is outermost."""
    _called: tuple[str, str]
    """Whose errors these are, and what they call such a module."""
    _recipe: tuple[Callable[..., type[Wrapped]], tuple[Any, ...]]
    """What gives the kind again: kinds that were made at run time have no name that pickle could find."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are those of the module's own class, which then get the wrapping one."""
        cls: Any = type(self)
        plain, kinds = parts(cls)
        self.__class__ = plain
        try:
            reduced: Any = self.__reduce_ex__(protocol)
        finally:
            self.__class__ = cls
        if isinstance(reduced, str):
            return reduced
        create, arguments, *rest = reduced
        return _restored, (create, arguments, [kind._recipe for kind in kinds]), *rest

    def __prepare_scriptable__(self) -> nn.Module:
        """TorchScript gets the module alone."""
        cls = parts(type(self))[0]
        module: Any = cls.__new__(cls)
        vars(module).update(vars(self))
        return module.__prepare_scriptable__() if hasattr(module, "__prepare_scriptable__") else module


def _restored(create: Callable[..., Any], arguments: tuple[Any, ...], recipes: list[Any]) -> Any:
    module = create(*arguments)
    module.__class__ = put_together(type(module), [make(*given) for make, given in recipes])
    return module


def rebased(cls: type, base: type) -> type:
    """`cls`, a class made at run time by torch.nn.utils.parametrize, over another base."""
    body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (base,), body)


def _is_parametrized(cls: type) -> bool:
    return cls.__module__ == parametrize.__name__ and len(cls.__bases__) == 1


_classes: dict[tuple[type, type], Any] = {}


def _with_kind(kind: type[Wrapped], cls: type) -> type:
    if _is_parametrized(cls):
        return rebased(cls, _with_kind(kind, cls.__bases__[0]))
    if (kind, cls) not in _classes:
        body = {"_plain": cls, "__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
        _classes[kind, cls] = type(cls.__name__, (kind, cls), body)
    return _classes[kind, cls]


def put_together(cls: type, kinds: Iterable[type[Wrapped]]) -> Any:
    """The class `cls`, which has none of these kinds, with them."""
    for kind in sorted(kinds, key=lambda kind: kind._rank):
        cls = _with_kind(kind, cls)
    return cls


def parts(cls: Any) -> tuple[Any, list[type[Wrapped]]]:
    """The module's own class and the kinds that wrap it, innermost first. TypeError for classes that others derived
    from a wrapping one.
    """
    if not issubclass(cls, Wrapped):
        return cls, []
    if _is_parametrized(cls):
        plain, kinds = parts(cls.__bases__[0])
        return (rebased(cls, plain) if kinds else cls), kinds
    kind: Any = cls.__bases__[0]
    inner: Any = vars(cls).get("_plain")
    if _classes.get((kind, inner)) is not cls:
        owner, word = cls._called
        raise TypeError(f"{owner}: {cls.__name__} is a subclass of a {word} class and has no plain form")
    plain, kinds = parts(inner)
    return plain, [*kinds, kind]


@contextmanager
def without_wrappers(model: Any) -> Iterator[None]:
    """Takes these classes off a model's modules, and puts them on again at the end, whatever class those then have."""
    every: list[nn.Module] = list(model.modules()) if isinstance(model, nn.Module) else []
    found = [(module, *parts(type(module))) for module in every if isinstance(module, Wrapped)]
    for module, plain, _ in found:
        module.__class__ = plain
    try:
        yield
    finally:
        for module, _, kinds in found:
            module.__class__ = put_together(type(module), kinds)


def chosen_modules(owner: str, model: nn.Module, which: Any) -> dict[str, nn.Module]:
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
                f"{owner}: expected which to be names of modules, module classes or a function of name and "
                f"module, got {one!r}"
            )
        if one not in modules:
            raise ValueError(f"{owner}: expected which to name modules of the model, got {one!r}")
    return {name: modules[name] for name in wanted}


def _reason_against(module: nn.Module, verb: str) -> str | None:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return f"a TorchScript module cannot change its class: {verb} before scripting"
    if isinstance(module, LazyModuleMixin):
        return f"{name} has no weight yet: run the model once, then {verb}"
    if "forward" in vars(module):
        return f"this {name} was given a forward of its own"
    if type(module).forward is nn.Module.forward:
        return f"{name} has no forward"
    return None


def wrap_modules(
    owner: str, verb: str, model: Model, which: Any, family: type[Wrapped], kind_of: Callable[[str], type[Wrapped]]
) -> Model:
    """Puts kind_of(name) on the modules `which` of a model, and takes any other kind of the family off the rest."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a torch.nn.Module, got {type(model).__name__}")
    chosen = chosen_modules(owner, model, which)
    for name, module in chosen.items():
        if reason := _reason_against(module, verb):
            raise TypeError(f"{owner}, module {name!r}: {reason}")
    wanted = {id(module): kind_of(name) for name, module in chosen.items()}
    changes = []
    for module in model.modules():
        kind = wanted.get(id(module))
        if (kind is not None or isinstance(module, family)) and not (kind and isinstance(module, kind)):
            plain, kinds = parts(type(module))
            kinds = [one for one in kinds if not issubclass(one, family)]
            changes.append((module, put_together(plain, [*kinds, kind] if kind else kinds)))
    for module, cls in changes:
        module.__class__ = cls
    return model
