"""bench.checkpointing runs, and its figures are those of the forms that it names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.counts import saved_bytes
from support.pairs import only_full
from support.ranks import needs_gloo

from bench import checkpointing


@only_full
@needs_gloo
def test_it_runs(results: Callable[..., dict[str, Any]]) -> None:
    data = results("checkpointing")
    assert [row["form"] for row in data["rows"]] == list(checkpointing.FORMS)
    for row in data["rows"]:
        assert row["peak"] >= 0 and row["ms"]["least"] > 0 and row["rounds"] >= 3
        assert len(row["ddp"]["peaks"]) == 2 and row["ddp"]["ms"]["least"] > 0
        assert row["errors"]["batches"] == ([2] if row["form"] == "torch" else [1])
        assert (row["errors"]["running_mean"] > 1e-4) == (row["form"] == "torch")
    assert data["text"].count("\n| ") == 2 + len(data["rows"])


@pytest.mark.parametrize("form", checkpointing.FORMS)
def test_forms_compute_the_same(form: str) -> None:
    x = checkpointing.pictures(2, 8)
    found, expected = (checkpointing.network(name, 16).double()(x.double()) for name in (form, "naive"))
    torch.testing.assert_close(found, expected)


def test_a_checkpoint_keeps_the_features_alone() -> None:
    """Forms differ in what they save."""
    x = checkpointing.pictures(2, 16)
    kept = {form: saved_bytes(partial(checkpointing.network(form, 40), x)) for form in ("naive", "torch", "ours")}
    assert kept["ours"] == kept["torch"] < 0.8 * kept["naive"]


def test_errors_tell_a_second_move() -> None:
    shape = {"depth": 16, "batch": 4, "side": 8}
    found = {form: checkpointing.errors(form, **shape) for form in ("naive", "torch", "ours", "ours + lean")}
    assert abs(found["torch"]["running_mean"] - 0.9) < 0.01 and found["torch"]["batches"] == [2]
    for form in ("naive", "ours", "ours + lean"):
        assert found[form]["running_mean"] < 1e-5 and found[form]["batches"] == [1]
    assert found["ours"]["same_bits"] and found["torch"]["same_bits"]


def test_densenet_bc_100_is_the_published_one() -> None:
    """0.8 million parameters (Huang et al., 2017, table 2)."""
    model = checkpointing.network("naive", 100)
    assert sum(p.numel() for p in model.parameters()) == 769_162
