"""A convolution that runs out of memory is computed again in more tiles, says so once and leaves nothing changed.

In processes of their own, whose address space is limited just above what they have.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SETUP = """
import json, resource, warnings
import torch
import patchconv_native as pc

torch.set_num_threads(1)
x = torch.randn(1, 32, 1024, 1024)
w = torch.randn(32, 32, 3, 3)
pc.functional.conv2d(x[:, :, :64], w, padding=1)  # makes what is made once
pc.workspace_limit("100GiB")
want = None


def leave(mib):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20, resource.RLIM_INFINITY))


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


def told(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = call()
    return result, [str(one.message).partition(" (Triggered")[0] for one in seen]
"""


def run(code: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", SETUP + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_forward() -> None:
    found = run("""
want = torch.nn.functional.conv2d(x, w, padding=1)
leave(128 + 110)
y, said = told(lambda: pc.functional.conv2d(x, w, padding=1))
path, error = pc.last_path()["path"], max(float((a - b).abs().max()) for a, b in zip(y[0], want[0]))
del y
again = told(lambda: pc.functional.conv2d(x, w, padding=1))[1]
stock = error_of(lambda: torch.nn.functional.conv2d(x, w, padding=1))
print(json.dumps({
    "stock": stock, "said": said, "again": again, "error": error,
    "path": path, "limit": pc.workspace_limit(),
}))
""")
    assert "can't allocate memory" in found["stock"]
    assert len(found["said"]) == 1 and found["again"] == []
    assert found["said"][0].startswith(
        "conv2d: out of memory; computed again in more tiles, with a workspace limit of "
    )
    assert "pc.workspace_limit(" in found["said"][0]
    assert found["path"] == "tiled" and found["error"] < 1e-3
    assert found["limit"] == 100 * 2**30, "no setting has been changed"


def test_backward() -> None:
    found = run("""
x.requires_grad_(), w.requires_grad_()
y = pc.functional.conv2d(x, w, padding=1)
g = torch.ones(()).expand(y.shape)
want = torch.autograd.grad(y, (x, w), g, retain_graph=True)
leave(128 + 128 + 90)
got, said = told(lambda: torch.autograd.grad(y, (x, w), g))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want)]
print(json.dumps({"said": said, "errors": errors}))
""")
    assert len(found["said"]) == 1 and "out of memory; computed again in more tiles" in found["said"][0]
    assert max(found["errors"]) < 1e-4


def test_splits_that_were_given() -> None:
    found = run("""
leave(128 + 90)
y, said = told(lambda: pc.functional.conv2d(x, w, padding=1, splits=2))
print(json.dumps({"said": said, "tiles": pc.last_path()["tiles"]}))
""")
    assert "with 8 pieces of the first dimension" in found["said"][0]
    assert found["tiles"] == [8, 1]


@pytest.mark.parametrize("splits", ["None", "4"])
def test_where_the_result_does_not_fit(splits: str) -> None:
    """The first error comes out, and the module is what it was."""
    found = run(f"""
conv = pc.Conv2d(32, 32, 3, padding=1, splits={splits})
leave(100)
error, said = told(lambda: error_of(lambda: conv(x)))
print(json.dumps({{"error": error, "said": said, "splits": conv.splits, "limit": pc.workspace_limit()}}))
""")
    assert "can't allocate memory" in found["error"] and found["said"] == []
    assert found["splits"] == (None if splits == "None" else 4) and found["limit"] == 100 * 2**30
