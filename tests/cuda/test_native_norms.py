"""Norms with and without their activation, and residual sums with ReLU, against float64.

Outputs, gradients and running statistics. Exact values are stock PyTorch's in float64 on the CPU, fed with the rounded
tensors that the device gets. An error may be 1.1 times stock's largest on the same input and device, plus one rounding
of the result's largest number. One value per channel, and the input's gradient, may have two roundings, since they
depend on values that are rounded to float32 first, such as the deviation; instance norm's, whose statistics are of one
image each, may have twice as much in all. The terms of a sum over a channel cancel: its rounding is taken of the root
of the sum of their squares. Where a ReLU's input is zero but for rounding, two right answers differ in the whole
gradient. So exact gradients use the mask of the output that is tested, and the test of the output shows that this mask
is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.checks import UNIT
from support.native import DTYPES, Mistaken, contents, laid_out, large, native, some
from support.pairs import pairwise
from torch import Tensor

import patchconv_native as pc

ops, lf = torch.ops.patchconv, pc.functional
EPS, MOMENTUM = 1e-5, 0.3


@dataclass
class Given:
    """What a norm is given. Any of it may want a gradient."""

    x: Tensor
    other: Tensor  # a sum's second term
    weight: Tensor
    bias: Tensor
    mean: Tensor  # running, as var
    var: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Given:
        return Given(*(change(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class Norm:
    """An operator of ours, and stock's without the activation."""

    ours: Callable[[Given], Tensor]
    stock: Callable[[Given], Tensor]
    activation: str = "none"
    wanted: tuple[str, ...] = ("x", "weight", "bias")  # gradients
    moves: bool = False  # the running statistics
    same_type: bool = False  # stock's parameters must have the input's type
    least_dims: int = 2

    def activated(self, z: Tensor) -> Tensor:
        return {"none": lambda z: z, "relu": F.relu, "silu": F.silu}[self.activation](z)


def groups_of(x: Tensor) -> int:
    return next(groups for groups in (4, 3, 2, 1) if x.shape[1] % groups == 0)


def _batch(function: Callable[..., Tensor], training: bool) -> Callable[[Given], Tensor]:
    return lambda g: function(g.x, g.mean, g.var, g.weight, g.bias, training, MOMENTUM, EPS)


def _group(function: Callable[..., Tensor]) -> Callable[[Given], Tensor]:
    return lambda g: function(g.x, groups_of(g.x), g.weight, g.bias, EPS)


_group_norm = Norm(_group(lf.group_norm), _group(F.group_norm), same_type=True, least_dims=3)
_constants = Norm(_batch(lf.batch_norm, False), _batch(F.batch_norm, False))
_constants_relu = replace(_constants, ours=_batch(lf.batch_norm_relu, False), activation="relu")
NORMS: dict[str, Norm] = {
    "batch_norm": Norm(_batch(lf.batch_norm, True), _batch(F.batch_norm, True), moves=True),
    "batch_norm_relu": Norm(_batch(lf.batch_norm_relu, True), _batch(F.batch_norm, True), "relu", moves=True),
    "batch_norm eval": _constants,
    "batch_norm_relu eval": _constants_relu,
    "batch_norm eval frozen": replace(_constants, wanted=("x", "bias")),
    "batch_norm_relu eval frozen": replace(_constants_relu, wanted=("x", "bias")),
    "group_norm": _group_norm,
    "group_norm_silu": replace(_group_norm, ours=_group(lf.group_norm_silu), activation="silu"),
    "group_norm of channels": replace(
        _group_norm,
        ours=lambda g: lf.group_norm(g.x, g.x.shape[1], g.weight, g.bias, EPS),
        stock=lambda g: F.group_norm(g.x, g.x.shape[1], g.weight, g.bias, EPS),
    ),
    "instance_norm": Norm(_batch(lf.instance_norm, True), _batch(F.instance_norm, True), moves=True, least_dims=3),
    "add_relu": Norm(lambda g: lf.add_relu(g.x, g.other), lambda g: g.x + g.other, "relu", ("x", "other")),
}

