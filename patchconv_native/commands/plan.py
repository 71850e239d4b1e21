"""Says what to turn on so that a training step fits a budget, or the largest batch or size that fits.

Everything is predicted: nothing is computed, no memory is taken, and --device cuda needs no GPU. The converted model,
checkpoints and smaller tiles are tried, and then the whole model in tiles, which takes seconds to plan (not with
--no-tiles, nor for --max-batch and --max-size). If none fits and it is allowed, autocast
(--amp) and saved tensors in the host's memory (--offload) are tried too. If nothing fits, one line gives the smallest
budget that would do, and the exit code is 1.

  patchconv_native plan torchvision:resnet50 --size 1024 --batch 8 --budget 6GiB --optimizer adamw --json plan.json
  patchconv_native plan timm:convnext_tiny --size 2048 --device cuda --frontier --plot frontier.png
  patchconv_native plan my_models.py:unet --size 512x768 --budget 24GiB --max-batch --planned
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import patchconv_native as pc

from .._bytes import format_bytes
from . import models, options
from .errors import Failed, Mistake, line
from .progress import Progress, wrote


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--budget",
        type=options.share_or_budget,
        metavar="BYTES",
        help="memory that the step may need: 6GiB, 500MB, or 50%% of what it needs without a plan",
    )
    parser.add_argument("--frontier", action="store_true", help="the best plans for all budgets, the fastest first")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--max-batch", action="store_true", help="find the largest batch that fits instead of a plan")
    either.add_argument(
        "--max-size", action="store_true", help="find the largest size that fits instead of a plan, in multiples of 32"
    )
    parser.add_argument(
        "--planned", action="store_true", help="with --max-batch or --max-size: apply the best plan first"
    )
    options.add_step(parser, "allow autocast to this dtype if nothing exact fits")
    parser.add_argument("--offload", action="store_true", help="allow saved tensors in the host's memory (cuda)")
    parser.add_argument("--no-tiles", action="store_true", help="do not try the whole model in tiles: plans sooner")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result; pc.Plan.load reads a plan")
    parser.add_argument("--plot", type=options.picture, metavar="FILE", help="draw the frontier: .png, .svg, .pdf")
    options.add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    device = _check(arguments)
    options.files(json=arguments.json, plot=arguments.plot)
    source = models.find(arguments.model)
    return source.without_memory(lambda model: _answer(model, arguments, device))


def _check(arguments: argparse.Namespace) -> torch.device:
    options.check_step(arguments)
    largest = arguments.max_batch or arguments.max_size
    frontier = arguments.frontier or arguments.plot
    if arguments.budget is None and (largest or not frontier):
        raise Mistake(f"expected --budget, such as --budget 6GiB{'' if largest else ', or --frontier'}")
    if largest and isinstance(arguments.budget, str):
        raise Mistake(f"--max-batch and --max-size: expected a number of bytes such as 6GiB, got {arguments.budget}")
    if arguments.planned and not largest:
        raise Mistake("--planned: expected --max-batch or --max-size with it")
    if largest and (frontier or arguments.amp or arguments.offload):
        raise Mistake("--max-batch and --max-size: expected none of --frontier, --plot, --amp and --offload with them")
    if arguments.max_size and len(arguments.size or (0, 0)) != 2:
        raise Mistake("--max-size: expected a size of two numbers")
    device = options.device(arguments.device, computed=False)
    if arguments.offload and device.type != "cuda":
        raise Mistake("--offload: expected --device cuda with it, whose memory is not the host's")
    return device


def _answer(model: nn.Module, arguments: argparse.Namespace, device: torch.device) -> int:
    shape = options.shape(arguments)
    model = options.ready(model, arguments)
    x = options.example(model, shape, arguments, "meta")
    step = options.step(arguments, device)
    try:
        if arguments.max_batch or arguments.max_size:
            return _largest(model, x, arguments, step)
        return _plan(model, x, arguments, step)
    except pc.BudgetError as error:
        raise Failed(str(error).removeprefix("plan: ")) from error
    except (Failed, Mistake):
        raise
    except Exception as error:
        raise Failed(f"a step with an input of {options.dimensions(shape)} failed: {line(error)}") from error


def _largest(model: nn.Module, x: torch.Tensor, arguments: argparse.Namespace, step: dict[str, Any]) -> int:
    what, find = ("batch", pc.max_batch) if arguments.max_batch else ("size", pc.max_size)
    with Progress(arguments.quiet) as progress:
        progress.next(f"looking for the largest {what}")
        try:
            found: Any = find(model, x, budget=arguments.budget, planned=arguments.planned, **step)
        except ValueError as error:
            if str(error).startswith(f"max_{what}: expected a budget"):
                smallest = "a batch of 1" if arguments.max_batch else "the smallest size"
                raise Failed(f"not even {smallest} fits into {format_bytes(arguments.budget)}") from error
            raise
    how = "with the best plan for it" if arguments.planned else "with the unchanged model"
    value = found if arguments.max_batch else options.dimensions(found)
    budget = format_bytes(arguments.budget)
    print(f"{arguments.model} ({step['device']}): the largest {what} is {value}, {how} in {budget}")
    shape = (found, *x.shape[1:]) if arguments.max_batch else (*x.shape[:2], *found)
    facts = {f"max_{what}": found, "budget": arguments.budget, "planned": arguments.planned, "input": list(shape)}
    options.write(arguments.json, {**facts, "model": arguments.model, "device": str(step["device"])})
    return 0


def _plan(model: nn.Module, x: torch.Tensor, arguments: argparse.Namespace, step: dict[str, Any]) -> int:
    step = {**step, "amp": options.amp(arguments), "offload": arguments.offload, "tiles": not arguments.no_tiles}
    frontier = arguments.frontier or arguments.plot is not None
    found: Any = None
    with Progress(arguments.quiet) as progress:

        def tried(strategy: str) -> None:
            progress.next(f"trying {strategy}")

        plan = None if arguments.budget is None else pc.plan(model, x, budget=arguments.budget, progress=tried, **step)
        if frontier:
            found = pc.plan(model, x, frontier=True, progress=tried, **step)
    print(f"{arguments.model}, input {options.dimensions(tuple(x.shape))}")
    if plan is not None:
        print(plan)
    if found is not None:
        print(found)
    if frontier:
        facts = None if plan is None else plan.to_dict()
        options.write(arguments.json, {"plan": facts, "frontier": [one.to_dict() for one in found.plans]})
    elif plan is not None:
        options.write(arguments.json, plan.to_dict())
    if arguments.plot is not None:
        found.plot(arguments.plot)
        wrote([arguments.plot])
    return 0
