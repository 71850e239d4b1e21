"""Convolutional networks at sizes where stock PyTorch runs out of memory.

    import patchconv_native as pc

    model = pc.convert(model)                   # in place, reversible: same parameters, hooks, state_dict
    y = pc.Conv2d(3, 64, 7, padding=3)(x)       # a torch.nn.Conv2d subclass
    y = torch.ops.patchconv.conv2d(x, w, b)     # also inside TorchScript and C++
    with pc.lean(): y = f(x)                    # functional code (F.relu, torch.cat, ...) without conversion
    y = pc.functional.group_norm(x, 32)         # torch.nn.functional's functions, which save less
    y = pc.checkpoint(block, x)                 # recomputed in backward; batch norm's statistics are updated once
    y = pc.microbatch(stage, x, chunks=8)       # the activations of one chunk, batch norm over the whole batch
    y = pc.tile(model, x, budget="512MiB")      # the whole network strip by strip, the same numbers
    report = pc.memory.trace(model, x)          # where a step's memory goes, measured or predicted
    plan = pc.plan(model, x, budget="6GiB")     # what to turn on so that it fits

Importing this package loads its operators (torch.ops.patchconv.*) and needs torch alone.
"""

from typing import Any

from . import _library

_library.load()

from . import conv_rules, flops, functional, layers, memory  # noqa: E402
from ._library import BuildMismatchError, NotBuiltError, build_info  # noqa: E402
from .checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential  # noqa: E402
from .checkpoint_modules import checkpoint_modules  # noqa: E402
from .convert import ConvertReport, convert, convert_model, convert_report, revert  # noqa: E402
from .explain import Explanation, explain  # noqa: E402
from .lean import lean  # noqa: E402
from .microbatch import microbatch  # noqa: E402
from .microbatch_modules import microbatch_modules  # noqa: E402
from .modules import (  # noqa: E402
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from .planner import BudgetError, Frontier, Plan, max_batch, max_size, plan  # noqa: E402
from .settings import backend, last_path, recompute, record_paths, workspace_limit  # noqa: E402
from .spatial import NotServed  # noqa: E402
from .tiles import TilePlan, tile, tile_modules, tile_plan  # noqa: E402

flops.register()
conv_rules.load()

__version__ = build_info()["version"]

globals().update({layer.__name__: layer for layer in layers.LAYERS.values()})


def __getattr__(name: str) -> Any:
    """Submodules that are imported when they are first asked for: `distributed` needs torch.distributed, and
    `lean_functional` is deprecated.
    """
    if name in ("distributed", "lean_functional"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BudgetError",
    "BuildMismatchError",
    "CheckpointFunction",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "ConvertReport",
    "Explanation",
    "Frontier",
    "NotBuiltError",
    "NotServed",
    "Plan",
    "TilePlan",
    "backend",
    "build_info",
    "checkpoint",
    "checkpoint_modules",
    "checkpoint_sequential",
    "convert",
    "convert_model",
    "convert_report",
    "explain",
    "functional",
    "last_path",
    "lean",
    "lean_functional",
    "max_batch",
    "max_size",
    "memory",
    "microbatch",
    "microbatch_modules",
    "plan",
    "recompute",
    "record_paths",
    "revert",
    "tile",
    "tile_modules",
    "tile_plan",
    "workspace_limit",
] + [layer.__name__ for layer in layers.LAYERS.values()]
