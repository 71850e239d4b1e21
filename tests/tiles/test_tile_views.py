"""Modules that write into views: what is written is seen in what they are views of, and in other views."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.tiles.views import place_of

Net = Callable[[Tensor], Tensor]
SIZE = 12, 9


def scaled_channel(y: Tensor) -> Tensor:
    y[:, 0] *= 3  # as of a flow
    return y


def whole_after_part(y: Tensor) -> Tensor:
    y[:, 1:3].mul_(2)
    return y


def part_after_whole(y: Tensor) -> Tensor:
    part = y[:, 1:3]
    y += 1
    return torch.cat([part, y], 1)


def another_part(y: Tensor) -> Tensor:
    first, second = y[:, :3], y[:, 2:]
    second.clamp_(-0.1, 0.2)
    return first * second.mean(1, True)


def of_several(y: Tensor) -> Tensor:
    first, second = y.clone().split(2, 1)
    return torch.cat([first, second * 2], 1).unbind(1)[1][:, None]


def turned(y: Tensor) -> Tensor:
    last = y.permute(0, 2, 3, 1)
    last[..., 0] /= 7
    return y * last.permute(0, 3, 1, 2)


def view_of_a_view(y: Tensor) -> Tensor:
    rows = y.flatten(2)
    rows[:, 1].cos_()
    return y + rows.view(y.shape)


def added(y: Tensor) -> Tensor:
    y.unsqueeze(1)[:, :, 2].sub_(1)
    return y


def of_one_channel(y: Tensor) -> Tensor:
    """A view of all of its base, without one of its dimensions."""
    one = y[:, 2:3]
    one[:, 0].permute(0, 2, 1).mul_(3)
    return y * one


def rows(y: Tensor) -> Tensor:
    y[:, :, 2:7].mul_(-2)
    return y


NETS: dict[str, Net] = {one.__name__: one for one in (
    scaled_channel, whole_after_part, part_after_whole, another_part, of_several, turned, view_of_a_view, added,
    of_one_channel, rows,
)}  # fmt: skip


def random_net(seed: int) -> Net:
    """Takes views of views, writes into them and reads them, in an order that the seed says."""

    def step(r: random.Random, pool: list[Tensor]) -> None:
        one = r.choice(pool)
        channels = one.size(1) if one.dim() == 4 and one.size(1) < 7 else 0
        at = r.randrange(channels or 1)
        views: list[Callable[[], list[Tensor]]] = [
            lambda: [one[:, at : at + r.randint(1, 3)]], lambda: [one[:, at]], lambda: [one[:, ::2]],
            lambda: list(one.chunk(2, 1)), lambda: [one.permute(0, 2, 3, 1)], lambda: [one.transpose(2, 3)[:, at]],
            lambda: [one * 1.5], lambda: [F.relu(one, inplace=r.random() < 0.5)], lambda: [one.unsqueeze(2)[:, at:]],
        ]  # fmt: skip
        writes: list[Callable[[], object]] = [
            lambda: one.mul_(-0.5), lambda: one.add_(1), lambda: one.clamp_(-1, 1), lambda: one.sigmoid_(),
        ]  # fmt: skip
        writes_channels: list[Callable[[], object]] = [
            lambda: one[:, at].fill_(0.5), lambda: one[:, at].mul_(3),
            lambda: one.__setitem__((slice(None), at), one[:, at - 1].tanh()), lambda: one[:, :, 2:7].mul_(2),
        ]  # fmt: skip
        if r.random() < 0.5 and channels:
            pool.extend(r.choice(views)())
        else:
            r.choice(writes + (writes_channels if channels else []))()

    def run(y: Tensor) -> Tensor:
        r, pool = random.Random(seed), [y]
        for _ in range(r.randint(2, 7)):
            step(r, pool)
        flat = [one.flatten(2).flatten(1) if one.dim() > 3 else one.flatten(1) for one in pool]
        return torch.stack([one.mean(1) * (1 + n) + one.square().mean(1) for n, one in enumerate(flat)], 1)

    return run


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("kind", [{"tile": 5}, {"budget": "1GiB"}], ids=str)
@pytest.mark.parametrize("net", [*NETS, *range(24)])
def test_what_is_written_is_seen(net: str | int, kind: dict[str, int | str], graded: bool) -> None:
    torch.manual_seed(4)
    conv = nn.Conv2d(3, 4, 3, padding=1).double()
    body = NETS[net] if isinstance(net, str) else random_net(net)
    x = structured((1 + graded, 3, *SIZE))

    def step(run: Callable[[], Tensor]) -> list[Tensor]:
        y = run()
        if not graded:
            return [y]
        return [y.detach(), *torch.autograd.grad((y * y.detach().cos()).sum(), list(conv.parameters()))]

    with torch.set_grad_enabled(graded):
        try:
            want = step(lambda: body(conv(x)))
        except RuntimeError as error:  # torch refuses it where gradients are asked for
            assert graded and "inplace" in str(error).replace("-", "") and not isinstance(net, str)
            return
        got = step(lambda: pc.tile(lambda x: body(conv(x)), x, **kind))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_where_a_view_is() -> None:
    """Index and order give the view back; what is no box is not known."""
    r = random.Random(0)
    for _ in range(300):
        shape = [r.choice([1, 2, 3, 5]) for _ in range(r.randint(1, 4))]
        base = torch.arange(2 * torch.Size(shape).numel()).view(2, *shape)[r.randrange(2)]
        base = base.transpose(0, -1) if r.random() < 0.5 else base
        starts = [r.randrange(n) for n in base.shape]
        view = base[tuple(slice(start, start + r.randint(1, 5), r.randint(1, 3)) for start in starts)]
        view = view.permute(r.sample(range(view.dim()), view.dim()))
        view = view.select(r.randrange(view.dim()), 0) if view.dim() > 1 and r.random() < 0.5 else view
        place = place_of(view, base)
        assert place is not None
        assert base[place.index].shape == view.permute(place.order).shape
        assert torch.equal(base[place.index], view.permute(place.order))
    base = torch.zeros(4, 6)
    others = base.flatten()[1:], base[:1].expand(4, 6), base.view(torch.int32), base[None], base.diagonal()
    assert all(place_of(one, base) is None for one in others)


class Deep(nn.Module):
    """Convolutions between writes into views: of a part's images, wherever a part begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)).double()

    def forward(self, x: Tensor) -> Tensor:
        x.permute(0, 2, 3, 1)[..., 1].add_(1)
        y = x.flatten(2).sigmoid_().view(x.shape)
        for conv in self.convs:
            y = conv(y)
            pairs = y.view(y.size(0), 2, 2, *SIZE).transpose(1, 2).add_(1)
            y = F.relu(pairs.flatten(1, 2).unsqueeze(1)[:, 0], inplace=True).cos()
            y = y.flatten(2).sigmoid_().view(y.shape).sin()
        return y


