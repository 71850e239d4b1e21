"""Records what a module computes, as a graph of calls of torch's functions.

The module runs once, on values that have a shape and no data. Every function of torch that is given one of them is
written down: its arguments, and the values that it returns. Nothing is computed. What the module computes from its
parameters alone is computed, and is a constant of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..memory.fake import FakeMode
from ..spatial import NotServed
from ..spatial.dropout import DROPOUTS, draw_seed, dropout_by_seed, seeded
from ..spatial.forms import function_of, in_form
from ..spatial.rules import name_of
from ..spatial.shapes import set_item
from . import own_backward
from .draws import DRAW, DRAW_INTO, Draws, draw
from .filled import OfImages, number_of, value_like
from .graph import Call, Graph, Ref, autocast_of, kept_casts
from .history import IN_TILES, QUESTIONS, USES, History
from .named import Elsewhere, check_iterators, functions_of
from .recorded import Recorded
from .state import Held, modules_of, objects, owners_of
from .views import Views, overlaps
from .watch import ON_PIXELS, Watch, names_torchscript, storage_of, without_tracebacks, writes_first

_tensor: Any = Tensor
_CASTS = {_tensor.to, _tensor.type_as}
"""Of their second argument, they read the dtype and the device alone."""
_OF_NUMBERS = {"narrow", "pad", "new_full", "full_like"}
"""They want numbers, and take tensors of one number for such."""
_ASSIGNS = {_tensor.data.__set__, _tensor.set_, _tensor.resize_}


class Recorder:
    """Writes calls down."""

    def __init__(self, names: dict[int, str], gradients: bool, watch: Watch) -> None:
        self.graph, self.gradients = Graph(), gradients
        self.history = History(self.graph)
        self._names, self._watch = names, watch
        watch.before_read, watch.before_write = self._before_read, self._before_write
        self._readers: dict[int | None, list[Call]] = {}
        """By the storages of their constants."""
        self._statistics: set[int | None] = set()
        """The storages of running statistics that calls move, which they do when all is computed."""
        self._inside: list[str] = [""]
        self._alive: dict[int, list[weakref.ref[Recorded]]] = {}
        self._views = Views(gradients)

    def value(self, fake: FakeTensor) -> Recorded:
        index = len(self.graph.fakes)
        self.graph.fakes.append(fake)
        made = Recorded(self, fake, index)
        self._alive.setdefault(fake.untyped_storage()._cdata, []).append(weakref.ref(made))
        return made

    def refuse(self, function: str, why: str) -> NotServed:
        where = f" (in {self._inside[-1]})" if self._inside[-1] else ""
        return NotServed(f"tile: {function}{where} is not served: {why}")

    def check_gone(self) -> None:
        """When the call is over. What is left of it would be read as if it had numbers."""
        if self._left():
            gc.collect()
        if self._left():
            raise NotServed(
                "tile: a tensor of the call is kept by a hook, a closure or a global variable, which is not served: "
                "return it, or let the module have it as an attribute. If the module's gradient checkpointing is on, "
                "turn it off: tiles compute again what a budget asks for"
            )

    def _left(self) -> bool:
        return any(made() is not None for some in self._alive.values() for made in some)

    def check_there(self, name: str, values: Any) -> None:
        """What a call, or the caller, is given."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Recorded) and leaf._recorder is not self:
                raise self.refuse(name, "it reads what an earlier call of tile has left in an object")
            if isinstance(leaf, Recorded) and not self._views.made_again(leaf, self._call_again):
                raise self.refuse(name, f"it reads a tensor that {leaf._lost} has written to by way of a view")
            if isinstance(leaf, Recorded) and self.gradients:
                with torch._C.DisableTorchFunctionSubclass():
                    node = leaf.grad_fn
                if node is not None:  # no function of torch that was written down gives one
                    self._inside[-1] = next((c.module for c in self.graph.calls if leaf._index in c.outputs), "")
                    raise self.refuse(node.name().removesuffix("Backward"), "gradients of an autograd.Function")

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = set_item if function is _tensor.__setitem__ else function
        function = function_of(function) if isinstance(function, torch._ops.OpOverload) else function
        name = name_of(function)
        asked = args, kwargs
        args, kwargs = in_form(function, args, kwargs)
        self.check_there(name, (args, kwargs))
        if function in QUESTIONS:
            answer = self.history.answer(function, args[0]._index)
            if answer is NotImplemented:
                what = "there is no graph of autograd while the module is recorded"
                ddp = "of a DistributedDataParallel that looks for unused parameters, or is static, tile its `module`"
                raise self.refuse(name, f"{what}; {ddp}")
            return answer
        if name in ON_PIXELS:
            what = "what the module does next would depend on the values of pixels, as in `if x.mean() > 0`"
            raise self.refuse(name, what)
        if function in _CASTS and len(args) > 1 and isinstance(args[1], Recorded):
            function, args = _tensor.to, (args[0], args[1].device, args[1].dtype, *args[2:])
            asked = args, kwargs
            if not isinstance(args[0], Recorded):
                return function(*args, **kwargs)
        if function in DRAW and args and isinstance(args[0], Recorded):
            drawn = draw(function, args[0]._fake, args[1:], kwargs)
            return self.call(_tensor.copy_, (args[0], drawn), {}) if function in DRAW_INTO else drawn
        if function in _ASSIGNS or kwargs.get("out") is not None:
            raise self.refuse(name, "it writes into a part of a tensor, or into one that is given")
        if function in USES and any(
            isinstance(one, Recorded) and self.history.needs(one._index) for one in tree_leaves((args, kwargs))
        ):
            raise self.refuse(name, IN_TILES)
        if name in _OF_NUMBERS and any(map(_is_number, tree_leaves(asked))):  # before torch 2.14 of narrow a fake one
            asked = tree_map_only(Tensor, _number, asked)
            args, kwargs = in_form(function, *asked)
        given = tree_map_only(Recorded, lambda value: value._fake, asked)  # as it was asked: errors are torch's
        try:
            numbers = seeded(function, *args, **kwargs) if function in DROPOUTS else None
            if numbers is not None:
                seed = self.call(draw_seed, (args[0].device,), {})
                return self.call(dropout_by_seed, (args[0], seed), numbers)
            with torch._C.DisableTorchFunctionSubclass(), self._watch.off(), self.graph.mode, torch.no_grad():
                of_fakes = function.of_fakes if isinstance(function, own_backward.OwnBackward) else function
                found = of_fakes(*given[0], **given[1])
        except NotServed:
            raise
        except NotImplementedError as error:
            raise self.refuse(name, str(error)) from error
        except RuntimeError as error:
            if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
                if any(map(_is_number, tree_leaves(asked))):
                    return self.call(function, *tree_map_only(Tensor, _number, asked))
                raise self.refuse(name, "its shape, or what follows, depends on the values of pixels") from error
            raise
        if found is NotImplemented:  # of `x == "text"`: Python has the answer
            return found
        number = number_of(function, args, kwargs)
        filled = None if number is None else value_like(self.call, self._there(), found, number)
        return self._write_down(function, args, kwargs, found) if filled is None else filled

    def _write_down(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Any:
        writes = writes_first(function, kwargs)
        first = args[0] if args else None
        if writes and not isinstance(first, Recorded):
            made = isinstance(first, Tensor) and self._watch.made_of([first])
            if made:
                self._watch.filled.check(storage_of(cast(Tensor, first)))
            of_call = "it writes what follows from an image into a tensor that does not: make it by x.new_zeros"
            raise self.refuse(
                name_of(function), of_call if made else "it writes into a tensor that was there before the call"
            )
        known = {id(leaf._fake): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Recorded)}
        if not writes and id(found) in known:
            return known[id(found)]  # as x.contiguous() of a contiguous x
        args, kwargs = tree_map_only(Recorded, lambda value: Ref(value._index), (args, kwargs))
        device = str(self.graph.device.type)
        call = Call(function, args, kwargs, self._inside[-1], autocast_of(device), history=torch.is_grad_enabled())
        self._add(call)
        if writes:
            return self._written(call, cast(Recorded, first))

        def wrap(value: Any) -> Any:
            return self.value(value) if isinstance(value, FakeTensor) else value

        made = tree_map(wrap, found)
        call.result = tree_map_only(Recorded, lambda value: Ref(value._index), made)
        self._views.link(call, [leaf for leaf in tree_leaves(made) if isinstance(leaf, Recorded)], list(known.values()))
        return made

    def _check_hooks(self, module: nn.Module, args: Any) -> None:
        given = (isinstance(one, Recorded) and self.history.needs(one._index) for one in tree_leaves(args))
        if any(given) or any(p.requires_grad for p in module.parameters()):
            raise self.refuse("a backward hook", IN_TILES)

    def fill(self, numbers: set[int], image: Recorded) -> None:
        """numbers: of calls of FACTORIES whose results are values."""
        self._watch.filled.of_images = dict.fromkeys(numbers, functools.partial(self._filled_like, image))

    def _filled_like(self, image: Recorded, made: Tensor, empty: bool) -> Any:
        if made.device.type != image.device.type or made.requires_grad or not made.numel() or not made.is_contiguous():
            return made
        with self._watch.off():
            number = 0 if empty else made.flatten()[0].item()
        like = value_like(self.call, self._there(), made, number)
        new = image, tuple(made.shape), number
        return self.call(_tensor.new_full, new, {"dtype": made.dtype}) if like is None else like

    def _there(self) -> list[Recorded]:
        alive = (one() for some in self._alive.values() for one in some)
        return [one for one in alive if one is not None and not one._lost]

    def _add(self, call: Call) -> None:
        self.graph.calls.append(call)
        moved = call.moved
        self._before_read([one for one in call.constants if not any(one is other for other in moved)])
        for constant in call.constants:
            self._readers.setdefault(storage_of(constant), []).append(call)
        self._statistics.update(map(storage_of, moved))

    def _before_read(self, tensors: list[Tensor]) -> None:
        if self._statistics and not self._statistics.isdisjoint(map(storage_of, tensors)):
            raise self.refuse("batch_norm", "the module reads its running statistics, or writes into them, after it")

    def _before_write(self, tensors: list[Tensor]) -> None:
        """Calls that were given these tensors read what is in them now."""
        self._before_read(tensors)
        storages = set(map(storage_of, tensors))

        def copied(tensor: Tensor) -> Tensor:
            if storage_of(tensor) not in storages:
                return tensor
            if self.gradients and tensor.requires_grad:
                raise self.refuse("a call in place", "it writes into a tensor that a call before it has read")
            return tensor.detach().clone()

        for call in (call for storage in storages for call in self._readers.pop(storage, [])):
            call.args, call.kwargs = tree_map_only(Tensor, copied, (call.args, call.kwargs))
            del call.constants

    def _written(self, call: Call, value: Recorded) -> Recorded:
        """The same object is another value from here on, and so is what it is a view of. Other views are lost, until
        they are made again.
        """
        if value.shape != value._fake.shape or value.stride() != value._fake.stride():
            raise self.refuse(call.name, "it gives a tensor another shape in place")
        if overlaps(value._fake):
            raise self.refuse(call.name, "it writes into a tensor whose elements share memory")
        for other in self._alive[value._fake.untyped_storage()._cdata]:
            view = other()
            if view is not None and view is not value:
                view._lost = call.where
        value._index = self._number(call, value._fake)
        self._views.written(value, self._call_again)
        return value

    def _number(self, call: Call, fake: FakeTensor) -> int:
        """That of the value that a call gives."""
        self.graph.fakes.append(fake)
        call.result = Ref(len(self.graph.fakes) - 1)
        return call.result.index

    def _call_again(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], history: bool, fake: FakeTensor
    ) -> Ref:  # fmt: skip
        """Of a call that the module has not made, what it gives."""
        call = Call(function, args, kwargs, self._inside[-1], autocast_of(str(self.graph.device.type)), history=history)
        self._add(call)
        return Ref(self._number(call, fake))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Knows the module whose forward runs."""
        hooks, own = nn.modules.module, threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == own:  # hooks are those of all threads
                self._inside.append(self._names.get(id(module), type(module).__name__))
                if self.gradients and (module._backward_hooks or module._backward_pre_hooks):
                    self._check_hooks(module, args)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() == own:
                self._inside.pop()

        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _is_number(value: Any) -> bool:
    """Whether torch takes it for a number where it wants one: a tensor that does not follow from an image."""
    has_numbers = isinstance(value, Tensor) and not isinstance(value, (Recorded, FakeTensor))
    return has_numbers and not value.dim() and not value.requires_grad and not value.is_meta


def _number(value: Tensor) -> Any:
    return value.item() if _is_number(value) else value


def _referred(value: Any) -> Any:
    """With a Ref in place of each value that was recorded."""
    if not any(isinstance(leaf, Recorded) for leaf in tree_leaves(value)):
        return value  # the same object
    return tree_map_only(Recorded, lambda one: Ref(one._index), value, lambda one: isinstance(one, torch.Size))


def _check_taken_apart(found: Any) -> None:
    for one in objects(found):
        if any(isinstance(leaf, Recorded) for leaf in tree_leaves(vars(one))):
            what = type(one).__name__
            raise NotServed(f"tile: a result with tensors in a {what} is not served: return the tensors themselves")


def record(
    module: Callable[..., Any], images: Sequence[tuple[torch.Size, torch.dtype, tuple[int, ...]]],
    asked: Sequence[bool], device: torch.device,
    call: Callable[[Sequence[Recorded]], tuple[Any, dict[int, dict[Any, Any]]]],
    others: Sequence[Any] = (), keep_changes: bool = False,
) -> Graph:  # fmt: skip
    """The graph of call(values), with a value for each image: its shape, dtype and strides. module: what is called.
    asked: whether images require gradients.

    call returns what the module does, and what it has changed of lists and mappings. others: further objects that it
    gets. keep_changes: what the module writes into its buffers while it runs (batch norm counts its calls) stays; else
    it is undone. Attributes are as they were: what the module has changed there is in the graph. With gradients on,
    what the module computes of its parameters alone has its history. NotServed, with nothing changed, for what cannot
    be recorded.
    """
    of_images: set[int] = set()
    while True:
        try:
            return _record(module, images, asked, device, call, others, keep_changes, of_images)
        except OfImages as found:
            of_images.add(found.number)


def _record(
    module: Callable[..., Any], images: Sequence[tuple[torch.Size, torch.dtype, tuple[int, ...]]],
    asked: Sequence[bool], device: torch.device,
    call: Callable[[Sequence[Recorded]], tuple[Any, dict[int, dict[Any, Any]]]],
    others: Sequence[Any], keep_changes: bool, of_images: set[int],
) -> Graph:  # fmt: skip
    """of_images: the numbers of calls of FACTORIES whose results are values."""
    parts = [part for whole in modules_of(module) for part in whole.modules()]
    names = {id(part): name for whole in modules_of(module) for name, part in whole.named_modules()}
    owners = owners_of(module, parts, others)
    held = Held(map(vars, owners))
    values = held.values()
    functions = functions_of(module, parts, values)
    check_iterators(owners, functions)
    elsewhere = Elsewhere(functions, owners, values)
    draws = Draws(device, elsewhere.values)
    watch = Watch(draws)
    recorder = Recorder(names, torch.is_grad_enabled(), watch)
    graph = recorder.graph
    state = (t for part in parts for t in (*part.parameters(recurse=False), *part.buffers(recurse=False)))
    modes = (t.fake_mode for t in state if isinstance(t, FakeTensor))
    graph.mode = next((mode for mode in modes if isinstance(mode, FakeMode)), graph.mode)  # torch mixes no two

    def take_back() -> None:
        for one in (watch, elsewhere, draws):
            one.put_back()

    made = []
    for shape, dtype, strides in images:
        with graph.mode:
            fake = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        made.append(recorder.value(cast(FakeTensor, fake)))
        graph.inputs.append(made[-1]._index)
    recorder.history.ask(asked)
    recorder.fill(of_images, made[0])
    try:
        with (
            watch.watching(),
            recorder.running(),
            own_backward.recorded(recorder.call),
            without_tracebacks(),
            names_torchscript(),
            torch.compiler.set_stance("force_eager"),
        ):  # compiled modules run as they are
            found = call(made)
        changes = held.changes()
        recorder.check_there("the module's result", (found, [change for _, change in changes]))
        _check_taken_apart(found)
        graph.result, graph.changed = _referred(found)
        graph.kept = [(one, {key: _referred(value) for key, value in change.items()}) for one, change in changes]
    except BaseException:
        take_back()
        raise
    finally:
        held.put_back()
    graph.fed = list(watch.fed.values())
    graph.made = sum(watch.made_of(t for call in graph.calls for t in call.constants if t.device.type == device.type))
    graph.casts = kept_casts(graph, device)
    graph.made += sum(graph.casts.values())
    drew = watch.drew or draws.moved()
    graph.drew = drew or any(call.function is draw_seed for call in graph.calls)
    once = any(one.grad_fn is not None for call in graph.calls for one in call.constants)  # a graph to go back through
    graph.repeatable = not (watch.changed() or drew or elsewhere.changed() or graph.kept or once)
    graph.made += watch.held() * (not graph.repeatable)
    del found, changes
    made.clear()
    try:
        recorder.check_gone()
    except NotServed:
        take_back()
        raise
    if not keep_changes:
        take_back()
    elif not graph.repeatable:
        graph.undo = take_back
    return graph
