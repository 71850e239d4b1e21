"""The one way to wrap another forward around a module's own, and to unwrap it: by the module's class.

A kind is a class derived from `Wrapped`, whose forward calls the module's own. Adding it to a module gives the module
a class that is derived from the kind and from the module's own class, so parameters, buffers, hooks and state_dict stay
what they were. A module may have several kinds. Their ranks say which is inside of which, whatever the order in which
they were added:

    0  functional code inside `lean()`            convert
    1  micro-batches                              microbatch_modules
    2  a checkpoint                               checkpoint_modules, plan
    3  statistics of all ranks (SyncBatchNorm)    distributed.spatial
    4  the whole image on every rank              distributed.spatial(gather=...)
    5  strips                                     tile_modules

Copies, pickles and torch.nn.utils.parametrize keep the kinds. TorchScript gets the module without them. `convert` and
`revert` change the class below the kinds.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

Model = TypeVar("Model", bound=nn.Module)
Which = str | type | Iterable[str] | Iterable[type] | Callable[[str, nn.Module], bool]


class Wrapped(nn.Module):
    """The base of all kinds."""

    _patchconv_rank: int
    """The kind of the highest rank is outermost. A module has at most one kind of a rank."""
    _patchconv_names: tuple[str, str]
    """For error texts: the function that adds the kind, and the adjective for such a module."""
    _patchconv_made_by: tuple[Callable[..., type[Wrapped]], tuple[Any, ...]] | None = None
    """Of a kind that was made at run time and that pickle cannot find by name: a function that makes it, and its
    arguments.
    """
    _patchconv_inner: type[nn.Module]
    """Of the class of a wrapped module alone: the class below the outermost kind."""

    def __init_subclass__(cls, **options: Any) -> None:
        """The class of a wrapped module is not one that its author derived: a hook of theirs does not hear of it."""
        if "_patchconv_inner" not in vars(cls):
            super().__init_subclass__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles as those of the module's own class, with the kinds added at the end."""
        plain, kinds = parts(type(self))
        if not kinds:  # a class derived by hand
            return super().__reduce_ex__(protocol)
        reduced = reduced_as(self, plain, protocol)
        if isinstance(reduced, str):
            return reduced
        create, arguments, *rest = reduced
        return _restored, (create, arguments, [kind._patchconv_made_by or kind for kind in kinds]), *rest

    def __prepare_scriptable__(self) -> nn.Module:
        plain = parts(type(self))[0]
        module: Any = plain.__new__(plain)
        vars(module).update(vars(self))
        return module.__prepare_scriptable__() if hasattr(module, "__prepare_scriptable__") else module


def _restored(create: Callable[..., Any], arguments: tuple[Any, ...], kinds: list[Any]) -> Any:
    module = create(*arguments)
    made = [kind if isinstance(kind, type) else kind[0](*kind[1]) for kind in kinds]
    set_class(module, wrapped_class(type(module), made))
    return module


def reduced_as(module: nn.Module, cls: type, protocol: Any) -> Any:
    """What `module.__reduce_ex__(protocol)` gives while the module's class is `cls`."""
    now = type(module)
    set_class(module, cls)
    try:
        return module.__reduce_ex__(protocol)
    finally:
        set_class(module, now)


def set_class(module: Any, cls: Any) -> None:
    """Also of a module that takes no attributes, or hands them on."""
    object.__setattr__(module, "__class__", cls)


def keeps_its_class(cls: type) -> str | None:
    """Why Python gives a module of this class no other one, or None. Its attributes must be in a place that the class
    has from nn.Module, or that a class without any base has.
    """
    bases = [cls]
    while bases[-1].__base__ not in (object, None):
        bases.append(bases[-1].__base__)
    first = next(base for base in reversed(bases) if "__dict__" in vars(base))
    if first is bases[-1]:
        return None
    return f"Python cannot change the class of a {cls.__name__}: it has {bases[-1].__name__} before torch.nn.Module"


