"""Rules for products of matrices: `matmul`, `einsum` and attention, by the letters of their dimensions.

A letter that is cut and stays in the result cuts the result. One that is summed over gives a sum over all parts. Two
letters cannot be cut between the same parts: of a product of all places with all places, no part has what it needs.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis, Executor
from .operands import recut, wrap
from .parts import part_of, precise, shared, summed
from .rules import refuse, rule
from .tensor import SpatialTensor


def _cut_letters(function: str, operands: Sequence[Any], letters: Sequence[str]) -> dict[str, Axis]:
    """Of each letter that some operand is cut along, where."""
    found: dict[str, Axis] = {}
    for value, names in zip(operands, letters, strict=True):
        if len(set(names)) < len(names):
            raise refuse(function, "a letter stands twice in one operand")
        if isinstance(value, SpatialTensor):
            for d, axis in value.axes.items():
                first = found.setdefault(names[d], axis)
                if first.executor != axis.executor:
                    raise refuse(function, "its operands are cut between different groups of parts")
                if first.size != axis.size:
                    raise refuse(function, f"its operands have sizes {first.size} and {axis.size} where they meet")
    executors = [axis.executor for axis in found.values()]
    if any(a == b for a, b in itertools.combinations(executors, 2)):
        raise refuse(function, "its operands are cut along dimensions that do not meet")
    return found


def _part(function: str, value: Tensor, names: str, cut: dict[str, Axis]) -> Tensor:
    """This part of an operand: along each letter that is cut, as the others are."""
    axes = {d: cut[name] for d, name in enumerate(names) if name in cut and value.size(d) == cut[name].size}
    if any(name in cut and d not in axes for d, name in enumerate(names)):
        raise refuse(function, "an operand is broadcast along a cut dimension")
    if not isinstance(value, SpatialTensor):
        return part_of(shared(value, tuple(axis.executor for axis in cut.values())), axes)
    if value.axes.keys() != axes.keys():
        raise refuse(function, "its operands are cut along different dimensions")
    local = recut(value, {d: axis.cuts for d, axis in axes.items()})._local
    without: tuple[Executor, ...] = tuple(axis.executor for name, axis in cut.items() if name not in names)
    return shared(local, without)


def product(
    function: str, operands: Sequence[Any], letters: Sequence[str], result: str, compute: Callable[..., Tensor]
) -> Tensor:
    """compute(*operands), a product of the operands with these letters, summed over those that `result` lacks."""
    cut = _cut_letters(function, operands, letters)
    parts = [_part(function, value, names, cut) for value, names in zip(operands, letters, strict=True)]
    y = compute(*parts)
    if over := tuple(axis.executor for name, axis in cut.items() if name not in result):
        y = summed(y.to(precise(y.dtype)), over).to(y.dtype)
    return wrap(y, {d: cut[name] for d, name in enumerate(result) if name in cut})


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
def matmul(input: Any, other: Any) -> Tensor:
    if input.dim() < 2 or other.dim() < 2:
        raise refuse("matmul", "of a vector")
    batch = string.ascii_lowercase[: max(input.dim(), other.dim()) - 2]
    letters = [batch[len(batch) - value.dim() + 2 :] + ends for value, ends in ((input, "XY"), (other, "YZ"))]
    return product("matmul", (input, other), letters, batch + "XZ", torch.matmul)


@rule(Tensor.__rmatmul__)
def _rmatmul(input: Any, other: Any) -> Tensor:
    return matmul(other, input)


@rule(torch.einsum)
def einsum(equation: Any, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation or not all(isinstance(x, Tensor) for x in operands):
        raise refuse("einsum", "it takes an equation of letters, without dots, and tensors")
    given, arrow, result = equation.replace(" ", "").partition("->")
    letters = given.split(",")
    if not arrow:
        result = "".join(sorted(c for c in set(given) if c != "," and given.count(c) == 1))
    if [len(names) for names in letters] != [x.dim() for x in operands]:
        raise RuntimeError(f"einsum: expected operands with the dimensions of {equation!r}")
    return product("einsum", operands, letters, result, lambda *parts: torch.einsum(equation, *parts))


def attend(*args: Any, **kwargs: Any) -> Tensor:
    """F.scaled_dot_product_attention, without all scores at once: for that the numbers of a row must lie together."""

    def together(x: Any) -> Any:
        return x.contiguous() if isinstance(x, Tensor) and x.stride(-1) != 1 else x

    return F.scaled_dot_product_attention(*map(together, args), **{k: together(x) for k, x in kwargs.items()})


@rule(F.scaled_dot_product_attention)
def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Cut along the batch, as windows are, or along the queries alone."""
    name = "scaled_dot_product_attention"
    masked = [] if attn_mask is None else [attn_mask]
    if any(x.dim() != query.dim() for x in (key, value, *masked)) or dropout_p > 0 or enable_gqa:
        raise refuse(name, "with dropout, or with operands of other dimensions than the queries")
    batch = string.ascii_lowercase[: query.dim() - 2]
    letters = [batch + ends for ends in ("LE", "SE", "SF", "LS")][: 3 + len(masked)]
    cut = _cut_letters(name, (query, key, value, *masked), letters)
    if any(letter in cut for letter in "ESF") or (is_causal and "L" in cut):
        raise refuse(name, "every query reads all keys and values, and they are cut")

    def compute(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return attend(q, k, v, mask, is_causal=is_causal, scale=scale)

    return product(name, (query, key, value, *masked), letters, batch + "LF", compute)
