"""Training steps tile by tile: peak memory and time as the image grows, in budgets that are parts of stock's peak.

A U-Net with batch norm in training and with its norms frozen (eval), a ResNet-18 with its head, and a diffusers decoder
with a pixel loss, batch 1, in NCHW: one step (forward, loss, backward) of stock, of stock with checkpoints around its
blocks, of the converted network, and by `pc.tile` in a half, a third and a sixth of stock's peak (the ResNet and the
decoder: in a half and a third). Each form runs in a process of its own. Of large images, only what fits. Gradients
are compared in float64, and the losses of 200 steps of stock and `pc.tile` on made-up images with each other.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak

from . import measure, report, resnet, whole_models
from .measure import GIB, MIB

FORMS = ("stock", "checkpoints", "converted")
"""Before those by `pc.tile`."""
BLOCKS = ("Block", "BasicBlock", "UNetMidBlock2D", "UpDecoderBlock2D")
"""Class names of what the form with checkpoints checkpoints."""
STOCK_FITS = 9 * GIB
ONCE = 3e6
"""Images with more pixels than this are computed once."""
STEPS_TIMED = 2
ZERO = 1e-12
"""A gradient of this part of all of them, or less, is rounding."""
EXACT = {"full": 192, "tiny": 128}
"""The side at which gradients are compared."""
CURVE = {"full": (200, 128), "tiny": (2, 128)}
"""Steps of the loss curve, and the side of its images."""


class ToLoss(nn.Module):
    """A network and its loss: what is tiled ends in a number."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.net(x), target)


