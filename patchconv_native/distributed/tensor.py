"""SpatialTensor: an image of which this rank holds a part, under the functions of torch.

A thin value: the local tensor, with autograd's ordinary graph, and for each dimension that is cut an `Axis`. Its shape
is the whole image's. Functions of torch that are given one look for a rule (`rule`); the rules stand in the files
beside this one. A function without a rule is refused by name: nothing is computed on parts that would not be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .cuts import Axis
from .exchange import scatter_part, shared

Axes = dict[int, Axis]

RULES: dict[Any, Callable[..., Any]] = {}


def rule(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what serves these functions of torch. It gets their arguments, at least one a SpatialTensor."""

    def register(serve: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(functions, serve))
        return serve

    return register


def rules(make: Callable[[Any], Callable[..., Any]], functions: Iterable[Any]) -> None:
    """Registers make(function) for each of some functions."""
    RULES.update({function: make(function) for function in functions})


def name_of(function: Any) -> str:
    name = getattr(function, "__name__", None) or str(function)
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return str(name)


class NotServed(NotImplementedError):
    """What is not exact on parts, or has no rule."""


def refuse(function: str, why: str) -> NotServed:
    return NotServed(
        f"{function}: not served on a SpatialTensor: {why}. Call `gather` on it first, or name the module that calls "
        "this in spatial(gather=...)"
    )


