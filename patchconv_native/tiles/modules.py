"""`tile_modules`: modules of a model whose forward runs strip by strip (see wrap.py)."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..wrap import Model, Which, Wrapped, wrap_modules
from .arguments import Arguments, is_served, least_dimensions
from .gradients import refuse_transforms
from .kept import MOST, plan_of_form
from .keys import Kept, digest_of, key_of
from .plan import TilePlan
from .planning import budget_of, plan_graph, record_call
from .ranks import planned_together
from .recorded import Recorded
from .strip_sizes import is_best_uncut
from .tiling import run_plan
from .without_data import are_fake

OWNER = "tile_modules"
_plans: weakref.WeakKeyDictionary[nn.Module, dict[Any, Kept]] = weakref.WeakKeyDictionary()
_uncut: weakref.WeakKeyDictionary[nn.Module, list[tuple[bool, list[Tensor]]]] = weakref.WeakKeyDictionary()
"""Images, without data, for which strips are no faster than one call, each with whether gradients were on."""


class _Tiled(Wrapped):
    """A module whose forward runs strip by strip. There is a kind for each budget."""

    _patchconv_rank = 5
    _patchconv_names = OWNER, "tiled"
    _patchconv_budget: int | None
    _patchconv_dim: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = super().forward
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        most = max((t.dim() for t in leaves), default=0)
        if any(isinstance(leaf, Recorded) for leaf in leaves) or most < least_dimensions(self._patchconv_dim):
            return inner(*args, **kwargs)
        arguments = Arguments(args, kwargs, dim=self._patchconv_dim, owner=OWNER)
        refuse_transforms(OWNER, arguments.images)
        if self._patchconv_budget is None and _stays_uncut(self, arguments.images):
            return inner(*args, **kwargs)
        if are_fake(arguments.images):
            plan = _new_plan(self, inner, arguments, self._patchconv_budget)
        else:
            plan = planned_together(OWNER, arguments, lambda: _plan_for(self, inner, arguments, self._patchconv_budget))
        if plan is None:
            uncut = _uncut.setdefault(self, [])
            like = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in arguments.images]
            uncut[:] = [*uncut[1 - MOST :], (torch.is_grad_enabled(), like)]
            return inner(*args, **kwargs)
        return run_plan(plan, arguments)


def _stays_uncut(module: nn.Module, images: list[Tensor]) -> bool:
    """Whether strips were no faster for images like these, and not smaller ones."""
    graded = torch.is_grad_enabled()
    return any(
        graded == with_gradients and len(known) == len(images) and all(map(_is_no_larger, images, known))
        for with_gradients, known in _uncut.get(module, ())
    )


def _is_no_larger(image: Tensor, other: Tensor) -> bool:
    same = image.dtype == other.dtype and image.dim() == other.dim()
    return same and all(a <= b for a, b in zip(image.shape, other.shape, strict=True))


def _plan_for(module: nn.Module, inner: Any, arguments: Arguments, budget: int | None) -> TilePlan | None:
    """None, without a budget, where strips are no faster than one call."""
    known = _plans.setdefault(module, {})
    key, things = key_of(module, arguments, budget)
    if key in known:
        if known[key].holds():
            return known[key].plan
        del known[key]
    found = _new_plan(module, inner, arguments, budget)
    if found is None or key is None or not found.graph.repeatable:
        return found
    digest = digest_of(found.graph.fed)
    with contextlib.suppress(TypeError):  # of a thing that cannot be referred to weakly
        refs = [weakref.ref(thing) for thing in things]
        if digest is not None:
            while len(known) >= MOST:
                del known[next(iter(known))]
            known[key] = Kept(found, refs, digest)
    return found


def _new_plan(module: nn.Module, inner: Any, arguments: Arguments, budget: int | None) -> TilePlan | None:
    graph = record_call(OWNER, module, inner, arguments, keep_changes=True)
    found = None
    if budget is not None or not is_best_uncut(graph):
        found = plan_of_form(
            module, graph, arguments, budget, lambda: plan_graph(OWNER, module, graph, arguments, budget)
        )
    if found is None or (budget is None and all(sweep.strips == 1 for sweep in found.sweeps)):
        graph.undo()
        return None
    return found


@functools.cache
def _kind(budget: int | None, dim: int) -> type[_Tiled]:
    forward = torch.compiler.disable(_Tiled.forward, reason="patchconv_native.tile_modules: strips are not compiled")
    own = {
        "_patchconv_budget": budget,
        "_patchconv_dim": dim,
        "_patchconv_made_by": (_kind, (budget, dim)),
        "forward": forward,
    }
    return type("_Tiled", (_Tiled,), own)


def tile_modules(
    model: Model, which: Which | Mapping[str, int | str | None] = "", budget: int | str | None = None, dim: int = 2
) -> Model:
    """Runs the forwards of the modules `which`, and of no others, strip by strip as `tile` does, in place; returns the
    model.

    which: names of modules (as in named_modules(); one or several), a module class or several, a function
    (name, module) -> bool, or, without `budget`, a mapping of names to budgets: {"decoder": "1GiB"}. "" is the model
    itself. budget: as of `tile`; None chooses strips for speed, and leaves small images to the module's own forward,
    and on a GPU training steps whose values take less than half of its memory.
    dim: as of `tile`, for all of them. A call with images of too few dimensions for it runs as it is.
    `tile_modules(model, ())` undoes it. Parameters, hooks of these modules (which run once, outside), optimizers and
    state_dict stay. The model can be converted and reverted before or after. What was planned for an input is
    kept for the next one like it, as long as the modules' parameters, buffers and attributes stay what they are. What a
    forward reads from elsewhere, such as a global variable, must not change: tile_modules again after a change of it.

    Forwards raise what `tile` raises. ValueError for names that the model does not have, budgets that are no number of
    bytes and a dim along which images cannot be cut; TypeError for modules that are scripted or lazy, without a
    forward, or with a forward of the instance. Nothing has been changed then.
    """
    budgets: dict[str, int | None] = {}
    if isinstance(which, Mapping):
        if budget is not None:
            raise TypeError(f"{OWNER}: expected budget to be None where which says it, got {budget!r}")
        budgets = {name: budget_of(OWNER, value) for name, value in which.items()}
    shared = budget_of(OWNER, budget)
    if not is_served(dim):
        raise ValueError(
            f"{OWNER}: expected dim to be 2 or more, or -1 or less, a spatial dimension, or 0, the batch, got {dim!r}"
        )
    changed = wrap_modules(
        OWNER, "tile", model, list(budgets) if isinstance(which, Mapping) else which, _Tiled,
        lambda name: _kind(budgets.get(name, shared), dim),
    )  # fmt: skip
    for module in model.modules():
        _plans.pop(module, None)
        _uncut.pop(module, None)
    return changed
