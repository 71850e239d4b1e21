"""pc.explain: what it says is what the call then does, and it raises what the call would raise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.pairs import pairwise
from torch import Tensor, nn

import patchconv_native as pc
from patchconv_native.memory.peaks import allocated_peak


def layouts() -> dict[str, Tensor]:
    x = torch.randn(2, 16, 64, 48)
    return {
        "contiguous": x,
        "channels_last": x.to(memory_format=torch.channels_last),
        "sliced": torch.randn(2, 16, 64, 96)[..., ::2],
        "sliced channels_last": torch.randn(2, 16, 64, 96).to(memory_format=torch.channels_last)[..., ::2],
        "expanded": torch.randn(2, 1, 64, 48).expand(2, 16, 64, 48),
        "unbatched": torch.randn(16, 64, 48),
    }


MODULES = {
    "3x3": lambda: nn.Conv2d(16, 16, 3, padding=1),
    "1x1 stride 2": lambda: nn.Conv2d(16, 8, 1, stride=2),
    "reflect": lambda: nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
    "wide columns": lambda: nn.Conv2d(16, 16, 9, padding=4),
    "grouped": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(16, 16, 3, padding=1),
    "transposed stride 2": lambda: nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1),
}


@pairwise(layout=list(layouts()), name=list(MODULES), limit=[20_000, 300_000, 600_000, "64MiB"])
def test_says_what_happens(layout, name, limit):
    conv = pc.convert(MODULES[name]())
    x = layouts()[layout].requires_grad_()
    with pc.workspace_limit(limit):
        told = {p: pc.explain(x, conv, pass_=p) for p in ("fprop", "dgrad", "wgrad")}
        with pc.record_paths() as records:
            y = conv(x)
            y.backward(torch.randn_like(y))
    assert [r["pass"] for r in records] and {r["pass"] for r in records} == set(told)
    for record in records:
        found = told[record["pass"]]
        assert (found.path, found.tiles, found.batch_step) == (
            record["path"], tuple(record["tiles"]), record["batch_step"],
        ), record  # fmt: skip
    assert told["fprop"].output_size == y.shape


def test_workspace_of_one_stock_call_does_not_depend_on_the_limit():
    conv = nn.Conv2d(64, 64, 3, padding=1)
    images = {"contiguous": 128 * 2**20, "channels_last": 0}
    for limit in ("64MiB", "4GiB"):
        with pc.workspace_limit(limit):
            for layout, expected in images.items():
                x = torch.empty(1, 64, 512, 512)
                x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
                assert pc.explain(x, conv).stock_workspace_bytes == expected


def test_a_thin_volume_for_which_torch_fills_columns():
    """By its channels, slices and rows it is too small for oneDNN; with the padding counted it would not be."""
    conv, x = pc.Conv3d(32, 32, 3, padding=1), torch.rand(1, 32, 4, 128, 128)
    told = pc.explain(x, conv)
    assert told.stock_workspace_bytes == 32 * 27 * 4 * 128 * 128 * 4
    assert told.path == "tiled" and told.workspace_bytes <= 64 * 2**20
    made: list[torch.Tensor] = []
    with torch.no_grad():
        peak = allocated_peak(lambda: made.append(conv(x)))
        assert peak - made[0].nbytes <= 64 * 2**20
        assert torch.allclose(made[0], F.conv3d(x, conv.weight, conv.bias, padding=1), atol=1e-5)


def test_more_splits_than_rows():
    told = pc.explain((1, 3, 10, 10), nn.Conv2d(3, 4, 3), splits=50)
    assert told.tiles == (8, 1)
    assert "more splits than coordinates were asked for, so each coordinate is one tile" in told.reason
    assert "splits were given" in str(told)


def test_halo():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    # Two strips of 8 rows read 9 rows each of 16.
    assert pc.explain((1, 4, 16, 16), conv, splits=2).halo_percent == pytest.approx(12.5)
    assert pc.explain((1, 4, 16, 16), conv, splits=(1, 2)).halo_percent == pytest.approx(12.5)
    assert pc.explain((1, 4, 16, 16), nn.Conv2d(4, 4, 2, stride=2), splits=4).halo_percent == 0


def test_a_person_can_read_it():
    told = pc.explain((1, 64, 2048, 2048), nn.Conv2d(64, 64, 3, padding=1))
    assert told.path == "tiled" and told.tiles[0] > 1
    text = str(told)
    assert text.startswith("conv2d 1x64x2048x2048 -> 1x64x2048x2048\n  path       tiled: ")
    assert "(one stock call: 2 GiB)" in text
    assert "one call would need about 2 GiB of workspace, more than the limit of 64 MiB" in text
    assert told.workspace_bytes <= pc.workspace_limit() < told.stock_workspace_bytes


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("pass_", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("splits", [None, 3])
def test_nothing_to_compute(mode, pass_, splits):
    told = pc.explain((0, 3, 8, 8), nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), splits=splits, pass_=pass_)
    assert (told.path, told.workspace_bytes, told.output_size) == ("stock", 0, (0, 4, 8, 8))
    assert told.reason == "there is nothing to compute"


def test_under_autocast():
    x, conv = torch.randn(1, 16, 64, 64), nn.Conv2d(16, 16, 3, padding=1)
    with pc.workspace_limit("200KiB"), torch.autocast("cpu", dtype=torch.bfloat16):
        told = pc.explain(x, conv)
        assert pc.explain(x.shape, conv) == told
        pc.convert(conv)(x)
        assert told.tiles == tuple(pc.last_path()["tiles"])


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda c: pc.explain((1, 3, 8, 8), c), ValueError, "conv2d: expected input to have 4 channels"),
        (lambda c: pc.explain((1, 4, 2, 2), c), ValueError, "conv2d: expected the kernel to fit"),
        (lambda c: pc.explain((4, 8), c), ValueError, "conv2d: expected input to have 3 or 4 dimensions"),
        (lambda c: pc.explain((1, 4, 2**31, 2**31), c), ValueError, "explain: expected tensors of fewer than 2^56"),
        (lambda c: pc.explain(torch.ones(1, 4, 8, 8).double(), c), TypeError, "conv2d: expected weight to have"),
        (lambda c: pc.explain((1, 4, 8, 8), c, splits="4"), TypeError, "explain: expected splits to be None, an int"),
        (lambda c: pc.explain((1, 4, 8, 8), c, splits=0), ValueError, "explain: expected splits to have 1 or 2"),
        (lambda c: pc.explain((1, 4, 8, 8), c, pass_="back"), ValueError, "explain: expected pass_ to be"),
        (lambda c: pc.explain((1, 4, 8, 8), c, dtype=torch.int32), TypeError, "explain: expected dtype float64"),
        (lambda c: pc.explain((1, 4, 8, 8), c, device="meta"), ValueError, "explain: expected device to be one"),
        (lambda c: pc.explain(torch.ones(1, 4, 8, 8), c, dtype=torch.float32), TypeError, "explain: expected dtype"),
        (lambda c: pc.explain(5, c), TypeError, "explain: expected input to be a tensor or a shape"),
        (lambda c: pc.explain((1, 4, 8.0, 8), c), TypeError, "explain: expected input to be a tensor or a shape"),
        (lambda c: pc.explain(torch.ones(1, 4, 8, 8, device="meta"), c), ValueError, "explain: expected device"),
        (lambda c: pc.explain((1, 4, 8, 8), nn.ReLU()), TypeError, "explain: expected conv to be a convolution"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error) as raised:
        call(nn.Conv2d(4, 4, 3))
    assert str(raised.value).startswith(text)


def test_recorded_paths_nest():
    conv, x = pc.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    with pc.record_paths() as outer:
        conv(x)
        with pc.record_paths() as inner:
            conv(x)
        conv(x)
    assert (len(outer), len(inner)) == (3, 1)


# Channels in and out, sides, dilation: the passes that keep the limit of 64 MiB.
HOLES = {
    (512, 64, (60, 66), 36): {"fprop", "dgrad", "wgrad"},
    (512, 8, (120, 132), 36): {"fprop", "dgrad", "wgrad"},
    (512, 64, (65, 65), 18): {"fprop", "dgrad", "wgrad"},
    (2048, 64, (120, 132), 36): {"dgrad"},
    (2048, 64, (29, 33), 36): {"dgrad"},
}


@pytest.mark.parametrize("pass_", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("case", HOLES, ids=str)
def test_tiles_of_kernels_with_holes(case, pass_):
    """A tile of a few pixels reads all that lies in the holes of its kernel."""
    channels, made, sides, dilation = case
    x = torch.empty(1, channels, *sides, dtype=torch.float64)
    conv = pc.Conv2d(channels, made, 3, padding=dilation, dilation=dilation, dtype=torch.float64)
    found = pc.explain(x, conv, pass_=pass_)
    assert found.stock_workspace_bytes > 64 * 2**20
    if pass_ in HOLES[case]:
        assert found.path == "tiled" and found.workspace_bytes <= 64 * 2**20
    elif case[2] == (29, 33):
        assert found.path == "stock" and "tiles would need nearly as much" in found.reason
    else:
        assert found.path == "tiled" and found.workspace_bytes < found.stock_workspace_bytes / 10
    # A kernel of 3 x 3 uses a value nine times.
    assert (1 + found.halo_percent / 100) / 9 <= 4**2
    with pc.workspace_limit(1):
        assert (1 + pc.explain(x, conv, pass_=pass_).halo_percent / 100) / 9 <= 4**2
