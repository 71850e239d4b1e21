"""Made-up traces, for the tests of reports, figures and pages."""

from __future__ import annotations

import pytest
from support import memory_traces

from patchconv_native.memory import MemoryReport, Trace


@pytest.fixture(params=memory_traces.TRACES)
def trace(request: pytest.FixtureRequest) -> Trace:
    return memory_traces.TRACES[request.param]()


@pytest.fixture
def report(trace: Trace) -> MemoryReport:
    return MemoryReport(trace)


@pytest.fixture
def resnet() -> MemoryReport:
    return MemoryReport(memory_traces.resnet())
