"""Bands: images that are cut along their width as well, for budgets that strips as wide as the image do not keep."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL, pairwise, todays
from support.seeds import SWEEP_SEED
from support.spatial_chains import Gate, Residual, chain, differences, structured
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles.stores import CHUNK

CHAINS = 40 if FULL else 12


def alike(got: Any, want: Any) -> None:
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    assert pairs
    for a, b in pairs:
        strides = torch.empty_like(b).stride()  # those of a view are without the gaps
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == strides
        assert (a - b).abs().max() <= 1e-9 * b.abs().max() + 1e-300


def banded(module: nn.Module, x: Any, tile: tuple[int, ...], **more: Any) -> Any:
    """The result of `tile`, which was computed in several bands."""
    plan = pc.tile_plan(module, x, tile=tile, **more)
    assert plan.sweeps and min(sweep.bands for sweep in plan.sweeps) > 1
    return pc.tile(module, x, tile=tile, **more)


@pytest.mark.parametrize("seed", range(SWEEP_SEED, SWEEP_SEED + CHAINS))
@torch.no_grad()
def test_chains_of_layers_are_computed_as_in_one_call(seed: int) -> None:
    model, x = chain(seed, 1, "H")
    for layer in model.modules():
        if isinstance(layer, nn.Upsample) and layer.mode.startswith("nearest") and layer.scale_factor == 2.3:
            pytest.skip("in float64, torch's own kernels disagree on this factor")
    stock, rng = copy.deepcopy(model), random.Random(seed)
    want = {"output": stock(x)}
    got = {"output": pc.tile(model, x, tile=(rng.choice([1, 2, 5, 40]), rng.choice([1, 2, 3, 5])))}
    want |= {f"state {name}": value for name, value in stock.state_dict().items()}
    got |= {f"state {name}": value for name, value in model.state_dict().items()}
    assert differences(got, want) == []


class Places(nn.Module):
    """What joins two axes, or is of one axis alone: a flattened image, means of rows and of columns, a softmax."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        tokens = x.flatten(2).transpose(1, 2)
        y = x + x.mean(3, keepdim=True) + x.mean(2, keepdim=True)
        return y * y.softmax(3), tokens * 2, F.pad(y, (2, 1, 0, 3)), y.permute(0, 2, 3, 1), y.flip(3), x.amax((2, 3))


class Attention(nn.Module):
    """Of places, as in a decoder's middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.of_three, self.last = nn.GroupNorm(2, 8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        found = F.scaled_dot_product_attention(*self.of_three(tokens).chunk(3, 2))
        return x + self.last(found).transpose(1, 2).reshape(x.shape)


class Shared(nn.Module):
    """A value that several layers read in parts of different widths, two inputs, and lists of results."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.one, self.down = nn.Conv2d(3, 6, 7, padding=3), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 3, 2, 1)

    def forward(self, x: Tensor, other: Tensor) -> list[Tensor]:
        x = self.wide(x)
        small = F.interpolate(self.down(x), size=x.shape[2:], mode="bilinear", align_corners=True)
        return [torch.cat([self.one(x), small, other], 1), x[:, :, 3:-2, 1::2], F.avg_pool2d(small, 5, 3) + 1]


def conv(a: int, b: int, *more: Any, **named: Any) -> nn.Module:
    return nn.Conv2d(a, b, *more, **named)


