"""Options that the commands share: the step, its device, and the files to write."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from .._bytes import KIB, parse_bytes
from ..planner.plans import is_share
from . import models
from .errors import Failed, Mistake, line, near
from .progress import wrote

PICTURES = (".png", ".svg", ".pdf")
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.0),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.0),
}
"""With a learning rate of 0: memory and time are the same, and repeated steps do not diverge."""


# --------------------------------------------------------------------------------------------------------
# Values of options; argparse adds the option's name to an error


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A parser of whole numbers within bounds."""

    def value(text: str) -> int:
        number = int(text) if re.fullmatch(r"[0-9]{1,12}", text) else -1
        if not least <= number <= most:
            bounds = f"of {least} or more" if most == 2**31 - 1 else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text!r}")
        return number

    return value


def sizes(text: str) -> tuple[int, ...]:
    """Dimensions of an input. 512 is 512 x 512, 512x768 height x width, 16x224x224 depth x height x width."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8}){0,2}", text):
        raise argparse.ArgumentTypeError(f"expected a size such as 512 or 512x768 (height x width), got {text!r}")
    found = tuple(int(part) for part in text.split("x"))
    return found * 2 if len(found) == 1 else found


def tile(text: str) -> int | tuple[int, ...]:
    """Rows of a strip, or coordinates along every dimension: 64, 64x512, 4x64x64."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8}){0,2}", text):
        raise argparse.ArgumentTypeError(f"expected rows such as 64, or 64x512 (rows x columns), got {text!r}")
    found = tuple(int(part) for part in text.split("x"))
    return found if len(found) > 1 else found[0]


def dimension(text: str) -> int:
    """A spatial dimension of an image, also counted from the last one, or 0, the batch."""
    if text not in ("0", "2", "3", "4", "-1", "-2", "-3"):
        raise argparse.ArgumentTypeError(f"expected a dimension from 2 to 4 or from -3 to -1, or 0, got {text!r}")
    return int(text)


def budget(text: str) -> int:
    """A number of bytes."""
    try:
        found = parse_bytes(text, "")
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 6GiB, 500MB or 1073741824, got {text!r}")
    if found < 64 * KIB and re.fullmatch(r"[0-9. ]+", text):
        raise argparse.ArgumentTypeError(f"expected a unit, such as {text.strip()}GiB, got {text!r} (bytes: {text}B)")
    return found


def share_or_budget(text: str) -> int | str:
    """A number of bytes, or a share of stock's peak: 50%."""
    return text if is_share(text) else budget(text)


def device_name(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}{near(text, ('cpu', 'cuda'))}")
    return text


def picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"expected a file that ends in {', '.join(PICTURES)}, got {text!r}")
    return path


# --------------------------------------------------------------------------------------------------------
# Options


def add_model(parser: argparse.ArgumentParser, **more: Any) -> None:
    parser.add_argument("model", metavar="MODEL", help=models.HELP, **more)


def add_input(parser: argparse.ArgumentParser, amp: str, of: str = "the call") -> Any:
    """Options of a call, its input and its device, and their group. `amp` is the help text of --amp."""
    group = parser.add_argument_group(of)
    group.add_argument(
        "--size", type=sizes, metavar="[Dx]H[xW]",
        help="pixels of the input: 512, 512x768 (height x width), 16x224x224 (depth x height x width) (default: 224)",
    )  # fmt: skip
    group.add_argument("--batch", type=whole(1), default=1, metavar="N", help="images in a batch (1)")
    group.add_argument("--channels", type=whole(1), default=3, metavar="N", help="channels of the input (3)")
    group.add_argument(
        "--device", type=device_name, metavar="cpu|cuda", help="or cuda:1 and so on (default: the GPU, if there is one)"
    )
    group.add_argument("--amp", choices=("bfloat16", "float16"), help=amp)
    group.add_argument("--channels-last", action="store_true", help="put model and input in channels_last")
    return group