CONTENTS = ("noise", "far", "ramp", "steps")
# Shape, elements by which it begins off an aligned address, channels_last: odd and even planes, one image, one channel,
# planes and pixels of several blocks, no planes at all.
Form = tuple[tuple[int, ...], int, bool]
FORMS: list[Form] = [
    ((2, 3, 7, 7), 0, False), ((2, 3, 7, 7), 0, True), ((1, 1, 7, 7), 0, False), ((3, 1, 7, 5), 1, True),
    ((1, 8, 67, 65), 1, False), ((2, 40, 33, 31), 0, True), ((3, 130, 6, 6), 1, True), ((5, 12, 9), 1, False),
    ((2, 64, 32, 32), 0, False), ((2, 6, 5, 6, 7), 0, True), ((37, 5), 0, False),
]  # fmt: skip
LARGE_PLANE = FORMS[4]


def filled(shape: tuple[int, ...], content: str, generator: torch.Generator) -> Tensor:
    """ "far": a mean of 100 deviations, another one in each channel."""
    if content != "far":
        return contents(shape, content, generator)
    sign = torch.arange(shape[1]).view(-1, *[1] * (len(shape) - 2)) % 2 * 2 - 1
    return torch.randn(shape, generator=generator) + 100 * sign


def given(norm: Norm, dtype: torch.dtype, content: str, shape: tuple[int, ...]) -> Given:
    """On the CPU, in the types that the device gets."""
    generator = torch.Generator().manual_seed(29)
    x = filled(shape, content, generator)
    draw = partial(torch.randn, shape[1], generator=generator)
    over = [d for d in range(x.dim()) if d != 1]
    # Running statistics near the input's own, as they are in a network.
    mean, var = x.mean(over) + draw() / 4, x.var(over, correction=0) * (1 + draw().abs()) + 0.1
    weight, bias = (t.to(dtype if norm.same_type else torch.float32) for t in (1 + draw() / 2, draw()))
    return Given(x.to(dtype), torch.randn(shape, generator=generator).to(dtype), weight, bias, mean, var)


def outcome(norm: Norm, call: Callable[[Given], Tensor], there: Given, grad: Tensor) -> dict[str, Tensor]:
    """All that a norm gives."""
    leaves = there.map(lambda t: t.detach())
    wanted = [getattr(leaves, name).requires_grad_() for name in norm.wanted]
    leaves.mean, leaves.var = leaves.mean.clone(), leaves.var.clone()
    y = call(leaves)
    grads = torch.autograd.grad(y, wanted, grad.to(y.dtype))
    results = {"output": y.detach(), **{f"gradient of {n}": g for n, g in zip(norm.wanted, grads, strict=True)}}
    return results | {"running mean": leaves.mean, "running variance": leaves.var}


