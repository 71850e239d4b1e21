"""memory.trace against what is known by hand, by torch's hooks, and by a bare allocator's count."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.counts import saved_bytes
from support.errors import raises
from support.modules import Made
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native import _library
from patchconv_native.memory import timeline, trace
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.memory.sizes import total

MIB = 2**20


def small(norm: bool = True) -> nn.Sequential:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)]
    return nn.Sequential(*(layer for layer in layers if norm or not isinstance(layer, nn.BatchNorm2d)))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(channels) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + x)


def residual(blocks: int = 3, channels: int = 16) -> nn.Sequential:
    stem = [nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*stem, *(Block(channels) for _ in range(blocks)), nn.AdaptiveAvgPool2d(1))


FORMS: dict[str, Any] = {
    "stock": lambda model: model,
    "layers": lambda model: pc.convert(model, functional=False),
    "convert": pc.convert,
    "checkpoints": lambda model: pc.checkpoint_modules(model, Block),
    "convert, checkpoints": lambda model: pc.convert(pc.checkpoint_modules(model, Block)),
}


@pytest.mark.parametrize("form", FORMS)
def test_watching_changes_nothing(form: str) -> None:
    """The peak is the one of a step that nobody watches."""
    model, x = FORMS[form](residual()), torch.randn(2, 3, 48, 48)
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    want = allocated_peak(lambda: model(x).sum().backward())
    model.zero_grad(set_to_none=True)
    report = trace(model, x)
    assert report.peak - report.static == pytest.approx(want, rel=2e-3)
    assert report.static == total([x, *model.parameters(), *model.buffers()])


@pytest.mark.parametrize("form", ["stock", "layers", "convert"])
def test_saved_bytes_are_those_of_hooks(form: str) -> None:
    model, x = FORMS[form](residual()), torch.randn(2, 3, 40, 40)
    want = saved_bytes(lambda: model(x), (*model.parameters(), *model.buffers()))
    loss = trace(model, x, loss=lambda y: y.sum()).saved
    assert loss == want


def test_saved_by_hand() -> None:
    model, x = small(norm=False), torch.randn(2, 3, 20, 20)
    report = trace(model, x)
    hidden = 2 * 8 * 20 * 20 * 4
    assert report.saved == x.nbytes + hidden
    assert report.module("").saved_by == {"aten::conv2d": x.nbytes, "aten::relu": hidden}
    assert [report.module(str(i)).own_saved for i in range(3)] == [x.nbytes, hidden, 0]
    assert report.trace.after["gradients"] == total(model.parameters())


def test_workspaces_are_seen() -> None:
    """float64 goes through a column buffer, which exists only inside of the operator: hooks around it see nothing."""
    model, x = nn.Sequential(nn.Conv2d(4, 4, 5, padding=2, bias=False)).double(), torch.randn(1, 4, 64, 64).double()
    columns, output = 4 * 25 * 64 * 64 * 8, 4 * 64 * 64 * 8
    forward = trace(model, x).module("0").stretches[0]
    assert forward.phase == "forward" and forward.after - forward.before == output
    assert forward.peak - forward.before == columns + output
    forward = trace(pc.convert(model, splits=16), x).module("0").stretches[0]
    assert forward.after - forward.before == output
    assert forward.peak - forward.before < output + columns / 8


def test_backward_belongs_to_the_module_that_made_the_node() -> None:
    model, x = small(), torch.randn(2, 3, 32, 32)
    report = trace(model, x)
    order = [(s.start, name) for name in "0123" for s in report.module(name).stretches if s.phase == "backward"]
    assert [name for _, name in sorted(order)] == ["3", "2", "1", "0"]
    for name in "0123":
        forward, backward = report.module(name).stretches
        assert (forward.phase, backward.phase) == ("forward", "backward")
        assert forward.start < forward.stop <= backward.start < backward.stop
        assert backward.peak >= max(backward.before, backward.after)
    whole = {s.phase: s for s in report.module("").stretches}
    assert whole["backward"].peak == max(s.peak for n in "0123" for s in report.module(n).stretches[1:])
    assert report.peak == max(s.peak for s in report.trace.phases)
    assert [s.phase for s in report.trace.phases] == ["forward", "backward"]


def test_a_module_that_is_called_twice() -> None:
    twice = Made(lambda m, x: m.conv(torch.tanh(m.conv(x))), conv=nn.Conv2d(2, 2, 3, padding=1))
    stretches = trace(twice, torch.randn(1, 2, 8, 8)).module("conv").stretches
    assert [s.phase for s in stretches] == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("functional", [False, True])
def test_what_a_checkpoint_runs_again_is_told_apart(functional: bool) -> None:
    model = pc.checkpoint_modules(residual(), Block)
    if functional:
        pc.convert(model)
    report = trace(model, torch.randn(2, 3, 32, 32))
    phases = [s.phase for s in report.module("3.conv1").stretches]
    assert phases.count("forward") == 1 and phases.count("recompute") == 1 and phases.count("backward") >= 1
    plain = trace(residual(), torch.randn(2, 3, 32, 32))
    assert all(s.phase != "recompute" for s in plain.module("3.conv1").stretches)
    assert report.saved < 0.6 * plain.saved


def test_nested_checkpoints_of_lean_code() -> None:
    model, x = residual(), torch.randn(2, 3, 32, 32)
    want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    outer = nn.Sequential(model[:3], nn.Sequential(*model[3:5]), model[5:])
    pc.checkpoint_modules(outer, lambda name, module: name == "1" or isinstance(module, Block))
    pc.convert(outer)
    torch.testing.assert_close(torch.autograd.grad(outer(x).sum(), list(model.parameters())), want)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))


def test_all_is_what_it_was() -> None:
    model = residual()
    model.insert(3, nn.Dropout(0.5))
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(2, 3, 24, 24)
    model(x).sum().backward()
    optimizer.step()
    before, random = state(model, optimizer), torch.get_rng_state()
    gradients = [p.grad for p in model.parameters()]
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    report = trace(model, x, optimizer=optimizer)
    torch.testing.assert_close(state(model, optimizer), before, rtol=0, atol=0)
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
    assert calls == ["hook", "hook"] and not nn.modules.module._global_forward_pre_hooks
    assert report.trace.static["optimizer"] == report.trace.after["optimizer"] > 2 * report.parameters
    assert [s.phase for s in report.trace.phases] == ["forward", "backward", "optimizer"]
    optimizer.step()  # its state still is one


class Hooked(nn.Module):
    """Its first call sets hooks and fills caches, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.done, self.sizes, self.calls = nn.Conv2d(3, 3, 1), False, {}, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.done:
            self.done = True
            self.conv.register_forward_hook(lambda *given: 2 * given[-1])
        self.sizes[x.shape] = len(self.calls)
        self.calls.append(x)
        return self.conv(x)


