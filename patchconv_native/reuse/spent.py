"""Whether the input of a layer or a function can be read by nobody after the call.

That is so if nothing holds the tensor but the call itself and at most one variable of the caller, which is not read
again. Holders are counted: CPython keeps the number with every object, and how many a call itself makes is counted at
a call of our own.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as _hooks
from torch.overrides import TorchFunctionMode

from .callers import holds_in_call, holds_in_sum

_LEAST = 1 << 20
"""Bytes. Smaller tensors are not worth the look."""

KINDS = Tensor, FakeTensor
"""A prediction on fake tensors is of what real ones would do."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

_OF_A_MODULE = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__
"""The functions between a caller and the forward of a module without hooks, innermost first."""
_INSIDE = [code for code in nn.Module._call_impl.__code__.co_consts if isinstance(code, types.CodeType)]
_OF_HOOKS = tuple(code for code in _INSIDE if code.co_name == "inner")
"""With hooks there is another one."""
_SERVED = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 14)  # later the stack may hold what is not counted
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)


def is_large(x: Any) -> bool:
    """Whether x is a tensor that is worth the look."""
    if type(x) is FakeTensor and x.fake_mode.shape_env is not None:
        return False  # of a compiler
    return type(x) in KINDS and x.layout == torch.strided and x.nbytes >= _LEAST and x.is_floating_point()


# Each of the three is to be called where it says, and nowhere else: it counts on what lies between it and the caller.
def is_spent(layer: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether args[0] is a large tensor that fills its memory, and that nobody can read after this call of `layer`.

    For what the layer's forward(self, *args, **kwargs) calls.
    """
    holders = _holders(args)[0]
    if isinstance(layer, _Probe):
        layer.counted = holders
        return False
    if not is_large(args[0]) or not _fills_its_memory(args[0]):
        return False
    hooked = _is_watched()
    if hooked is None or _has_hooks(layer):
        return False
    caller = _behind(sys._getframe(2).f_back, (*(_OF_HOOKS if hooked else ()), *_OF_A_MODULE))
    return _nobody_else(args[0], holders, _of_a_layer(hooked), caller, layer)


def is_spent_in(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """The same for a call of a function of torch. For the __torch_function__ of a mode."""
    holders = _holders(args)[0]
    if not is_large(args[0]) or not _fills_its_memory(args[0]):
        return False
    caller = _behind(sys._getframe(1).f_back, _between(function))
    return _nobody_else(args[0], holders, _of_a_function(function), caller, function)


def spent_operands(sign: str, args: tuple[Any, ...]) -> list[int]:
    """Which operands of `a + b`, say, are such tensors, and variables of the caller. For the same place."""
    holders = _holders(args)
    caller = _behind(sys._getframe(1).f_back, ())
    found = []
    for place, count in enumerate(holders):
        x = args[place]
        if caller is not None and is_large(x) and _fills_its_memory(x):
            held = holds_in_sum(caller, sign, x)
            if held is not None and count == _of_operands(sign)[place] + held - 1:
                found.append(place)
    return found


def _holders(args: tuple[Any, ...]) -> list[int]:
    return [sys.getrefcount(one) for one in args]


def _nobody_else(x: Tensor, holders: int, own: int, caller: types.FrameType | None, callee: Any) -> bool:
    """own: how many the call itself makes."""
    held = holds_in_call(caller, callee, x) if caller is not None else None
    return held is not None and own >= 0 and holders == own + held


def _fills_its_memory(x: Tensor) -> bool:
    """Whether x is dense, alone in its memory, and that memory is torch's own."""
    if torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0:
        return False  # vmap, or a tangent may go with it
    if x.requires_grad or (x.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    if not (x.is_contiguous() or (x.dim() in _FORMATS and x.is_contiguous(memory_format=_FORMATS[x.dim()]))):
        return False
    memory = x.untyped_storage()
    if memory.nbytes() != x.nbytes or not memory.resizable() or memory.is_shared():
        return False  # numpy's, a file's, another process's
    uses = x._use_count(), torch._C._storage_Use_Count(memory._cdata)  # type: ignore[attr-defined]
    if uses != (1, 2):  # by x itself, and by x and `memory`
        return False
    return type(x) is FakeTensor or weakref.getweakrefcount(x) == 0


def _behind(frame: types.FrameType | None, codes: tuple[types.CodeType, ...]) -> types.FrameType | None:
    """The function that called these, of which `frame` runs the first."""
    for code in codes:
        if frame is None or frame.f_code is not code:
            return None
        frame = frame.f_back
    return frame if _SERVED and sys.gettrace() is None else None  # a debugger may read any variable


def _between(function: Any) -> tuple[types.CodeType, ...]:
    """The functions between a caller of `function` and the mode that gets the call."""
    if isinstance(function, types.FunctionType):
        return torch.overrides.handle_torch_function.__code__, function.__code__
    return ()


class _Probe:
    counted = -1


def reads_nothing(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a hook for all modules that does not look at their inputs and results."""
    hook.reads_nothing = True  # type: ignore[attr-defined]
    return hook


def _is_watched() -> bool | None:
    """Whether there are hooks for all modules. None if one may look at inputs."""
    hooks = [*_hooks._global_forward_pre_hooks.values(), *_hooks._global_forward_hooks.values()]
    others = (_hooks._global_backward_pre_hooks, _hooks._global_backward_hooks)
    if any(others) or not all(getattr(hook, "reads_nothing", False) for hook in hooks):
        return None
    return bool(hooks)


def _has_hooks(layer: nn.Module) -> bool:
    own = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return any(own)


@functools.cache
def _of_a_layer(watched: bool) -> int:
    """How many hold a layer's input that was computed for its call alone. -1 where that is not known."""
    from ..lean import ForwardInLean

    class Layer(_Probe, ForwardInLean, nn.Identity):
        _writes_into = nn.Identity

    layer = Layer().eval()
    return _counted(layer, lambda: layer.counted)


@functools.cache
def _of_a_function(function: Callable[..., Any]) -> int:
    with _Counts() as mode:
        return _counted(function, lambda: mode.counted[0])


_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


@functools.cache
def _of_operands(sign: str) -> list[int]:
    """How many hold the operands, of which each is held by one variable."""
    with torch.no_grad(), _Counts() as mode:
        _SUMS[sign](torch.empty(1), torch.empty(1))
        return mode.counted


class _Counts(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counted = _holders(args)
        return func(*args, **(kwargs or {}))


def _counted(callee: Callable[[Tensor], Any], count: Callable[[], int]) -> int:
    """How many hold the argument of callee(argument). One more must hold it if a variable does."""
    with torch.no_grad():
        callee(torch.empty(_LEAST))
        computed = count()
        x = torch.empty(_LEAST)
        x = callee(x)
        return computed if count() == computed + 1 else -1
