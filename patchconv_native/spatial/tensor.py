"""SpatialTensor: a part of an image, under the functions of torch.

It holds the local tensor, with autograd's ordinary graph, and an `Axis` for each dimension that is cut. Its shape is
the whole image's. A function of torch that is given one is looked up in the table of rules. A function without a rule
is refused by name: nothing is computed on parts that would not be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .axis import Axes
from .forms import in_form
from .rules import RULES, NotServed, name_of, refuse


def getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_SIZES = "shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_mps is_quantized is_nested is_xla itemsize"
_SIZE_METHODS = "size stride dim ndimension numel nelement element_size is_floating_point is_complex is_signed __len__"
OF_SHAPE = frozenset((
    *map(getter, _SIZES.split()), *(getattr(Tensor, name) for name in _SIZE_METHODS.split()),
    torch.is_floating_point, torch.is_complex, torch.numel, torch.result_type,
))  # fmt: skip
"""Functions whose answer follows from the shape, dtype and device alone: the wrapper's, which are the whole's."""


class SpatialTensor(Tensor):
    """A part of an image (or of features of any resolution), as one value of the whole's shape.

    Made by what runs a model on parts (`scatter` of patchconv_native.distributed, say), or by `from_local`. `shape` and
    the like are the whole's; `to_local()` is this part, `offset` where it begins, `cuts` where the dimensions are cut.
    Arithmetic, activations, convolutions, pools, norms, resizing, concatenation and reductions of torch take it. A
    result that no longer has a cut dimension (of a global pool, or a mean) is a plain tensor, the same for every part.
    Plain tensors in an operation with one count as the same for every part: their gradient is summed over the parts.
    What has no exact rule raises NotServed, a NotImplementedError, which names the function.
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
                    f"part {axis.index}), got {local.size(d)}"
                )
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        self._local = local
        self.axes = dict(axes)
        return self

    @classmethod
    def from_local(cls, local: Tensor, axes: Axes) -> SpatialTensor:
        """This part; axes: as another SpatialTensor has them. ValueError if the part's size does not fit."""
        return cls(local, axes)

    def to_local(self) -> Tensor:
        """This part, with its history."""
        check_history("to_local", self)
        return self._local

    @property
    def cuts(self) -> dict[int, tuple[int, ...]]:
        """For each cut dimension, where: part i has the coordinates cuts[i] to cuts[i + 1]."""
        return {d: axis.cuts for d, axis in self.axes.items()}

    @property
    def offset(self) -> tuple[int, ...]:
        """Of this part in the whole, a number for each dimension."""
        return tuple(self.axes[d].range[0] if d in self.axes else 0 for d in range(self._local.dim()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = ", ".join(f"{a.name}: {a.range[0]} to {a.range[1]} of {a.size}" for a in self.axes.values())
        return f"SpatialTensor(shape={tuple(self.shape)}, {where}, local={self._local!r})"

    def __tensor_flatten__(self) -> Any:
        raise _advised(refuse("torch.compile", "the code would be compiled for one part"), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _advised(refuse("pickle", "what runs the parts cannot be stored"), self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        try:
            result = _served(func, args, kwargs or {})
        except NotServed as error:
            _advised(error, (args, kwargs))
            raise
        if isinstance(result, SpatialTensor) and result._local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                result.requires_grad_()  # written in place, it may need one now
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _advised(refuse(name_of(func), "C++ code called it, past torch's functions"), (args, kwargs))


def _served(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    serve = RULES.get(function)
    if serve is None:
        raise refuse(name_of(function), "it has no rule here")
    args, kwargs = in_form(function, tuple(args), kwargs)
    if kwargs.get("out") is not None:
        raise refuse(name_of(function), "`out` cannot be given")
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, SpatialTensor):
            check_history(name_of(function), value)
    return serve(*args, **kwargs)


def check_history(function: str, x: SpatialTensor) -> None:
    """The history is the local tensor's. If the wrapper has one too, a function was applied past torch's functions."""
    with torch._C.DisableTorchFunctionSubclass():
        node = x.grad_fn
    if node is not None:
        why = f"its input comes from {node.name()}, a torch.autograd.Function, which would lose its gradient"
        raise _advised(refuse(function, why), x)


def _advised(error: NotServed, arguments: Any) -> NotServed:
    """The error, with the advice of what runs the parts that are among the arguments."""
    for value in tree_leaves(arguments):
        if isinstance(value, SpatialTensor) and not error.advice:
            error.advice = next((axis.executor.advice for axis in value.axes.values()), "")
    return error
