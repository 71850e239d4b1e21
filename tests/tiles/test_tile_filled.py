"""Modules that make a tensor of zeros, ones or one number, and write what follows from an image into it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.errors import raises
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.tiles.kept import plans_of


def inverse_wavelets(y: Tensor) -> Tensor:
    n, channels, h, w = y.shape
    a, b, c, d = y.chunk(4, 1)
    result = torch.zeros([n, channels // 4, 2 * h, 2 * w], dtype=y.dtype).double()
    result[:, :, 0::2, 0::2] = a - b - c + d
    result[:, :, 1::2, 0::2] = a - b + c - d
    result[:, :, 0::2, 1::2] = a + b - c - d
    result[:, :, 1::2, 1::2] = a + b + c + d
    return result


def copied(y: Tensor) -> Tensor:
    result = torch.zeros(y.shape).double().clone().to(y)
    result[:, 1:3] = y[:, 1:3]
    return result


def several_in_turn(y: Tensor) -> Tensor:
    """What was recorded again gives the calls that follow other arguments: they keep their numbers."""
    a = torch.zeros(y.shape, dtype=y.dtype)
    b = torch.zeros_like(a)
    c = torch.zeros(y.shape, dtype=y.dtype)
    ramp = torch.zeros(y.shape[-1], dtype=y.dtype)
    ramp[::2] = 1
    c += y
    a += c
    b += a
    return b * ramp if ramp[0] == 1 else b


def channels(y: Tensor) -> Tensor:
    result = torch.empty(y.shape, dtype=y.dtype)
    for i in range(y.size(1)):
        result[:, i] = y[:, -i] * i
    return result


def added(y: Tensor) -> Tensor:
    result, mask = torch.zeros(y.shape, dtype=y.dtype), torch.zeros(3)
    mask[1] = 2
    result += y
    return result.add_(y, alpha=2).mul_(mask.sum())


def some_channels(y: Tensor) -> Tensor:
    result = torch.ones(y.size(0), 2, *y.shape[2:], dtype=y.dtype)
    result[:, 1:2] = y[:, 1:2].tanh()
    return result * y.mean(1, True)


def windows(y: Tensor) -> Tensor:
    """Overlapping ones, and how many there were at each place."""
    total, weight = torch.zeros_like(y.detach()), torch.zeros(1, 1, *y.shape[2:], dtype=y.dtype)
    for i in range(0, y.size(2), 10):
        total[:, :, i : i + 15] += y[:, :, i : i + 15]
        weight[:, :, i : i + 15] += 1
    return total / weight


def of_half_the_size(y: Tensor) -> Tensor:
    small = nn.functional.avg_pool2d(y, 2)
    result = torch.full(small.shape, 0.5, dtype=y.dtype)
    result[:, 1:] = small[:, :-1]
    return result


def classes(y: Tensor) -> Tensor:
    return torch.zeros(y.shape, dtype=y.dtype).scatter_(1, y.argmax(1, keepdim=True), 1.0) * y


def numbers_alone(y: Tensor) -> Tensor:
    """Stays a constant: no pixel is written into it."""
    ramp = torch.zeros(y.shape[-1], dtype=y.dtype)
    ramp[::2] = 1
    return y * ramp + (1 if ramp[1] == 0 else 2)


def state_of_frames(y: Tensor) -> Tensor:
    """As video networks begin theirs."""
    state = y.new_zeros(y.size(0), 2, *y.shape[2:])
    for i in range(3):
        state = torch.tanh(state + y[:, i : i + 1])
    return state


def new_of_each_kind(y: Tensor) -> Tensor:
    shape = y.size(0), 2, *y.shape[2:]
    steps, empty = y.new_full(shape, 3, dtype=torch.long), y.new_empty(shape)
    empty[:, 1:] = y[:, :1]
    empty[:, :1] = y[:, 1:2] / steps[:, :1]
    return empty * y.new_ones(shape) + y.new_zeros(2, 1, 1)


class Channels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return channels(x)


BODIES = [
    inverse_wavelets,
    copied,
    several_in_turn,
    channels,
    added,
    some_channels,
    windows,
    of_half_the_size,
    classes,
    numbers_alone,
    state_of_frames,
    new_of_each_kind,
]


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("kind", [{"tile": 6}, {"budget": "1GiB"}], ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_as_the_module(body: Callable[[Tensor], Tensor], kind: dict[str, int | str], graded: bool) -> None:
    torch.manual_seed(2)
    conv, x = nn.Conv2d(3, 4, 3, padding=1).double(), structured((1 + graded, 3, 24, 17 - graded))

    def step(run: Callable[[], Tensor]) -> list[Tensor]:
        y = run()
        assert y.requires_grad == graded
        return [y, *torch.autograd.grad((y * y.detach().cos()).sum(), list(conv.parameters()))] if graded else [y]

    with torch.set_grad_enabled(graded):
        want = step(lambda: body(conv(x)))
        got = step(lambda: pc.tile(lambda x: body(conv(x)), x, **kind))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert got[0].stride() == want[0].stride()


def test_what_is_of_a_values_size_is_cut() -> None:
    with torch.no_grad():
        for body in (channels, some_channels, added, of_half_the_size, state_of_frames, new_of_each_kind):
            plan = pc.tile_plan(body, torch.randn(1, 4, 64, 32), tile=8)
            assert len(plan.sweeps) == 1 and plan.sweeps[0].strips >= 4 and not plan.kinds.why


def test_what_is_empty_is_planned_once() -> None:
    """Whatever numbers are there before it is written: a step does not plan again for them."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Channels())
    pc.tile_modules(net, "", "1GiB")
    for number in (1.5, -2.5):
        torch.full((1, 4, 24, 16), number)  # freed at once
        net(torch.randn(1, 3, 24, 16)).sum().backward()
        with torch.no_grad():
            net[0].weight.add_(1)
    assert len(plans_of(net, 2**30)) == 1


def test_modules_that_count() -> None:
    """A module that is recorded twice has run once."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.calls = 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.calls.append(self.count)
            return channels(x) + torch.rand(1, dtype=x.dtype) * 0

    net, x = Counts(), structured((1, 4, 24, 17))
    torch.manual_seed(0)
    pc.tile(net, x, tile=6)
    assert net.count == 1 and net.calls == [1]
    after = torch.rand(1)
    torch.manual_seed(0)
    channels(x), torch.rand(1, dtype=x.dtype)
    assert torch.equal(torch.rand(1), after)


def test_others_are_refused() -> None:
    given, x = torch.zeros(1, 4, 24, 17).double(), structured((1, 4, 24, 17))

    def made(x: Tensor) -> Tensor:
        return torch.linspace(0, 1, 17).double().expand(1, 4, 24, 17).clone().add_(x)

    def in_channels_last(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, memory_format=torch.channels_last).copy_(x)

    raises(pc.NotServed, {
        "it writes into a tensor that was there before the call": lambda: pc.tile(given.add_, x, tile=6),
        "make it by x.new_zeros": lambda: pc.tile(made, x, tile=6),
        "writes what follows from an image into a tensor that does not": lambda: pc.tile(in_channels_last, x, tile=6),
    })  # fmt: skip
    assert not given.any()
