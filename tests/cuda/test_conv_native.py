"""The project's own convolution kernels as operators reach them: which one runs, and that what runs is right.

Without a GPU the CUDA side (csrc/cuda/conv_native.cpp) is built with kernels that run on the CPU (tests/host_cuda) and
driven with the configurations of the sweep. With one, the operators themselves are, under pc.backend("native").
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import kernels, reference
from support.backends import captured
from support.checks import UNIT, operator, oracle
from support.configurations import DTYPES, Configuration, RandomChooser, build, build_grad, draw
from support.pairs import FULL
from support.seeds import SWEEP_SEED
from torch import Tensor, nn

import patchconv_native as pc

pytestmark = pytest.mark.timeout(1200)  # the first that runs compiles the executor

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
needs_kernels = pytest.mark.skipif(not pc.build_info()["cuda"], reason="this build has no CUDA kernels")


@pytest.fixture(autouse=True)
def strict_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@lru_cache(None)
def host() -> Any:
    """torch.ops.patchconv_host, built once."""
    folder = kernels.ROOT / "build" / "host_native"
    root = Path(torch.__file__).parent
    torch.ops.load_library(kernels.built(folder, f"-DTORCH_ROOT={root}", target="host_native") / "libhost_native.so")
    return torch.ops.patchconv_host


def geometry(c: Configuration) -> list[Any]:
    splits = [c.splits] if isinstance(c.splits, int) else c.splits
    padding = c.padding
    if isinstance(padding, str):
        padding = tuple(n for pair in reference.padding_pairs(padding, c.kernel, c.dilation) for n in pair)
    return [c.dims, c.transposed, c.stride, padding, c.output_padding, c.dilation, c.groups, c.padding_mode, splits]


class Host:
    """The six operators with kernels that run on the CPU."""

    def forward(self, c: Configuration, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return host().conv(x, w, b, *geometry(c))

    def backward(self, c: Configuration, grad: Tensor, bits: Tensor | None, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return host().conv_gradients(grad, bits, x, w, x.shape, w.shape, *geometry(c), [True, True, True])


class Device:
    """The operators on a GPU."""

    def forward(self, c: Configuration, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        with pc.backend("native"):
            return operator(c)(*(None if t is None else t.cuda() for t in (x, w, b))).cpu()

    def backward(self, c: Configuration, grad: Tensor, bits: Tensor | None, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        assert bits is None
        _, transposed, stride, padding, output_padding, dilation, groups, mode, splits = geometry(c)
        call = getattr(torch.ops.patchconv, f"{c.operator}_backward")
        given = (grad.cuda(), x.cuda(), w.cuda(), x.shape, w.shape, stride, padding)
        middle = [output_padding, groups, dilation] if transposed else [dilation, groups]
        rest = {"splits": splits, "output_mask": [True] * 3} | ({} if transposed else {"padding_mode": mode})
        with pc.backend("native"):
            return tuple(t.cpu() for t in call(*given, *middle, **rest))


def compare(name: str, got: Tensor, want: Tensor, scale: Tensor, c: Configuration) -> None:
    """One rounding of the result, and those of sums in float32 (float64)."""
    assert got.shape == want.shape, (name, c)
    assert got.isfinite().all(), (name, c)
    sums = 2.0**-50 if c.dtype == "float64" else 2.0**-20
    over = (got.double() - want).abs() - UNIT[DTYPES[c.dtype]] * want.abs() - sums * scale
    assert (over <= 1e-30).all(), (name, c, float(over.max()))


def check(c: Configuration, run: Host | Device, masked: bool = False) -> None:
    leaves = build(c)
    x, w, b = (None if t is None else t.detach() for t in vars(leaves).values())
    assert x is not None and w is not None
    y = run.forward(c, x, w, b)
    tensors = [t.double().requires_grad_() for t in (x, w)]
    bias = torch.zeros(c.outputs, dtype=torch.float64, requires_grad=True) if b is None else b.double().requires_grad_()
    want = oracle(c, *tensors, bias)
    size = oracle(c, *(t.detach().abs() for t in (*tensors, bias)))
    compare("output", y, want.detach(), size, c)
    grad = kept = build_grad(c, y)
    bits = None
    if masked and y.numel():
        grad, keep = torch.randn_like(y), torch.randn_like(y) > 0
        bits = torch.ops.patchconv._mask_pack(torch.where(keep, 1.0, -1.0), 0, 0, 0)
        kept = torch.where(keep, grad, 0)
    found = run.backward(c, grad, bits, x, w)
    exact = torch.autograd.grad(want, [*tensors, bias], kept.double())
    absolute = [t.detach().abs().requires_grad_() for t in (*tensors, bias)]
    sizes = torch.autograd.grad(oracle(c, *absolute), absolute, kept.double().abs())
    for name, got, e, s in zip(("grad_input", "grad_weight", "grad_bias"), found, exact, sizes, strict=True):
        compare(name, got, e, s, c)


def small(c: Configuration) -> bool:
    """Quick enough on one core, with three dimensions of taps above all."""
    return torch.Size(c.kernel).numel() <= 27 and torch.Size(c.sizes).numel() * (c.batch or 1) <= 2500


def drawn(seed: int) -> Configuration:
    choose = RandomChooser(seed)
    while True:
        c = draw(choose)
        if small(c):
            return c


def wide(seed: int) -> Configuration:
    """With the channels of a layer: several chunks and, here and there, more outputs than a warp's."""
    choose = RandomChooser(1000 + seed)
    while True:
        c = draw(choose, dims=choose.pick((1, 2, 2)))
        channels, outputs, groups = choose.pick(((48, 72, 1), (16, 16, 2), (12, 12, 12), (3, 20, 1), (72, 8, 1)))
        if small(c) and c.dtype != "float64":
            return Configuration(**(vars(c) | {"channels": channels, "outputs": outputs, "groups": groups}))


