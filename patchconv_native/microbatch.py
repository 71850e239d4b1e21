"""`microbatch`: a stage of layers run in micro-batches, chunks of the batch, with batch norm over the whole batch.

Nothing inside of the stage is kept but its input and some numbers a channel. Statistics of a batch norm are put
together of those of the chunks, and so are the two sums that its gradient needs; a pass over all chunks finds those of
one norm, the norms before it (in backward: behind it) being known. Norms are met by a forward that is put on the
instance for the length of a pass, their calls told apart by the order in which the stage makes them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import stateless

from . import _library
from .checkpoint import _set, _settings
from .lean import in_lean, lean
from .microbatch_norm import Call, Norm, Watch, norms_in_training
from .wrap import forwards

_HALF = (torch.float16, torch.bfloat16)


class _Stop(BaseException):
    """Ends a chunk's forward at the norm whose statistics are wanted."""


class _Active(threading.local):
    stage = False  # whether a stage is at work on this thread: one inside of it is a part of it


_active = _Active()


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _layout(tensor: Tensor) -> torch.memory_format:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _generators(tensor: Tensor) -> list[torch.Generator]:
    found = [torch.default_generator]
    if tensor.device.type == "cuda":
        found.append(torch.cuda.default_generators[tensor.device.index])
    return found


