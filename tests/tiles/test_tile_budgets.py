"""Random networks with skips, additions and concatenations: `tile` gives what one call gives, and keeps each budget. No
budget that one call of a module keeps is refused.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.checks import ON_AVX512
from support.modules import of_torchvision
from support.pairs import FULL
from support.seeds import SWEEP_SEED
from support.spatial_chains import Gate, structured
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import patchconv_native as pc
from patchconv_native._budget import MARGIN, least_budget
from patchconv_native.memory.peaks import allocated_peak
from patchconv_native.tiles import costs, tiling
from patchconv_native.tiles.plan import RECORDING

SEEDS = (7, *((2, 3, *range(SWEEP_SEED, SWEEP_SEED + 40)) if FULL else ()))
KINDS = "conv conv conv mode depthwise point dilated act act batch group instance layer max avg strided up add cat gate"


class LayerNorm(nn.LayerNorm):
    """Over the channels of each place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pair(nn.Module):
    """An image joined to an earlier one, which is brought to its size and its channels."""

    def __init__(self, kind: str, channels: int, earlier: int) -> None:
        super().__init__()
        self.kind, self.fit = kind, nn.Conv2d(earlier, channels, 1)

    def forward(self, x: Tensor, earlier: Tensor) -> Tensor:
        if earlier.shape[2:] != x.shape[2:]:
            earlier = F.interpolate(earlier, size=x.shape[2:], mode="bilinear")
        return torch.cat((x, earlier), 1) if self.kind == "cat" else x + self.fit(earlier)


