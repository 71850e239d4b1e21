"""A step that computes nothing: fake tensors in the place of the model's, and the memory that they would take.

Shapes, dtypes and autograd's graph are those of a real step; a storage counts from its making to its end. What an
operator would take besides its results cannot be seen that way and is estimated (`workspace`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode

from .sizes import storage, tensors
from .workspace import workspace

# Operators whose CPU kernels keep channels_last, and whose fake results are contiguous all the same; the argument whose
# layout it is.
_KEEP_LAYOUT = {torch.ops.aten.native_group_norm.default: 0, torch.ops.aten.native_group_norm_backward.default: 1}


_UNKNOWN = {torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten._cudnn_rnn.default}


def _in_layout_of(given: Tensor, made: Tensor | None) -> Tensor | None:
    if made is None or given.dim() != 4 or not given.is_contiguous(memory_format=torch.channels_last):
        return made
    return torch.empty_like(made, memory_format=torch.channels_last)


class Storages(TorchDispatchMode):
    """Tells a census of every storage that an operator makes, of its end, and of workspaces in between."""

    def __init__(self, census: Any, device: torch.device) -> None:
        from torch.utils.flop_counter import flop_registry  # imports triton: not with this package

        super().__init__()
        self._census, self._device, self._flops = census, device, flop_registry
        self._known: set[int] = set()
        self._blocks = itertools.count(1)
        self.work = {"flops": 0, "bytes": 0}
        self._real: dict[int, Tensor] = {}

    def there_before(self, values: Any) -> None:
        for tensor in tensors(values):
            memory = storage(tensor)
            if memory is not None and memory._cdata not in self._known:
                self._known.add(memory._cdata)
                # Another storage can have its address when it is gone, as a number's that an operator was given.
                weakref.finalize(memory, self._known.discard, memory._cdata).atexit = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNKNOWN:
            raise NotImplementedError(
                f"memory.trace: fake=True does not serve {func}: what recurrent layers keep for backward is not known "
                "without running them"
            )
        self.there_before_if_real(args)
        result = func(*args, **kwargs)
        if func in _KEEP_LAYOUT and self._device.type == "cpu":
            result = (_in_layout_of(args[_KEEP_LAYOUT[func]], result[0]), *result[1:])
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
        """A real tensor that code brings along (a constant of the module's) was there before."""
        for tensor in tensors(values):
            if not isinstance(tensor, FakeTensor):
                self.there_before(tensor)
                if tensor.requires_grad:
                    self._real[id(tensor)] = tensor

    def forget_gradients(self) -> None:
        """Fake gradients of real tensors: a loss's own parameters."""
        for tensor in self._real.values():
            if isinstance(tensor.grad, FakeTensor):
                tensor.grad = None

    def _count(self, tensor: Tensor) -> None:
        if not isinstance(tensor, FakeTensor) or tensor.device.type != self._device.type:
            return
        memory = storage(tensor)
        if memory is None or memory._cdata in self._known:
            return
        key, size, block = memory._cdata, memory.nbytes(), next(self._blocks)
        self._known.add(key)
        if size:
            self._census.memory(block, size)
        weakref.finalize(memory, self._ended, key, block, size).atexit = False

    def _ended(self, key: int, block: int, size: int) -> None:
        self._known.discard(key)
        if size:
            self._census.memory(block, -size)


def fake_device(device: torch.device) -> torch.device:
    """Where fake tensors are said to be: a GPU's backward pass needs a GPU, also where nothing is computed."""
    return device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def faked(model: nn.Module, values: Any, device: torch.device) -> Iterator[tuple[FakeTensorMode, Any]]:
    """Inside the block the model's parameters and buffers are fake, on `device`. Gives the mode and `values` with
    fake tensors in the place of real ones. Afterwards the model is as it was; none of its tensors is touched.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

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
    log = logging.getLogger("torch._subclasses.fake_tensor")  # tells what is raised a second time, with its traceback
    level = log.level
    log.setLevel(logging.CRITICAL)
    # The average of all batches needs their number, which a fake count has not.
    cumulative = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.momentum is None]
    try:
        for module in cumulative:
            module.momentum = 0.1
        with stateless._reparametrize_module(model, state):
            yield mode, given
    finally:
        log.setLevel(level)
        for module in cumulative:
            module.momentum = None