class _Stage:
    """One call: what its passes share."""

    def __init__(self, module: nn.Module, run: Callable[[Tensor], Any], x: Tensor, chunks: int) -> None:
        self.module, self.run = module, run
        self.norms = norms_in_training(module)
        short, more = divmod(len(x), chunks)
        ends = [i * short + min(i, more) for i in range(chunks + 1)]
        self.parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.calls: list[Call] = []
        self.by_norm: dict[nn.Module, list[Call]] = {norm: [] for norm in self.norms}
        named = dict(module.named_parameters(remove_duplicate=False))
        self.parameters = list({id(p): p for p in named.values()}.values())
        places = {id(p): i for i, p in enumerate(self.parameters)}
        self.names = {name: places[id(p)] for name, p in named.items()}
        self.seeds: list[int] | None = None
        self.random = False
        self.settings = _settings()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", x.device.type))
        ]
        self.seen: dict[nn.Module, int] = {}
        self.wanted: Call | None = None  # whose statistics, in forward, or sums, in backward, this pass is for
        self.anchor: Tensor | None = None
        self.backward_now, self.first = False, False

    def _norm(self, norm: _BatchNorm, input: Tensor) -> Tensor:
        norm._check_input_dim(input)
        known, number = self.by_norm[norm], self.seen.get(norm, 0)
        self.seen[norm] = number + 1
        if self.backward_now and known:
            number %= len(known)  # a checkpoint inside runs its part of the stage again
        with contextlib.ExitStack() as stack:
            for kind, enabled, _ in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if number < len(known):
                call = known[number]
                anchor = self.anchor if call is self.wanted else None
                return Norm.apply(input, norm.weight, norm.bias, anchor, call, self.first)
            if self.first and not self.backward_now:
                self.wanted = Call(norm)
            if self.backward_now or self.wanted is None or self.wanted.module is not norm:
                raise self._differs()
            self.wanted.see(input)
            raise _Stop

    @contextlib.contextmanager
    def _pass(self, parameters: list[Tensor]) -> Iterator[None]:
        """Norms are this stage's, and parameters the given ones."""
        state = {name: parameters[i] for name, i in self.names.items()}
        before, _active.stage = _active.stage, True
        try:
            replaced: dict[nn.Module, Any] = {norm: functools.partial(self._norm, norm) for norm in self.norms}
            with stateless._reparametrize_module(self.module, state), forwards(replaced):
                yield
        finally:
            _active.stage = before

    def _chunk(self, number: int, x: Tensor) -> Any:
        """The output of one chunk, or _Stop. Random numbers are the same in every pass."""
        self.seen, self.first = {}, number == 0
        if self.seeds is None:
            return self.run(x)
        generators = _generators(x)
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(self.seeds[number])
        seeded = [generator.get_state() for generator in generators]
        try:
            return self.run(x)
        finally:
            now = [generator.get_state() for generator in generators]
            self.random |= not all(map(torch.equal, now, seeded))
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)

    def forward(self, x: Tensor) -> Tensor:
        generators = [] if isinstance(x, FakeTensor) else _generators(x)
        before = [generator.get_state() for generator in generators]
        try:
            if generators:
                self.seeds = torch.randint(2**62, (len(self.parts),)).tolist()
            with self._pass([p.detach() for p in self.parameters]):
                output = self._first(x)
                while output is None:
                    self._statistics(x)
                    output = self._first(x)
                for i, part in enumerate(self.parts[1:], 1):
                    output[part].copy_(self._checked(self._chunk(i, x[part]), output, part))
        except BaseException:
            self.random = False
            raise
        finally:
            if not self.random:
                self.seeds = None
                for generator, state in zip(generators, before, strict=True):
                    generator.set_state(state)
        for call in self.calls:
            call.move()
        return output

    def _first(self, x: Tensor) -> Tensor | None:
        """The whole output, with the first chunk's in it, or None where that chunk came to a norm that is not known."""
        # A copy, so that a stage that writes to its input has not written to x.
        part = self.parts[0]
        copy = x[part].clone()
        version = None if copy.is_inference() else copy._version
        self.wanted = output = None
        try:
            with Watch():
                output = self._chunk(0, copy)
        except _Stop:
            pass
        if version is not None and copy._version != version:
            raise RuntimeError("microbatch: expected module not to write to its input x in place")
        if self.wanted is not None:
            return None
        if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != part.stop:
            shape = f" of shape {tuple(output.shape)} for {part.stop} samples" if isinstance(output, Tensor) else ""
            raise TypeError(
                "microbatch: expected module to return a tensor whose first dimension is the batch, got "
                f"{type(output).__name__}{shape}"
            )
        del copy
        size = (len(x), *output.shape[1:])
        whole = torch.empty(size, dtype=output.dtype, device=output.device, memory_format=_layout(output))
        whole[part].copy_(output)
        return whole

    def _statistics(self, x: Tensor) -> None:
        """Of the call that the first chunk came to, those of the other chunks."""
        call = self.wanted
        assert call is not None
        for i, part in enumerate(self.parts[1:], 1):
            try:
                self._chunk(i, x[part])
            except _Stop:
                continue
            raise self._differs()
        call.finish()
        self.calls.append(call)
        self.by_norm[call.module].append(call)

    @staticmethod
    def _differs() -> RuntimeError:
        return RuntimeError("microbatch: expected module to call the same batch norms for every chunk")

    @staticmethod
    def _checked(output: Any, whole: Tensor, part: slice) -> Tensor:
        expected = (part.stop - part.start, *whole.shape[1:])
        if not isinstance(output, Tensor) or output.shape != expected or output.dtype != whole.dtype:
            raise TypeError(f"microbatch: expected module to return a tensor of shape {expected} for every chunk")
        return output

    @contextlib.contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        now = _settings()
        _set(self.settings, now)
        try:
            with contextlib.ExitStack() as stack:
                for kind, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
                stack.enter_context(torch.enable_grad())
                yield
        finally:
            _set(now, self.settings)

    def backward(self, x: Tensor, parameters: list[Tensor], grad: Tensor, needs: tuple[bool, ...]) -> list[Any]:
        self.backward_now = True
        with self._as_in_forward():
            plain = [p.detach() for p in parameters]
            with self._pass(plain):
                for call in reversed(self.calls):
                    self._sums(call, x.detach(), grad)
            own = [p.requires_grad_(need) for p, need in zip(plain, needs[1:], strict=True)]
            with self._pass(own):
                return self._gradients(x.detach(), own, grad, needs[0])

    def _sums(self, call: Call, x: Tensor, grad: Tensor) -> None:
        zero = torch.zeros_like(call.mean, dtype=torch.float64)
        call.sums, self.wanted = [zero, zero], call
        for i, part in enumerate(self.parts):
            self.anchor = torch.zeros((), device=x.device, requires_grad=True)
            output = self._chunk(i, x[part])
            if output.requires_grad:
                torch.autograd.grad(output, self.anchor, grad[part], allow_unused=True)
            del output
        self.wanted = self.anchor = None

    def _gradients(self, x: Tensor, parameters: list[Tensor], grad: Tensor, of_input: bool) -> list[Any]:
        whole = torch.empty_like(x) if of_input else None
        places = [i for i, p in enumerate(parameters) if p.requires_grad]
        totals: list[Any] = [None] * len(parameters)
        for i, part in enumerate(self.parts):
            chunk = x[part].requires_grad_(of_input)
            output = self._chunk(i, chunk)
            wanted = [parameters[k] for k in places] + ([chunk] if of_input else [])
            found: list[Any] = [None] * len(wanted)
            if output.requires_grad:
                found = list(torch.autograd.grad(output, wanted, grad[part], allow_unused=True))
            del output
            if whole is not None:
                of_chunk = found.pop()
                whole[part].zero_() if of_chunk is None else whole[part].copy_(of_chunk)
                del of_chunk
            for k, gradient in zip(places, found, strict=True):
                if gradient is not None:
                    # Of half precision the sum over chunks is made in float32, on memory that is this pass's own.
                    total, exact = totals[k], _exact(gradient.dtype)
                    totals[k] = gradient.to(exact, copy=True) if total is None else total.add_(gradient)
            del found
        return [whole, *(None if t is None else t.to(p.dtype) for t, p in zip(totals, parameters, strict=True))]


