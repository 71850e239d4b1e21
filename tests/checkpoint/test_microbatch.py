"""microbatch: a stage in chunks of the batch, with the numbers of the whole batch and the memory of one chunk."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.errors import raises
from support.modules import Made
from torch import Tensor, nn

import patchconv_native as pc


class Block(nn.Module):
    """A residual block whose two branches end in norms, as torchvision's with a downsample branch."""

    def __init__(self, channels: int = 6, out: int = 8, stride: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.downsample(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(c) for c in (3, 3, 6)])
        shapes = ((6, 3, 1), (3, 3, 3), (3, 6, 1))
        self.convs = nn.ModuleList([nn.Conv2d(*c, padding=c[2] // 2, bias=False) for c in shapes])

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = F.relu(y) if i < 2 else y
        return F.relu(y + x)


def twice() -> nn.Module:
    """A norm that is called twice."""
    parts = {"norm": nn.BatchNorm2d(6), "conv": nn.Conv2d(6, 6, 3, padding=1)}
    return Made(lambda m, x: m.norm(m.conv(torch.tanh(m.norm(x)))), **parts)


def stem() -> nn.Module:
    conv, norm = nn.Conv2d(6, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
    return nn.Sequential(conv, norm, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))


class NormAct(nn.BatchNorm2d):
    """As timm's: batch norm and activation in one layer, with a count of its own."""

    def forward(self, x: Tensor) -> Tensor:
        factor = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if factor is None else factor
        stats = self.running_mean, self.running_var, self.weight, self.bias
        return F.relu(F.batch_norm(x, *stats, self.training or self.running_mean is None, factor, eps=self.eps))


class NormThenAct(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.silu(super().forward(input))


class Standardized(nn.Conv2d):
    """As timm's: a batch norm of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight * 0.5, self.bias, self.stride, self.padding)


STAGES: dict[str, Callable[[], nn.Module]] = {
    "stem": stem, "block": Block, "bottleneck": Bottleneck, "twice": twice, "norm": lambda: nn.BatchNorm2d(6),
    "own forwards": lambda: nn.Sequential(
        Standardized(6, 4, 3), NormAct(4), nn.Conv2d(4, 4, 3), NormThenAct(4), nn.Conv2d(4, 4, 1),
        NormAct(4, momentum=None), NormAct(4, affine=False), NormThenAct(4, track_running_stats=False),
    ),
    "no norm": lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.GELU()),
    "others": lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.BatchNorm2d(4)),
}  # fmt: skip


def made(kind: str, converted: str = "") -> nn.Module:
    torch.manual_seed(0)
    stage = STAGES[kind]()
    for module in stage.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_()
    if converted:
        pc.convert(stage, functional=converted == "functional")
    return stage


def images(kind: str, batch: int = 7, side: int = 17) -> Tensor:
    """Noise, or smooth pictures with edges, each of another brightness: chunks have other means than the batch."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(batch, 6, side, side, dtype=torch.float64, generator=generator)
    if kind == "noise":
        return noise
    axis = torch.linspace(0, 6, side, dtype=torch.float64)
    picture = torch.sin(axis)[:, None] * torch.cos(2 * axis) + (axis[:, None] > 3) * 2.0
    level = torch.arange(batch, dtype=torch.float64).view(-1, 1, 1, 1)
    return picture * (1 + torch.arange(6, dtype=torch.float64).view(6, 1, 1)) + 3 * level + 0.01 * noise


def outcome(stage: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor], amp: bool = False) -> list[Any]:
    """Output, gradients of input and parameters, buffers."""
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        y = run(stage, x)
    if y.requires_grad:
        weights = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).sin().view(y.shape)
        y.backward(weights.to(y.dtype))
    return [y, x.grad, *(p.grad for p in stage.parameters()), *stage.buffers()]


def whole(stage: nn.Module, x: Tensor) -> Tensor:
    return stage(x)


def in_chunks(chunks: int) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda stage, x: pc.microbatch(stage, x, chunks)


def alike(body: Callable[[Callable[[nn.Module, Tensor], Tensor]], Any]) -> None:
    """body(run) is the same for runs of the whole batch and of three chunks."""
    torch.testing.assert_close(body(in_chunks(3)), body(whole))


def leaf(x: Tensor, needs: bool = True) -> Tensor:
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(needs)


@pytest.mark.parametrize("picture", ["noise", "images"])
@pytest.mark.parametrize("converted", ["", "layers", "functional"])
@pytest.mark.parametrize("kind", STAGES)
def test_numbers_are_the_whole_batchs(kind, converted, picture):
    x = images(picture)
    expected = outcome(made(kind).double(), leaf(x), whole)
    for chunks in (1, 2, 3, 7):
        found = outcome(made(kind, converted).double(), leaf(x), in_chunks(chunks))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["stem", "block", "bottleneck"])
@pytest.mark.parametrize("how", ["float32", "bfloat16", "amp"])
@pytest.mark.parametrize("picture", ["noise", "images"])
def test_lower_precision(kind, how, layout, picture):
    """Errors are those that stock or this package makes on the whole batch, or little more: of half precision, a
    parameter's gradient is rounded once a chunk.
    """
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    x = images(picture).to(dtype)
    exact = outcome(made(kind).to(dtype).double(), leaf(x.double()), whole)
    x = x.contiguous(memory_format=layout)
    stock = outcome(made(kind).to(dtype), leaf(x), whole, how == "amp")
    own = outcome(made(kind, "functional").to(dtype), leaf(x), whole, how == "amp")
    found = outcome(made(kind, "functional").to(dtype), leaf(x), in_chunks(3), how == "amp")
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "amp": 2.0**-8}[how]
    for ours, theirs, whole_batchs, right in zip(found, stock, own, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        scale = right.double().norm() + 1e-30
        error, *others = ((t.double() - right.double()).norm() / scale for t in (ours, theirs, whole_batchs))
        assert error <= 2 * max(others) + 4 * unit, (error, others)
    assert found[0].is_contiguous(memory_format=layout) and found[1].is_contiguous(memory_format=layout)


def test_two_passes_and_accumulation():
    x = images("images")
    a, b = made("block").double(), made("block", "layers").double()
    for stage, run in ((a, whole), (b, in_chunks(2))):
        first, second = leaf(x), leaf(x.flip(0) * 2)
        ys = run(stage, first), run(stage, second)
        for y in ys:
            y.square().sum().backward()
        stage.got = [first.grad, second.grad, *(p.grad for p in stage.parameters()), *stage.buffers()]
    torch.testing.assert_close(a.got, b.got)
    assert int(b.bn1.num_batches_tracked) == 2


@pytest.mark.parametrize("what", ["input", "weights", "conv1", "norm", "none"])
def test_what_needs_no_gradient(what):
    frozen = {"weights": "", "none": "", "conv1": "conv1", "norm": "bn2"}.get(what)

    def body(run: Any) -> list[Any]:
        stage = made("block").double()
        for name, p in stage.named_parameters():
            p.requires_grad_(frozen is None or not name.startswith(frozen))
        return outcome(stage, leaf(images("noise"), what not in ("input", "none")), run)

    alike(body)


@pytest.mark.parametrize(("momentum", "affine", "track"), [(None, True, True), (0.3, False, True), (0.1, True, False)])
def test_norms_of_every_kind_of_state(momentum, affine, track):
    def body(run: Any) -> Any:
        torch.manual_seed(0)
        stage = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, 1e-3, momentum, affine, track)).double()
        for scale in (1, 2):
            last = outcome(stage, leaf(images("images") * scale), run)
        stage.eval()
        return last, stage(images("noise")), run(stage, images("noise"))

    alike(body)