def exact(norm: Norm, here: Given, grad: Tensor, output: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """In float64, behind the mask of this output; and the size of each result, that its one rounding is of."""
    double = here.map(Tensor.double)
    with torch.no_grad():
        z = norm.stock(double.map(Tensor.clone))
    if norm.activation == "silu":
        z.requires_grad_()
        (grad,) = torch.autograd.grad(F.silu(z), z, grad.double())
        z = z.detach()
    else:
        grad = grad.double() * (output.cpu() > 0) if norm.activation == "relu" else grad.double()
    found = outcome(norm, norm.stock, double, grad)
    found["output"] = norm.activated(found["output"])
    sizes = {part: float(values.abs().max()) for part, values in found.items()}
    shape = [1, -1] + [1] * (z.dim() - 2)
    over = [d for d in range(z.dim()) if d != 1]
    terms = {"bias": grad, "weight": grad * (z - double.bias.view(shape)) / double.weight.view(shape)}
    for name in set(terms) & set(norm.wanted):
        part = f"gradient of {name}"
        sizes[part] = max(sizes[part], float(terms[name].square().sum(over).sqrt().max()))
    return found, sizes


def check(norm: Norm, dtype: torch.dtype, content: str, form: Form, device: str = "cpu") -> None:
    shape, *place = form
    here = given(norm, dtype, content, shape)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(31)).to(dtype)
    there = here.map(lambda t: laid_out(t, *place, device) if t.dim() > 1 else t.to(device))
    there_grad = laid_out(grad, *place, device)
    with native(device):
        ours = outcome(norm, norm.ours, there, there_grad)
    stock = outcome(norm, lambda g: norm.activated(norm.stock(g)), there, there_grad)
    (wanted, sizes), (theirs, _) = (exact(norm, here, grad, side["output"]) for side in (ours, stock))
    for part, got in ours.items():
        came = f"{part}: {got.dtype} {tuple(got.shape)}"
        assert (got.dtype, got.shape) == (stock[part].dtype, stock[part].shape), came
        if part.startswith("running") and not norm.moves:
            assert torch.equal(got, there.mean if part.endswith("mean") else there.var), f"{part}: it was moved"
            continue
        stocks = float((stock[part].cpu().double() - theirs[part]).abs().max())
        roundings = 2 if got.dim() == 1 or part == "gradient of x" else 1
        bound = 1.1 * stocks + roundings * UNIT[got.dtype] * sizes[part]
        bound *= 2 if got.dim() == 1 and norm.moves and norm.least_dims == 3 else 1  # instance norm
        bound += 2.0**-25 if got.dtype == torch.float16 else 1e-300  # half a step between denormal numbers
        error = (got.cpu().double() - wanted[part]).abs().nan_to_num(float("inf")).max()
        assert error <= bound, f"{part}: error {float(error / bound):.3g} times its bound"


@pairwise(
    lambda name, form, **_: len(FORMS[form][0]) >= NORMS[name].least_dims,
    name=list(NORMS), dtype=list(DTYPES), content=CONTENTS, form=some(range(len(FORMS))),
)  # fmt: skip
def test_as_exact_as_stock(device: str, name: str, dtype: str, content: str, form: int) -> None:
    check(NORMS[name], DTYPES[dtype], content, FORMS[form], device)


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes are noticed


def statistics(g: Given) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(g.x, [0, 2, 3], correction=0)
    return mean, var


