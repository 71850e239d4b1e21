"""Rules for what is computed at each place alone: attributes, arithmetic, activations, dropout, casts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lean import _Redirect, in_lean
from .operands import aligned, local_of, parameter, wrap
from .rules import name_of, refuse, rule, rules
from .tensor import SpatialTensor, getter

_nn: Any = torch._C._nn


def _fitting(function: Any) -> Any:
    """The function itself, or within `lean()`, as converted layers call it, the one that saves less for backward."""
    return _Redirect.table.get(function, function) if in_lean() else function


def _in_place(names: str) -> str:
    """The names of what writes into its first argument."""
    return " ".join(f"{name}_" for name in names.split())


def _both(names: str) -> list[Any]:
    """torch.xxx and Tensor.xxx, as far as they exist."""
    found = [getattr(place, name, None) for name in names.split() for place in (torch, Tensor)]
    return [f for f in found if f is not None]


# ----------------------------------------------------------------------------------------------------------------------
# Attributes. Those of autograd are the local tensor's.


def _on_local(function: Any) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: function(local_of(x), *args, **kwargs)


rules(_on_local, map(getter, ("requires_grad", "grad_fn", "is_leaf", "_version", "output_nr")))
rules(_on_local, (Tensor.is_contiguous, Tensor.is_inference, Tensor.retain_grad, *_both("is_conj is_neg")))


@rule(getter("grad"))
def _grad(x: SpatialTensor) -> Tensor | None:
    return None if x._local.grad is None else wrap(x._local.grad, x.axes)


@rule(getattr(Tensor, "requires_grad").__set__)  # noqa: B009
def _set_requires_grad(x: SpatialTensor, value: bool) -> None:
    _requires_grad(x, value)


@rule(Tensor.requires_grad_)
def _requires_grad(x: SpatialTensor, value: bool = True) -> SpatialTensor:
    x._local.requires_grad_(value)
    with torch._C.DisableTorchFunctionSubclass():
        x.requires_grad_(value)
    return x


@rule(getter("data"))
def _data(x: SpatialTensor) -> Tensor:
    return wrap(x._local.data, x.axes)


# A whole tensor, the same for every part.
rules(_on_local, (Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor))


@rule(Tensor.__format__)
def _format(x: SpatialTensor, spec: str) -> str:
    return format(repr(x), spec)


@rule(Tensor.__hash__)
def _hash(x: SpatialTensor) -> int:
    return id(x)


@rule(Tensor.backward)
def _backward(x: SpatialTensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    """With a gradient, whole or in parts. Every part must make this call: gradients of halos go to other parts."""
    if gradient is None:
        raise refuse("Tensor.backward", "it needs a gradient, or a number: sum or average it")
    values, _ = aligned("Tensor.backward", (x, gradient))
    values[0].backward(values[1], *args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# Functions of one image, and of numbers. Those whose name ends in _ write into the local tensor.

_UNARY = (
    "abs absolute neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan sinh cosh "
    "tanh asin acos atan sigmoid relu erf erfc erfinv floor ceil round trunc frac sign sgn isnan isinf isfinite "
    "logical_not bitwise_not nan_to_num positive logit deg2rad rad2deg clone detach zeros_like ones_like empty_like "
    "full_like asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh sinc lgamma digamma mvlgamma i0 fix "
    "angle signbit isposinf isneginf isreal conj conj_physical resolve_conj resolve_neg celu selu threshold hardshrink"
)
_LOCAL_METHODS = (
    "double float half bfloat16 bool int long short byte char cpu cuda zero_ __neg__ __abs__ __invert__ __pos__"
)
_SPECIAL = (
    "expit erf erfc erfcx erfinv exp2 expm1 log1p logit ndtr ndtri log_ndtr entr sinc digamma psi gammaln i0 i0e i1 "
    "i1e round multigammaln"
)
_LOCAL_FUNCTIONS = (
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.silu, F.mish, F.hardswish, F.hardsigmoid,
    F.hardtanh, F.softplus, F.softsign, F.tanhshrink, F.hardshrink, F.softshrink, F.logsigmoid, F.threshold,
    F.sigmoid, F.tanh, _nn.gelu, _nn.softplus, _nn.log_sigmoid, _nn.softshrink, F.leaky_relu_, F.elu_, F.hardtanh_,
)  # fmt: skip


BY_PLACE: set[Any] = set()
"""Functions of one image that are computed of a part as they are of the whole."""


def _unary(function: Any) -> Callable[..., Any]:
    in_place_name = name_of(function)
    in_place_name = in_place_name if in_place_name.endswith("_") and not in_place_name.startswith("__") else ""

    def serve(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, SpatialTensor) or any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            raise refuse(name_of(function), "it takes one SpatialTensor, and numbers besides")
        local = _fitting(function)(x._local, *args, **kwargs)
        return x if in_place_name or local is x._local else wrap(local, x.axes)

    BY_PLACE.add(function)
    return serve


rules(_unary, _both(_UNARY) + _both(_in_place(_UNARY)))
rules(_unary, (getattr(Tensor, name) for name in _LOCAL_METHODS.split() if hasattr(Tensor, name)))
rules(_unary, _LOCAL_FUNCTIONS)
rules(_unary, (getter("real"), getter("imag"), torch.real, torch.imag, torch.fake_quantize_per_tensor_affine))
rules(_unary, (getattr(torch.special, name) for name in _SPECIAL.split()))


def _cast(function: Any) -> Callable[..., Any]:
    def serve(x: Any, *args: Any, **kwargs: Any) -> Any:
        local = function(local_of(x), *(local_of(a) for a in args), **{k: local_of(v) for k, v in kwargs.items()})
        return wrap(local, x.axes) if isinstance(x, SpatialTensor) and isinstance(local, Tensor) else local

    return serve


rules(_cast, (Tensor.to, Tensor.type, Tensor.type_as, Tensor.contiguous))

# ----------------------------------------------------------------------------------------------------------------------
# Functions of several tensors, place by place.

_CLAMPS = "clamp clip clamp_min clamp_max"
_BINARY = (
    f"{_CLAMPS} "
    "add sub subtract mul multiply div divide true_divide floor_divide pow maximum minimum fmax fmin atan2 hypot eq ne "
    "lt le gt ge greater less greater_equal less_equal not_equal logical_and logical_or logical_xor remainder fmod "
    "lerp addcmul addcdiv where masked_fill xlogy rsub heaviside copysign logaddexp float_power bitwise_and "
    "bitwise_or isclose bitwise_xor bitwise_left_shift bitwise_right_shift arctan2 logaddexp2 ldexp nextafter complex "
    "polar gcd lcm igamma igammac polygamma"
)
_OF_TWO = ("xlogy", "xlog1py", "zeta", "gammainc", "gammaincc")
"""Of torch.special."""
_DUNDER = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __eq__ __ne__ __lt__ "
    "__le__ __gt__ __ge__ __and__ __or__ __mod__ __floordiv__ __div__ __rdiv__ __xor__ __rand__ __ror__ __rxor__ "
    "__lshift__ __rshift__ __rlshift__ __rrshift__ __rfloordiv__ __rmod__"
)
_IN_PLACE = (
    "copy_ fill_ __iadd__ __isub__ __imul__ __itruediv__ __iand__ __ior__ __ixor__ __imod__ __ifloordiv__ __ipow__ "
    "__ilshift__ __irshift__"
)


def _elementwise(function: Any, in_place: bool = False) -> Callable[..., Any]:
    def serve(*args: Any, **kwargs: Any) -> Any:
        names = list(kwargs)
        values = [*args, *kwargs.values()]
        locals_, axes = aligned(name_of(function), values)
        if in_place and not isinstance(args[0], SpatialTensor):
            raise refuse(name_of(function), "it would write a part into a plain tensor")
        given = locals_[: len(args)]
        local = _fitting(function)(*given, **dict(zip(names, locals_[len(args) :], strict=True)))
        if in_place:
            return args[0]
        return wrap(local, axes)

    return serve


def _methods(names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name)]


rules(_elementwise, [*_both(_BINARY), *_methods(_DUNDER), *(getattr(torch.special, name) for name in _OF_TWO)])
rules(functools.partial(_elementwise, in_place=True), [*_both(_in_place(_BINARY)), *_methods(_IN_PLACE)])
BY_PLACE.update((*_both(_CLAMPS), *_both(_in_place(_CLAMPS)), Tensor.fill_))


@rule(F.rrelu, torch.rrelu)
def _rrelu(x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Tensor:
    if training or not isinstance(x, SpatialTensor):
        raise refuse("rrelu", "in training, it draws random numbers")
    local = F.rrelu(x._local, lower, upper, False, inplace)
    return x if inplace else wrap(local, x.axes)


@rule(torch.rrelu_)
def _rrelu_(x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
    return _rrelu(x, lower, upper, training, True)


@rule(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(x: SpatialTensor, weight: Tensor) -> Tensor:
    return wrap(F.prelu(local_of(x), parameter(weight, x)), x.axes)


@rule(F.linear, _nn.linear)
def _linear(x: SpatialTensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.dim() - 1 in x.axes:
        raise refuse("linear", "its last dimension is cut")
    return wrap(F.linear(x._local, parameter(weight, x), parameter(bias, x)), x.axes)


@rule(F.local_response_norm)
def _local_response_norm(x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(x, SpatialTensor) and 1 not in x.axes:
        return wrap(F.local_response_norm(x._local, *args, **kwargs), x.axes)
    raise refuse("local_response_norm", "it takes a SpatialTensor that is not cut along its channels")


@rule(_nn.one_hot)
def _one_hot(x: SpatialTensor, num_classes: int = -1) -> Tensor:
    if num_classes < 1:
        raise refuse("one_hot", "the number of classes depends on the values of pixels")
    return wrap(F.one_hot(x._local, num_classes), x.axes)


@rule(F.embedding)
def _embedding(
    input: Any, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    if not isinstance(input, SpatialTensor) or isinstance(weight, SpatialTensor):
        raise refuse("embedding", "its weight is cut")
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise refuse("embedding", "with max_norm, scale_grad_by_freq or sparse")
    return wrap(F.embedding(input._local, parameter(weight, input), padding_idx), input.axes)
