"""`plan` chooses what to turn on so that a step fits a budget. Its results: a `Plan`, or a `Frontier` of several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._budget import MARGIN, BudgetError, least_budget
from .._bytes import format_bytes, parse_bytes
from ..convert import convert_report
from ..memory.labels import aligned
from ..memory.plot import bytes_axis, new_figure, save_figure
from ..memory.trace import Loss, device_of
from .search import Candidate, Question, stages
from .strategy import Strategy, reasons_for, remember_plan, undo_last_plan

REASONS = 12
"""Lines of a plan's text that say why."""
TOOK = {"tiles": (0.85, 1.8), "other": (0.7, 1.25)}
"""Time of steps in units of their plans' estimates: the least and the most of 12 plans that were measured on a CPU
(bench.memory_trace, bench.whole_models), rounded outward; of the model in tiles, and of others."""


@dataclass
class Plan:
    """What to turn on, with the predicted memory in bytes and the estimated time."""

    strategy: Strategy
    model: str
    """Its class; " (converted)" follows if `convert` had been applied to it before."""
    device: str
    train: bool
    budget: int | None
    peak: int
    """Predicted for a whole step, parameters and inputs included."""
    margin: float
    """The share of `peak` by which the real peak may be higher."""
    extra_time: float
    """Estimated: 0.3 means 30 % longer than without the plan. `extra_times` is a range of it."""
    stock_peak: int
    """Predicted for the model without the plan: as it was given to `plan`, which may be converted."""
    reasons: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """What could not be tried, and why."""

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.device}, {'training step' if self.train else 'forward pass'})"]
        if self.budget is not None:
            lines.append(f"budget  {format_bytes(self.budget)}")
        lines += [
            f"peak    {format_bytes(self.peak)} predicted, {format_bytes(self.needs)} with a margin of "
            f"{self.margin:.0%}; without the plan: {format_bytes(self.stock_peak)}",
            "time    {:+.0%} estimated; {:+.0%} to {:+.0%} by what such plans took on CPUs".format(
                self.extra_time, *self.extra_times
            ),
            f"do      {self.strategy}",
        ]
        lines += [f"  {reason}" for reason in self.reasons[:REASONS]]
        if len(self.reasons) > REASONS:
            lines.append(f"  and {len(self.reasons) - REASONS} more")
        lines += [f"not tried: {what}: {why}" for what, why in self.refused.items()]
        return "\n".join(lines)

    @property
    def needs(self) -> int:
        """The smallest budget, in bytes, that this plan fits."""
        return least_budget(self.peak, self.margin)

    @property
    def extra_times(self) -> tuple[float, float]:
        """The range of `extra_time`, by how far estimates of such plans were off when they were measured on CPUs."""
        least, most = TOOK["other" if self.strategy.tile is None else "tiles"]
        return least * (1 + self.extra_time) - 1, most * (1 + self.extra_time) - 1

    def apply(self, model: nn.Module) -> nn.Module:
        """Applies the plan to `model`, in place, and returns the model.

        Raises ValueError if the model lacks a module that the plan names; then nothing has been changed.
        """
        remember_plan(model, self, self.strategy.apply(model))
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        """Restores the model from before `apply`. ValueError unless this plan was the last one applied to it."""
        undo_last_plan(model, self)
        return model

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "strategy": self.strategy.to_dict()}

    def to_json(self, path: str | Path) -> Path:
        """Writes the plan, which `Plan.load` reads."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan from a file. ValueError if the file holds none."""
        try:
            data = json.loads(Path(path).read_text())
            return cls(**{**data, "strategy": Strategy(**data["strategy"])})
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"Plan.load: expected {path} to hold a plan, got {error}") from error


@dataclass
class Frontier:
    """The plans that no other one beats in both memory and time, the fastest first."""

    plans: list[Plan]
    tried: list[Candidate]

    def __str__(self) -> str:
        rows = [("peak", "time", "do")]
        rows += [(format_bytes(plan.peak), f"{1 + plan.extra_time:.2f}", str(plan.strategy)) for plan in self.plans]
        return aligned(rows, ">><")

    def plot(self, path: str | Path) -> Path:
        """Writes a figure of the frontier and of everything that was tried. Needs matplotlib."""
        figure = new_figure(7, 4.5)
        axes = figure.add_subplot()
        axes.plot([c.time for c in self.tried], [c.peak for c in self.tried], "o", color="#999999", label="tried")
        times, peaks = [1 + plan.extra_time for plan in self.plans], [plan.peak for plan in self.plans]
        axes.step(times, peaks, where="post", color="#0072b2")
        axes.plot(times, peaks, "o", color="#0072b2", label="frontier")
        axes.set_xlabel("estimated time of a step (the unchanged model: 1)")
        axes.set_ylim(bottom=0)
        bytes_axis(axes.yaxis, max(peaks), "predicted peak, ")
        axes.set_title(f"{self.plans[0].model}, {self.plans[0].device}: memory and time")
        axes.legend()
        save_figure(figure, path)
        return Path(path)