def on_base(cls: type, change: Callable[[type], type]) -> type:
    """change(cls). Of a class that torch.nn.utils.parametrize made: the same over the changed base."""
    if not (cls.__module__ == parametrize.__name__ and len(cls.__bases__) == 1):
        return change(cls)
    base = change(cls.__bases__[0])
    if base is cls.__bases__[0]:
        return cls
    body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (base,), body)


def _forward_like(cls: Any, ours: Any) -> Any:
    """A kind's forward with the signature and the source of the module's own, for inspect and torch.fx."""
    own = inspect.getattr_static(cls, "forward")
    if isinstance(own, types.FunctionType) and _has_keywords_alone(own.__code__):
        return functools.update_wrapper(_by_name(own, ours), own)
    copied = types.FunctionType(ours.__code__, ours.__globals__, ours.__name__, ours.__defaults__, ours.__closure__)
    copied.__kwdefaults__ = ours.__kwdefaults__
    copied.__dict__.update(ours.__dict__)
    return functools.update_wrapper(copied, cls.forward)


def _has_keywords_alone(code: types.CodeType) -> bool:
    return code.co_kwonlyargcount > 0 and not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)


def _by_name(own: types.FunctionType, ours: Any) -> Any:
    """`ours` with the parameters of `own`: torch.fx hands over keyword-only arguments by their places in the code."""
    code = own.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    places, keywords = names[: code.co_argcount], names[code.co_argcount :]
    given = ", ".join([*places, *(f"{name}={name}" for name in keywords)])
    made: dict[str, Any] = {"_kind_forward": ours}
    exec(f"def forward({', '.join(places)}, *, {', '.join(keywords)}): return _kind_forward({given})", made)
    made["forward"].__defaults__, made["forward"].__kwdefaults__ = own.__defaults__, own.__kwdefaults__
    return made["forward"]


def _with_kind(kind: type[Wrapped], cls: type) -> Any:
    """The one class derived from these two. It lives as long as modules of it do, or `cls` itself."""
    made: Any
    for made in type.__subclasses__(cls):
        if made.__bases__ == (kind, cls) and "_patchconv_inner" in vars(made):
            return made
    body = {name: getattr(cls, name) for name in ("__module__", "__doc__", "__qualname__")}
    return type(
        cls.__name__, (kind, cls), {**body, "_patchconv_inner": cls, "forward": _forward_like(cls, kind.forward)}
    )


def wrapped_class(cls: type, kinds: Iterable[type[Wrapped]]) -> Any:
    """The class `cls`, which has no kinds yet, with these."""
    for kind in sorted(kinds, key=lambda kind: kind._patchconv_rank):
        cls = on_base(cls, lambda base, kind=kind: _with_kind(kind, base))  # type: ignore[misc]
    return cls


def parts(cls: Any) -> tuple[Any, list[type[Wrapped]]]:
    """The class without its kinds, and the kinds, innermost first.

    A class that others derived from the class of a wrapped module, as FSDP does, is not looked into: its kinds are part
    of it.
    """
    kinds: list[type[Wrapped]] = []

    def without(base: Any) -> Any:
        while issubclass(base, Wrapped):
            if "_patchconv_inner" not in vars(base):
                break
            kind, base = base.__bases__
            kinds.insert(0, kind)
        return base

    return on_base(cls, without), kinds


def refuse_derived(cls: type, family: type[Wrapped], owner: str | None = None) -> None:
    """TypeError if kinds of this family cannot be removed: others derived a class from one that has them."""
    plain = parts(cls)[0]
    if issubclass(plain, family):
        usual, adjective = plain._patchconv_names
        name = plain.__name__
        raise TypeError(f"{owner or usual}: {name} is a subclass of a {adjective} class and has no plain form")


def _with_one_more(cls: type, kind: type[Wrapped]) -> Any:
    plain, kinds = parts(cls)
    return wrapped_class(plain, [*(one for one in kinds if one._patchconv_rank != kind._patchconv_rank), kind])


