"""`tile` on functions of torch one by one, against the call on the whole image: what they compute and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.spatial_chains import structured
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import patchconv_native as pc

PLACES = torch.tensor([2, 0])
TABLE = torch.linspace(-1, 1, 30).double().view(10, 3)


def whole_numbers(x: Tensor) -> Tensor:
    return (x.abs() * 3).long().clamp(0, 9)


def masks(x: Tensor) -> Any:
    """A mask is another tensor than its inverse."""
    mask = x > 0
    other = ~mask
    mask &= x < 1
    return torch.where(mask, x, 5.0), torch.where(other, x * 3, 7.0), mask ^ other, mask.logical_not_()


def written(x: Tensor) -> Tensor:
    y = x * 2
    y.sin_().add_(2).log_()
    y.index_add_(1, PLACES, x[:, :2])
    y.index_put_((torch.tensor([1]),), torch.tensor(0.5, dtype=x.dtype))
    return y.scatter_add_(1, whole_numbers(x).clamp(0, 3), x).floor_divide_(0.5)


# Computed by strips.
BY_STRIPS: dict[str, Callable[[Tensor], Any]] = {
    "masks": masks,
    "bits": lambda x: (whole_numbers(x) ^ 3) << 1 | whole_numbers(x).bitwise_xor(1),
    "small numbers": lambda x: ((x * 10).byte(), (x * 10).char()),
    "numbers before": lambda x: 7 // (x.abs() + 1) + 7 % (x.abs() + 1),
    "inverse functions": lambda x: x.asinh() + torch.arctan(x).sinc(),
    "special functions": lambda x: torch.special.expit(x) + torch.special.erf(x),
    "complex numbers": lambda x: torch.complex(x, x + 1).imag + torch.polar(x.abs(), x).real.angle(),
    "leaky at random, evaluated": nn.RReLU(inplace=True).eval(),
    "classes": lambda x: F.one_hot(whole_numbers(x), 10),
    "words": lambda x: F.embedding(whole_numbers(x), TABLE, 0).movedim(-1, 1),
    "alike channels": lambda x: F.cosine_similarity(x, x.roll(1, 1) + 1),
    "alike channels, pair by pair": lambda x: F.cosine_similarity(x[:, None], x[:, :, None] + 1, -3),
    "stacks": lambda x: torch.cat([torch.hstack([x, x]), torch.vstack([x[:1], x[1:]])], 1),
    "as many": lambda x: x.tile(2, 1, 3) + torch.broadcast_to(x[:, :1], x.shape).tile((1, 2, 1, 3)),
    "expanded": lambda x: (x[:, :1].broadcast_to(x.shape), x[:, :1].expand(-1, 3, -1, -1)),
    "moved": lambda x: (x.movedim((1, 2), (-1, 0)), torch.moveaxis(x, 1, -1).swapdims(0, 1) * 2, x.mT + 1),
    "pieces": lambda x: (*x.tensor_split(2, 1), *x.unsafe_chunk(2, 1), *x.split_with_sizes((1, 3), 1)),
    "wrapped around what is left": lambda x: [
        F.pad(x, pad, mode="circular") for pad in ((3, -2, -1, 5), (-4, 1, 2, -3), (-1, -2, -2, -1), (-5, 13, -8, 15))
    ],
    "noise": lambda x: x + torch.randn_like(x) * torch.rand_like(x[:, :1]),
    "noise in place": lambda x: (
        x + x.new_empty(x.size(0), 1, 23, 18).normal_() + torch.empty_like(x).uniform_(2, 3) + (x * 2).random_(0, 9)
    ),
    "divergence of batches": lambda x: F.kl_div(x, x.sigmoid(), reduction="batchmean"),
    "divergence of logarithms": lambda x: F.kl_div(x, x.sin(), reduction="sum", log_target=True),
    "types": lambda x: (x.type(torch.float32), x.type("torch.FloatTensor"), x.to(dtype=torch.int32, copy=True)),
    "types of others": lambda x: (x.to(x.half()), x.to(tensor=x.half(), copy=True), TABLE.float().type_as(x)[0, 0] * x),
    "written in place": lambda x: (x * 2).arctan_().clip_(min=-1).fmin(x).erfinv_().eq_(0.5),
    "clamped to another tensor": lambda x: (x * 2).clamp_(max=torch.linspace(-1, 1, 23 * 18).double().view(23, 18)),
    "named tuples": lambda x: (torch.stack(x.max(1)), torch.cat(x.sort(1))),
    "bytes": lambda x: (whole_numbers(x).byte().any(1), whole_numbers(x).byte().all()),
    "squares beyond half precision": lambda x: ((x * 400).half().norm(dim=2), (x * 400).half().std((2, 3))),
    "a place that is in a tensor": lambda x: x.narrow(2, torch.tensor(1), 5),
    "numbers that are in tensors": lambda x: (
        x * x.new_full((1, 1), TABLE[1, 1].float(), dtype=x.dtype) + torch.full_like(x, TABLE[2, 1]),
        x.clamp(0, TABLE[8, 0]),
        F.pad(x, (1, PLACES[0], 3, PLACES[0] + 1), mode="reflect"),
    ),
    "differences": lambda x: (x.diff(dim=2), torch.diff(x, n=2), (x > 0).diff(dim=2), x.diff(0), x.diff(9, 1)),
    "differences of channels": lambda x: x.diff(dim=1, prepend=x[:, 1:2], append=x[:, :1] * 2),
    "gated halves": lambda x: (F.glu(x, 1), torch._C._nn.glu(x, 1), pc.convert(nn.GLU(1))(x)),
    "turned": lambda x: (x.fliplr(), x.mH, torch.complex(x, x).adjoint().imag),
    "instances": lambda x: torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
}
# Computed of the whole image at once.
AT_ONCE: dict[str, Callable[[Tensor], Any]] = {
    "written": written,
    "scattered": lambda x: torch.zeros(2, 10, 23, 18, dtype=x.dtype).scatter(1, whole_numbers(x), x),
    "alike rows": lambda x: F.cosine_similarity(x, x + 1, 2),
    "differences with more before": lambda x: x.diff(dim=2, prepend=x[:, :, :1]) + x.diff(dim=3, append=x[..., :1]),
    "ranks": lambda x: (x.kthvalue(2, 1)[0], *x.aminmax(dim=1)),
    "counts": lambda x: ((x > 0).count_nonzero(1), torch.bucketize(x, torch.linspace(-1, 1, 9).double())),
    "tensors": lambda x: (torch.tensordot(x, TABLE[:4, :2], ([1], [0])), torch.linalg.norm(x, dim=1)),
    "flat": lambda x: x.ravel() * 2,
    "rows of one image": lambda x: x[0, 0].t(),
    "a truth value": lambda x: x[True] * 2,
    "resized bytes": lambda x: F.interpolate((x * 50).abs().byte(), scale_factor=1.5, mode="bilinear"),
    "complex weights": lambda x: F.conv2d(torch.complex(x, x), torch.ones(3, 4, 3, 3).to(torch.complex128)).abs(),
    "losses": lambda x: (F.soft_margin_loss(x, x.sign()), F.nll_loss(x, whole_numbers(x[:, 0]) % 4)),
}


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("name", BY_STRIPS | AT_ONCE)
@torch.no_grad()
def test_a_function(name: str, dim: int) -> None:
    function, x = (BY_STRIPS | AT_ONCE)[name], structured((2, 4, 23, 18))
    torch.manual_seed(1)
    want = function(x.clone())
    torch.manual_seed(1)
    got = pc.tile(function, x, tile=3, dim=dim)
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    assert pairs
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)
    if name in BY_STRIPS:
        assert "whole" not in str(pc.tile_plan(function, x, tile=3, dim=dim))


def quantile(x: Tensor) -> Tensor:
    return torch.quantile(x, 0.3, dim=1)


def has_shape_of_quantiles() -> bool:
    """Whether torch knows the shape without the numbers: torch 2.11 does not."""
    with FakeTensorMode():
        try:
            quantile(torch.empty(2, 4, 23, 18))
        except RuntimeError:
            return False
    return True


@pytest.mark.parametrize("dim", [2, 3])
@torch.no_grad()
def test_quantiles(dim: int) -> None:
    x = structured((2, 4, 23, 18))
    if has_shape_of_quantiles():
        torch.testing.assert_close(pc.tile(quantile, x, tile=3, dim=dim), quantile(x), rtol=1e-10, atol=1e-10)
    else:
        with pytest.raises(pc.NotServed, match="quantile"):
            pc.tile(quantile, x, tile=3, dim=dim)


@torch.no_grad()
def test_what_is_no_tensor() -> None:
    x = structured((2, 4, 23, 18))
    got = pc.tile(lambda x: (x.shape, x.type(), torch.result_type(x, 1.0), x.is_conj(), x + 1), x, tile=3)
    assert type(got[0]) is torch.Size
    assert got[:4] == (x.shape, "torch.DoubleTensor", torch.float64, False)


@pytest.mark.parametrize("function", [
    lambda x: x.clone().unsqueeze_(1), lambda x: x[:, :1].clone().squeeze_(1), lambda x: x.clone().transpose_(2, 3),
])  # fmt: skip
@torch.no_grad()
def test_another_shape_in_place_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    for shape in ((2, 4, 23, 18), (2, 4, 12, 12)):
        with pytest.raises(
            pc.NotServed, match=r"(squeeze|transpose)_ is not served: it gives a tensor another shape in"
        ):
            pc.tile(function, structured(shape))


@torch.jit.script
def _SCRIPTED(x: Tensor, slope: float) -> Tensor:
    y = F.leaky_relu(x * torch.sigmoid(x), slope).clamp(-1.0, 1.0)
    return F.silu(torch.cat([y.add_(slope), y], dim=1))


def test_functions_of_torchscript() -> None:
    x = structured((2, 4, 23, 18))
    conv = nn.Conv2d(4, 4, 3, padding=1).double()

    def function(x: Tensor) -> Tensor:
        return _SCRIPTED(conv(x), 0.2)

    with torch.no_grad():
        for kind in ({"tile": 3}, {"budget": "1GiB"}):
            torch.testing.assert_close(pc.tile(function, x, **kind), function(x), rtol=1e-10, atol=1e-10)
        plan = pc.tile_plan(function, x, tile=3)
        assert plan.sweeps[0].strips > 4 and not plan.kinds.why
    with pytest.raises(pc.NotServed, match="TorchScript is not served with gradients: give what it was made from"):
        pc.tile(function, x, tile=3)
    assert all(p.grad is None for p in conv.parameters())


@torch.no_grad()
def test_modules_of_torch_export() -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(), nn.MaxPool2d(2), nn.SiLU())
    x = structured((2, 4, 24, 18))
    exported = torch.export.export(net.double().eval(), (x,)).module()
    torch.testing.assert_close(pc.tile(exported, x, tile=3), net(x), rtol=1e-10, atol=1e-10)
    plan = pc.tile_plan(exported, x, tile=3)
    assert plan.sweeps[0].strips > 3 and not plan.kinds.why


@torch.no_grad()
def test_operators_with_other_arguments_than_their_functions() -> None:
    """F.mse_loss(x, y, 0) adds up, the operator with these arguments does not."""
    aten, x = torch.ops.aten, structured((2, 4, 23, 18))
    for function in (
        lambda x: aten.mse_loss.default(x, x + 1, 0), lambda x: aten.l1_loss.default(x, x + 1, 2),
        lambda x: aten.elu.default(x, 1.0, 2.0, 3.0), lambda x: aten.elu.default(x, 1.0, 2.0),
    ):  # fmt: skip
        with pytest.raises(pc.NotServed, match=r"(loss|elu)\.default is not served: it has no rule"):
            pc.tile(function, x, tile=3)


def _in_one_tensor(x: Tensor) -> Tensor:
    """As in coordinate attention."""
    rows = x.shape[2]
    both = torch.cat([x.mean(3, keepdim=True), x.mean(2, keepdim=True).transpose(2, 3)], 2).sigmoid()
    return both[:, :, :rows] * both[:, :, rows:].transpose(2, 3) * x


@pytest.mark.parametrize("where", [{"tile": 5}, {"tile": (5, 7)}, {"tile": 5, "dim": 3}])
@pytest.mark.parametrize("function", [
    lambda x: x.mean(3, keepdim=True) * x.mean(3).unsqueeze(2),
    lambda x: x.amax(3, keepdim=True) + x.amax(3, keepdim=True).transpose(2, 3) + x[:, :, :, :1],
    lambda x: torch.where(x.mean(3, keepdim=True) > x.mean(3).unsqueeze(2), x, -x),
    _in_one_tensor,
])  # fmt: skip
def test_columns_by_rows(function: Callable[[Tensor], Tensor], where: dict[str, Any]) -> None:
    """Rows that were turned into columns are cut along another dimension than rows."""
    x = torch.randn(2, 3, 29, 29, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(pc.tile(function, x, **where), function(x))
    given = [x.clone().requires_grad_() for _ in range(2)]
    for call, one in zip((function, lambda x: pc.tile(function, x, **where)), given, strict=True):
        call(one).square().sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)
