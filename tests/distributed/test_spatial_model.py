"""spatial() itself: what it takes for an image, what it makes the same on every rank, and what it warns of."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support.ranks import needs_gloo, run
from support.spatial_chains import structured
from torch import Tensor, nn

pytestmark = needs_gloo
SHAPE = (2, 3, 10, 8)


class Named(nn.Module):
    """Takes an image in a dict, another one of the same size, and a small tensor of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.seen: list[str] = []

    def forward(self, batch: dict[str, Tensor], *, other: Tensor, gain: Tensor) -> Tensor:
        self.seen = [type(t).__name__ for t in (batch["image"], other, gain)]
        return self.conv(batch["image"]) * gain + other


def inputs(rank: int, world: int) -> dict[str, Any]:
    import patchconv_native.distributed as pd

    torch.manual_seed(0)
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    model = Named().double()
    image, gain = structured(SHAPE), torch.randn(2, 3, 1, 1).double()
    want = model({"image": image}, other=2 * image, gain=gain)
    pd.spatial(model, mesh)
    whole = pd.gather(model({"image": image}, other=2 * image, gain=gain))
    seen = list(model.seen)
    part = pd.gather(model({"image": pd.scatter(image, mesh)}, other=pd.scatter(2 * image, mesh), gain=gain))
    return {"seen": seen, "whole": torch.allclose(whole, want), "part": torch.allclose(part, want)}


def test_images_wherever_they_are_given() -> None:
    for found in run(2, inputs, timeout=120):
        assert found == {"seen": ["SpatialTensor", "SpatialTensor", "Tensor"], "whole": True, "part": True}


def apart(rank: int, world: int) -> dict[str, Any]:
    """Models and images of ranks that were not made alike, on both dimensions of a mesh."""
    import patchconv_native.distributed as pd

    torch.manual_seed(rank)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5))
    model[1].running_mean += rank
    pd.spatial(model, mesh, "HW")
    found: dict[str, Any] = {"weight": model[0].weight.detach().clone(), "mean": model[1].running_mean.clone()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(1, 3, 8, 8))
    found["warned"] = [str(w.message)[:40] for w in caught if "random states" in str(w.message)]
    for name, image in {
        "sizes": torch.ones(1, 3, 8, 8 + 2 * (rank == 3)), "values": torch.ones(1, 3, 8, 8) + (rank == 2),
    }.items():  # fmt: skip
        try:
            pd.scatter(image, mesh, "HW")
            found[name] = "no error"
        except ValueError as error:
            found[name] = str(error).split(", got")[0]
    found["unchecked"] = type(pd.scatter(torch.ones(1, 3, 8, 8) + rank, mesh, "HW", check=False)).__name__
    return found


def test_what_ranks_have_that_is_not_the_same() -> None:
    """The first rank's parameters and buffers are everybody's; other random states are told, other images refused."""
    results = run(4, apart, timeout=120)
    for found in results:
        assert torch.equal(found["weight"], results[0]["weight"]) and not found["mean"].any()
        assert found["warned"] == ["spatial: random states differ between ra"]
        assert found["sizes"] == found["values"] == "scatter: expected the same image on every rank"
        assert found["unchecked"] == "SpatialTensor"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return x + self.attention(tokens, tokens, tokens)[0].transpose(1, 2).reshape(x.shape)


class Sorts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(2).values


def gathered(rank: int, world: int) -> dict[str, Any]:
    import patchconv_native.distributed as pd

    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Attends(), nn.Conv2d(4, 2, 3)).double()
    found: dict[str, Any] = {}
    for how in ("1", Attends, ["1"], (Attends,)):
        mine = pd.spatial(copy.deepcopy(model), mesh, gather=how)
        image = structured((1, 3, 9, 7)).requires_grad_()
        own = image.detach().clone().requires_grad_()
        pd.gather(mine(image)).square().sum().backward()
        one = copy.deepcopy(model)
        one(own).square().sum().backward()
        parameters = zip(mine.parameters(), one.parameters(), strict=True)
        pairs = [(image.grad, own.grad), *((p.grad, q.grad) for p, q in parameters)]
        off = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)
        found[str(how)] = (off < 1e-9, pd.spatial_report(mine))
    without = pd.gather(pd.spatial(copy.deepcopy(model), mesh)(image.detach()))
    right = torch.allclose(without, model(image.detach()), rtol=1e-9)
    found["without"] = (right, "Run gathered, whole on every rank: 1")
    try:
        pd.spatial(nn.Sequential(copy.deepcopy(model), Sorts()), mesh)(structured((1, 3, 9, 7)))
        found["error"] = "none"
    except pd.NotServed as error:
        found["error"] = str(error)
    return found


def test_modules_that_run_gathered() -> None:
    for found in run(2, gathered, timeout=120):
        assert "spatial(gather=...)" in found.pop("error")
        for right, text in found.values():
            assert right and text == "Run gathered, whole on every rank: 1"


def test_what_is_no_mesh_or_module() -> None:
    import patchconv_native.distributed as pd

    with pytest.raises(TypeError, match="spatial: expected mesh to be a DeviceMesh, got NoneType"):
        pd.spatial(nn.ReLU(), None)
    with pytest.raises(TypeError, match="scatter: expected image to be a Tensor, got list"):
        pd.scatter([1, 2], None)
