"""torch.library.opcheck on the operators that keep less: schema, autograd registration, fake tensors, AOT dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.activations import ROWS
from support.configurations import lay_out
from support.pairs import pairwise
from support.peaks import allocated_peak
from torch import Tensor

import patchconv_native  # noqa: F401  (registers the operators)

ops = torch.ops.patchconv

# Name -> (shape of the input, what follows it). A function is called with the device, for tensors.
Arguments = tuple[Any, ...] | Callable[[str], tuple[Any, ...]]
IMAGE, LINE, VOLUME = (2, 4, 6, 5), (2, 4, 7), (1, 2, 4, 5, 4)
UNARY: dict[str, tuple[tuple[int, ...], Arguments]] = {
    **{name: (IMAGE, row.arguments[0]) for name, row in ROWS.items() if row.operator},
    "prelu": (IMAGE, lambda device: (torch.rand(4, device=device, requires_grad=True),)),
    "batch_norm": (IMAGE, lambda device: (*affine(device), None, None, True, 0.1, 1e-5)),
    "batch_norm_relu": (IMAGE, lambda device: (*affine(device), None, None, True, 0.1, 1e-5)),
    "group_norm_silu": (IMAGE, lambda device: (2, *affine(device))),
    "add_relu": (IMAGE, lambda device: (torch.rand(IMAGE, device=device, requires_grad=True),)),
    "instance_norm": (IMAGE, lambda device: (*affine(device), None, None, True, 0.1, 1e-5)),
    "group_norm": (IMAGE, lambda device: (2, *affine(device))),
    "layer_norm": (IMAGE, ([6, 5],)), "rms_norm": (IMAGE, ([5],)),
    "max_pool1d": (LINE, (3, 2, 1)), "max_pool2d": (IMAGE, (3, 2, 1)), "max_pool3d": (VOLUME, (2,)),
    "adaptive_max_pool1d": (LINE, (3,)), "adaptive_max_pool2d": (IMAGE, ([3, 2],)),
    "adaptive_max_pool3d": (VOLUME, (2,)), "avg_pool1d": (LINE, (3, 2, 1)), "avg_pool2d": (IMAGE, (3, 2, 1)),
    "avg_pool3d": (VOLUME, (2,)), "adaptive_avg_pool1d": (LINE, (3,)), "adaptive_avg_pool2d": (IMAGE, ([3, 2],)),
    "adaptive_avg_pool3d": (VOLUME, (2,)),
    "add": (IMAGE, lambda device: (torch.rand(4, 1, 1, device=device, requires_grad=True),)),
    "mul": (IMAGE, lambda device: (torch.rand(4, 1, 1, device=device, requires_grad=True),)),
    "glu": (IMAGE, (1,)),
    "cast": (IMAGE, (torch.bfloat16,)),
    "linear": (IMAGE, lambda device: (torch.rand(3, 5, device=device, requires_grad=True),)),
    "upsample": (IMAGE, (None, [2.0, 1.5], "bilinear")), "pad": (IMAGE, ([1, 2, 0, 3], "reflect")),
}  # fmt: skip


def affine(device: str) -> list[Tensor]:
    return [torch.rand(4, device=device, requires_grad=True) for _ in range(2)]


def arguments(name: str, device: str) -> tuple[Any, ...]:
    given = UNARY[name][1]
    return given(device) if callable(given) else given


@pairwise(name=list(UNARY), layout=["contiguous", "channels_last", "sliced"], recorded=[True, False])
def test_operators(device, name, layout, recorded):
    """With every gradient, and with none."""
    x = lay_out(torch.randn(UNARY[name][0], device=device), layout).requires_grad_(recorded)
    given = [a.detach().requires_grad_(recorded) if isinstance(a, Tensor) else a for a in arguments(name, device)]
    torch.library.opcheck(getattr(ops, name).default, (x, *given))


@pytest.mark.parametrize("name", [name for name in UNARY if hasattr(ops, f"{name}_")])
def test_in_place(device, name):
    """Of a tensor that is no leaf; AOT dispatch, which would need one, sees the functional form above."""
    x = torch.randn(UNARY[name][0], device=device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(ops, f"{name}_").default, (x, *arguments(name, device)), test_utils=checks)


DROPOUTS = ["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"]


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout(device, name):
    """What is random is not compared."""
    x = torch.randn(IMAGE, device=device, requires_grad=True)
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(ops, name).default, (x, 0.3), test_utils=checks)


def test_cat(device):
    parts = [torch.randn(2, n, 5, device=device, requires_grad=True) for n in (1, 3)]
    torch.library.opcheck(ops.cat.default, (parts, 1))


def test_every_operator_is_checked():
    every = torch._C._dispatch_get_all_op_names()
    found = {op.split("::")[1].split(".")[0] for op in every if op.startswith("patchconv::")}
    inner = {op for op in found if op.startswith(("_", "conv"))}
    assert found - inner - {*UNARY, *(f"{name}_" for name in UNARY), "cat", *DROPOUTS} == {"dropout_"}


def pieces(x: Tensor) -> dict[str, tuple[Any, ...]]:
    """The operators that the public ones are made of, with what follows the input or the gradient."""
    c, like = x.shape[1], {"device": x.device}
    grad = torch.randn(x.shape, **like)
    weight, bias, mean, var = (torch.rand(c, **like) for _ in "wbmv")
    means, rstds = torch.randn(x.shape[0], 2, **like), torch.rand(x.shape[0], 2, **like) + 0.5
    all = [True] * 3
    some = {
        "_batch_statistics": (x, None, None, 0.1),
        "_normalize": (x, weight, bias, mean, var, 0, 1e-5, 1),
        "_normalize_masked": (x, weight, bias, mean, var, 1e-5),
        "_norm_backward": (grad, x, weight, bias, mean, var, 0, 1e-5, 1, True, all),
        "_group_norm": (x, weight, bias, 2, 1e-5, 2),
        "_normalize by group": (x, weight, bias, means, rstds, 2, 1e-5, 2),
        "_norm_backward by group": (grad, x, weight, bias, means, rstds, 2, 1e-5, 2, True, all),
        "_layer_norm": (x, [5], None, None, 1e-5),
        "_add_mask_forward": (x, x.clone()),
        "_avg_pool": (x, False, [3, 3], [2, 2], [1, 1], False, True),
    }
    pooled = torch.ops.patchconv._avg_pool(*some["_avg_pool"])
    normed = torch.ops.patchconv._layer_norm(*some["_layer_norm"])
    format = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    return some | {
        "_avg_pool_backward": (torch.randn_like(pooled), list(x.shape), format, *some["_avg_pool"][1:]),
        "_layer_norm_backward": (grad, x, [5], *normed[1:], None, None, [True, False, False]),
    }


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", pieces(torch.randn(IMAGE)))
def test_pieces(device, name, layout):
    if device == "cuda" and "group" in name:
        layout = "contiguous"  # stock's kernels serve no other, and the public operators give them none
    given = pieces(lay_out(torch.randn(IMAGE, device=device), layout))[name]
    torch.library.opcheck(getattr(ops, name.split()[0]).default, given, test_utils=("test_schema", "test_faketensor"))


def test_bits_by_stock_operators_are_made_a_part_at_a_time():
    """Of softshrink, which has no kernel: not all of them as bytes, let alone several bytes an element."""
    x = torch.randn(1 << 24)
    assert allocated_peak(lambda: ops._mask_pack(x, 5, 0.5, 0.0)) <= x.numel() / 2
    found = ops._mask_pack(x[: 3 + (1 << 20)], 5, 0.5, 0.0)
    inside = (x[: 3 + (1 << 20)].abs() > 0.5).to(torch.uint8)
    whole = torch.cat([inside, inside.new_zeros(-len(inside) % 8)]).view(-1, 8)
    assert torch.equal(found, (whole << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8))
