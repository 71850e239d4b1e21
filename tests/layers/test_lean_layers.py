"""Every lean layer against its stock class: values, gradients, state, and what it keeps.

Where both sides call the same arithmetic the results must be the same bits. Batch and instance norm have arithmetic of
their own on the CPU: there the error to float64 must be no larger than stock's times 1.1, or a rounding.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from support.activations import ROWS
from support.copies import saved_and_loaded
from support.counts import saved_bytes
from support.pairs import pairwise
from torch import Tensor, nn

import patchconv_native as pc

IMAGE, LINE, VOLUME = (2, 6, 9, 7), (2, 6, 11), (2, 4, 5, 6, 5)
Case = tuple[type[nn.Module], tuple[Any, ...], dict[str, Any], tuple[int, ...]]

POINTWISE: list[Case] = [
    *((row.layer, given, {"inplace": True} if inplace else {}, shape) for row in ROWS.values()
      for given, shape in zip(row.arguments, itertools.cycle((IMAGE, LINE)))
      for inplace in (False, True)[:1 + row.in_place]),
    (nn.LeakyReLU, (-0.5,), {}, IMAGE),
    (nn.PReLU, (), {}, IMAGE), (nn.PReLU, (6,), {}, IMAGE), (nn.PReLU, (), {}, (5,)),
]  # fmt: skip
POOLS: list[Case] = [
    *((cls, (), options, shape) for cls, shape in ((nn.MaxPool1d, LINE), (nn.MaxPool2d, IMAGE), (nn.MaxPool3d, VOLUME))
      for options in ({"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1},
                      {"kernel_size": 2, "stride": 1, "dilation": 2},
                      {"kernel_size": 3, "stride": 2, "ceil_mode": True})),
    (nn.MaxPool2d, ((3, 2), (1, 2), (1, 0)), {}, IMAGE), (nn.MaxPool2d, (17, 1, 8), {}, (1, 1, 20, 20)),
    (nn.AdaptiveMaxPool1d, (4,), {}, LINE), (nn.AdaptiveMaxPool2d, ((4, None),), {}, IMAGE),
    (nn.AdaptiveMaxPool2d, (1,), {}, (1, 2, 20, 20)), (nn.AdaptiveMaxPool3d, ((2, 3, 4),), {}, VOLUME),
    (nn.AvgPool1d, (3, 2, 1), {}, LINE), (nn.AvgPool2d, (3, 2, 1), {"count_include_pad": False}, IMAGE),
    (nn.AvgPool2d, ((2, 3),), {"ceil_mode": True, "divisor_override": 5}, IMAGE), (nn.AvgPool3d, (2,), {}, VOLUME),
    (nn.AdaptiveAvgPool1d, (4,), {}, LINE), (nn.AdaptiveAvgPool2d, ((4, None),), {}, IMAGE),
    (nn.AdaptiveAvgPool2d, (1,), {}, IMAGE), (nn.AdaptiveAvgPool3d, ((2, 3, 1),), {}, VOLUME),
]  # fmt: skip
RESIZES: list[Case] = [
    *((nn.Upsample, (), {"scale_factor": 2, "mode": mode}, shape) for mode, shape in (
        ("nearest", LINE), ("nearest", IMAGE), ("nearest", VOLUME), ("nearest-exact", LINE), ("nearest-exact", IMAGE),
        ("nearest-exact", VOLUME), ("linear", LINE), ("bilinear", IMAGE), ("bicubic", IMAGE), ("trilinear", VOLUME))),
    (nn.Upsample, ((5, 20),), {"mode": "bilinear", "align_corners": True}, IMAGE),
    (nn.Upsample, (), {"scale_factor": (1.5, 0.7)}, IMAGE), (nn.UpsamplingNearest2d, (4,), {}, IMAGE),
    (nn.UpsamplingBilinear2d, (), {"scale_factor": 1.7}, IMAGE),
    (nn.Upsample, (), {"scale_factor": 1.7, "mode": "bicubic", "recompute_scale_factor": True}, IMAGE),
    *((getattr(nn, f"{kind}Pad{dims}d"), (amounts,), {}, shape) for kind in ("Reflection", "Replication", "Circular",
      "Zero") for dims, amounts, shape in ((1, (3, 1), LINE), (2, (0, 2, 1, 3), IMAGE), (2, 1, IMAGE[1:]),
      (3, (1, 2, 0, 1, 1, 0), VOLUME))),
    (nn.ConstantPad2d, ((1, -2, 0, 3), 0.5), {}, IMAGE), (nn.ConstantPad1d, (2, -1.0), {}, LINE),
    (nn.ConstantPad3d, (1, 2.0), {}, VOLUME),
]  # fmt: skip
SAME_NORMS: list[Case] = [
    (nn.GroupNorm, (3, 6), {}, IMAGE), (nn.GroupNorm, (1, 6), {"affine": False}, LINE),
    (nn.LayerNorm, (7,), {}, IMAGE), (nn.LayerNorm, ((9, 7),), {"elementwise_affine": False}, IMAGE),
    (nn.LayerNorm, (7,), {"bias": False}, IMAGE), (nn.RMSNorm, (7,), {}, IMAGE),
    (nn.LocalResponseNorm, (3,), {}, IMAGE), (nn.Linear, (7, 5), {}, IMAGE),
    (nn.Linear, (7, 5), {"bias": False}, (4, 7)),
    (nn.GLU, (1,), {}, IMAGE), (nn.GLU, (-2,), {}, LINE), (nn.GLU, (), {}, (3, 8)),
]  # fmt: skip
OWN_NORMS: list[Case] = [
    (cls, (shape[1],), options, shape)
    for (cls, shape), options in itertools.product(
        ((nn.BatchNorm1d, LINE), (nn.BatchNorm1d, (5, 6)), (nn.BatchNorm2d, IMAGE), (nn.BatchNorm3d, VOLUME),
         (nn.SyncBatchNorm, IMAGE), (nn.InstanceNorm1d, LINE), (nn.InstanceNorm2d, IMAGE), (nn.InstanceNorm3d, VOLUME)),
        ({}, {"affine": False}, {"momentum": None}, {"track_running_stats": False},
         {"affine": True, "track_running_stats": True, "eps": 1e-3}),
    ) if not (issubclass(cls, nn.modules.instancenorm._InstanceNorm) and options.get("momentum", 0) is None)
]  # fmt: skip


MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)

ADDED_IN_ANY_ORDER = ("MaxPool", "AdaptiveMaxPool", "Reflection", "Replication", "Upsampl")
"""Whose gradients stock adds so on CUDA."""


def name_of(case: Any) -> str:
    if not isinstance(case, tuple):
        return str(case).removeprefix("torch.")
    cls, args, options, shape = case
    words = [cls.__name__, *map(str, args), *(f"{k}={v}" for k, v in options.items()), f"{len(shape)}-D"]
    return " ".join(words)


def pair(case: Case, device: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    cls, args, options, _ = case
    torch.manual_seed(5)
    stock = cls(*args, **options).to(device, dtype)
    for parameter in stock.parameters():
        nn.init.uniform_(parameter, 0.3, 1.5)
    ours = pc.convert(copy.deepcopy(stock))
    assert type(ours) is getattr(pc, cls.__name__)
    return stock, ours


def image(shape: tuple[int, ...], device: str, dtype: torch.dtype, layout: str = "contiguous") -> Tensor:
    """Noise on a gradient, with zeros, ties and values on the activations' limits."""
    torch.manual_seed(9)
    x = torch.randn(shape, dtype=torch.float64) * 2 + torch.linspace(-3, 3, shape[-1], dtype=torch.float64)
    flat = x.flatten()
    special = torch.tensor([0.0, -0.0, 3.0, -3.0, 6.0, 0.1, -1.0, 1.0], dtype=torch.float64)
    flat[: special.numel() * 3 : 3] = special[: flat[: special.numel() * 3 : 3].numel()]
    x = x.to(device, dtype)
    if layout == "channels_last" and len(shape) in (4, 5):
        x = x.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    elif layout == "sliced":
        x = torch.cat([x, x], -1)[..., : shape[-1]]
    elif layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