@pytest.mark.parametrize("frozen", ["all", "bn1"])
def test_eval_mode_and_frozen_norms(frozen):
    ran: list[int] = []

    def body(run: Any) -> list[Any]:
        stage: Any = made("block").double()
        (stage if frozen == "all" else stage.bn1).eval()
        stage.conv1.register_forward_hook(lambda module, args, y: ran.append(len(y)))
        return outcome(stage, leaf(images("images")), run)

    alike(body)
    # Three chunks; a pass forward and one backward, and two for each of the two norms that are in training. Then all.
    assert len(ran) == (6 if frozen == "all" else 6 + 2 * 2 * 3) + 1


def test_batches_of_other_shapes():
    norms = (nn.BatchNorm1d, (6, 5)), (nn.BatchNorm1d, (6, 5, 9)), (nn.BatchNorm3d, (4, 5, 2, 3, 4))
    for norm, shape in norms:
        x = torch.randn(shape, dtype=torch.float64)
        alike(lambda run, norm=norm, x=x: outcome(norm(5).double(), leaf(x), run))
    one = images("noise", 1)
    found, expected = (outcome(made("stem").double(), leaf(one), run) for run in (in_chunks(1), whole))
    torch.testing.assert_close(found, expected)


def test_it_runs_in_chunks():
    stage: Any = made("stem")
    sizes: list[int] = []
    stage[0].register_forward_hook(lambda module, args, y: sizes.append(len(y)))
    y = pc.microbatch(stage, leaf(images("noise").float()), 3)
    assert sizes == [3, 2, 2] * 2, "uneven chunks, in a pass for the norm and one for the output"
    y.sum().backward()
    assert sizes == [3, 2, 2] * 4
    assert "forward" not in vars(stage[1]) and isinstance(stage[0].weight, nn.Parameter)


