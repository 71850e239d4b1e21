"""What training keeps between forward and backward: stock, converted, and converted with functional code.

Three tables. Bytes kept for backward by eight models at 224x224, batch 2, training mode: what stays alive with the
graph alone (their storages, parameters and inputs' own not counted), beside what saved-tensor hooks see; the
floors are what conversion is meant to reach. Then the cases of memsave's paper (arXiv 2404.12406): everything trained,
the input alone, the input with batch norm in eval mode, norm layers alone, the first quarter; bytes kept, and the peak
of memory of the forward pass and of forward and backward. And the toy network of that paper: the peak of a whole step,
stock, converted, and with every layer frozen. Every number is taken in a process of its own. memsave_torch runs beside
us where it is installed; the eighth model needs diffusers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from . import kept, measure, report, resnet

# Share of stock's bytes that DESIGN wants reached, within 3 %.
FLOORS = {
    "resnet18": 0.663, "resnet101": 0.815, "vgg16_bn": 0.503, "densenet121": 0.501, "mobilenet_v2": 0.369,
    "efficientnet_v2_s": 0.450, "convnext_tiny": 0.497, "AutoencoderKL decoder": 0.375,
}  # fmt: skip
CASES = ("all", "input", "input, norm in eval", "norm layers", "first quarter")
PAPER = ("resnet101", "resnext101_64x4d", "efficientnet_v2_l")
BATCHES = {4: CASES, 2: ("all", "input, norm in eval")}  # of the paper's cases


def memsave(model: nn.Module) -> nn.Module:
    from memsave_torch.nn import convert_to_memory_saving

    return convert_to_memory_saving(model, clone_params=False)


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "stock": lambda model: model,
    "memsave": memsave,
    "layers": lambda model: pc.convert(model, functional=False),
    "convert": pc.convert,
}
OURS = ("layers", "convert")


def rivals() -> list[str]:
    return ["stock"] + (["memsave"] if importlib.util.find_spec("memsave_torch") else [])


def network(name: str) -> nn.Module:
    if name.startswith("AutoencoderKL"):
        from diffusers.models.autoencoders.vae import Decoder

        torch.manual_seed(0)
        return Decoder(4, 3, ("UpDecoderBlock2D",) * 2, (64, 128), layers_per_block=2, norm_num_groups=32).train()
    return resnet.model(name).train()


def image(name: str, side: int, batch: int) -> Tensor:
    latent = name.startswith("AutoencoderKL")
    return torch.randn(batch, 4, side // 2, side // 2) if latent else torch.randn(batch, 3, side, side)


def prepare(model: nn.Module, case: str) -> bool:
    """Freezes what the case freezes; whether the input needs a gradient."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    parameters = list(model.parameters())
    wanted = {
        "all": parameters, "first quarter": parameters[: len(parameters) // 4],
        "norm layers": [p for m in model.modules() if isinstance(m, norms) for p in m.parameters(recurse=False)],
    }.get(case, [])  # fmt: skip
    model.requires_grad_(False)
    for parameter in wanted:
        parameter.requires_grad_(True)
    if case == "input, norm in eval":
        for module in model.modules():
            if isinstance(module, norms):
                module.eval()
    return case.startswith("input")


def ready(name: str, case: str, form: str, side: int, batch: int) -> tuple[nn.Module, Tensor]:
    model = network(name)
    x = image(name, side, batch).requires_grad_(prepare(model, case))
    return FORMS[form](model), x


def graph(name: str, case: str, form: str, side: int, batch: int) -> dict[str, int]:
    """Bytes kept by one model."""
    model, x = ready(name, case, form, side, batch)
    seen = kept.saved_bytes(lambda: model(x), (*model.parameters(), *model.buffers()))
    return {"held": kept.held_bytes(lambda: model(x)), "saved": seen}


def peaks(name: str, case: str, form: str, side: int, batch: int) -> dict[str, int]:
    """Bytes kept by one model, and the peaks of a forward pass and of one with backward."""
    model, x = ready(name, case, form, side, batch)
    held = kept.held_bytes(lambda: model(x))
    forward = measure.peak_of(lambda: model(x)).above

    def step() -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    return {"held": held, "forward": forward, "step": measure.peak_of(step).above}


def toy(form: str, side: int) -> dict[str, int]:
    """Ten convolutions without bias, of which the fourth alone is trained (none: form "frozen")."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(10))).requires_grad_(False)
    if form != "frozen":
        model[3].weight.requires_grad_(True)
    x = torch.randn(256, 8, side, side)
    if form != "frozen":
        model = FORMS[form](model)  # type: ignore[assignment]

    def step() -> Tensor:
        loss = model(x).sum()
        if form != "frozen":
            loss.backward()
        return loss.detach()

    return {"peak": measure.peak_of(step).above}


def measure_all(size: str) -> dict[str, Any]:
    side = 224 if size == "full" else 64
    data = measure.report_head("lean", size) | {"floors": [], "cases": [], "toy": {}, "side": side}

    def run(target: str, forms: Iterable[str], **arguments: Any) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for form in forms:
            try:
                row[form] = measure.in_fresh_process(f"bench.lean:{target}", 600, form=form, **arguments)
            except RuntimeError as error:
                if form in OURS or form == "stock":
                    raise
                row[form] = {"error": str(error).strip().splitlines()[-1].partition(":")[0]}
        print(*arguments.values(), row, flush=True)
        return row

    models = {"full": list(FLOORS), "small": list(FLOORS)[:3]}.get(size, ["resnet18"])
    paper = {"full": PAPER, "small": PAPER[:1]}.get(size, ())
    for name in models:
        row = run("graph", ["stock", *OURS], name=name, case="all", side=side, batch=2)
        data["floors"].append({"model": name, "floor": FLOORS[name]} | row)
    for form in (*rivals(), "layers", "frozen"):
        data["toy"] |= run("toy", [form], side=256 if size == "full" else 64)
    for name in paper:
        for batch, cases in BATCHES.items():
            for case in cases:
                row = run("peaks", [*rivals(), *OURS], name=name, case=case, side=side, batch=batch)
                data["cases"].append({"model": name, "case": case, "batch": batch} | row)
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
