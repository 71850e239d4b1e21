"""Training steps of whole models on a GPU, for bench.gpu: stock beside `pc.convert`, peak and time.

Every model is trained as it is, in channels_last, converted, converted under `pc.backend("native")`, and converted in
channels_last; in float32 and under autocast in bfloat16. The peak is all that torch's allocator holds in a step,
weights and pictures included, and beside it what `pc.memory.trace` predicts of it without data. All forms of a model
are timed in turn, to the end of the device's work.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import patchconv_native as pc

from . import measure, resnet
from .gpu_measure import Deadline, Save, guarded, in_time
from .gpu_tile import Loss
from .measure import MIB
from .whole_models import LAYOUT, Decoder, UNet

STOCK, CONVERT, NATIVE = "stock", "convert", "convert, native"
FORMS = (STOCK, CONVERT, NATIVE, LAYOUT, f"{CONVERT}, {LAYOUT}")
HALF = torch.bfloat16
SECONDS = {"full": 1.0, "tiny": 0.0}  # of timing, all forms of a model together
ROUNDS = {"full": 5, "tiny": 1}


@dataclass(frozen=True)
class Model:
    make: Callable[[int], nn.Module]  # for images of a side
    shape: dict[str, tuple[int, ...]]

    def input(self, size: str) -> Tensor:
        return torch.randn(self.shape[size], generator=torch.Generator().manual_seed(1))


def _torchvision(name: str, batch: int = 64) -> Model:
    return Model(lambda side: resnet.model(name), {"full": (batch, 3, 224, 224), "tiny": (2, 3, 64, 64)})


MODELS = {
    "ResNet-50": _torchvision("resnet50"),
    "U-Net": Model(lambda side: UNet(), {"full": (4, 3, 768, 768), "tiny": (2, 3, 32, 32)}),
    "AutoencoderKL decoder": Model(lambda side: Decoder(8 * side), {"full": (4, 4, 64, 64), "tiny": (1, 4, 8, 8)}),
    "EfficientNetV2-S": _torchvision("efficientnet_v2_s"),
    "ConvNeXt-T": _torchvision("convnext_tiny"),
}
NAMES = {"full": tuple(MODELS), "tiny": ("U-Net",)}


def forms(device: str) -> tuple[str, ...]:
    """The CPU has no kernels of the project's own to choose."""
    return tuple(form for form in FORMS if form != NATIVE or device == "cuda")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


@dataclass
class Trained:
    """A model on a device, in a form, and what it is trained on."""

    form: str
    model: nn.Module
    x: Tensor
    amp: torch.dtype | None

    def step(self) -> Callable[[], Tensor]:
        optimizer, device = sgd(self.model.parameters()), self.x.device.type

        def call() -> Tensor:
            optimizer.zero_grad()
            with self.backend():
                with torch.autocast(device, self.amp) if self.amp else contextlib.nullcontext():
                    loss = self.model(self.x)
                loss.backward()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            return loss.detach()

        return call

    def backend(self) -> Any:
        return pc.backend("native") if self.form == NATIVE else contextlib.nullcontext()

    def predicted(self) -> int:
        with self.backend():
            return pc.memory.trace(self.model, self.x, fake=True, optimizer=sgd, amp=self.amp).peak


def trained(name: str, form: str, size: str, device: str, amp: torch.dtype | None) -> Trained:
    torch.manual_seed(0)
    model, x = Loss(MODELS[name].make(MODELS[name].shape[size][-1])).train(), MODELS[name].input(size)
    model, x = model.to(device), x.to(device)
    if form.endswith(LAYOUT):
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    if form.startswith(CONVERT):
        pc.convert(model)
    return Trained(form, model, x, amp)


def _memory(name: str, form: str, size: str, device: str, amp: torch.dtype | None) -> dict[str, Any]:
    others = _held(device)
    one = trained(name, form, size, device, amp)
    predicted, step = one.predicted(), one.step()
    loss = step()
    one.model.zero_grad()
    own = _held(device) - others
    return {"peak": own + measure.peak_of(step, device).above, "predicted": predicted, "loss": loss.item()}


def _held(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _times(name: str, size: str, device: str, amp: torch.dtype | None) -> dict[str, Any]:
    calls = {form: trained(name, form, size, device, amp).step() for form in forms(device)}
    return measure.paired(calls, SECONDS[size], least=ROUNDS[size], most=20, warm=2).facts(STOCK)


def works(size: str) -> Iterator[tuple[str, torch.dtype | None]]:
    return ((name, amp) for name in NAMES[size] for amp in (HALF, None))


def measure_section(size: str, device: str, rows: list[Any], save: Save, left: Deadline) -> list[str]:
    """Fills `rows`; returns the names of what there was no time for."""
    missing: list[str] = []
    for name, amp in in_time(works(size), left, missing, lambda work: f"steps: {work[0]}, {work[1] or torch.float32}"):
        timed = guarded(partial(_times, name, size, device, amp), device)
        for form in forms(device):
            row: dict[str, Any] = {"model": name, "shape": MODELS[name].shape[size], "form": form}
            row |= {"amp": str(amp).removeprefix("torch.") if amp else None}
            row |= guarded(partial(_memory, name, form, size, device, amp), device)
            row |= {"ms": timed["ms"][form], "of_stock": timed["ratio"].get(form)} if "ms" in timed else timed
            rows.append(row)
            outcome = row.get("error") or (
                f"{row['peak'] / MIB:.0f} MiB, predicted {row['predicted'] / MIB:.0f}, {row['ms']['median']:.1f} ms"
            )
            print(f"{name:<22} {row['amp'] or 'float32':<9} {form:<24} {outcome}", flush=True)
        save()
    return missing