class Net(nn.Module):
    """Layers of which each reads the one before it, and some an earlier one too."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        channels = [rng.choice([3, 8])]
        halvings, earlier, layers = 0, [], []
        for _ in range(rng.randint(5, 14)):
            c, kind, place = channels[-1], rng.choice(KINDS.split()), rng.randrange(len(channels))
            if kind in ("max", "avg", "strided"):
                halvings += 1
                kind = kind if halvings < 3 else "conv"
            made = self.layer(kind, c, rng) if kind not in ("add", "cat") else Pair(kind, c, channels[place])
            layers.append(made)
            earlier.append(place if isinstance(made, Pair) else None)
            own = getattr(made, "out_channels", c)
            channels.append(c + channels[place] if kind == "cat" else own)
        self.layers, self.earlier, self.channels = nn.ModuleList(layers), earlier, channels[0]

    @staticmethod
    def layer(kind: str, c: int, rng: random.Random) -> nn.Module:
        wide = rng.choice([4, 8, 12, 16, 32])
        kernel = rng.choice([3, 3, 5, 7, (3, 5)])
        pads = tuple(k // 2 for k in ((kernel, kernel) if isinstance(kernel, int) else kernel))
        groups = rng.choice([g for g in (1, 2, 4, c) if c % g == 0])
        return {
            "conv": lambda: nn.Conv2d(c, wide, kernel, padding=pads),
            "mode": lambda: nn.Conv2d(
                c, wide, kernel, padding=pads, padding_mode=rng.choice(["reflect", "replicate", "circular"])
            ),
            "depthwise": lambda: nn.Conv2d(c, c, kernel, padding=pads, groups=c),
            "point": lambda: nn.Conv2d(c, wide, 1),
            "dilated": lambda: nn.Conv2d(c, wide, 3, padding=2, dilation=2),
            "act": lambda: rng.choice([nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.PReLU])(),
            "batch": lambda: nn.BatchNorm2d(c), "group": lambda: nn.GroupNorm(groups, c),
            "instance": lambda: nn.InstanceNorm2d(c, affine=True), "layer": lambda: LayerNorm(c),
            "max": lambda: nn.MaxPool2d(3, 2, 1), "avg": lambda: nn.AvgPool2d(2, ceil_mode=True),
            "strided": lambda: nn.Conv2d(c, wide, 3, 2, 1), "gate": lambda: Gate(c),
            "up": lambda: nn.Upsample(scale_factor=2, mode=rng.choice(["nearest", "bilinear"])),
        }[kind]()  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, place in zip(self.layers, self.earlier, strict=True):
            values.append(layer(values[-1]) if place is None else layer(values[-1], values[place]))
        return values[-1]


def least(net: nn.Module, x: Tensor) -> int:
    with pytest.raises(pc.BudgetError) as caught:
        pc.tile_plan(net, x, budget=1)
    return caught.value.least


@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_random_networks(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    net = Net(rng).train(rng.random() < 0.3)
    x = structured((rng.choice([1, 1, 3]), net.channels, rng.randint(120, 240), rng.randint(120, 240))).float()
    if rng.random() < 0.3:
        x = x.contiguous(memory_format=torch.channels_last)
    exact, stock = copy.deepcopy(net).double()(x.double()), copy.deepcopy(net)(x)
    below, above = least(net, x), pc.tile_plan(net, x).needs
    for budget in {below, (below + max(above, below)) // 2, None}:
        results: list[Tensor] = []
        model = copy.deepcopy(net)
        peak = allocated_peak(lambda budget=budget, model=model, to=results: to.append(pc.tile(model, x, budget)))
        error, theirs = results[0] - exact, stock - exact
        assert error.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt() + 1e-7 * exact.abs().max()
        assert error.abs().max() <= 3 * theirs.abs().max() + 1e-6 * exact.abs().max()  # of one element, by chance
        if ON_AVX512:
            assert peak - results[0].nbytes <= (above if budget is None else budget)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt(),
        lambda x: torch.cat(torch.var_mean(x, (2, 3))),
        lambda x: x.std((1, 2, 3)),
        lambda x: x.amax((2, 3)),
        lambda x: x.mean(),
        lambda x: (x > 0).sum((2, 3)),
        lambda x: F.group_norm(x, 2).bfloat16().mean((2, 3)),
    ],
    ids=["normalized", "var_mean", "std", "amax", "mean", "counts", "half"],
)
@pytest.mark.parametrize("shape", [(1, 4, 200, 100), (2, 128, 60, 8)])
@torch.no_grad()
def test_numbers_of_the_image_count(call, shape):
    """A variance asks for the mean, and then for squares, which take a copy of the strip; sums of another dtype copy it
    too. The call itself runs on a row that is made up.
    """
    x = structured(shape)
    for tile in (1, 20):
        budget, found = pc.tile_plan(call, x, tile=tile).needs, []
        peak = allocated_peak(lambda tile=tile, found=found: found.append(pc.tile(call, x, tile=tile)))
        assert peak - found[0].nbytes <= budget
        torch.testing.assert_close(found[0], call(x))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor([[[0.9, 0.2, 0.1], [-0.2, 0.9, 0.0]]]))

    def forward(self, x: Tensor) -> Tensor:
        return F.grid_sample(x, F.affine_grid(self.by, [1, *x.shape[1:]], align_corners=False), align_corners=False)


class Masked(nn.Conv2d):
    """Writes into its weight in each call, as PixelCNN's layers do."""

    def __init__(self) -> None:
        super().__init__(4, 4, 7, padding=3)
        self.register_buffer("mask", torch.ones(7, 7).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.tanh() + torch.linspace(0, 1, x[0].numel()).view(x[:1].shape),
        Turned().double(),
        lambda x: F.unfold(x, 3, padding=1),
        lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1),
        nn.Conv2d(4, 2, 1).double(),
        nn.Sequential(*(Masked() for _ in range(9))).double(),
        lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[2:]),
        lambda x: x.roll((3, 5), (2, 3)).kthvalue(3, 2)[0],
    ],
    ids=["constant", "of a parameter", "unfold", "fold", "1x1", "weights", "frequencies", "orders"],
)
@torch.no_grad()
def test_what_is_made_besides_values_counts(call: Callable[[Tensor], Tensor]) -> None:
    """Constants that the module makes are there during the whole call; im2col and col2im begin with a copy, and so do
    convolutions of every second column.
    """
    x = structured((1, 4, 150, 200))[..., ::2]
    budget, found = least(call, x), []  # type: ignore[arg-type]
    assert allocated_peak(lambda: found.append(pc.tile(call, x, budget=budget))) - found[0].nbytes <= budget
    torch.testing.assert_close(found[0], call(x))


