"""bench.correct on norms and sums with ReLU: its checks pass here, and notice mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import patchconv_native as pc
from bench import correct_norms
from bench.correct_norms import EPS, MOMENTUM, NORMS, Given, Norm

lf = pc.functional
LARGE = ((1, 8, 67, 65), 1, False)


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_as_exact_as_stock(name: str) -> None:
    mine = [(one, check) for one, check in correct_norms.checks() if one.startswith(f"norm {name} torch")]
    assert len(mine) == 27
    for one, check in mine:
        assert check("cpu")[1] == "", one


def statistics(g: Given) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(g.x, [0, 2, 3], correction=0)
    return mean, var


def mapped(g: Given, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(g.x, mean.to(g.mean.dtype), var.to(g.var.dtype), g.weight, g.bias, False, 0, EPS)


def moved(g: Given, momentum: float) -> None:
    count = g.x.numel() / g.x.shape[1]
    mean, var = (t.detach() for t in statistics(g))
    g.mean.lerp_(mean.to(g.mean.dtype), momentum)
    g.var.lerp_((var * count / (count - 1)).to(g.var.dtype), momentum)


def unbiased(g: Given) -> Tensor:
    """Normalised by the variance that the running one is moved by."""
    moved(g, MOMENTUM)
    count = g.x.numel() / g.x.shape[1]
    return lf.batch_norm(g.x, None, None, g.weight * ((count - 1) / count) ** 0.5, g.bias, True, 0.0, EPS)


def constant_statistics(g: Given) -> Tensor:
    """A gradient that does not go through the statistics."""
    mean, var = (t.detach() for t in statistics(g))
    y = lf.batch_norm(g.x, g.mean, g.var, g.weight, g.bias, True, MOMENTUM, EPS)
    z = mapped(g, mean, var)
    return y.detach() + (z - z.detach())  # the values are right to the bit


def of_squares(g: Given) -> Tensor:
    """The variance as the difference of two large numbers, in float32."""
    moved(g, MOMENTUM)
    x = g.x.detach().float()
    mean = x.mean([0, 2, 3])
    var = x.square().mean([0, 2, 3]) - mean.square()
    return mapped(g, mean, var.clamp(min=0))


def other_momentum(g: Given) -> Tensor:
    return lf.batch_norm(g.x, g.mean, g.var, g.weight, g.bias, True, MOMENTUM + 1e-5, EPS)


def swapped_gradient(g: Given) -> Tensor:
    """What a ReLU lets through is what it should not."""
    z = lf.batch_norm(g.x, g.mean, g.var, g.weight, g.bias, False, MOMENTUM, EPS)
    return torch.where(z > 0, z.detach(), 0.0 * z.detach()) + (leak := z * (z <= 0)) - leak.detach()


def shifted_mask(g: Given) -> Tensor:
    """Bits read one element too far."""
    z = lf.batch_norm(g.x, g.mean, g.var, g.weight, g.bias, True, MOMENTUM, EPS)
    kept = z * (z.flatten().roll(1).view_as(z) > 0)
    return F.relu(z).detach() + kept - kept.detach()


def wrong_group(g: Given) -> Tensor:
    groups = correct_norms.groups_of(g.x)
    return lf.group_norm(g.x, groups // 2, g.weight, g.bias, EPS)


def coarse_silu(g: Given) -> Tensor:
    """A sigmoid of 12 bits."""
    z = lf.group_norm(g.x, correct_norms.groups_of(g.x), g.weight, g.bias, EPS)
    return z * (torch.sigmoid(z) * 4096).round().div(4096).detach() + (y := F.silu(z)) - y.detach() - z + z.detach()


MISTAKES: dict[str, tuple[str, torch.dtype, str, Callable[[Given], Tensor], str]] = {
    "unbiased variance": ("batch_norm", torch.float32, "noise", unbiased, "output"),
    "statistics taken for constants": ("batch_norm", torch.float32, "noise", constant_statistics, "gradient of x"),
    "variance from squares": ("batch_norm", torch.float32, "far", of_squares, "output"),
    "momentum": ("batch_norm", torch.float32, "ramp", other_momentum, "running"),
    "eps": ("batch_norm eval", torch.float32, "noise",
            lambda g: lf.batch_norm(g.x, g.mean, g.var, g.weight, g.bias, False, 0.1, 1.2e-5), "output"),
    "statistics moved in eval mode": ("batch_norm eval", torch.bfloat16, "noise", other_momentum, "output"),
    "mask turned round": ("batch_norm_relu eval frozen", torch.float16, "noise", swapped_gradient, "gradient of x"),
    "mask shifted": ("batch_norm_relu", torch.bfloat16, "steps", shifted_mask, "gradient of x"),
    "no activation": ("batch_norm_relu", torch.bfloat16, "ramp", NORMS["batch_norm"].ours, "output"),
    "groups": ("group_norm", torch.float16, "noise", wrong_group, "output"),
    "groups, not instances": ("instance_norm", torch.float32, "noise", NORMS["group_norm"].ours, "output"),
    "sigmoid": ("group_norm_silu", torch.float32, "noise", coarse_silu, "output"),
    "gradient of one term": ("add_relu", torch.float32, "noise",
                             lambda g: lf.add_relu(g.x, 2 * g.other - g.other.detach()), "gradient of other"),
    "a rounding too many": ("add_relu", torch.float32, "noise", lambda g: lf.add_relu(g.x * (1 + 2.0**-20), g.other),
                            "output"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_checks_of_norms_notice(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, dtype, content, wrong, part = MISTAKES[mistake]
    assert correct_norms.check(name, dtype, content, LARGE, "cpu")[1] == ""
    monkeypatch.setitem(NORMS, name, replace(NORMS[name], ours=wrong))
    worst, said = correct_norms.check(name, dtype, content, LARGE, "cpu")
    assert worst > 1 and said.startswith(part), said


def test_statistics_that_are_moved_in_eval_mode_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(g: Given) -> Tensor:
        y = NORMS["batch_norm"].stock(g.map(Tensor.clone))  # any result
        g.var.mul_(1 + 2.0**-20)
        return y

    monkeypatch.setitem(NORMS, "moving", Norm(ours, NORMS["batch_norm"].stock))
    assert correct_norms.check("moving", torch.float32, "noise", LARGE, "cpu") == (
        float("inf"), "running variance: it was moved"
    )  # fmt: skip


def test_a_result_in_another_type_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = NORMS["add_relu"]
    monkeypatch.setitem(NORMS, "add_relu", replace(norm, ours=lambda g: lf.add_relu(g.x, g.other).double()))
    assert correct_norms.check("add_relu", torch.float32, "noise", LARGE, "cpu") == (
        float("inf"), f"output: torch.float64 {LARGE[0]}"
    )  # fmt: skip


def test_checks_take_every_form_and_content() -> None:
    names = [name for name, _ in correct_norms.checks()]
    assert len(set(names)) == len(names)
    for form in correct_norms.FORMS:
        for content in correct_norms.CONTENTS:
            assert sum(f" {content} {form}" in name for name in names) >= 3
    few = [name for name, _ in correct_norms.checks(few=True)]
    assert all(any(name.startswith(f"norm {norm} torch") for name in few) for norm in NORMS)


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("channels_last", [False, True])
def test_placed(channels_last: bool, off: int) -> None:
    x = torch.randn(2, 3, 5, 7)
    there = correct_norms.placed(x, off, channels_last, "cpu")
    assert torch.equal(there, x) and there.storage_offset() == off
    assert there.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


SMALL = {"height": 130, "width": 72, "channels": 5}


def test_the_large_probe_of_norms_notices_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    assert correct_norms.probe_large("cpu", **SMALL) == (0.0, "")
    real = torch.ops.patchconv

    def said(operator: str, mistake: Callable[..., object]) -> str:
        class Wrong:
            def __getattr__(self, name: str) -> Callable[..., object]:
                made = getattr(real, name)
                return (lambda *arguments: mistake(made(*arguments))) if name == operator else made

        monkeypatch.setattr(correct_norms, "ops", Wrong())
        return correct_norms.probe_large("cpu", **SMALL)[1]

    def one_place_wrong(y: Tensor) -> Tensor:
        y[0, -1, -1, -1] += 1  # the last element
        return y

    assert said("_add_mask_forward", lambda r: (r[0].roll(1), r[1])).count("sum at") == 2
    assert "output of channel 4" in said("_normalize", one_place_wrong)
    assert said("_batch_norm_backward", lambda r: (one_place_wrong(r[0]), *r[1:])).count("gradient of channel 4") == 4
    assert "sums over channels, channels_last" in said("_batch_statistics", lambda r: (r[0], r[1] * 1.0001))


def test_moments_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correct_norms, "PART", 7)
    x = torch.randn(3, 40, dtype=torch.float64) + 5
    mean, var = correct_norms.moments(x)
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(var, x.var(1, correction=0))
