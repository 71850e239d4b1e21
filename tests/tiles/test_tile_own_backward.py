"""torch.autograd.Function inside of tiled modules: its own backward pass is used, on whole values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.errors import raises
from support.spatial_chains import Unknown, structured
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import patchconv_native as pc


class LayerNorm(Function):
    """Of channels, as NAFNet has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        centered = x - x.mean(1, keepdim=True)
        inverse = (centered.square().mean(1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(centered * inverse, inverse, weight)
        return centered * inverse * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, inverse, weight = ctx.saved_tensors
        g = grad * weight.view(1, -1, 1, 1)
        own = inverse * (g - y * (g * y).mean(1, keepdim=True) - g.mean(1, keepdim=True))
        return own, (grad * y).sum((0, 2, 3)), grad.sum((0, 2, 3)), None


class Rounded(Function):
    """Its gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class Several(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, by: int) -> tuple[Tensor, Tensor]:
        ctx.by, ctx.shape = by, other.shape
        return x * by, other.sum((2, 3), keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_sum: Tensor) -> Any:
        return grad * ctx.by * 3, of_sum.expand(ctx.shape) * 5, None  # not what autograd would find


class WritesIntoIt(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


SEEN = torch.zeros(1)


class Counts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        SEEN.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Noise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


by_another_name = Unknown.apply


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.weight, self.bias = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.body = body
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, self.first(x)))


def of_several(net: Net, y: Tensor) -> Tensor:
    one, total = Several.apply(y, net.last(y), 2)
    return one * total.sigmoid()


BODIES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "layer norm": lambda net, y: LayerNorm.apply(y, net.weight, net.bias, 1e-6),
    "straight through": lambda net, y: Rounded.apply(y),
    "several results": of_several,
    "twice": lambda net, y: Rounded.apply(LayerNorm.apply(Unknown.apply(y), net.weight, net.bias, 1e-6)),
}


@pytest.mark.parametrize("kind", [{"tile": 6}, {"budget": "1GiB"}], ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_its_gradients(body: str, kind: dict[str, int | str]) -> None:
    net, x = Net(BODIES[body]), structured((2, 3, 24, 17)).requires_grad_()

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        y = run(x)
        given = [x, *net.parameters()]
        return [y, *torch.autograd.grad((y * y.detach().cos()).sum(), given, allow_unused=True)]

    for one, other in zip(step(lambda x: pc.tile(net, x, **kind)), step(net), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(pc.tile(net, x, **kind), net(x), rtol=1e-9, atol=1e-10)
    assert Function.apply is not None and Rounded.apply.__self__ is Rounded  # torch's own again


def test_it_is_one_call_with_gradients_alone() -> None:
    net, x = Net(BODIES["straight through"]), structured((1, 3, 24, 17))
    assert [call.name for call in pc.tile_plan(net, x, tile=6).graph.calls] == ["conv2d", "Rounded", "conv2d"]
    with torch.no_grad():
        plan = pc.tile_plan(net, x, tile=6)
    assert "Rounded" not in [call.name for call in plan.graph.calls] and len(plan.sweeps) == 1


def test_a_class_is_let_go_of() -> None:
    def body(net: Net, y: Tensor) -> Tensor:
        kind = type("Made", (Rounded,), {})
        made.append(weakref.ref(kind))
        return kind.apply(y)

    made: list[weakref.ref[type]] = []
    pc.tile(Net(body), structured((1, 3, 24, 17)), tile=6).sum().backward()
    gc.collect()
    assert made and all(one() is None for one in made)


def test_what_is_refused() -> None:
    x = structured((1, 3, 24, 17))

    def tiled(body: Callable[[Net, Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: pc.tile(Net(body), x, tile=6)

    raises(pc.NotServed, {
        "Noise is not served: an autograd.Function that draws random numbers": tiled(lambda net, y: Noise.apply(y)),
        "Counts is not served: .* a tensor which it is not given": tiled(lambda net, y: Counts.apply(y)),
        "WritesIntoIt is not served: .* writes into its arguments": tiled(lambda net, y: WritesIntoIt.apply(y * 1)),
        "CheckpointFunction is not served: an autograd.Function that is given a Conv2d": tiled(
            lambda net, y: checkpoint(net.last, y, use_reentrant=True)
        ),
        "Unknown is not served: gradients of an autograd.Function": tiled(lambda net, y: by_another_name(y)),
    })  # fmt: skip
    assert not SEEN
