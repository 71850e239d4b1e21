"""Peak memory beyond input, weight and result, forward and backward: at most 96 MiB, where tensors take 128
to 256 MiB.

Each case runs in a process of its own. The kernel's high-water mark of resident memory sees every allocation,
oneDNN's and libc's included, which no counter inside of PyTorch does. It is reset after a small call of the
same kind has created what every process creates once (thread pools, compiled kernels), after the tensors were
filled, and after libc's free memory was handed back, so that no workspace hides in what an earlier call left
behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def case(name: str, layout: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, __file__, name, layout],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def can_measure() -> bool:
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return STATUS.exists()


pytestmark = pytest.mark.skipif(not can_measure(), reason="needs Linux's /proc/self/clear_refs")


@pytest.mark.parametrize(
    "name,layout", [(n, "contiguous") for n in CASES] + [(n, "channels_last") for n in CHANNELS_LAST]
)
def test_peak(name, layout):
    found = case(name, layout)
    assert tuple(found) == PASSES
    for what, seen in found.items():
        path, extra = seen["path"], seen["extra"]
        assert path["pass"] == what
        assert extra <= LIMIT, f"{what}: {extra:.0f} MiB beyond the result of {seen['result']:.0f} MiB, {path}"
        if layout == "contiguous" and what == "fprop":
            assert path["path"] == "tiled", path


def test_the_measure_sees_what_stock_spends():
    """The same yardstick on a padded copy made by hand: it must show the copy, or it would bless anything."""
    program = (
        "import sys; sys.path.insert(0, 'tests/conv')\n"
        "import torch, torch.nn.functional as F\n"
        "from test_conv_memory import measured, MIB\n"
        "x, w = torch.ones(1, 16, 2048, 2048), torch.ones(16, 16, 1, 1)\n"
        "F.conv2d(F.pad(x[..., :64, :64], [1] * 4), w)\n"
        "y, rise = measured(lambda: F.pad(x, [1] * 4, mode='circular')[..., :1, :1].clone())\n"
        "print(rise / MIB)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert 250 <= float(done.stdout) <= 900


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    print(json.dumps(run(*sys.argv[1:])))
