"""Whole models, converted beside stock: outputs, gradients, buffers, an optimizer's step, state_dict and the way back.

Stock and a converted copy get the same numbers and the same random state; a scalar of all their outputs goes backward.
Dropout and stochastic depth have probability 0 in both, for their randomness need not be the same.

In float32 each tensor must be as stock's within a few units in the last place of its largest element. Where it is not,
stock in float64 judges: ours may be 1.1 times as far from it as stock is. Where that fails too, stock is asked what
roundings do to this model: it runs with weights and inputs changed by at most one unit in the last place, some times,
and ours may err 3 times as much as the worst of these. A rounding also changes the sign of a number that a ReLU sees,
or the place of a maximum, and with it a gradient by much more than itself: somewhere in a wide model on every second
input. So a gradient that fails on one input must pass on another; outputs and running statistics have no such excuse,
apart from models that sort or round. In float64 none of this
happens: there stock and ours must agree to nine digits.

The plain run takes FAST from torchvision, each family once and with fewer of the blocks that repeat; `make check` takes
them whole and in every mode. PATCHCONV_ALL_MODELS=1 takes all of model_zoo.py and needs torchvision, timm and
diffusers; one that is missing is then an error. PATCHCONV_MODELS_SPLITS=n forces tiles, PATCHCONV_MODELS_LOG=FILE
appends a line for each model and mode: seconds, and what judged it.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from support import model_zoo
from support.model_zoo import Case, Inputs
from support.pairs import FULL, todays
from torch import Tensor, nn

import patchconv_native as pc

ALL = os.environ.get("PATCHCONV_ALL_MODELS", "0") == "1"
SPLITS = int(os.environ["PATCHCONV_MODELS_SPLITS"]) if "PATCHCONV_MODELS_SPLITS" in os.environ else None
LOG = os.environ.get("PATCHCONV_MODELS_LOG")
if not ALL:
    pytest.importorskip("torchvision", exc_type=Exception)

ULPS = 32 * torch.finfo(torch.float32).eps
DIGITS = 1e-9
SAMPLES = 6
SEEDS = 5
RATE = 0.05

FAST = """
    alexnet vgg11_bn resnet18 resnext50_32x4d squeezenet1_1 densenet121 inception_v3 googlenet shufflenet_v2_x0_5
    mobilenet_v2 mobilenet_v3_small mnasnet0_5 regnet_y_400mf efficientnet_b0 convnext_tiny swin_t maxvit
    deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large fasterrcnn_mobilenet_v3_large_320_fpn r3d_18 s3d mvit
    raft_small
"""
TIMM = [*model_zoo.TIMM.values(), *model_zoo.TIMM_MORE]
EVERY = [*model_zoo.TORCHVISION, *map(model_zoo.timm_case, TIMM), *model_zoo.DIFFUSERS]
CASES = [case for case in EVERY if ALL or case.name in {f"torchvision/{name}" for name in FAST.split()}]

LAYERS = "alexnet vgg11_bn resnext50_32x4d squeezenet1_1 mobilenet_v2 efficientnet_b0 r3d_18 mvit"
EVAL = "mobilenet_v3_small fasterrcnn_mobilenet_v3_large_320_fpn"


def modes(case: Case) -> tuple[str, ...]:
    name = case.name.partition("/")[2]
    if ALL:
        return ("train", "eval", "layers")
    layers = name in LAYERS.split()
    if FULL:
        return ("train", "eval", *(["layers"] * layers))
    return ("layers" if layers else "train", *(["eval"] * (name in EVAL.split())))


Values = dict[str, Tensor]
"""Of one run: output, loss, gradients, buffers and parameters after a step, by name."""


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from tensors(vars(value))


def without_chance(model: nn.Module) -> nn.Module:
    """Dropout, DropPath and StochasticDepth with probability 0, and what models hand to F.dropout themselves."""
    for module in model.modules():
        kinds = ("Dropout", "DropPath", "DropBlock", "StochasticDepth", "FeatureAlpha")
        chance = type(module).__name__.startswith(kinds)
        for name in ("p", "drop_prob", "drop_rate", "dropout", "attn_drop", "drop_path"):
            if isinstance(vars(module).get(name), float) and (chance or name != "p"):
                setattr(module, name, 0.0)
    return model


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copies of inputs, with the floating-point tensors in them changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(changed(item, change) for item in value)
    if isinstance(value, dict):
        return {key: changed(item, change) for key, item in value.items()}
    return value


def forward(model: nn.Module, inputs: Inputs, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    found = list(tensors(model(*changed(inputs, torch.clone))))
    assert any(t.requires_grad for t in found), "nothing to train"
    return found


def train(model: nn.Module, inputs: Inputs, seed: int) -> Values:
    """Forward, backward from weighted sums of all outputs, and one step of gradient descent."""
    outputs = forward(model, inputs, seed)
    values = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    torch.manual_seed(seed + 1)
    used = [t for t in outputs if t.requires_grad and t.numel()]
    weighted = [(t * torch.randn(t.shape, dtype=torch.float32).to(t.dtype)).sum() / t.numel() ** 0.5 for t in used]
    torch.stack(weighted).sum().backward()
    parameters = dict(model.named_parameters())
    values |= {f"gradient of {name}": p.grad for name, p in parameters.items() if p.grad is not None}
    torch.optim.SGD(parameters.values(), lr=RATE).step()
    values |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    values |= {f"parameter {name}": p.detach() for name, p in parameters.items()}
    return values


def jittered(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Moves each number by -1, 0 or 1 units in its last place."""

    def change(t: Tensor) -> Tensor:
        step = torch.randint(-1, 2, t.shape, generator=generator)
        return (
            torch.nextafter(t, torch.where(step == 0, t, step * torch.inf)) if t.dtype == torch.float32 else t.clone()
        )

    return change


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where not both are finite, or sizes differ, as those of lists of boxes may."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    found = (one.double() - other.double()).abs().max().item()
    return found if found == found else float("inf")


