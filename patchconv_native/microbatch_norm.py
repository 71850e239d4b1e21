"""Batch norm of micro-batches: its statistics, and the sums that its gradient needs, combined from those of chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from .lean import ForwardInLean
from .wrap import parts

_ops = torch.ops.patchconv
HALF = (torch.float16, torch.bfloat16)
_AT_ONCE = 2**17  # elements that are held in higher precision at a time (one sample, if it is larger)


@dataclass
class Call:
    """One call of a batch norm in training: its statistics, and in backward the sums of its gradient."""

    module: _BatchNorm
    count: int = 0
    mean: Any = 0.0  # in float64 until all chunks are in
    squares: Any = 0.0  # the sum of squared deviations from the mean
    var: Any = None
    # Over all values of a channel: gradient times normalized input, and gradient.
    sums: list[Tensor] = field(default_factory=list)

    def add(self, input: Tensor) -> None:
        """Adds a chunk to the statistics (Chan, Golub and LeVeque, 1979)."""
        mean, var = _ops._batch_statistics(input, None, None, 0.0)
        count = input.numel() // max(1, input.shape[1])
        total = self.count + count
        if total:
            delta = mean.double() - self.mean
            self.mean = self.mean + delta * (count / total)
            self.squares = self.squares + var.double() * count + delta.square_() * (self.count * count / total)
            self.count = total
            self.dtype = mean.dtype

    def finish(self) -> None:
        if self.count <= 1:
            raise ValueError(
                f"microbatch: expected more than 1 value per channel when training, got {self.count} at a "
                f"{type(self.module).__name__}"
            )
        self.mean, self.var = self.mean.to(self.dtype), (self.squares / self.count).to(self.dtype)
        self.squares = None

    def update_running_statistics(self) -> None:
        """As one call with the whole batch does."""
        module = self.module
        if not (module.training and module.track_running_stats):
            return
        momentum = module.momentum or 0.0
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:
                momentum = 1.0 / float(module.num_batches_tracked)
        unbiased = self.var * (self.count / (self.count - 1))
        for running, now in ((module.running_mean, self.mean), (module.running_var, unbiased)):
            if running is not None:
                running.copy_(running.to(now.dtype) * (1 - momentum) + now * momentum)


def _affine(grad: Tensor, input: Tensor, of_grad: Tensor, of_input: Tensor, shift: Tensor, mean: Tensor) -> Tensor:
    """of_grad * grad + of_input * (input - mean) + shift, the factors one a channel, a few samples at a time.

    It is rounded once: the sum of the result over a channel is zero, and an error that all its elements share would
    add up there.
    """
    exact = torch.float32 if input.dtype in HALF else torch.float64
    if input.dtype == torch.float32 and input.is_cuda:
        exact = torch.float32  # most GPUs are slow in float64
    shape = (-1, *[1] * (input.dim() - 2))
    shift = shift - of_input * mean
    a, b, c = (t.to(exact).view(shape) for t in (of_grad, of_input, shift))
    result = torch.empty_like(input)
    step = max(1, _AT_ONCE // max(1, input[:1].numel()))
    for i in range(0, len(input), step):
        part = slice(i, i + step)
        made = torch.addcmul(c, input[part].to(a.dtype), b)
        result[part].copy_(made.addcmul_(grad[part].to(a.dtype), a))
    return result


class Norm(torch.autograd.Function):
    """A batch norm of a chunk with the statistics of the whole batch.

    With an `anchor`, backward adds the chunk's sums to the call's and stops: autograd comes here because the anchor
    needs a gradient. Without one the sums are known, and backward computes the gradients. parameters: whether this
    chunk is the one that gives those of weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, anchor: Any, call: Call, parameters: bool
    ) -> Tensor:  # fmt: skip
        ctx.call, ctx.summing, ctx.parameters, ctx.bias = call, anchor is not None, parameters, bias is not None
        ctx.save_for_backward(input, weight)
        scale, shift = (None if t is None else t.to(call.mean.dtype) for t in (weight, bias))
        return _ops._normalize(input, scale, shift, call.mean, call.var, 0, call.module.eps, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        call: Call = ctx.call
        mean, var, eps = call.mean, call.var, call.module.eps
        scale = None if weight is None else weight.to(mean.dtype)
        nothing = (None, None, None)
        if ctx.summing:
            found = _ops._norm_backward(grad, input, scale, None, mean, var, 0, eps, 0, False, [False, True, True])
            call.sums = [a + b for a, b in zip(call.sums, (t.double() for t in found[1:]), strict=True)]
            return None, None, None, *nothing
        products, ones = call.sums
        grad_input = None
        if ctx.needs_input_grad[0]:
            factor = (var.double() + eps).rsqrt_()
            of_input = products / call.count * factor  # of the normalized input, and so of the input
            factor = factor if weight is None else factor * weight
            grad_input = _affine(grad, input, factor, -factor * of_input, -factor * (ones / call.count), mean)
        # The sums are of the whole batch, so one chunk gives them.
        affine = ctx.parameters and weight is not None
        grad_weight = products.to(weight.dtype) if affine and ctx.needs_input_grad[1] else None
        grad_bias = ones.to(weight.dtype) if affine and ctx.bias and ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, *nothing


_RELU = (_ops.batch_norm_relu, _ops.batch_norm_relu.default)
_NORMS = (F.batch_norm, torch.batch_norm, torch.native_batch_norm, _ops.batch_norm, _ops.batch_norm.default, *_RELU)


def _in_training(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return func in _NORMS and bool(args[5] if len(args) > 5 else kwargs.get("training", False))


class Watch(TorchFunctionMode):
    """Refuses batch norms in training that are not layers: their statistics would be of one chunk alone. Not those of
    what follows from parameters and buffers, as weights do that are standardized.

    state: parameters and buffers.
    """

    def __init__(self, state: Iterable[Tensor]) -> None:
        super().__init__()
        self._of_state = WeakIdKeyDictionary(dict.fromkeys(state, True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        of_state = isinstance(first, Tensor) and first in self._of_state
        if not of_state and _in_training(func, args, kwargs):
            raise TypeError(
                "microbatch: expected module to have its batch norms in training mode as torch.nn.BatchNorm layers, "
                f"got a call of {getattr(func, '__name__', func)} with training=True"
            )
        result = func(*args, **kwargs)
        if of_state and all(one in self._of_state for one in _tensors((args, kwargs))):
            self._of_state.update(dict.fromkeys(_tensors(result), True))
        elif of_state and result is first:  # something else was written into it
            del self._of_state[first]
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Inside(TorchFunctionMode):
    """Has `instead` compute the batch norm that a layer's own forward calls (timm's BatchNormAct2d does)."""

    def __init__(self, norm: _BatchNorm, instead: Callable[[_BatchNorm, Tensor], Tensor]) -> None:
        super().__init__()
        self._norm, self._instead = norm, instead
        self._own = norm.running_mean if norm.running_mean is not None else norm.weight

    def __enter__(self) -> Inside:
        """A forward may count its calls: it counts those of a copy."""
        self._count = self._norm.num_batches_tracked
        self._norm._buffers["num_batches_tracked"] = None if self._count is None else self._count.clone()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._norm._buffers["num_batches_tracked"] = self._count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        norm, given = self._norm, [*args, *kwargs.values()]
        if not (_in_training(func, args, kwargs) and any(one is self._own for one in given)):
            return func(*args, **kwargs)
        affine = [norm.weight, norm.bias] if norm.affine else []
        eps = args[7] if len(args) > 7 else kwargs.get("eps", 1e-5)
        if eps != norm.eps or not all(any(one is own for one in given) for own in affine):
            raise TypeError(
                f"microbatch: expected the forward of {type(norm).__name__} to call batch norm with the layer's own "
                "weight, bias and eps, got others"
            )
        y = self._instead(norm, args[0] if args else kwargs["input"])
        return F.relu(y) if func in _RELU else y


def _forward_of(module: nn.Module) -> Any:
    """The forward of the module's class, without this package's layers and kinds (wrap.py)."""
    for cls in parts(type(module))[0].__mro__:
        if "forward" in vars(cls) and cls is not ForwardInLean:
            return vars(cls)["forward"]
    return None


def norms_in_training(module: nn.Module) -> list[_BatchNorm]:
    """The batch norms of `module` that use the statistics of their input. TypeError for norms that are not served."""
    found: list[_BatchNorm] = []
    for name, one in module.named_modules():
        where = f"microbatch: module, at {name!r}" if name else "microbatch: module"
        if isinstance(one, _InstanceNorm) and one.training and one.track_running_stats:
            raise TypeError(f"{where}: {type(one).__name__} with track_running_stats=True is not served in training")
        if not isinstance(one, _BatchNorm):
            continue
        if not one.training and (one.running_mean is not None or one.running_var is not None):
            continue
        if isinstance(one, nn.SyncBatchNorm):
            raise TypeError(f"{where}: SyncBatchNorm is not served in training")
        if "forward" not in vars(one):  # else, if that calls batch norm in training, `Watch` refuses
            found.append(one)
    return found


def forward_of(norm: _BatchNorm, instead: Callable[[_BatchNorm, Tensor], Tensor]) -> Callable[..., Any]:
    """The forward of a layer in training, with `instead` in place of the batch norm."""
    if _forward_of(norm) is _BatchNorm.forward:
        return functools.partial(instead, norm)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with Inside(norm, instead):
            return type(norm).forward(norm, *args, **kwargs)

    return forward
