"""Turns the convolutions of a model into this package's, in place, and back.

Only a module's class changes: parameters, buffers, hooks, optimizers, tied modules and state_dict keys stay what they
were. A subclass that computes its forward itself is left alone, and reported: its arithmetic is its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from .modules import CONVERTED, Split, Splits, checked_splits

Model = TypeVar("Model", bound=nn.Module)

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class ConvertReport:
    """What of a model is converted: module names, and for those left alone the reason."""

    converted: dict[str, str] = field(default_factory=dict)
    """Module name to class name."""
    left: dict[str, str] = field(default_factory=dict)
    """Module name to the reason it was left alone."""

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} convolutions converted, {len(self.left)} left alone"]
        lines += [f"  {name or '(the model)'}: {kind}" for name, kind in self.converted.items()]
        lines += [f"  {name or '(the model)'}: left alone: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def _stock_base(cls: type) -> type[nn.Module] | None:
    return next((stock for stock in CONVERTED if issubclass(cls, stock)), None)


_OURS = ("splits", "_splits", "_dims")


def _own_attribute(module: nn.Module) -> str | None:
    """The first of the names that a converted module needs for itself which this one uses already."""
    places = (*map(vars, type(module).__mro__), vars(module), module._parameters, module._buffers, module._modules)
    return next((name for name in _OURS if any(name in place for place in places)), None)


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
    if name := _own_attribute(module):
        return f"{cls.__name__} has an attribute named {name} of its own"
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype not in _DTYPES:
        return f"dtype {weight.dtype} is not served"
    return None


def _named(owner: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a torch.nn.Module, got {type(model).__name__}")
    return model.named_modules()


def convert_report(model: nn.Module) -> ConvertReport:
    """What of `model` is converted and what is not, as it stands. Changes nothing."""
    report = ConvertReport()
    for name, module in _named("convert_report", model):
        if isinstance(module, Split):
            report.converted[name] = type(module).__name__
        elif isinstance(module, torch.jit.ScriptModule):
            original = getattr(module, "original_name", "")
            if any(original == stock.__name__ for stock in CONVERTED):
                report.left[name] = "a TorchScript module cannot change its class: convert before scripting"
        elif (stock := _stock_base(type(module))) is not None:
            report.left[name] = _reason_to_leave(module, stock) or "not converted yet"
    return report


def _rebased(cls: type, base: type) -> type:
    """`cls`, a class made at run time by torch.nn.utils.parametrize, over another base."""
    body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (base,), body)


_subclasses: dict[type, type] = {}


def _restored(cls: type, splits: list[int] | None, create: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What copies and pickles of a converted `cls` start from: what those of `cls` do, converted."""
    module = create(*arguments)
    if type(module) is cls:
        module.__class__ = _converted_subclass(cls)
        vars(module)["_splits"] = splits
    return module


def _converted_subclass(cls: type) -> type:
    """A converted form of a subclass of a stock convolution: its methods, with our call of the operator.

    It has no name that pickle could find. Its copies and pickles are those of `cls`, by `__getstate__`, `__reduce__`
    and whatever else it may have, but for the constructor.
    """
    if cls not in _subclasses:
        stock = _stock_base(cls)
        assert stock is not None

        def reduce(self: nn.Module, protocol: Any) -> Any:
            reduced: Any = super(made, self).__reduce_ex__(protocol)
            # A class made of this one (by torch.nn.utils.parametrize, say) has its own ways.
            if type(self) is not made or isinstance(reduced, str):
                return reduced
            create, arguments, *rest = reduced
            create = cls if create is made else create
            arguments = tuple(cls if argument is made else argument for argument in arguments)
            return _restored, (cls, self._splits, create, arguments), *rest

        def setstate(self: nn.Module, state: Any) -> None:
            # A state that `cls` chose itself need not hold the splits.
            before = {"_splits": vars(self)["_splits"]} if "_splits" in vars(self) else {}
            super(made, self).__setstate__(state)
            vars(self).update(before)

        made: Any = type(
            cls.__name__,
            (CONVERTED[stock], cls),
            {
                "__module__": cls.__module__,
                "__doc__": cls.__doc__,
                "__reduce_ex__": reduce,
                "__setstate__": setstate,
            },
        )
        _subclasses[cls] = made
    return _subclasses[cls]


def _converted_class(module: nn.Module, stock: type[nn.Module]) -> type:
    cls = type(module)
    if cls is stock:
        return CONVERTED[stock]
    if parametrize.is_parametrized(module):
        base = cls.__bases__[0]
        return _rebased(cls, CONVERTED[stock] if base is stock else _converted_subclass(base))
    return _converted_subclass(cls)


def _reverted_class(module: nn.Module) -> type:
    cls = type(module)
    for stock, ours in CONVERTED.items():
        if cls is ours:
            return stock
    for original, made in _subclasses.items():
        if cls is made:
            return original
    if parametrize.is_parametrized(module):
        base = cls.__bases__[0]
        for stock, ours in CONVERTED.items():
            if base is ours:
                return _rebased(cls, stock)
        for original, made in _subclasses.items():
            if base is made:
                return _rebased(cls, original)
    raise TypeError(f"revert: {cls.__name__} is a subclass of a patchconv_native class and has no stock form")


def convert(model: Model, splits: Splits = None) -> Model:
    """Makes every convolution of `model` one of this package's, in place, and returns the model.

    splits: pieces each output is cut into: None (automatic), an int (the first spatial dimension) or a tuple with one
    entry a spatial dimension. Converting again only sets it anew. Convolutions that must be left alone (subclasses
    with their own forward, lazy or scripted modules) are named in a warning and in `convert_report(model)`. On an
    error (TypeError, ValueError for bad splits) nothing has been changed. `revert` undoes it.
    """
    changes: list[tuple[nn.Module, type, list[int] | None]] = []
    for name, module in _named("convert", model):
        owner = f"convert, module {name!r}" if name else "convert"
        if isinstance(module, Split):
            changes.append((module, type(module), checked_splits(owner, module._dims, splits)))
            continue
        stock = _stock_base(type(module))
        if stock is None or isinstance(module, torch.jit.ScriptModule) or _reason_to_leave(module, stock):
            continue
        dims: int = CONVERTED[stock]._dims
        entries = checked_splits(owner, dims, splits)
        changes.append((module, _converted_class(module, stock), entries))
    for module, cls, entries in changes:
        module.__class__ = cls
        module._splits = entries  # type: ignore[assignment]
    left = convert_report(model).left
    if left:
        reasons = "; ".join(f"{name or '(the model)'}: {reason}" for name, reason in left.items())
        warnings.warn(f"patchconv_native.convert left {len(left)} convolutions alone: {reasons}", stacklevel=2)
    return model


def revert(model: Model) -> Model:
    """Gives every converted convolution of `model` its stock class back, in place, and returns the model.

    Raises TypeError for a module whose class is derived from one of this package's; then nothing has been changed.
    """
    changes = [(module, _reverted_class(module)) for _, module in _named("revert", model) if isinstance(module, Split)]
    for module, cls in changes:
        del module._splits
        module.__class__ = cls
    return model


def convert_model(model: Model, splits: int = 4, sequential: bool = True) -> Model:
    """`convert(model, splits)` under the name and with the defaults that patch_conv's users know.

    Tiles are always computed one after another; sequential=False raises ValueError.
    """
    if not sequential:
        raise ValueError("convert_model: expected sequential to be True (tiles are computed one by one), got False")
    return convert(model, splits)
