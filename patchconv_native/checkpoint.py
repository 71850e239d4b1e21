"""Checkpoints whose second run leaves no trace: torch.utils.checkpoint without reentry, with running statistics that
move once, in the forward pass, and with the settings of the forward pass in force when backward runs the code again.

What is kept, when it is made again and how far is torch's own work. Here the function that it runs is wrapped: its
first call is the forward pass, every later one a recomputation, which `_Again` surrounds.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as stock

from . import _library
from .lean import in_lean, lean

_C = _library.load()

# Buffers that count or average what a module has seen, and do not enter what it computes in training mode.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _statistics(module: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in module._buffers.items() if name in STATISTICS and buffer is not None]


def _compiled(module: nn.Module) -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # which torch imports when it is needed
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


@functools.lru_cache(1024)
def _places(func: Any) -> tuple[tuple[int, str], ...]:
    """Where a function takes running statistics: (position, name) of each such argument."""
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
    """A copy that neither autograd nor a dispatch mode (a selective policy, which counts operators) hears of."""
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone()


class _Running(threading.local):
    """The recomputations that are under way on this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[_Again] = []


_running = _Running()
_lock = threading.Lock()
_hooks: list[Any] = []
_under_way = 0  # on all threads


def _meet(module: nn.Module, args: Any) -> None:
    """Before any module's forward: a recomputation on this thread takes note of the module's statistics."""
    if not torch.compiler.is_compiling() and _running.stack:
        _running.stack[-1].meet(module)


def _leave(module: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling() and _running.stack:
        _running.stack[-1].leave(module)


def _hook(more: int) -> None:
    """Torch's hooks on all modules, which are there while there are recomputations."""
    global _under_way
    with _lock:
        _under_way += more
        if _under_way and not _hooks:
            _hooks.append(register_module_forward_pre_hook(_meet))
            _hooks.append(register_module_forward_hook(_leave, always_call=True))
        while _hooks and not _under_way:
            _hooks.pop().remove()


class _Again(TorchFunctionMode):
    """What surrounds a recomputation: every function that is given running statistics gets copies in their place.

    The statistics of modules are known by identity, from `_meet`, those given to functional norms by their argument.
    The originals are not touched, so there is nothing to be set back, whatever ends the run, but where a module puts
    another tensor in a buffer's place. What a function mode cannot see into has its statistics written back at the
    end: TorchScript, and compiled modules, around which the mode is not in force, lest they be compiled anew and save
    other tensors.
    """

    def __init__(self, settings: list[Any], owner: Any) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._originals: dict[int, Tensor] = {}  # by the copy
        self._values: list[tuple[Tensor, Tensor]] = []
        self._places: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self._settings, self._owner = settings, owner
        self._outside_of: list[nn.Module] = []

    def meet(self, module: nn.Module) -> None:
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted or _compiled(module):
            for inner in module.modules():
                self._values += [(buffer, _copy(buffer)) for buffer in _statistics(inner)]
            if not scripted:
                if not self._outside_of:
                    self._take_out()
                self._outside_of.append(module)
        else:
            for name in STATISTICS:
                if (buffer := module._buffers.get(name)) is not None:
                    self._copies.setdefault(id(buffer), (buffer, None))
                    self._places.append((module._buffers, name, buffer))

    def leave(self, module: nn.Module) -> None:
        if module._buffers is not None and any(buffers is module._buffers for buffers, _, _ in self._places):
            # Here, not at the end: what a caller had put into the module for this call (functional_call) goes with it.
            self._restore([place for place in self._places if place[0] is module._buffers])
            self._places = [place for place in self._places if place[0] is not module._buffers]
        if self._outside_of and self._outside_of[-1] is module:
            self._outside_of.pop()
            if not self._outside_of:
                self._put_in()

    @staticmethod
    def _restore(places: list[tuple[dict[str, Tensor | None], str, Tensor]]) -> None:
        for buffers, key, original in places:
            if buffers.get(key) is not original:
                buffers[key] = original

    def _take_out(self) -> None:
        """Off the stack of modes, where `lean` may have put others since."""
        self._above: list[TorchFunctionMode] = []
        while (mode := torch.overrides._pop_mode()) is not self:
            self._above.append(mode)
        for mode in reversed(self._above):
            torch.overrides._push_mode(mode)

    def _put_in(self) -> None:
        for _ in self._above:
            torch.overrides._pop_mode()
        for mode in (self, *reversed(self._above)):
            torch.overrides._push_mode(mode)

    def _in_place_of(self, tensor: Any) -> Any:
        if type(tensor) in (list, tuple):  # of a _foreach function
            return type(tensor)(map(self._in_place_of, tensor))
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
        for place, name in _places(func):
            given = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(given, Tensor):
                self._copies.setdefault(id(given), (given, None))
        if func is Tensor.add_ and not args[0].is_floating_point() and args[0].dim() == 0:
            self._meet_owner(args[0])
        if not self._copies:
            return func(*args, **kwargs)
        args = tuple(map(self._in_place_of, args))
        result = func(*args, **{name: self._in_place_of(value) for name, value in kwargs.items()})
        # `self.num_batches_tracked += 1` puts the result in the buffer's place.
        return self._originals.get(id(result), result)

    def _meet_owner(self, count: Tensor) -> None:
        """The norm that counts a batch, if its forward was called by name and no hook has told of it."""
        frame = None if id(count) in self._copies else sys._getframe(2)
        for _ in range(8):  # functions of lean() may be between
            module = None if frame is None else frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module._buffers.get("num_batches_tracked") is count:
                self.meet(module)
            frame = frame and frame.f_back

    def __enter__(self) -> _Again:
        self._now = _settings()
        _set(self._settings, self._now)
        _hook(+1)
        _running.stack.append(self)
        super().__enter__()
        # Its forward may be all that is called, and then no hook of its own.
        if isinstance(self._owner, nn.Module) and not _compiled(self._owner):
            self.meet(self._owner)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self._outside_of:
            super().__exit__(kind, error, traceback)
        _running.stack.pop()
        _hook(-1)
        self._restore(self._places)
        for buffer, value in reversed(self._values):
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(value)
        _set(self._now, _settings())


_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (_C.backend, _C.set_backend),
    (_C.recompute, _C.set_recompute),
    (_C.workspace_limit, _C.set_workspace_limit),
]
for _place in (("cuda", "conv"), ("cuda", "matmul"), ("mkldnn", "conv"), ("mkldnn", "matmul")):
    _SETTINGS.append(
        (
            functools.partial(torch._C._get_fp32_precision_getter, *_place),
            functools.partial(torch._C._set_fp32_precision_setter, *_place),
        )
    )