def add_step(parser: argparse.ArgumentParser, amp: str) -> None:
    """Options of a step: those of a call, and what else is done."""
    group = add_input(parser, amp, "the step")
    group.add_argument("--eval", action="store_true", help="only the forward pass, in eval mode, without gradients")
    group.add_argument("--optimizer", choices=tuple(OPTIMIZERS), help="add its step and state (sgd: with momentum 0.9)")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print no progress on stderr")


def check_step(arguments: argparse.Namespace) -> None:
    if arguments.eval and arguments.optimizer:
        raise Mistake("expected either --eval or --optimizer: a forward pass has no optimizer's step")


def device(asked: str | None, computed: bool) -> torch.device:
    """The device of a step. A step that is only predicted, not `computed`, needs no GPU here. Raises Mistake."""
    built = pc.build_info()["cuda"] is not None
    there = torch.cuda.is_available()
    if asked is None:
        return torch.device("cuda" if built and there else "cpu")
    found = torch.device(asked)
    if found.type == "cuda":
        if there and (found.index or 0) >= torch.cuda.device_count():
            raise Mistake(f"--device {asked}: torch finds {torch.cuda.device_count()} GPUs here, the first is cuda:0")
        if computed and not there:
            raise Mistake(f"--device {asked}: expected a device that is here, and torch finds no GPU")
        if computed and not built:
            raise Mistake(f"--device {asked}: this patchconv_native was built without CUDA")
    return found


def files(**given: Path | None) -> list[Path]:
    """The files that were asked for, given by option. Raises Mistake if one cannot be written."""
    for name, path in given.items():
        if path is None:
            continue
        parent = path.parent
        if path.is_dir():
            raise Mistake(f"--{name} {path}: expected a file, got a folder")
        if not parent.is_dir():
            raise Mistake(f"--{name} {path}: there is no folder {parent}")
        if not os.access(path if path.exists() else parent, os.W_OK):
            raise Mistake(f"--{name} {path}: cannot be written")
        if name == "plot" and importlib.util.find_spec("matplotlib") is None:
            raise Mistake("--plot needs matplotlib: pip install 'patchconv_native[report]'")
    return [path for path in given.values() if path is not None]


def write(path: Path | None, facts: dict[str, Any]) -> None:
    """Writes facts as JSON and says so, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        wrote([path])


# --------------------------------------------------------------------------------------------------------
# The step, the model and its input


def amp(arguments: argparse.Namespace) -> torch.dtype | None:
    return getattr(torch, arguments.amp) if arguments.amp else None


def step(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What the options say of a step, as arguments of `memory.trace`, `plan`, `max_batch` and `max_size`."""
    return {"optimizer": OPTIMIZERS.get(arguments.optimizer), "device": device, "train": not arguments.eval}


def shape(arguments: argparse.Namespace, size: tuple[int, ...] = (224, 224)) -> tuple[int, ...]:
    return (arguments.batch, arguments.channels, *(arguments.size or size))


def _layout(dimensions: int) -> torch.memory_format:
    return torch.channels_last if dimensions == 4 else torch.channels_last_3d


def dimensions(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def ready(model: nn.Module, arguments: argparse.Namespace, device: torch.device | None = None) -> nn.Module:
    """The model in the mode and layout of the options, on `device` if one is given."""
    try:
        if device is not None:
            model = model.to(device)
        if arguments.channels_last:
            model = model.to(memory_format=_layout(len(shape(arguments))))
    except (RuntimeError, NotImplementedError) as error:
        raise Failed(f"the model cannot be brought to {device or 'channels_last'}: {line(error)}") from error
    return model.eval() if arguments.eval else model


def example(
    model: nn.Module, shape: tuple[int, ...], arguments: argparse.Namespace, device: torch.device | str
) -> Tensor:
    """An input of random numbers in the model's dtype. On the meta device it takes no memory."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    layout = _layout(len(shape)) if arguments.channels_last else torch.contiguous_format
    try:
        made = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        return made if made.is_meta else made.normal_()
    except (RuntimeError, TypeError) as error:
        raise Failed(f"there is no memory for an input of {dimensions(shape)}: {line(error)}") from error