@pytest.mark.parametrize("number", range(60 if FULL else 8))
def test_random_configurations(number):
    check(drawn(SWEEP_SEED + number), Host())


@pytest.mark.parametrize("number", range(30 if FULL else 4))
def test_random_layers(number):
    check(wide(SWEEP_SEED + number), Host(), masked=number % 2 == 0)


@pytest.mark.parametrize("tf32", [False, True])
def test_which_kernel_runs(tf32, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    ops = host()
    x, ramp = torch.randn(1, 24, 20, 33), torch.linspace(0, 1, 33)
    cases = {
        (24, 16, 1, "zeros", 1): "tiles:1 tiles:1 weight:1",
        (24, 24, 24, "zeros", 1): "depthwise:1 depthwise:1 depthwise:1",
        (3, 16, 1, "zeros", 1): "stem:1 tiles:1 weight:1",
        (24, 16, 1, "reflect", 1): "tiles:1 plain:1 weight:1",
        (24, 16, 1, "zeros", 3): "tiles:3 tiles:3 weight:1",
    }
    for (channels, outputs, groups, mode, splits), expected in cases.items():
        a, w = (x + ramp)[:, :channels], torch.randn(outputs, channels // groups, 3, 3)
        rest = [2, False, [1, 1], [1, 1], [0, 0], [1, 1], groups, mode, [splits, 1]]
        ops.kernels_that_ran()
        y = ops.conv(a, w, None, *rest)
        ops.conv_gradients(y, None, a, w, a.shape, w.shape, *rest, [True, True, False])
        assert ops.kernels_that_ran() == expected, (channels, groups, mode)
        whole = ops.conv(a, w, None, *rest[:-1], None)
        assert torch.equal(y, whole)  # the same bits
        want = reference.conv(a, w, None, 1, 1, 1, groups, mode)
        assert float((y - want).abs().max()) < (5e-2 if tf32 else 5e-5)


def test_what_falls_back_to_which_kernel():
    """Halos that do not fit, many residues of the stride, weights larger than the limit of their parts."""
    ops = host()

    def ran(x: Tensor, w: Tensor, stride: int, groups: int, padding: int = 0) -> str:
        rest = [2, False, [stride] * 2, [padding] * 2, [0, 0], [1, 1], groups, "zeros", None]
        ops.kernels_that_ran()
        y = ops.conv(x, w, None, *rest)
        gradients = ops.conv_gradients(y, None, x, w, x.shape, w.shape, *rest, [True, True, False])
        leaves = [t.double().requires_grad_() for t in (x, w)]
        want = reference.conv(*leaves, None, stride, padding, 1, groups)
        for got, e in zip(gradients[:2], torch.autograd.grad(want, leaves, y.double()), strict=True):
            torch.testing.assert_close(got.double(), e, rtol=1e-4, atol=1e-4 * float(e.abs().max()))
        return ops.kernels_that_ran()

    torch.manual_seed(4)
    wide = torch.randn(1, 8, 4, 60).contiguous(memory_format=torch.channels_last)
    assert ran(wide, torch.randn(8, 1, 1, 41), 1, 8) == "depthwise:1 depthwise:1 depthwise:1"
    large = torch.zeros(1, 8, 70, 70), torch.zeros(8, 1, 63, 63)
    assert ops.choice(*large, 8, "native", "fprop") == "tiles"  # the depthwise kernel has no room
    assert ran(torch.randn(1, 3, 20, 20), torch.randn(8, 3, 5, 5), 5, 1) == "tiles:1 plain:1 weight:1"
    ops.set_workspace_limit(1000)
    try:
        assert ran(torch.randn(1, 16, 6, 6), torch.randn(8, 16, 3, 3), 1, 1).endswith("weight:1")
    finally:
        ops.set_workspace_limit(64 << 20)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_newer_setting_of_tf32(precision, monkeypatch):
    """torch.backends.cudnn.conv.fp32_precision, with which the older question has no answer."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    x, w = torch.randn(1, 16, 9, 40), torch.randn(16, 16, 3, 3)
    try:
        conv.fp32_precision = precision
        y = host().conv(x, w, None, 2, False, [1, 1], [1, 1], [0, 0], [1, 1], 1, "zeros", None)
        if pc.build_info()["cuda"]:
            pc.explain((1, 16, 9, 40), nn.Conv2d(16, 16, 3), device="cuda")
    finally:
        conv.fp32_precision = before
    error = float((y - reference.conv(x, w, None, 1, 1)).abs().max())
    assert (error < 2e-5) == (precision == "ieee")


@pytest.mark.parametrize("channels", [24, 3, "depthwise"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_fused_results_and_bits(layout, channels):
    groups, sources = (16, 16) if channels == "depthwise" else (1, channels)
    torch.manual_seed(2)
    x = torch.randn(2, sources, 13, 24).contiguous(memory_format=layout)
    w = torch.randn(16, sources // groups, 3, 3).contiguous(memory_format=layout)
    bias, scale = torch.randn(16), torch.rand(16) + 0.5
    residual = torch.randn(2, 16, 13, 24)  # also where the result's layout is another
    y, bits = host().fused(x, w, bias, scale, residual, [1, 1], [1, 1], [1, 1], groups, "zeros", None)
    want = reference.conv(x, w, None, 1, 1, 1, groups) * scale.double().view(-1, 1, 1)
    want = (want + bias.double().view(-1, 1, 1) + residual).relu()
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(bits, torch.ops.patchconv._mask_pack(y, 0, 0, 0))


def test_rules_choose_under_auto():
    x, w = torch.randn(1, 16, 8, 8), torch.randn(8, 16, 3, 3)
    of = host().choice
    assert of(x, w, 1, "auto", "fprop") == "tiles"
    assert of(x, w, 1, "auto", "dgrad") == ""  # a rule for another pass
    assert of(x, w, 1, "aten", "fprop") == ""
    assert of(x, w, 1, "native", "dgrad") == "tiles"
    assert of(x.double(), w.double(), 1, "auto", "fprop") == ""  # the plain kernel is no matter of speed
    assert of(x.double(), w.double(), 1, "native", "fprop") == "plain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to_channels", [True, False])
def test_tiles_are_turned_to_the_other_layout(dtype, to_channels):
    """Boxes of images and volumes, which may reach over every border, to the bit."""
    torch.manual_seed(3)
    layouts = torch.contiguous_format, {4: torch.channels_last, 5: torch.channels_last_3d}
    for size, first, box in (
        ((2, 70, 30, 130), (0, 0), (30, 130)), ((1, 16, 9, 200), (3, 5), (4, 70)), ((2, 65, 12, 40), (-2, -1), (9, 44)),
        ((1, 20, 12, 40), (11, 33), (5, 20)), ((1, 130, 5, 7, 33), (-1, 2, 0), (7, 4, 33)),
    ):  # fmt: skip
        x = torch.randn(size).to(dtype)
        before, after = (layouts[0], layouts[1][x.dim()])[:: 1 if to_channels else -1]
        x = x.contiguous(memory_format=before)
        to = torch.full((*size[:2], *box), torch.nan, dtype=dtype).contiguous(memory_format=after)
        assert host().copy_turned(x, first, to)
        around = [n for f, b, s in zip(first, box, size[2:], strict=True) for n in (max(0, -f), max(0, f + b - s))]
        pads = [n for d in reversed(range(len(box))) for n in around[2 * d : 2 * d + 2]]
        inside = tuple(slice(max(0, f), min(s, f + b)) for f, b, s in zip(first, box, size[2:], strict=True))
        want = nn.functional.pad(x[(..., *inside)], pads)
        assert torch.equal(to, want)
        # Into a view: around it nothing is written.
        assert host().copy_turned(x, first, to.fill_(7)[..., :-1])
        want[..., -1] = 7
        assert torch.equal(to, want)


def test_what_is_not_turned():
    x = torch.randn(1, 32, 20, 40)
    last = x.to(memory_format=torch.channels_last)
    for source, to in (
        (x, torch.empty_like(x)), (last, torch.empty_like(last)), (x, torch.empty_like(last, dtype=torch.float64)),
        (x.double(), torch.empty_like(last, dtype=torch.float64)), (x[:, :8], torch.empty_like(last[:, :8])),
    ):  # fmt: skip
        kept = to.fill_(7).clone()
        assert not host().copy_turned(source, (0, 0), to) and torch.equal(to, kept)


@needs_kernels
def test_explain_names_the_kernel():
    """Also where there is no GPU."""
    modules = {
        "tiles": nn.Conv2d(64, 64, 3, padding=1), "depthwise": nn.Conv2d(64, 64, 3, padding=1, groups=64),
        "stem": nn.Conv2d(3, 64, 7, stride=2, padding=3),
    }  # fmt: skip
    for name, module in modules.items():
        shape = (1, module.in_channels, 512, 512)
        with pc.backend("native"):
            told = pc.explain(shape, module, device="cuda", dtype=torch.bfloat16)
            weight = pc.explain(shape, module, device="cuda", dtype=torch.bfloat16, pass_="wgrad")
        assert (told.path, told.kernel) == ("native", name)
        assert told.workspace_bytes <= 2 * 64 * 64 * 9 and f"native: {name}" in str(told)
        assert weight.kernel == ("depthwise" if name == "depthwise" else "weight")
        assert weight.workspace_bytes <= 32 << 20
        assert pc.explain(shape, module, device="cuda", dtype=torch.bfloat16).kernel is None


@pytest.mark.cuda
@needs_a_gpu
@needs_kernels
class TestOnAGPU:
    @pytest.mark.parametrize("seed", range(200))
    def test_cuda_random_configurations(self, seed):
        check(drawn(seed), Device())

    @pytest.mark.parametrize("seed", range(200))
    def test_cuda_random_layers(self, seed):
        check(wide(seed), Device())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_cuda_splits_give_the_same_bits(self, dtype):
        x = torch.randn(2, 40, 300, 200, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
        conv = pc.Conv2d(40, 72, 3, padding=1, device="cuda", dtype=dtype)
        w, grad = conv.weight, torch.randn(2, 72, 300, 200, device="cuda", dtype=dtype)
        found = []
        with pc.backend("native"):
            for splits in (None, 4, (3, 5)):
                leaf = x.detach().requires_grad_()
                y = pc.functional.conv2d(leaf, w, conv.bias, padding=1, splits=splits)
                assert pc.last_path()["path"] == "native"
                found.append((y, *torch.autograd.grad(y, [leaf, w], grad)))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))

    def test_cuda_a_training_step_in_a_graph(self):
        """conv2d_fused, forward and backward, captured and replayed with other values."""
        x = torch.randn(2, 32, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = (torch.randn(64, 32, 3, 3, device="cuda", dtype=torch.bfloat16) / 17).requires_grad_()
        b = torch.randn(64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(2, 64, 64, 64, device="cuda", dtype=torch.bfloat16)

        def step() -> list[Tensor]:
            y = pc.functional.conv2d_fused(x, w, b, padding=1, relu=True)
            return [y, *torch.autograd.grad(y, [x, w, b], grad)]

        with pc.backend("native"):
            graph, again = captured(step, step)
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(again, step(), rtol=0, atol=0)
