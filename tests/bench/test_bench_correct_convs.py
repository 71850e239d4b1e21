"""bench.correct on the convolution kernels and the fused operator: its checks pass here, and notice mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import patchconv_native as pc
from bench import correct, correct_convs

Change = Callable[[Tensor], Tensor]


class Operators:
    """The fused operator, made of others in float32 where a build has none; and with a mistake in a part of it."""

    def __init__(self, **mistakes: Change) -> None:
        self.mistakes = mistakes

    def conv2d_fused(self, input: Tensor, weight: Tensor, bias: Tensor | None, *given: Any, **more: Any) -> Tensor:
        def of(name: str, tensor: Tensor | None) -> Tensor | None:
            return self.mistakes.get(name, lambda t: t)(tensor) if tensor is not None else None

        more |= {name: of(name, more[name]) for name in ("scale", "residual")}
        input, weight, bias = of("input", input), of("weight", weight), of("bias", bias)  # type: ignore[assignment]
        if hasattr(torch.ops.patchconv, "conv2d_fused"):
            y = torch.ops.patchconv.conv2d_fused(input, weight, bias, *given, **more)
        else:
            mode = more["padding_mode"]
            y = pc.functional.conv2d(input.float(), weight.float(), None, *given, padding_mode=mode)
            y = y if more["scale"] is None else y * more["scale"].float().view(-1, 1, 1)
            y = y if bias is None else y + bias.float().view(-1, 1, 1)
            y = y if more["residual"] is None else y + more["residual"].float()
            y = (y.relu() if more["relu"] else y).to(input.dtype)
        return of("y", y)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(correct_convs, "ops", Operators())
    before = torch.backends.cudnn.allow_tf32
    yield
    assert torch.backends.cudnn.allow_tf32 == before


def test_every_kind_in_every_type() -> None:
    checks = list(correct.native_checks())
    assert len(set(map(str, checks))) == len(checks) and all(check.native and check.splits is None for check in checks)
    types = set(correct_convs.TYPES)
    for number in range(len(correct_convs.KINDS)):
        per_kind = checks[number * 3 * len(types) : (number + 1) * 3 * len(types)]
        assert {(check.dtype, check.tf32) for check in per_kind} == types
        assert {check.channels_last for check in per_kind} == {False, True}
        assert len({check.content for check in per_kind}) == 4
    assert {check.mode for check in checks} == {"zeros", "reflect", "replicate", "circular"}
    assert {(check.dims, check.transposed) for check in checks} >= {(d, t) for d in (2, 3) for t in (False, True)}
    few = list(correct.native_checks(few=True))
    assert {check.tf32 for check in few} == {False} and any(check.groups == check.channels for check in few)


@pytest.mark.parametrize("start", range(7))
def test_checks_pass(start: int) -> None:
    for check in itertools.islice(correct.native_checks(), start, None, 28):
        assert correct.excess(check, "cpu")[1] == "", check
    for name, fused in itertools.islice(correct_convs.fused_checks(), start, None, 28):
        assert fused("cpu")[1] == "", name


def test_the_groups_of_checks() -> None:
    counts = {only: correct.run("cpu", few=True, budget=-1, only=only)["of"]
              for only in ("all", "convolutions", "kernels", "native")}  # fmt: skip
    assert counts["all"] == counts["convolutions"] + counts["kernels"]
    assert 0 < counts["native"] < counts["kernels"]


def test_what_did_not_compute_is_noticed() -> None:
    done = [{"pass": pass_, "path": "native"} for pass_ in ("fprop", "dgrad", "wgrad")]
    assert correct_convs.not_native(done) == ""
    assert correct_convs.not_native(done[:2]) == "wgrad not recorded"
    assert correct_convs.not_native([*done, {"pass": "dgrad", "path": "tiled"}]) == "dgrad by tiled"


def test_the_checks_of_kernels_notice_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = correct.Check.ours
    check = next(c for c in correct.native_checks() if c.tf32 and c.content == "noise")
    assert correct.excess(check, "cpu")[1] == ""
    monkeypatch.setattr(correct.Check, "ours", lambda self, x, w, b: ours(self, x, w, b) * (1 + 2.0**-6))
    assert "output: error" in correct.excess(check, "cpu")[1], "more than TF32 may make"
    monkeypatch.setattr(correct.Check, "ours", lambda self, x, w, b: ours(self, x, w.flip(0), b))
    for check in itertools.islice(correct.native_checks(), 0, None, 41):
        assert correct.excess(check, "cpu")[0] > 1, check


def check_of(parts: str, dtype: torch.dtype) -> Callable[[str], tuple[float, str]]:
    """A check of noise with these parts."""
    wanted = f"conv2d_fused {parts} "
    return next(check for name, check in correct_convs.fused_checks()
                if name.startswith(wanted) and f"{dtype} noise" in name)  # fmt: skip


@pytest.mark.parametrize(
    ("part", "mistake", "says"),
    [
        ("y", lambda t: t * (1 + 2.0**-6), "output"),
        ("y", lambda t: t.roll(1, 3), "output"),
        ("scale", lambda t: t.roll(1), "output"),
        ("bias", lambda t: t * 0, "output"),
        ("residual", lambda t: t.detach() + 0 * t, "grad_residual"),
        ("input", lambda t: t.detach() + 2 * (t - t.detach()), "grad_input"),
        ("weight", lambda t: t.detach() + 1.1 * (t - t.detach()), "grad_weight"),
        ("bias", lambda t: t.detach() + 0.9 * (t - t.detach()), "grad_bias"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checks_of_the_fused_operator_notice_a_mistake(
    part: str, mistake: Change, says: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = check_of("scale+bias+residual+relu", dtype)
    assert check("cpu")[1] == ""
    monkeypatch.setattr(correct_convs, "ops", Operators(**{part: mistake}))
    worst, wrong = check("cpu")
    assert worst > 1 and wrong.startswith(f"{says}: error")