def test_dropout_is_the_same_in_every_pass():
    def run() -> list[Any]:
        torch.manual_seed(3)
        stage = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(6), nn.Dropout(0.3)).double()
        masks: list[Tensor] = []
        stage[2].register_forward_hook(lambda module, args, y: masks.append(y.detach() != 0))
        x = leaf(images("noise") + 9)
        y = pc.microbatch(stage, x, 3)
        between = torch.rand(3)
        y.sum().backward()
        assert all(map(torch.equal, masks[:3], masks[3:6])) and all(map(torch.equal, masks[:3], masks[6:]))
        assert not torch.equal(masks[1], masks[2]), "each chunk has its own"
        return [y, x.grad, between, torch.rand(3)]

    first = run()
    assert all(map(torch.equal, first, run()))
    assert 0.25 < (first[0] == 0).double().mean() < 0.35
    assert not torch.equal(first[2], first[3])


def test_random_numbers_of_others_are_left_alone():
    stage, x = made("block"), leaf(images("noise").float())
    with torch.random.fork_rng():
        expected = torch.rand(4)
    pc.microbatch(stage, x, 3).sum().backward()
    assert torch.equal(torch.rand(4), expected)


def test_no_grad_and_inference():
    for context in (torch.no_grad, torch.inference_mode):
        a, b = made("block").double(), made("block").double()
        with context():
            torch.testing.assert_close(pc.microbatch(b, images("images"), 3), a(images("images")))
        torch.testing.assert_close(list(b.buffers()), list(a.buffers()))


@pytest.mark.parametrize("outer", ["ours", "torch"])
def test_inside_of_a_checkpoint(outer):
    checkpoint = pc.checkpoint if outer == "ours" else partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)

    def body(run: Any) -> list[Any]:
        stage = made("block", "functional").double()
        found = outcome(stage, leaf(images("images")), lambda s, x: s(x) if run is whole else checkpoint(run, s, x) * 1)
        # Torch's checkpoint moves statistics twice, as it does with stock's norms.
        return found if outer == "ours" else found[: 2 + len(list(stage.parameters()))]

    alike(body)


def test_checkpoints_and_stages_inside():
    expected = outcome(nn.Sequential(made("block"), nn.BatchNorm2d(8)).double(), leaf(images("images")), whole)
    stage = nn.Sequential(made("block"), nn.BatchNorm2d(8)).double()
    pc.checkpoint_modules(stage, lambda name, module: name in ("0", "0.bn1"))
    pc.microbatch_modules(stage, {"0": 2})
    torch.testing.assert_close(outcome(stage, leaf(images("images")), in_chunks(3)), expected)