@pytest.mark.parametrize("fake", [False, True])
def test_what_a_first_call_sets_is_taken_back(fake: bool) -> None:
    model, x = Hooked(), torch.randn(1, 3, 8, 8)
    stock = copy.deepcopy(model)
    trace(model, x, fake=fake)
    assert not model.done and not model.sizes and not model.calls and not model.conv._forward_hooks
    assert torch.equal(model(x), stock(x)) and len(model.conv._forward_hooks) == 1


def test_an_optimizer_that_is_made() -> None:
    model = small()
    report = trace(model, torch.randn(2, 3, 16, 16), optimizer=torch.optim.AdamW)
    parameters = total(model.parameters())
    assert report.trace.static["optimizer"] == 0
    assert 2 * parameters < report.trace.after["optimizer"] < 2.2 * parameters + 1000
    assert report.module("0").optimizer >= 2 * report.module("0").parameters


def test_without_gradients() -> None:
    report = trace(small(), torch.randn(2, 3, 16, 16), train=False)
    assert report.saved == 0 and [s.phase for s in report.trace.phases] == ["forward"]
    assert report.trace.after["gradients"] == 0


def test_autocast_and_keywords() -> None:
    model = Made(lambda m, x, *, scale: {"y": m.conv(x) * scale}, conv=nn.Conv2d(3, 8, 3))
    x, step = torch.randn(1, 3, 32, 32), {"kwargs": {"scale": torch.rand(())}, "loss": lambda out: out["y"].sum()}
    full, half = trace(model, x, **step), trace(model, x, **step, amp=torch.bfloat16)
    assert half.trace.amp == "bfloat16" and full.trace.amp is None
    assert half.saved < full.saved


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no more"), KeyError("x")])
def test_errors_pass_with_the_report_so_far(error: Exception) -> None:
    """A step that runs out of memory says so, and what it had until then is not lost."""

    def fail(module: Made, x: Tensor) -> Tensor:
        module.norm(x)
        raise error

    model = nn.Sequential(nn.Conv2d(3, 3, 3), Made(fail, norm=nn.BatchNorm2d(3)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(type(error)) as raised:
        trace(model, torch.randn(1, 3, 64, 64))
    assert raised.value is error
    report = error.memory_report  # type: ignore[attr-defined]
    assert not report.finished and type(error).__name__ in report.trace.error
    assert report.peak > report.static and report.module("0").peak("forward") is not None
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not nn.modules.module._global_forward_hooks
    assert trace(small(), torch.randn(1, 3, 16, 16)).finished, "the next one runs"


def test_what_is_refused() -> None:
    model, x = small(), torch.randn(1, 3, 16, 16)
    raises(TypeError, {
        r"expected model to be a torch\.nn\.Module, got int": lambda: trace(3, x),
        "expected amp to be a dtype": lambda: trace(model, x, amp="bfloat16"),
    })  # fmt: skip
    raises(ValueError, {
        "expected device to be the model's, cpu, or fake=True, got cuda": lambda: trace(model, x, device="cuda"),
        "expected device to be a CPU or a CUDA device, got meta": lambda: trace(model, x, device="meta"),
        "expected fake=True with tensors on the meta device": lambda: trace(model, x.to("meta")),
        "expected snapshot only for a real step on CUDA": lambda: trace(model, x, snapshot="s.pickle"),
        "expected an output that requires a gradient, or train=False": lambda: trace(model.requires_grad_(False), x),
    })  # fmt: skip
    with torch.profiler.profile(), pytest.raises(RuntimeError, match=r"torch\.profiler is running"):
        trace(small(), x)
    with pytest.raises(RuntimeError, match="running already"):
        trace(Made(lambda m, x: trace(small(), x)), x)


def decoder() -> nn.Sequential:
    def block(channels: int) -> list[nn.Module]:
        return [nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)]

    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), *block(32), nn.Upsample(scale_factor=2), *block(32),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), *block(16), nn.Conv2d(16, 3, 1),
    )  # fmt: skip


