"""Turns the layers of a model into this package's, in place, and back.

Only a module's class changes: parameters, buffers, hooks, optimizers, tied modules and state_dict keys stay what they
were. A subclass with a forward of its own is left alone and reported, since what it computes is not known.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from .layers import LAYERS, NOTHING_TO_GAIN, Lean
from .lean import ForwardInLean
from .modules import CONVERTED, Split, Splits, checked_splits
from .wrap import (
    Wrapped,
    add_kind,
    keeps_its_class,
    on_base,
    reduced_as,
    refuse_derived,
    remove_kinds,
    set_class,
    without_kinds,
    wrapped_class,
)

Model = TypeVar("Model", bound=nn.Module)

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class ConvertReport:
    """Which modules of a model are converted, by name, and why the others are not."""

    converted: dict[str, str] = field(default_factory=dict)
    """Module name to class name."""
    left: dict[str, str] = field(default_factory=dict)
    """Module name to the reason it was left alone."""
    nothing_to_gain: dict[str, str] = field(default_factory=dict)
    """Module name to the reason: a stock layer that saves no more than it must stays a stock layer."""

    def __str__(self) -> str:
        lines = [
            f"{len(self.converted)} {'layer' if len(self.converted) == 1 else 'layers'} converted, "
            f"{len(self.left)} left alone, {len(self.nothing_to_gain)} with nothing to gain"
        ]
        lines += [f"  {name or '(the model)'}: {kind}" for name, kind in self.converted.items()]
        lines += [f"  {name or '(the model)'}: left alone: {reason}" for name, reason in self.left.items()]
        lines += [f"  {name or '(the model)'}: nothing to gain: {why}" for name, why in self.nothing_to_gain.items()]
        return "\n".join(lines)


# Stock class -> the class of this package.
_CONVERTED: dict[type[nn.Module], Any] = {**CONVERTED, **LAYERS}


class LeanCode(ForwardInLean, Wrapped):
    """A module with a forward of its own."""

    _patchconv_rank = 0
    _patchconv_names = "convert", "converted"


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, (Split, Lean))


def _stock_base(cls: type) -> type[nn.Module] | None:
    """The stock layer that `cls` is or is derived from, if this package has a class for it."""
    return next((base for base in cls.__mro__ if base in _CONVERTED), None)


def conv_base(cls: type) -> type[nn.Module] | None:
    """The stock convolution that `cls` is or is derived from."""
    return next((stock for stock in CONVERTED if issubclass(cls, stock)), None)


_NEEDED = ("splits", "_splits", "_dims")


def _name_in_use(module: nn.Module) -> str | None:
    """An attribute name that a converted convolution needs and this module uses already, or None."""
    places = (*map(vars, type(module).__mro__), vars(module), module._parameters, module._buffers, module._modules)
    return next((name for name in _NEEDED if any(name in place for place in places)), None)


def weight_of(module: nn.Module) -> Any:
    """`module.weight`, or None. A parametrization with a state that training moves (spectral_norm) is not moved."""
    if not parametrize.is_parametrized(module, "weight"):
        return getattr(module, "weight", None)
    makers = list(module.parametrizations["weight"].modules())  # type: ignore[index, union-attr]
    modes = [maker.training for maker in makers]
    try:
        for maker in makers:
            maker.training = False
        with torch.no_grad():
            return module.weight
    finally:
        for maker, mode in zip(makers, modes, strict=True):
            maker.training = mode


def _reason_to_leave(module: nn.Module, stock: type[nn.Module]) -> str | None:
    cls: Any = type(module)
    if isinstance(module, LazyModuleMixin):
        return f"{cls.__name__} has no weight yet: run the model once, then convert"
    if cls.forward is not stock.forward or (
        hasattr(stock, "_conv_forward") and cls._conv_forward is not stock._conv_forward
    ):
        return f"{cls.__name__} computes its forward itself"
    if "forward" in vars(module) or "_conv_forward" in vars(module):
        return f"this {cls.__name__} was given a forward of its own"
    if stock in CONVERTED and (name := _name_in_use(module)):
        return f"{cls.__name__} has an attribute named {name} of its own"
    weight = weight_of(module)
    if isinstance(weight, torch.Tensor) and weight.dtype not in _DTYPES:
        return f"dtype {weight.dtype} is not served"
    return keeps_its_class(cls)


def _named(owner: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a torch.nn.Module, got {type(model).__name__}")
    return model.named_modules()


def convert_report(model: nn.Module) -> ConvertReport:
    """What of `model` is converted now and what is not, with the reasons. Changes nothing."""
    report = ConvertReport()
    modules = dict(_named("convert_report", model))
    lean_code = [name for name, module in modules.items() if isinstance(module, LeanCode)]
    with without_kinds(model):
        for name, module in modules.items():
            if _is_converted(module) or name in lean_code:
                report.converted[name] = type(module).__name__
            elif isinstance(module, torch.jit.ScriptModule):
                original = getattr(module, "original_name", "")
                if any(original == stock.__name__ for stock in CONVERTED):
                    report.left[name] = "a TorchScript module cannot change its class: convert before scripting"
            elif type(module) in NOTHING_TO_GAIN:
                report.nothing_to_gain[name] = NOTHING_TO_GAIN[type(module)]
            elif _has_code(module) and (reason := _reason_to_leave_code(module)):
                report.left[name] = reason
            elif (stock := _stock_base(type(module))) is not None:
                report.left[name] = _reason_to_leave(module, stock) or "not converted yet"
    return report


_subclasses: dict[type, type] = {}


def _restored(cls: type, splits: list[int] | None, create: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What copies and pickles of a converted `cls` start from: what those of `cls` do, converted."""
    module: Any = create(*arguments)
    if type(module) is cls:
        set_class(module, _converted_subclass(cls))
        if isinstance(module, Split):
            vars(module)["_splits"] = splits
    return module