@pytest.mark.parametrize("graded", [False, True])
def test_images_stay_as_they_are(graded: bool) -> None:
    """Those of the caller, and those of parts that are checkpoints: also where all that is read of them are views."""
    net, x = Deep(), structured((1, 4, *SIZE))
    before = x.clone()

    def step(run: Callable[[], Tensor]) -> list[Tensor]:
        y = run()
        return [y, *torch.autograd.grad(y.sum(), list(net.parameters()))] if graded else [y]

    with torch.set_grad_enabled(graded):
        want = step(lambda: net(x.clone()))
        with pytest.raises(pc.BudgetError) as error:
            pc.tile(net, x, budget=1)
        parts = set()
        for times in (1.0, 1.1, 1.2, 1.4, 1.7, 2.5, 10.0):
            budget = int(times * error.value.least)
            parts.add(len(pc.tile_plan(net, x, budget=budget).parts))
            got = step(lambda budget=budget: pc.tile(net, x, budget=budget))  # type: ignore[misc]
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
            assert torch.equal(x, before)
        assert not graded or len(parts) > 1


def of_conjugates(y: Tensor) -> Tensor:
    z = torch.complex(y[:, :2], y[:, 2:])
    z.conj().mul_(1 + 2j)
    return z.abs()


def of_windows(y: Tensor) -> Tensor:
    windows = y.unfold(1, 2, 1)
    windows[..., 0].mul_(2)
    return windows.sum(-1)


@pytest.mark.parametrize("kind", [{"tile": 5}, {"budget": "1GiB"}], ids=str)
@pytest.mark.parametrize("body", [of_conjugates, of_windows])
def test_others_are_refused(body: Net, kind: dict[str, int | str]) -> None:
    """Of other numbers than the view's, and of elements that share memory."""
    x = structured((1, 4, *SIZE))
    with pytest.raises(pc.NotServed, match="by way of a view"):
        pc.tile(lambda x: body(x * 2), x, **kind)


def under_no_grad(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(2)
    return y * y


def of_data(y: Tensor) -> Tensor:
    y.data.mul_(2)
    return y * y


def of_one_of_several(y: Tensor) -> Tensor:
    y.chunk(2, 1)[0].mul_(2)
    return y


@pytest.mark.parametrize("body", [under_no_grad, of_data, of_one_of_several])
def test_without_history_it_is_refused(body: Net) -> None:
    """With gradients: torch leaves such a write out of the history, or refuses it."""
    conv, x = nn.Conv2d(3, 4, 3, padding=1), structured((1, 3, *SIZE)).float()
    with pytest.raises(pc.NotServed, match=r"writes without gradients|written to by way of a view"):
        pc.tile(lambda x: body(conv(x)), x, tile=5)
    with torch.no_grad():
        for one, other in itertools.pairwise([pc.tile(lambda x: body(conv(x)), x, tile=5), body(conv(x))]):
            torch.testing.assert_close(one, other)
