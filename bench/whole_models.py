"""Whole models: what conversion, tiles, checkpoints and plans save of the memory that one call needs.

Ten cases: the decoder of a diffusers AutoencoderKL, decoding and training; ResNet-18's and MobileNetV2's features of a
large image; a U-Net on a large image and a 3-D one on a volume, without gradients and training; training steps of
EfficientNetV2-S and ConvNeXt-T. Every form (stock, channels_last, converted, by tiles, with checkpoints, planned,
compiled, ...) runs in a process of its own: the peak of what torch allocates in a call, above the parameters and the
input and without the result, and beside it the growth of the process. Rivals run beside us: torch's checkpoints around
the same blocks, torch.compile with its memory budget, and diffusers' own tiled decoding, whose error is given too.
Times are taken in turn, all forms of a case in one process; `--rounds 0` leaves them out.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

from . import measure, report, resnet
from .measure import MIB


def of_rank(dims: int, name: str) -> Any:
    """nn.Conv2d and so on."""
    return getattr(nn, f"{name}{dims}d")


class Block(nn.Module):
    """Two 3x3 convolutions, each with batch norm and ReLU."""

    def __init__(self, channels: int, outputs: int, dims: int = 2) -> None:
        super().__init__()
        conv, norm = of_rank(dims, "Conv"), of_rank(dims, "BatchNorm")
        self.convs = nn.ModuleList(conv(c, outputs, 3, padding=1, bias=False) for c in (channels, outputs))
        self.norms = nn.ModuleList(norm(outputs) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return x


class UNet(nn.Module):
    """Halves the sides with max pools, doubles them with transposed convolutions, and concatenates what is equal."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), classes: int = 2, dims: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block(c, w, dims) for c, w in itertools.pairwise((3, *widths)))
        wide, self.pool = widths[::-1], of_rank(dims, "MaxPool")(2)
        transposed = of_rank(dims, "ConvTranspose")
        self.up = nn.ModuleList(transposed(c, w, 2, stride=2) for c, w in itertools.pairwise(wide))
        self.join = nn.ModuleList(Block(2 * w, w, dims) for w in wide[1:])
        self.head = of_rank(dims, "Conv")(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([up(x), skip], 1))
        return self.head(x)


class Decoder(nn.Module):
    """A latent to its picture, eight times as large a side: Stable Diffusion's decoder with fewer channels."""

    def __init__(self, picture: int) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        vae: Any = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(64, 128, 128, 128), layers_per_block=1, sample_size=picture // 2,
        )  # fmt: skip
        del vae.encoder, vae.quant_conv
        self.vae = vae

    def forward(self, latent: Tensor) -> Tensor:
        return self.vae.decode(latent).sample


def mobilenet(side: int) -> nn.Module:
    features: Any = resnet.model("mobilenet_v2").features
    return features


