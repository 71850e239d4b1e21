"""The largest batch and the largest image that still fit a budget, by prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._bytes import format_bytes
from ..memory.trace import Loss
from .plans import Frontier, budget_of, checked_question, plan
from .strategy import Strategy

MOST = 2**24


def _largest(fits: Callable[[int], bool], first: int, most: int = MOST) -> int:
    """The largest n with fits(n), by bisection from `first`; 0 if there is none.

    If fits(n) holds, it must hold for smaller n too. An n below `first` for which it raises counts as too small.
    """
    low, high, there = 0, first, False
    if fits(first):
        low, high, there = first, first * 2, True
        while high < most and fits(high):
            low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        try:
            fit = fits(middle)
        except (ValueError, RuntimeError):
            if middle >= first:
                raise
            low = middle
            continue
        low, high, there = (middle, high, True) if fit else (low, middle, there)
    return low if there else 0


def _like(tensor: Any, shape: tuple[int, ...]) -> Any:
    layout = torch.contiguous_format
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
        layout = torch.channels_last
    made = torch.empty(shape, dtype=tensor.dtype, device="meta", memory_format=layout)
    return made.requires_grad_(tensor.requires_grad)


def _answer(
    owner: str, model: nn.Module, inputs: tuple[Any, ...], budget: int | str, planned: bool, options: dict[str, Any],
    scaled: Callable[[int], tuple[Any, ...]], first: int,
) -> int:  # fmt: skip
    wanted = budget_of(owner, budget)
    question = checked_question(owner, model, inputs, progress=None, **options)

    def largest(strategy: Strategy) -> int:
        undo = strategy.apply(model)
        try:
            return _largest(lambda count: question.fits(question.traced(scaled(count)).peak, wanted), first)
        finally:
            undo()

    found = largest(Strategy())
    if planned:
        # The strategy with the least peak at one size may not have it at another: those of two sizes are tried.
        for count in (first, max(first, found)):
            found = max(found, largest(_least(model, scaled(count), options)))
    if found == 0:
        raise ValueError(f"{owner}: expected a budget that the smallest input fits into, got {format_bytes(wanted)}")
    return found


def _least(model: nn.Module, values: tuple[Any, ...], options: dict[str, Any]) -> Strategy:
    """The strategy with the least peak. Without tiles, whose budget is one size's."""
    found: Frontier = plan(model, *values, frontier=True, tiles=False, **options)
    return min(found.plans, key=lambda one: one.peak).strategy


def max_batch(
    model: nn.Module,
    *inputs: Any,
    budget: int | str,
    planned: bool = False,
    kwargs: dict[str, Any] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    device: torch.device | str | None = None,
    train: bool = True,
) -> int:
    """The largest batch with which a step of `model` is predicted to fit into `budget` bytes. Nothing is computed.

    inputs: an example of the model's inputs. Every tensor whose first dimension equals that of the first tensor is
    scaled. planned: apply the plan with the least peak first, of those without tiles; otherwise the model stays
    unchanged. Raises ValueError if not even a batch of 1 fits.
    """
    batch = next((t.shape[0] for t in inputs if isinstance(t, Tensor) and t.dim()), None)
    if batch is None:
        raise TypeError("max_batch: expected inputs to begin with a tensor that has a batch, got none")

    def scaled(count: int) -> tuple[Any, ...]:
        return tuple(
            _like(t, (count, *t.shape[1:])) if isinstance(t, Tensor) and t.dim() and t.shape[0] == batch else t
            for t in inputs
        )

    options = {"kwargs": kwargs, "loss": loss, "optimizer": optimizer, "device": device, "train": train}
    return _answer("max_batch", model, inputs, budget, planned, options, scaled, max(1, batch))


def max_size(
    model: nn.Module,
    *inputs: Any,
    budget: int | str,
    multiple: int = 32,
    planned: bool = False,
    kwargs: dict[str, Any] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    device: torch.device | str | None = None,
    train: bool = True,
) -> tuple[int, int]:
    """The largest (height, width) of the first input with which a step of `model` is predicted to fit into `budget`.

    It has the proportions of the example, and sides that are multiples of `multiple` pixels. Otherwise as `max_batch`.
    """
    first = inputs[0] if inputs else None
    if not isinstance(first, Tensor) or first.dim() < 3:
        raise TypeError("max_size: expected the first input to be an image, of 3 dimensions or more")
    if not isinstance(multiple, int) or multiple < 1:
        raise ValueError(f"max_size: expected multiple to be at least 1, got {multiple!r}")
    height, width = first.shape[-2:]
    short = min(height, width)

    def sides(count: int) -> tuple[int, int]:
        return tuple(max(1, round(side * count / short)) * multiple for side in (height, width))  # type: ignore[return-value]

    def scaled(count: int) -> tuple[Any, ...]:
        return (_like(first, (*first.shape[:-2], *sides(count))), *inputs[1:])

    options = {"kwargs": kwargs, "loss": loss, "optimizer": optimizer, "device": device, "train": train}
    return sides(_answer("max_size", model, inputs, budget, planned, options, scaled, max(1, short // multiple)))
