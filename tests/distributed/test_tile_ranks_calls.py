"""`tile` and `tile_modules` on parts of images on ranks: random numbers, stores, plans, what is refused."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import needs_gloo, run
from support.spatial_cases import mesh_of
from support.spatial_chains import differences, step
from torch import Tensor, nn

import patchconv_native as pc
import patchconv_native.distributed as pd

pytestmark = needs_gloo


def text_of(function: Callable[[], Any]) -> str:
    try:
        return f"no error, {function()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def image(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 3, 13, 12), generator=torch.Generator().manual_seed(4)).double()


class Dropped(nn.Module):
    """Masks of elements and of channels, of an image and of a pooled one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.first(x), 0.4, self.training)
        z = F.dropout2d(self.last(y), 0.5, self.training)
        return z * F.dropout(F.adaptive_avg_pool2d(z, 1), 0.5, self.training) + y


def masks(rank: int, world: int, dims: str) -> Any:
    mesh = mesh_of(world, (world,))
    torch.manual_seed(1)
    model = Dropped().double()

    def tiled(model: nn.Module, x: Tensor) -> Tensor:
        return pd.gather(pc.tile(model, pd.scatter(x, mesh, dims), tile=3))

    found = step(copy.deepcopy(model), image(), tiled, 5)
    dim = 3 if dims == "H" else 2  # each rank's strips go along the dimension that is not cut
    return found, step(model, image(), lambda model, x: pc.tile(model, x, tile=4, dim=dim), 5)


@pytest.mark.parametrize("dims", ["H", "W"])
def test_masks_are_those_of_tile_on_one_process(dims: str) -> None:
    for got, want in run(2, masks, dims):
        assert got["output"].eq(0).any()
        assert not differences(got, want, 1e-9)


# What all ranks must have alike.


def unlike(rank: int, world: int) -> list[str]:
    mesh = mesh_of(world, (world,))
    part = pd.scatter(image(), mesh, "H")
    model = Dropped().double()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    found = [text_of(lambda: pc.tile(model, part))]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    found.append(text_of(lambda: pc.tile(model, part, tile=3 + rank)))
    other = copy.deepcopy(model).train(rank == 0)
    found.append(text_of(lambda: pc.tile(other, part)))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.last.weight[0, 0, 0, 0] += rank
    found.append(text_of(lambda: pc.tile(other, part)))
    target, lacks = torch.zeros(2, 13, 12, dtype=torch.uint8), torch.zeros(2, 13, 12, dtype=torch.uint8)
    target[0, 0, 0] = lacks[0, 0, 0] = 1
    lacks[0, 0, 0] = rank
    found.append(text_of(lambda: pc.tile(lambda x, y: model(x) * y[:, None], (part, lacks))))
    pc.tile(lambda x, y: model(x) * y[:, None], (part, target))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    with torch.no_grad():
        assert torch.equal(pd.gather(pc.tile(model.eval(), part, tile=3)), pd.gather(pc.tile(model, part, tile=3)))
    return found


def fails_on_one(rank: int, world: int, folder: str) -> list[tuple[str, bool]]:
    """What is refused on rank 1 alone, before it would send anything; and a call that is served afterwards."""
    part = pd.scatter(image(), mesh_of(world, (world,)), "H")
    torch.manual_seed(1)
    conv, counts = nn.Conv2d(3, 3, 3, padding=1).double(), Counts().double()
    tiled = pc.tile_modules(copy.deepcopy(conv), "", ("1MiB", 1)[rank])

    def fails(x: Tensor) -> Tensor:
        if rank:
            raise OSError("no such file")
        return conv(x)

    calls: list[Callable[[], Any]] = [
        lambda: pc.tile(conv, part, ("1MiB", 1)[rank]),
        lambda: pc.tile(conv, part, ("1MiB", "many")[rank]),
        lambda: pc.tile(conv, part, store=os.path.join(folder, ("", "none")[rank])),
        lambda: pc.tile(fails, part),
        lambda: pc.tile((conv, Keeps().double())[rank], part),
        lambda: pc.tile(counts, part, ("1MiB", 1)[rank]),
        lambda: tiled(part),
    ]
    found = [text_of(call) for call in calls]
    assert counts.calls == 0 and counts.norm.num_batches_tracked == 0
    assert torch.equal(pd.gather(pc.tile(conv, part)), pc.tile(conv, image()))
    return found


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm2d(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x)


OWN_ERRORS = [
    "BudgetError",
    "ValueError",
    "ValueError",
    "OSError: no such file",
    "NotServed",
    "BudgetError",
    "BudgetError",
]


def test_a_plan_that_fails_on_one_rank_fails_on_all(tmp_path: Any) -> None:
    others, own = run(2, fails_on_one, str(tmp_path))
    for text, error, other in zip(own, OWN_ERRORS, others, strict=True):
        assert text.startswith(error), text
        assert other.endswith("refused on rank 1 of 2: see there"), other