class SpatialTensor(Tensor):
    """A part of an image (or of features of its resolution, or of any other), as one value of the whole's shape.

    Made by `scatter`, by models that `spatial` has prepared, or by `from_local`. `shape` and the like are the whole's;
    `to_local()` is this rank's part, `offset` where it begins, `cuts` where the dimensions are cut. Arithmetic,
    activations, convolutions, pools, norms, resizing, concatenation and reductions of torch take it; a result that no
    longer has a cut dimension (a global pool's, a mean's) is a plain tensor, the same on every rank. Plain tensors in
    an operation with one count as the same on every rank: their gradient is summed over the ranks. What has no exact
    rule raises NotServed, a NotImplementedError, which names the function.
    """

    _local: Tensor
    axes: Axes

    @staticmethod
    def __new__(cls, local: Tensor, axes: Axes) -> SpatialTensor:
        shape = [axes[d].size if d in axes else n for d, n in enumerate(local.shape)]
        for d, axis in axes.items():
            if local.size(d) != axis.length:
                raise ValueError(
                    f"SpatialTensor: expected a local tensor of {axis.length} along dimension {d} (cut at {axis.cuts}, "
                    f"rank {axis.index}), got {local.size(d)}"
                )
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        self._local = local
        self.axes = dict(axes)
        return self

    @classmethod
    def from_local(cls, local: Tensor, axes: Axes) -> SpatialTensor:
        """This rank's part; axes: as another SpatialTensor has them. ValueError if the part's size does not fit."""
        return cls(local, axes)

    def to_local(self) -> Tensor:
        """This rank's part, with its history."""
        check_history("to_local", self)
        return self._local

    @property
    def cuts(self) -> dict[int, tuple[int, ...]]:
        """For each cut dimension, where: rank r of its group holds cuts[r] to cuts[r + 1]."""
        return {d: axis.cuts for d, axis in self.axes.items()}

    @property
    def offset(self) -> tuple[int, ...]:
        """Of this rank's part in the whole, a number for each dimension."""
        return tuple(self.axes[d].own[0] if d in self.axes else 0 for d in range(self._local.dim()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = ", ".join(f"{axis.name}: {axis.own[0]} to {axis.own[1]} of {axis.size}" for axis in self.axes.values())
        return f"SpatialTensor(shape={tuple(self.shape)}, {where}, local={self._local!r})"

    def __tensor_flatten__(self) -> Any:
        raise refuse("torch.compile", "it would specialise on one rank's part")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse("pickle", "process groups cannot be stored")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        serve = RULES.get(func)
        if serve is None:
            raise refuse(name_of(func), "it has no rule here")
        if kwargs and kwargs.get("out") is not None:
            raise refuse(name_of(func), "`out` cannot be given")
        for value in args:
            if isinstance(value, SpatialTensor):
                check_history(name_of(func), value)
        result = serve(*args, **(kwargs or {}))
        if isinstance(result, SpatialTensor) and result._local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                result.requires_grad_()  # written in place, it may need one now
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise refuse(name_of(func), "C++ code called it, past torch's functions")


# ----------------------------------------------------------------------------------------------------------------------
# For the rules.


def check_history(function: str, x: SpatialTensor) -> None:
    """The history is the local tensor's. One of the wrapper's own comes from what passes torch's functions by."""
    with torch._C.DisableTorchFunctionSubclass():
        own = x.grad_fn
    if own is not None:
        raise refuse(
            function, f"its input comes from {own.name()}, a torch.autograd.Function, which would lose its gradient"
        )


def groups_of(axes: Axes) -> tuple[Any, ...]:
    return tuple(axis.group for axis in axes.values())


def local_of(value: Any) -> Any:
    return value._local if isinstance(value, SpatialTensor) else value


def parameter(value: Any, like: SpatialTensor) -> Any:
    """A parameter, or any plain tensor, for use on parts."""
    return shared(value, groups_of(like.axes)) if isinstance(value, Tensor) else value


def wrap(local: Tensor, axes: Axes) -> Tensor:
    return SpatialTensor(local, axes) if axes else local


def aligned(function: str, values: Sequence[Any]) -> tuple[list[Any], Axes]:
    """Operands of an elementwise function as local tensors that broadcast against each other, and the result's axes.

    Parts cut elsewhere than the first's are fetched; a plain tensor gives the part that belongs to this rank's.
    """
    from .moving import recut

    tensors = [v for v in values if isinstance(v, Tensor)]
    dims = max(t.dim() for t in tensors)
    axes: Axes = {}
    for t in tensors:
        if isinstance(t, SpatialTensor):
            for d, axis in t.axes.items():
                place = d + dims - t.dim()
                if place in axes and (axes[place].size != axis.size or axes[place].group is not axis.group):
                    if axes[place].size != axis.size:
                        raise RuntimeError(
                            f"{function}: expected dimension {place} to have the same size in all operands, got "
                            f"{axes[place].size} and {axis.size}"
                        )
                    raise refuse(function, "its operands are cut between different groups of ranks")
                axes.setdefault(place, axis)
    result = []
    for value in values:
        if not isinstance(value, Tensor):
            result.append(value)
            continue
        shift = dims - value.dim()
        if isinstance(value, SpatialTensor):
            here = {d - shift: axis for d, axis in axes.items()}
            for d in here:
                if d >= 0 and d not in value.axes and value.size(d) != 1:
                    raise refuse(function, "its operands are cut along different dimensions")
            local = recut(value, {d: here[d].cuts for d in value.axes})._local
            # The same along what it is not cut along.
            result.append(shared(local, tuple(axis.group for d, axis in here.items() if d not in value.axes)))
            continue
        local = value
        if value.dim():
            local = shared(value, tuple(axis.group for axis in axes.values()))
        elif value.requires_grad:
            local = shared(value, groups_of(axes))
        for d, axis in axes.items():
            own = d - shift
            if own >= 0 and local.size(own) != 1:
                if local.size(own) != axis.size:
                    raise RuntimeError(
                        f"{function}: expected dimension {d} to have size {axis.size}, or 1, got {local.size(own)}"
                    )
                local = local.narrow(own, axis.own[0], axis.length)
        result.append(local)
    return result, axes


def scattered(whole: Tensor, axes: Axes) -> SpatialTensor:
    """This rank's part of a tensor that is the same on every rank."""
    part = whole
    for d, axis in axes.items():
        part = scatter_part(part, d, axis)
    return SpatialTensor(part, axes)
