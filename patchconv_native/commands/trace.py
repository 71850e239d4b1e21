"""Shows where the memory of a step goes: module by module, and what is in use at the peak.

The model is built with random weights and runs one step on random numbers: forward, backward of the sum of its
outputs and, with --optimizer, the optimizer's step. With --fake nothing is computed and no memory is taken, at any
size, also for a GPU that is not here.

  patchconv_native trace torchvision:resnet50 --size 512 --batch 4 --optimizer adamw
  patchconv_native trace timm:convnext_tiny --size 2048 --fake --device cuda --convert --html step.html
  patchconv_native trace my_models.py:unet --size 512x768 --checkpoint down.0 down.1 --json step.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import patchconv_native as pc

from . import models, options
from .errors import Failed, Mistake, line, near, out_of_memory
from .progress import console, has_rich, wrote

if TYPE_CHECKING:
    from ..memory.report import MemoryReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_step(parser, "autocast to this dtype")
    parser.add_argument("--fake", action="store_true", help="predict: compute nothing and take no memory")
    group = parser.add_argument_group("changes to the model")
    group.add_argument("--convert", action="store_true", help="pc.convert(model)")
    group.add_argument(
        "--checkpoint", nargs="+", action="extend", default=[], metavar="NAME",
        help="modules to recompute in backward, by their names in named_modules()",
    )  # fmt: skip
    group = parser.add_argument_group("the report")
    group.add_argument(
        "--depth", type=options.whole(0), metavar="N", help="depth of the module tree (default: as fits a page)"
    )
    group.add_argument("--plain", action="store_true", help="plain text, even if rich is installed")
    for name, what in (("html", "a page for a browser"), ("json", "the whole trace"), ("csv", "the memory log")):
        group.add_argument(f"--{name}", type=Path, metavar="FILE", help=what)
    group.add_argument("--plot", type=options.picture, metavar="FILE", help="memory over the step: .png, .svg, .pdf")


def run(arguments: argparse.Namespace) -> int:
    options.check_step(arguments)
    device = options.device(arguments.device, computed=not arguments.fake)
    options.files(html=arguments.html, json=arguments.json, csv=arguments.csv, plot=arguments.plot)
    source = models.find(arguments.model)
    if arguments.fake:
        report = source.without_memory(lambda model: _traced(model, arguments, device))
    else:
        report = _traced(source.build(), arguments, device)
    _give(report, arguments)
    return 0


def _traced(model: nn.Module, arguments: argparse.Namespace, device: torch.device) -> MemoryReport:
    shape = options.shape(arguments)
    model = options.ready(model, arguments, None if arguments.fake else device)
    _changed(model, arguments)
    x = options.example(model, shape, arguments, "meta" if arguments.fake else device)
    try:
        step = options.step(arguments, device)
        return pc.memory.trace(model, x, amp=options.amp(arguments), fake=arguments.fake, **step)
    except Exception as error:
        if out_of_memory(error) and (report := getattr(error, "memory_report", None)) is not None:
            _give(report, arguments)
            raise Failed(f"out of memory with an input of {options.dimensions(shape)}: {line(error)}") from error
        raise Failed(f"a step with an input of {options.dimensions(shape)} failed: {line(error)}") from error


def _changed(model: nn.Module, arguments: argparse.Namespace) -> None:
    if arguments.convert:
        pc.convert(model)
    names = dict(model.named_modules())
    for name in arguments.checkpoint:
        if not name or name not in names:
            raise Mistake(f"--checkpoint: expected the name of a module, got {name!r}{near(name, names)}")
    if arguments.checkpoint:
        try:
            pc.checkpoint_modules(model, arguments.checkpoint)
        except TypeError as error:  # a list of modules, which never runs, and the like
            raise Mistake(f"--checkpoint: {error}") from error


def _give(report: MemoryReport, arguments: argparse.Namespace) -> None:
    """Prints the report and writes its files."""
    print(f"{arguments.model}, input {options.dimensions(options.shape(arguments))}")
    if arguments.plain or not has_rich():
        print(report.text(arguments.depth))
    else:
        report.print(arguments.depth, console())
    writers = {
        arguments.html: report.to_html, arguments.json: report.to_json, arguments.csv: report.to_csv,
        arguments.plot: report.plot,
    }  # fmt: skip
    asked = [path for path in writers if path is not None]
    for path in asked:
        try:
            writers[path](path)
        except OSError as error:
            raise Failed(f"cannot write {path}: {line(error)}") from error
    wrote(asked)