class Chain(nn.Module):
    def __init__(self, slope: float = 0.1, eps: float = 1e-5, power: int = 2, last: Any = F.relu) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, eps)
        self.slope, self.power, self.last = slope, power, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.leaky_relu(self.norm(self.conv(x)), self.slope) * self.power)


def other_calls(rank: int, world: int) -> list[str]:
    """Rank 1's module, or its mode, is another one."""
    mesh = mesh_of(world, (world,))
    chains = [{"slope": 0.2}, {"eps": 1e-4}, {"power": 3}, {"last": F.sigmoid}]

    def chain(**how: Any) -> nn.Module:
        torch.manual_seed(1)
        return Chain(**how if rank else {}).float()

    def text(model: nn.Module, x: Tensor, autocast: bool = False) -> str:
        with torch.autocast("cpu", enabled=autocast):
            return text_of(lambda: pc.tile(model, pd.scatter(x, mesh, "H")))

    found = [text(chain(**how), image().float()) for how in chains]
    frozen = chain()
    frozen.conv.weight.requires_grad_(rank == 0)
    found += [text(frozen, image().float()), text(chain(), image().float(), rank == 1)]
    found.append(
        text(chain().to(torch.float64 if rank else torch.float32), image().to(torch.float64 if rank else torch.float32))
    )
    turned = chain()
    turned.conv.weight.data = turned.conv.weight.flip(0) if rank else turned.conv.weight
    broken = chain()
    broken.norm.bias.data = broken.norm.bias * (float("nan") if rank else 1)
    return [*found, text(turned, image().float()), text(broken, image().float())]


def test_other_calls_are_refused_everywhere() -> None:
    for *calls, turned, broken in run(2, other_calls):
        for text in calls:
            assert text.startswith("ValueError: tile: expected the same arguments, module and random state"), text
            assert "got other calls" in text, text
        assert turned.endswith("got other parameters, buffers or whole arguments"), turned
        assert broken.endswith("got other parameters, buffers or whole arguments"), broken


def test_ranks_that_would_do_different_things_are_refused_everywhere() -> None:
    for states, tiles, modes, *constants in run(2, unlike):
        assert states.startswith("ValueError: tile: expected the same arguments, module and random state on every rank")
        assert states.endswith("got other random states")
        assert tiles.startswith("ValueError") and "got other plans" in tiles
        assert modes.startswith("ValueError") and "got other" in modes
        assert all(one.endswith("got other parameters, buffers or whole arguments") for one in constants)


# Refused by name.


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 3, 3, padding=1), None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.conv(x)
        return self.last * 2


without_gradients = torch.no_grad()(pc.tile)
REFUSED = {
    "blocks": "NotServed: tile: images that are cut between ranks along 2 dimensions are not served",
    "signal": "NotServed: tile: images whose only spatial dimension is cut between ranks are not served",
    "out": "NotServed: tile: out is not served where images are cut between ranks",
    "one whole": "ValueError: tile: expected all images to be parts of images or none, got 1 of 2",
    "fewer dimensions": "NotServed: tile: parts of tensors with fewer dimensions than the images are not served",
    "cut otherwise": "ValueError: tile: expected all images to be cut along the same dimension between the same ranks",
    "few rows": "NotServed: tile: expected one coordinate or more along dimension 2 for each of 4 ranks, got 3",
    "keeps": "NotServed: tile: a module that keeps tensors for its next call is not served on parts of an image",
    "budget": "BudgetError: tile: a budget of 1 B is too small for Conv2d here: the least that was found is",
    "folder": "ValueError: tile: expected store to be 'device', 'cpu' or a folder that exists",
    "synced": "NotServed: SyncBatchNorm in training is not served in tiles of parts of an image",
}


def refused(rank: int, world: int, folder: str) -> dict[str, str]:
    blocks, rows = mesh_of(world, (2, 2)), mesh_of(world, (world,))
    conv = nn.Conv2d(3, 3, 3, padding=1).double()
    part = pd.scatter(image(), rows, "H")
    signal = pd.scatter(image(2, 3, 24), rows, "L")
    pooled = nn.Sequential(conv, nn.MaxPool2d(4))
    synced = pd.spatial(nn.Sequential(nn.Conv2d(3, 3, 3), nn.SyncBatchNorm(3)).double(), rows)
    found = {
        "blocks": text_of(lambda: pc.tile(conv, pd.scatter(image(), blocks, "HW"))),
        "signal": text_of(lambda: pc.tile(nn.Conv1d(3, 3, 3).double(), signal)),
        "out": text_of(lambda: without_gradients(conv, part, out=torch.empty(2, 3, 13, 12).double())),
        "one whole": text_of(lambda: pc.tile(lambda a, b: conv(a) + b, (part, image()))),
        "cut otherwise": text_of(lambda: pc.tile(lambda a, b: conv(a) + b, (part, pd.scatter(image(), rows, "W")))),
        "fewer dimensions": text_of(lambda: pc.tile(lambda a, b: conv(a) * b[:, None], (part, part[:, 0]))),
        "few rows": text_of(lambda: pc.tile(pooled, part)),
        "keeps": text_of(lambda: without_gradients(Keeps().double(), part)),
        "budget": text_of(lambda: pc.tile(conv, part, budget=1)),
        "folder": text_of(lambda: pc.tile(conv, part, store=os.path.join(folder, "none"))),
        "synced": text_of(lambda: pc.tile(synced, part)),
    }
    assert torch.equal(pd.gather(pc.tile(conv, part)), pc.tile(conv, image()))
    return found