def checked_question(
    owner: str, model: nn.Module, inputs: Any, kwargs: Any, loss: Any, optimizer: Any, device: Any, train: bool,
    progress: Any,
) -> Question:  # fmt: skip
    """The arguments that `plan`, `max_batch` and `max_size` share, checked."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{owner}: expected optimizer to be a function of parameters, got {type(optimizer).__name__}")
    where = device_of(model, inputs) if device is None else torch.device(device)
    if where.type not in MARGIN:
        raise ValueError(f"{owner}: expected device to be a CPU or a CUDA device, got {where}")
    return Question(model, inputs, kwargs, loss, optimizer, where, train, progress)


def is_share(value: Any) -> bool:
    """Whether it is text such as "50%"."""
    return isinstance(value, str) and re.fullmatch(r"\s*\d{1,9}(\.\d{1,9})?\s*%\s*", value) is not None


def _wanted(question: Question, value: int | str) -> int:
    """The budget of a plan in bytes."""
    if not is_share(value):
        return budget_of("plan", value)
    share = float(str(value).strip().removesuffix("%"))
    if share <= 0:
        raise ValueError(f"plan: expected budget to be more than 0%, got {value!r}")
    return max(1, int(share / 100 * question.report(Strategy()).peak))


def budget_of(owner: str, value: int | str) -> int:
    budget = parse_bytes(value, f"{owner}, budget")
    if budget < 1:
        raise ValueError(f"{owner}: expected budget to be at least 1 byte, got {value!r}")
    return budget


def plan(
    model: nn.Module,
    *inputs: Any,
    budget: int | str | None = None,
    frontier: bool = False,
    kwargs: dict[str, Any] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    device: torch.device | str | None = None,
    train: bool = True,
    amp: torch.dtype | None = None,
    offload: bool = False,
    tiles: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Any:
    """Chooses what to turn on so that a step of `model(*inputs)` fits into `budget` bytes ("6GiB", an int, or "50%" of
    what is predicted for the model as it is).

    Returns a `Plan`. The peak of a step is what `memory.trace` counts: parameters, gradients, the optimizer's state if
    `optimizer` is given (a function of the parameters), inputs, and all that the step allocates on the device. It is
    predicted; nothing is computed, and inputs may be fake or meta tensors of any size.

    Strategies are tried in this order: the unchanged model, the converted model, checkpoints (coarse, fine,
    nested), convolutions in smaller tiles, and, unless tiles=False, the whole model in tiles
    (`tile_modules`), which takes seconds to plan. Only if none of them fits, and only if allowed, follow autocast to
    `amp` and saved tensors in the host's memory (`offload`, on CUDA). Of those that fit, the fastest by estimate is
    chosen. `microbatch` is not tried: tiles cut the batch too. A predicted peak must stay below the budget by a margin,
    3 % of the peak on the CPU and 10 % on CUDA (tested on one GPU, with a small U-Net), and of what tiles take by
    theirs. Blocks whose forward changes more state than statistics of norms (spectral_norm) get no checkpoint.

    frontier=True: returns a `Frontier` of the best plans for all budgets. train=False: a forward pass without
    gradients. progress: called with the name of each strategy before it is tried. Raises BudgetError (a ValueError) if
    nothing fits, with the smallest budget that was found to do. The model is unchanged when this returns.
    """
    if (budget is None) != frontier:
        raise ValueError("plan: expected either a budget or frontier=True")
    if amp is not None and amp not in (torch.float16, torch.bfloat16):
        raise ValueError(f"plan: expected amp to be torch.float16 or torch.bfloat16, got {amp!r}")
    question = checked_question("plan", model, inputs, kwargs, loss, optimizer, device, train, progress)
    if offload and question.device.type != "cuda":
        raise ValueError("plan: expected offload only for a CUDA device, whose memory is not the host's")
    if offload and not torch.cuda.is_available():
        raise ValueError("plan: expected a GPU for offload: what it takes off one cannot be predicted without")
    wanted = None if budget is None else _wanted(question, budget)
    fit: list[Candidate] = []
    for found in stages(question, wanted, None if amp is None else str(amp).removeprefix("torch."), offload, tiles):
        fit += [one for one in found if wanted is not None and question.fits(one.peak, wanted)]
        if fit:
            break

    def made(candidate: Candidate) -> Plan:
        return _plan(question, candidate, wanted)

    if wanted is None:
        return Frontier([made(c) for c in _frontier(question.tried)], question.tried)
    if not fit:
        least = made(min(question.tried, key=lambda one: one.peak))
        raise BudgetError(
            f"plan: no plan fits into {format_bytes(wanted)} ({wanted} bytes): the least that was found is "
            f"{format_bytes(least.needs)} ({least.needs} bytes: {least.strategy}){_not_tried(question)}",
            least.needs,
            least,
        )
    return made(min(fit, key=lambda one: one.time))


def _frontier(tried: list[Candidate]) -> list[Candidate]:
    best: list[Candidate] = []
    for one in sorted(tried, key=lambda c: (c.time, c.peak)):
        if not best or one.peak < best[-1].peak:
            best.append(one)
    return best


def _plan(question: Question, found: Candidate, budget: int | None) -> Plan:
    by_name: dict[str, int] = {}
    stock = next(c.peak for c in question.tried if c.strategy == Strategy())
    if found.strategy.convert:
        lean = [c.peak for c in question.tried if c.strategy.convert and not c.strategy.checkpoints]
        by_name["convert"] = max(0, stock - min(lean, default=stock))
    if found.strategy.checkpoints:
        plain = Strategy(convert=found.strategy.convert)
        by_name |= {facts.name: facts.saved for facts in question.report(plain).trace.modules}
    return Plan(
        strategy=found.strategy,
        model=type(question.model).__name__ + (" (converted)" if convert_report(question.model).converted else ""),
        device=str(question.device),
        train=question.train,
        budget=budget,
        peak=found.peak,
        margin=question.margin,
        extra_time=found.time - 1,
        stock_peak=stock,
        reasons=reasons_for(found.strategy, by_name),
        refused=dict(question.refused),
    )


def _not_tried(question: Question) -> str:
    return "".join(f"; {what} could not be tried: {why}" for what, why in question.refused.items())