def _converted_subclass(cls: type) -> type:
    """The converted form of a subclass of a stock layer: its methods, with this package's call of the operator.

    It has no name that pickle could find: copies and pickles are those of `cls`, converted at the end.
    """
    if cls not in _subclasses:

        def reduce(self: nn.Module, protocol: Any) -> Any:
            # A class derived from this one (by torch.nn.utils.parametrize, say) is reduced in its own way.
            if type(self) is not made:
                return super(made, self).__reduce_ex__(protocol)
            reduced = reduced_as(self, cls, protocol)
            if isinstance(reduced, str):
                return reduced
            create, arguments, *rest = reduced
            return _restored, (cls, getattr(self, "_splits", None), create, arguments), *rest

        def setstate(self: nn.Module, state: Any) -> None:
            # A state that `cls` makes itself may lack the splits.
            before = {"_splits": vars(self)["_splits"]} if "_splits" in vars(self) else {}
            super(made, self).__setstate__(state)
            vars(self).update(before)

        body = {
            "_stock": cls,
            "_writes_into": None,
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": reduce,
            "__setstate__": setstate,
        }
        made: Any = type(cls.__name__, (_CONVERTED[_stock_base(cls)], cls), body)  # type: ignore[index]
        _subclasses[cls] = made
    return _subclasses[cls]


def _converted_class(cls: type) -> type:
    return on_base(cls, lambda base: _CONVERTED.get(base) or _converted_subclass(base))


def _reverted_class(cls: type) -> type:
    def stock_of(converted: type) -> type:
        for stock, known in (*_CONVERTED.items(), *_subclasses.items()):
            if converted is known:
                return stock
        raise TypeError(f"revert: {cls.__name__} is a subclass of a patchconv_native class and has no stock form")

    return on_base(cls, stock_of)


def _has_code(module: nn.Module) -> bool:
    """Whether the module has a forward of its own, outside torch.nn."""
    cls = type(module)
    return not (
        cls.__module__.startswith(("torch.nn.", "torch.ao."))
        or isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin))
        or "forward" in vars(module)
        or parametrize.is_parametrized(module)
        or cls.forward is nn.Module.forward
    )


def _reason_to_leave_code(module: nn.Module) -> str | None:
    """Why a module with a forward of its own cannot get a class that is derived from its own."""
    if isinstance(module, LeanCode):
        return None
    use = "call it in `with patchconv_native.lean():`"
    if isinstance(module, torch.fx.GraphModule):
        return f"torch.fx writes its code anew: {use}"
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is not None and "super" in code.co_names and not {"type", "__class__"}.isdisjoint(code.co_names):
        return f"its forward has super() look at the module's own class: {use}"
    if reason := keeps_its_class(type(module)):
        return f"{reason}: {use}"
    try:
        wrapped_class(type(module), [LeanCode])
    except Exception as error:  # of a metaclass
        return f"no class can be derived from its own ({error}): {use}"
    return None