def forward_backward(module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """[output, gradient of the input, gradients of the parameters, buffers]."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(leaf * 1)  # in-place layers may write to what they are given
    torch.manual_seed(13)
    grad = torch.randn(y.shape, dtype=torch.float64).to(y)
    found = torch.autograd.grad(y, [leaf, *module.parameters()], grad)
    return [y.detach(), *found, *(b.clone() for b in module.buffers())]


@pairwise(
    ids=name_of,
    case=POINTWISE + POOLS + RESIZES + SAME_NORMS,
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    layout=["contiguous", "channels_last", "sliced", "transposed"],
)
def test_the_same_bits_as_stock(device, case, dtype, layout):
    if dtype.itemsize == 2 and case[0] in (nn.AvgPool3d, nn.LocalResponseNorm) and device == "cpu":
        return unserved_by_stock(case, device, dtype)
    stock, ours = pair(case, device, dtype)
    x = image(case[3], device, dtype, layout)
    names = ["output", "grad of input", *(name for name, _ in stock.named_parameters())]
    # Sums in another order than stock's, or, in half precision, in float32 where stock rounds each term.
    sums = case[0] in (nn.Linear, nn.PReLU) or (dtype.itemsize == 2 and case[0] in (nn.RMSNorm, *MAX_POOLS))
    sums |= device == "cuda" and case[0].__name__.startswith(ADDED_IN_ANY_ORDER)
    exact = forward_backward(copy.deepcopy(stock).double(), x.double()) if sums else names
    for name, got, theirs, want in zip(
        names, forward_backward(ours, x), forward_backward(stock, x), exact, strict=True
    ):
        assert got.shape == theirs.shape and got.dtype == theirs.dtype
        if not sums or (name == "output" and case[0] is not nn.Linear):
            assert torch.equal(got, theirs), f"{name}: {(got.double() - theirs.double()).abs().max()}"
        else:
            error, stock_error = ((t.double() - want).abs().max().item() for t in (got, theirs))
            unit = torch.finfo(dtype).eps * want.abs().max().item()
            assert error <= 1.1 * stock_error + 4 * unit, f"{name}: {error:.3e}, stock {stock_error:.3e}"


def unserved_by_stock(case: Case, device: str, dtype: torch.dtype) -> None:
    """Volumes are not averaged in half precision on the CPU: the same error on both sides."""
    for module in pair(case, device, dtype):
        with pytest.raises(RuntimeError, match="not implemented for"):
            forward_backward(module, image(case[3], device, dtype))


@pairwise(
    ids=name_of, case=OWN_NORMS, dtype=[torch.float32, torch.float64, torch.bfloat16],
    layout=["contiguous", "channels_last", "sliced"], mode=["train", "eval"],
)  # fmt: skip
def test_norms_are_as_exact_as_stock(device, case, dtype, layout, mode):
    stock, ours = (module.train(mode == "train") for module in pair(case, device, dtype))
    exact = copy.deepcopy(stock).double()
    x = image(case[3], device, dtype, layout)
    runs = (ours, dtype), (stock, dtype), (exact, torch.float64)
    results = [forward_backward(module, x.to(kind)) for module, kind in runs]
    for got, theirs, want in zip(*results, strict=True):
        assert got.shape == theirs.shape and got.dtype == theirs.dtype
        if not got.is_floating_point():
            assert torch.equal(got, theirs)  # num_batches_tracked
            continue
        error, stock_error = ((t.double() - want.double()).abs().max().item() for t in (got, theirs))
        unit = torch.finfo(dtype).eps * max(want.abs().max().item(), 1.0)
        bound = 1.1 * stock_error + (64 if dtype == torch.float64 else 4) * unit
        assert error <= bound, f"{error:.3e}, stock {stock_error:.3e}"


SPECIAL = [
    float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45, 6.0, 3.0, -3.0, 1.0, -1.0, 0.1, 0.5, -0.5,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize(
    "cls,inplace",
    [(cls, inplace) for cls in (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Hardsigmoid)
     for inplace in (False, True)] + [(nn.Softshrink, False), (nn.Hardshrink, False), (nn.LogSigmoid, False)],
)  # fmt: skip
def test_special_values(device, cls, dtype, inplace):
    # What becomes of NaN in these depends on the element's place: 0 where stock's vectors do it, grad elsewhere.
    by_place = nn.Hardtanh, nn.Softshrink, nn.Hardshrink
    values = SPECIAL[1:] if issubclass(cls, by_place) else SPECIAL
    cls = partial(cls, inplace=True) if inplace else cls
    x = torch.tensor(values * 6, dtype=dtype, device=device)
    for count in (0, 1, 7, 8, 9, 13, 65):
        results = []
        for module in (cls(), pc.convert(cls())):
            leaf = x[:count].clone().requires_grad_()
            y = module(leaf * 1)
            grad = torch.linspace(-2, 2, count, dtype=dtype, device=device)
            results.append((y, *torch.autograd.grad(y, leaf, grad)))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
            numbers = ~ours.isnan()
            assert torch.equal(torch.signbit(ours[numbers]), torch.signbit(theirs[numbers]))


BYTES: list[tuple[Case, float]] = [
    ((nn.ReLU, (), {}, (2, 8, 16, 16)), 1 / 32), ((nn.ReLU6, (), {"inplace": True}, (2, 8, 16, 16)), 1 / 32),
    ((nn.LeakyReLU, (), {}, (2, 8, 16, 16)), 1 / 32), ((nn.Hardsigmoid, (), {}, (2, 8, 16, 16)), 1 / 32),
    ((nn.Threshold, (0.1, 9.0), {}, (2, 8, 16, 16)), 1 / 32), ((nn.Softshrink, (), {}, (2, 8, 16, 16)), 1 / 32),
    ((nn.Hardshrink, (), {}, (2, 8, 16, 16)), 1 / 32), ((nn.LogSigmoid, (), {}, (2, 8, 16, 16)), 1),
    ((nn.SiLU, (), {}, (2, 8, 16, 16)), 1), ((nn.GLU, (1,), {}, (2, 8, 16, 16)), 1),
    ((nn.Sigmoid, (), {}, (2, 8, 16, 16)), 1), ((nn.MaxPool2d, (2,), {}, (2, 8, 16, 16)), 1 / 16),
    ((nn.MaxPool2d, (17, 17, 8), {}, (2, 8, 34, 34)), 2 * 4 / (4 * 34 * 34)),
    ((nn.AvgPool2d, (2,), {}, (2, 8, 16, 16)), 0),
    ((nn.AdaptiveAvgPool2d, (2,), {}, (2, 8, 16, 16)), 0), ((nn.LocalResponseNorm, (3,), {}, (2, 8, 16, 16)), 1),
    ((nn.RMSNorm, (16,), {}, (2, 8, 16, 16)), 1), ((nn.ReflectionPad2d, (3,), {}, (2, 8, 16, 16)), 0),
    ((nn.ReplicationPad2d, (3,), {}, (2, 8, 16, 16)), 0), ((nn.Upsample, (), {"scale_factor": 2}, (2, 8, 16, 16)), 0),
]  # fmt: skip


@pytest.mark.parametrize("case,share", BYTES, ids=name_of)
def test_what_a_layer_keeps(device, case, share):
    """As a share of its input's bytes, to the byte."""
    _, ours = pair(case, device, torch.float32)
    x = image(case[3], device, torch.float32).requires_grad_() * 1
    own = (*ours.parameters(), *ours.buffers())
    assert saved_bytes(lambda: ours(x), own) == pytest.approx(share * x.nbytes, abs=0.5)


@pytest.mark.parametrize("device_type", ["cpu"])
def test_dropout_keeps_its_seed(device_type):
    x = torch.randn(2, 8, 16, 16, requires_grad=True) * 1
    for layer in (nn.Dropout(0.3), nn.Dropout2d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)):
        assert saved_bytes(partial(pc.convert(layer), x)) == 8