def mapped(g: Given, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(g.x, mean.to(g.mean.dtype), var.to(g.var.dtype), g.weight, g.bias, False, 0, EPS)


def moved(g: Given, momentum: float) -> None:
    count = g.x.numel() / g.x.shape[1]
    mean, var = (t.detach() for t in statistics(g))
    g.mean.lerp_(mean.to(g.mean.dtype), momentum)
    g.var.lerp_((var * count / (count - 1)).to(g.var.dtype), momentum)


def unbiased(g: Given) -> Tensor:
    """Normalised by the variance that the running one is moved by."""
    moved(g, MOMENTUM)
    count = g.x.numel() / g.x.shape[1]
    return lf.batch_norm(g.x, None, None, g.weight * ((count - 1) / count) ** 0.5, g.bias, True, 0.0, EPS)


def constant_statistics(g: Given) -> Tensor:
    """A gradient that does not go through the statistics."""
    mean, var = (t.detach() for t in statistics(g))
    y = lf.batch_norm(g.x, g.mean, g.var, g.weight, g.bias, True, MOMENTUM, EPS)
    z = mapped(g, mean, var)
    return y.detach() + (z - z.detach())  # the values are right to the bit


def of_squares(g: Given) -> Tensor:
    """The variance as the difference of two large numbers, in float32."""
    moved(g, MOMENTUM)
    x = g.x.detach().float()
    mean = x.mean([0, 2, 3])
    var = x.square().mean([0, 2, 3]) - mean.square()
    return mapped(g, mean, var.clamp(min=0))


def other_momentum(g: Given) -> Tensor:
    return lf.batch_norm(g.x, g.mean, g.var, g.weight, g.bias, True, MOMENTUM + 1e-5, EPS)


def shifted_mask(g: Given) -> Tensor:
    """Bits read one element too far."""
    z = lf.batch_norm(g.x, g.mean, g.var, g.weight, g.bias, True, MOMENTUM, EPS)
    kept = z * (z.flatten().roll(1).view_as(z) > 0)
    return F.relu(z).detach() + kept - kept.detach()


def coarse_silu(g: Given) -> Tensor:
    """A sigmoid of 12 bits."""
    z = lf.group_norm(g.x, groups_of(g.x), g.weight, g.bias, EPS)
    return z * (torch.sigmoid(z) * 4096).round().div(4096).detach() + (y := F.silu(z)) - y.detach() - z + z.detach()


MISTAKES: dict[str, tuple[str, torch.dtype, str, Callable[[Given], Tensor], str]] = {
    "unbiased variance": ("batch_norm", torch.float32, "noise", unbiased, "output"),
    "statistics taken for constants": ("batch_norm", torch.float32, "noise", constant_statistics, "gradient of x"),
    "variance from squares": ("batch_norm", torch.float32, "far", of_squares, "output"),
    "momentum": ("batch_norm", torch.float32, "ramp", other_momentum, "running"),
    "eps": ("batch_norm eval", torch.float32, "noise",
            lambda g: lf.batch_norm(g.x, g.mean, g.var, g.weight, g.bias, False, 0.1, 1.2e-5), "output"),
    "mask shifted": ("batch_norm_relu", torch.bfloat16, "steps", shifted_mask, "gradient of x"),
    "no activation": ("batch_norm_relu", torch.bfloat16, "ramp", NORMS["batch_norm"].ours, "output"),
    "groups, not instances": ("instance_norm", torch.float32, "noise", NORMS["group_norm"].ours, "output"),
    "sigmoid": ("group_norm_silu", torch.float32, "noise", coarse_silu, "output"),
    "gradient of one term": ("add_relu", torch.float32, "noise",
                             lambda g: lf.add_relu(g.x, 2 * g.other - g.other.detach()), "gradient of other"),
    "a rounding too many": ("add_relu", torch.float32, "noise", lambda g: lf.add_relu(g.x * (1 + 2.0**-20), g.other),
                            "output"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    name, dtype, content, wrong, part = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=f"^{part}"):
        check(replace(NORMS[name], ours=wrong), dtype, content, LARGE_PLANE)


def test_statistics_that_are_moved_in_eval_mode() -> None:
    def ours(g: Given) -> Tensor:
        y = NORMS["batch_norm"].stock(g.map(Tensor.clone))  # any result
        g.var.mul_(1 + 2.0**-20)
        return y

    with pytest.raises(AssertionError, match="running variance: it was moved"):
        check(Norm(ours, NORMS["batch_norm"].stock), torch.float32, "noise", LARGE_PLANE)


def test_a_result_in_another_type() -> None:
    norm = replace(NORMS["add_relu"], ours=lambda g: lf.add_relu(g.x, g.other).double())
    with pytest.raises(AssertionError, match=r"output: torch\.float64"):
        check(norm, torch.float32, "noise", LARGE_PLANE)


# ----------------------------------------------------------------------------------------------------------------------
# More than 2^31 elements

PART = 2**23  # pixels that are looked at in float64 at a time


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of (channels, elements) mean and biased variance in float64."""
    parts = [(part.shape[1], *torch.var_mean(part.double(), 1, correction=0)) for part in x.split(PART, 1)]
    mean = torch.stack([count * mean for count, _, mean in parts]).sum(0) / x.shape[1]
    squares = torch.stack([count * (var + (mean_ - mean).square()) for count, var, mean_ in parts])
    return mean, squares.sum(0) / x.shape[1]


def probe(device: str, height: int, width: int, channels: int) -> list[str]:
    """Batch norm with ReLU in training, forward and backward in both layouts, and a sum with ReLU (bfloat16): what is
    wrong at the places that are looked at. The gradient of the output is the input, which saves another tensor.
    """
    flat, places = large(height * width * channels, device, mean=0.5)
    length = places[0].stop
    w, b = torch.linspace(0.5, 2, channels, device=device), torch.linspace(-1, 1, channels, device=device)
    wrong = []
    with native(device), torch.no_grad():
        y, _ = ops._add_mask_forward(flat, flat)
        for part in places:
            if not torch.equal(y[part], (2 * flat[part]).clamp(min=0)):
                wrong.append(f"sum at {part.start}")
        del y
        for last in (False, True):
            x = flat.view(1, height, width, channels).movedim(-1, 1) if last else flat.view(1, channels, height, width)
            rows = x[0].view(channels, -1)
            mean, var = moments(rows)
            m, v = ops._batch_statistics(x, None, None, 0.1)
            y = ops._normalize(x, w, b, m, v, 0, EPS, 1)
            back, *sums = ops._norm_backward(x, x, w, b, m, v, 0, EPS, 1, True, [True] * 3)
            # In float64: what the mask of y lets through, and its sums.
            deviation = (var + EPS).sqrt()[:, None]
            totals = torch.zeros(2, channels, dtype=torch.float64, device=device)
            mine, mine_back = y[0].view(channels, -1), back[0].view(channels, -1)
            for part, out in zip(rows.split(PART, 1), mine.split(PART, 1), strict=True):
                g = part.double() * (out > 0)
                totals += torch.stack([g.sum(1), (g * (part.double() - mean[:, None])).sum(1) / deviation[:, 0]])
            whole, layout = rows.shape[1], "channels_last" if last else "NCHW"
            for got, want in zip((m, v, sums[1], sums[0]), (mean, var, *totals), strict=True):
                if not torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max())):
                    wrong.append(f"sums over channels, {layout}")
            here = sorted({0, whole // 2, max(0, whole - length // 4)})
            for channel, start in itertools.product((0, channels - 1), here):
                place = slice(start, start + length // 4)
                scale, part = w[channel].double(), rows[channel, place].double()
                hat = (part - mean[channel]) / deviation[channel]
                g = part * (mine[channel, place] > 0) - (totals[0, channel] + hat * totals[1, channel]) / whole
                for name, got, want in (
                    ("output", mine, (hat * scale + b[channel].double()).clamp(min=0)),
                    ("gradient", mine_back, g * scale / deviation[channel]),
                ):
                    error = (got[channel, place].double() - want).abs()
                    if not bool((error <= UNIT[torch.bfloat16] * want.abs() + 1e-4).all()):
                        wrong.append(f"{name} of channel {channel} at {start}, {layout}")
            del y, mine, back, mine_back
    return wrong


SMALL = {"height": 130, "width": 72, "channels": 5}


def test_the_probe_of_large_tensors_notices_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe("cpu", **SMALL) == []

    def wrong(operator: str, mistake: Callable[..., object]) -> list[str]:
        monkeypatch.setitem(globals(), "ops", Mistaken(mistake, operator))
        return [text.partition(" at ")[0] for text in probe("cpu", **SMALL)]

    def one_place_wrong(y: Tensor) -> Tensor:
        y[0, -1, -1, -1] += 1  # the last element
        return y

    assert wrong("_add_mask_forward", lambda r: (r[0].roll(1), r[1])) == ["sum"] * 2
    assert "output of channel 4" in wrong("_normalize", one_place_wrong)
    assert wrong("_norm_backward", lambda r: (one_place_wrong(r[0]), *r[1:])) == ["gradient of channel 4"] * 4
    assert "sums over channels, channels_last" in wrong("_batch_statistics", lambda r: (r[0], r[1] * 1.0001))


def test_moments_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PART", 7)
    x = torch.randn(3, 40, dtype=torch.float64) + 5
    mean, var = moments(x)
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(var, x.var(1, correction=0))


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_more_than_two_billion_elements() -> None:
    assert probe("cuda", height=131_072, width=4104, channels=4) == []