@dataclass(frozen=True)
class Case:
    """One model, and what is done with it. `blocks`: class names of what the forms with checkpoints checkpoint."""

    what: str
    model: Callable[[int], nn.Module]
    side: dict[str, int]
    train: bool
    forms: tuple[str, ...]
    batch: int = 1
    latent: bool = False
    blocks: tuple[str, ...] = ()
    dims: int = 2

    def input(self, size: str) -> Tensor:
        sides = [self.side[size] // 8 if self.latent else self.side[size]] * self.dims
        made = torch.Generator().manual_seed(1)
        return torch.randn(self.batch if size == "full" else 2, 4 if self.latent else 3, *sides, generator=made)


class Compiled(nn.Module):
    """torch.compile(model), with a share of the activations that its partitioner may save for backward."""

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__()
        self.model, self.share = torch.compile(model, dynamic=False), share

    def forward(self, x: Tensor) -> Tensor:
        with torch._functorch.config.patch(activation_memory_budget=self.share):
            return self.model(x)


LAYOUT, CONVERT = "channels_last", ("layers", "convert")  # without functional code, and with it
STEP = ("stock", LAYOUT, *CONVERT, "convert, channels_last")
CHECKPOINTED = (*STEP, "torch checkpoints", "pc checkpoints", "convert, pc checkpoints", "plan")
COMPILED = ("compiled", "compiled, half of the memory")
TILED = ("tile", "tile, channels_last", "tile, 128MiB")
CASES = {
    "decoder": Case(
        "AutoencoderKL decoder to 1024x1024, no gradients", Decoder, {"full": 1024, "tiny": 64}, False,
        ("stock", LAYOUT, *CONVERT, "convert, channels_last", "diffusers' tiling", "tile", "tile, 512MiB"),
        latent=True,
    ),
    "decoder step": Case(
        "AutoencoderKL decoder to 512x512, training step", Decoder, {"full": 512, "tiny": 64}, True, CHECKPOINTED,
        latent=True, blocks=("UNetMidBlock2D", "UpDecoderBlock2D"),
    ),
    "features": Case(
        "ResNet-18 features of 2048x2048, no gradients",
        lambda side: nn.Sequential(*list(resnet.model().children())[:-2]),
        {"full": 2048, "tiny": 64}, False, (*STEP, *TILED),
    ),
    "mobilenet": Case(
        "MobileNetV2 features of 2048x2048, no gradients", mobilenet,
        {"full": 2048, "tiny": 64}, False, ("stock", LAYOUT, "convert", *TILED),
    ),
    "unet": Case(
        "U-Net, 1536x1536, no gradients", lambda side: UNet(), {"full": 1536, "tiny": 64}, False, (*STEP, *TILED)
    ),
    "unet step": Case(
        "U-Net, 768x768, training step", lambda side: UNet(), {"full": 768, "tiny": 64}, True,
        (*CHECKPOINTED, *COMPILED), blocks=("Block",),
    ),
    "volume": Case(
        "3-D U-Net, 128x128x128, no gradients", lambda side: UNet((16, 32, 64, 128), dims=3),
        {"full": 128, "tiny": 64}, False, (*STEP, *TILED), dims=3,
    ),
    "volume step": Case(
        "3-D U-Net, 96x96x96, training step", lambda side: UNet((16, 32, 64, 128), dims=3),
        {"full": 96, "tiny": 64}, True, (*STEP, "plan"), dims=3,
    ),
    "efficientnet step": Case(
        "EfficientNetV2-S, batch 8 at 224x224, training step", lambda side: resnet.model("efficientnet_v2_s"),
        {"full": 224, "tiny": 64}, True, (*STEP, "plan", *COMPILED), batch=8,
    ),
    "convnext step": Case(
        "ConvNeXt-T, batch 8 at 224x224, training step", lambda side: resnet.model("convnext_tiny"),
        {"full": 224, "tiny": 128}, True, (*STEP, "plan"), batch=8,
    ),
}  # fmt: skip
PLAN_SHARE = 0.5  # of the peak that is predicted of the model as it stands


def call_of(case: Case, model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A forward pass without gradients, or a step of training: mean square of the outputs, backward, SGD."""
    if not case.train:
        return torch.no_grad()(lambda: model.eval()(x))
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def prepared(name: str, form: str, size: str) -> tuple[nn.Module, Tensor, str]:
    """Model and input of a case in a form, and of a plan what it turned on."""
    case, note = CASES[name], ""
    torch.manual_seed(0)
    model, x = case.model(case.side[size]), case.input(size)

    def is_block(_: str, module: nn.Module) -> bool:
        return any(cls.__name__ in case.blocks for cls in type(module).__mro__)

    if LAYOUT in form:
        layout = torch.channels_last if case.dims == 2 else torch.channels_last_3d
        model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    if form == "diffusers' tiling":
        model.vae.enable_tiling()  # type: ignore[union-attr, operator]
    if form == "torch checkpoints":
        for module in [m for m in model.modules() if is_block("", m)]:
            module.forward = functools.partial(torch_checkpoint, module.forward, use_reentrant=False)
    if form.startswith("tile"):
        budget = form.partition(", ")[2]
        pc.tile_modules(model, "", None if budget in ("", LAYOUT) else budget)
    if form.startswith(CONVERT):
        pc.convert(model, functional=form.startswith("convert"))
    if "pc checkpoints" in form:
        pc.checkpoint_modules(model, is_block)
    if form == "plan":
        options: dict[str, Any] = {"loss": lambda y: y.square().mean(), "train": case.train}
        stock = pc.memory.trace(model.train(), x, fake=True, **options).peak
        try:
            plan = pc.plan(model, x, budget=int(PLAN_SHARE * stock), **options)
        except pc.BudgetError as error:
            plan = error.plan  # what takes least
        plan.apply(model)
        note = f"budget {PLAN_SHARE * stock / MIB:.0f} MiB, parameters and input included; {plan.strategy}"
    if form.startswith("compiled"):
        model = Compiled(model, 0.5 if "half" in form else 1.0)
    return model, x, note


def memory(name: str, form: str, size: str, results: str) -> dict[str, Any]:
    """Bytes of one call, after one of a small part of the input, which sets up what is made once (where that compiles,
    of all of it); of a forward pass also the distance of its result from stock's, which is in the folder `results`.
    """
    case = CASES[name]
    model, x, note = prepared(name, form, size)
    small = x if form.startswith("compiled") else x[..., : x.shape[-2] // 4, : x.shape[-1] // 4]
    call_of(case, model, small.contiguous())()
    call, made = call_of(case, model, x), []
    peaks: list[int] = []

    def counted() -> Tensor:
        peaks.append(allocated_peak(lambda: made.append(call())))
        return made[0]

    process = measure.peak_of(counted)
    tensors = measure.result_bytes(made[0])
    row: dict[str, Any] = {"note": note, "peak": peaks[0] - tensors, "process": process.workspace}
    if not case.train:
        file = Path(results, f"{name}.pt")
        if form == "stock":
            torch.save(made[0], file)
        expected = torch.load(file)
        off, scale = made[0] - expected, expected.abs().max()
        row["error"] = {"rms": (off.norm() / expected.norm()).item(), "most": (off.abs().max() / scale).item()}
    return row


def times(name: str, size: str, rounds: int) -> dict[str, Any]:
    calls = {}
    for form in CASES[name].forms:
        model, x, _ = prepared(name, form, size)
        calls[form] = call_of(CASES[name], model, x)
    return measure.paired(calls, 0.0, least=rounds).facts("stock")


def measured(name: str, size: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of a case."""
    case, rows = CASES[name], []
    timed: dict[str, Any] = {}
    if rounds:
        timed = measure.in_fresh_process("bench.whole_models:times", 3600, name=name, size=size, rounds=rounds)
    with tempfile.TemporaryDirectory() as results:
        for form in case.forms:
            arguments = {"name": name, "form": form, "size": size, "results": results}
            row = measure.in_fresh_process("bench.whole_models:memory", 1800, **arguments)
            row = {"case": name, "what": case.what, "form": form} | row
            if "ms" in timed:
                row |= {"ms": timed["ms"][form], "ratio": timed["ratio"].get(form), "rounds": timed["rounds"]}
            rows.append(row)
            print(f"{name:<18} {form:<28} {row['peak'] / MIB if 'peak' in row else row['error']}", flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__, ("full", "tiny"))
    parser.add_argument("--rounds", type=int, default=3, help="of timing; 0: none")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="the others keep their results")
    arguments = parser.parse_args(argv)
    out = measure.folder(arguments)
    path = out / "whole_models.json"
    data = measure.report_head("whole_models", arguments.size)
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = {name: [row for row in old["rows"] if row["case"] == name and name not in arguments.only] for name in CASES}
    data["heads"] = measure.heads_of(old, [name for name in CASES if rows[name]])
    for name in arguments.only:
        rows[name] = measured(name, arguments.size, arguments.rounds)
        report.render(measure.write_results(data | {"rows": [row for group in rows.values() for row in group]}, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