def test_functional_call_and_parameter_hooks():
    stage, x = made("block").double(), images("images")
    weights = {name: (p.detach() * 2).requires_grad_() for name, p in stage.named_parameters()}
    counted: list[int] = []
    stage.conv1.weight.register_hook(lambda g: counted.append(1))
    expected = torch.autograd.grad(torch.func.functional_call(stage, weights, (x,)).sum(), list(weights.values()))

    named = {f"stage.{name}": p for name, p in weights.items()}
    y = torch.func.functional_call(Made(lambda m, x: pc.microbatch(m.stage, x, 3), stage=stage), named, (x,))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), list(weights.values())), expected)
    pc.microbatch(stage, x, 3).sum().backward()
    assert counted == [1]


def test_autocast_does_not_keep_weights_without_gradients():
    stage = made("stem")
    with torch.autocast("cpu", torch.bfloat16):
        y = pc.microbatch(stage, images("noise").float(), 2)
        other = stage[0](images("noise").float())
    (y.float().sum() + other.float().sum()).backward()
    assert other.requires_grad and stage[0].weight.grad is not None


def test_transforms_run_the_module():
    stage, x = made("stem").double().eval(), images("noise")
    expected = torch.func.grad(lambda x: stage(x).square().sum())(x)
    torch.testing.assert_close(torch.func.grad(lambda x: pc.microbatch(stage, x, 2).square().sum())(x), expected)


NOT_SERVED: dict[str, Callable[[Tensor], Any]] = {
    "expected module to return a tensor whose .* is the batch, got tuple": lambda y: (y, y),
    r"the batch, got Tensor of shape \(\) for 3 samples": lambda y: y.sum(),
    r"the batch, got Tensor of shape \(18, 17, 17\) for 3 samples": lambda y: y.flatten(0, 1),
    "a call of batch_norm with training=True": lambda y: F.batch_norm(y, None, None, training=True),
    "got a call of .*batch_norm": lambda y: pc.functional.batch_norm(y, None, None, training=True),
    "division": lambda y: 1 / 0,
}


@pytest.mark.parametrize("text", NOT_SERVED)
def test_what_is_not_served_changes_nothing(text):
    stage = Made(lambda m, x: NOT_SERVED[text](m.norm(x)), norm=nn.BatchNorm2d(6))
    x = images("noise").float()
    before, state = copy.deepcopy(stage.state_dict()), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError if text == "division" else TypeError, match=text):
        pc.microbatch(stage, x, 3)
    torch.testing.assert_close(stage.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state) and "forward" not in vars(stage.norm)
    assert not sys.modules["patchconv_native.microbatch"]._here.busy


KEPT: dict[str, Callable[[Any, Tensor], Any]] = {
    "an attribute": lambda m, y: setattr(m, "aux", y.square().mean()),
    "a list": lambda m, y: m.seen.append(y),
    "a mapping": lambda m, y: m.named.update(y=[y.mean()]),
    "of a layer": lambda m, y: setattr(m.norm, "last", (y, 1)),
}


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("kind", KEPT)
def test_what_a_call_leaves_behind_is_refused(kind: str, graded: bool) -> None:
    """It would be the last chunk's, without a history."""
    stage: Any = Made(lambda m, x: (y := m.norm(x), KEPT[kind](m, y))[0], norm=nn.BatchNorm2d(6))
    stage.seen, stage.named = [], {"z": 1}
    before = copy.deepcopy(stage.state_dict()), dict(vars(stage.norm))
    with (
        torch.set_grad_enabled(graded),
        pytest.raises(TypeError, match=r"^microbatch: expected module to keep no tensors"),
    ):
        pc.microbatch(stage, images("noise").float(), 3)
    after = stage.state_dict(), dict(vars(stage.norm))
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert after[1] == before[1] and not hasattr(stage, "aux") and (stage.seen, stage.named) == ([], {"z": 1})


def test_what_is_made_once_may_be_kept() -> None:
    def grid(m: Any, x: Tensor) -> Tensor:
        if m.grid is None:
            m.grid = torch.linspace(0, 1, x.size(-1), dtype=x.dtype)
        m.calls += 1
        return m.norm(x * m.grid)

    def stage() -> Any:
        made: Any = Made(grid, norm=nn.BatchNorm2d(6).double())
        made.grid, made.calls = None, 0
        return made

    x = images("noise")
    torch.testing.assert_close(pc.microbatch(stage(), x, 3), stage()(x))


