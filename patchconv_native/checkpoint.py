"""Checkpoints: torch.utils.checkpoint without reentry, whose second run changes nothing that the first has changed.

Running statistics are updated once, in the first run, and the second has the settings of the first. What is saved, and
when the second run starts and stops, is torch's work. This module wraps the function that torch runs: its first call is
the forward pass, and each later one is surrounded by `Rerun`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils import checkpoint as stock

from .checkpoint_rerun import Rerun
from .lean import in_lean, lean
from .settings import all_settings


def _owner(fn: Any) -> nn.Module | None:
    """The module that fn, or the method fn, is of."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _state(owner: nn.Module | None) -> dict[str, Tensor]:
    if owner is None:
        return {}
    return dict(
        itertools.chain(*(named(remove_duplicate=False) for named in (owner.named_parameters, owner.named_buffers)))
    )


def _as_before(owner: nn.Module | None, state: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Puts these parameters and buffers in their places for a block: functional_call has taken them out by then."""
    now = _state(owner)
    gone = {name: one for name, one in state.items() if now.get(name) is not one and one.untyped_storage().nbytes()}
    return stateless._reparametrize_module(owner, gone) if owner is not None and gone else contextlib.nullcontext()


def _with_reruns(fn: Callable[..., Any]) -> Callable[..., Any]:
    """run(kwargs, *args) = fn(*args, **kwargs), of which every call but the first is a `Rerun`.

    A compiler sees fn alone. Where it gives up, Python runs the checkpoint as it always does.
    """
    settings: list[Any] | None = None
    state: dict[str, Tensor] = {}

    def run(kwargs: dict[str, Any], *args: Any) -> Any:
        nonlocal settings, state
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        if settings is None:
            settings, before = all_settings(), _state(_owner(fn))
            result = fn(*args, **kwargs)
            now = _state(_owner(fn))
            state = {name: one for name, one in before.items() if now.get(name) is one}  # not what it has replaced
            return result
        with _as_before(_owner(fn), state), Rerun(settings, getattr(fn, "__self__", None)):
            return fn(*args, **kwargs)

    return run


def _in_lean(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with lean():
            return fn(*args, **kwargs)

    run.__self__ = _owner(fn)  # type: ignore[attr-defined]
    return run


def _check_callable(owner: str, name: str, fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"{owner}: expected {name} to be callable, got {type(fn).__name__}")


def _check_no_reentry(owner: str, use_reentrant: Any) -> None:
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
    """fn(*args, **kwargs), which saves its arguments alone for backward and runs fn again there.

    As torch.utils.checkpoint.checkpoint(..., use_reentrant=False), with its keywords, but for three things. Running
    statistics are updated in the first run alone: those of batch and instance norms, stock's and this package's,
    modules and functions, and every module buffer named running_mean, running_var or num_batches_tracked. The second
    run has the settings of the first: deterministic algorithms, cuDNN's flags, TF32, `backend`, `recompute`,
    `workspace_limit`. And an fn that ends in rrelu has its gradients (torch's stops before the noise is drawn). With
    grad mode off, fn just runs. Inside `lean()`, both runs are inside `lean()`.

    ValueError for use_reentrant=True, TypeError for an fn that cannot be called, and torch's own errors. Inside
    torch.compile this is torch's own checkpoint. A checkpoint can be compiled, and so can a module inside of fn, but
    not a function inside of fn. TorchScript inside of fn needs early_stop=False and
    torch.jit.optimized_execution(False), as with torch's checkpoint.

    If fn is a module or a method of one, its second run has the parameters and buffers of the first, also those of
    torch.func.functional_call.

    Limits. These are updated twice: statistics passed to a TorchScript or compiled function (not module), other state
    that a forward changes (spectral_norm's), and whatever torch's own checkpoint around or inside of fn runs again. The
    second run reads running statistics as the first has left them, so a norm that computes with them in training (batch
    renormalization) gets other gradients.
    """
    _check_callable("checkpoint", "fn", fn)
    _check_no_reentry("checkpoint", use_reentrant)
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
    """checkpoint(fn, *args, **options, **kwargs), where kwargs may have the names of checkpoint's own keywords."""
    if not torch.compiler.is_compiling():
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if in_lean():
            fn = _in_lean(fn)
    # kwargs is passed as an argument: torch searches the arguments for devices whose random state it must save.
    return stock.checkpoint(_with_reruns(fn), kwargs, *args, use_reentrant=False, **options)


def _sequence(functions: Sequence[Callable[..., Any]]) -> Callable[[Any], Any]:
    def run(input: Any) -> Any:
        for function in functions:
            input = function(input)
        return input

    owners = map(_owner, functions)
    run.__self__ = nn.ModuleList([one for one in owners if one is not None])  # type: ignore[attr-defined]
    return run


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool = False,
    **options: Any,
) -> Any:
    """Runs functions one after another, in `segments` parts of equal length; all but the last are checkpoints.

    functions: an nn.Sequential, or a list of modules or functions of one argument. options: keywords of `checkpoint`.
    TypeError for functions or segments of another type, ValueError unless 1 <= segments <= len(functions).
    """
    owner = "checkpoint_sequential"
    _check_no_reentry(owner, use_reentrant)
    if isinstance(functions, nn.Sequential):
        functions = list(functions.children())
    elif not isinstance(functions, Sequence) and not isinstance(functions, nn.ModuleList):
        raise TypeError(f"{owner}: expected functions to be an nn.Sequential or a list, got {type(functions).__name__}")
    for i, function in enumerate(functions):
        _check_callable(owner, f"functions[{i}]", function)
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
    """`CheckpointFunction.apply(fn, n, *args)`, for code that was written for csrhddlam's pytorch-checkpoint."""

    @staticmethod
    def apply(fn: Callable[..., Any], n: int, *args: Any) -> Any:
        """checkpoint(fn, *args[:n]). The other arguments, the parameters that fn uses, are not needed and not used.

        TypeError for an n that is no int, ValueError unless 0 <= n <= len(args).
        """
        owner = "CheckpointFunction.apply"
        _check_callable(owner, "fn", fn)
        if not isinstance(n, int) or isinstance(n, bool):
            raise TypeError(f"{owner}: expected n to be an int (how many of the arguments are fn's), got {n!r}")
        if not 0 <= n <= len(args):
            raise ValueError(f"{owner}: expected n to be between 0 and {len(args)} (arguments), got {n}")
        return checkpoint(fn, *args[:n])
