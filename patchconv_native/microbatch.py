"""`microbatch`: runs a module in micro-batches (chunks of the batch), with batch norm over the whole batch.

Saved for backward are the module's input and some numbers a channel. The statistics of a batch norm are combined from
those of the chunks, and so are the two sums that its gradient needs. One pass over all chunks finds the statistics of
one norm, once those of the norms before it are known; in backward, the sums of one norm, once those of the norms after
it are known. During a pass the norms have another forward (`wrap.forwards`). Calls of the same norm are told apart by
their order.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import stateless

from . import _library
from .lean import in_lean, lean
from .microbatch_norm import HALF, Call, Norm, Watch, forward_of, norms_in_training
from .microbatch_state import LeftBehind
from .settings import all_settings, settings_set
from .tiles.recorded import Recorded
from .wrap import forwards


class _Stop(BaseException):
    """Ends a chunk's forward at the norm that this pass is for."""


class _OfThread(threading.local):
    busy = False  # whether micro-batches run on this thread: others inside of them are not cut again


_here = _OfThread()


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


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


class _Passes:
    """The passes over the chunks that one call of `microbatch` makes, and what they share."""

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
        self.settings = all_settings()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", x.device.type))
        ]
        self.calls_made: dict[nn.Module, int] = {}  # in this chunk
        self.wanted: Call | None = None  # the pass is for its statistics (forward) or sums (backward)
        self.anchor: Tensor | None = None
        self.in_backward, self.first_chunk = False, False

    def _norm(self, norm: _BatchNorm, input: Tensor) -> Tensor:
        norm._check_input_dim(input)
        known, number = self.by_norm[norm], self.calls_made.get(norm, 0)
        self.calls_made[norm] = number + 1
        if self.in_backward and known:
            number %= len(known)  # a checkpoint inside of the module runs its part again
        with contextlib.ExitStack() as stack:
            for kind, enabled, _ in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if number < len(known):
                call = known[number]
                anchor = self.anchor if call is self.wanted else None
                return Norm.apply(input, norm.weight, norm.bias, anchor, call, self.first_chunk)
            if self.first_chunk and not self.in_backward:
                self.wanted = Call(norm)
            if self.in_backward or self.wanted is None or self.wanted.module is not norm:
                raise self._differs()
            self.wanted.add(input)
            raise _Stop

    @contextlib.contextmanager
    def _pass(self, parameters: list[Tensor]) -> Iterator[None]:
        """During a pass the norms' forward is `_norm`, and the parameters are the given ones."""
        state = {name: parameters[i] for name, i in self.names.items()}
        before, _here.busy = _here.busy, True
        try:
            replaced: dict[nn.Module, Any] = {norm: forward_of(norm, self._norm) for norm in self.norms}
            with stateless._reparametrize_module(self.module, state), forwards(replaced):
                yield
        finally:
            _here.busy = before

    def _chunk(self, number: int, x: Tensor) -> Any:
        """The output of one chunk, or _Stop. Every pass draws the same random numbers."""
        self.calls_made, self.first_chunk = {}, number == 0
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
            with self._pass([p.detach() for p in self.parameters]), LeftBehind(self.module) as left:
                output = self._first(x)
                while output is None:
                    self._statistics(x)
                    output = self._first(x)
                for i, part in enumerate(self.parts[1:], 1):
                    with left.none_but_first(i == len(self.parts) - 1):
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
            call.update_running_statistics()
        return output

    def _first(self, x: Tensor) -> Tensor | None:
        """The whole output, filled for the first chunk, or None if it reached a norm whose statistics are not known."""
        # A copy: a module that writes to its input, which is an error, does not write to x then.
        part = self.parts[0]
        copy = x[part].clone()
        version = None if copy.is_inference() else copy._version
        self.wanted = output = None
        try:
            with Watch((*self.module.parameters(), *self.module.buffers())):
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
        """Adds the statistics of the other chunks to those of the call that the first chunk has reached."""
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
    def _settings_of_forward(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(settings_set(self.settings))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(torch.enable_grad())
            yield

    def backward(self, x: Tensor, parameters: list[Tensor], grad: Tensor, needs: tuple[bool, ...]) -> list[Any]:
        self.in_backward = True
        with self._settings_of_forward():
            plain = [p.detach() for p in parameters]
            with self._pass(plain):
                for call in reversed(self.calls):
                    self._sums(call, x.detach(), grad)
            leaves = [p.requires_grad_(need) for p, need in zip(plain, needs[1:], strict=True)]
            with self._pass(leaves):
                return self._gradients(x.detach(), leaves, grad, needs[0])

    def _sums(self, call: Call, x: Tensor, grad: Tensor) -> None:
        """Those that the gradient of this call needs, over all chunks."""
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
                    # Half precision is added up in float32. A copy, since others may hold what autograd returns.
                    total, dtype = totals[k], _sum_dtype(gradient.dtype)
                    totals[k] = gradient.to(dtype, copy=True) if total is None else total.add_(gradient)
            del found
        return [whole, *(None if t is None else t.to(p.dtype) for t, p in zip(totals, parameters, strict=True))]


def _once(grads: list[Tensor | None]) -> list[Tensor | None]:
    """These gradients, of which nothing can be differentiated. (once_differentiable lets that pass, with gradients that
    lack a part, where the gradient that comes in has no history.)
    """
    some = [grad.detach().requires_grad_() for grad in grads if grad is not None]
    refused = torch._C._functions.DelayedError(
        "microbatch: expected no second derivatives (create_graph=True)", len(some)
    )
    marked = iter(refused(*some))
    return [None if grad is None else next(marked) for grad in grads]


class _Microbatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, x: Tensor, *parameters: Tensor) -> Tensor:
        output = passes.forward(x)
        ctx.passes = passes
        ctx.save_for_backward(x, *parameters)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        with torch.no_grad():
            found = ctx.passes.backward(x, parameters, grad, ctx.needs_input_grad[1:])
        return None, *(_once(found) if twice else found)


