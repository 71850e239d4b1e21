"""`tile` along the batch: the numbers of one call, batch norms over the whole batch, and budgets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.modules import of_torchvision
from support.pairs import FULL
from support.rule_cases import CALLS, GLOBAL, SHAPES, Apply
from support.spatial_chains import structured
from test_tile_gradients import assert_alike
from torch import Tensor, nn

import patchconv_native as pc
from bench.whole_models import UNet
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles.kept import plans_of
from patchconv_native.tiles.stores import Store

BATCH = 3
UNSERVED = {"instance norm, 1-d", "instance norm, 2-d", "instance norm, 3-d"}
"""Their running statistics are means over the batch."""
CASES = {name: one for name, one in CALLS.items() if name != "volume without a batch"}
CASES |= {name: (make, int(name[-2])) for name, make in GLOBAL.items()}


def compare(net: nn.Module, images: Sequence[Tensor], within: float = 1e-9, **how: Any) -> None:
    """Results, gradients and buffers of one call and of tiles along the batch."""
    torch.manual_seed(0)
    ours, found = copy.deepcopy(net), []
    for model, call in ((net, net), (ours, lambda *x: pc.tile(ours, x, dim=0, **how))):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in images]
        torch.manual_seed(1)
        result = call(*given)
        (result * torch.linspace(0.5, 2, result.numel(), dtype=result.dtype).view(result.shape)).sum().backward()
        grads = [p.grad for p in (*model.parameters(), *given)]
        found.append([result.detach(), *(g for g in grads if g is not None), *model.buffers()])
    assert_alike(*found, within=within)


@pytest.mark.parametrize("name", CASES)
def test_a_rule(name: str) -> None:
    make, dims = CASES[name]
    torch.manual_seed(3)
    net, x = make().double(), structured((BATCH, *SHAPES[dims]))
    assert any(pc.tile_plan(net, x, tile=1, dim=0).kinds.gathers) == (name in UNSERVED)
    compare(net, [x], tile=1)


class Sampled(nn.Module):
    """Dropout of elements and of channels, in training."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout2d(F.dropout(x, 0.3), 0.4)


def test_masks_do_not_depend_on_tiles() -> None:
    x, found = structured((5, 4, 6, 7)), []
    for how in ({"dim": 0, "tile": 1}, {"dim": 0, "tile": 3}, {"dim": 0, "tile": (2, 4, 3)}):
        torch.manual_seed(5)
        found.append(pc.tile(Sampled(), x, **how))
    assert (found[0] == 0).any() and torch.equal(found[0], found[1])
    assert found[2].shape == x.shape


def loss(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(net(x), target, label_smoothing=0.1)


class ToLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return loss(self.net, x, target)


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10),
        nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 4),
    )  # fmt: skip


@pytest.mark.parametrize("tile", [1, 2, 5])
def test_a_classifier_to_its_loss(tile: int) -> None:
    """Labels of samples, and norms whose statistics are those of the batch."""
    x, target = structured((5, 3, 16, 15)), torch.tensor([0, 3, 1, 1, 2])
    compare(ToLoss(classifier()).double(), [x, target], tile=tile)


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: of_torchvision("resnet18"), "unet": lambda: UNet((4, 8, 16)),
    "swin": lambda: of_torchvision("swin_t").eval(),
    "mobilenet": lambda: of_torchvision("mobilenet_v3_small").eval(),
    "converted": lambda: pc.convert(UNet((4, 8, 16))),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_networks(name: str) -> None:
    compare(NETS[name]().double(), [structured((4, 3, 64, 64))], tile=1)


@pytest.mark.parametrize("shape", [(16, 3, 40, 36), (6, 3, 40, 36)][: 2 if FULL else 1], ids=str)
def test_a_batch_is_cut_to_keep_a_budget(shape: tuple[int, ...]) -> None:
    """Without being asked to, and with its images."""
    torch.manual_seed(0)
    net, x = UNet((4, 8)), structured(shape).float().requires_grad_()
    stock = copy.deepcopy(net)
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1)
    least = refused.value.least
    assert 0 in [next(iter(axis.dims.values())) for axis in refused.value.plan.kinds.axes]
    y = x.detach().clone().requires_grad_()
    want = stock(y)
    want.sum().backward()
    for budget in (least, 2 * least):  # of the larger one, stored values are read sample by sample
        model, x = copy.deepcopy(net), x.detach().requires_grad_()
        found: list[Tensor] = []

        def step(budget: int = budget, model: nn.Module = model, x: Tensor = x, found: list[Tensor] = found) -> None:
            found.append(pc.tile(model, x, budget=budget))
            found[0].sum().backward()

        peak, kept = allocated_peak(step), [*model.parameters(), x]
        assert peak - found[0].nbytes - sum(one.grad.nbytes for one in kept if one.grad is not None) <= budget
        torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-5)
        assert_alike([p.grad for p in kept], [p.grad for p in (*stock.parameters(), y)], within=1e-3)
        for a, b in zip(model.buffers(), stock.buffers(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("where", ["device", "cpu", "files"])
def test_samples_of_stored_values_are_read_alone(where: str, tmp_path: Path) -> None:
    """Not with what lies beside them."""
    x, found = torch.randn(8, 64, 24, 5), []
    with Store(str(tmp_path) if where == "files" else where) as store:
        rows = store.rows("x", 2, x, x.device)
        for low in range(0, 24, 3):
            rows.add(x[:, :, low : low + 3].clone())
        peak = allocated_peak(lambda: found.append(rows.read(1, 23, lambda one: one[1:2])))
    assert torch.equal(found[0], x[1:2, :, 1:23])
    assert peak < x.nbytes / 3


@torch.no_grad()
def test_images_with_norms_of_their_own_are_taken_some_at_a_time() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))
    x = structured((12, 3, 9, 8)).float()
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(net, x, budget=1)
    alone = pc.tile_plan(net, x[:1], budget=10**9)
    assert refused.value.least <= 2 * alone.needs
    torch.testing.assert_close(pc.tile(net, x, budget=refused.value.least), net(x))


@pytest.mark.parametrize("dim", [2, 0])
def test_statistics_of_whole_values_move_once(dim: int) -> None:
    """The backward pass calls these norms again."""
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(8)
    for more in (head, [nn.InstanceNorm2d(8, track_running_stats=True)]):
        net = nn.Sequential(nn.Conv2d(3, 8, 3), *more).double()
        tiled, x = copy.deepcopy(net), structured((5, 3, 16, 15))
        for call in (net, lambda x, tiled=tiled: pc.tile(tiled, x, tile=4, dim=dim)):
            for _ in range(2):
                call(x).square().sum().backward()
        assert_alike(list(tiled.buffers()), list(net.buffers()))


def test_modules_take_the_batch_too() -> None:
    net, x = classifier(), structured((5, 3, 16, 15)).float()
    tiled = pc.tile_modules(copy.deepcopy(net), "", budget="20KiB", dim=0)
    torch.testing.assert_close(tiled(x), net(x))
    assert plans_of(tiled, 20 * 1024)[0].kinds.dims[0] == 0


def test_an_unbatched_image_is_not_taken_for_a_batch() -> None:
    net, x = nn.Sequential(nn.Conv2d(4, 2, 3)).double(), structured((4, 9, 8))
    assert any(pc.tile_plan(net, x, dim=0, tile=1).kinds.gathers)
    compare(net, [x], tile=1)
    assert not any(pc.tile_plan(Apply(torch.tanh), x, dim=0, tile=1).kinds.gathers)
