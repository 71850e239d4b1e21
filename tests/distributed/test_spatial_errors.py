"""What is refused on parts of an image, by name and on every rank alike; ranks that fail; groups inside of groups."""

from __future__ import annotations

import copy
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import needs_gloo, run
from support.spatial_cases import Apply, compare, mesh_of
from support.spatial_chains import structured
from torch import Tensor, nn

pytestmark = needs_gloo
SHAPE = (2, 4, 9, 7)

REFUSED: dict[str, tuple[str, Any]] = {
    "fft": ("fft_fft2", lambda x: torch.fft.fft2(x)),
    "rows times rows": ("matmul", lambda x: x @ x.transpose(2, 3)),
    "a column by a row": ("mul", lambda x: x.mean(3, keepdim=True) * x.mean(3).unsqueeze(2)),
    "einsum": ("einsum", lambda x: torch.einsum("nchw,nciw->nchi", x, x)),
    "softmax over rows": ("softmax", lambda x: x.softmax(2)),
    "cumsum of rows": ("cumsum", lambda x: x.cumsum(2)),
    "flip": ("flip", lambda x: x.flip(2)),
    "roll": ("roll", lambda x: x.roll(1, 2)),
    "argmax of all": ("argmax", lambda x: x.argmax()),
    "a row": ("select", lambda x: x[:, :, 0]),
    "by a tensor": ("indexing", lambda x: x[:, :, torch.tensor([0, 1])]),
    "assignment": ("__setitem__", lambda x: x.__setitem__((0, 0, 0), 1.0)),
    "flatten": ("flatten", lambda x: x.flatten(1)),
    "channels merged with rows": ("view", lambda x: x.view(2, 36, 7)),
    "split into rows": ("split", lambda x: x.split(3, 2)),
    "grid_sample": ("grid_sample", lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2))),
    "unfold": ("unfold", lambda x: x.unfold(2, 3, 1)),
    "unfold along columns": ("unfold", lambda x: F.unfold(x.transpose(2, 3), 3)),
    "weighted l1_loss": ("l1_loss", lambda x: F.l1_loss(x, torch.zeros(SHAPE), weight=torch.ones(SHAPE))),
    "conv1d": ("conv1d", lambda x: F.conv1d(x, torch.zeros(1, 4, 1))),
    "numpy": ("numpy", lambda x: x.detach().numpy()),
    "item": ("item", lambda x: x.item()),
    "autograd.grad of it": ("grad", lambda x: torch.autograd.grad(x, x)),
    "indices of a pool": ("max_pool2d_with_indices", lambda x: F.max_pool2d(x, 2, return_indices=True)),
    "random numbers": ("rand_like", lambda x: torch.rand_like(x)),
    "deepcopy": ("__deepcopy__", lambda x: copy.deepcopy(x)),
    "out": ("add", lambda x: torch.add(x, 1, out=torch.zeros(SHAPE))),
    "half precision view": ("view", lambda x: x.view(torch.int64)),
    "embedding": ("embedding", lambda x: F.embedding(x.long().abs() % 3, torch.zeros(3, 2), max_norm=1.0)),
}


def refusals(rank: int, world: int) -> dict[str, str]:
    import patchconv_native.distributed as pd

    mesh, found = mesh_of(world, (world,)), {}
    for name, (function, call) in REFUSED.items():
        x = pd.scatter(structured(SHAPE), mesh)
        before = x.to_local().clone()
        try:
            call(x)
            found[name] = "nothing was raised"
        except Exception as error:
            named = function in str(error) or function.removeprefix("fft_") in str(error)
            clear = isinstance(error, pd.NotServed) and named and "gather" in str(error)
            same = torch.equal(before, x.to_local()) and tuple(x.shape) == SHAPE
            found[name] = "" if clear and same else f"{type(error).__name__}: {error} (left alone: {same})"
    return found


def test_what_has_no_rule_is_refused_by_name() -> None:
    for found in run(2, refusals, timeout=120):
        assert not {name: text for name, text in found.items() if text}


