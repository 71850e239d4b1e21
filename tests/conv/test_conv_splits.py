"""Where the seams are must not matter: every way of cutting gives the numbers of the uncut call, and is obeyed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support.checks import check, forward_backward, operator
from support.configurations import build, build_grad, plain
from support.pairs import pairwise
from support.threads import threads

import patchconv_native as pc

BOTH = pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])


# 13 rows in 1 to 13 strips: even, uneven, single rows, strips shorter than the halo; columns, and both.
TILES = [*((rows, 1) for rows in range(1, 14)), *itertools.product((1, 2, 5), (2, 3, 5))]


@BOTH
@pytest.mark.parametrize("splits", TILES)
def test_every_number_of_tiles(device, transposed, splits):
    path = check(plain(transposed=transposed, sizes=(13, 5), kernel=(5, 3), padding=(2, 1), splits=splits), device)
    whole = splits == (1, 1)
    assert path["path"] == ("stock" if whole else "tiled") and path["tiles"] == list(splits)
    assert path["count"] == (1 if whole else 2 * splits[0] * splits[1]), "images times tiles"


@BOTH
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_an_int_cuts_the_first_dimension(device, transposed, dims):
    path = check(plain(dims, transposed=transposed, splits=3), device)
    assert path["path"] == "tiled" and path["tiles"] == [3] + [1] * (dims - 1)


@BOTH
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_more_splits_than_rows_are_clamped(device, transposed, dims):
    c = plain(dims, transposed=transposed, splits=(1000,) * dims)
    with pc.record_paths() as records:
        path = check(c, device)
    size = c.sizes  # with padding 1 and a kernel of 3 the output has the input's size
    assert path["path"] == "tiled" and path["tiles"] == list(size)
    # Each pass clamps to the grid that it writes: the same here for all of them.
    assert [r["tiles"] for r in records] == [list(size)] * 3
    layer = getattr(pc, f"Conv{'Transpose' if transposed else ''}{dims}d")(4, 6, 3, padding=1, splits=1000)
    explained = pc.explain((2, 4, *size), layer)
    assert explained.tiles == (size[0],) + (1,) * (dims - 1)
    assert "more splits than coordinates" in explained.reason


@pytest.mark.parametrize("stride", [2, 3, 4])
@pytest.mark.parametrize("height", range(20, 28))
def test_stride_that_no_strip_is_a_multiple_of(device, stride, height):
    c = plain(sizes=(height, 9), stride=(stride, 1), splits=(3, 2))
    assert check(c, device)["path"] == "tiled"


@BOTH
@pytest.mark.parametrize("kernel,dilation", [(11, 1), (3, 5), (2, 9)])
def test_halo_larger_than_a_strip(device, transposed, kernel, dilation):
    reach = (kernel - 1) * dilation
    shape = {"sizes": (20, 8), "kernel": (kernel, 1), "dilation": (dilation, 1), "padding": (reach // 2, 0)}
    assert check(plain(transposed=transposed, splits=(10, 1), **shape), device)["tiles"] == [10, 1]


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_a_strip_inside_the_padding(device, mode):
    """Strips of one output row, of which the first and last see nothing but padding."""
    c = plain(sizes=(6, 6), kernel=(2, 2), padding=(5, 5), padding_mode=mode, splits=(100, 100), content="ramp")
    assert check(replace(c), device)["path"] == "tiled"


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_zero_padding_wider_than_the_kernel(device, dims):
    """Rows of output that no input reaches hold the bias alone."""
    c = plain(dims, kernel=2, padding=6, batch=1, splits=(100, 3, 2)[:dims])
    assert check(c, device)["path"] == "tiled"


@BOTH
@pytest.mark.parametrize("limit", [1, 1_000, 10_000, 50_000])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_automatic_splits_follow_the_workspace_limit(device, transposed, limit, dims):
    sizes = {1: (500,), 2: (20, 18), 3: (6, 7, 8)}[dims]
    if limit == 1:  # a tile for every place
        sizes = {1: (60,), 2: (8, 7), 3: (4, 3, 3)}[dims]
    c = plain(dims, transposed=transposed, sizes=sizes, batch=3, splits=None, limit=limit)
    with pc.record_paths() as records:
        check(c, device)
    assert [r["pass"] for r in records] == ["fprop", "dgrad", "wgrad"] or len(records) == 3
    fits = device == "cuda" and limit == 50_000  # cuDNN needs less
    assert fits or all(r["path"] == "tiled" for r in records), records


def test_automatic_uses_fewer_tiles_for_a_larger_limit(device):
    x, w = torch.randn(1, 8, 128, 128, device=device), torch.randn(8, 8, 3, 3, device=device)
    counts = []
    for limit in (1, 20_000, 200_000, "1GiB"):
        with pc.workspace_limit(limit):
            pc.functional.conv2d(x, w, padding=1)
        counts.append(pc.last_path()["count"])
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] > counts[3] == 1


def test_automatic_leaves_small_calls_to_stock(device):
    x, w = torch.randn(2, 4, 17, 13, device=device), torch.randn(6, 4, 3, 3, device=device)
    y = pc.functional.conv2d(x, w, padding=1)
    assert pc.last_path()["path"] == "stock"
    assert torch.equal(y, torch.nn.functional.conv2d(x, w, padding=1)), "one stock call gives stock's bits"


@BOTH
@pytest.mark.parametrize("splits", [1, (1, 1)])
def test_one_piece_is_one_stock_call(device, transposed, splits):
    with pc.workspace_limit(1):
        path = check(plain(transposed=transposed, splits=splits), device)
    assert path["path"] == "stock" and path["count"] == 1


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_one_piece_never_pads_the_whole_input(device, mode):
    """Padding that stock can only serve by a padded copy is tiled even where one piece was asked for."""
    c = plain(splits=(1, 1), padding=(1, 0, 2, 1), padding_mode=mode)
    path = check(c, device)
    assert path["path"] == "tiled" and path["tiles"] == [1, 1]


def test_backend_aten_gives_the_same_numbers(device):
    """Tiles moved by stock operators alone, and by the library's own copies."""
    for mode, transposed in (("zeros", False), ("reflect", False), ("circular", False), ("zeros", True)):
        with pc.backend("aten"):
            c = plain(transposed=transposed, padding_mode=mode, padding=(2, 2), splits=(5, 3))
            assert check(c, device)["path"] == "tiled"