class AfterTokens(nn.Module):
    """Behind tokens of one image, torch's channels_last has strides that step to the next image by one channel. Of
    these a group norm makes NCHW.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(64, 64), nn.Conv2d(64, 64, 3, padding=1)
        self.block = nn.Sequential(nn.GroupNorm(4, 64), nn.Conv2d(64, 64, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape) + x
        return self.last(F.interpolate(F.silu(self.block[0](x + self.block(x))), scale_factor=2))


@torch.no_grad()
def test_strips_lie_in_memory_as_planned() -> None:
    model, x, found = AfterTokens().double(), structured((1, 64, 8, 6)), []
    budget = least(model, x)
    assert allocated_peak(lambda: found.append(pc.tile(model, x, budget=budget))) - found[0].nbytes <= budget
    torch.testing.assert_close(found[0], model(x), rtol=1e-9, atol=1e-9)
    assert found[0].stride() == model(x).stride()


@pytest.mark.skipif(
    not ON_AVX512 or torch.cpu._is_amx_tile_supported(),
    reason="oneDNN's workspace in bfloat16 is known for vectors, not for AMX's tiles",
)
@torch.no_grad()
@pytest.mark.parametrize("frozen", [(), (1,)], ids=str)
def test_casts_that_autocast_keeps_count_once(frozen: Sequence[int]) -> None:
    """It keeps none of frozen weights."""
    net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2)))
    x, found = structured((1, 3, 8, 16)).float(), []
    for place in frozen:
        net[place].requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        budget = least(net, x)
        peak = allocated_peak(lambda: found.append(pc.tile(net, x, budget=budget))) - found[0].nbytes
    assert peak <= budget <= 1.05 * peak


# ----------------------------------------------------------------------------------------------------------------------
# What one call keeps


@torch.no_grad()
def test_a_call_that_takes_nothing_besides_its_result() -> None:
    x = structured((3, 5, 20, 25)).float()
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(lambda x: x.amax((2, 3)), x, budget=1)
    assert refused.value.least == RECORDING


class InPlace(nn.Module):
    """Activations that write over what they read, a norm in training, and the input as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.last = nn.Linear(24, 4000)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(F.relu_(self.norm(self.first(x))), training=self.training)
        return x, self.last(y.mean((2, 3)).relu_())


class Overwrites(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).add_(x.amax((2, 3), keepdim=True))


def decoder() -> nn.Module:
    blocks = {
        f"{way.lower()}_block_types": [f"{way}{code}coderBlock2D"] * 2 for way, code in (("Down", "En"), ("Up", "De"))
    }
    vae = pytest.importorskip("diffusers").AutoencoderKL(
        block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, **blocks
    )
    return vae.decoder


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "deeplabv3": (
        lambda: of_torchvision("deeplabv3_mobilenet_v3_large", "segmentation", weights_backbone=None), (1, 3, 320, 200)
    ),
    "shufflenet": (lambda: of_torchvision("shufflenet_v2_x0_5"), (1, 3, 96, 64)),
    "convnext": (lambda: of_torchvision("convnext_tiny"), (1, 3, 96, 64)),
    "alexnet": (lambda: of_torchvision("alexnet"), (1, 3, 96, 80)),
    "decoder": (decoder, (1, 4, 8, 6)),
    "in place": (InPlace, (2, 3, 24, 16)),
    "overwrites": (Overwrites, (2, 3, 48, 32)),
}  # fmt: skip


def above(call: Callable[[], Any], given: Tensor) -> tuple[int, Any]:
    """The peak above the result, and the result."""
    results: list[Any] = []
    peak = allocated_peak(lambda: results.append(call()))
    return peak - sum(t.nbytes for t in tree_leaves(results) if t is not given), results[0]


@pytest.mark.skipif(not ON_AVX512, reason="oneDNN's workspace is not known")
@pytest.mark.parametrize("name", [name for name in SMALL if FULL or name not in ("deeplabv3", "convnext")])
@torch.no_grad()
def test_a_budget_that_one_call_keeps_is_not_refused(name: str) -> None:
    torch.manual_seed(0)
    make, shape = SMALL[name]
    model, x = make().eval(), torch.randn(shape)
    images = [x.clone() for _ in range(2)]
    stock, want = above(lambda: model(images[0]), images[0])
    budget = max(least_budget(stock, MARGIN["cpu"]), RECORDING)
    assert least(model, x) <= budget
    peak, got = above(lambda: pc.tile(model, images[1], budget=budget), images[1])
    assert peak <= budget and torch.equal(images[1], x)
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-12


