"""Settings: of the process, or of a block on its own thread. Threads do not see each other's blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import patchconv_native as pc
from patchconv_native.settings import all_settings, settings_set

KIB, MIB = 2**10, 2**20
CASES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "workspace_limit": (pc.workspace_limit, [1 * MIB, 2 * MIB, 3 * MIB]),
    "backend": (pc.backend, ["aten", "auto", "aten"]),
    "recompute": (pc.recompute, [False, True, False]),
}
each = pytest.mark.parametrize("name", CASES)


def elsewhere(function: Callable[[], Any]) -> Any:
    """What a function returns on another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@each
def test_a_block_is_its_threads(name):
    setting, (value, other, _) = CASES[name]
    before = setting()
    with setting(value) as given:
        assert given == setting() == value and elsewhere(setting) == before
        with setting(other):
            assert setting() == other and elsewhere(setting) == before
        assert setting() == value
    assert setting() == elsewhere(setting) == before


@each
def test_a_call_is_for_the_process_and_in_a_block_for_its_rest(name):
    setting, (value, other, last) = CASES[name]
    before = setting()
    try:
        setting(value)
        assert setting() == elsewhere(setting) == value
        with setting(other):
            setting(last)
            assert setting() == last and elsewhere(setting) == value
        assert setting() == value
    finally:
        setting(before)
    assert setting() == elsewhere(setting) == before


def test_a_call_that_a_block_begins_later_is_taken_back():
    before = pc.workspace_limit()
    one = pc.workspace_limit(MIB)
    two = pc.workspace_limit(2 * MIB)
    assert elsewhere(pc.workspace_limit) == 2 * MIB
    with one:  # the older of two: the newer stays
        assert pc.workspace_limit() == MIB and elsewhere(pc.workspace_limit) == 2 * MIB
    with two:
        assert pc.workspace_limit() == 2 * MIB and elsewhere(pc.workspace_limit) == before
    with one:  # a second time
        assert pc.workspace_limit() == MIB and elsewhere(pc.workspace_limit) == before
    assert pc.workspace_limit() == before


def test_a_call_that_stays_is_not_taken_back_with_an_older_one():
    before = pc.workspace_limit()
    try:
        one = pc.workspace_limit(MIB)
        pc.workspace_limit(2 * MIB)
        with one:
            assert elsewhere(pc.workspace_limit) == 2 * MIB
        assert pc.workspace_limit() == 2 * MIB
    finally:
        pc.workspace_limit(before)


def test_blocks_of_two_threads_that_overlap():
    """The first to begin ends first: what was left behind then was the second's."""
    before, began, ended = pc.workspace_limit(), threading.Event(), threading.Event()

    def first() -> int:
        with pc.workspace_limit(KIB):
            began.set()
            assert ended.wait(60)
            return pc.workspace_limit()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(first)
        assert began.wait(60)
        with pc.workspace_limit(MIB):
            ended.set()
            assert found.result() == KIB
            assert pc.workspace_limit() == MIB
    assert pc.workspace_limit() == before


def test_many_threads_leave_the_process_as_it_was():
    before, wrong = all_settings(), []

    def blocks(number: int) -> None:
        for step in range(200):
            value = KIB * (1 + 200 * number + step)
            with pc.workspace_limit(value), pc.backend("aten"), pc.recompute(False):
                if (pc.workspace_limit(), pc.backend(), pc.recompute()) != (value, "aten", False):
                    wrong.append(value)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(blocks, range(8)))
    assert wrong == [] and all_settings() == before


@pytest.mark.parametrize("bad", [0, -5, "much"])
def test_a_value_that_is_refused_changes_nothing(bad):
    before = pc.workspace_limit()
    for block in (None, MIB):
        with pytest.raises(ValueError, match=r"^workspace_limit: expected"):
            if block is None:
                pc.workspace_limit(bad)
            else:
                with pc.workspace_limit(block):
                    pc.workspace_limit(bad)
        assert pc.workspace_limit() == elsewhere(pc.workspace_limit) == before


def test_settings_of_another_time_are_this_threads():
    with pc.workspace_limit(MIB), pc.backend("aten"), pc.recompute(False):
        then = all_settings()
    before = all_settings()
    with settings_set(then):
        assert all_settings() == then and elsewhere(all_settings) == before
    assert all_settings() == before
    with pc.workspace_limit(2 * MIB), pytest.raises(KeyError), settings_set(then):
        raise KeyError
    assert all_settings() == before


def tiles_of(passes: list[dict[str, Any]]) -> dict[str, int]:
    return {one["pass"]: one["count"] for one in passes}


@pytest.mark.parametrize("where", ["here", "on another thread"])
def test_backward_keeps_the_limit_of_its_forward(where):
    x = torch.randn(1, 4, 32, 32, requires_grad=True)
    conv = pc.Conv2d(4, 4, 3, padding=1)

    def counts(y: torch.Tensor) -> dict[str, int]:
        with pc.record_paths() as passes:
            y.sum().backward() if where == "here" else elsewhere(y.sum().backward)
        return tiles_of(passes)

    whole = counts(conv(x))
    with pc.workspace_limit(4 * KIB):
        y = conv(x)
        small = counts(conv(x)) if where == "here" else None
    kept = counts(y)
    assert set(kept) == {"dgrad", "wgrad"}
    assert all(kept[one] > whole[one] for one in kept)
    assert small is None or small == kept
    if where == "here":  # a block around backward comes first
        with pc.workspace_limit(4 * KIB):
            y = conv(x)
        with pc.workspace_limit("1GiB"):
            assert counts(y) == whole


def test_second_derivatives_keep_the_limit_too():
    x = torch.randn(1, 4, 32, 32, requires_grad=True)
    conv = pc.Conv2d(4, 4, 3, padding=1)
    found = []
    for limit in ("1GiB", 4 * KIB):
        with pc.workspace_limit(limit):
            y = conv(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pc.record_paths() as passes:
            grad.square().sum().backward()
        found.append(sum(one["count"] for one in passes))
    assert found[1] > found[0]