def test_float64_tiles_are_exact_to_its_last_bits(device):
    """Seams shift no weight by even one unit: against the uncut call in float64, on an image with a steep ramp."""
    c = plain(dtype="float64", content="ramp", kernel=(5, 5), padding=(2, 2), sizes=(23, 19))
    for rows, columns in itertools.product((2, 4, 23), (1, 3, 19)):
        check(replace(c, splits=(rows, columns)), device)


@pairwise(
    lambda **case: not (case["transposed"] and case["mode"] == "circular"), count=[2, 5],
    transposed=[False, True], dtype=["float32", "bfloat16"], mode=["zeros", "circular"],
)  # fmt: skip
def test_tiles_in_parallel(device, count, transposed, dtype, mode):
    """Several tiles at once write into one result: right on any number of threads, and the same bits each time."""
    shape = {"sizes": (40, 30), "kernel": (5, 3), "padding": (2, 1), "splits": (13, 4)}
    c = plain(transposed=transposed, dtype=dtype, padding_mode=mode, **shape)
    with threads(count):
        for splits in (c.splits, (40, 1)):
            assert check(replace(c, splits=splits), device)["path"] == "tiled"
        calls = [forward_backward(operator(c), build(c, device), lambda y: build_grad(c, y)) for _ in range(4)]
    torch.testing.assert_close(calls[1:], calls[:1] * 3, rtol=0, atol=0)


def test_automatic_tiles_where_stock_is_slow():
    """oneDNN's float32 convolution with padding as wide as the kernel: tiles are chosen, though one call would fit."""
    layer = pc.Conv2d(4, 4, 13, padding=13)
    x = torch.randn(1, 4, 40, 40)
    found = layer(x)
    assert pc.last_path()["path"] == "tiled"
    assert "slow" in pc.explain(x, layer).reason
    layer.splits = 1
    torch.testing.assert_close(found, layer(x))
    assert pc.last_path()["path"] == "stock", "an explicit number is obeyed"
