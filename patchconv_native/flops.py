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
    ops = torch.ops.patchconv
    formulas = {
        ops._convolution: _forward(counter, transposed_at=9),
        ops._convolution_fused: _forward(counter),
        ops._conv3d_onednn: _forward(counter),
        ops._convolution_backward: _backward(counter),
    }
    for op, formula in formulas.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op)(formula)


def _batched(shape: Sequence[int], weight: Sequence[int]) -> list[int]:
    """The shape with a batch dimension: stock operators add it before the counter sees a single image."""
    return [1] * (len(weight) - len(shape)) + list(shape)


def _forward(counter: Any, transposed_at: int | None = None) -> Callable[..., int]:
    """transposed_at: the place of the argument that says whether the convolution is a transposed one."""

    def formula(*args: Any, out_shape: Any, **_kwargs: Any) -> int:
        input, weight = args[:2]
        made = out_shape[0] if isinstance(out_shape[0], Sequence) else out_shape  # without the bits of a fused one
        transposed = transposed_at is not None and args[transposed_at]
        return counter.conv_flop_count(_batched(input, weight), weight, _batched(made, weight), transposed=transposed)

    return formula


def _backward(counter: Any) -> Callable[..., int]:
    def formula(grad_output: Any, _input: Any, _weight: Any, *args: Any, **_kwargs: Any) -> int:
        # The stock formula uses shapes, transposed and output_mask alone.
        input_size, weight_size, transposed, output_mask = (args[place] for place in (0, 1, 8, 10))
        input_size = _batched(input_size, weight_size)
        return counter.conv_backward_flop(
            _batched(grad_output, weight_size), input_size, weight_size, None, None, None, None, transposed, None, None,
            output_mask, out_val=(input_size, weight_size, None),
        )  # fmt: skip

    return formula
