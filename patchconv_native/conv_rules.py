"""The rules by which backend "auto" uses this project's own convolution kernels on a GPU: conv_rules.json.

The file is read at import. It holds what `python -m bench.tune` measured, an entry an architecture:

    {"sm_90": {"device": ..., "date": ..., "torch": ..., "cudnn": ...,
               "rules": [{"native": true, "pass": "fprop", "dtype": "bfloat16", "layout": "NCHW",
                          "sources": [16, 128], "outputs": [16, 128], "taps": [9, 9], "places": [100352, null]}]}}

The first rule that matches a convolution decides. A key that a rule leaves out matches everything; a pair is a lowest
and a highest value, null for no limit. sources and outputs are input and output channels a group, taps the elements of
the kernel window, places the output positions of all images together. Where no rule matches, and on GPUs without an
entry, cuDNN computes in row strips.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import _library

_C = _library.load()

PATH = Path(__file__).with_name("conv_rules.json")
FACTS = ("device", "date", "torch", "cudnn")  # the keys of an entry besides "rules"
_tables: dict[str, dict[str, Any]] = {}


def architecture(name: str) -> int:
    """90 for "sm_90". ValueError for what is no such name."""
    number = name.removeprefix("sm_")
    if number == name or not number.isdecimal() or int(number) < 10:
        raise ValueError(f"expected an architecture such as 'sm_90', got {name!r}")
    return int(number)


def read(path: Path = PATH) -> dict[str, dict[str, Any]]:
    """The entries of a file by architecture. ValueError names the file and the entry that is wrong."""
    text = path.read_text()
    if text.strip() == "{}":
        return {}
    import json

    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object with an entry an architecture, got {type(found).__name__}")
    for name, entry in found.items():
        try:
            architecture(name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not isinstance(entry, dict) or set(entry) != {*FACTS, "rules"}:
            keys = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(f"{path}: {name}: expected {', '.join(FACTS)} and rules, got {keys}")
        if not isinstance(entry["rules"], list):
            raise ValueError(f"{path}: {name}: expected rules to be a list, got {type(entry['rules']).__name__}")
    return found


def load(path: Path = PATH) -> None:
    """Puts a file's rules in force, in place of all others. ValueError for a file that is wrong."""
    found = read(path)
    for name, entry in found.items():
        try:
            _C.set_conv_rules(architecture(name), entry["rules"])
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from None
    for name in _tables.keys() - found.keys():
        _C.set_conv_rules(architecture(name), None)
    _tables.clear()
    _tables.update(found)


def remove(name: str) -> None:
    """Removes the rules of an architecture, for this process."""
    _C.set_conv_rules(architecture(name), None)
    _tables.pop(name, None)


def describe(capability: tuple[int, int], device: str) -> str:
    """Which rules there are for a GPU of this compute capability, in a line."""
    name = f"sm_{capability[0]}{capability[1]}"
    if name not in _tables:
        return f"no rules for {name} ({device}): cuDNN computes under 'auto'; `python -m bench.tune` measures"
    entry = _tables[name]
    count = sum(rule["native"] for rule in entry["rules"])
    return (
        f"{count} rule{'' if count == 1 else 's'} for {name} by which 'auto' uses this project's kernels, "
        f"measured {entry['date']} on {entry['device']}"
    )
