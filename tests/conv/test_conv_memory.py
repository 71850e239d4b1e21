"""Peak memory beyond input, weight and result, forward and backward: at most 96 MiB, where tensors take 128
to 256 MiB.

Each case runs in a process of its own, forked from one that has imported torch and run nothing. The kernel's high-water
mark of resident memory sees every allocation, oneDNN's and libc's included, which no counter inside of PyTorch does. It
is reset after a small call of the same kind has created what every process creates once (thread pools, compiled
kernels), after the tensors were filled, and after libc's free memory was handed back, so that no workspace hides in
what an earlier call left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.pairs import FULL, todays

MIB = 2**20
LIMIT = 96
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

# name: operator, channels, outputs, sizes, kernel, keyword arguments
CASES: dict[str, tuple[str, int, int, tuple[int, ...], int, dict[str, object]]] = {
    "k3": ("conv2d", 64, 64, (1024, 1024), 3, {"padding": 1}),
    "k7": ("conv2d", 16, 16, (2048, 2048), 7, {"padding": 3}),
    "stride": ("conv2d", 32, 64, (1024, 1024), 3, {"padding": 1, "stride": 2}),
    "reflect": ("conv2d", 8, 8, (2048, 2048), 3, {"padding": 1, "padding_mode": "reflect"}),
    "circular": ("conv2d", 8, 8, (2048, 2048), 3, {"padding": 1, "padding_mode": "circular"}),
    "asymmetric": ("conv2d", 8, 8, (2048, 2048), 4, {"padding": [1, 2, 2, 1]}),
    "depthwise": ("conv2d", 32, 32, (1024, 1024), 3, {"padding": 1, "groups": 32}),
    "transposed": ("conv_transpose2d", 64, 32, (512, 512), 4, {"padding": 1, "stride": 2}),
    "volume": ("conv3d", 8, 8, (64, 256, 256), 3, {"padding": 1}),
    "signal": ("conv1d", 8, 8, (4_194_304,), 9, {"padding": 4}),
    "double": ("conv2d", 4, 4, (2048, 2048), 3, {"padding": 1}),
    "bfloat16": ("conv2d", 16, 16, (2048, 2048), 3, {"padding": 1}),
}
CHANNELS_LAST = ("k3", "k7", "transposed", "volume", "bfloat16")
# `make test` takes each case in one layout, and leaves out what goes the way of another: circular padding that of
# reflection, float64 that of float32, a stride that of k7.
EVERY = [(name, "contiguous") for name in CASES] + [(name, "channels_last") for name in CHANNELS_LAST]
SOME = [("k7", "contiguous"), ("reflect", "contiguous"), ("asymmetric", "contiguous"), ("depthwise", "contiguous"),
        ("signal", "contiguous"), ("bfloat16", "contiguous"), ("k3", "channels_last"), ("transposed", "channels_last"),
        ("volume", "channels_last")]  # fmt: skip
PASSES = ("fprop", "dgrad", "wgrad")
DTYPES = {"double": "float64", "bfloat16": "bfloat16"}


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measured(call: Callable[[], Any]) -> tuple[Any, int]:
    """The call's result and the bytes by which resident memory rose at its highest."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another libc than glibc
        ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    result = call()
    return result, resident("VmHWM") - before


def run(name: str, layout: str) -> dict[str, dict[str, object]]:
    """Every pass of one case, in the process that measures: MiB beyond the result, and the path taken."""
    import torch

    import patchconv_native as pc

    torch.manual_seed(0)
    torch.set_num_threads(2)
    operator, channels, outputs, sizes, kernel, arguments = CASES[name]
    dtype = getattr(torch, DTYPES.get(name, "float32"))
    function = getattr(pc.functional, operator)
    groups = arguments.get("groups", 1)
    assert isinstance(groups, int)
    shape = (channels, outputs // groups) if "transpose" in operator else (outputs, channels // groups)

    def passes(spatial: tuple[int, ...]) -> dict[str, dict[str, object]]:
        x = torch.empty(1, channels, *spatial, dtype=dtype)
        if layout == "channels_last":
            last = torch.channels_last if len(spatial) == 2 else torch.channels_last_3d
            x = torch.empty(x.shape, dtype=dtype, memory_format=last)
        x.uniform_(-1, 1).requires_grad_()
        w = torch.empty(*shape, *[kernel] * len(spatial), dtype=dtype).uniform_(-1, 1).requires_grad_()
        found = {}

        def note(what: str, result: torch.Tensor, rise: int) -> None:
            size = result.numel() * result.element_size()
            found[what] = {"extra": (rise - size) / MIB, "result": size / MIB, "path": pc.last_path()}

        y, rise = measured(lambda: function(x, w, **arguments))
        note("fprop", y, rise)
        grad = y.detach()  # the output itself serves as a dense gradient
        for what, leaf in (("dgrad", x), ("wgrad", w)):
            (result,), rise = measured(lambda leaf=leaf: torch.autograd.grad(y, [leaf], grad, retain_graph=True))
            note(what, result, rise)
            del result
        return found

    passes(tuple(max(32, n // 16) for n in sizes))
    return passes(sizes)


def can_measure() -> bool:
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return STATUS.exists()


pytestmark = pytest.mark.skipif(not can_measure(), reason="needs Linux's /proc/self/clear_refs")


@pytest.mark.parametrize("name,layout", EVERY if FULL else todays(SOME))
def test_peak(name, layout):
    found: dict[str, dict[str, Any]] = processes.run(run, name, layout)
    assert tuple(found) == PASSES
    for what, seen in found.items():
        path, extra = seen["path"], seen["extra"]
        assert path["pass"] == what
        assert extra <= LIMIT, f"{what}: {extra:.0f} MiB beyond the result of {seen['result']:.0f} MiB, {path}"
        if layout == "contiguous" and what == "fprop":
            assert path["path"] == "tiled", path


def padded_copy() -> float:
    """MiB of a padded copy made by hand, by the same measure."""
    import torch
    import torch.nn.functional as F

    x, w = torch.ones(1, 16, 2048, 2048), torch.ones(16, 16, 1, 1)
    F.conv2d(F.pad(x[..., :64, :64], [1] * 4), w)
    _, rise = measured(lambda: F.pad(x, [1] * 4, mode="circular")[..., :1, :1].clone())
    return rise / MIB


def test_the_measure_sees_what_stock_spends():
    """A measure that does not see the copy would let everything pass."""
    assert 250 <= processes.run(padded_copy) <= 900
