"""Mean and variance of a part, against float64: with a large mean, in every layout, by either way."""

from __future__ import annotations

import pytest
import torch

from patchconv_native.spatial import moments
from patchconv_native.spatial.parts import precise

SHAPES = [(2, 3, 4, 5), (1, 64, 33, 17), (3, 8, 50), (2, 4, 3, 5, 6), (2, 4, 6, 7, 9)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_moments_of_a_part(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    dims = len(shape)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3 + 100).to(dtype)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(dims)
    given = [x, x[..., 1:], x.transpose(0, 1), *([] if last is None else [x.contiguous(memory_format=last)])]
    ways = set()
    for one in given:
        for over in ([0, *range(2, dims)], list(range(2, dims)), list(range(1, dims)), [dims - 1], [0], [1]):
            found = moments._of_values(one, over)
            ways.add(moments._by_channel(one, over) is None)
            var, mean = torch.var_mean(one.double(), over, correction=0, keepdim=True)
            for got, want in zip(found, (mean, var), strict=True):
                assert got.dtype == precise(dtype) and got.shape == want.shape
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert ways == {False, True}


def test_which_tensors_go_by_channel() -> None:
    x = torch.randn(2, 8, 16, 12)
    for one in (x, x.contiguous(memory_format=torch.channels_last)):
        assert moments._by_channel(one, [0, 2, 3]) is one
    assert moments._by_channel(x.view(2, 4, 2, 16, 12), [2, 3, 4]).shape == (1, 8, 384)  # type: ignore[union-attr]
    assert moments._by_channel(x[:, :, 1:], [0, 2, 3]) is None, "it would be copied"
    assert moments._by_channel(x.permute(0, 2, 3, 1), [3]) is None
    assert moments._by_channel(torch.randn(1, 65, 64, 8), [3]) is None, "too many rows"
    assert moments._by_channel(x.to("meta"), [0, 2, 3]) is None