def test_a_norm_of_what_pixels_were_written_into_is_refused() -> None:
    """It would have the statistics of one chunk. A norm of weights has none."""
    for write in (False, True):

        def run(m: Any, x: Tensor, write: bool = write) -> Tensor:
            weight = m.norm.weight.reshape(1, 6, 1, 1).repeat(1, 1, 2, 2) * 2
            if write:
                weight = weight.copy_(x[:1, :, :2, :2])
            return m.norm(x) + F.batch_norm(weight, None, None, training=True).mean()

        def stage(run: Any = run) -> nn.Module:
            return Made(run, norm=nn.BatchNorm2d(6).double())

        if write:
            with pytest.raises(TypeError, match="a call of batch_norm with training=True"):
                pc.microbatch(stage(), images("noise"), 3)
        else:
            torch.testing.assert_close(pc.microbatch(stage(), images("noise"), 3), stage()(images("noise")))


def test_arguments():
    stage, x = made("stem"), images("noise").float()
    tracked = nn.Sequential(nn.InstanceNorm2d(6, track_running_stats=True))
    raises(ValueError, {
        "^microbatch: expected chunks to be at least 1, got 0$": lambda: pc.microbatch(stage, x, 0),
        r"^microbatch: expected chunks to be at most 7 \(the batch of x\), got 8$": lambda: pc.microbatch(stage, x, 8),
        "expected more than 1 value per channel when .*, got 1 at a BatchNorm1d":
            lambda: pc.microbatch(nn.BatchNorm1d(3), torch.randn(1, 3), 1),
    })  # fmt: skip
    one, sync = torch.tensor(1.0), nn.Sequential(nn.Identity(), nn.SyncBatchNorm(6))
    raises(TypeError, {
        "^microbatch: expected chunks to be an int, got float$": lambda: pc.microbatch(stage, x, 2.0),
        "^microbatch: expected chunks to be an int, got bool$": lambda: pc.microbatch(stage, x, True),
        "^microbatch: expected x to be a plain tensor with a batch dim": lambda: pc.microbatch(stage, 3, 1),
        "^microbatch: expected x to be a plain tensor with a batch dimension": lambda: pc.microbatch(stage, one, 1),
        r"^microbatch: expected module to be a torch.nn.Module, got function$": lambda: pc.microbatch(whole, x, 1),
        "^microbatch: module, at '1': SyncBatchNorm is not served in training$": lambda: pc.microbatch(sync, x, 2),
        "at '0': InstanceNorm2d with track_running_stats=True is not": lambda: pc.microbatch(tracked, x, 2),
    })  # fmt: skip
    tracked.eval()
    torch.testing.assert_close(pc.microbatch(tracked, x, 2), tracked(x))
    pc.microbatch(nn.BatchNorm1d(3), torch.randn(2, 3), 2)
    kept = x.clone()
    with pytest.raises(RuntimeError, match="expected module not to write to its input x in place"):
        pc.microbatch(nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm2d(6)), x, 2)
    assert torch.equal(x, kept)


def test_chunks_that_differ():
    calls: list[int] = []
    odd = Made(lambda m, x: x if calls else calls.append(1) or m.norm(x), norm=nn.BatchNorm2d(6))
    with pytest.raises(RuntimeError, match="call the same batch norms for every chunk"):
        pc.microbatch(odd, images("noise").float(), 2)


