"""Which modules may import which, read from their sources."""

from __future__ import annotations

import ast

import pytest
from support.imports import circles, imported, modules, reached, statements, tree

def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count too: they only hide a circle."""
    found = [{m: sorted(imported(m) & circle) for m in sorted(circle)} for circle in circles()]
    assert not found, found


SPATIAL = sorted(m for m in modules() if m.startswith("patchconv_native.spatial"))


@pytest.mark.parametrize("module", SPATIAL)
def test_the_rules_know_no_ranks(module: str) -> None:
    for each in (module, *sorted(reached(module))):
        names = [".".join(filter(None, pair)) for pair in statements(each)]
        assert not [name for name in names if name.startswith(("torch.distributed", "patchconv_native.distributed"))], (
            each
        )
    for node in ast.walk(tree(module)):
        assert getattr(node, "attr", "") != "distributed", "torch.distributed, without an import"
        assert getattr(node, "id", getattr(node, "attr", "")) not in ("import_module", "__import__"), "by name"
