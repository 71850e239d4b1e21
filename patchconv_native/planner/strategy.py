"""What a plan turns on in a model, and how that is applied and undone.

It changes the classes of modules, their `splits` and hooks, never parameters, buffers or the state_dict.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from .._bytes import format_bytes
from ..checkpoint_modules import checkpoint_modules, is_checkpointed
from ..convert import convert
from ..modules import Split
from ..wrap import undone


@dataclass
class Strategy:
    """The settings of a plan. The default is the unchanged model."""

    convert: bool = False
    """Layers that save less, convolutions in tiles."""
    functional: bool = False
    """Functional code saves less too: sums and concatenations are recomputed."""
    splits: dict[str, list[int]] = field(default_factory=dict)
    """Splits of convolutions, by module name, where automatic splits need too much workspace."""
    checkpoints: list[str] = field(default_factory=list)
    """Names of the modules whose forward pass is recomputed in backward."""
    amp: str | None = None
    """The dtype of autocast."""
    offload: bool = False
    """Keep the tensors saved for backward in the host's memory."""

    def __str__(self) -> str:
        words = []
        if self.convert:
            words.append("convert(functional=True)" if self.functional else "convert")
        if self.splits:
            words.append(f"{len(self.splits)} convolutions in more tiles")
        if self.checkpoints:
            words.append(f"{len(self.checkpoints)} checkpoint{'s' if len(self.checkpoints) > 1 else ''}")
        if self.amp:
            words.append(f"autocast to {self.amp}")
        if self.offload:
            words.append("saved tensors on the host")
        return ", ".join(words) or "the model as it is"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Puts it on `model`, in place, and returns what takes it off again. On an error nothing has been changed."""
        modules = dict(model.named_modules())
        for name in (*self.splits, *self.checkpoints):
            if name not in modules:
                raise ValueError(f"plan: expected the model to have a module named {name!r}, as the plan's had")
        before = {module: (type(module), vars(module).get("_splits")) for module in modules.values()}
        after: dict[nn.Module, type] = {}
        handles: list[Any] = []

        def undo() -> None:
            classes = {}
            for name, module in modules.items():
                now = type(module)
                classes[module] = undone(before[module][0], after.get(module, now), now)
                if classes[module] is None:
                    raise ValueError(
                        f"plan.undo: expected module {name!r} to be what the plan made of it, got {now}: "
                        "undo what changed it first"
                    )
            for handle in handles:
                handle.remove()
            for module, (_, splits) in before.items():
                module.__class__ = classes[module]
                if isinstance(module, Split):
                    module._splits = splits
                else:
                    module.__dict__.pop("_splits", None)

        try:
            if self.convert:
                convert(model, functional=self.functional)
            for name, entries in self.splits.items():
                module: Any = modules[name]
                if not isinstance(module, Split):
                    raise ValueError(f"plan: expected {name!r} to be a convolution, got {type(module).__name__}")
                module.splits = tuple(entries)
            if self.checkpoints:
                there = [name for name, module in modules.items() if is_checkpointed(module)]
                checkpoint_modules(model, [*there, *(name for name in self.checkpoints if name not in there)])
            if self.amp or self.offload:
                around = _Around(self.amp, self.offload)
                handles.append(model.register_forward_pre_hook(around.enter, prepend=True))
                handles.append(model.register_forward_hook(around.leave, always_call=True))
        except BaseException:
            undo()
            raise
        after.update((module, type(module)) for module in modules.values())
        return undo


class _Around:
    """Autocast and offloading around a model's forward pass, by a hook before it and one after it."""

    def __init__(self, amp: str | None, offload: bool) -> None:
        self._amp, self._offload = amp, offload
        self._open: Any = _Open()

    def __getstate__(self) -> dict[str, Any]:
        return {"_amp": self._amp, "_offload": self._offload}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_amp"], state["_offload"])  # type: ignore[misc]

    def enter(self, model: nn.Module, arguments: Any) -> None:
        stack = ExitStack()
        device = next((p.device.type for p in model.parameters()), "cpu")
        if self._amp:
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, self._amp)))
        if self._offload:
            stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"))
        self._open.stacks.append(stack)

    def leave(self, model: nn.Module, arguments: Any, output: Any) -> None:
        if self._open.stacks:
            self._open.stacks.pop().close()


class _Open(threading.local):
    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


class _Applied(list[tuple[object, Callable[[], None]]]):
    """The plans on a model, first to last, with what takes them off. Copies and pickles of the model have none."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Applied, ()


def remember(model: nn.Module, owner: object, undo: Callable[[], None]) -> None:
    """That `owner` was applied to the model. Plans are taken off in the reverse order."""
    vars(model).setdefault("_patchconv_plans", _Applied()).append((owner, undo))


def taken_off(model: nn.Module, owner: object) -> None:
    """Undoes the last plan applied to the model; ValueError if that was not `owner`."""
    stack = vars(model).get("_patchconv_plans", _Applied())
    if not stack or stack[-1][0] is not owner:
        raise ValueError("plan.undo: expected a model that this plan was the last one applied to, got another")
    stack[-1][1]()
    stack.pop()
    if not stack:
        del vars(model)["_patchconv_plans"]


def described(strategy: Strategy, bytes_: dict[str, int]) -> list[str]:
    """A line for each thing that the strategy does: what and why."""
    lines = []
    if strategy.convert:
        what = "layers and functional code" if strategy.functional else "layers"
        lines.append(
            f"convert: {what} keep less for backward ({format_bytes(bytes_.get('convert', 0))} less at the peak)"
        )
    for name, entries in strategy.splits.items():
        lines.append(f"splits {' x '.join(map(str, entries))}: {name}: a smaller workspace")
    for name in strategy.checkpoints:
        lines.append(f"checkpoint: {name}: saves {format_bytes(bytes_.get(name, 0))}, and runs again in backward")
    if strategy.amp:
        lines.append(f"autocast to {strategy.amp}: nothing exact fits")
    if strategy.offload:
        lines.append("saved tensors wait on the host: nothing else fits")
    return lines
