"""Devices, determinism and marks shared by the tests. Importing this does not import patchconv_native, so
that the oracle can be tested before the library is built.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from support.pairs import FULL
from support.seeds import DATA_SEED, DEVICES, SWEEP_SEED

pytest_plugins = ["support.time_limits"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large: more than 2^31 elements; needs up to 16 GiB and a few minutes")
    # Under xdist every worker would otherwise use every core. Parallel tiles have threads of their own.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    # Comparisons are with float64: TensorFloat-32 would be an error of our own making.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    # Tests that compare bits compare two runs: cuDNN's fastest weight gradients sum in no fixed order.
    torch.backends.cudnn.deterministic = True


def pytest_report_header() -> str:
    width = "every case" if FULL else "pairs of values (make check: every case)"
    return f"patchconv: devices {', '.join(DEVICES)}; {width}; today's seed {SWEEP_SEED} (PATCHCONV_SEED=N: another)"


@pytest.fixture(params=[pytest.param(one, marks=pytest.mark.cuda) if one == "cuda" else one for one in DEVICES])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays() -> None:
    """The garbage collector, which every count of memory calls, need not look at modules and tests each time, which
    takes the longer the more of them there are.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(DATA_SEED)


@pytest.fixture(autouse=True)
def state_is_left_alone(request: pytest.FixtureRequest):
    """No test may leave another workspace limit or backend behind for the next."""
    pc = sys.modules.get("patchconv_native")
    if pc is None or "test_reference" in request.node.nodeid:
        yield
        return
    before = pc.workspace_limit(), pc.backend()
    yield
    assert (pc.workspace_limit(), pc.backend()) == before, "the test changed process-wide settings"