def _settings() -> list[Any]:
    return [get() for get, _ in _SETTINGS]


def _set(wanted: list[Any], now: list[Any]) -> None:
    for (_, setter), value, earlier in zip(_SETTINGS, wanted, now, strict=True):
        if value != earlier:
            setter(value)


def _run_again_without_trace(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn, given its keywords as a dict, whose calls after the first are recomputations under the settings of the first.
    A compiler sees fn alone; where it gives up and Python runs the checkpoint, it is one of these all the same.
    """
    settings: list[Any] | None = None

    def run(kwargs: dict[str, Any], *args: Any) -> Any:
        nonlocal settings
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        if settings is None:
            settings = _settings()
            return fn(*args, **kwargs)
        with _Again(settings, getattr(fn, "__self__", None)):
            return fn(*args, **kwargs)

    return run


def _in_lean(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with lean():
            return fn(*args, **kwargs)

    run.__self__ = getattr(fn, "__self__", None)  # type: ignore[attr-defined]
    return run


def _callable(owner: str, name: str, fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"{owner}: expected {name} to be callable, got {type(fn).__name__}")


def _no_reentry(owner: str, use_reentrant: Any) -> None:
    if use_reentrant is not False:
        raise ValueError(
            f"{owner}: expected use_reentrant to be False (checkpoints with reentry are not served), "
            f"got {use_reentrant!r}"
        )


def checkpoint(
    fn: Callable[..., Any],
    /,
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] = stock.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """fn(*args, **kwargs), which keeps its arguments alone and runs fn again in backward.

    As torch.utils.checkpoint.checkpoint(..., use_reentrant=False), whose keywords these are, but that running
    statistics (of batch and instance norms, stock's and this package's, modules and functions, and every buffer of a
    module that is named running_mean, running_var or num_batches_tracked) move in the first run alone, and that the
    second has the first one's settings: deterministic algorithms, cuDNN's flags, TF32, `backend`, `recompute`,
    `workspace_limit`. Where grad mode is off, fn just runs. Inside `lean()`, fn runs in lean() both times.

    Inside torch.compile this is torch's own checkpoint. ValueError for use_reentrant=True, TypeError for an fn that
    cannot be called; torch's errors for the rest. TorchScript in fn needs early_stop=False and, lest it saves other
    tensors the second time, torch.jit.optimized_execution(False), as with torch's. Compile a checkpoint, or a module in
    fn, but no function in it. Not seen, and moved twice: statistics that a TorchScript or compiled function (not
    module) is given, state under other names, as spectral_norm's, and what torch's own checkpoint around fn or inside
    of it runs again. What fn reads of running statistics, the second run reads as the first has left them: a norm that
    computes with them while it trains (batch renormalization) gets other gradients.
    """
    _callable("checkpoint", "fn", fn)
    _no_reentry("checkpoint", use_reentrant)
    options: dict[str, Any] = {
        "preserve_rng_state": preserve_rng_state,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
    }
    if context_fn is not stock.noop_context_fn:
        options["context_fn"] = context_fn
    return checkpoint_call(fn, args, kwargs, **options)


def checkpoint_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
    """checkpoint(fn, *args, **options, **kwargs), whatever the names of fn's own keywords are."""
    if not torch.compiler.is_compiling():
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if in_lean():
            fn = _in_lean(fn)
    # Among the arguments torch looks for devices, also inside of containers, to keep their random state.
    return stock.checkpoint(_run_again_without_trace(fn), kwargs, *args, use_reentrant=False, **options)


def _sequence(functions: Sequence[Callable[..., Any]]) -> Callable[[Any], Any]:
    def run(input: Any) -> Any:
        for function in functions:
            input = function(input)
        return input

    return run


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool = False,
    **options: Any,
) -> Any:
    """functions, one after another, in `segments` checkpoints of equal length; the last is not checkpointed.

    functions: an nn.Sequential, or a list of modules or functions of one argument. options: keywords of `checkpoint`.
    TypeError for functions or segments of another type, ValueError unless 1 <= segments <= len(functions).
    """
    owner = "checkpoint_sequential"
    _no_reentry(owner, use_reentrant)
    if isinstance(functions, nn.Sequential):
        functions = list(functions.children())
    elif not isinstance(functions, Sequence) and not isinstance(functions, nn.ModuleList):
        raise TypeError(f"{owner}: expected functions to be an nn.Sequential or a list, got {type(functions).__name__}")
    for i, function in enumerate(functions):
        _callable(owner, f"functions[{i}]", function)
    if not isinstance(segments, int) or isinstance(segments, bool):
        raise TypeError(f"{owner}: expected segments to be an int, got {type(segments).__name__}")
    if not 1 <= segments <= len(functions):
        raise ValueError(f"{owner}: expected segments to be between 1 and {len(functions)} (functions), got {segments}")
    known = inspect.signature(checkpoint).parameters.values()
    names = {p.name for p in known if p.kind is inspect.Parameter.KEYWORD_ONLY} - {"use_reentrant"}
    if unknown := options.keys() - names:
        raise TypeError(f"{owner}: expected options among {sorted(names)}, got {', '.join(sorted(unknown))}")
    size = len(functions) // segments
    start = 0
    for _ in range(segments - 1):
        input = checkpoint(_sequence(functions[start : start + size]), input, **options)
        start += size
    return _sequence(functions[start:])(input)


class CheckpointFunction:
    """`CheckpointFunction.apply(fn, n, *args)`, for code written against csrhddlam's pytorch-checkpoint."""

    @staticmethod
    def apply(fn: Callable[..., Any], n: int, *args: Any) -> Any:
        """checkpoint(fn, *args[:n]). The other arguments are parameters that fn uses; they need not be passed.

        TypeError for an n that is no int, ValueError unless 0 <= n <= len(args).
        """
        owner = "CheckpointFunction.apply"
        _callable(owner, "fn", fn)
        if not isinstance(n, int) or isinstance(n, bool):
            raise TypeError(f"{owner}: expected n to be an int (how many of the arguments are fn's), got {n!r}")
        if not 0 <= n <= len(args):
            raise ValueError(f"{owner}: expected n to be between 0 and {len(args)} (arguments), got {n}")
        return checkpoint(fn, *args[:n])
