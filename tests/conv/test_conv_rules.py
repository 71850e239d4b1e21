"""The rules by which backend "auto" takes the project's own convolution kernels: matching, and the file they are in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchconv_native import _C, conv_rules, info

ARCH = 90
QUERY: dict[str, Any] = {
    "pass_": "fprop", "dtype": "bfloat16", "layout": "NCHW", "groups": 1, "sources": 64, "outputs": 64, "taps": 9,
    "stride": 1, "places": 2**20,
}  # fmt: skip
RULE: dict[str, Any] = {
    "native": True, "pass": "fprop", "dtype": "bfloat16", "layout": "NCHW", "groups": [1, 1], "sources": [16, 128],
    "outputs": [64, None], "taps": [9, 25], "stride": [1, 2], "places": [1000, -1],
}  # fmt: skip
ENTRY = {"device": "a GPU", "date": "2030-01-02", "torch": "2.14.1", "cudnn": 92400, "rules": [RULE]}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    for arch in (ARCH, 80):
        _C.set_conv_rules(arch, None)
    conv_rules.load()


def taken(**changes: Any) -> bool:
    return _C.prefers_native_kernel(ARCH, **(QUERY | changes))


def test_without_a_table_cudnn_computes() -> None:
    _C.set_conv_rules(ARCH, None)  # the package has one of sm_90
    assert not _C.has_conv_rules(ARCH) and not taken()
    _C.set_conv_rules(80, [{"native": True}])
    assert not _C.has_conv_rules(ARCH) and not taken()
    assert _C.prefers_native_kernel(80, **QUERY)


def test_what_is_left_out_matches_everything() -> None:
    _C.set_conv_rules(ARCH, [{"native": True}])
    assert taken() and taken(pass_="wgrad", dtype="float32", layout="channels_last", groups=7, places=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"pass_": "dgrad"}, {"dtype": "float16"}, {"dtype": "tf32"}, {"layout": "channels_last"}, {"groups": 2},
        {"sources": 15}, {"sources": 129}, {"outputs": 63}, {"taps": 1}, {"taps": 49}, {"stride": 3}, {"places": 999},
    ],
)  # fmt: skip
def test_every_part_of_a_rule_counts(changes: dict[str, Any]) -> None:
    _C.set_conv_rules(ARCH, [RULE])
    assert taken() and not taken(**changes)
    assert taken(sources=16, outputs=10**6, taps=25, stride=2, places=1000) and taken(sources=128, places=10**12)


def test_the_first_rule_that_matches_decides() -> None:
    no = {"native": False, "sources": [64, 64]}
    _C.set_conv_rules(ARCH, [no, RULE])
    assert not taken() and taken(sources=32)
    _C.set_conv_rules(ARCH, [RULE, no])
    assert taken()
    _C.set_conv_rules(ARCH, [])
    assert _C.has_conv_rules(ARCH) and not taken(), "measured, and nothing to be taken"
    _C.set_conv_rules(ARCH, None)
    assert not _C.has_conv_rules(ARCH)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"native": True, "pass": "forward"}, "conv rule 1: expected pass to be 'fprop', 'dgrad' or 'wgrad', got 'f"),
        ({"native": True, "dtype": "half"}, "conv rule 1: expected dtype to be 'float32', 'tf32', .*, got 'half'"),
        ({"native": True, "dtype": ""}, "conv rule 1: expected dtype to be a name, got ''"),
        ({"native": True, "layout": "NHWC"}, "expected layout to be 'NCHW' or 'channels_last', got 'NHWC'"),
        ({"native": True, "taps": [9, 1]}, r"expected taps to be \[least, most\] .*, got \[9, 1\]"),
        ({"native": True, "taps": [0, 1]}, r"expected taps to be \[least, most\] .*, got \[0, 1\]"),
        ({"native": True, "places": [1]}, r"expected places to be \[least, most\], .*, got \[1\]"),
        ({"native": True, "places": [1, "2"]}, r"expected places to be \[least, most\], .*, got \[1, '2'\]"),
        ({"native": 1}, "expected native to be True or False, got 1"),
        ({"taps": [1, 1]}, r"expected native to be given, got \{'taps': \[1, 1\]\}"),
        ({"native": True, "channel": [1, 1]}, "expected native, pass, .*, got 'channel'"),
        (["native"], r"expected a dict, got \['native'\]"),
    ],
)
def test_bad_rules(rule: Any, says: str, tmp_path: Path) -> None:
    """The binding names the rule, the loader the file and the entry too; what was in force stays."""
    _C.set_conv_rules(ARCH, [RULE])
    with pytest.raises(ValueError, match=says):
        _C.set_conv_rules(ARCH, [RULE, rule])
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"sm_90": ENTRY | {"rules": [RULE, rule]}}))
    with pytest.raises(ValueError, match=rf"rules\.json: sm_90: .*{says}"):
        conv_rules.load(path)
    assert taken() and not taken(sources=15)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="expected an architecture such as 90 for sm_90, got 9"):
        _C.set_conv_rules(9, [])
    with pytest.raises(ValueError, match="expected layout to be 'NCHW' or 'channels_last', got 'NHWC'"):
        taken(layout="NHWC")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object with an entry an architecture, got list"),
        (json.dumps({"h100": ENTRY}), "expected an architecture such as 'sm_90', got 'h100'"),
        (json.dumps({"sm_90": []}), "sm_90: expected device, date, torch, cudnn and rules, got list"),
        (json.dumps({"sm_90": {"rules": []}}), r"sm_90: expected device, .* and rules, got \['rules'\]"),
        (json.dumps({"sm_90": ENTRY | {"rules": {}}}), "sm_90: expected rules to be a list, got dict"),
    ],
)
def test_bad_files(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"rules\.json: .*{says}"):
        conv_rules.load(path)


def test_a_file_is_loaded_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"sm_90": ENTRY, "sm_80": ENTRY}))
    conv_rules.load(path)
    assert taken() and not taken(layout="channels_last") and _C.has_conv_rules(80)
    conv_rules.remove("sm_80")
    assert not _C.has_conv_rules(80) and taken()
    text = "1 rule for sm_90 by which 'auto' uses this project's kernels, measured 2030-01-02 on a GPU"
    assert conv_rules.describe((9, 0), "X") == text
    path.write_text(json.dumps({"sm_80": ENTRY}))
    conv_rules.load(path)
    assert not taken() and not _C.has_conv_rules(ARCH) and _C.has_conv_rules(80)
    text = "no rules for sm_90 (X): cuDNN computes under 'auto'; `python -m bench.tune` measures"
    assert conv_rules.describe((9, 0), "X") == text


def test_the_file_of_the_package_is_sound() -> None:
    for name, entry in conv_rules.read().items():
        assert _C.has_conv_rules(conv_rules.architecture(name)) and entry["device"] and entry["date"]


def test_info_says_what_there_is() -> None:
    import torch

    text = info.facts()["convolution rules"]
    if not torch.cuda.is_available():
        assert text in ("none: a CPU-only build", "no GPU here")
    else:
        assert "sm_" in text
