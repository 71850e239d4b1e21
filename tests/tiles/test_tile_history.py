"""Code inside of tiled modules that hooks gradients, asks whether they are needed, or uses them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL
from torch import Tensor, nn

import patchconv_native as pc


@pytest.mark.parametrize("kind", ["backward", "before backward", "of a tensor"])
@pytest.mark.parametrize("whose", ["inner", "own"])
def test_backward_hooks_inside_are_refused(kind: str, whose: str) -> None:
    """They would see gradients of tiles, and what they return would be lost."""
    module: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)).double()
    place = module[0] if whose == "inner" else module
    seen: list[Any] = []
    if kind == "backward":
        place.register_full_backward_hook(lambda m, given, grads: seen.append(grads))
    elif kind == "before backward":
        place.register_full_backward_pre_hook(lambda m, grads: seen.append(grads))
    else:
        place.register_forward_hook(lambda m, given, y: y.register_hook(seen.append) and None)
    x = torch.randn(1, 3, 40, 40, dtype=torch.float64, requires_grad=True)
    with pytest.raises(pc.NotServed, match=r"hook.* not served: what is inside of the module has its gradients"):
        pc.tile(module, x, tile=8)
    if kind != "of a tensor":  # torch's own error then
        with torch.no_grad():
            assert torch.allclose(pc.tile(module, x, tile=8), module(x))
    if whose == "own" and kind != "of a tensor":
        pc.tile_modules(module, "", "256KiB")
        module(x).sum().backward()
        assert len(seen) == 1  # outside of what is tiled


class Asking(nn.Module):
    """Does another thing if an answer about gradients is other than one call's."""

    def __init__(self, question: Callable[[nn.Module, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.question = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), question

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.first(x))
        return self.last(y if self.question(self, x, y) else y * 3 + 1)


ASKED: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "mode": lambda m, x, y: torch.is_grad_enabled(),
    "image": lambda m, x, y: x.requires_grad,
    "value": lambda m, x, y: y.requires_grad,
    "weight": lambda m, x, y: m.first.weight.requires_grad,
    "leaf": lambda m, x, y: y.is_leaf,
    "leaf image": lambda m, x, y: x.is_leaf,
    "detached": lambda m, x, y: y.detach().requires_grad or y.detach().is_leaf,
    "of integers": lambda m, x, y: y.argmax(1).requires_grad,
    "node": lambda m, x, y: y.detach().grad_fn is None,
    "without": lambda m, x, y: torch.no_grad()(torch.relu)(y).requires_grad,
}


GRADED = "both", "image", "weights", "neither", "no_grad"


@pytest.mark.parametrize(("asked", "graded"), [
    (asked, graded) for n, asked in enumerate(ASKED) for k, graded in enumerate(GRADED) if FULL or (n + k) % 3 == 0
])  # fmt: skip
def test_questions_about_gradients_have_the_answers_of_one_call(asked: str, graded: str) -> None:
    torch.manual_seed(0)
    module = Asking(ASKED[asked]).double().requires_grad_(graded in ("both", "weights", "no_grad"))
    image = torch.randn(1, 3, 40, 40, dtype=torch.float64)
    tiled = pc.tile_modules(copy.deepcopy(module), "", "176KiB")
    with torch.set_grad_enabled(graded != "no_grad"):
        for _ in range(2):  # a plan that is kept, and one for other answers
            found = []
            for one in (module, tiled):
                x = image.clone().requires_grad_(graded in ("both", "image"))
                y = one(x)
                if y.requires_grad:
                    y.square().sum().backward()
                found.append([y.detach(), x.grad, *(p.grad for p in one.parameters())])
            for expected, got in zip(*found, strict=True):
                assert (got is None) == (expected is None)
                assert got is None or torch.allclose(got, expected, rtol=1e-9, atol=1e-12)
            for p in (*module.parameters(), *tiled.parameters()):
                p.requires_grad_(not p.requires_grad).grad = None


def test_uses_of_gradients_inside_are_refused() -> None:
    x = torch.randn(1, 3, 40, 40, requires_grad=True)
    for use in (
        lambda x: torch.autograd.grad(torch.relu(x).sum(), x)[0],
        lambda x: torch.relu(x * torch.relu(x).grad_fn(x)),
    ):
        with pytest.raises(pc.NotServed, match=r"(grad|grad_fn) is not served"):
            pc.tile(use, x, tile=8)
