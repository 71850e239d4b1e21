"""Traces one step of a model: what every module allocates and saves, and where the peak is.

A census in the library (csrc/memory) records every allocation on the CPU or a GPU with the operator that asked for it,
workspaces included. Hooks record when modules begin and end. Nothing is added to autograd's graph: in backward a node
belongs to the module that made it. With fake tensors nothing is computed or allocated; storages are counted instead
(fake.py).
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules import module as hooks
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .. import _library
from ..reuse.spent import looks_at_nothing
from . import fake as fakes
from .labels import OUTSIDE
from .records import ModuleFacts, Trace
from .report import MemoryReport
from .restore import attributes_as_they_were, values_as_they_were
from .sizes import storage, storages, tensors, total
from .timeline import STEP, operator_name, timeline

_C = _library.load()

Loss = Callable[[Any], Tensor]
OptimizerLike = torch.optim.Optimizer | Callable[[list[Tensor]], torch.optim.Optimizer]


class _Sum(torch.autograd.Function):
    """A sum whose gradient is a full tensor, like that of a real loss. `Tensor.sum` expands a single number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.size, ctx.stride, ctx.dtype = tensor.shape, tensor.stride(), tensor.dtype
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        made = torch.empty_strided(ctx.size, ctx.stride, dtype=ctx.dtype, device=grad.device)
        return made.copy_(grad.expand(ctx.size))


def sum_of(output: Any) -> Tensor:
    """The default loss: the sum of all outputs that require a gradient. ValueError if none does."""
    parts = [_Sum.apply(t) for t in tensors(output) if t.requires_grad]
    if not parts:
        raise ValueError("memory.trace: expected an output that requires a gradient, or train=False; got none")
    return parts[0] if len(parts) == 1 else torch.stack([part.float() for part in parts]).sum()


def device_of(model: nn.Module, inputs: Any) -> torch.device:
    """The device of the model, or else of its inputs. The CPU if all are meta tensors."""
    every = (*model.parameters(), *model.buffers(), *tensors(inputs))
    return next((t.device for t in every if t.device.type != "meta"), torch.device("cpu"))


class _Saved:
    """Saved-tensor hooks that record what autograd saves, for which module. Hooks set outside stay in effect."""

    def __init__(self, census: Any, running: Callable[[], tuple[int, ...]]) -> None:
        self._census, self._running = census, running
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._holders: list[tuple[weakref.ref[_Holder], tuple[int, ...], str]] = []

    def pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder(self._outer[0](tensor) if self._outer else tensor.detach(), tensor._version)
        self._holders.append((weakref.ref(holder), self._running(), operator_name(self._census.operator_name())))
        return holder

    def unpack(self, holder: _Holder) -> Tensor:
        if self._outer:
            return self._outer[1](holder.value)
        if holder.value._version != holder.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(holder.value.shape)} is at version {holder.value._version}; expected version "
                f"{holder.version}"
            )
        return holder.value

    def count(self, without: set[int]) -> list[tuple[tuple[int, ...], str, int]]:
        """For every storage that is saved now: the modules that were running, the operator, and its bytes."""
        seen, rows = set(without), []
        for reference, module, operator in self._holders:
            holder = reference()
            if holder is None or not isinstance(holder.value, Tensor) or (memory := storage(holder.value)) is None:
                continue
            if memory._cdata not in seen:
                seen.add(memory._cdata)
                rows.append((module, operator, memory.nbytes()))
        return rows


class _Holder:
    """Stands for a saved tensor in a node. The tensor lives as long as this object."""

    __slots__ = ("__weakref__", "value", "version")

    def __init__(self, value: Any, version: int) -> None:
        self.value, self.version = value, version


class _Marks:
    """Tells the census which module runs. Its hooks are global, so that the model's own stay as they are."""

    def __init__(self, census: Any, modules: dict[nn.Module, int]) -> None:
        self._census, self._modules = census, modules
        self._thread = threading.get_ident()
        self.open: list[int] = []
        self.in_backward = False

    def running(self) -> tuple[int, ...]:
        """The modules that are running, outermost first."""
        return tuple(self.open)

    def __enter__(self) -> _Marks:
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        self._handles = before, after
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _number_of(self, module: nn.Module) -> int | None:
        # On a GPU the backward pass, with what checkpoints recompute in it, runs on a thread of autograd. Ours waits.
        ours = self.in_backward or threading.get_ident() == self._thread
        return self._modules.get(module) if ours else None

    @looks_at_nothing
    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if (number := self._number_of(module)) is not None:
            self.open.append(number)
            self._census.enter(number)

    @looks_at_nothing
    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if (number := self._number_of(module)) is not None and number in self.open:
            while self.open.pop() != number:
                pass
            self._census.leave(number)