@dataclasses.dataclass(frozen=True)
class Case:
    net: Callable[[int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    sides: tuple[int, ...]
    target: Callable[[int], Tensor]
    largest: str = "2GiB"
    """The budget of the largest image, which stock does not fit."""
    parts: tuple[int, ...] = (2, 3, 6)
    """The budgets of others, as parts of stock's peak."""

    @property
    def forms(self) -> tuple[str, ...]:
        return *FORMS, *(f"tile, 1/{part}" for part in self.parts)


def of_pixels(side: int) -> Tensor:
    return torch.randint(0, 2, (1, side, side))


CASES = {
    "unet": Case(lambda side: whole_models.UNet(), F.cross_entropy, (512, 1024, 2048), of_pixels),
    "frozen": Case(lambda side: whole_models.UNet().eval(), F.cross_entropy, (512, 1024, 2048), of_pixels),
    "resnet": Case(
        lambda side: resnet.model(),
        F.cross_entropy,
        (1024, 2048, 4096),
        lambda side: torch.randint(0, 1000, (1,)),
        parts=(2, 3),
    ),
    "decoder": Case(
        whole_models.Decoder, F.mse_loss, (256, 512, 1024), lambda side: torch.randn(1, 3, side, side), parts=(2, 3)
    ),
}


def made(case: str, side: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    one = CASES[case]
    x = torch.randn(1, 4, side // 8, side // 8) if case == "decoder" else torch.randn(1, 3, side, side)
    return ToLoss(one.net(side), one.loss), (x, one.target(side))


def predicted(case: str, side: int) -> dict[str, Any]:
    """Stock's peak above the parameters, their gradients and the images."""
    model, images = made(case, side)
    parameters = sum(p.nbytes for p in model.parameters())
    fixed = 2 * parameters + sum(t.nbytes for t in (*model.buffers(), *images))
    found = pc.memory.trace(model, *images, fake=True, loss=lambda y: y)
    return {"peak": found.peak - fixed}


def step_of(form: str, model: nn.Module, images: tuple[Tensor, ...], budget: int | str) -> Callable[[], Tensor]:
    if form == "checkpoints":
        pc.checkpoint_modules(model, lambda _, module: type(module).__name__ in BLOCKS)
    if form == "converted":
        pc.convert(model)
    if form.startswith("tile"):
        pc.tile_modules(model, "", budget)  # plans in the first step

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(*images)
        loss.backward()
        return loss.detach()

    return step


def stepped(case: str, form: str, side: int, budget: int | str, once: bool) -> dict[str, Any]:
    """The peak of a step above parameters, gradients and images, how far the process grows in another one, whose memory
    is not counted, and the time of others. A first step plans; `once`: there is time for one step alone.
    """
    model, images = made(case, side)
    step = step_of(form, model, images, budget)
    found: list[Tensor] = []

    def gradients() -> int:
        return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

    row: dict[str, Any] = {}
    if not once:
        step()
        model.zero_grad(set_to_none=True)
        row["process"] = measure.peak_of(step).workspace - gradients()
        row["seconds"] = min(measure.seconds_of(step) for _ in range(STEPS_TIMED))
        model.zero_grad(set_to_none=True)
    peaks: list[int] = []
    seconds = measure.seconds_of(lambda: peaks.append(allocated_peak(lambda: found.append(step()))))
    row = {"peak": peaks[0] - gradients() - found[0].nbytes, "seconds": seconds} | row
    if form.startswith("tile"):
        pc.tile_modules(model, ())
        row["planning"] = measure.seconds_of(lambda: pc.tile_plan(model, images, budget=budget))
    return row


def errors(case: str, side: int, share: float) -> dict[str, float]:
    """The largest relative error of a parameter's gradient in a part of stock's peak, or in the least budget where that
    is more, both in float64. In float32 an activation next to zero that changes its sign moves gradients of either by
    more than all rounding. Gradients that are zero but for rounding, as of the biases of keys, are left out.
    """
    model, images = made(case, side)
    model, images = model.double(), (images[0].double(), images[1].double() if case == "decoder" else images[1])
    tiled = copy.deepcopy(model)
    model(*images).backward()
    budget = int(2 * share * predicted(case, side)["peak"])
    try:
        pc.tile_plan(tiled, images, budget=budget)
    except pc.BudgetError as refused:  # of small images weights have a large part
        budget = refused.least
    pc.tile(tiled, images, budget=budget).backward()
    pairs = zip(tiled.parameters(), model.parameters(), strict=True)
    grads = [(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None]
    all_of_it = torch.stack([want.norm() for _, want in grads]).norm()
    off = [((got - want).norm() / want.norm()).item() for got, want in grads if want.norm() > ZERO * all_of_it]
    return {"tile": max(off)}


def curves(steps: int, side: int) -> dict[str, list[float]]:
    """Losses of steps on made-up images with discs to segment, by stock and in a quarter of its peak."""
    found: dict[str, list[float]] = {}
    budget = predicted("unet", side)["peak"] // 4
    for form in ("stock", "tile, 1/4"):
        torch.manual_seed(0)
        model, random = ToLoss(whole_models.UNet(), F.cross_entropy), torch.Generator().manual_seed(1)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
        if form != "stock":
            pc.tile_modules(model, "", budget)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(*discs(side, random))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[form] = losses
    return found


def discs(side: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A noisy image of three discs, and where they are."""
    at = torch.arange(side) / side
    centers, radii = torch.rand(3, 2, generator=random), 0.05 + 0.1 * torch.rand(3, generator=random)
    inside = torch.zeros(side, side, dtype=torch.bool)
    for (y, x), radius in zip(centers, radii, strict=True):
        inside |= (at[:, None] - y) ** 2 + (at - x) ** 2 < radius**2
    image = inside.float() + 0.5 * torch.randn(3, side, side, generator=random)
    return image[None], inside[None].long()


def rows_of(case: str, side: int) -> list[dict[str, Any]]:
    stock = measure.in_fresh_process("bench.tile_training:predicted", 600, case=case, side=side)["peak"]
    once, rows = side**2 > ONCE, []
    for form in CASES[case].forms if stock <= STOCK_FITS else ("stock", f"tile, {CASES[case].largest}"):
        given: int | str = CASES[case].largest
        if "/" in form:
            given = stock // int(form[-1])
        row: dict[str, Any] = {"case": case, "form": form, "side": side}
        if form == "stock" and stock > STOCK_FITS:
            row |= {"peak": stock, "predicted": True}
        else:
            arguments = {"case": case, "form": form, "side": side, "budget": given, "once": once}
            try:
                row |= measure.in_fresh_process("bench.tile_training:stepped", 7200, **arguments)
            except RuntimeError as error:  # a budget that cannot be kept
                row["error"] = str(error).strip().splitlines()[-1]
        print(row, flush=True)
        rows.append(row)
    return rows


def kept(old: dict[str, Any], cases: Collection[str], head: dict[str, Any]) -> dict[str, Any]:
    """The results before a run of these cases: those of other cases in an earlier run, and where these are from."""
    if not old:
        return head | {"rows": [], "errors": {}, "heads": {}}
    rows = [row for row in old["rows"] if row["case"] not in cases]
    errors = {case: error for case, error in old["errors"].items() if case not in cases}
    heads = measure.heads_of(old, {row["case"]: None for row in rows})
    curves = {"curves": old["curves"]} if "curves" in old and "unet" not in cases else {}
    return head | {"rows": rows, "errors": errors, "heads": heads} | curves


def main(argv: list[str] | None = None) -> int:
    parser = measure.parser(__doc__, ("full", "tiny"))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="the others keep their results")
    parser.add_argument("--largest", type=int, default=2048, help="the largest side that is run")
    parser.add_argument("--side", type=int, help="this side alone, stored as tile_training_SIDE")
    arguments = parser.parse_args(argv)
    head = measure.report_head("tile_training", arguments.size)
    if arguments.side:
        data = kept({}, (), head)
        data["rows"] = [row for case in arguments.only for row in rows_of(case, arguments.side)]
        report.store(data, arguments, f"tile_training_{arguments.side}")
        return 0
    path = measure.folder(arguments) / "tile_training.json"
    data = kept(json.loads(path.read_text()) if path.exists() else {}, arguments.only, head)
    for case in arguments.only:
        sides = CASES[case].sides if arguments.size == "full" else (128,)
        for side in (side for side in sides if side <= arguments.largest):
            data["rows"] += rows_of(case, side)
            report.store(data, arguments)
        given = {"case": case, "side": EXACT[arguments.size], "share": 1 / 3}
        data["errors"][case] = measure.in_fresh_process("bench.tile_training:errors", 3600, **given)
    if "unet" in arguments.only:
        steps, side = CURVE[arguments.size]
        data["curves"] = measure.in_fresh_process("bench.tile_training:curves", 7200, steps=steps, side=side)
    report.store(data, arguments)
    print(f"peaks above {STOCK_FITS / MIB:.0f} MiB are predictions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
