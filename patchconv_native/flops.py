"""Formulas for torch.utils.flop_counter.FlopCounterMode: this package's convolutions count as torch's do.

Torch's own formulas are called. Tiles and halos do not change the count. Importing torch.utils.flop_counter imports
triton, which takes a tenth of a second and warns where there is none. So the formulas are registered when a program
imports it, by a finder in sys.meta_path that is then removed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"


class _WhenImported(MetaPathFinder):
    """Finds torch.utils.flop_counter as always, and registers this package's formulas at the end of its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Makes FlopCounterMode count this package's operators, from the import of torch.utils.flop_counter on."""
    if (counter := sys.modules.get(_COUNTER)) is not None:
        _register(counter)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _register(counter: Any) -> None:
    formulas = {torch.ops.patchconv._conv3d_onednn: _forward(counter, 3, False)}
    for dims in (1, 2, 3):
        for transposed in (False, True):
            name = f"conv{'_transpose' if transposed else ''}{dims}d"
            formulas[getattr(torch.ops.patchconv, name)] = _forward(counter, dims, transposed)
            formulas[getattr(torch.ops.patchconv, f"{name}_backward")] = _backward(counter, dims, transposed)
    for op, formula in formulas.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op)(formula)


def _batched(shape: Sequence[int], dims: int) -> list[int]:
    """The shape with a batch dimension: stock operators add it before the counter sees a single image."""
    return [1] * (dims + 2 - len(shape)) + list(shape)


def _forward(counter: Any, dims: int, transposed: bool) -> Callable[..., int]:
    def formula(input: Any, weight: Any, *_args: Any, out_shape: Any, **_kwargs: Any) -> int:
        return counter.conv_flop_count(_batched(input, dims), weight, _batched(out_shape, dims), transposed=transposed)

    return formula


def _backward(counter: Any, dims: int, transposed: bool) -> Callable[..., int]:
    def formula(
        grad_output: Any, _input: Any, _weight: Any, input_size: Any, weight_size: Any, *_args: Any,
        output_mask: Any, **_kwargs: Any,
    ) -> int:  # fmt: skip
        # The stock formula uses shapes, transposed and output_mask alone.
        input_size = _batched(input_size, dims)
        return counter.conv_backward_flop(
            _batched(grad_output, dims), input_size, weight_size, None, None, None, None, transposed, None, None,
            output_mask, out_val=(input_size, weight_size, None),
        )  # fmt: skip

    return formula
