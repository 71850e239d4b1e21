"""Runs a step on fake tensors, which compute nothing, and counts the memory that real ones would take.

Shapes, dtypes and autograd's graph are those of a real step. A storage counts from its creation until it is freed. The
memory that an operator takes besides its results is not visible this way; workspace.py estimates it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from . import recipes
from .sizes import storage, tensors
from .workspace import workspace

# Operators whose CPU kernels keep channels_last, although their fake results are contiguous, and the argument whose
# layout they keep.
_KEEP_LAYOUT = {torch.ops.aten.native_group_norm.default: 0, torch.ops.aten.native_group_norm_backward.default: 1}

# Operators whose CPU kernels make a result as large as their argument, and give it another size then.
_RESIZED = {torch.ops.aten.im2col.default, torch.ops.aten.col2im.default}

_DEVICE = torch.ops.prim.device.default

_BATCH_NORM = torch.ops.aten.native_batch_norm.default

_REAL = Tensor, nn.Parameter

_ARANGE = {getattr(torch.ops.aten.arange, name) for name in ("default", "start", "start_step")}
_MOST_NUMBERS = 1024
"""Of a range that code may read, as in `torch.arange(1, classes).tolist()`."""

# Operators that are calls of others. In inference mode a dispatch mode sees them whole.
_COMPOSED = {
    getattr(torch.ops.patchconv, name).default
    for name in ("conv2d_fused", *(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)))
}

# Operators that save for backward what only a real run can tell.
_UNKNOWN = {torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten._cudnn_rnn.default}


# Operators that keep odd strides along dimensions of size one where their other operand is a number.
_ARITHMETIC = {getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div")}


def _strides(func: Any, args: tuple[Any, ...], result: Tensor) -> tuple[int, ...]:
    """Strides of a real result, which may be others than the fake one's along dimensions of size one."""
    if func is torch.ops.aten.view.default:
        return torch.empty_strided(args[0].shape, args[0].stride(), device="meta").view(args[1]).stride()
    if func in _ARITHMETIC and isinstance(args[0], Tensor) and not isinstance(args[1], Tensor):
        pairs = zip(result.stride(), args[0].stride(), result.shape, strict=True)
        if all(a == b or size == 1 for a, b, size in pairs):
            return args[0].stride()
    return result.stride()


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _device_of(fake: FakeTensor) -> torch.device:
    return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device


