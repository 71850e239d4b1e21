"""ResNet-18's features of a large image by lightstream and by `pc.tile`, without gradients, with frozen norms.

lightstream 1.0.7 streams square tiles through a convolutional network and keeps of each result what no border touched.
Peak memory above the parameters, the image and the result; time in units of one call of stock, in turn; the largest
difference from one call in float64, in units of stock's own in float32. `pc.tile` gets lightstream's peak as its
budget, and a quarter of it. lightstream's backward pass does not run on a CPU: it hands the gradient of a
convolution's weight tensors whose sizes do not belong together, which raises (`backward` in the results).
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

from . import measure, report, resnet

# Sides of the image and of lightstream's tiles, which must be larger than what borders touch.
SIZES = {"full": ((1536, 1024),), "tiny": ((1024, 960),)}
SECONDS = {"full": 30.0, "tiny": 0.1}


def constructor() -> Any:
    """lightstream's, without the package's own __init__, which needs Lightning."""
    found = importlib.util.find_spec("lightstream")
    if found is None:
        raise SystemExit("bench.lightstream: pip install --no-deps lightstream==1.0.7")
    package = types.ModuleType("lightstream")
    package.__path__ = list(found.submodule_search_locations or [])
    sys.modules["lightstream"] = package
    from lightstream.core.constructor import StreamingConstructor

    return StreamingConstructor


def network() -> nn.Module:
    torch.manual_seed(0)
    model: Any = resnet.model()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    first = [model.conv1, model.bn1, model.relu, model.maxpool]
    return nn.Sequential(*first, model.layer1, model.layer2, model.layer3, model.layer4).eval()


def streaming(stock: nn.Module, tile: int) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        made = constructor()(
            copy.deepcopy(stock), tile, verbose=False, deterministic=True, normalize_on_gpu=False,
            mean=[0, 0, 0], std=[1, 1, 1], add_keep_modules=[nn.BatchNorm2d],
        )  # fmt: skip
        made.statistics_on_cpu = False  # else it moves the network to a GPU
        found = made.prepare_streaming_model()
    found.stream_module.eval()
    return found


def backward(streamed: Any, x: Tensor, y: Tensor) -> str:
    try:
        streamed.backward(x, torch.ones_like(y))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "ran"


def measured(side: int, tile: int, seconds: float) -> dict[str, Any]:
    stock = network()
    x = torch.randn(1, 3, side, side)
    streamed = streaming(stock, tile)
    with torch.no_grad():
        y = stock(x)
        theirs = allocated_peak(lambda: streamed.forward(x)) - y.nbytes
        budgets = {"pc.tile": theirs, "pc.tile, a quarter": theirs // 4}
        calls: dict[str, Callable[[], Tensor]] = {"stock": lambda: stock(x)}
        calls["lightstream"] = lambda: streamed.forward(x)
        for form, budget in budgets.items():
            tiled = pc.tile_modules(copy.deepcopy(stock), "", budget)
            calls[form] = lambda tiled=tiled: tiled(x)  # type: ignore[misc]
        exact = copy.deepcopy(stock).double()(x.double())
        errors = {form: (call().double() - exact).abs().max().item() for form, call in calls.items()}
        peaks = {form: allocated_peak(call) - y.nbytes for form, call in calls.items()}
        found = measure.paired(calls, seconds)
    row = {"side": side, "tile": tile, "peaks": peaks, "errors": errors, "budgets": budgets}
    return row | {"largest": exact.abs().max().item(), "backward": backward(streamed, x, y)} | found.facts("stock")


def measure_all(size: str) -> dict[str, Any]:
    data = measure.report_head("lightstream", size) | {"rows": []}
    for side, tile in SIZES[size]:
        given = {"side": side, "tile": tile, "seconds": SECONDS[size]}
        data["rows"].append(measure.in_fresh_process("bench.lightstream:measured", 2400, **given))
        print(data["rows"][-1], flush=True)
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
