"""The search for a plan: strategies are tried on fake tensors, from the fastest to the slowest.

Memory is predicted by `memory.trace(fake=True)` with the strategy applied to the model, so that the prediction includes
how layers, checkpoints and tiles affect each other. Time is estimated from the operations and the bytes moved that the
same trace counts. It serves to rank strategies only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from .._budget import MARGIN, BudgetError, fits, largest_peak
from .._bytes import MIB
from ..explain import explain
from ..memory import fake as fakes
from ..memory.report import MemoryReport
from ..memory.trace import Loss, OptimizerLike, trace
from ..modules import Split
from ..settings import workspace_limit
from ..spatial import NotServed
from ..tiles.kept import plans_of
from .strategy import Strategy

# Operations that a device computes in the time in which it moves a byte.
BALANCE = {"cpu": 10.0, "cuda": 100.0}
HALF_FASTER = 2.0  # how much faster operations in half precision are
LINK = 40.0  # bytes that a GPU moves in its memory in the time in which one goes to the host
SMALLER_WORKSPACES = (8 * MIB, MIB)
LARGER_TILES = (2, 6)
"""Budgets of tiles that are tried besides the least, in units of it, where no budget is given."""


@dataclass(frozen=True)
class Candidate:
    """A strategy that was tried."""

    strategy: Strategy
    peak: int
    """Predicted, in bytes."""
    time: float
    """Estimated; 1 is the unchanged model."""


@dataclass
class Question:
    """The model and step that a plan is searched for, and the strategies tried so far."""

    model: nn.Module
    inputs: Sequence[Any]
    kwargs: dict[str, Any] | None
    loss: Loss | None
    optimizer: OptimizerLike | None
    device: torch.device
    train: bool
    progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        self.tried: list[Candidate] = []
        self.refused: dict[str, str] = {}
        """What could not be tried, and why."""
        self._cost: float | None = None

    @property
    def margin(self) -> float:
        return MARGIN[self.device.type]

    def fits(self, peak: int, budget: int) -> bool:
        """Whether a predicted peak fits a budget, margin included."""
        return fits(peak, budget, self.margin)

    def report(self, strategy: Strategy) -> MemoryReport:
        undo = strategy.apply(self.model)
        try:
            return self.traced(self.inputs)
        finally:
            undo()

    def traced(self, inputs: Sequence[Any]) -> MemoryReport:
        """The step with these inputs, of the model as it is now."""
        return trace(
            self.model, *inputs, kwargs=self.kwargs, loss=self.loss, optimizer=self.optimizer, device=self.device,
            fake=True, train=self.train,
        )  # fmt: skip

    def candidate(self, strategy: Strategy) -> tuple[Candidate, MemoryReport]:
        if self.progress is not None:
            self.progress(str(strategy))
        report = self.report(strategy)
        cost = self._seconds(strategy, report)
        if self._cost is None:
            self._cost = cost if strategy == Strategy() else self._seconds(Strategy(), self.report(Strategy()))
        found = Candidate(strategy, report.peak, cost / self._cost)
        self.tried.append(found)
        return found, report

    def tiled(self, strategy: Strategy) -> tuple[Candidate, int]:
        """A candidate with tiles, and the bytes that these take. BudgetError where they need a larger budget; NotServed
        where there are none.
        """
        if self.progress is not None:
            self.progress(str(strategy))
        undo = strategy.apply(self.model)
        try:
            report = self.traced(self.inputs)
            plans = plans_of(self.model, strategy.tile or 0)
        finally:
            undo()
        if not plans:
            raise NotServed("the model is not called with images")
        plan = plans[-1]
        whole = next(one for one in self.tried if one.strategy == replace(strategy, tile=None))
        passes = (plan.arithmetic + (plan.backward or 0) + plan.overhead) / (3 if self.train else 1)
        found = Candidate(strategy, report.peak + plan.needs - plan.peak, whole.time * max(1.0, passes))
        self.tried.append(found)
        return found, plan.needs

    def _seconds(self, strategy: Strategy, report: MemoryReport) -> float:
        work = report.trace.work
        moved = work["bytes"] + (2 * LINK * report.saved if strategy.offload else 0)
        return work["flops"] / BALANCE[self.device.type] / (HALF_FASTER if strategy.amp else 1) + moved


def stages(
    question: Question, budget: int | None, amp: str | None, offload: bool, tiles: bool
) -> Iterator[list[Candidate]]:
    """Tries strategies in stages, each slower than the one before. The caller stops when a candidate fits `budget`.

    budget=None: the caller wants all candidates.
    """
    for allowed in _allowed(amp, offload):
        base = Strategy(amp=allowed[0], offload=allowed[1])
        lean = replace(base, convert=True)
        least, report = question.candidate(lean)
        yield [question.candidate(base)[0], least]
        if question.train:
            partitions = list(blocks(report, question.model))
            moving = [name for name, child in question.model.named_children() if _moves_state(child)]
            if moving:
                question.refused[f"checkpoints in {', '.join(moving)}"] = (
                    "spectral_norm, or another parametrization, would change its state twice"
                )
            found = [question.candidate(replace(lean, checkpoints=names))[0] for names in partitions]
            for full in list(found):
                found += _thinned(question, full, report, budget)
            yield found
            least = min([least, *found], key=lambda one: one.peak)  # `found` is empty for a model without blocks
            if len(partitions) > 1:
                nested = sorted({*partitions[0], *partitions[-1]})
                both, _ = question.candidate(replace(lean, checkpoints=nested))
                least = min(least, both, key=lambda one: one.peak)
                yield [both]
        for limit in SMALLER_WORKSPACES:
            if splits := smaller_splits(question, limit):
                yield [question.candidate(replace(least.strategy, splits=splits))[0]]
        if tiles:
            yield in_tiles(question, base, budget)


def _allowed(amp: str | None, offload: bool) -> Iterable[tuple[str | None, bool]]:
    """The allowed pairs (amp, offload). Exact and on the device comes first; the others are for when nothing fits."""
    yield None, False
    if amp:
        yield amp, False
    if offload:
        yield None, True
    if amp and offload:
        yield amp, True


def blocks(report: MemoryReport, model: nn.Module) -> Iterator[list[str]]:
    """Sets of modules to checkpoint, from coarse blocks to fine ones.

    Each block of a set saves at most a given part of all that the model saves, unless it has no smaller blocks inside.
    """
    saved = {facts.name: facts.saved for facts in report.trace.modules}
    whole = saved.get("", 0)
    seen: set[tuple[str, ...]] = set()
    for part in (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125):
        names = tuple(_cut(model, "", saved, whole * part, whole / 200))
        if names and names not in seen:
            seen.add(names)
            yield list(names)


def _moves_state(module: nn.Module) -> bool:
    """Whether it holds a spectral_norm, or another parametrization with buffers: a forward in training may change
    these, so it may not run again.
    """
    return any(
        (isinstance(inner, parametrize.ParametrizationList) and next(inner.buffers(), None) is not None)
        or any(isinstance(hook, SpectralNorm) for hook in inner._forward_pre_hooks.values())
        for inner in module.modules()
    )


def _cut(module: nn.Module, name: str, saved: dict[str, int], most: float, least: float) -> Iterator[str]:
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        inner = list(child.named_children())
        runs = type(child).forward is not nn.Module.forward and "forward" not in vars(child)
        if runs and saved.get(full, 0) < least:
            continue  # what only holds modules, such as an nn.ModuleList, saves nothing itself
        small = runs and inner and (saved[full] <= most or not any(list(c.children()) for _, c in inner))
        if small and not _moves_state(child):
            yield full
        elif inner:
            yield from _cut(child, full, saved, most, least)


def _thinned(question: Question, full: Candidate, report: MemoryReport, budget: int | None) -> list[Candidate]:
    """Tries `full` with fewer checkpoints, as few as fit, preferring those that save much in little time.

    If `full` itself does not fit: with a quarter, a half and three quarters of them.
    """
    facts = {one.name: one for one in report.trace.modules}

    def worth(name: str) -> float:
        forward = [s for s in facts[name].stretches if s.phase == "forward"]
        return facts[name].saved / max(1.0, sum(s.stop - s.start for s in forward))

    order = sorted(full.strategy.checkpoints, key=worth, reverse=True)

    def first(count: int) -> Candidate:
        return question.candidate(replace(full.strategy, checkpoints=sorted(order[:count])))[0]

    # More checkpoints do not always take less memory: a part of a set may fit where the whole does not.
    if budget is None or not question.fits(full.peak, budget):
        return [first(count) for count in sorted({len(order) // 4, len(order) // 2, 3 * len(order) // 4} - {0})]
    found = []
    least, most = 0, len(order)
    while most - least > 1:
        middle = (least + most) // 2
        found.append(first(middle))
        least, most = (least, middle) if question.fits(found[-1].peak, budget) else (middle, most)
    return found


def in_tiles(question: Question, base: Strategy, budget: int | None) -> list[Candidate]:
    """The model in tiles: in what is left of `budget` if that is enough, or in the least; without a budget in the least
    and in more.
    """
    before = len(question.tried)
    try:
        if budget is None:
            _, least = _in_at_least(question, base, 1)
            for times in LARGER_TILES:
                question.tiled(replace(base, tile=times * least))
        else:
            found, needs = _in_at_least(question, base, budget)
            left = largest_peak(budget, question.margin) - (found.peak - needs)
            if not question.fits(found.peak, budget) and found.strategy.tile == budget:
                _in_at_least(question, base, max(left, 1))
    except (NotServed, ValueError, TypeError) as error:
        question.refused["tiles"] = str(error)
    return question.tried[before:]


def _in_at_least(question: Question, base: Strategy, budget: int) -> tuple[Candidate, int]:
    """In tiles of this budget, or of the least, if that is more. Also what they take."""
    try:
        return question.tiled(replace(base, tile=budget))
    except BudgetError as error:
        return question.tiled(replace(base, tile=error.least))


def smaller_splits(question: Question, limit: int) -> dict[str, list[int]]:
    """The splits of every convolution that a workspace limit of `limit` bytes would cut into more tiles."""
    undo = Strategy(convert=True).apply(question.model)
    found: dict[str, list[int]] = {}
    names = {module: name for name, module in question.model.named_modules() if isinstance(module, Split)}
    handles = []

    def before(module: Any, arguments: Any) -> None:
        if not arguments or module.splits is not None:
            return
        now = explain(arguments[0], module)
        with workspace_limit(limit):
            then = explain(arguments[0], module)
        if then.path == "tiled" and math.prod(then.tiles) > math.prod(now.tiles):
            entries = found.setdefault(names[module], [1] * len(then.tiles))
            found[names[module]] = [max(pair) for pair in zip(entries, then.tiles, strict=True)]

    try:
        handles = [module.register_forward_pre_hook(before) for module in names]
        device = fakes.fake_device(question.device)
        values = (question.inputs, question.kwargs or {})
        with fakes.faked(question.model, values, device) as (mode, (inputs, kwargs)), mode, torch.no_grad():
            question.model(*inputs, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        undo()
    return found
