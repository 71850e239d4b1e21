"""Random chains of layers on 2, 3 and 4 ranks against one process, in float64: outputs, all gradients, all state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.pairs import FULL
from support.ranks import needs_gloo, run
from support.seeds import SWEEP_SEED
from support.spatial_cases import mesh_of
from support.spatial_chains import chain, differences, step

pytestmark = needs_gloo

# Ranks, dims, shape of the mesh.
MESHES = {"2 rows": (2, "H", (2,)), "3 rows": (3, "H", (3,)), "2 columns": (2, "W", (2,)), "2x2": (4, "HW", (2, 2))}
# The day's chains for each mesh, of the kinds that their seeds modulo 4 stand for; make check: 80.
SEEDS, PARTS = (range(80), 2) if FULL else (range(100 * SWEEP_SEED, 100 * SWEEP_SEED + 16), 1)


def many(rank: int, world: int, mesh_shape: tuple[int, ...], dims: str, seeds: list[int]) -> list[Any]:
    import patchconv_native.distributed as pd
    from patchconv_native.spatial import convs

    mesh, found = mesh_of(world, mesh_shape), []
    for seed in seeds:
        # Half of the chains compute their convolutions in pieces while halos travel, as those of large images.
        convs.IN_PIECES_FROM = 0 if seed % 4 < 2 else 2**18
        model, image = chain(seed, max(mesh_shape), dims)
        text = str(model)
        pd.spatial(model, mesh, dims)
        try:
            found.append(step(model, image, lambda model, x: pd.gather(model(x)), seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}, image {tuple(image.shape)}, {text}") from error
    return found


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", MESHES)
def test_random_chains(name: str, part: int) -> None:
    world, dims, shape = MESHES[name]
    seeds = list(SEEDS[part::PARTS])
    results = run(world, many, shape, dims, seeds, timeout=120)
    wrong = []
    for number, seed in enumerate(seeds):
        model, image = chain(seed, max(shape), dims)
        want = step(model, image, lambda model, x: model(x), seed)
        for rank, result in enumerate(results):
            for text in differences(result[number], want):
                wrong.append(f"seed {seed}, rank {rank}: {text}\n{tuple(image.shape)} {model}")
        torch.testing.assert_close(results[0][number]["output"], results[-1][number]["output"], rtol=0, atol=0)
    assert not wrong, f"{len(wrong)} differences; the first: {wrong[0]}\n" + "\n".join(
        sorted({w.split("\n")[0] for w in wrong})[:40]
    )