def test_what_is_not_served_is_refused_by_name(tmp_path: Any) -> None:
    for found in run(4, refused, str(tmp_path)):
        for name, text in found.items():
            assert REFUSED[name] in text, (name, text)


# Stores, several images and results, and the plan.


class Two(nn.Module):
    """Two images of other sizes, two results, one of them pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.a(x) + F.interpolate(self.b(small), scale_factor=2))
        return self.a(y[:, :3]), y.mean((2, 3))


def several(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    mesh, own = mesh_of(world, (world,)), os.path.join(folder, str(rank))
    os.mkdir(own)
    torch.manual_seed(1)
    model, small, weights = Two().double(), image(2, 3, 8, 6), image(2, 4, 16, 12)

    def loss(y: Tensor, mean: Tensor, weights: Tensor) -> Tensor:
        return (y * weights).mean() * mean.sin()[..., None, None]

    def stock(model: nn.Module, x: Tensor) -> Tensor:
        return loss(*model(x, small), weights)

    def tiled(model: nn.Module, x: Tensor, **how: Any) -> Tensor:
        y, mean = pc.tile(model, (pd.scatter(x, mesh), pd.scatter(small, mesh)), **how)
        assert isinstance(y, pd.SpatialTensor) and type(mean) is Tensor
        return loss(y, mean, pd.scatter(weights, mesh))

    found = [step(copy.deepcopy(model), image(2, 3, 16, 12), stock, 5)]
    for how in ({}, {"store": own, "tile": 3}, {"budget": "1MiB", "tile": 2}):
        found.append(step(copy.deepcopy(model), image(2, 3, 16, 12), functools.partial(tiled, **how), 5))
        assert not os.listdir(own)
    return found


def test_stores_and_images_of_several_sizes(tmp_path: Any) -> None:
    for want, *found in run(2, several, str(tmp_path)):
        for got in found:
            assert not differences(got, want, 1e-9)


# Losses.


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor, target: Tensor, soft: Tensor) -> Tensor:
        y = self.net(x)
        return F.cross_entropy(y, target) + F.mse_loss(y.sigmoid(), soft)


def losses(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Classes are whole on every rank, as they have fewer dimensions; the other target is cut."""
    mesh = mesh_of(world, (world,))
    torch.manual_seed(1)
    model, soft = Loss().double(), image(2, 4, 13, 12).sigmoid()
    target = soft.argmax(1)
    found = [step(copy.deepcopy(model), image(), lambda model, x: model(x, target, soft), 5)]

    def tiled(model: nn.Module, x: Tensor) -> Tensor:
        return pc.tile(model, (pd.scatter(x, mesh), target, pd.scatter(soft, mesh)), tile=3)

    return [*found, step(model, image(), tiled, 5)]


def test_losses() -> None:
    for want, got in run(3, losses):
        assert not differences(got, want, 1e-9)


# tile_modules.


class Attends(nn.Module):
    """A network with attention in its middle, which `spatial` runs gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.after = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        flat = y.flatten(2).transpose(1, 2)
        flat = self.attention(flat, flat, flat, need_weights=False)[0]
        return self.after(y + flat.transpose(1, 2).unflatten(2, y.shape[2:]))


def modules(rank: int, world: int) -> list[Any]:
    mesh = mesh_of(world, (world,))
    torch.manual_seed(1)
    model = Attends().double()
    found = [step(copy.deepcopy(model), image(), lambda model, x: model(x), 5)]

    def prepared(order: str, which: str) -> nn.Module:
        one = copy.deepcopy(model)
        for letter in order:
            one = pd.spatial(one, mesh, gather=[""]) if letter == "s" else pc.tile_modules(one, which, "640KiB")
        return one

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return pd.gather(model(pd.scatter(x, mesh)))

    for how in (("t", ""), ("ts", "before"), ("st", "before")):
        found.append(step(prepared(*how), image(), forward, 5))
    return found


def test_tiled_modules_take_parts() -> None:
    for want, *found in run(2, modules):
        for got in found:
            assert not differences(got, want, 1e-9)