def trace(
    model: nn.Module,
    *inputs: Any,
    kwargs: dict[str, Any] | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    amp: torch.dtype | None = None,
    device: torch.device | str | None = None,
    fake: bool = False,
    train: bool = True,
    snapshot: str | Path | None = None,
) -> MemoryReport:
    """Runs one step of `model(*inputs, **kwargs)` and reports where its memory goes.

    A step is the forward pass, `loss(output)` (by default the sum of the outputs), its backward pass and, if an
    optimizer is given (one over the model's parameters, or a function that makes one of them), its step. train=False:
    only the forward pass, without gradients. amp: the dtype of autocast. The model's train or eval mode is not changed.
    Afterwards the model, its inputs, gradients, the optimizer and random states (torch's, Python's, NumPy's) are
    restored; what other objects did in the step is not undone.

    fake: computes nothing and takes no memory, at any size. Inputs may then be tensors made under a FakeTensorMode or
    on the meta device. device: the device whose memory is counted, by default the model's; with fake it may be another.
    Without a GPU, a fake step on cuda counts the operators that the CPU would run, with the GPU's workspaces.

    Only the memory from torch's allocators is counted, not what libraries allocate themselves (cuBLAS, the CUDA
    context). An error in the step is raised unchanged, with the report up to there as `error.memory_report`. A fake
    step of code that depends on values (nonzero, boolean masks, `.item()`) raises RuntimeError.
    snapshot: on CUDA, the file for torch's own snapshot of the allocator (torch.cuda.memory). Raises TypeError and
    ValueError for bad arguments, RuntimeError inside torch.profiler.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory.trace: expected model to be a torch.nn.Module, got {type(model).__name__}")
    if amp is not None and not isinstance(amp, torch.dtype):
        raise TypeError(f"memory.trace: expected amp to be a dtype such as torch.bfloat16, got {amp!r}")
    own = device_of(model, inputs)
    where = own if device is None else torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"memory.trace: expected device to be a CPU or a CUDA device, got {where}")
    if not fake and where.type != own.type:
        raise ValueError(f"memory.trace: expected device to be the model's, {own.type}, or fake=True, got {where.type}")
    if not fake and any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers(), *tensors(inputs))):
        raise ValueError("memory.trace: expected fake=True with tensors on the meta device, which hold nothing")
    if snapshot is not None and (fake or where.type != "cuda"):
        raise ValueError("memory.trace: expected snapshot only for a real step on CUDA, got one for another")
    if any(
        isinstance(t, (UninitializedParameter, UninitializedBuffer)) for t in (*model.parameters(), *model.buffers())
    ):
        raise ValueError("memory.trace: expected a model whose parameters are made: run its lazy modules once")
    if fake and isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            "memory.trace: expected optimizer to be a function of the parameters with fake=True, got "
            f"{type(optimizer).__name__}, which has the real ones"
        )
    step = _Step(model, inputs, kwargs or {}, loss or sum_of, optimizer, amp, where, fake, train)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_allocator_history(snapshot))
        stack.enter_context(attributes_as_they_were(model))
        if not fake:
            step.aside = stack.enter_context(values_as_they_were(model, optimizer, (inputs, kwargs or {}), where))
            return step.run(model, (inputs, kwargs or {}))
        mode, given = stack.enter_context(fakes.faked(model, (inputs, kwargs or {}), fakes.fake_device(where)))
        with mode:
            try:
                return step.run(model, given)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                refused = RuntimeError(
                    f"memory.trace: a fake step has no values, and {error.func} needs them: the model's code depends "
                    "on values; trace a real step"
                )
                refused.memory_report = getattr(error, "memory_report", None)  # type: ignore[attr-defined]
                raise refused from error


class _Step:
    """One traced run."""

    def __init__(
        self, model: nn.Module, inputs: Sequence[Any], kwargs: dict[str, Any], loss: Loss,
        optimizer: OptimizerLike | None, amp: torch.dtype | None, device: torch.device, fake: bool, train: bool,
    ) -> None:  # fmt: skip
        self.loss, self.optimizer, self.amp = loss, optimizer, amp
        self.device, self.fake, self.train = device, fake, train
        self.at = fakes.fake_device(device) if fake else device
        self.names = [name for name, _ in model.named_modules()]
        self.modules = {module: i for i, (_, module) in enumerate(model.named_modules())}
        self.saved: list[tuple[tuple[int, ...], str, int]] = []
        self.made: torch.optim.Optimizer | None = None
        self.aside = 0
        self.counted_work: dict[str, int] = {}

    def run(self, model: nn.Module, given: Any) -> MemoryReport:
        inputs, kwargs = given
        for parameter in model.parameters():
            if self.fake:
                parameter.grad = None
        static = self.sizes(model, inputs, kwargs)
        own = set(storages([*model.parameters(), *model.buffers()]))
        if not self.fake:
            gc.collect()  # so that garbage from before is not freed during the step
        if self.device.type == "cuda" and not self.fake:
            now = torch.cuda.memory_allocated(self.device) - self.aside
            static["other"] = max(0, now - sum(static.values()))
        census = _C.Census(str(self.at), self.fake)
        error: BaseException | None = None
        try:
            self.work(model, inputs, kwargs, census, own)
        except BaseException as raised:
            error = raised
            raise
        finally:
            census.stop()
            if error is not None:
                with contextlib.suppress(Exception):  # an error here must not hide the step's
                    error.memory_report = self.report(model, inputs, kwargs, census.events(), static, error)  # type: ignore[attr-defined]
        return self.report(model, inputs, kwargs, census.events(), static, None)

    def work(self, model: nn.Module, inputs: Any, kwargs: Any, census: Any, own: set[int]) -> None:
        with contextlib.ExitStack() as stack:
            marks = stack.enter_context(_Marks(census, self.modules))
            saved = _Saved(census, marks.running)
            if self.fake:
                counted = fakes.Storages(census, self.at)
                self.counted_work = counted.work
                stack.callback(counted.forget_gradients)
                counted.there_before([list(model.parameters()), list(model.buffers()), inputs, kwargs])
                stack.enter_context(counted)
            amp = torch.autocast(self.at.type, dtype=self.amp) if self.amp is not None else contextlib.nullcontext()
            with self.phase(census, "forward"), torch.set_grad_enabled(self.train):
                with amp, torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                    output = model(*inputs, **kwargs)
                    if not self.train:
                        return
                    value = self.loss(output)
                del output
                self.saved = saved.count(own)
            with self.phase(census, "backward"):
                marks.in_backward = True
                value.backward()
                marks.in_backward = False
                del value
            if self.optimizer is not None:
                with self.phase(census, "optimizer"):
                    if isinstance(self.optimizer, torch.optim.Optimizer):
                        self.made = self.optimizer
                    else:
                        self.made = self.optimizer([p for p in model.parameters() if p.requires_grad])
                    self.made.step()

    @staticmethod
    @contextlib.contextmanager
    def phase(census: Any, name: str) -> Iterator[None]:
        census.enter(STEP[name])
        try:
            yield
        finally:
            census.leave(STEP[name])

    def sizes(self, model: nn.Module, inputs: Any, kwargs: Any) -> dict[str, int]:
        """Bytes on the device by kind. A storage counts for the first kind that has it."""
        known: set[int] = set()
        parameters = list(model.parameters())
        made = self.made or (self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else None)
        kinds: dict[str, Any] = {
            "parameters": parameters,
            "buffers": list(model.buffers()),
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [] if made is None else [dict(made.state[p]) for p in parameters if p in made.state],
            "inputs": [inputs, kwargs],
        }
        return {
            kind: total((t for t in tensors(values) if t.device.type == self.at.type), known)
            for kind, values in kinds.items()
        }

    def report(
        self, model: nn.Module, inputs: Any, kwargs: Any, events: Any, static: dict[str, int],
        error: BaseException | None,
    ) -> MemoryReport:  # fmt: skip
        found = timeline(events, sum(static.values()), self.names, 1.0 if self.fake else 1e-9, static)
        notes = []
        if self.fake:
            notes.append("A prediction with fake tensors: workspaces of operators are estimates.")
            if self.at.type != self.device.type:
                notes.append(f"No GPU here: the operators are those of the {self.at.type}.")
        elif self.device.type == "cuda":
            notes.append("Times are the host's, which runs ahead of the GPU.")
        message = None
        if error is not None:
            message = f"{type(error).__name__}: {error}"
            if found.refused is not None:
                notes.append(
                    f"{found.refused[0]} bytes were refused to {found.refused[1]}, {found.refused[2] or OUTSIDE}"
                )
        return MemoryReport(
            Trace(
                title=type(model).__name__,
                device=str(self.device),
                fake=self.fake,
                clock="operators" if self.fake else "seconds",
                amp=None if self.amp is None else str(self.amp).removeprefix("torch."),
                static=static,
                after=self.sizes(model, inputs, kwargs),
                phases=found.phases,
                modules=self.facts(model, found.stretches),
                curve=found.curve,
                peak=found.peak,
                saved=sum(size for _, _, size in self.saved),
                duration=found.duration,
                work=self.counted_work,
                notes=notes,
                error=message,
            )
        )

    def facts(self, model: nn.Module, stretches: dict[int, Any]) -> list[ModuleFacts]:
        state = self.made.state if self.made is not None else {}
        rows = []
        for module, number in self.modules.items():
            name = self.names[number]
            parameters = list(module.parameters())
            rows.append(
                ModuleFacts(
                    name=name,
                    type=type(module).__name__,
                    parameters=total(parameters),
                    buffers=total(module.buffers()),
                    gradients=total(p.grad for p in parameters if p.grad is not None),
                    optimizer=total(tensors([dict(state[p]) for p in parameters if p in state])),
                    stretches=stretches.get(number, []),
                )
            )
        by_number = dict(zip(self.modules.values(), rows, strict=True))
        for chain, operator, size in self.saved:
            for at in set(chain):
                row = by_number[at]
                row.saved += size
                row.saved_by[operator] = row.saved_by.get(operator, 0) + size
            if chain:
                by_number[chain[-1]].own_saved += size
        return rows


@contextlib.contextmanager
def _allocator_history(path: str | Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