def check_chunks(owner: str, chunks: Any) -> None:
    if not isinstance(chunks, int) or isinstance(chunks, bool):
        raise TypeError(f"{owner}: expected chunks to be an int, got {type(chunks).__name__}")
    if chunks < 1:
        raise ValueError(f"{owner}: expected chunks to be at least 1, got {chunks}")


def microbatch_call(owner: str, module: nn.Module, run: Callable[[Tensor], Any], x: Any, chunks: int) -> Any:
    """run(x) in chunks; run is the module's forward or calls it."""
    transformed = torch._C._functorch.maybe_current_level() is not None
    if torch.compiler.is_compiling() or _here.busy or transformed or isinstance(x, Recorded):
        return run(x)
    if type(x) not in _library.PLAIN or x.dim() == 0:
        got = f"one of shape {tuple(x.shape)}" if isinstance(x, Tensor) and x.dim() == 0 else type(x).__name__
        raise TypeError(f"{owner}: expected x to be a plain tensor with a batch dimension, got {got}")
    if chunks > len(x):
        raise ValueError(f"{owner}: expected chunks to be at most {len(x)} (the batch of x), got {chunks}")
    passes = _Passes(module, lean()(run) if in_lean() else run, x, chunks)
    if torch.is_grad_enabled():
        return _Microbatch.apply(passes, x, *passes.parameters)
    return passes.forward(x)


def microbatch(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """module(x) in `chunks` micro-batches, one after another, with batch norm over the whole batch.

    x: (N, ...). module: takes x alone, returns a tensor (N, ...), and treats each sample alone but for its batch norms
    (torch.nn.BatchNorm1d to 3d, converted or not). Chunks have N // chunks samples, the first N % chunks one more.
    Values, gradients of x and of the parameters, and running statistics are those of module(x), to rounding. In half
    precision a parameter's gradient is rounded once a chunk, and the chunks' gradients are added in float32.

    Memory: forward needs the output and the tensors of one chunk. Saved for backward are x and some numbers a channel.
    Backward needs the gradients of x and of the parameters, what one chunk needs forward and backward, and a copy of
    one chunk. Time: with J batch norms in training, forward runs the module J + 1 times, each time up to the next norm
    and at last to its end; backward runs it J + 1 times, each time with a backward pass down to a norm and at last to
    the input. Without such norms it is run once, and once again in backward, as by a checkpoint.

    Dropout draws other masks than in module(x) with the same seed. Hooks of modules inside run once a chunk and pass.
    Inside torch.compile and transforms of torch.func, of another microbatch and of `tile`, this is module(x).

    ValueError unless 1 <= chunks <= N, and for a batch norm with one value a channel. TypeError for another type of
    module, x or output, for one that leaves tensors in attributes, and, in training, for SyncBatchNorm, functional
    batch norms, and instance norms with running statistics. RuntimeError for a module that writes to x in place or
    whose chunks call different norms, and for second derivatives. Running statistics are not updated then.

    Limits. These are not noticed: other code that mixes samples, buffers that a forward changes (spectral_norm's),
    random numbers of Python or numpy, and questions about gradients (torch.is_grad_enabled(), x.requires_grad), which
    are off in the forward pass. Gradients reach x and the module's parameters alone.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"microbatch: expected module to be a torch.nn.Module, got {type(module).__name__}")
    check_chunks("microbatch", chunks)
    return microbatch_call("microbatch", module, module, x, chunks)
