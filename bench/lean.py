"""What training keeps between forward and backward: stock, converted, and converted with functional code.

Three tables. Bytes kept for backward by eight models at 224x224, batch 2, training mode: what stays alive with the
graph alone (a census of storages, parameters and inputs' own not counted), beside what saved-tensor hooks see; the
floors are what conversion is meant to reach. Then the cases of memsave's paper: everything trained, the input alone,
the input with batch norm in eval mode, norm layers alone, the first quarter. And the toy network of that paper: peak of
memory of a whole step, in a process of its own, stock, converted, and with every layer frozen. Batch 2; the eighth
model needs diffusers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from . import census, measure, report

# Share of stock's bytes that DESIGN wants reached, within 3 %.
FLOORS = {
    "resnet18": 0.663, "resnet101": 0.815, "vgg16_bn": 0.503, "densenet121": 0.501, "mobilenet_v2": 0.369,
    "efficientnet_v2_s": 0.450, "convnext_tiny": 0.497, "AutoencoderKL decoder": 0.375,
}  # fmt: skip
CASES = ("all", "input", "input, norm in eval", "norm layers", "first quarter")
PAPER = ("resnet101", "resnext101_64x4d", "efficientnet_v2_l")
FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "stock": lambda model: model,
    "convert": pc.convert,
    "functional": lambda model: pc.convert(model, functional=True),
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith("AutoencoderKL"):
        from diffusers.models.autoencoders.vae import Decoder

        return Decoder(4, 3, ("UpDecoderBlock2D",) * 2, (64, 128), layers_per_block=2, norm_num_groups=32).train()
    import torchvision

    return getattr(torchvision.models, name)(weights=None).train()


def image(name: str, side: int) -> Tensor:
    return (
        torch.randn(2, 4, side // 2, side // 2) if name.startswith("AutoencoderKL") else torch.randn(2, 3, side, side)
    )


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


def kept(name: str, case: str, form: str, side: int) -> dict[str, int]:
    """Bytes kept by one model. In a process of its own: `python -m bench.lean` calls it so."""
    model = network(name)
    x = image(name, side).requires_grad_(prepare(model, case))
    model = FORMS[form](model)
    seen = census.saved_bytes(lambda: model(x), (*model.parameters(), *model.buffers()))
    return {"held": census.held_bytes(lambda: model(x)), "saved": seen}


def toy(form: str, side: int) -> dict[str, int]:
    """Ten convolutions without bias, of which the fourth alone is trained (none: form "frozen")."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(10))).requires_grad_(False)
    if form != "frozen":
        model[3].weight.requires_grad_(True)
    x = torch.randn(256, 8, side, side)
    if form == "convert":
        pc.convert(model)

    def step() -> Tensor:
        loss = model(x).sum()
        if form != "frozen":
            loss.backward()
        return loss.detach()

    return {"peak": measure.peak_of(step).above}


def measure_all(size: str) -> dict[str, Any]:
    side = 224 if size == "full" else 64
    data = measure.report_head("lean", size) | {"floors": [], "cases": [], "toy": {}, "side": side}

    def run(name: str, case: str, form: str) -> dict[str, Any]:
        return measure.in_fresh_process("bench.lean:kept", 300, name=name, case=case, form=form, side=side)

    models = {"full": list(FLOORS), "small": list(FLOORS)[:3]}.get(size, ["resnet18"])
    paper = {"full": PAPER, "small": PAPER[:1]}.get(size, ())
    for name in models:
        floor = FLOORS[name]
        row: dict[str, Any] = {"model": name, "floor": floor} | {form: run(name, "all", form) for form in FORMS}
        data["floors"].append(row)
        print(name, {form: row[form] for form in FORMS}, flush=True)
    for name in paper:
        for case in CASES:
            row = {"model": name, "case": case} | {form: run(name, case, form) for form in FORMS}
            data["cases"].append(row)
            print(name, case, {form: row[form] for form in FORMS}, flush=True)
    for form in ("stock", "convert", "frozen"):
        data["toy"][form] = measure.in_fresh_process(
            "bench.lean:toy", 300, form=form, side=256 if size == "full" else 32
        )
    print("toy", data["toy"], flush=True)
    return data


if __name__ == "__main__":
    sys.exit(report.script(__doc__, measure_all))
