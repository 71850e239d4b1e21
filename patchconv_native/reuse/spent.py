"""Whether the input of a layer or a function can be read by nobody after the call.

That is so if nothing holds the tensor but the call itself and variables of the caller that are not read again. Holders
are counted: CPython keeps their number with every object, and a call of our own, made beside it in the same
surroundings, shows how many a call itself makes.
"""

from __future__ import annotations

import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as _hooks
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from .callers import holds_in_arithmetic, holds_in_call

_LEAST = 4 << 20
"""Bytes. Smaller tensors are not worth the look."""

KINDS = Tensor, FakeTensor
"""A prediction on fake tensors is of what real ones would do."""

_SERVED = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 14)  # later the stack may hold what is not counted
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# The functions between a caller and the forward of a module, innermost first. With hooks there is one more.
_OF_A_MODULE = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__
_INSIDE = [code for code in nn.Module._call_impl.__code__.co_consts if isinstance(code, types.CodeType)]
_WITH_HOOKS = (*(code for code in _INSIDE if code.co_name == "inner"), *_OF_A_MODULE)


def is_large(x: Any) -> bool:
    """Whether x is a tensor on the CPU that is worth the look. (On a GPU, another stream may still read it.)"""
    if type(x) is FakeTensor and x.fake_mode.shape_env is not None:
        return False  # of a compiler
    plain = type(x) in KINDS and x.layout == torch.strided
    return plain and x.nbytes >= _LEAST and x.is_floating_point() and x.device.type == "cpu"


# Each of the next three looks at the functions above it, up to the caller: it works where it is said to be called.
def is_spent(layer: nn.Module, args: tuple[Any, ...], probe: Any) -> bool:
    """Whether args[0], the one argument of this call of `layer`, is a large tensor that nobody can read afterwards.

    Called by ForwardInLean._without_gradients, which the layer's forward calls. probe: a layer of that class and Probe.
    """
    holders = _holders(args)[0]
    if isinstance(layer, Probe):
        layer.counted = holders
        return False
    if not _is_alone(args[0]) or _has_hooks(layer):
        return False
    caller = _caller(sys._getframe(2).f_back, _WITH_HOOKS if _global_hooks() else _OF_A_MODULE)
    held = holds_in_call(caller, layer, args[0]) if caller is not None else None
    return held is not None and holders == _made_by_a_layer(probe) + held


def is_spent_in(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """The same of a function of torch. Called by the __torch_function__ of a mode."""
    holders = _holders(args)[0]
    if not _is_alone(args[0]):
        return False
    between: tuple[types.CodeType, ...] = ()
    if isinstance(function, types.FunctionType):
        between = torch.overrides.handle_torch_function.__code__, function.__code__
    caller = _caller(sys._getframe(1).f_back, between)
    held = holds_in_call(caller, function, args[0]) if caller is not None else None
    return held is not None and holders == _made_by_a_function(function) + held


def spent_operands(sign: str, args: tuple[Any, ...]) -> list[int]:
    """Which operands of `a + b`, say, are such tensors, and variables. Called by the __torch_function__ of a mode."""
    holders = _holders(args)
    caller = _caller(sys._getframe(1).f_back, ())
    found = []
    for place, count in enumerate(holders):
        if caller is not None and _is_alone(args[place]):
            held = holds_in_arithmetic(caller, sign, args[place])
            if held is not None and count == _made_by_operators(sign)[place] + held:
                found.append(place)
    return found


def _holders(args: tuple[Any, ...]) -> list[int]:
    return [sys.getrefcount(one) for one in args]


def _caller(frame: types.FrameType | None, codes: tuple[types.CodeType, ...]) -> types.FrameType | None:
    """The function that called the functions `codes`, of which `frame` runs the first."""
    for code in codes:
        if frame is None or frame.f_code is not code:
            return None
        frame = frame.f_back
    return frame


def _is_alone(x: Any) -> bool:
    """Whether x is large and fills memory of torch's own, and nothing else can see that memory or the operators."""
    if not _SERVED or sys.gettrace() is not None or not is_large(x) or not _nobody_watches():
        return False
    if torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0:
        return False  # vmap, or a tangent may go with it
    if x.requires_grad or x.is_inference() != torch.is_inference_mode_enabled() or x._is_zerotensor() or x.is_neg():
        return False
    if x.grad is not None or (type(x) is Tensor and (vars(x) or weakref.getweakrefcount(x))):
        return False
    return _fills_its_memory(x) and _is_of_a_format(x)


def _nobody_watches() -> bool:
    """Whether no mode is active that could see the operators, and no hook for all modules that looks at inputs."""
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    modes += [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    known = DeviceContext, FakeTensorMode
    seen = [mode for mode in modes if not isinstance(mode, known)] + _global_hooks()
    return all(getattr(one, "looks_at_nothing", False) for one in seen)


def looks_at_nothing(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a hook for all modules that keeps neither inputs nor results. Modes have an attribute of this name."""
    hook.looks_at_nothing = True  # type: ignore[attr-defined]
    return hook


def _global_hooks() -> list[Any]:
    before, after = _hooks._global_forward_pre_hooks, _hooks._global_forward_hooks
    backward = _hooks._global_backward_pre_hooks, _hooks._global_backward_hooks
    return [hook for hooks in (before, after, *backward) for hook in hooks.values()]


def _has_hooks(layer: nn.Module) -> bool:
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def _fills_its_memory(x: Tensor) -> bool:
    memory = x.untyped_storage()
    if memory.nbytes() != x.nbytes or not memory.resizable() or memory.is_shared():
        return False  # numpy's, a file's, another process's
    fresh = torch.empty(0, device="cpu")
    of_fresh = fresh.untyped_storage()
    return _uses(x, memory) == _uses(fresh, of_fresh)


def _uses(x: Any, memory: torch.UntypedStorage) -> tuple[int, int, int]:
    """How many hold the tensor in C++, and its memory in C++ and in Python."""
    return x._use_count(), torch._C._storage_Use_Count(memory._cdata), sys.getrefcount(memory)


def _is_of_a_format(x: Tensor) -> bool:
    """Whether results of x have its strides: those of a dense layout, and not of another one as well."""
    format = torch.contiguous_format if x.is_contiguous() else _FORMATS.get(x.dim())
    return format is not None and x.stride() == torch.empty(x.shape, device="meta", memory_format=format).stride()


class Probe:
    """A base of the layer at whose call holders are counted."""

    counted = 0


def _made_by_a_layer(probe: Any) -> int:
    """How many hold a layer's input that was computed for its call."""
    probe(torch.empty(1).expand(_LEAST))
    return int(probe.counted)


def _made_by_a_function(function: Callable[..., Any]) -> int:
    with _Counts() as mode:
        function(torch.empty(1))
    return mode.counted[0]


def _made_by_operators(sign: str) -> list[int]:
    """How many hold each operand besides a variable. (Arguments of a function may be held by its caller as well.)"""
    with _Counts() as mode:
        a, b = torch.empty(1), torch.empty(1)
        if sign == "+":
            a + b
        elif sign == "-":
            a - b
        elif sign == "*":
            a * b
        else:
            a / b
    return [count - 1 for count in mode.counted]


class _Counts(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not args or not isinstance(args[0], Tensor):
            return func(*args, **(kwargs or {}))
        self.counted = _holders(args)
        return args[0]
