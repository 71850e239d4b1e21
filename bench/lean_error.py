"""How far gradients are from float64: stock in float32, converted, and converted with functional code.

The eight models of bench.lean at 64x64, batch 4, training mode, weights and pictures the same on all sides. The error
is the length of the difference of all parameters' gradients from those of stock in float64, in units of the length of
the latter; five pictures each. Roundings change a ReLU's sign here and there, and with it a gradient by more than
themselves, on both sides: single pictures differ a hundredfold. Target: at most 1.1 of stock's, by the median of the
pictures. And the same bits with recompute on and off.
"""

from __future__ import annotations

import copy
import statistics
import sys
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from . import lean, measure, report

TARGET = 1.1
PICTURES = {"full": 5, "small": 1, "tiny": 1}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(7)  # for dropout and stochastic depth, which are off
    y = model(x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).cos().view(y.shape).to(y)
    return list(torch.autograd.grad((y * weight).sum(), list(model.parameters()), allow_unused=True))


def quiet(model: nn.Module) -> nn.Module:
    """Without chance: dropout and stochastic depth keep everything."""
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):
            module.p = 0.0  # type: ignore[assignment]
    return model


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    square = sum(float((a.double() - b).square().sum()) for a, b in zip(found, exact, strict=True) if b is not None)
    length = sum(float(b.square().sum()) for b in exact if b is not None)
    return (square / length) ** 0.5


def errors(name: str, pictures: int, side: int) -> dict[str, Any]:
    stock = quiet(lean.network(name))
    sides = {form: lean.FORMS[form](copy.deepcopy(stock)) for form in ("stock", *lean.OURS)}
    exact_model = copy.deepcopy(stock).double()
    found: dict[str, list[float]] = {form: [] for form in sides}
    same = True
    for picture in range(pictures):
        torch.manual_seed(100 + picture)
        x = lean.image(name, side, 4)
        exact = gradients(exact_model, x.double())
        for form, model in sides.items():
            ours = gradients(model, x)
            found[form].append(distance(ours, exact))
            if form != "stock":
                with pc.recompute(False):
                    plain = gradients(model, x)
                same &= all(
                    (a is None) == (b is None) and (a is None or torch.equal(a, b))
                    for a, b in zip(ours, plain, strict=True)
                )
    median = {form: statistics.median(values) for form, values in found.items()}
    return {"median": median, "errors": found, "same_without_recompute": same}


def measure_all(size: str) -> dict[str, Any]:
    data = measure.report_head("lean_error", size) | {"target": TARGET, "rows": []}
    for name in lean.FLOORS if size == "full" else ["resnet18"]:
        row: dict[str, Any] = {"model": name} | errors(name, PICTURES[size], 64)
        row["met"] = all(row["median"][form] <= TARGET * row["median"]["stock"] for form in lean.OURS)
        data["rows"].append(row)
        print(name, row["median"], "the same without recompute:", row["same_without_recompute"], flush=True)
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
