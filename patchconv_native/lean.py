"""`lean()`: unchanged functional code with this package's functions.

A function mode replaces `F.relu`, `torch.cat`, `x + y`, `F.conv2d` and so on by the functions of `functional`, which
compute the same and save less for backward. It sees what Python calls. Operators that C++ code calls further down are
not replaced.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import functional
from ._library import PLAIN
from .reuse import InPlaceFunctions, Probe, enter_again, in_place, is_large, is_spent, leave, worth_a_look

Function = TypeVar("Function", bound=Callable[..., Any])


def _in_place(served: Callable[..., Any]) -> Callable[..., Any]:
    """For torch.xxx_ and Tensor.xxx_, which have no argument `inplace`."""
    return lambda input, *args, **kwargs: served(input, *args, inplace=True, **kwargs)


def _of_two_tensors(served: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Sums and products of two tensors. Those with numbers save no tensor, and are left to stock."""

    def function(input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (
            isinstance(input, Tensor) and isinstance(other, Tensor) and not isinstance(kwargs.get("alpha"), Tensor)
        )
        if tensors and not args and kwargs.keys() <= {"alpha"}:
            return served(input, other, **kwargs)
        return stock(input, other, *args, **kwargs)

    return function


def _of_plain_tensors(served: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """For convolutions: subclasses of tensors without functions of their own get stock's operator."""

    def function(*args: Any, **kwargs: Any) -> Any:
        plain = all(type(one) in PLAIN for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        return (served if plain else stock)(*args, **kwargs)

    return function


def _cat(stock: Callable[..., Any]) -> Callable[..., Any]:
    def function(tensors: Any, dim: Any = 0, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.pop("axis", dim)
        if args or kwargs or not isinstance(dim, int):
            return stock(tensors, dim, *args, **kwargs)
        return functional.cat(list(tensors), dim)

    return function


def _norm(served: Callable[..., Any], order: tuple[str, ...]) -> Callable[..., Any]:
    """For torch.xxx_norm, whose arguments are those of F.xxx_norm in another order, and whether to use cuDNN."""

    def function(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        given.pop("cudnn_enabled", None)
        given.pop("cudnn_enable", None)
        return served(**given)

    return function


def _dropout(served: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input, p, train: served(input, p, train)


def _table() -> dict[Any, Callable[..., Any]]:
    nn_ops: Any = torch._C._nn
    same = (
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout batch_norm "
        "instance_norm group_norm layer_norm rms_norm local_response_norm adaptive_max_pool1d "
        "adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool2d adaptive_avg_pool3d interpolate pad"
    )
    names = (*functional.activation.__all__, *same.split())
    table: dict[Any, Callable[..., Any]] = {getattr(F, name): getattr(functional, name) for name in names}
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        table[getattr(torch, name)] = _of_plain_tensors(getattr(functional, name), getattr(torch, name))
    for dims in (1, 2, 3):
        for module in (torch, F):
            table[getattr(module, f"max_pool{dims}d")] = getattr(functional, f"max_pool{dims}d")
    table[F.linear] = functional.linear
    table[F.glu] = table[torch._C._nn.glu] = functional.glu
    table[torch.avg_pool1d] = functional.avg_pool1d
    table[nn_ops.avg_pool2d] = functional.avg_pool2d
    table[nn_ops.avg_pool3d] = functional.avg_pool3d
    table[torch.adaptive_avg_pool1d] = functional.adaptive_avg_pool1d
    table[nn_ops.softplus] = functional.softplus
    table[nn_ops.gelu] = functional.gelu
    places: tuple[Any, ...] = (torch, Tensor)
    for place in places:
        table[place.relu] = lambda input: functional.relu(input)
        table[place.relu_] = _in_place(functional.relu)
        table[place.sigmoid] = functional.sigmoid
        table[place.tanh] = functional.tanh
        table[place.prelu] = functional.prelu
        table[place.hardshrink] = functional.hardshrink
        table[place.add] = _of_two_tensors(functional.add, place.add)
        table[place.mul] = _of_two_tensors(functional.mul, place.mul)
        table[place.multiply] = _of_two_tensors(functional.mul, place.multiply)
    for name in ("leaky_relu", "threshold", "elu", "hardtanh"):
        table[getattr(F, f"{name}_")] = _in_place(getattr(functional, name))
    for name in ("threshold", "celu", "selu"):
        table[getattr(torch, name)] = getattr(functional, name)
    table[Tensor.__add__] = table[Tensor.__radd__] = _of_two_tensors(functional.add, torch.add)
    table[Tensor.__mul__] = table[Tensor.__rmul__] = _of_two_tensors(functional.mul, torch.mul)
    table[Tensor.__iadd__] = table[Tensor.add_] = _of_two_tensors(functional.add_, Tensor.add_)
    for stock in (torch.cat, torch.concat, torch.concatenate):
        table[stock] = _cat(stock)
    table[torch.dropout] = _dropout(functional.dropout)
    table[torch.alpha_dropout] = _dropout(functional.alpha_dropout)
    affine = ("input", "weight", "bias", "running_mean", "running_var")
    table[torch.batch_norm] = _norm(functional.batch_norm, (*affine, "training", "momentum", "eps", "cudnn_enabled"))
    table[torch.instance_norm] = _norm(
        functional.instance_norm, (*affine, "use_input_stats", "momentum", "eps", "cudnn_enabled")
    )
    table[torch.group_norm] = _norm(
        functional.group_norm, ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled")
    )
    table[torch.layer_norm] = _norm(
        functional.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
    )
    table[torch.rms_norm] = functional.rms_norm
    return table


class _Redirect(TorchFunctionMode):
    """Calls this package's functions in place of stock's, but not inside of a checkpoint that began in the block.

    A checkpoint runs its function again later, outside of the block, and must find the same functions both times.
    """

    table = _table()

    def __init__(self, outside: tuple[bool, Any]) -> None:
        super().__init__()
        self._at_entry = outside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        served = self.table.get(func)
        if served is None or "out" in kwargs or not PLAIN.issuperset(types):
            return func(*args, **kwargs)
        # In a compiled function or a trace, and where a checkpoint runs, stock's.
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() or _surroundings() != self._at_entry:
            return func(*args, **kwargs)
        return served(*args, **kwargs)


_CONVOLUTIONS = frozenset(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3))


def _gains_by_itself(module: nn.Module) -> bool:
    """Whether it needs less memory without gradients too: max pools, whose indices are smaller, and convolutions."""
    kinds = nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd, nn.modules.conv._ConvNd
    return isinstance(module, kinds) or _has_convolutions(type(module).forward)


@functools.lru_cache(maxsize=1024)
def _has_convolutions(forward: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and not _CONVOLUTIONS.isdisjoint(code.co_names)


def _surroundings() -> tuple[bool, Any]:
    """What a checkpoint changes while it runs: grad mode (with reentry), saved-tensor hooks (without reentry)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    checkpoint = hooks[0] if hooks and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint" else None
    return torch.is_grad_enabled(), checkpoint


class _OfThread(threading.local):
    """The surroundings at the entry of each block of this thread that has not ended, outermost first."""

    def __init__(self) -> None:
        self.blocks: list[tuple[bool, Any]] = []


_here = _OfThread()


def in_lean() -> bool:
    """Whether functions called here would be replaced."""
    return bool(_here.blocks) and _here.blocks[-1] == _surroundings()


class lean:
    """`with pc.lean():` or `@pc.lean()`: functional code in the block saves as little as this package's layers.

    F.relu, torch.relu, x.relu_(), torch.cat, F.conv2d, F.dropout, F.max_pool2d, F.batch_norm, x + y, x * y and so on
    compute the same values and gradients and save less. Sums and concatenations that a later layer needs in backward
    are made again from their operands. Blocks may be nested. Other threads are not affected.

    Stock functions are used inside torch.compile, scripted code and torch.func transforms, for tensor subclasses, and
    where grad mode is not what it was when the block was entered. They are used inside of torch.utils.checkpoint too,
    unless the function that it runs enters a block itself: decorate that function, or use this package's `checkpoint`,
    which does it. Generator functions cannot be decorated (TypeError): enter the block inside of them.
    """

    def __init__(self, *given: Any) -> None:
        if given:
            raise TypeError("lean: expected no argument: write `with pc.lean():`, or `@pc.lean()` over a function")
        self._modes: list[_Redirect | None] = []

    def __enter__(self) -> lean:
        mode = None
        if not torch.compiler.is_compiling():
            now = _surroundings()
            if not _here.blocks or _here.blocks[-1] != now:
                mode = _Redirect(now)
                mode.__enter__()
            _here.blocks.append(now)
        self._modes.append(mode)
        return self

    def __exit__(self, *error: Any) -> None:
        mode = self._modes.pop()
        if not torch.compiler.is_compiling():
            _here.blocks.pop()
        if mode is not None:
            mode.__exit__(*error)

    def __call__(self, function: Function) -> Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError("lean: expected a function, got a generator function: enter the block inside of it")

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with lean():
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]


def _saves_nothing(module: nn.Module) -> bool:
    """Whether it runs for its result alone: without gradients, and not for a checkpoint, which runs it again with them
    and must find the same dropout. Checkpoints with reentry are functions of autograd, which switch off both modes.
    """
    if module.training or torch.is_grad_enabled() or _here.blocks:
        return False
    return torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()


class ForwardInLean(nn.Module):
    """A base class that runs the forward of the class after it (in the order of super()) inside `lean()`.

    Where nothing is saved for backward, only classes that need less memory even then do. Some layers write their result
    into an input that nobody reads again.
    """

    _writes_into: type[nn.Module] | None = None
    """The stock class of a layer that can write into its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() or in_lean():
            return super().forward(*args, **kwargs)
        if _saves_nothing(self) and not _gains_by_itself(self):
            if args and (is_large(args[0]) or torch._C._len_torch_function_stack()):
                return self._without_gradients(args, kwargs)
            return super().forward(*args, **kwargs)
        with lean():
            return super().forward(*args, **kwargs)

    def _without_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer = leave()
        try:
            if self._writes_into is not None:
                if len(args) == 1 and not kwargs and is_spent(self, args, _probes.layer):
                    result = in_place(self, self._writes_into, args[0])
                    if result is not None:
                        return result
            elif worth_a_look(self, args):
                with InPlaceFunctions():
                    return super().forward(*args, **kwargs)
            return super().forward(*args, **kwargs)
        finally:
            if outer is not None:
                enter_again(outer)


class _Counted(Probe, ForwardInLean, nn.Identity):
    _writes_into = nn.Identity


class _Probes(threading.local):
    """A layer for each thread, since what is counted depends on what is active in the thread."""

    def __init__(self) -> None:
        self.layer = _Counted().eval()


_probes = _Probes()
