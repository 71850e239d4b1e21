"""What a plan turns on in a model, how that is applied to the model, and how it is undone.

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
from ..tiles.modules import tile_modules
from ..wrap import class_without, set_class


@dataclass
class Strategy:
    """The settings of a plan. The default is the unchanged model."""

    convert: bool = False
    """Layers and functional code that save less, convolutions in tiles."""
    splits: dict[str, list[int]] = field(default_factory=dict)
    """Splits of convolutions, by module name, where automatic splits need too much workspace."""
    checkpoints: list[str] = field(default_factory=list)
    """Names of the modules whose forward pass is recomputed in backward."""
    amp: str | None = None
    """The dtype of autocast."""
    offload: bool = False
    """Whether tensors saved for backward wait in the host's memory."""
    tile: int | None = None
    """The budget, in bytes, with which `tile_modules` runs the model."""

    def __str__(self) -> str:
        parts = []
        if self.convert:
            parts.append("convert")
        if self.splits:
            parts.append(f"{len(self.splits)} convolutions in more tiles")
        if self.checkpoints:
            parts.append(f"{len(self.checkpoints)} checkpoint{'s' if len(self.checkpoints) > 1 else ''}")
        if self.amp:
            parts.append(f"autocast to {self.amp}")
        if self.offload:
            parts.append("saved tensors on the host")
        if self.tile is not None:
            parts.append(f"tiles in {format_bytes(self.tile)}")
        return ", ".join(parts) or "no change to the model"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Applies it to `model`, in place, and returns what undoes this. On an error nothing has been changed."""
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
                classes[module] = class_without(before[module][0], after.get(module, now), now)
                if classes[module] is None:
                    raise ValueError(
                        f"plan.undo: expected module {name!r} to be what the plan made of it, got {now}: "
                        "undo what changed it first"
                    )
            for handle in handles:
                handle.remove()
            for module, (_, splits) in before.items():
                set_class(module, classes[module])
                if isinstance(module, Split):
                    module._splits = splits
                else:
                    module.__dict__.pop("_splits", None)

        try:
            if self.convert:
                convert(model)
            for name, entries in self.splits.items():
                module: Any = modules[name]
                if not isinstance(module, Split):
                    raise ValueError(f"plan: expected {name!r} to be a convolution, got {type(module).__name__}")
                module.splits = tuple(entries)
            if self.checkpoints:
                already = [name for name, module in modules.items() if is_checkpointed(module)]
                checkpoint_modules(model, [*already, *(name for name in self.checkpoints if name not in already)])
            if self.tile is not None:
                tile_modules(model, "", self.tile)
            if self.amp or self.offload:
                contexts = _ForwardContexts(self.amp, self.offload)
                handles.append(model.register_forward_pre_hook(contexts.enter, prepend=True))
                handles.append(model.register_forward_hook(contexts.leave, always_call=True))
        except BaseException:
            undo()
            raise
        after.update((module, type(module)) for module in modules.values())
        return undo


class _ForwardContexts:
    """Autocast and offloading around a model's forward pass, by a hook before it and one after it."""

    def __init__(self, amp: str | None, offload: bool) -> None:
        self._amp, self._offload = amp, offload
        self._thread: Any = _ThreadState()

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
        self._thread.stacks.append(stack)

    def leave(self, model: nn.Module, arguments: Any, output: Any) -> None:
        if self._thread.stacks:
            self._thread.stacks.pop().close()


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


class _AppliedPlans(list[tuple[object, Callable[[], None]]]):
    """The plans applied to a model, in order, each with what undoes it. Copies and pickles of the model have none."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _AppliedPlans, ()


def remember_plan(model: nn.Module, plan: object, undo: Callable[[], None]) -> None:
    """Remembers that `plan` was applied to the model. Plans are undone in the reverse order."""
    vars(model).setdefault("_patchconv_plans", _AppliedPlans()).append((plan, undo))


def undo_last_plan(model: nn.Module, plan: object) -> None:
    """Undoes the last plan applied to the model; ValueError if that was not `plan`."""
    applied = vars(model).get("_patchconv_plans", _AppliedPlans())
    if not applied or applied[-1][0] is not plan:
        raise ValueError("plan.undo: expected a model that this plan was the last one applied to, got another")
    applied[-1][1]()
    applied.pop()
    if not applied:
        del vars(model)["_patchconv_plans"]


def reasons_for(strategy: Strategy, saved: dict[str, int]) -> list[str]:
    """A line for each thing that the strategy does: what and why. saved: bytes by module name, and by "convert"."""
    lines = []
    if strategy.convert:
        lines.append(f"convert: less is saved for backward ({format_bytes(saved.get('convert', 0))} less at the peak)")
    for name, entries in strategy.splits.items():
        lines.append(f"splits {' x '.join(map(str, entries))}: {name}: a smaller workspace")
    for name in strategy.checkpoints:
        lines.append(f"checkpoint: {name}: {format_bytes(saved.get(name, 0))} less saved, and runs again in backward")
    if strategy.amp:
        lines.append(f"autocast to {strategy.amp}: nothing exact fits")
    if strategy.offload:
        lines.append("saved tensors wait on the host: nothing else fits")
    if strategy.tile is not None:
        room = format_bytes(strategy.tile)
        lines.append(f"tile_modules: the model in tiles, in {room} above its inputs, its results and all gradients")
    return lines
