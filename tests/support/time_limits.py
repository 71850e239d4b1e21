"""A pytest plugin: a test that reaches its time limit ends, wherever it hangs.

pytest-timeout fails a test at its limit (`timeout` in pyproject.toml, or the test's own mark) by a signal, which Python
code sees, and the tests after it run. Code in C++ that never returns to Python sees no signal: half a limit later a
thread of faulthandler, which needs no Python, prints where every thread is and ends the process. pytest-xdist then
reports the test as failed and goes on with another worker.
"""

from __future__ import annotations

import faulthandler
import os
from typing import Any

import pytest

ERRORS = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ERRORS] = os.dup(2)  # standard error, which is captured while tests run


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[ERRORS])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    faulthandler.dump_traceback_later(1.5 * settings.timeout + 1, exit=True, file=item.config.stash[ERRORS])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    faulthandler.cancel_dump_traceback_later()
