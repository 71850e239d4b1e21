"""What surrounds the second run of a checkpoint: running statistics that are not updated again.

A function mode and hooks on all modules find the statistics and put copies in their place.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from .settings import settings_set

# Buffers that count or average what a module has seen. What it computes in training does not depend on them.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _statistics(module: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in module._buffers.items() if name in STATISTICS and buffer is not None]


def _is_compiled(module: nn.Module) -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # torch imports it when it is first needed
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


@functools.lru_cache(1024)
def _statistics_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments of a function that are running statistics, as (position, name)."""
    if func in (F.batch_norm, F.instance_norm):
        names: Iterable[str] = inspect.signature(func).parameters
    else:
        overload: Any = func
        if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            name = getattr(func, "__name__", "")
            if "norm" not in name or getattr(torch, name, None) != func:
                return ()
            overload = getattr(torch.ops.aten, name, None)
        if isinstance(overload, torch._ops.OpOverloadPacket):
            overload = getattr(overload, overload.overloads()[0])
        if not isinstance(overload, torch._ops.OpOverload):
            return ()
        names = [argument.name for argument in overload._schema.arguments]
    return tuple((i, name) for i, name in enumerate(names) if name in ("running_mean", "running_var"))


def _copy(tensor: Tensor) -> Tensor:
    """A copy that autograd does not record and dispatch modes do not see (a selective checkpoint counts operators)."""
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone()


def _rrelu(func: Any, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
           *rest: Any, **options: Any) -> Tensor:  # fmt: skip
    """func, F.rrelu or torch.rrelu, of a second run. A run that stops early stops as the noise is saved, before it
    is drawn: it is drawn then.
    """
    generator = None if func is F.rrelu else rest[0] if rest else options.get("generator")
    if not training or (func is F.rrelu and (options.get("inplace") or any(rest))):
        return func(input, lower, upper, training, *rest, **options)
    noise = torch.empty_like(input, memory_format=torch.contiguous_format)
    draw = functools.partial(torch.ops.aten.rrelu_with_noise, noise=noise, lower=lower, upper=upper, training=True,
                             generator=generator)  # fmt: skip
    try:
        return draw(input)
    except BaseException:
        with torch.no_grad():
            draw(input)
        raise


class _OfThread(threading.local):
    """The reruns of this thread that have not ended, outermost first."""

    def __init__(self) -> None:
        self.reruns: list[Rerun] = []


_here = _OfThread()
_lock = threading.Lock()
_hooks: list[Any] = []
_count = 0  # reruns of all threads that have not ended