class Swish(torch.autograd.Function):
    """The one that saves its input alone, of many libraries of models."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grads[0] * (s * (1 + x * (1 - s)))


def swish(x: Tensor) -> Tensor:
    return x + Swish.apply(x)


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return x + checkpoint(self.inner, x, use_reentrant=True)


def hidden(rank: int, world: int, name: str) -> str:
    """What is wrong, and empty where it is equal or refused."""
    import patchconv_native.distributed as pd

    torch.manual_seed(0)
    second = Apply(swish) if name == "function" else Again()
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), second).double()
    try:
        return "; ".join(compare(model, structured(SHAPE), mesh_of(world, (world,)), "H"))
    except pd.NotServed:
        return ""


@pytest.mark.parametrize("name", ["function", "reentrant checkpoint"])
def test_a_function_of_autograd_is_equal_or_refused(name: str) -> None:
    assert run(2, hidden, name, timeout=120) == ["", ""]


def sizes(rank: int, world: int) -> list[str]:
    import patchconv_native.distributed as pd

    mesh, found = mesh_of(world, (world,)), []

    def attempt(call: Any) -> None:
        try:
            found.append(f"nothing: {call()}")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    few = torch.ones(1, 2, 3, 8)
    attempt(lambda: pd.scatter(few, mesh))
    model = pd.spatial(nn.Sequential(nn.Conv2d(2, 2, 3, stride=3), nn.Conv2d(2, 2, 2)), mesh)
    attempt(lambda: model(few))
    attempt(lambda: model(torch.ones(1, 2, 9, 8)))
    attempt(lambda: F.max_pool2d(pd.scatter(torch.ones(1, 2, 9, 8), mesh), 3))
    attempt(lambda: pd.spatial(model, mesh))
    attempt(lambda: pd.spatial(nn.ReLU(), mesh, "HW"))
    attempt(lambda: pd.spatial(nn.ReLU(), mesh, gather=["nobody"]))
    attempt(lambda: pd.scatter(torch.ones(9, 9), mesh))
    attempt(lambda: pd.halo_exchange(pd.scatter(torch.ones(1, 2, 9, 8), mesh), -1))
    attempt(lambda: F.conv2d(pd.scatter(torch.ones(1, 2, 9, 8), mesh), torch.ones(2, 2, 11, 1)))
    attempt(lambda: pd.scatter(torch.ones(1, 2, 9, 8), mesh) + torch.ones(5, 8))
    return found


def test_more_ranks_than_rows_and_wrong_arguments_are_told_to_every_rank_alike() -> None:
    results = run(4, sizes, timeout=120)
    for found in results:
        assert found == results[0]
        kinds = [text.split(":")[0] for text in found]
        assert kinds == [*["ValueError"] * 9, *["RuntimeError"] * 2], found
        assert "expected H to be at least 4, one coordinate for each of 4 ranks, got 3" in found[0]


def inner_group(rank: int, world: int) -> list[str]:
    """On ranks 2 and 3 of 4, and on both rows of a mesh of 2 x 2; the others do something else meanwhile."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    import patchconv_native.distributed as pd

    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 4, 5, padding=2), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1), nn.ConvTranspose2d(4, 4, 2, 2)]
    model = nn.Sequential(*layers).double()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "spatial"))
    image = structured(SHAPE) + rank // 2  # the rows of the mesh have images of their own
    found = compare(model, image, grid["spatial"], "H")
    found += compare(model, structured(SHAPE) + rank % 2, grid["data"], "W")
    group = dist.new_group([2, 3])
    if rank >= 2:
        mesh = DeviceMesh.from_group(group, "cpu")
        found += compare(model, image, mesh, "H")
        x = pd.scatter(image, mesh)
        if not torch.equal(pd.from_dtensor(pd.to_dtensor(x, mesh)).to_local(), x.to_local()):
            found.append("the way over a DTensor")
        if not torch.equal(pd.halo_exchange(x, 9), image):
            found.append("the halo")
    return found


def test_ranks_of_a_group_that_are_not_those_of_the_world() -> None:
    assert run(4, inner_group, timeout=120) == [[]] * 4


def failing(rank: int, world: int, where: str, mesh: Any = None) -> str:
    import patchconv_native.distributed as pd

    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if rank == 1 and where != "dies backward":
                end()
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            if rank == 1 and where == "dies backward":
                end()
            return grads[0]

    def end() -> None:
        if where.startswith("dies"):
            os._exit(1)
        if where == "hangs":
            time.sleep(25)
        raise ArithmeticError("the rank's own")

    weight = torch.ones(4, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    x = pd.scatter(structured(SHAPE), mesh or mesh_of(world, (world,)), check=False)
    y = F.conv2d(x, weight, padding=1)
    local = Ends.apply(y.to_local())
    y = F.conv2d(pd.SpatialTensor.from_local(local, y.axes), weight, padding=1)
    y.sum().backward()
    return "went on"


@pytest.mark.parametrize("where", ["dies forward", "dies backward", "raises forward"])
def test_a_rank_that_fails_ends_the_others(where: str) -> None:
    results = run(3, failing, where, timeout=120, errors=True)
    if where.startswith("dies"):
        assert results[1] is None
    else:
        assert "ArithmeticError" in results[1]
    for rank in (0, 2):
        assert results[rank] is not None and "Error" in results[rank], results


def hanging(rank: int, world: int) -> float:
    """Seconds until a rank is told, in a group with a timeout of 5."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=5)), "cpu")
    dist.barrier()
    began = time.monotonic()
    try:
        failing(rank, world, "hangs", mesh)
    except RuntimeError:
        return time.monotonic() - began
    except ArithmeticError:
        return 0.0
    raise AssertionError("went on")


def test_a_rank_that_hangs_ends_the_others_within_the_groups_timeout() -> None:
    first, own, third = run(3, hanging, timeout=120)
    assert own == 0
    assert 0 < first < 25 and 0 < third < 25, "not before the sleeper woke"
