"""What a recorded module computes: calls of functions of torch, and the values that they give each other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..memory.fake import FakeMode, references
from ..spatial.norms import TRACKING
from ..spatial.pointwise import BY_PLACE
from ..spatial.rules import name_of
from .watch import writes_first

DETACHES = {"detach", "detach_", "data"}
"""Functions whose results have no history."""
Autocast = tuple[str, torch.dtype, bool, bool]
"""The state of autocast: device, dtype, whether it is on, and whether it keeps its casts."""


@dataclass(frozen=True)
class Ref:
    """In a call's arguments and in the graph's result: the value of this number."""

    index: int


@dataclass(eq=False)
class Call:
    """One call of a function of torch."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str
    """The name of the module whose forward made it; "" is the recorded module itself."""
    autocast: Autocast
    result: Any = None
    """Values, as the function returns them, with a Ref for each tensor."""
    history: bool = True
    """Whether the module made it with gradients on; False too where nobody asks for gradients."""
    in_place: Call | None = None
    """The same call with its result in place of its argument, once it was made."""

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.name} in {self.module}" if self.module else self.name

    @functools.cached_property
    def inputs(self) -> list[int]:
        """The numbers of its values, each once."""
        return list(dict.fromkeys(refs((self.args, self.kwargs))))

    @functools.cached_property
    def outputs(self) -> list[int]:
        return refs(self.result)

    @functools.cached_property
    def constants(self) -> list[Tensor]:
        """The tensors among its arguments that were there before: parameters, and what was computed of them."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @functools.cached_property
    def by_place(self) -> bool:
        """Whether it computes of a strip what it computes of the whole there: activations, batch norm in eval mode."""
        norm = self.function is F.batch_norm and self.kwargs.get("training", (*self.args, *[False] * 6)[5]) is False
        return (norm or (self.function in BY_PLACE and not self.constants)) and len(self.inputs) == 1

    @property
    def moved(self) -> list[Tensor]:
        """The running statistics that it moves when all is computed."""
        whole = (*self.args, *[None] * 6)
        trains = self.kwargs.get("training", self.kwargs.get("use_input_stats", whole[5]))
        if self.function not in TRACKING or not (self.function is F.instance_norm if trains is None else trains):
            return []
        first = 1 if self.function in (F.batch_norm, F.instance_norm) else 3
        given = (*whole[first : first + 2], self.kwargs.get("running_mean"), self.kwargs.get("running_var"))
        return [one for one in given if isinstance(one, Tensor)]

    @property
    def momentum(self) -> float:
        """By how much it moves them."""
        return self.kwargs.get("momentum", self.args[6] if len(self.args) > 6 else 0.1)

    def with_constants(self, swaps: dict[int, Tensor]) -> Call:
        """The same call with other constants, by the ids of its own."""
        if swaps.keys().isdisjoint(map(id, self.constants)):
            return self
        args, kwargs = tree_map_only(Tensor, lambda one: swaps.get(id(one), one), (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs, in_place=None)

    @functools.cached_property
    def writes(self) -> bool:
        """Whether it writes into its first argument."""
        return writes_first(self.function, self.kwargs)


@dataclass
class Graph:
    """What a call of a module computes."""

    calls: list[Call] = field(default_factory=list)
    fakes: list[FakeTensor] = field(default_factory=list)
    """Of each value, its shape, dtype, device and strides."""
    inputs: list[int] = field(default_factory=list)
    result: Any = None
    """What the module returns, with a Ref for each tensor that was computed."""
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of results that are not returned as they are computed: in other strides than those of their fakes."""
    changed: dict[int, dict[Any, Any]] = field(default_factory=dict)
    """The lists and mappings among the arguments that the module changes (`Arguments.change`), with Refs as well."""
    kept: list[tuple[Any, dict[Any, Any]]] = field(default_factory=list)
    """Attributes, lists and mappings of modules that the call changes, as of `Held.changes`, with Refs as well."""
    fed: list[Tensor] = field(default_factory=list)
    """Tensors that were there before, and of whose numbers the module computed others: constants of the graph."""
    made: int = 0
    """Bytes of the constants that were not there before, and of casts that autocast keeps. They are there during the
    whole call.
    """
    casts: dict[tuple[int, torch.dtype], int] = field(default_factory=dict)
    """Of these casts the bytes, by the ids of the parameters and the dtypes."""
    repeatable: bool = True
    """Whether another call computes the same graph: False where the module drew random numbers or changed a buffer."""
    drew: bool = False
    """Whether the result follows from random numbers: of the module's, or of calls."""
    needs: set[int] = field(default_factory=set)
    """Values whose gradients are needed for those that are asked for. Nothing: nobody asks."""
    undo: Callable[[], None] = lambda: None
    """Undoes what the module changed while it was recorded, and that was kept."""
    mode: FakeMode = field(default_factory=FakeMode)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.undo()
            raise

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        return self.fakes[self.inputs[0]].device

    def needing(self, call: Call, needs: set[int]) -> set[int]:
        """The values that a call gives and whose gradients are needed, if those of `needs` are."""
        if not call.history or call.name in DETACHES:
            return set()
        if needs.isdisjoint(call.inputs) and not any(constant.requires_grad for constant in call.constants):
            return set()
        return {v for v in call.outputs if is_differentiable(self.fakes[v])}

    @functools.cached_property
    def storages(self) -> dict[int, Any]:
        """`references` to those of all values."""
        return references(self.fakes)

    @property
    def results(self) -> list[int]:
        """The numbers of the values that the caller gets."""
        return refs((self.result, self.changed, [change for _, change in self.kept]))


def refs(values: Any) -> list[int]:
    return [leaf.index for leaf in tree_leaves(values) if isinstance(leaf, Ref)]


def autocast_of(device: str) -> Autocast:
    return (
        device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled(),
    )  # fmt: skip


def is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def kept_casts(graph: Graph, device: torch.device) -> dict[tuple[int, torch.dtype], int]:
    """The casts of parameters that the caller's autocast keeps until its block ends, in bytes."""
    found: dict[tuple[int, torch.dtype], int] = {}
    if not (torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()):
        return found
    for call in graph.calls:
        _, dtype, enabled, keeps = call.autocast
        if enabled and keeps and any(graph.fakes[v].dtype == dtype for v in call.outputs):
            weights = (t for t in call.constants if t.requires_grad and t.is_leaf and t.dtype == torch.float32)
            found.update({(id(t), dtype): t.numel() * dtype.itemsize for t in weights})
    return found