class Trial:
    """One input to a model: stock's values in float32, and, when they are asked for, in float64 and from numbers that
    differ in the last place.
    """

    def __init__(self, case: Case, model: nn.Module, seed: int) -> None:
        self.case, self.model, self.seed = case, model, seed
        torch.manual_seed(1000 + seed)
        self.inputs = case.inputs()
        self.stock = self.run(copy.deepcopy(model))
        self._double: Values | None = None
        self._jitter: list[dict[str, float]] = []

    def run(self, model: nn.Module) -> Values:
        return train(model, self.inputs, self.seed)

    def run_double(self, model: nn.Module) -> Values:
        return train(model.double(), changed(self.inputs, Tensor.double), self.seed)

    @property
    def double(self) -> Values:
        """Stock's, in float64; in float32 again for models that cannot."""
        if self._double is None:
            self._double = self.stock if self.case.no_double else self.run_double(copy.deepcopy(self.model))
        return self._double

    def jitter(self) -> Iterator[dict[str, float]]:
        """How far from float64 stock's values are with other last places, by name. The values themselves are let go."""
        for i in range(SAMPLES):
            if i == len(self._jitter):
                change = jittered(torch.Generator().manual_seed(i))
                model = copy.deepcopy(self.model)
                with torch.no_grad():
                    for p in model.parameters():
                        p.copy_(change(p))
                found = train(model, changed(self.inputs, change), self.seed)
                off = {name: distance(found.get(name, t.new_empty(0)), t) for name, t in self.double.items()}
                self._jitter.append(off)
            yield self._jitter[i]

    def judge(self, ours: Values) -> dict[str, str]:
        """Name to who says that the value is right; `wrong: ...` where nobody does."""
        assert list(ours) == list(self.stock), sorted(set(ours) ^ set(self.stock))
        return {name: self.judge_one(name, ours[name]) for name in ours}

    def judge_one(self, name: str, got: Tensor) -> str:
        stock = self.stock[name]
        if got.dtype != stock.dtype or got.shape != stock.shape:
            return f"wrong: {got.dtype} {tuple(got.shape)}, stock {stock.dtype} {tuple(stock.shape)}"
        if torch.equal(got, stock):
            return "equal"
        if not stock.is_floating_point():
            return "wrong: integers differ"
        slack = ULPS * stock.abs().max().item()
        if distance(got, stock) <= slack:
            return "rounding"
        exact = self.double[name]
        error, stock_error = distance(got, exact), distance(stock, exact)
        if error <= max(1.1 * stock_error, slack):
            return "float64"
        worst = stock_error
        for sample in self.jitter():
            worst = max(worst, sample[name])
            if error <= 3 * worst:
                return "jitter"
        return f"wrong: error {error:.2e}, stock {stock_error:.2e}, {worst:.2e} at worst; largest {slack / ULPS:.2e}"


def check_double(trial: Trial, ours: Values) -> None:
    """Small gradients that would be zero but for rounding are measured by the model's largest; where a model blows
    roundings up, what it makes of those of float32 says how much.
    """
    gradients = [t.abs().max().item() for name, t in trial.double.items() if name.startswith("gradient") and t.numel()]
    for name, stock in trial.double.items():
        if stock.is_floating_point() and stock.numel():
            scale = stock.abs().max().item() + 1e-4 * max(gradients)
            error = distance(ours[name], stock)
            bound = DIGITS * scale + 1e-6 * distance(trial.stock[name], stock)
            assert error <= bound, f"float64, {name}: differs by {error:.2e}, may by {bound:.2e}, largest {scale:.2e}"
        else:
            assert torch.equal(ours[name], stock), f"float64, {name}"


