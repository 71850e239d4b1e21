"""Errors of the command line, each in one line of text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch

from ..memory.labels import flat

LONGEST = 400
"""Characters of an error's line."""


class Mistake(Exception):
    """The user asked for something impossible. One line of text; exit code 2."""


class Failed(Exception):
    """The work failed. One line of text; exit code 1."""


def line(error: BaseException) -> str:
    """Any error in one line: its type and the first line of its text."""
    text = str(error).strip()
    first = flat(text.splitlines()[0]).strip() if text else ""
    whole = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return whole if len(whole) <= LONGEST else whole[: LONGEST - 1] + "…"


def out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python raised this error because memory could not be allocated."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    signs = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def near(word: str, known: Iterable[str], before: str = "") -> str:
    """ "; did you mean ...?" with the known words that are most like this one, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(before + one for one in found)}?" if found else ""