def _before_forward(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and _here.reruns:
        _here.reruns[-1].enter_module(module)


def _after_forward(module: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling() and _here.reruns:
        _here.reruns[-1].leave_module(module)


def _count_reruns(change: int) -> None:
    """Adds `change` to their number. Torch's hooks on all modules are there while it is not zero."""
    global _count
    with _lock:
        _count += change
        if _count and not _hooks:
            _hooks.append(register_module_forward_pre_hook(_before_forward))
            _hooks.append(register_module_forward_hook(_after_forward, always_call=True))
        while _hooks and not _count:
            _hooks.pop().remove()


class Rerun(TorchFunctionMode):
    """Gives every function that takes running statistics copies of them, under the settings of the first run.

    Hooks on modules tell which buffers are statistics; functional norms are known by their arguments. The buffers are
    not written to, so nothing has to be restored if the run ends early. Only a module that puts a new tensor in a
    buffer's place gets the old one back. A function mode does not see inside of TorchScript and compiled modules: their
    statistics are copied before and written back at the end. The mode is off while a compiled module runs, which would
    else be compiled again and save other tensors.

    settings: as from all_settings(). owner: the module whose forward is run, if it is one.
    """

    def __init__(self, settings: list[Any], owner: Any) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor | None]] = {}  # id of the original -> original, copy if made
        self._originals: dict[int, Tensor] = {}  # id of the copy -> original
        self._values: list[tuple[Tensor, Tensor]] = []  # buffer, value to write back
        self._places: list[tuple[dict[str, Tensor | None], str, Tensor]] = []  # module._buffers, name, original
        self._settings, self._owner = settings, owner
        self._compiled: list[nn.Module] = []  # compiled modules that are running, outermost first

    def enter_module(self, module: nn.Module) -> None:
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted or _is_compiled(module):
            for inner in module.modules():
                self._values += [(buffer, _copy(buffer)) for buffer in _statistics(inner)]
            if not scripted:
                if not self._compiled:
                    self._leave_modes()
                self._compiled.append(module)
        else:
            for name in STATISTICS:
                if (buffer := module._buffers.get(name)) is not None:
                    self._copies.setdefault(id(buffer), (buffer, None))
                    self._places.append((module._buffers, name, buffer))

    def leave_module(self, module: nn.Module) -> None:
        if module._buffers is not None and any(buffers is module._buffers for buffers, _, _ in self._places):
            # Not only at the end: functional_call takes its buffers out of the module after this call.
            self._restore([place for place in self._places if place[0] is module._buffers])
            self._places = [place for place in self._places if place[0] is not module._buffers]
        if self._compiled and self._compiled[-1] is module:
            self._compiled.pop()
            if not self._compiled:
                self._join_modes()

    @staticmethod
    def _restore(places: list[tuple[dict[str, Tensor | None], str, Tensor]]) -> None:
        for buffers, key, original in places:
            if buffers.get(key) is not original:
                buffers[key] = original

    def _leave_modes(self) -> None:
        """Takes this mode out of torch's stack of modes, from below those that were entered later (`lean`)."""
        self._above: list[TorchFunctionMode] = []
        while (mode := torch.overrides._pop_mode()) is not self:
            self._above.append(mode)
        for mode in reversed(self._above):
            torch.overrides._push_mode(mode)

    def _join_modes(self) -> None:
        for _ in self._above:
            torch.overrides._pop_mode()
        for mode in (self, *reversed(self._above)):
            torch.overrides._push_mode(mode)

    def _copy_of(self, tensor: Any) -> Any:
        """The copy, if `tensor` is a statistic, else `tensor`."""
        if type(tensor) in (list, tuple):  # of a _foreach function
            return type(tensor)(map(self._copy_of, tensor))
        if id(tensor) not in self._copies:
            return tensor
        original, copy = self._copies[id(tensor)]
        if copy is None:
            copy = _copy(original)
            self._copies[id(tensor)] = original, copy
            self._originals[id(copy)] = original
        return copy

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        for i, name in _statistics_arguments(func):
            given = args[i] if i < len(args) else kwargs.get(name)
            if isinstance(given, Tensor):
                self._copies.setdefault(id(given), (given, None))
        if func is Tensor.add_ and not args[0].is_floating_point() and args[0].dim() == 0:
            self._enter_norm_that_counts(args[0])
        if func in (F.rrelu, torch.rrelu):
            return _rrelu(func, *args, **kwargs)
        if not self._copies:
            return func(*args, **kwargs)
        args = tuple(map(self._copy_of, args))
        result = func(*args, **{name: self._copy_of(value) for name, value in kwargs.items()})
        # `self.num_batches_tracked += 1` assigns the result to the buffer: that must be the original.
        return self._originals.get(id(result), result)

    def _enter_norm_that_counts(self, count: Tensor) -> None:
        """Finds the module whose `num_batches_tracked` is `count`, for norms whose forward was called without hooks."""
        frame = None if id(count) in self._copies else sys._getframe(2)
        for _ in range(8):  # functions of lean() may be between
            module = None if frame is None else frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module._buffers.get("num_batches_tracked") is count:
                self.enter_module(module)
            frame = frame and frame.f_back

    def __enter__(self) -> Rerun:
        self._as_first = settings_set(self._settings)
        self._as_first.__enter__()
        _count_reruns(+1)
        _here.reruns.append(self)
        super().__enter__()
        # The checkpoint may run its forward alone, without hooks.
        if isinstance(self._owner, nn.Module) and not _is_compiled(self._owner):
            self.enter_module(self._owner)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self._compiled:
            super().__exit__(kind, error, traceback)
        _here.reruns.pop()
        _count_reruns(-1)
        self._restore(self._places)
        for buffer, value in reversed(self._values):
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(value)
        self._as_first.__exit__(None, None, None)
