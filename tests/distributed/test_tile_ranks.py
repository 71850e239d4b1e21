"""`tile` on parts of images on ranks, against one process, in float64: outputs, gradients, state, budgets."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from support.pairs import FULL
from support.ranks import needs_gloo, run
from support.seeds import SWEEP_SEED
from support.spatial_cases import MESHES as OF_IMAGES
from support.spatial_cases import each, mesh_of
from support.spatial_chains import chain, differences, step
from test_spatial import LAYOUTS, MISTAKES
from test_spatial_models import UNet, both
from test_spatial_operations import CORNERS, OPERATIONS
from test_spatial_volumes import VOLUMES
from torch import Tensor, nn

import patchconv_native as pc

pytestmark = needs_gloo
MESHES = {**OF_IMAGES, "2 columns": (2, "W", (2,)), "2 of depth": (2, "D", (2,)), "3 of depth": (3, "D", (3,))}

# Masks of `tile` are its own (test_masks_are_those_of_one_process). Not served: images without elements.
LEFT_OUT = {"dropout off", "dropout of nothing", "dropout of all", "dropout2d of all"}


def served(table: dict[str, Any]) -> tuple[str, ...]:
    other = ("dropout", "no images", "converted", "one column")
    return tuple(name for name in table if name in LEFT_OUT or not any(word in name for word in other))


# Cases, a mesh, and arguments of tile; the others run in make check.
TABLES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "operations, no wish": (OPERATIONS, "test_spatial_operations:OPERATIONS", "3 columns", {}),
    "operations, tiles": (OPERATIONS, "test_spatial_operations:OPERATIONS", "2 columns", {"tile": (3, 2)}),
    "corners": (CORNERS, "test_spatial_operations:CORNERS", "2 rows", {"tile": 3}),
    "layouts": (LAYOUTS, "test_spatial:LAYOUTS", "2 columns", {"tile": 4}),
    "mistakes": (MISTAKES, "test_spatial:MISTAKES", "4 rows", {"tile": 2}),
    "volumes": (VOLUMES, "test_spatial_volumes:VOLUMES", "2 of depth", {"tile": 3}),
    "volumes, tiles": (VOLUMES, "test_spatial_volumes:VOLUMES", "3 of depth", {"tile": (2, 3, 5)}),
}
QUICK = ("operations, tiles", "layouts", "volumes")


@functools.cache
def results(name: str) -> list[dict[str, list[str]]]:
    table, cases, mesh, how = TABLES[name]
    world, dims, shape = MESHES[mesh]
    return run(world, each, cases, shape, dims, list(served(table)), how, timeout=300)


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table in (TABLES if FULL else QUICK) for name in served(TABLES[table][0])]
)
def test_calls_equal_one_process(table: str, name: str) -> None:
    assert not [(rank, found[name]) for rank, found in enumerate(results(table)) if found[name]]


# Random chains.

HOWS: list[Any] = [{}, {"tile": 1}, {"tile": 5}, {"tile": (3, 4)}, "least", "more"]
SEEDS = range(60) if FULL else range(100 * SWEEP_SEED, 100 * SWEEP_SEED + 6)


def arguments(model: nn.Module, x: Tensor, seed: int) -> dict[str, Any]:
    how = HOWS[seed % len(HOWS)]
    if isinstance(how, dict):
        return how
    try:
        pc.tile_plan(model, x, budget=1)
    except pc.BudgetError as refused:
        return {"budget": refused.least if how == "least" else refused.least * 5 // 4}
    return {"budget": 1}


def many(rank: int, world: int, dims: str, seeds: list[int]) -> list[Any]:
    mesh, found = mesh_of(world, (world,)), []
    for seed in seeds:
        model, image = chain(seed, world, dims)

        def tiled(model: nn.Module, x: Tensor, seed: int = seed) -> Tensor:
            part = pc.distributed.scatter(x, mesh, dims)
            return pc.distributed.gather(pc.tile(model, part, **arguments(model, part, seed)))

        try:
            found.append(step(model, image, tiled, seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}, image {tuple(image.shape)}, {model}") from error
    return found


@pytest.mark.parametrize("name", ["2 rows", "3 columns", "4 rows"] if FULL else ["3 columns"])
def test_random_chains(name: str) -> None:
    world, dims, _ = MESHES[name]
    wrong = []
    for rank, found in enumerate(run(world, many, dims, list(SEEDS), timeout=200)):
        for seed, got in zip(SEEDS, found, strict=True):
            model, image = chain(seed, world, dims)
            want = step(model, image, lambda model, x: model(x), seed)
            wrong += [f"seed {seed}, rank {rank}: {text}" for text in differences(got, want)]
    assert not wrong, wrong[:20]


# Whole models.

MODELS = ("unet", "resnet18", "convnext_tiny", "lraspp_mobilenet_v3_large")


@pytest.mark.parametrize("name", MODELS if FULL else MODELS[:1])
def test_models_equal_one_process(name: str) -> None:
    found = run(2, both, [name], {"tile": 3}, timeout=200)
    assert not [(rank, one[name]) for rank, one in enumerate(found) if one[name]]


# Budgets.


def net() -> nn.Module:
    """A U-Net with batch norm."""
    return UNet()


def pixels() -> nn.Module:
    """Values at the borders of parts are read by several strips. No barrier."""
    layers = [nn.Conv2d(3, 8, 5, padding=2), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()]
    layers.append(nn.Conv2d(8, 8, 7, padding=3))
    return nn.Sequential(*layers, nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 3, 3, padding=1))


NETS = {"unet": net, "pixels": pixels}


def peaks(rank: int, world: int, name: str, dims: str, gradients: bool) -> list[tuple[int, int, float]]:
    """Budgets, what was allocated besides what is given back, and how far results are off."""
    from patchconv_native.memory.peaks import allocated_peak

    mesh = mesh_of(world, (world,))
    torch.manual_seed(0)
    model, x = NETS[name](), torch.randn(1, 3, 224, 192)
    part = pc.distributed.scatter(x, mesh, dims).requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        want = copy.deepcopy(model)(x).detach()
        try:
            pc.tile_plan(model, part, budget=1)
        except pc.BudgetError as refused:
            least = refused.least
        found = []
        for budget in (least, least * 3 // 2, least * 3):
            results: list[Tensor] = []
            part = pc.distributed.scatter(x, mesh, dims).requires_grad_(gradients)
            model.zero_grad()

            def call(budget: int = budget, part: Tensor = part, results: list[Tensor] = results) -> None:
                results.append(pc.tile(model, part, budget))
                if gradients:
                    results[0].sum().backward()

            peak = allocated_peak(call)
            given = results[0].to_local().nbytes
            if gradients:
                given += sum(leaf.grad.nbytes for leaf in (*model.parameters(),)) + part.grad.to_local().nbytes
            off = (pc.distributed.gather(results[0].detach()) - want).abs().max() / want.abs().max()
            found.append((budget, peak - given, float(off)))
    return found


ASKED = [(name, gradients) for name in NETS for gradients in (False, True)]


@pytest.mark.parametrize(("name", "gradients"), ASKED if FULL else ASKED[-1:])
@pytest.mark.parametrize("mesh", ["2 rows", "3 columns"] if FULL else ["2 rows"])
def test_each_rank_keeps_a_budget(mesh: str, name: str, gradients: bool) -> None:
    world, dims, _ = MESHES[mesh]
    for found in run(world, peaks, name, dims, gradients):
        for budget, peak, off in found:
            assert peak <= budget, found
            assert off < 1e-5
