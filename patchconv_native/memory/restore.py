"""Restores what a step changes: tensors, gradients, attributes of modules, random states, an optimizer.

Copies of values are made on the CPU, before anything is counted.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .sizes import tensors, total

_TABLES = (dict, OrderedDict, defaultdict, set)
_ROWS = (list, deque)


@contextlib.contextmanager
def attributes_as_they_were(model: nn.Module) -> Iterator[None]:
    """Restores the attributes of modules after the block, and what mappings, lists and sets among them hold:
    parameters, hooks, caches. A step may add some (lazy layers, hooks that a first call sets) or replace some.
    """
    modules = list(model.modules())
    before = [(module, dict(vars(module))) for module in modules]
    held = [(one, copy.copy(one)) for _, values in before for one in values.values() if type(one) in _TABLES + _ROWS]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for one, was in held:
            one.clear()
            one.update(was) if type(one) in _TABLES else one.extend(was)


def _put_back(tensor: Tensor, value: Tensor) -> None:
    guard = (
        contextlib.nullcontext() if tensor.is_inference() else torch.autograd._unsafe_preserve_version_counter(tensor)
    )
    with torch.inference_mode(tensor.is_inference()), torch.no_grad(), guard:
        tensor.copy_(value)


def _copied(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.layout == torch.strided


@contextlib.contextmanager
def values_as_they_were(model: nn.Module, optimizer: Any, inputs: Any, device: torch.device) -> Iterator[int]:
    """Restores tensors, gradients, random states and the optimizer's state after the block.

    Gradients from before are removed for the block. Yields their bytes on the device.
    """
    given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    parameters = list(model.parameters())
    state: dict[Any, dict[Any, Any]] = {}
    groups: list[dict[str, Any]] = []
    if given is not None:
        parameters += [p for group in given.param_groups for p in group["params"]]
        state = {p: copy.copy(s) for p, s in given.state.items()}
        groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in given.param_groups]
    leaves = {id(t): t for t in (*parameters, *model.buffers(), *tensors(inputs), *tensors(list(state.values())))}
    values = [(t, t.detach().to("cpu", copy=True)) for t in leaves.values() if _copied(t)]
    gradients = [(t, t.grad) for t in leaves.values() if t.is_leaf]
    known: set[int] = set()
    aside = total((g for _, g in gradients if g is not None and g.device.type == device.type), known)
    for tensor, gradient in gradients:
        if gradient is not None:
            tensor.grad = None
    numpy = sys.modules.get("numpy")
    numbers = random.getstate(), None if numpy is None else numpy.random.get_state()
    with contextlib.ExitStack() as stack:  # so that each is restored even if another fails
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.callback(random.setstate, numbers[0])
        if numpy is not None:
            stack.callback(numpy.random.set_state, numbers[1])
        for tensor, value in values:
            stack.callback(_put_back, tensor, value)
        for tensor, gradient in gradients:
            stack.callback(setattr, tensor, "grad", gradient)
        if given is not None:
            stack.callback(_optimizer_as_it_was, given, state, groups)
        yield aside


def _optimizer_as_it_was(optimizer: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]]) -> None:
    kept = {p: optimizer.state[p] for p in optimizer.state if p in state}
    optimizer.state.clear()
    for parameter, entries in state.items():
        own = kept.get(parameter, {})
        own.clear()
        own.update(entries)
        optimizer.state[parameter] = own
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        for key in [k for k in group if k != "params" and k not in settings]:
            del group[key]
        group.update(settings)
