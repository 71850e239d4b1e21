"""Windows as columns and back: unfold and fold of an image in strips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from test_tile_gradients import assert_alike
from test_tile_training import conv, stepped
from torch import Tensor, nn

import patchconv_native as pc

WINDOWS: dict[str, dict[str, Any]] = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "strides": {"kernel_size": (2, 3), "dilation": (2, 1), "padding": (1, 0), "stride": (2, 1)},
    "patches": {"kernel_size": 4, "stride": 4},
    "gaps": {"kernel_size": 2, "stride": 3},
    "gaps and padding": {"kernel_size": (1, 2), "padding": (1, 2), "stride": (2, 5)},
    "a column": {"kernel_size": (5, 1), "padding": (2, 0)},
    "dilation": {"kernel_size": 3, "dilation": 2, "padding": 2, "stride": 2},
}


@pytest.mark.parametrize("tile", [1, 5, (7, 5)])
@pytest.mark.parametrize(("size", "batch"), [((23, 19), 1), ((16, 31), 3)])
@pytest.mark.parametrize("name", WINDOWS)
def test_results_and_gradients_equal_stock(name: str, size: tuple[int, int], batch: int, tile: Any) -> None:
    torch.manual_seed(0)
    net, how = conv(3, 4).double(), WINDOWS[name]
    x = structured((batch, 3, *size))

    def columns(x: Tensor) -> Tensor:
        return F.unfold(net(x), **how).tanh()

    def image(x: Tensor) -> Tensor:
        return F.fold(columns(x) * 2, size, **how).sigmoid()

    for function in (columns, image):
        plan = pc.tile_plan(function, x, tile=tile)
        assert any(plan.kinds.gathers) == isinstance(tile, tuple)  # with columns cut, windows in a row lie apart
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        want, got = function(a), pc.tile(function, b, tile=tile)
        want.square().sum().backward()
        got.square().sum().backward()
        assert_alike([got, b.grad], [want, a.grad])


class Kernels(nn.Module):
    """Predicts a kernel for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 9))

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        windows = F.unfold(x, 3, padding=1).view(n, c, 9, h, w)
        return (windows * self.net(x).softmax(1)[:, None]).sum(2)


@pytest.mark.parametrize(("graded", "batch"), [(False, 1), (True, 1), (True, 2)])
def test_networks_of_windows_are_cut(graded: bool, batch: int) -> None:
    torch.manual_seed(0)
    net, x = Kernels(), structured((batch, 3, 96, 132)).float().requires_grad_(graded)
    columns = 27 * math.prod(x.shape[2:]) * 4
    with torch.set_grad_enabled(graded):
        with pytest.raises(pc.BudgetError) as refused:
            pc.tile_plan(net.train(graded), x, budget=1)
        least = refused.value.least
        assert least < columns  # bytes
        if graded:
            peak, _ = stepped(net, x, lambda x: pc.tile(net, x, budget=least))
            assert peak <= least
        else:
            torch.testing.assert_close(pc.tile(net, x, budget=least), net(x))


@pytest.mark.parametrize("how", [{"budget": "300KiB"}, {"dim": 0}, {"dim": 0, "tile": 1}], ids=str)
def test_a_batch_is_cut(how: dict[str, Any]) -> None:
    x = structured((2, 3, 96, 80)).float()

    def net(x: Tensor) -> Tensor:
        return F.fold(F.unfold(x.sin(), 3, padding=1) * 2, x.shape[2:], 3, padding=1)

    torch.testing.assert_close(pc.tile(net, x, **how), net(x))


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(RuntimeError):
        pc.tile(lambda x: F.unfold(x, 9), torch.zeros(1, 3, 8, 20), tile=2)
    with pytest.raises(RuntimeError):
        pc.tile(lambda x: F.fold(F.unfold(x, 3), (8, 21), 3), torch.zeros(1, 3, 8, 20), tile=2)
