"""A test that hangs fails, in Python and in C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HANGING = '''
import ctypes
import time


def test_hangs_in_python():
    time.sleep(100)


def test_after_it():
    pass


def test_hangs_in_c():
    """A lock that is taken twice. PyDLL calls C without letting other Python threads run."""
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
'''


def test_a_test_that_hangs_fails(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "support.time_limits", "-o", "timeout=1"]
    done = subprocess.run(
        [*command, "--rootdir", ".", "-p", "no:cacheprovider", "test_hanging.py"],
        capture_output=True, text=True, cwd=tmp_path, timeout=100,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert "::test_hangs_in_python FAILED" in done.stdout and "::test_after_it PASSED" in done.stdout
    assert "::test_hangs_in_c FAILED" not in done.stdout and "passed" not in done.stdout, "pytest itself has ended"
    assert done.returncode == 1
    assert "Timeout (0:00:02.500000)!" in done.stderr
    assert " in test_hangs_in_c\n" in done.stderr