@pytest.mark.parametrize(
    "cls,shape",
    [(nn.Dropout, (4000, 25)), (nn.Dropout1d, (400, 250, 3)), (nn.Dropout2d, (400, 250, 2, 2)),
     (nn.Dropout3d, (400, 250, 1, 2, 1)), (nn.AlphaDropout, (4000, 25)), (nn.FeatureAlphaDropout, (400, 250, 2))],
)  # fmt: skip
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout(device, cls, shape, p):
    layer = pc.convert(cls(p))
    x = torch.full(shape, 2.0, device=device, requires_grad=True)
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    assert torch.equal(y, layer(x)), "not reproducible"
    stock = cls(p)(x)
    # The same two values in about the same numbers.
    assert sorted(stock.unique().tolist()) == pytest.approx(sorted(y.unique().tolist()), rel=1e-6)
    kept_value = max(y.unique().tolist(), key=abs) if "Alpha" not in cls.__name__ else y.max().item()
    share = (y == kept_value).float().mean().item() if 0 < p < 1 else 1 - p
    assert share == pytest.approx(1 - p, abs=0.01)
    if 0 < p < 1:
        assert not torch.equal(y, layer(x)), "the same mask twice"
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, slope)
    moved = layer.eval()(x)
    assert moved is x or torch.equal(moved, x)