class FakeMode(FakeTensorMode):
    """Fake tensors in the layouts that the operators give real ones. Autocast keeps no casts of parameters meanwhile:
    they would be fakes, and what runs later under the same autocast would compute nothing.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False
        self._keeps_casts: list[bool] = []
        self._of_real = WeakIdKeyDictionary()

    def __enter__(self) -> FakeMode:
        self._keeps_casts.append(torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_autocast_cache_enabled(self._keeps_casts.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return _device_of(args[0])
        if func in _ARANGE:
            return self._range(func, types, args, kwargs)
        args = [self._fake_for(one) if type(one) in _REAL else one for one in args]
        key = recipes.key_of(func, args, kwargs or {})
        if key is None:
            return self._computed(func, types, args, kwargs)
        try:
            recipe = recipes.known(key)
        except KeyError:
            result = self._computed(func, types, args, kwargs)
            recipes.learn(key, func, args, result)
            return result
        return self._computed(func, types, args, kwargs) if recipe is None else recipes.made(self, recipe, args)

    def _fake_for(self, real: Tensor) -> Tensor:
        """The fake of a real tensor, such as a weight, made once. torch makes one a call, and computes with numbers."""
        odd = real.layout != torch.strided or real.is_quantized or real.is_meta or real.storage_offset() != 0
        if odd or real.numel() < 2:
            return real
        made = self._of_real.get(real)
        if made is None or _metadata(made) != _metadata(real) or made.fake_device != real.device:
            plain = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
            made = self._of_real[real] = FakeTensor(self, plain, real.device)
        return made

    def _range(self, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        """With numbers, where it is small: they follow from no tensor."""
        made = self._computed(func, types, args, kwargs)
        if made.numel() > _MOST_NUMBERS or made.fake_device.type != "cpu":
            return made
        with torch.utils._python_dispatch._disable_current_modes():
            numbers = func(*args, **{**(kwargs or {}), "device": "cpu"})
        plain = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="meta")
        return FakeTensor(self, plain, made.fake_device, constant=numbers)

    def _computed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is _BATCH_NORM and not args[5] and args[0].device.type == "cpu":
            with self:  # torch would take it apart, which takes ten times longer
                made = torch.empty_like(args[0], memory_format=suggest_memory_format(args[0]))
                return made, args[0].new_empty(0), args[0].new_empty(0)
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _RESIZED and args[0].numel() > result.numel() and args[0].device.type == "cpu":
            with self:
                return args[0].new_empty(args[0].numel()).as_strided(result.shape, result.stride())
        if isinstance(result, Tensor):
            strides = _strides(func, args, result)
            return result if result.stride() == strides else result.as_strided(result.shape, strides)
        given = args[_KEEP_LAYOUT[func]] if func in _KEEP_LAYOUT else None
        if given is None or given.device.type != "cpu" or result[0] is None:
            return result
        return torch.empty_like(result[0], memory_format=suggest_memory_format(given)), *result[1:]


def references(values: Any) -> dict[int, weakref.ref[Any]]:
    """The storages of these tensors, by their addresses."""
    found = (storage(tensor) for tensor in tensors(values))
    return {memory._cdata: weakref.ref(memory) for memory in found if memory is not None}


class Storages(TorchDispatchMode):
    """Reports to a census every storage that an operator makes, when it is freed, and the operators' workspaces.

    casts: real tensors, by their ids, with dtypes. Their casts to these count as there before. there: `references` to
    what was there before.
    """

    looks_at_nothing = True
    """It keeps no tensors (reuse/spent.py)."""

    def __init__(
        self,
        census: Any,
        device: torch.device,
        casts: Container[tuple[int, torch.dtype]] = (),
        there: Mapping[int, weakref.ref[Any]] = MappingProxyType({}),
    ) -> None:
        from torch.utils.flop_counter import flop_registry  # imports triton: not with this package

        super().__init__()
        self._census, self._device, self._flops = census, device, flop_registry
        self._casts = casts
        # By their addresses: once one is freed, another may get its address and must count.
        self._known = dict(there)
        self._blocks = itertools.count(1)
        self.work = {"flops": 0, "bytes": 0}
        self._real: dict[int, Tensor] = {}

    def there_before(self, values: Any) -> None:
        """These tensors were there before the step and are not counted."""
        self._known.update(references(values))

    def _knows(self, memory: Any) -> bool:
        found = self._known.get(memory._cdata)
        return found is not None and found() is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # of all that is asked here, most is this
            return _device_of(args[0])
        kwargs = kwargs or {}
        if func in _COMPOSED:
            with self:
                return func.decompose(*args, **kwargs)
        if func in _UNKNOWN:
            raise NotImplementedError(
                f"memory.trace: fake=True does not serve {func}: what recurrent layers save for backward is not known "
                "without running them"
            )
        self.there_before_if_real(args)
        result = func(*args, **kwargs)
        if func.is_view and not any(isinstance(tensor, FakeTensor) for tensor in tensors(args)):
            self.there_before(result)  # of a real tensor, such as a weight
        if func is torch.ops.aten._to_copy.default and (id(args[0]), result.dtype) in self._casts:
            self.there_before(result)
        for tensor in tensors(result):
            self._count(tensor)
        self._add_work(func, args, kwargs, result)
        extra = workspace(func, args, kwargs, result, self._device.type)
        if extra:
            block = next(self._blocks)
            self._census.memory(block, extra)
            self._census.memory(block, -extra)
        return result

    def _add_work(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.is_view:
            return
        flops = self._flops.get(func._overloadpacket)
        if flops is not None:
            self.work["flops"] += flops(*args, **kwargs, out_val=result)
        self.work["bytes"] += sum(t.nbytes for t in (*tensors(args), *tensors(result)) if t.layout == torch.strided)

    def there_before_if_real(self, values: Any) -> None:
        """Real tensors among the arguments, such as a constant in the module's code, were there before."""
        for tensor in tensors(values):
            if not isinstance(tensor, FakeTensor):
                self.there_before(tensor)
                if tensor.requires_grad:
                    self._real[id(tensor)] = tensor

    def forget_gradients(self) -> None:
        """Removes fake gradients from real tensors, such as the parameters of a loss."""
        for tensor in self._real.values():
            if isinstance(tensor.grad, FakeTensor):
                tensor.grad = None

    def _count(self, tensor: Tensor) -> None:
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != self._device.type:
            return
        memory = storage(tensor)
        if memory is None or self._knows(memory):
            return
        size, block = memory.nbytes(), next(self._blocks)
        self._known[memory._cdata] = weakref.ref(memory)
        if size:
            self._census.memory(block, size)
            weakref.finalize(memory, self._census.memory, block, -size).atexit = False


def fake_device(device: torch.device) -> torch.device:
    """The device of the fake tensors. Without a GPU it is the CPU: even a fake backward pass on CUDA needs a GPU."""
    return device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Silences torch's log of errors on fake tensors, which it also raises."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def faked(model: nn.Module, values: Any, device: torch.device) -> Iterator[tuple[FakeMode, Any]]:
    """Replaces the model's parameters and buffers by fake ones on `device` for the block.

    Yields the mode and `values` with fake tensors in place of real ones. The real tensors are not touched.
    """
    mode = FakeMode()

    def fake(tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        else:
            made = mode.from_tensor(tensor)
            if made.device.type != device.type:
                with mode, torch.no_grad():
                    made = made.to(device)
        made = made.detach().requires_grad_(tensor.requires_grad)
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    made: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = fake(tensor)
        return made[id(tensor)]

    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    state = {name: once(tensor) for name, tensor in named}
    given = torch.utils._pytree.tree_map_only(Tensor, once, values)
    # A cumulative average divides by the number of batches, which is unknown in a fake tensor.
    cumulative = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.momentum is None]
    try:
        for module in cumulative:
            module.momentum = 0.1
        with unlogged(), stateless._reparametrize_module(model, state):
            yield mode, given
    finally:
        for module in cumulative:
            module.momentum = None