def convert(model: Model, splits: Splits = None, *, functional: bool = True) -> Model:
    """Replaces the layers of `model` by this package's, in place, and returns the model.

    Convolutions need less memory while they compute; activations, norms, pools and dropout save less for backward. So
    does functional code (F.relu, torch.cat, x + y): modules with a forward of their own run it inside `lean()`. In eval
    mode without gradients, norms, activations and sums write into inputs that nobody reads again. Values, parameters,
    hooks, optimizers and state_dict stay. Layers that cannot be converted (lazy and scripted modules) are
    left alone: `convert_report(model)` lists them with the reasons, and a warning names the convolutions among them.
    `revert` undoes it.

    splits: the number of pieces that each convolution's output is cut into: None (automatic), an int (for the first
    spatial dimension) or a tuple with one entry a spatial dimension. Converting again sets it again. It is not for
    convolutions that compute their forward themselves (a warning names them).
    functional: False leaves functional code as it is, and layers that compute their forward themselves. Functional
    code in graph modules of torch.fx stays as it is, too.

    TypeError or ValueError for wrong arguments. Nothing has been changed then.
    """
    if not isinstance(functional, bool):
        raise TypeError(f"convert: expected functional to be True or False, got {functional!r}")
    changes: list[tuple[nn.Module, type, list[int] | None]] = []
    with_code: dict[str, nn.Module] = {}
    with without_kinds(model):
        for name, module in _named("convert", model):
            owner = f"convert, module {name!r}" if name else "convert"
            if isinstance(module, Split):
                changes.append((module, type(module), checked_splits(owner, module._dims, splits)))
                continue
            if _is_converted(module) or isinstance(module, torch.jit.ScriptModule):
                continue
            stock = _stock_base(type(module))
            if stock is not None and not _reason_to_leave(module, stock):
                entries = checked_splits(owner, CONVERTED[stock]._dims, splits) if stock in CONVERTED else None
                changes.append((module, _converted_class(type(module)), entries))
            elif functional and _has_code(module) and not _reason_to_leave_code(module):
                with_code[name] = module
        for module, cls, entries in changes:
            set_class(module, cls)
            if isinstance(module, Split):
                module._splits = entries
    for module in with_code.values():
        add_kind(module, LeanCode)
    _warn_of_convolutions(model, [] if splits is None else list(with_code))
    return model


def _warn_of_convolutions(model: nn.Module, with_code: list[str]) -> None:
    """Names the convolutions that `convert` has left alone, and those with a forward of their own, without splits."""
    modules = dict(model.named_modules())
    left = {
        name: reason
        for name, reason in convert_report(model).left.items()
        if conv_base(type(modules[name])) or isinstance(modules[name], torch.jit.ScriptModule)
    }
    if left:
        reasons = "; ".join(f"{name or '(the model)'}: {reason}" for name, reason in left.items())
        count = "1 convolution" if len(left) == 1 else f"{len(left)} convolutions"
        warnings.warn(f"patchconv_native.convert left {count} alone: {reasons}", stacklevel=3)
    unsplit = [name or "(the model)" for name in with_code if conv_base(type(modules[name]))]
    if unsplit:
        names = ", ".join(unsplit)
        warnings.warn(
            f"patchconv_native.convert gave no splits to convolutions with a forward of their own: {names}",
            stacklevel=3,
        )


def revert(model: Model) -> Model:
    """Gives every converted layer of `model` its stock class back, in place, and returns the model.

    Raises TypeError for a module whose class is derived from one of this package's. Nothing has been changed then.
    """
    for _, module in _named("revert", model):
        refuse_derived(type(module), LeanCode, "revert")
    with without_kinds(model):
        changes = [
            (module, _reverted_class(type(module))) for _, module in _named("revert", model) if _is_converted(module)
        ]
        for module, cls in changes:
            vars(module).pop("_splits", None)
            set_class(module, cls)
    for module in model.modules():
        remove_kinds(module, LeanCode)
    return model


def convert_model(model: Model, splits: int = 4, sequential: bool = True) -> Model:
    """`convert(model, splits)` under patch_conv's name and with its defaults.

    Tiles are always computed one after another: sequential=False is a ValueError.
    """
    if not sequential:
        raise ValueError("convert_model: expected sequential to be True (tiles are computed one by one), got False")
    return convert(model, splits)
