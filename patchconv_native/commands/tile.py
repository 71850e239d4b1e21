"""Runs a model on an image on disk strip by strip, in a memory budget, and writes its result to disk.

INPUT and OUTPUT are .npy files, .zarr arrays or TIFF files, (N, C, H, W); of a TIFF file, pages or samples are the
channels. The model runs in eval mode and gets INPUT in its own dtype. Models from a library have random weights, but
for --weights. --resume goes on from the last strips that are written down in OUTPUT.journal, at most a few seconds
before the end of a process that was killed; rows that these strips had kept for the next one are computed again. A
network that needs the whole image first, as for the statistics of a norm, can go on only where the values it keeps are
in files: with --store. Without one it begins again. --resume where nothing has begun begins.

Nothing is computed twice: with --resume, OUTPUT.journal stays in the end, a small file that says "finished". The same
call with --resume then does nothing. A call without --resume begins anew, and leaves no journal. --resume is refused,
and OUTPUT stays, where the journal is of another call, or where OUTPUT is there without a journal.

  patchconv_native tile my_models.py:unet scan.npy mask.npy --budget 2GiB
  patchconv_native tile my_models.py:unet scan.tiff mask.zarr --budget 2GiB --store ./scratch --resume
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from ..tiles.arguments import Arguments
from ..tiles.arrays import check_out
from ..tiles.graph import Ref
from ..tiles.journal import Journal
from ..tiles.plan import TilePlan
from ..tiles.planning import plan_call
from ..tiles.tiling import run_plan
from . import images, models, options
from .errors import Failed, Mistake, line
from .progress import Progress, note, wrote

WEIGHTS = "the weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("input", type=Path, metavar="INPUT", help=f"the image: {images.FORMATS}")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help=f"the result: {images.FORMATS}")
    parser.add_argument(
        "--budget", type=options.budget, metavar="BYTES", help="memory above the parameters: 2GiB, 500MB"
    )
    parser.add_argument(
        "--tile", type=options.tile, metavar="N", help="rows of the result that a strip has; 64x512: and columns"
    )
    parser.add_argument(
        "--dim",
        type=options.dimension,
        default=2,
        metavar="D",
        help="the dimension along which strips go: 3 or -1 for the columns of (N, C, H, W), 0 its batch (default: 2)",
    )
    parser.add_argument("--store", metavar="FOLDER", help="keep values between sweeps there; cpu: in the host's memory")
    parser.add_argument("--resume", action="store_true", help="go on from where a process was killed (see above)")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="a state_dict for the model, by torch.save")
    parser.add_argument(
        "--device", type=options.device_name, metavar="cpu|cuda", help="or cuda:1 and so on (default: the GPU, if any)"
    )
    options.add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    device = options.device(arguments.device, computed=True)
    images.check("INPUT", arguments.input)
    images.check("OUTPUT", arguments.output)
    parent = arguments.output.parent
    if not parent.is_dir():
        raise Mistake(f"OUTPUT {arguments.output}: there is no folder {parent}")
    if arguments.output.resolve() == arguments.input.resolve():
        raise Mistake("expected OUTPUT to be another file than INPUT")
    source = models.find(arguments.model)
    image = images.read(arguments.input)
    model = _model(source, arguments, device)
    with torch.no_grad():
        try:
            _tile(model, image, arguments)
        except (pc.BudgetError, pc.NotServed) as error:
            raise Failed(str(error).removeprefix("tile: ")) from error
        except ValueError as error:
            if not str(error).startswith("tile: "):
                raise Failed(f"the model failed on {arguments.input}: {line(error)}") from error
            raise Mistake(str(error).removeprefix("tile: ")) from error
        except (RuntimeError, TypeError, OSError) as error:
            raise Failed(f"the model failed on {arguments.input}: {line(error)}") from error
    return 0


def _model(source: models.Source, arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    model = source.build().eval()
    if arguments.weights is not None:
        try:
            model.load_state_dict(torch.load(arguments.weights, map_location="cpu", weights_only=True))
        except Exception as error:
            raise Failed(f"--weights {arguments.weights}: {line(error)}") from error
    return model.to(device)


@torch.no_grad()
def _tile(model: nn.Module, image: Any, arguments: argparse.Namespace) -> None:
    given = Arguments((image,), arrays=True, dim=arguments.dim)
    store = "device" if arguments.store is None else arguments.store if arguments.store == "cpu" else _folder(arguments)
    plan = plan_call(
        "tile", model, model, given, arguments.budget, arguments.tile, store, keep_changes=True, out_later=True
    )
    fake, dtype = _result(plan)
    journal = Journal(Path(f"{arguments.output}.journal"), _identity(model, image, plan, given.dims, arguments))
    if arguments.resume:
        _go_on(journal, arguments)
        if journal.finished:
            note(f"{arguments.output} is finished already: nothing is computed; without --resume, tile begins again")
            return
    again = journal.state is not None
    if not again:
        journal.remove()  # before OUTPUT is not what it says any more
    strips = max((sweep.strips for sweep in plan.sweeps if sweep.results), default=1)
    strip = -(-fake.shape[2] // strips) if fake.dim() > 2 else 1
    out = images.write(arguments.output, tuple(fake.shape), dtype, strip, again)
    check_out("tile", out, plan.graph, [image])
    if not again:
        journal.begin()
    with Progress(arguments.quiet, left=True) as progress:
        run_plan(plan, given, out, lambda done, of: progress.at("strip", done, of), journal)
    if hasattr(out, "flush"):
        out.flush()
    if arguments.resume:
        journal.finish()
    else:
        journal.remove()
    wrote([arguments.output])


def _go_on(journal: Journal, arguments: argparse.Namespace) -> None:
    """Reads the journal for --resume. Its state is None where tile begins again."""
    output = arguments.output
    try:
        there = journal.load()
    except ValueError as error:
        why = "; models from a library have random weights without --weights" if WEIGHTS in str(error) else ""
        raise Mistake(f"--resume: {error}{why}; without --resume, tile begins again") from error
    if output.exists() and not there:
        raise Mistake(
            f"--resume: there is no {journal.path} that says how far {output} has come: it was finished by a call "
            "without --resume, or is of another program; without --resume, tile writes it anew"
        )
    if not output.exists() and there:
        journal.state, journal.finished = None, False
        note(f"{output} is gone: beginning again")
    elif journal.state is None and not journal.finished:
        note(f"nothing is written down in {journal.path}: beginning")


def _folder(arguments: argparse.Namespace) -> Path:
    path = Path(arguments.store)
    if not path.is_dir():
        raise Mistake(f"--store {path}: expected a folder that is there, or cpu")
    return path


def _result(plan: TilePlan) -> tuple[Tensor, Any]:
    """What is written into OUTPUT, without data, and its dtype of numpy's."""
    graph = plan.graph
    if not isinstance(graph.result, Ref):
        raise Mistake(
            f"expected a model whose result is one tensor, got one that returns {type(graph.result).__name__}"
        )
    fake = graph.fakes[graph.result.index]
    try:
        return fake, torch.empty(0, dtype=fake.dtype).numpy().dtype
    except TypeError:
        name = str(fake.dtype).removeprefix("torch.")
        raise Mistake(f"numpy has no {name}, the dtype of the result: end the model with .float()") from None


