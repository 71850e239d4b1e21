"""Says how each convolution of a model would be computed: in one call or in tiles, in how much memory, and why.

Nothing is computed, no memory is taken, and --device cuda needs no GPU. Without NAME a line for each convolution:
temporary memory besides its result, and that of one stock call. With names, all that is known of these, and the reason.

  patchconv_native explain torchvision:resnet18 --size 4096
  patchconv_native explain torchvision:resnet18 conv1 layer4.0.conv1 --size 4096 --pass wgrad
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import patchconv_native as pc

from .._bytes import format_bytes
from ..convert import conv_base
from ..explain import Explanation
from ..memory import fake as fakes
from ..memory.labels import aligned
from . import models, options
from .errors import Failed, Mistake, line, near

HEAD = ("convolution", "input", "path", "tiles", "memory", "stock's")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help="convolutions, by their names in named_modules()")
    parser.add_argument(
        "--pass", dest="pass_", choices=("fprop", "dgrad", "wgrad"), default="fprop",
        help="forward (fprop), or the gradient of the input (dgrad) or of the weight (wgrad)",
    )  # fmt: skip
    options.add_input(parser, "autocast to this dtype")
    parser.set_defaults(eval=True)


def run(arguments: argparse.Namespace) -> int:
    device = options.device(arguments.device, computed=False)
    return models.find(arguments.model).without_memory(lambda model: _explained(model, arguments, device))


def _explained(model: nn.Module, arguments: argparse.Namespace, device: torch.device) -> int:
    named = model.named_modules()
    convs = {module: name or "(model)" for name, module in named if conv_base(type(module)) is not None}
    for name in arguments.names:
        if name not in convs.values():
            raise Mistake(f"expected the name of a convolution, got {name!r}{near(name, convs.values())}")
    shape = options.shape(arguments)
    try:
        found = _of_a_call(options.ready(model, arguments), shape, convs, arguments, device)
    except (Failed, Mistake):
        raise
    except Exception as error:
        raise Failed(f"a call with an input of {options.dimensions(shape)} failed: {line(error)}") from error
    print(f"{arguments.model} ({device}), input {options.dimensions(shape)}, {arguments.pass_}")
    if missed := [name for name in arguments.names if name not in found]:
        raise Failed(f"{' and '.join(missed)}: not called with this input")
    if arguments.names:
        print("\n".join(f"{name}: {found[name]}" for name in arguments.names))
    else:
        print(aligned([HEAD, *map(_row, found, found.values())], "<<<>>>"))
        tiled = sum(one.path != "stock" for one in found.values())
        limit = format_bytes(pc.workspace_limit())
        print(f"{tiled} of {len(found)} not by one stock call; each may take {limit} of temporary memory")
    return 0


def _of_a_call(
    model: nn.Module, shape: tuple[int, ...], convs: dict[nn.Module, str], arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, Explanation]:  # fmt: skip
    """The convolutions that one call of the model runs, in its order. Of one that runs again, the first."""
    found: dict[str, Explanation] = {}

    def before(module: Any, given: Any) -> None:
        if convs[module] not in found:
            found[convs[module]] = pc.explain(given[0], module, pass_=arguments.pass_)

    handles = [module.register_forward_pre_hook(before) for module in convs]
    try:
        x = options.example(model, shape, arguments, "meta")
        amp = options.amp(arguments)
        with (
            fakes.faked(model, ((x,), {}), fakes.fake_device(device)) as (mode, (inputs, _)),
            mode,
            torch.no_grad(),
            torch.autocast(device.type, dtype=amp, enabled=amp is not None),
        ):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _row(name: str, one: Explanation) -> tuple[str, ...]:
    size, tiles = "x".join(map(str, one.input_size)), " x ".join(map(str, one.tiles))
    memory, stock = format_bytes(one.workspace_bytes), format_bytes(one.stock_workspace_bytes)
    return name, size, one.kernel or one.path, tiles, memory, stock
