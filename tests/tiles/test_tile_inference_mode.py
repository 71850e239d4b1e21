"""`tile` under torch.inference_mode: its tensors are no ones that autograd knows."""

from __future__ import annotations

import copy

import pytest
import torch
from support.rule_cases import CALLS, GLOBAL, SHAPES
from support.spatial_chains import structured
from torch import Tensor, nn

import patchconv_native as pc
from bench.whole_models import UNet

CASES = {name: one for name, one in CALLS.items() if name != "volume without a batch"}
CASES |= {name: (make, int(name[-2])) for name, make in GLOBAL.items()}
MADE = ["of a model made outside", "of a model made in it"]


def in_inference_mode(made: str, dims: int) -> list[str]:
    """The rules whose results are not those of one call, or that raise."""
    wrong = []
    for name, (make, of_dims) in CASES.items():
        if of_dims != dims:
            continue
        torch.manual_seed(3)
        with torch.inference_mode(made == MADE[1]):
            net, x = make().double(), structured((2, *SHAPES[dims]))
            ours = copy.deepcopy(net)
        with torch.inference_mode():
            try:
                torch.testing.assert_close(pc.tile(ours, x, tile=3), net(x), rtol=1e-9, atol=1e-9)
                for a, b in zip(net.buffers(), ours.buffers(), strict=True):
                    torch.testing.assert_close(b, a)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                wrong.append(f"{name}: {error}")
    return wrong


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("made", MADE)
def test_rules(made: str, dims: int) -> None:
    assert in_inference_mode(made, dims) == []


class Counts(nn.Module):
    """Norms of torch's in training, and a buffer of its own, that count their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.norm(self.conv(x)).relu_()


@pytest.mark.parametrize("budget", [None, "80KiB"])
@pytest.mark.parametrize("made", MADE)
def test_what_a_module_counts(made: str, budget: str | None) -> None:
    torch.manual_seed(0)
    with torch.inference_mode(made == MADE[1]):
        net = Counts()
    ours, x = copy.deepcopy(net) if made == MADE[0] else net, structured((2, 3, 40, 30)).float()
    with torch.inference_mode(), torch.enable_grad():
        y = pc.tile(ours, x, budget=budget)
        assert not y.requires_grad and ours.calls == ours.norm.num_batches_tracked == 1
        if made == MADE[0]:
            torch.testing.assert_close(y, net(x))
            torch.testing.assert_close(dict(ours.named_buffers()), dict(net.named_buffers()))


@pytest.mark.parametrize("first", ["inference_mode", "no_grad", "gradients"])
def test_a_tiled_model_in_every_mode(first: str) -> None:
    """Its plans are kept from one mode to the next."""
    torch.manual_seed(0)
    net, x = UNet((4, 8)).eval(), structured((1, 3, 64, 64)).float()
    want = net(x).detach()
    ours = pc.tile_modules(net, budget="900KiB")
    modes = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "gradients": torch.enable_grad}
    for mode in (first, *modes):
        with modes[mode]():
            y = ours(x)
        assert y.is_inference() == (mode == "inference_mode") and y.requires_grad == (mode == "gradients")
        torch.testing.assert_close(y.clone(), want, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    assert all(p.grad is not None for p in ours.parameters())