def test_second_derivatives_and_edits_are_refused():
    x, block = leaf(images("noise")), made("block").double()
    (plain,) = torch.autograd.grad(pc.microbatch(block, x, 2).sum(), x)
    for loss in (lambda y: y.square().sum(), lambda y: y.sum()):  # the gradient of a sum has no history
        (grad,) = torch.autograd.grad(loss(pc.microbatch(block, x, 2)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="microbatch: expected no second derivatives"):
            grad.sum().backward()
    assert torch.equal(grad, plain) and all(p.grad is None for p in block.parameters())
    middle = x * 1
    y = pc.microbatch(made("block").double(), middle, 2)
    middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def staged(chunks: int) -> nn.Module:
    """A wide stage between narrow ends."""
    ends = nn.Conv2d(4, 32, 3, 1, 1), nn.Conv2d(32, 4, 1)
    stage = nn.Sequential(ends[0], nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(4), ends[1])
    return Made(lambda m, x: pc.microbatch(m.stage, x, chunks) if chunks else m.stage(x), stage=stage)


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("converted", [False, True])
def test_memory(converted, amp):
    """What is traced is what the docstring says, and what is predicted is what is traced."""
    x = torch.randn(16, 4, 64, 64)
    peaks = {}
    for chunks in (0, 1, 4, 16):
        model = staged(chunks)
        if converted:
            pc.convert(model)
        pc.memory.trace(model, x, amp=amp)
        report = pc.memory.trace(model, x, amp=amp)
        predicted = pc.memory.trace(model, x, amp=amp, fake=True)
        assert predicted.peak == pytest.approx(report.peak, rel=0.05)
        peaks[chunks] = report.transient
        if chunks:
            assert report.saved <= x.nbytes + 8192, "the input"
    width = 2 if amp else 4
    wide = 16 * 32 * 64 * 64 * width
    assert peaks[0] > (1.9 if converted else 2.4) * wide
    # One chunk is at most five of the stage's wide tensors (with a float32 copy of its input under autocast).
    for chunks in (4, 16):
        assert peaks[chunks] <= 5 * wide / chunks + 3 * x.nbytes, (peaks, wide)
    assert peaks[16] < peaks[4] < peaks[0]


def test_modules():
    x = images("images")
    expected = outcome(nn.Sequential(made("block"), nn.BatchNorm2d(8)).double(), leaf(x), whole)
    model: Any = nn.Sequential(made("block"), nn.BatchNorm2d(8)).double()
    keys = list(model.state_dict())
    seen: list[int] = []
    model[0].register_forward_hook(lambda module, args, y: seen.append(len(y)))
    assert pc.microbatch_modules(model, Block, 3) is model and isinstance(model[0], Block)
    torch.testing.assert_close(outcome(model, leaf(x), whole), expected)
    assert seen == [7] and list(model.state_dict()) == keys
    assert repr(model) == repr(nn.Sequential(Block(), nn.BatchNorm2d(8)))
    pc.microbatch_modules(model, {"1": 2, "0": 4})
    assert [m._patchconv_chunks for m in model] == [4, 2]
    pc.microbatch_modules(model, "1", 3)
    assert type(model[0]) is Block and model[1]._patchconv_chunks == 3
    pc.microbatch_modules(model, ())
    assert type(model[1]) is nn.BatchNorm2d


@pytest.mark.parametrize("batch", [1, 2])
def test_modules_take_a_batch_of_fewer_samples_than_chunks(batch):
    x, seen = images("images")[:batch], []
    expected = outcome(nn.Sequential(made("block"), nn.BatchNorm2d(8)).double(), leaf(x), whole)
    model = pc.microbatch_modules(nn.Sequential(made("block"), nn.BatchNorm2d(8)).double(), {"0": 3, "1": 8})
    for module in model[0].children():
        module.register_forward_hook(lambda module, args, y: seen.append(len(y)))
    torch.testing.assert_close(outcome(model, leaf(x), whole), expected)
    assert set(seen) == {1}
    with pytest.raises(ValueError, match=r"^Block: expected chunks to be at most 0"):
        model(x[:0])


def test_modules_errors_change_nothing():
    model = pc.microbatch_modules(nn.Sequential(Block(), nn.ModuleList()), "0", 2)
    name, call = "^microbatch_modules", pc.microbatch_modules
    raises(ValueError, {
        f"{name}: expected chunks to be at least 1, got 0$": lambda: call(model, "0", 0),
        f"{name}: expected chunks to be at least 1, got": lambda: call(model, {"0": 0}),
        f"{name}: expected which to name modules of the model, got 'tail'": lambda: call(model, "tail", 2),
    })  # fmt: skip
    raises(TypeError, {
        f"{name}: expected chunks to be an int, got NoneType$": lambda: call(model, "0"),
        f"{name}: expected chunks to be None where which says them, got": lambda: call(model, {"0": 2}, 2),
        f"{name}, module '1': ModuleList has no forward$": lambda: call(model, ("0", "1"), 3),
    })  # fmt: skip
    assert model[0]._patchconv_chunks == 2