def transformer() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def depthwise() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.Hardswish(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32), nn.ReLU6(),
        nn.Conv2d(32, 64, 1), nn.Dropout(0.1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 28 * 28, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "residual": (residual, (2, 3, 56, 56)),
    "decoder": (decoder, (1, 4, 28, 28)),
    "depthwise": (depthwise, (4, 3, 112, 112)),
    "transformer": (transformer, (2, 20, 16)),
}


def both(form: str, model: nn.Module, x: Tensor, last: bool, **step: Any) -> list[Any]:
    """What was measured, and what was predicted with fake tensors: the peak within 5 %, the same bytes saved."""
    model = FORMS[form](model)
    if last and x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    real, fake = trace(model, x, **step), trace(model, x, **step, fake=True)
    assert fake.saved == real.saved
    assert fake.peak == pytest.approx(real.peak, rel=0.05)
    return [real.trace, fake.trace]


@pytest.mark.parametrize("form", ["stock", "layers", "convert"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_predictions(name: str, last: bool, form: str) -> None:
    make, shape = MODELS[name]
    real, fake = both(form, make(), torch.randn(shape), last, optimizer=torch.optim.SGD)
    assert fake.static == real.static and fake.after == real.after
    assert [m.name for m in fake.modules] == [m.name for m in real.modules]


TORCHVISION = [
    ("resnet18", "stock", False), ("resnet18", "convert", True), ("vgg11_bn", "layers", False),
    ("densenet121", "convert", False), ("mobilenet_v2", "layers", True), ("convnext_tiny", "stock", False),
    ("mnasnet1_0", "convert", True), ("efficientnet_b0", "convert", False), ("squeezenet1_1", "stock", True),
    ("resnext50_32x4d", "stock", False), ("shufflenet_v2_x1_0", "layers", False), ("swin_t", "layers", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form", "last"), TORCHVISION)
def test_predictions_of_known_models(name: str, form: str, last: bool) -> None:
    models = pytest.importorskip("torchvision.models")
    both(form, getattr(models, name)(weights=None), torch.randn(2, 3, 128, 128), last)


def test_a_passing_constant_hides_no_memory() -> None:
    """torch.tensor() makes a real tensor for as long as it takes to copy it into a fake one. Its storage's address can
    be the next fake storage's, which counts all the same.
    """
    constants = Made(lambda m, x: torch.stack([x * torch.tensor(i + 0.5) for i in range(100)]))
    x = torch.randn(1000)
    found = {trace(constants, x, fake=True, train=False).peak for _ in range(5)}
    assert found == {trace(constants, x, train=False).peak}


def test_a_prediction_takes_no_memory_and_leaves_the_model() -> None:
    model = residual()

    def facts() -> Any:
        return {n: (id(t), t.data_ptr(), t._version) for n, t in (*model.named_parameters(), *model.named_buffers())}

    own = facts()
    x = torch.empty(64, 3, 4096, 4096, device="meta")
    before = torch.get_rng_state()
    report = trace(model, x, fake=True)
    assert report.peak > 500 * 2**30 and report.trace.clock == "operators"
    assert report.trace.static["inputs"] == 64 * 3 * 4096**2 * 4
    assert facts() == own and torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert report.trace.work["flops"] > 64 * 4096**2 * 3 * 16 * 9 * 2


def test_a_model_that_is_nowhere() -> None:
    with torch.device("meta"):
        model = residual()
    real = trace(residual(), torch.randn(2, 3, 24, 24), fake=True)
    assert trace(model, torch.empty(2, 3, 24, 24, device="meta"), fake=True).peak == real.peak


@pytest.mark.parametrize("code", [lambda x: x[x > 0].sum() + x.sum(), lambda x: x * (2 if x.sum().item() > 0 else 3)])
def test_a_fake_step_of_code_that_depends_on_values(code: Any) -> None:
    class Net(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return code(super().forward(x))

    net, x = Net(3, 3, 1), torch.randn(1, 3, 8, 8)
    assert trace(net, x).peak > 0
    with pytest.raises(RuntimeError, match=r"^memory\.trace: a fake step has no values, and aten\..* needs") as raised:
        trace(net, x, fake=True)
    assert raised.value.memory_report.peak > 0  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="trace a real step"):
        pc.plan(net, x, budget="80%")
    assert net(x).requires_grad


RANGES: dict[str, tuple[Any, Any]] = {  # as MONAI's losses do, and the same without torch
    "read": (
        lambda x: sum(x[:, i].sum() * i for i in torch.arange(1, 3).tolist()),
        lambda x: sum(x[:, i].sum() * i for i in range(1, 3)),
    ),
    "looped over": (
        lambda x: sum(x[:, int(i)].sum() for i in torch.arange(3)), lambda x: sum(x[:, i].sum() for i in range(3)),
    ),
    "computed with": (
        lambda x: x * (torch.arange(8.0) + 1) + torch.arange(0, 16, 2).view(1, 1, 8, 1),
        lambda x: x * torch.ones(8).add(1) + torch.ones(8, dtype=torch.int64).view(1, 1, 8, 1),
    ),
    "written into": (lambda x: x * torch.arange(8.0).mul_(2), lambda x: x * torch.ones(8).mul_(2)),
    "large": (lambda x: x.sum() * torch.arange(4096.0), lambda x: x.sum() * torch.ones(4096)),
}  # fmt: skip


@pytest.mark.parametrize("code", RANGES)
def test_a_fake_step_of_code_that_reads_a_range(code: str) -> None:
    class Net(nn.Conv2d):
        code: Any

        def forward(self, x: Tensor) -> Tensor:
            return self.code(super().forward(x))

    net, peaks = Net(3, 3, 1), []
    for net.code in RANGES[code]:
        peaks.append(trace(net, torch.randn(1, 3, 8, 8), fake=True).peak)
    assert abs(peaks[0] - peaks[1]) <= 64


def test_fake_work_is_that_of_the_flop_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = residual(), torch.randn(2, 3, 24, 24)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert trace(model, x, fake=True).trace.work["flops"] == counter.get_total_flops()


def test_a_gpu_that_is_not_there_can_be_predicted() -> None:
    report = trace(small(), torch.randn(1, 3, 32, 32), fake=True, device="cuda")
    assert report.trace.device == "cuda" and report.peak > report.static
    if not torch.cuda.is_available():
        assert any("No GPU here" in note for note in report.trace.notes)


def test_the_curve() -> None:
    report = trace(residual(), torch.randn(2, 3, 32, 32))
    times = [time for time, _ in report.trace.curve]
    assert times == sorted(times) and math.isclose(times[-1], report.duration, rel_tol=0.2)
    assert max(level for _, level in report.trace.curve) == report.peak
    assert (report.trace.peak.time, report.peak) in report.trace.curve
    assert sum(held.bytes for held in report.trace.peak.held) == report.peak
    left = report.trace.curve[-1][1] - sum(report.trace.after.values())
    assert 0 <= left < 4096, "what is left is gradients"


def test_what_other_threads_release_counts_once() -> None:
    """A block that is given out a second time was released where nobody watched."""
    given = {"kind": [timeline.MEMORY] * 4, "time": [0, 1, 2, 3], "bytes": [100, 60, 100, -100], "id": [1, 2, 1, 1]}
    found = timeline.timeline(given | {"op": [0] * 4, "names": [""]}, 0, [], 1.0, {})
    assert [bytes for _, bytes in found.curve] == [0, 100, 160, 160, 60]
    assert found.peak.bytes == 160 == sum(held.bytes for held in found.peak.held)


def test_the_peak_without_events_is_that_of_the_events() -> None:
    model, x = residual(), torch.randn(2, 3, 24, 24)
    call = lambda: model(x).sum().backward()  # noqa: E731
    call()  # gradients are there from here on
    census = _library.load().Census("cpu", False)
    try:
        call()
    finally:
        census.stop()
    found = timeline.timeline(census.events(), 0, [], 1.0, {}).peak.bytes
    assert found == census.peak() == allocated_peak(call) > 100_000


def test_releases_of_what_was_there_before_do_not_count() -> None:
    """torch gives them the size of a block that had the same address in an earlier census."""

    def blocks() -> list[Tensor]:
        return [torch.empty(60_000, dtype=torch.uint8) for _ in range(200)]

    seen: list[Tensor] = []
    allocated_peak(lambda: seen.extend(blocks()))
    addresses = {block.data_ptr() for block in seen}
    seen.clear()
    earlier = blocks()
    assert addresses & {block.data_ptr() for block in earlier}, "the heap gives blocks out again"
    assert allocated_peak(lambda: (earlier.clear(), torch.empty(5_000, dtype=torch.uint8))) == 5_000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_peak_is_the_allocators(tmp_path: Any) -> None:
    model, x = residual(channels=64).cuda(), torch.randn(8, 3, 256, 256, device="cuda")
    trace(model, x)
    torch.cuda.reset_peak_memory_stats()
    report = trace(model, x, snapshot=tmp_path / "snapshot.pickle")
    assert report.peak == torch.cuda.max_memory_allocated()
    assert report.module("3").peak("backward") and (tmp_path / "snapshot.pickle").stat().st_size
    assert trace(model, x, fake=True).peak == pytest.approx(report.peak, rel=0.1)
