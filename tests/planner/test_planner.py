"""Plans keep what they promise: the measured peak is within the budget, results stay what they were."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import FULL
from support.seeds import SWEEP_SEED
from support.spatial_chains import Unknown
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import patchconv_native as pc
from patchconv_native._budget import MARGIN, fits, least_budget
from patchconv_native.memory import trace
from patchconv_native.planner import Strategy


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + x)


class Dense(nn.Module):
    def __init__(self, channels: int, growth: int = 8) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def stage(i: int, o: int) -> nn.Sequential:
            norm = nn.GroupNorm(4, o)
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1), norm, nn.SiLU(), nn.Conv2d(o, o, 3, padding=1), nn.SiLU()
            )

        self.down1, self.down2 = stage(3, 16), stage(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.last = nn.Sequential(stage(32, 16), nn.Conv2d(16, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        return self.last(torch.cat([one, self.up(self.down2(F.max_pool2d(one, 2)))], 1))


def residual() -> nn.Module:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual(16) for _ in range(3)), *head)


def plain() -> nn.Module:
    """A stack in blocks, with dropout: what runs again must draw the same mask."""

    def block(i: int, o: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Dropout(0.1))

    return nn.Sequential(block(3, 16), block(16, 24), nn.MaxPool2d(2), block(24, 24), block(24, 8))


def dense() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Dense(8 + 8 * i) for i in range(3)), nn.Conv2d(32, 2, 1))


MODELS: dict[str, Any] = {"residual": residual, "plain": plain, "dense": dense, "unet": UNet}
SHARES = (0.95, 0.8, 0.65, 0.5, 0.4, 0.3)
SIZES = ((2, 3, 64, 64), (1, 3, 96, 128))


def budgets() -> list[tuple[str, tuple[int, ...], float]]:
    """Models, sizes and shares of stock's peak: all of them, or every model and size with one share of the day's."""
    draw = random.Random(SWEEP_SEED)
    shares = {case: [round(draw.uniform(0.3, 0.95), 2)] for case in itertools.product(MODELS, SIZES)}
    return [(*case, share) for case, some in shares.items() for share in (SHARES if FULL else some)]


def seeded(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


@pytest.mark.parametrize(("name", "shape", "share"), budgets())
def test_the_measured_peak_is_within_the_budget(name: str, shape: tuple[int, ...], share: float) -> None:
    model, x = seeded(name), torch.randn(shape)
    stock = trace(model, x).peak
    budget = int(stock * share)
    try:
        plan = pc.plan(model, x, budget=budget, tiles=FULL)
    except pc.BudgetError as error:
        assert error.least > budget
        plan = pc.plan(model, x, budget=error.least, tiles=FULL)
        budget = error.least
    assert plan.needs <= budget
    plan.apply(model)
    assert trace(model, x).peak <= budget
    plan.undo(model)
    assert trace(model, x).peak == pytest.approx(stock, rel=2e-3), "as it was"


def test_what_budgets_need() -> None:
    """Some need nothing, some conversion, some checkpoints, some cannot be had."""
    kinds = set()
    for share in (1.2, 0.9, 0.7, 0.05):
        model, x = seeded("residual"), torch.randn(2, 3, 64, 64)
        try:
            strategy = pc.plan(model, x, budget=int(trace(model, x).peak * share), tiles=False).strategy
            kinds.add((strategy.convert, bool(strategy.checkpoints)))
        except pc.BudgetError:
            kinds.add((None, None))  # type: ignore[arg-type]
    assert {(True, False), (True, True), (None, None)} <= kinds


class Listed(nn.Module):
    """Blocks in an nn.ModuleList, as most U-Nets have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Conv2d(3, 16, 3, padding=1), nn.ModuleList(Residual(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_checkpoints_inside_of_a_module_list() -> None:
    model, x = Listed(), torch.randn(2, 3, 64, 64)
    lean = trace(pc.convert(copy.deepcopy(model)), x, fake=True).peak
    plan = pc.plan(model, x, budget=int(0.85 * lean), tiles=False)
    assert plan.strategy.checkpoints and all(name.startswith("blocks.") for name in plan.strategy.checkpoints)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_statistics_stay(name: str) -> None:
    model, x = seeded(name).double(), torch.randn(2, 3, 48, 48, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    other = copy.deepcopy(model)
    try:
        plan = pc.plan(other, x, budget=1, tiles=False)
    except pc.BudgetError as error:
        plan = error.plan
    assert plan.strategy.checkpoints or plan.strategy.splits
    plan.apply(other)
    outputs = [one(x).square().mean() for one in (model, other)]
    for value in outputs:
        value.backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad)
    for one, two in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(two, one)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def test_apply_and_undo() -> None:
    model, x = pc.convert(seeded("residual"), splits=3), torch.randn(2, 3, 64, 64)
    before, keys = classes(model), list(model.state_dict())
    with pytest.raises(pc.BudgetError) as raised:
        pc.plan(model, x, budget="1MiB", tiles=False)
    assert classes(model) == before and model[0].splits == 3, "planning changes nothing"
    plan = raised.value.plan
    with pytest.raises(ValueError, match=r"plan\.undo: expected a model that this plan was the last one applied to"):
        plan.undo(model)
    assert plan.apply(model) is model
    assert classes(model) != before and list(model.state_dict()) == keys
    second = pc.Plan(**{**vars(plan), "strategy": Strategy(convert=True)})
    second.apply(model)
    with pytest.raises(ValueError, match="the last one applied"):
        plan.undo(model)
    assert plan.undo(second.undo(model)) is model
    assert classes(model) == before and model[0].splits == 3
    plan.strategy.checkpoints.append("nowhere")
    with pytest.raises(ValueError, match="expected the model to have a module named 'nowhere'"):
        plan.apply(model)
    assert classes(model) == before


def test_smaller_tiles() -> None:
    """Where the workspace of one convolution is the peak."""
    conv = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", bias=False).double()
    model, x = nn.Sequential(conv), torch.randn(1, 8, 512, 512, dtype=torch.float64)
    least = trace(pc.convert(copy.deepcopy(model)), x, train=False).peak
    plan = pc.plan(model, x, budget=int(least * 0.95), train=False)
    assert list(plan.strategy.splits) == ["0"]
    plan.apply(model)
    assert trace(model, x, train=False).peak <= plan.budget  # type: ignore[operator]
    assert conv.splits == tuple(plan.strategy.splits["0"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("train", [True, False])
def test_tiles_where_nothing_else_fits(train: bool) -> None:
    """In the least that tiles take, and in more, that is less than what all else takes."""
    model, x = seeded("plain"), torch.randn(1, 3, 96, 96)
    model[0][3].p = model[1][3].p = model[3][3].p = model[4][3].p = 0.0
    stock = copy.deepcopy(model)
    before, peak = classes(model), trace(copy.deepcopy(model), x, train=train).peak
    with pytest.raises(pc.BudgetError) as raised:
        pc.plan(model, x, budget=1, train=train)
    least = raised.value.least
    assert least < peak / 2 and raised.value.plan.strategy.tile
    for budget in (least, (least + peak // 2) // 2)[: 2 if FULL or not train else 1]:
        plan = pc.plan(model, x, budget=budget, train=train)
        assert plan.strategy == Strategy(tile=plan.strategy.tile) and plan.needs <= budget
        assert "tile_modules: the model in tiles" in str(plan) and plan.extra_time > 0
        assert plan.extra_times[1] > 1.5 * (1 + plan.extra_time) - 1  # less is known of them than of others
        plan.apply(model)
        assert trace(copy.deepcopy(model), x, train=train).peak <= budget
        with torch.set_grad_enabled(train):
            outputs = [one(x).square().mean() for one in (model, stock)]
        torch.testing.assert_close(*outputs)
        for one, two in zip(model.parameters(), stock.parameters(), strict=True) if train else ():
            grads = [
                torch.autograd.grad(value, of, retain_graph=True)[0]
                for value, of in zip(outputs, (one, two), strict=True)
            ]
            torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)
        assert classes(plan.undo(model)) == before


def test_what_could_not_be_tried_is_said() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))

        def forward(self, x: Tensor, apply: Any = Unknown.apply) -> Tensor:  # a name that tiles do not see
            return self.last(apply(self.first(x)))

    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(pc.BudgetError, match=r"; tiles could not be tried: .*Unknown.* is not served") as raised:
        pc.plan(Net(), x, budget=1)
    assert "\nnot tried: tiles: " in str(raised.value.plan)
    assert "not tried" not in str(pc.plan(Net(), x, budget="1GiB"))


def test_precision_only_where_nothing_exact_fits() -> None:
    model, x = seeded("residual"), torch.randn(2, 3, 64, 64)
    with pytest.raises(pc.BudgetError) as raised:
        pc.plan(model, x, budget=1, tiles=False)
    assert pc.plan(model, x, budget=raised.value.least, amp=torch.bfloat16).strategy.amp is None
    plan = pc.plan(model, x, budget=int(0.9 * raised.value.least), amp=torch.bfloat16, tiles=False)
    assert plan.strategy.amp == "bfloat16"
    plan.apply(model)
    assert model(x).dtype == torch.bfloat16
    assert trace(model, x).peak <= int(0.9 * raised.value.least)
    assert copy.deepcopy(model)(x).dtype == torch.bfloat16
    assert plan.undo(model)(x).dtype == torch.float32


def test_as_a_file(tmp_path: Any) -> None:
    model, x = seeded("residual"), torch.randn(2, 3, 64, 64)
    plan = pc.plan(model, x, budget=int(0.7 * trace(model, x).peak))
    loaded = pc.Plan.load(plan.to_json(tmp_path / "plan.json"))
    assert loaded == plan and str(loaded) == str(plan)
    loaded.apply(seeded("residual"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"Plan\.load: expected .*other\.json to hold a plan"):
        pc.Plan.load(tmp_path / "other.json")


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_spectral_norms_do_not_run_again(norm: Any) -> None:
    """Their vectors would change twice, and the backward pass would use other weights. Blocks without them do."""

    def block(inputs: int, norm: Any) -> nn.Module:
        convs = (norm(nn.Conv2d(n, 16, 3, padding=1)) for n in (inputs, 16))
        return nn.Sequential(*(layer for conv in convs for layer in (conv, nn.Tanh())))

    torch.manual_seed(0)
    model = nn.Sequential(block(3, norm), block(16, norm), block(16, lambda conv: conv), block(16, norm)).double()
    torch.manual_seed(0)
    stock = nn.Sequential(block(3, norm), block(16, norm), block(16, lambda conv: conv), block(16, norm)).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with pytest.raises(pc.BudgetError) as raised:
        pc.plan(model, x, budget=1, tiles=False)
    plan = raised.value.plan
    assert plan.strategy.checkpoints == ["2"], plan
    assert "checkpoints in 0, 1, 3: spectral_norm" in str(plan)
    plan.apply(model)
    for one in (model, stock):
        one(x).square().mean().backward()
    for ours, expected in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)
    for ours, expected in zip(model.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_its_words() -> None:
    model, x = seeded("residual"), torch.randn(2, 3, 64, 64)
    plan = pc.plan(model, x, budget=int(0.7 * trace(model, x).peak))
    text = str(plan)
    for word in ("budget", "peak", "predicted", "time", "convert", "checkpoint", "runs again in backward"):
        assert word in text, word
    assert text.startswith("Sequential (cpu, training step)\n") and "; without the plan: " in text
    assert str(pc.plan(pc.convert(model), x, budget="1GiB")).startswith("Sequential (converted) (cpu, training step)\n")
    assert plan.extra_time > 0.05 and plan.peak < plan.stock_peak
    least, most = plan.extra_times
    assert least < plan.extra_time < most
    assert f"{plan.extra_time:+.0%} estimated; {least:+.0%} to {most:+.0%} by" in text


def test_frontier(tmp_path: Any) -> None:
    frontier = pc.plan(seeded("unet"), torch.randn(1, 3, 64, 64), frontier=True, tiles=False)
    peaks, times = [p.peak for p in frontier.plans], [p.extra_time for p in frontier.plans]
    assert len(peaks) >= 3 and peaks == sorted(peaks, reverse=True) and times == sorted(times)
    assert min(one.peak for one in frontier.tried) == peaks[-1]
    assert len(str(frontier).splitlines()) == len(peaks) + 1
    pytest.importorskip("matplotlib")
    assert frontier.plot(tmp_path / "frontier.png").stat().st_size > 5000


def test_it_takes_no_memory() -> None:
    """At a size that no machine has."""
    plan = pc.plan(seeded("unet"), torch.empty(16, 3, 8192, 8192, device="meta"), budget="1000GiB")
    assert 300 * 2**30 < plan.peak < 1000 * 2**30


@pytest.mark.parametrize("planned", [False, True])
def test_the_largest_batch(planned: bool) -> None:
    model, x = seeded("plain"), torch.randn(1, 3, 32, 32)
    found = pc.max_batch(model, x, budget="4MiB", planned=planned)

    def keeps(batch: int) -> bool:
        values = torch.randn(batch, 3, 32, 32)
        if not planned:
            return fits(trace(model, values, fake=True).peak, 4 * 2**20, MARGIN["cpu"])
        try:
            return bool(pc.plan(model, values, budget="4MiB", tiles=False))
        except pc.BudgetError:
            return False

    assert found > 1 and keeps(found) and not keeps(found + 1)


def test_the_largest_size() -> None:
    model, x = seeded("plain"), torch.randn(1, 3, 32, 64)
    height, width = pc.max_size(model, x, budget="16MiB")
    assert width == 2 * height and height % 32 == 0
    assert trace(model, torch.randn(1, 3, height, width)).peak <= 16 * 2**20
    larger = torch.empty(1, 3, height + 32, 2 * (height + 32), device="meta")
    assert not fits(trace(model, larger, fake=True).peak, 16 * 2**20, MARGIN["cpu"])


@pytest.mark.parametrize("margin", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("peak", [0, 1, 99, 100, 10**6 + 1, 3 * 2**40 + 7])
def test_the_margin(peak: int, margin: float) -> None:
    least = least_budget(peak, margin)
    assert fits(peak, least, margin) and not fits(peak, least - 1, margin)
    assert least == pytest.approx(peak * (1 + margin), abs=1.0) and least >= peak


def test_the_least_budget_of_an_error_is_enough() -> None:
    model, x = seeded("plain"), torch.randn(1, 3, 32, 32)
    with pytest.raises(pc.BudgetError) as raised:
        pc.plan(model, x, budget=1, tiles=False)
    least = raised.value.least
    assert raised.value.plan.needs == least == least_budget(raised.value.plan.peak, MARGIN["cpu"])
    assert pc.plan(model, x, budget=least).peak == raised.value.plan.peak
    with pytest.raises(pc.BudgetError):
        pc.plan(model, x, budget=least - 1, tiles=False)


def test_mistakes() -> None:
    model, x = seeded("plain"), torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match="either a budget or frontier=True"):
        pc.plan(model, x)
    with pytest.raises(ValueError, match="plan, budget: expected a number of bytes"):
        pc.plan(model, x, budget="much")
    with pytest.raises(ValueError, match="expected budget to be at least 1 byte, got 0"):
        pc.plan(model, x, budget=0)
    with pytest.raises(ValueError, match="expected offload only for a CUDA device"):
        pc.plan(model, x, budget="1GiB", offload=True)
    with pytest.raises(ValueError, match=r"expected amp to be torch\.float16 or torch\.bfloat16"):
        pc.plan(model, x, budget="1GiB", amp=torch.float64)
    with pytest.raises(TypeError, match="expected optimizer to be a function of parameters, got SGD"):
        pc.plan(model, x, budget="1GiB", optimizer=torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected model to be a torch\.nn\.Module, got str"):
        pc.plan("model", x, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_batch: expected a budget that the smallest input fits into, got 1 KiB"):
        pc.max_batch(model, x, budget="1KiB")
    with pytest.raises(TypeError, match="max_size: expected the first input to be an image"):
        pc.max_size(model, torch.randn(3), budget="1GiB")
    with pytest.raises(ValueError, match="max_size: expected multiple to be at least 1, got 0"):
        pc.max_size(model, x, budget="1GiB", multiple=0)
