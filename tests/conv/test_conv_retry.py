"""A convolution that runs out of memory is computed again in more tiles, says so once and leaves nothing changed.

In forked processes of their own, whose address space is limited just above what they have.
"""

from __future__ import annotations

from typing import Any

import pytest
from support import processes

SETUP = """
import resource, warnings
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


def with_warnings(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = call()
    return result, [str(one.message).partition(" (Triggered")[0] for one in seen]
"""


def run(code: str) -> dict[str, Any]:
    """The variable `found` of the code, run after SETUP."""
    return processes.run(_executed, SETUP + code)


def _executed(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names["found"]


def test_forward() -> None:
    found = run("""
want = torch.nn.functional.conv2d(x, w, padding=1)
leave(128 + 110)
y, texts = with_warnings(lambda: pc.functional.conv2d(x, w, padding=1))
path, error = pc.last_path()["path"], max(float((a - b).abs().max()) for a, b in zip(y[0], want[0]))
del y
again = with_warnings(lambda: pc.functional.conv2d(x, w, padding=1))[1]
stock = error_of(lambda: torch.nn.functional.conv2d(x, w, padding=1))
found = {
    "stock": stock, "texts": texts, "again": again, "error": error,
    "path": path, "limit": pc.workspace_limit(),
}
""")
    assert "can't allocate memory" in found["stock"]
    assert len(found["texts"]) == 1 and found["again"] == []
    text = "conv2d: out of memory; computed again in more tiles, with a workspace limit of "
    assert found["texts"][0].startswith(text)
    assert "pc.workspace_limit(" in found["texts"][0]
    assert found["path"] == "tiled" and found["error"] < 1e-3
    assert found["limit"] == 100 * 2**30, "no setting has been changed"


def test_backward() -> None:
    found = run("""
x.requires_grad_(), w.requires_grad_()
y = pc.functional.conv2d(x, w, padding=1)
g = torch.ones(()).expand(y.shape)
want = torch.autograd.grad(y, (x, w), g, retain_graph=True)
leave(128 + 128 + 90)
got, texts = with_warnings(lambda: torch.autograd.grad(y, (x, w), g))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want)]
found = {"texts": texts, "errors": errors}
""")
    assert len(found["texts"]) == 1 and "out of memory; computed again in more tiles" in found["texts"][0]
    assert max(found["errors"]) < 1e-4


def test_splits_that_were_given() -> None:
    found = run("""
leave(128 + 90)
y, texts = with_warnings(lambda: pc.functional.conv2d(x, w, padding=1, splits=2))
found = {"texts": texts, "tiles": pc.last_path()["tiles"]}
""")
    assert "with 8 pieces of the first dimension" in found["texts"][0]
    assert found["tiles"] == [8, 1]


@pytest.mark.parametrize("splits", ["None", "4"])
def test_where_the_result_does_not_fit(splits: str) -> None:
    """The first error comes out, and the module is what it was."""
    found = run(f"""
conv = pc.Conv2d(32, 32, 3, padding=1, splits={splits})
leave(100)
error, texts = with_warnings(lambda: error_of(lambda: conv(x)))
found = {{"error": error, "texts": texts, "splits": conv.splits, "limit": pc.workspace_limit()}}
""")
    assert "can't allocate memory" in found["error"] and found["texts"] == []
    assert found["splits"] == (None if splits == "None" else 4) and found["limit"] == 100 * 2**30