class Standardized(nn.Conv2d):
    """Its weight is made anew in each call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=self.padding)


@torch.no_grad()
def test_a_refusal_says_what_is_made_of_no_image() -> None:
    net = nn.Sequential(nn.Conv2d(3, 64, 3), *[Standardized(64, 64, 3, padding=1) for _ in range(8)])
    x = structured((1, 3, 40, 30)).float()
    made = 8 * net[1].weight.nbytes
    with pytest.raises(pc.BudgetError, match="MiB of these bytes are tensors that it makes of no image") as refused:
        pc.tile(net, x, budget=made)
    assert f"{made / 2**20:.3g} MiB of these bytes" in str(refused.value) and refused.value.least > made
    found: list[Tensor] = []
    peak = allocated_peak(lambda: found.append(pc.tile(net, x, budget=refused.value.least))) - found[0].nbytes
    assert made < peak <= refused.value.least


def at_once(model: nn.Module, x: Tensor, **more: Any) -> tuple[pc.TilePlan, int]:
    """The plan for a budget that nothing but one call keeps, and the budget."""
    with pytest.raises(pc.BudgetError) as refused:
        pc.tile_plan(model, x, budget=1, **more)
    plan = refused.value.plan
    assert plan.at_once and "at once" in str(plan)
    return plan, refused.value.least


@torch.no_grad()
def test_calls_run_as_they_are() -> None:
    """Norms in training move their statistics once, dropout draws the masks of strips, and the image stays as it is."""
    torch.manual_seed(0)
    net, x = InPlace().train(), torch.randn(2, 3, 9, 7)
    _, budget = at_once(net, x)
    models = [copy.deepcopy(net) for _ in range(2)]
    results, before = [], x.clone()
    for model, asked in zip(models, (budget, None), strict=True):
        torch.manual_seed(1)
        results.append(pc.tile(model, x, budget=asked))
    assert results[0][0] is x and torch.equal(x, before)
    assert (results[0][1] - results[1][1]).abs().max() <= 1e-5 * results[1][1].abs().max()
    for key, value in models[0].state_dict().items():
        assert torch.allclose(value.double(), models[1].state_dict()[key].double(), 1e-5, 1e-7), key
    assert models[0].norm.num_batches_tracked == 1


@torch.no_grad()
def test_arrays_and_given_results(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)), torch.randn(1, 3, 8, 8)
    read, written = x.numpy(), numpy.zeros((1, 10), "float32")
    _, budget = at_once(net, read, out=written)
    seen: list[tuple[int, int]] = []
    assert pc.tile(net, read, budget=budget, out=written, progress=lambda *at: seen.append(at)) is written
    assert torch.allclose(torch.from_numpy(written), net(x), atol=1e-6) and seen == [(1, 1)]


# ----------------------------------------------------------------------------------------------------------------------
# What is said


@torch.no_grad()
def test_a_refusal_names_the_call_that_needs_the_most() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 64, 3, padding=1), nn.Conv2d(64, 2, 1))
    for x in (torch.randn(1, 3, 300, 40), torch.randn(1, 3, 40, 300)):
        with pytest.raises(pc.BudgetError, match=r"the most is needed at conv\w* in 2") as refused:
            pc.tile(net, x, budget="1KiB")
        assert str(refused.value.least) in str(refused.value)


@torch.no_grad()
def test_long_planning_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    net, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 20, 20)
    for seconds, said in ((0.0, True), (60.0, False)):
        monkeypatch.setattr(tiling, "LONG", seconds)
        pc.tile(net, x, progress=True)
        assert ("tile: planning" in capsys.readouterr().err) == said


@torch.no_grad()
def test_memory_counts_in_blocks_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: numbers of the whole image are few bytes a strip, each in a block of its own."""
    net, x = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.GroupNorm(2, 4)), torch.randn(1, 4, 256, 16)

    def peaks() -> list[int]:
        return [pc.tile_plan(net, x, tile=rows).peak for rows in (8, 2)]

    before = peaks()
    monkeypatch.setattr(costs, "BLOCKS", {"cpu": 4096})
    more = [now - was for now, was in zip(peaks(), before, strict=True)]
    assert more[0] > 0.9 * 32 * 4096 and more[1] > 0.9 * 128 * 4096 and more[1] > 3 * more[0]