NETWORKS = {
    "reflected, replicated and circular": lambda: nn.Sequential(
        conv(3, 4, 3, padding=1, padding_mode="reflect"), conv(4, 4, 5, padding=2, padding_mode="circular"),
        conv(4, 5, 3, 2, padding=1, padding_mode="replicate"),
    ),
    "strides, groups and dilations": lambda: nn.Sequential(
        conv(3, 8, 4, 3, 2), nn.ReLU(), conv(8, 8, 3, 1, 2, 2, groups=4), nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.SiLU(),
    ),
    "shuffles": lambda: nn.Sequential(nn.PixelUnshuffle(2), conv(12, 12, 3, padding=1), nn.PixelShuffle(2), nn.GELU()),
    "norms in training": lambda: nn.Sequential(
        conv(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.SiLU(), nn.GroupNorm(4, 8), conv(8, 4, 3, 2),
        nn.BatchNorm2d(4),
    ),
    "gates": lambda: nn.Sequential(conv(3, 8, 3, padding=1), Gate(8), Residual(conv(8, 8, 3, padding=1)), Gate(8)),
    "places": lambda: nn.Sequential(conv(3, 4, 3, padding=1), Places()),
    "attention": lambda: nn.Sequential(conv(3, 8, 3, 2, 1), Attention(), nn.Upsample(scale_factor=2), conv(8, 3, 3)),
    "pools": lambda: nn.Sequential(
        nn.MaxPool2d(3, 2, 1, ceil_mode=True), conv(3, 4, 3), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d((5, 6)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape"), todays(itertools.product(NETWORKS, [(1, 3, 44, 50), (3, 3, 30, 26)])), ids=str
)
@torch.no_grad()
def test_networks(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = NETWORKS[name]().double(), structured(shape)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = x.contiguous(memory_format=layout)
        stock, own = copy.deepcopy(module), copy.deepcopy(module)
        want = stock(x)
        alike(
            [t.contiguous() for t in tree_leaves(banded(own, x, (3, 5)))], [t.contiguous() for t in tree_leaves(want)]
        )
        alike(own.state_dict(), stock.state_dict())


@pytest.mark.parametrize("tile", [(1, 1), (4, 7), (9, 30), (100, 20)])
@torch.no_grad()
def test_values_that_are_read_in_parts_of_different_widths(tile: tuple[int, int]) -> None:
    torch.manual_seed(0)
    net, x, other = Shared().double(), structured((2, 3, 21, 33)), structured((2, 1, 21, 33))
    alike(banded(net, (x, other), tile), net(x, other))
    alike(pc.tile(net, (x, other), tile=tile, dim=3), net(x, other))


@pytest.mark.parametrize("dim", [2, 3, 4])
@torch.no_grad()
def test_volumes_are_cut_along_all_dimensions(dim: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv3d(4, 4, (3, 1, 5), 2, (1, 0, 2)),
        nn.BatchNorm3d(4), nn.MaxPool3d(2), nn.ConvTranspose3d(4, 2, 2, 2),
    ).double()  # fmt: skip
    stock, x = copy.deepcopy(net), structured((2, 2, 11, 18, 22))
    want = stock(x)
    assert pc.tile_plan(net, x, tile=(2, 3, 4), dim=dim).sweeps[-1].bands >= 4
    alike(pc.tile(net, x, tile=(2, 3, 4), dim=dim), want)
    alike(net.state_dict(), stock.state_dict())


@torch.no_grad()
def test_a_tile_is_obeyed() -> None:
    """Strips of 4 rows and bands of 12 columns, counted in the result."""
    seen = set()

    class Seen(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    net, x = nn.Sequential(Seen(1, 1, 1)).double(), structured((1, 1, 40, 45))

    class Out:
        shape, dtype = (1, 1, 40, 45), x.numpy().dtype

        def __getitem__(self, where: Any) -> Any:
            raise AssertionError

        def __setitem__(self, where: Any, value: Any) -> None:
            seen.add(((where[2].start, where[2].stop), (where[3].start, where[3].stop)))

    pc.tile(net, x, tile=(4, 12), out=Out())
    rows, columns = {row for row, _ in seen}, {column for _, column in seen}
    assert columns == {(0, 12), (12, 24), (24, 36), (36, 45)} and len(rows) == 10 and len(seen) == 40


@pytest.mark.parametrize(
    ("tile", "why"),
    [((4,), "have a number for each of 2"), ((4, 4, 4), "have a number for each of 2"), ((4, 0), "be a"), ((), "be a")],
)  # fmt: skip
def test_tiles_are_checked(tile: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"tile: expected tile to {why}"):
        pc.tile(nn.ReLU(), structured((1, 3, 12, 10)), tile=tile)


# ----------------------------------------------------------------------------------------------------------------------
# Budgets


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.down, self.up = nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.last = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.last(torch.cat([self.up(F.relu(self.down(x))), x], 1))


@pairwise(training=[False, True], layout=[torch.contiguous_format, torch.channels_last][: 2 if FULL else 1])
@torch.no_grad()
def test_wide_images_fit_by_bands(layout: torch.memory_format, training: bool) -> None:
    torch.manual_seed(0)
    net, x = Deep().train(training), structured((1, 3, 48, 600)).float().contiguous(memory_format=layout)
    want, exact = copy.deepcopy(net)(x), copy.deepcopy(net).double()(x.double())
    for budget in (500 * 2**10,):
        plan = pc.tile_plan(net, x, budget=budget)
        assert plan.sweeps[0].bands > 1 and plan.arithmetic < (3 if training else 1.2)
        assert f"bands       {plan.sweeps[0].bands}, one after the other" in str(plan)
        found: list[Tensor] = []
        model = copy.deepcopy(net)
        peak = allocated_peak(lambda model=model, to=found, budget=budget: to.append(pc.tile(model, x, budget=budget)))
        assert peak - found[0].nbytes <= budget
        assert (found[0] - exact).abs().max() <= 1.5 * (want - exact).abs().max() + 1e-6 * exact.abs().max()
        assert found[0].stride() == want.stride()


@torch.no_grad()
def test_a_budget_does_not_grow_with_the_width() -> None:
    net, needs = Deep().eval(), []
    for width in (512, 2048):
        x = torch.empty(1, 3, 48, width, device="meta")
        with pytest.raises(pc.BudgetError) as refused:
            pc.tile_plan(net, x, budget=1)
        needs.append(refused.value.least)
    assert max(needs) <= 1.05 * min(needs)


@torch.no_grad()
def test_modules_are_run_by_bands() -> None:
    torch.manual_seed(0)
    net, x = Deep().eval(), structured((1, 3, 64, 2000)).float()
    want = net(x)
    pc.tile_modules(net, "", budget="1MiB")
    found: list[Tensor] = []
    assert allocated_peak(lambda: found.append(net(x))) - found[0].nbytes <= 2**20
    pc.tile_modules(net, ())
    assert (found[0] - want).abs().max() <= 1e-5 * want.abs().max()


# ----------------------------------------------------------------------------------------------------------------------
# What is stored, read and written


class Stages(nn.Module):
    """Norms of which each needs the image once more, with a skip over one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, 6, 3, padding=1) for a in (3, 6, 6))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.convs[0](x)))
        y = F.relu(self.norms[1](self.convs[1](x)))
        return x + F.relu(self.norms[2](self.convs[2](y)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_values_are_stored_by_bands(tmp_path: Path, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    net, x = Stages().double(), structured((2, 3, 33, 47)).contiguous(memory_format=layout)
    want = net(x)
    for tile in ((4, 10), (50, 7), (1, 46)):
        plan = pc.tile_plan(net, x, tile=tile, store=tmp_path)
        assert plan.stored and plan.sweeps[0].bands > 1
        alike(pc.tile(net, x, tile=tile, store=tmp_path), want)
        assert not list(tmp_path.iterdir())
        alike(pc.tile(net, x, tile=tile), want)


@torch.no_grad()
def test_the_memory_of_stored_values_is_predicted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Stages(), structured((1, 3, 96, 120)).float()
    net(x)
    for tile in ((4, 40), (16, 30), (96, 60)):
        for store in ("device", tmp_path):
            plan, found = pc.tile_plan(net, x, tile=tile, store=store), list[Tensor]()

            def call(tile: Any = tile, store: Any = store, to: list[Tensor] = found) -> None:
                to.append(pc.tile(net, x, tile=tile, store=store))

            peak = allocated_peak(call) - found[0].nbytes
            assert peak <= plan.needs <= 1.6 * peak + CHUNK * (store != "device")


@torch.no_grad()
def test_arrays_are_read_and_written_by_bands(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()).double(),
        structured((1, 3, 40, 62)),
    )
    read = numpy.lib.format.open_memmap(tmp_path / "in.npy", "w+", x.numpy().dtype, (1, 3, 40, 62))
    written = numpy.lib.format.open_memmap(tmp_path / "out.npy", "w+", x.numpy().dtype, (1, 4, 40, 62))
    read[...] = x.numpy()
    assert banded(net, read, (4, 20), out=written) is written
    alike(torch.from_numpy(numpy.array(written)), net(x))
    alike(banded(net, read, (4, 20)), net(x))


@torch.no_grad()
def test_a_plan_of_a_number_in_bands_is_printed() -> None:
    """Its result has no columns to be named."""

    def total(x: Tensor) -> Tensor:
        return x.tanh().square().sum()

    x = structured((2, 8, 40, 40))
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(total, x, budget=1)
    plan = pc.tile_plan(total, x, budget=refused.value.least)
    assert plan.sweeps[0].bands > 1 and "one after the other; what they share" in str(plan)
    torch.testing.assert_close(pc.tile(total, x, budget=refused.value.least), total(x), rtol=1e-9, atol=0)
