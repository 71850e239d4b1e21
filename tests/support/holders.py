"""Functions of a module that hold a tensor in some way while a layer is called with it, or do not.

SPENT: nobody can read the tensor afterwards. HELD: somebody can.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FRESH = torch.arange(12.0).view(1, 3, 2, 2) - 6


def watcher() -> Any:
    """The caller's variables, as a tool for debugging keeps them."""
    return sys._getframe(1).f_locals


def made() -> Tensor:
    return FRESH.clone()


class Code(nn.Module):
    """A module whose forward is one of the functions below, with a layer that would write into its input."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.relu, self.code, self.kept = nn.ReLU(), code, []
        self.inner = nn.Sequential(nn.ReLU(), nn.Hardtanh())

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


SPENT: dict[str, Callable[..., Any]] = {}
HELD: dict[str, Callable[..., Any]] = {}


def case(cases: dict[str, Any]) -> Callable[..., Any]:
    return lambda function: cases.setdefault(function.__name__, function)


# Each returns where its tensor was, and the result. -------------------------------------------------------------------
@case(SPENT)
def set_again(self: Any, _: Tensor) -> Any:
    x = made()
    place = x.data_ptr()
    x = self.relu(x)
    return place, x


@case(SPENT)
def not_read_again(self: Any, _: Tensor) -> Any:
    x = made()
    place = x.data_ptr()
    y = self.relu(x)
    return place, y


@case(SPENT)
def in_a_loop(self: Any, _: Tensor) -> Any:
    x = made()
    place = x.data_ptr()
    for layer in (self.relu, self.relu):
        x = layer(x)
    return place, x


@case(SPENT)
def in_a_sequential(self: Any, _: Tensor) -> Any:
    x = made()
    place = x.data_ptr()
    x = self.relu(x)
    x = self.inner(x)  # the first layer's input is an argument, which the call holds, the second's is not
    return x.data_ptr() if x.data_ptr() != place else 0, x


@case(SPENT)
def read_before(self: Any, _: Tensor) -> Any:
    x = made()
    total = x.sum()
    place = x.data_ptr()
    x = self.relu(x) if total > -100 else x
    return place, x


@case(SPENT)
def of_a_function(self: Any, _: Tensor) -> Any:
    x = made()
    place = x.data_ptr()
    x = torch.relu(x)
    return place, x


@case(SPENT)
def of_a_function_in_python(self: Any, _: Tensor) -> Any:
    x = made()
    place = x.data_ptr()
    x = F.leaky_relu(x, negative_slope=0.5)
    return place, x


@case(SPENT)
def computed_for_a_function(self: Any, x: Tensor) -> Any:
    y = x * 2
    place = y.data_ptr()
    y = torch.tanh(self.relu(y))
    return place, y


@case(SPENT)
def of_a_sum(self: Any, x: Tensor) -> Any:
    y = made()
    place = y.data_ptr()
    y = x + y
    return place, y


@case(SPENT)
def of_a_quotient(self: Any, x: Tensor) -> Any:
    y = made()
    place = y.data_ptr()
    z = y / 2.0
    return place, z


@case(SPENT)
def of_a_product_with_channels(self: Any, x: Tensor) -> Any:
    y = made()
    place = y.data_ptr()
    gate = x.mean((2, 3), keepdim=True)
    y = y * gate
    return place, y


# Each returns what must not have changed, and whatever else it made. --------------------------------------------------
@case(HELD)
def read_again(self: Any, _: Tensor) -> Any:
    x = made()
    y = self.relu(x)
    return x, y


@case(HELD)
def read_on_one_way(self: Any, _: Tensor) -> Any:
    x = made()
    y = self.relu(x)
    if y.sum() < 0:
        y = y + 1
    else:
        return x, y
    return FRESH, y


@case(HELD)
def read_in_the_next_round(self: Any, _: Tensor) -> Any:
    x, y = made(), None
    for _ in range(2):
        seen = x.clone()
        y = self.relu(x)
    return seen, y


@case(HELD)
def by_another_name(self: Any, _: Tensor) -> Any:
    x = made()
    z = x
    x = self.relu(x)
    return z, x


@case(HELD)
def in_a_list(self: Any, _: Tensor) -> Any:
    kept = [made()]
    y = self.relu(kept[0])
    return kept[0], y


@case(HELD)
def in_an_attribute(self: Any, _: Tensor) -> Any:
    self.memory = made()
    y = self.relu(self.memory)
    return self.memory, y


@case(HELD)
def by_a_view(self: Any, _: Tensor) -> Any:
    x = made()
    view = x[:, 1:]
    x = self.relu(x)
    return torch.cat([FRESH[:, :1], view], 1), x


@case(HELD)
def by_what_it_is_detached_to(self: Any, _: Tensor) -> Any:
    x = made()
    same = x.detach()
    x = self.relu(x)
    return same, x


@case(HELD)
def by_a_closure(self: Any, _: Tensor) -> Any:
    x = made()

    def later() -> Tensor:
        return x

    y = self.relu(x)
    return later(), y


@case(HELD)
def by_a_generator(self: Any, _: Tensor) -> Any:
    def layers() -> Iterator[Tensor]:
        x = made()
        yield self.relu(x)
        yield x

    first, second = layers()
    return second, first


@case(HELD)
def by_arguments(self: Any, x: Tensor) -> Any:
    y = self.relu(x)
    return x, y


@case(HELD)
def by_numpy(self: Any, _: Tensor) -> Any:
    array = np.array(FRESH)
    x = torch.from_numpy(array)
    x = self.relu(x)
    return torch.from_numpy(array), x


@case(HELD)
def by_numpy_later(self: Any, _: Tensor) -> Any:
    x = made()
    array = x.numpy()
    x = self.relu(x)
    return torch.from_numpy(array), x


@case(HELD)
def by_a_weak_reference(self: Any, _: Tensor) -> Any:
    x = made()
    reference = weakref.ref(x)
    y = self.relu(x)
    return reference() if reference() is not None else FRESH, y


@case(HELD)
def read_by_a_handler(self: Any, _: Tensor) -> Any:
    x = made()
    try:
        y = self.relu(x)
        raise RuntimeError
    except RuntimeError:
        return x, y


@case(HELD)
def read_after_a_context(self: Any, _: Tensor) -> Any:
    x = made()
    with contextlib.suppress(RuntimeError):
        y = self.relu(x)
        raise RuntimeError
    return x, y


@case(HELD)
def read_at_the_end(self: Any, _: Tensor) -> Any:
    x = made()
    try:
        y = self.relu(x)
    finally:
        z = x
    return z, y


@case(HELD)
def read_by_name(self: Any, _: Tensor) -> Any:
    x = made()
    y = self.relu(x)
    return locals()["x"], y


@case(HELD)
def by_somebody_who_keeps_the_variables(self: Any, _: Tensor) -> Any:
    x = made()
    self.kept.append(watcher())
    x = self.relu(x)
    return self.kept[-1]["x"] if sys.version_info < (3, 13) else FRESH, x


@case(HELD)
def of_a_map(self: Any, _: Tensor) -> Any:
    xs = [made()]
    ys = list(map(self.relu, xs))
    return xs[0], ys[0]


@case(HELD)
def of_the_next_one(self: Any, _: Tensor) -> Any:
    xs = [made()]
    x = map(self.relu, xs)
    x = next(x)
    return xs[0], x


@case(HELD)
def of_a_starmap(self: Any, _: Tensor) -> Any:
    pairs = [(made(),)]
    ys = list(itertools.starmap(self.relu, pairs))
    return pairs[0][0], ys[0]


@case(HELD)
def of_a_sort(self: Any, _: Tensor) -> Any:
    xs = [made(), made()]
    ys = sorted(xs, key=lambda x: float(self.relu(x).sum()))
    return xs[0], ys


@case(HELD)
def of_a_maximum(self: Any, _: Tensor) -> Any:
    xs = [made()]
    best = max(map(torch.relu, xs), key=torch.sum)
    return xs[0], best


@case(HELD)
def of_a_partial(self: Any, _: Tensor) -> Any:
    xs = (made(),)
    y = functools.partial(self.relu, *xs)()
    return xs[0], y


@case(HELD)
def of_arguments_in_a_tuple(self: Any, _: Tensor) -> Any:
    xs = (made(),)
    y = self.relu(*xs)
    return xs[0], y


@case(HELD)
def of_objects_in_an_array(self: Any, _: Tensor) -> Any:
    xs = np.empty(1, dtype=object)
    xs[0] = made()
    ys = xs / 2.0
    return xs[0], ys[0]


@case(HELD)
def of_sums_in_an_array(self: Any, _: Tensor) -> Any:
    xs = np.empty(1, dtype=object)
    xs[0] = made()
    others = np.empty(1, dtype=object)
    others[0] = made()
    ys = xs + others
    return xs[0] + 0, ys[0]


@case(HELD)
def forward_itself(self: Any, _: Tensor) -> Any:
    held = [made()]
    x = held[0]
    x = self.relu.forward(x)
    return held[0], x


@case(HELD)
def both_operands(self: Any, _: Tensor) -> Any:
    x = made()
    y = x + x
    return FRESH, y - FRESH


@case(HELD)
def a_larger_sum(self: Any, x: Tensor) -> Any:
    row = FRESH[:, :, :1].clone()
    kept = [row]
    z = row + x
    return torch.cat([kept[0], FRESH[:, :, 1:]], 2), z


@case(HELD)
def what_is_taken_away(self: Any, x: Tensor) -> Any:
    y = made()
    held = y
    z = x - y
    return held, z


@case(HELD)
def an_operand_in_a_list(self: Any, x: Tensor) -> Any:
    ys = [made()]
    y = ys[0]
    y = y * 2
    return ys[0], y