class _Microbatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stage: _Stage, x: Tensor, *parameters: Tensor) -> Tensor:
        output = stage.forward(x)
        ctx.stage = stage
        ctx.save_for_backward(x, *parameters)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        return None, *ctx.stage.backward(x, parameters, grad, ctx.needs_input_grad[1:])


def check_chunks(owner: str, chunks: Any) -> None:
    if not isinstance(chunks, int) or isinstance(chunks, bool):
        raise TypeError(f"{owner}: expected chunks to be an int, got {type(chunks).__name__}")
    if chunks < 1:
        raise ValueError(f"{owner}: expected chunks to be at least 1, got {chunks}")


def microbatch_call(owner: str, module: nn.Module, run: Callable[[Tensor], Any], x: Any, chunks: int) -> Any:
    """run(x), which is the module's forward or calls it, in chunks."""
    transformed = torch._C._functorch.maybe_current_level() is not None
    if torch.compiler.is_compiling() or _active.stage or transformed:
        return run(x)
    if type(x) not in _library.PLAIN or x.dim() == 0:
        got = f"one of shape {tuple(x.shape)}" if isinstance(x, Tensor) and x.dim() == 0 else type(x).__name__
        raise TypeError(f"{owner}: expected x to be a plain tensor with a batch dimension, got {got}")
    if chunks > len(x):
        raise ValueError(f"{owner}: expected chunks to be at most {len(x)} (the batch of x), got {chunks}")
    stage = _Stage(module, lean()(run) if in_lean() else run, x, chunks)
    if torch.is_grad_enabled():
        return _Microbatch.apply(stage, x, *stage.parameters)
    return stage.forward(x)


def microbatch(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """module(x) in `chunks` micro-batches, pieces of the batch one after another, with the whole batch's batch norm.

    x: (N, ...); module: anything that takes x alone and returns a tensor (N, ...), sample by sample but for batch norms
    (torch.nn.BatchNorm1d to 3d, converted or not). Chunks have N // chunks samples, the first N % chunks one more.
    Values, gradients of input and parameters and running statistics are, to rounding, those of module(x); in half
    precision a parameter's gradient is rounded once a chunk, and their sum made in float32.

    Memory: forward takes the output and the tensors of one chunk; kept for backward are x and some numbers a channel;
    backward takes the gradient of x, the parameters' and, above what comes in, what one chunk takes forward and
    backward, plus one copy of a chunk. Time: with J batch norms in training the stage is run J + 1 times in
    forward, each time up to the next norm, the last time whole; in backward J + 1 times whole, each time with a
    backward pass down to a norm, the last time whole. Without such norms: once, and once again in backward, as a
    checkpoint.

    Dropout's masks are others than those of module(x) for the same seed, and the same in every pass. Hooks of modules
    inside run once a chunk and pass. Group, layer and instance norm and norms in eval mode see what they always see.
    Inside torch.compile and torch.func's transforms this is module(x); a stage inside of another is a part of it.

    ValueError unless 1 <= chunks <= N, or for a norm with one value a channel; TypeError for another module, x or
    output, for SyncBatchNorm, functional batch norms and instance norms with running statistics, in training;
    RuntimeError for a stage that writes to x in place or whose chunks call other norms than the first, and for second
    derivatives. Running statistics have not moved then. Not seen: other code that mixes samples, and state that a
    forward pass changes otherwise, as spectral_norm's. Gradients reach x and the module's parameters alone.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"microbatch: expected module to be a torch.nn.Module, got {type(module).__name__}")
    check_chunks("microbatch", chunks)
    return microbatch_call("microbatch", module, module, x, chunks)
