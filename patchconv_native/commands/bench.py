"""Compares a step of a model, or one convolution, before and after conversion: time and memory on this machine.

Every round times one and then the other. The ratio is the time converted over the time of stock, as the median over
the rounds, with the lowest and the highest. Memory is counted apart from the timing, in a traced step of each.
Without MODEL one convolution is measured: IN channels to OUT, K x K pixels, zero padding. Its step computes the
gradient of the input too, as inside a network. The learning rate of an optimizer is 0.

  patchconv_native bench --conv 64x64x3 --size 1024
  patchconv_native bench torchvision:resnet18 --size 512 --batch 4 --json bench.json
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from .._bytes import format_bytes
from ..memory.labels import aligned
from ..memory.trace import sum_of
from . import models, options
from .errors import Failed, Mistake, line, out_of_memory
from .progress import Progress

LEAST = 0.1
"""Seconds that a timing takes at least. A faster step runs several times."""
CONV = (64, 64, 3)
"""The convolution without MODEL and --conv: channels in, channels out, kernel size."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, nargs="?")
    parser.add_argument("--conv", type=_conv, metavar="INxOUTxK", help="one convolution instead of a model (64x64x3)")
    options.add_step(parser, "autocast both to this dtype")
    parser.add_argument(
        "--rounds", type=options.whole(1, 1000), default=7, metavar="N", help="rounds of timing both (7)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results with every timing")
    options.add_quiet(parser)


def _conv(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){2}", text):
        raise argparse.ArgumentTypeError(f"expected INxOUTxK such as 64x64x3, got {text!r}")
    first, second, kernel = (int(part) for part in text.split("x"))
    return first, second, kernel


@dataclass
class Side:
    """One of the two models that are compared, with its input and its step."""

    model: nn.Module
    input: Tensor
    run: Callable[[], None]


def run(arguments: argparse.Namespace) -> int:
    options.check_step(arguments)
    if arguments.model and arguments.conv:
        raise Mistake("expected either MODEL or --conv, got both")
    device = options.device(arguments.device, computed=True)
    options.files(json=arguments.json)
    if arguments.model:
        name, source = arguments.model, models.find(arguments.model)
    else:
        first, second, kernel = arguments.conv or CONV
        if arguments.channels not in (3, first):
            raise Mistake(f"--channels: a convolution of {first} channels has an input of {first}")
        arguments.channels = first
        if arguments.size is not None and len(arguments.size) != 2:
            raise Mistake("--size: expected two numbers for a convolution")
        name = f"a convolution of {first} to {second} channels, {kernel} x {kernel}"
        source = models.Source(name, lambda: nn.Conv2d(first, second, kernel, padding=kernel // 2))
    shape = options.shape(arguments, (224, 224) if arguments.model else (512, 512))
    try:
        facts = _measured(source, arguments, device, shape)
    except (Failed, Mistake):
        raise
    except Exception as error:
        what = "out of memory" if out_of_memory(error) else "a step failed"
        raise Failed(f"{what} with an input of {options.dimensions(shape)}: {line(error)}") from error
    _print(name, shape, device, facts)
    step = {name: getattr(arguments, name) for name in ("eval", "amp", "optimizer", "channels_last")}
    about = {"what": name, "input": list(shape), "device": str(device), "step": step}
    options.write(arguments.json, {**about, **facts})
    return 0


def _measured(
    source: models.Source, arguments: argparse.Namespace, device: torch.device, shape: tuple[int, ...]
) -> dict[str, Any]:
    with Progress(arguments.quiet, total=arguments.rounds + 3) as progress:
        progress.next("building")
        model = options.ready(source.build(), arguments, device)
        x = options.example(model, shape, arguments, device).requires_grad_(not arguments.model and not arguments.eval)
        ours = pc.convert(copy.deepcopy(model))
        converted = len(pc.convert_report(ours).converted)
        sides = [_side(one, x, arguments) for one in (model, ours)]
        progress.next("warming up")
        for side in sides:
            side.run()
        times = max(1, math.ceil(LEAST / max(_seconds(sides[0], 1, device), 1e-6)))
        seconds: list[list[float]] = []
        for _ in range(arguments.rounds):
            progress.next("timing")
            seconds.append([_seconds(side, times, device) for side in sides])
        progress.next("counting memory")
        for side in sides:
            side.model.zero_grad(set_to_none=True)
            side.input.grad = None
        step = {**options.step(arguments, device), "amp": options.amp(arguments)}
        reports = [pc.memory.trace(side.model, side.input, **step) for side in sides]
    ratios = [theirs[1] / theirs[0] for theirs in seconds]
    return {
        "torch": torch.__version__,
        "package": pc.__version__,
        "threads": torch.get_num_threads(),
        "converted_layers": converted,
        "steps_a_timing": times,
        "seconds": {"stock": [pair[0] for pair in seconds], "converted": [pair[1] for pair in seconds]},
        "median_seconds": [statistics.median(pair[i] for pair in seconds) for i in range(2)],
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "peak": {"stock": reports[0].peak, "converted": reports[1].peak},
        "transient": {"stock": reports[0].transient, "converted": reports[1].transient},
        "saved": {"stock": reports[0].saved, "converted": reports[1].saved},
    }


def _side(model: nn.Module, x: Tensor, arguments: argparse.Namespace) -> Side:
    make = options.OPTIMIZERS.get(arguments.optimizer)
    optimizer = None if make is None else make([p for p in model.parameters() if p.requires_grad])
    dtype = options.amp(arguments)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        amp = torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None)
        with torch.set_grad_enabled(not arguments.eval), amp:
            output = model(x)
            if arguments.eval:
                return
            loss = sum_of(output)
        del output
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return Side(model, x, step)


def _seconds(side: Side, times: int, device: torch.device) -> float:
    """The time of one step: the mean of `times` steps."""
    _wait(device)
    begun = time.perf_counter()
    for _ in range(times):
        side.run()
    _wait(device)
    return (time.perf_counter() - begun) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _print(name: str, shape: tuple[int, ...], device: torch.device, facts: dict[str, Any]) -> None:
    print(f"{name}, input {options.dimensions(shape)} ({device}, {facts['threads']} threads, torch {facts['torch']})")
    rows = [("", "stock", "converted", "ratio")]
    stock, ours = facts["median_seconds"]
    ratio = facts["ratio"]
    rows.append(("time of a step, median", _time(stock), _time(ours), f"{ratio['median']:.3f}"))
    for key, title in (("peak", "peak memory"), ("transient", "above what was there"), ("saved", "saved for backward")):
        one, other = facts[key]["stock"], facts[key]["converted"]
        rows.append((title, format_bytes(one), format_bytes(other), f"{other / one:.3f}" if one else ""))
    print(aligned(rows, "<>>>"))
    count = len(facts["seconds"]["stock"])
    print(f"ratios of {count} rounds of {facts['steps_a_timing']}: {ratio['least']:.3f} to {ratio['most']:.3f}")
    if ratio["least"] <= 1 <= ratio["most"]:
        print("the rounds do not agree on which of the two is faster")
    print(f"{facts['converted_layers']} layers were converted")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
