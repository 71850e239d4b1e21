"""Mistakes found in memsave_torch, each as a test of this package."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import patchconv_native as pc


class Holder:
    """What a pack hook gives to a node: as long as it lives, the node keeps the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    own = {t.data_ptr() for t in (*module.parameters(), *module.buffers())}
    holders: list[weakref.ref[Holder]] = []

    def pack(t: Tensor) -> Holder:
        holder = Holder(t)
        holders.append(weakref.ref(holder))
        return holder

    with saved_tensors_hooks(pack, lambda holder: holder.tensor):
        y = module(x)
    alive = [holder.tensor.untyped_storage() for ref in holders if (holder := ref()) is not None]
    assert y.requires_grad
    return sum({s.data_ptr(): s.nbytes() for s in alive if s.data_ptr() not in own}.values())


def test_dropout_runs():
    y = pc.convert(nn.Dropout(0.5))(torch.ones(100, requires_grad=True))
    y.sum().backward()


def test_max_pool_takes_its_arguments_in_order():
    x = torch.randn(1, 2, 12, 12)
    for options in ({"stride": 1, "padding": 1, "dilation": 2}, {"stride": 3, "padding": 0, "dilation": 1}):
        assert torch.equal(pc.convert(nn.MaxPool2d(3, **options))(x.requires_grad_()), nn.MaxPool2d(3, **options)(x))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_mode_is_obeyed(mode):
    stock = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode)
    x = torch.randn(1, 3, 8, 8, requires_grad=True)
    want = stock(x)
    torch.testing.assert_close(pc.convert(stock)(x), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_frozen_layers_in_other_dtypes(dtype):
    model = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)).to(dtype).requires_grad_(False)
    )
    x = torch.randn(2, 3, 8, 8, dtype=dtype, requires_grad=True)
    y = pc.convert(model)(x)
    assert y.dtype == dtype
    y.sum().backward()


def test_autocast_gives_the_low_precision():
    model = pc.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(2, 3, 8, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "affine,momentum,track", list(itertools.product([True, False], [0.1, None], [True, False])), ids=str
)
def test_batch_norm_with_every_option(affine, momentum, track):
    make = lambda: nn.BatchNorm2d(4, affine=affine, momentum=momentum, track_running_stats=track)  # noqa: E731
    stock, ours = make(), pc.convert(make())
    for training in (True, True, False):
        x = torch.randn(3, 4, 5, 5, requires_grad=True)
        y, z = stock.train(training)(x), ours.train(training)(x)
        torch.testing.assert_close(z, y)
        torch.testing.assert_close(torch.autograd.grad(z.square().sum(), x), torch.autograd.grad(y.square().sum(), x))
    torch.testing.assert_close(ours.state_dict(), stock.state_dict())
    assert not track or ours.num_batches_tracked == 2


def test_relu_of_minus_infinity_is_zero():
    x = torch.tensor([-float("inf"), 1.0, float("inf")], requires_grad=True)
    y = pc.convert(nn.ReLU())(x)
    (grad,) = torch.autograd.grad(y, x, torch.tensor([float("inf"), 1.0, 2.0]))
    assert y.tolist() == [0.0, 1.0, float("inf")] and grad.tolist() == [0.0, 1.0, 2.0]


def test_inplace_is_obeyed():
    x = torch.randn(8, requires_grad=True) * 1
    assert pc.convert(nn.ReLU(inplace=True))(x) is x


def test_masks_are_seen_by_hooks():
    packed: list[Tensor] = []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        pc.convert(nn.ReLU())(torch.randn(64, requires_grad=True))
    assert [(t.dtype, t.numel()) for t in packed] == [(torch.uint8, 8)]


def test_hooks_on_modules_stay():
    seen: list[str] = []
    layer = nn.ReLU()
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    pc.convert(layer)(torch.randn(3))
    assert seen == ["forward"]


def test_no_zeros_in_place_of_what_was_not_saved():
    """Frozen weights: the input is gone, and backward makes nothing of its size but the gradient."""
    model = pc.convert(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)))
    model.requires_grad_(False)
    x = torch.randn(1, 8, 64, 64, requires_grad=True)
    made: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "zeros" in str(func):
                made.append(out.nbytes)
            return out

    y = model(x)
    with Watch():
        y.sum().backward()
    assert not [n for n in made if n >= x.nbytes]


def test_a_mask_never_adds_memory():
    """conv -> ReLU -> conv: the next layer keeps the ReLU's output anyway, which then serves the ReLU too."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3))
    x = torch.randn(2, 3, 16, 16)
    stock = kept_bytes(model, x)
    assert kept_bytes(pc.convert(model), x) == stock