@pytest.mark.parametrize("cls,shape", [(nn.Dropout1d, (3, 4)), (nn.Dropout2d, (2, 3, 4)), (nn.Dropout3d, (2, 3, 4, 5)),
                                       (nn.Dropout2d, (3, 4)), (nn.Dropout3d, (3, 4))])  # fmt: skip
def test_dropout_of_channels_warns_as_stock_does(cls, shape):
    told = []
    for layer in (cls(), pc.convert(cls())):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            layer(torch.randn(shape))
        told.append([str(one.message) for one in seen])
    assert told[0] == told[1] and bool(told[0]) == (cls is nn.Dropout2d or (shape == (3, 4) and cls is nn.Dropout3d))


def test_dropout_in_place(device):
    x = torch.ones(1000, device=device, requires_grad=True) * 1
    y = pc.convert(nn.Dropout(0.5, inplace=True))(x)
    assert y is x and set(y.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.in_place], ids=lambda row: row.layer.__name__)
def test_in_place_is_in_place(device, row):
    cls = partial(row.layer, *row.arguments[0])
    x = torch.randn(3, 4, 5, device=device, requires_grad=True) * 1
    version = x._version
    y = pc.convert(cls(inplace=True))(x)
    assert y is x and y._version == version + 1
    with pytest.raises(RuntimeError, match="leaf"):
        pc.convert(cls(inplace=True))(torch.randn(3, device=device, requires_grad=True))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.SiLU])