def _with_one_less(cls: type, family: type[Wrapped]) -> Any:
    refuse_derived(cls, family)
    plain, kinds = parts(cls)
    return wrapped_class(plain, (one for one in kinds if not issubclass(one, family)))


def add_kind(module: nn.Module, kind: type[Wrapped]) -> None:
    """Wraps the module's forward in `kind`, in place of another kind of that rank."""
    if not isinstance(module, kind):
        set_class(module, _with_one_more(type(module), kind))


def remove_kinds(module: nn.Module, family: type[Wrapped]) -> None:
    """Removes the kinds that are `family` or derived from it."""
    if isinstance(module, family):
        set_class(module, _with_one_less(type(module), family))


def class_without(before: type, after: type, now: type) -> Any:
    """The class `now` without what made `before` into `after`. Kinds added or removed since then stay so.

    None if the class below the kinds is not what it was in `after`.
    """
    if now in (before, after):
        return before
    plain, kinds_before = parts(before)
    plain_after, kinds_after = parts(after)
    plain_now, kinds_now = parts(now)
    if plain_now is not plain_after:
        return None
    return wrapped_class(plain, (kind for kind in kinds_now if kind in kinds_before or kind not in kinds_after))


@contextmanager
def without_kinds(model: Any) -> Iterator[None]:
    """Removes all kinds from a model's modules, and adds them again at the end, whatever class those then have."""
    every: list[nn.Module] = list(model.modules()) if isinstance(model, nn.Module) else []
    found = [(module, *parts(type(module))) for module in every if isinstance(module, Wrapped)]
    for module, plain, _ in found:
        set_class(module, plain)
    try:
        yield
    finally:
        for module, _, kinds in found:
            set_class(module, wrapped_class(type(module), kinds))


_temporary: dict[int, Callable[..., Any]] = {}


@contextmanager
def forwards(of: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Other forwards for some modules for a while, in place of those of their classes, kinds included.

    The modules must have no forward of the instance.
    """
    for module, forward in of.items():
        vars(module)["forward"] = _temporary[id(module)] = forward
    try:
        yield
    finally:
        for module in of:
            vars(module).pop("forward", None)
            _temporary.pop(id(module), None)


def temporary_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that `forwards` has given the module, while it has it."""
    return _temporary.get(id(module))


def chosen_modules(owner: str, model: nn.Module, which: Any) -> dict[str, nn.Module]:
    """The modules `which` by name. TypeError, ValueError for what names no modules."""
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


def reason_against(module: nn.Module, verb: str) -> str | None:
    """Why no kind can be added to the module, or None. verb: what the kind does to it, for the text."""
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return f"a TorchScript module cannot change its class: {verb} before scripting"
    if isinstance(module, LazyModuleMixin):
        return f"{name} has no weight yet: run the model once, then {verb}"
    if "forward" in vars(module):
        return f"this {name} was given a forward of its own"
    if type(module).forward is nn.Module.forward:
        return f"{name} has no forward"
    return keeps_its_class(type(module))


def wrap_modules(
    owner: str, verb: str, model: Model, which: Any, family: type[Wrapped], kind_of: Callable[[str], type[Wrapped]]
) -> Model:
    """Adds kind_of(name) to the modules `which` of a model, and removes the family's kinds from all others."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a torch.nn.Module, got {type(model).__name__}")
    chosen = chosen_modules(owner, model, which)
    for name, module in chosen.items():
        if reason := reason_against(module, verb):
            raise TypeError(f"{owner}, module {name!r}: {reason}")
    wanted = {id(module): kind_of(name) for name, module in chosen.items()}
    changes = []
    for module in model.modules():
        kind, cls = wanted.get(id(module)), type(module)
        if kind is not None and not issubclass(cls, kind):
            changes.append((module, _with_one_more(cls, kind)))
        elif kind is None and issubclass(cls, family):
            changes.append((module, _with_one_less(cls, family)))
    for module, cls in changes:
        set_class(module, cls)
    return model