def _identity(
    model: nn.Module, image: Any, plan: TilePlan, dims: list[int], arguments: argparse.Namespace
) -> dict[str, str]:
    """All that the result follows from, by the names that a reader of --help knows."""
    state = os.stat(arguments.input)
    weights = hashlib.sha256()
    for name, value in model.state_dict().items():
        weights.update(repr((name, tuple(value.shape), str(value.dtype))).encode())
        for part in value.detach().flatten().split(2**22):
            weights.update(part.cpu().contiguous().view(torch.uint8).numpy())
    sweeps = [(sweep.number, sweep.strips, sorted(sweep.own.items())) for sweep in plan.sweeps]
    contents = state.st_size, state.st_mtime_ns, tuple(image.shape), str(image.dtype)
    return {
        "patchconv_native's version": pc.__version__,
        "torch's version": str(torch.__version__),
        "MODEL": arguments.model,
        "the model's layers": _digest([(call.name, call.module) for call in plan.graph.calls]),
        WEIGHTS: weights.hexdigest(),
        "INPUT's path": str(arguments.input.resolve()),
        "INPUT's contents": _digest(contents),
        "OUTPUT's path": str(arguments.output.resolve()),
        "--store": str(plan.store),
        "the strips (--budget, --tile or --dim)": _digest((dims, sweeps)),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