def converted(model: nn.Module, functional: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "patchconv_native.convert (left|gave)")
        model = pc.convert(copy.deepcopy(model), splits=SPLITS, functional=functional)
    assert pc.convert_report(model).converted, "nothing was converted"
    return model


def check_state(stock: nn.Module, ours: nn.Module) -> None:
    """From stock to ours and back; both have stock's numbers afterwards."""
    state = {key: t.clone() for key, t in stock.state_dict().items()}
    for source, target in ((stock, ours), (ours, stock)):
        assert list(target.state_dict()) == list(state)
        for t in target.state_dict().values():
            t.zero_()
        target.load_state_dict(source.state_dict())
        assert all(torch.equal(t, state[key]) for key, t in target.state_dict().items())


def check_revert(stock: nn.Module, ours: nn.Module, inputs: Inputs) -> None:
    assert pc.revert(ours) is ours
    assert [(name, type(m)) for name, m in ours.named_modules()] == [(n, type(m)) for n, m in stock.named_modules()]
    outputs = zip(forward(ours, inputs, 5), forward(stock, inputs, 5), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in outputs)
    assert all(torch.equal(t, stock.state_dict()[key]) for key, t in ours.state_dict().items())


@pytest.mark.parametrize(
    "case,mode",
    todays([(case, mode) for case in CASES for mode in modes(case)], 1 if ALL else 2),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_model(case: Case, mode: str) -> None:
    """layers: in training mode, without functional code."""
    start = time.perf_counter(), time.process_time()
    torch.manual_seed(0)
    whole = ALL or FULL
    model = without_chance((case.make if whole else model_zoo.SMALL.get(case.name, case.make))()).train(mode != "eval")
    if not whole:
        model_zoo.shorten(model)
    functional = mode != "layers"
    wrong: dict[str, str] = {}
    judges: Counter[str] = Counter()
    for seed in range(SEEDS):
        trial = Trial(case, model, seed)
        assert all(t.isfinite().all() for t in trial.stock.values()), "stock's own numbers are not finite"
        if seed == 0 and not case.no_double:
            check_double(trial, trial.run_double(converted(model, functional)))
        ours = converted(model, functional)
        verdicts = trial.judge(trial.run(ours))
        judges.update(verdict.partition(":")[0] for verdict in verdicts.values())
        now = {name: verdict for name, verdict in verdicts.items() if verdict.startswith("wrong")}
        fatal = [name for name in now if name.startswith(("output", "buffer")) and not case.discrete]
        wrong = now if seed == 0 or fatal else {name: now[name] for name in wrong if name in now}
        if not wrong or fatal:
            break
    if LOG:
        with open(LOG, "a") as log:
            wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
            counts = ", ".join(f"{count} {judge}" for judge, count in judges.items())
            log.write(f"{case.name} {mode}: {wall:.1f} s, of the processor {cpu:.1f}, inputs: {seed + 1}, {counts}\n")
    lines = [f"{len(wrong)} of {len(verdicts)} values of {case.name}, {mode}, input {seed}:"]
    assert not wrong, "\n".join(lines + [f"  {name}: {verdict}" for name, verdict in list(wrong.items())[:12]])
    stock = copy.deepcopy(model)
    check_state(stock, ours)
    check_revert(stock, ours, trial.inputs)


def test_every_family_of_torchvision_is_swept() -> None:
    import torchvision

    def family(name: str) -> str:
        return torchvision.models.get_model_builder(name).__module__.removeprefix("torchvision.models.")

    names = [case.name.partition("/")[2] for case in model_zoo.TORCHVISION]
    swept = {family(name) for name in names if name in torchvision.models.list_models()}
    swept |= {"maxvit", "video.mvit"}  # built by hand
    left = {family(name) for name in torchvision.models.list_models()} - swept
    assert {name.partition(".")[0] for name in left} == set(model_zoo.TORCHVISION_LEFT_OUT)
    assert set(FAST.split()) <= set(names)


@pytest.mark.skipif(not ALL, reason="PATCHCONV_ALL_MODELS=1 sweeps over timm")
def test_every_family_of_timm_is_swept() -> None:
    import timm

    assert set(timm.list_modules()) == {*model_zoo.TIMM, *model_zoo.TIMM_LEFT_OUT}
    for family, name in model_zoo.TIMM.items():
        assert name in timm.list_models(module=family)
    assert len(model_zoo.TIMM) >= 60