@pytest.mark.parametrize("options", [{"affine": True}, {}, {"affine": True, "track_running_stats": True}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_in_place_after_an_instance_norm(device, activation, options, training):
    """nnU-Net's block: what works in place on the norm's result saves no more than what does not."""

    def made(inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        first, last = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        layers = first, nn.InstanceNorm2d(6, **options), activation(inplace=inplace), last
        return nn.Sequential(*layers).double().to(device).train(training)

    x, found, kept = torch.randn(IMAGE, dtype=torch.float64, device=device), [], []
    for module in (made(True), pc.convert(made(False)), pc.convert(made(True))):
        image = x.clone().requires_grad_()
        kept.append(saved_bytes(partial(module, image)))
        y = module(image)
        y.square().sum().backward()
        found.append([y, image.grad, *(p.grad for p in module.parameters()), *module.buffers()])
    assert kept[2] == kept[1] < kept[0]
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-10, atol=1e-10)


def test_an_instance_norms_result_may_be_changed(device):
    numbers: dict[str, Any] = {"dtype": torch.float64, "device": device}
    x, w = torch.randn(IMAGE, **numbers, requires_grad=True), torch.randn(4, 6, 3, 3, **numbers)
    grads = []
    for functional in (torch.nn.functional, pc.functional):
        y = functional.instance_norm(x)
        y.mul_(3.0)[:, :2] = 1.0
        grads.append(torch.autograd.grad(functional.conv2d(y, w).square().sum(), x)[0])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("cls,shape", [(nn.BatchNorm2d, (0, 3, 4, 4)), (nn.InstanceNorm2d, (0, 3, 4, 4)),
                                       (nn.BatchNorm1d, (0, 3)), (nn.GroupNorm, (0, 3, 4, 4))])  # fmt: skip
def test_norms_of_an_empty_batch(device, cls, shape):
    stock = cls(*((3, 3) if cls is nn.GroupNorm else (3,))).to(device)
    ours = pc.convert(copy.deepcopy(stock))
    for module in (stock, ours):
        x = torch.randn(shape, device=device, requires_grad=True)
        module(x).sum().backward()
        assert x.grad.shape == shape
    assert all(torch.equal(a, b) for a, b in zip(stock.buffers(), ours.buffers(), strict=True))


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_norms_refuse_parameters_of_another_size(device, norm, name):
    function = getattr(pc.functional, norm)
    given = {"running_mean": torch.zeros(6), "running_var": torch.ones(6)}
    given[name] = torch.ones(2)
    given = {key: value.to(device) for key, value in given.items()}
    with pytest.raises(RuntimeError, match=f"^{norm}: expected {name} to have C = 6 elements, got shape"):
        function(torch.randn(IMAGE, device=device), **given)


def test_batch_norm_needs_statistics_in_eval_mode(device):
    with pytest.raises(ValueError, match=r"^batch_norm: expected running_mean and running_var where training is False"):
        pc.functional.batch_norm(torch.randn(IMAGE, device=device), None, None)


def test_a_bias_may_be_edited_before_backward(device):
    layer = pc.BatchNorm2d(6).to(device).eval()
    layer.weight.requires_grad_(False)
    y = layer(torch.randn(IMAGE, device=device))
    with torch.no_grad():
        layer.bias += 1
    y.sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((6,), 2.0 * 9 * 7, device=device))


def frozen_norm() -> nn.Module:
    return nn.BatchNorm2d(IMAGE[1]).eval().requires_grad_(False)


@pytest.mark.parametrize("cls", [nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.Hardsigmoid, lambda: nn.MaxPool2d(2),
                                 lambda: nn.ReflectionPad2d(1), lambda: nn.ReplicationPad2d(1),
                                 frozen_norm])  # fmt: skip
def test_flat_slopes_have_a_second_derivative(device, cls):
    x = torch.randn(IMAGE, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(pc.convert(cls())(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_batch_norm_of_one_value_is_an_error(device):
    with pytest.raises(ValueError, match="batch_norm: expected more than 1 value per channel when training, got input"):
        pc.convert(nn.BatchNorm1d(3))(torch.randn(1, 3, requires_grad=True))


@pytest.mark.parametrize("eps", [0.0, -1.0])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_with_an_eps_that_is_not_positive(device, training, eps):
    """As in stock: refused, or computed with."""
    x = torch.randn(4, 3, 5, 5, device=device)
    found: list[Any] = []
    for functional in (torch.nn.functional, pc.functional):
        buffers = [torch.zeros(3, device=device), torch.ones(3, device=device)]
        try:
            found.append(functional.batch_norm(x, *buffers, training=training, eps=eps))
        except ValueError as error:
            found.append(str(error))
    assert type(found[0]) is type(found[1])
    if isinstance(found[0], str):
        assert found[0] == found[1]
        with pytest.raises(ValueError, match=re.escape(found[0])):
            pc.functional.batch_norm_relu(x, *buffers, training=training, eps=eps)
        with pytest.raises(ValueError, match=re.escape(found[0])):
            pc.convert(nn.BatchNorm2d(3, eps=eps).to(device).train(training))(x)
    else:
        torch.testing.assert_close(found[1], found[0], equal_nan=True)


def test_num_batches_tracked_moves_and_state_dicts_fit(device):
    stock, ours = nn.BatchNorm2d(4), pc.BatchNorm2d(4)
    for _ in range(3):
        x = torch.randn(2, 4, 3, 3)
        stock(x), ours(x)
    assert ours.num_batches_tracked == 3
    torch.testing.assert_close(ours.state_dict(), stock.state_dict())
    ours.load_state_dict(stock.state_dict())


@pytest.mark.parametrize("cls", sorted(pc.layers.LAYERS, key=lambda c: c.__name__), ids=lambda c: c.__name__)
def test_every_layer_converts_copies_pickles_and_reverts(cls):
    arguments: dict[type, tuple[Any, ...]] = {nn.GroupNorm: (2, 4), nn.Linear: (4, 4), nn.Threshold: (0.1, 0.0)}
    arguments |= {nn.ConstantPad1d: (2, 1.0), nn.ConstantPad2d: (2, 1.0), nn.ConstantPad3d: (2, 1.0)}
    parts = ("Pool", "Pad", "Upsampl", "LayerNorm", "RMSNorm", "LocalResponseNorm")
    simple = any(part in cls.__name__ for part in parts)
    numbered = "BatchNorm" in cls.__name__ or "InstanceNorm" in cls.__name__
    args = arguments.get(cls, (2,) if simple else (4,) if numbered else ())
    module = cls(*args)
    before = module.state_dict().keys()
    assert pc.convert(module) is module and type(module) is getattr(pc, cls.__name__) and isinstance(module, cls)
    assert module.state_dict().keys() == before
    assert repr(module) == repr(cls(*args))
    assert type(copy.deepcopy(module)) is type(saved_and_loaded(module)) is type(module)
    assert type(pc.revert(module)) is cls
