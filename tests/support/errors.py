"""Tables of errors: a text, and the call that is to raise it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any


def raises(kind: type[Exception] | tuple[type[Exception], ...], calls: Mapping[str, Callable[[], Any]]) -> None:
    """Each of these calls raises such an error, in whose text the regular expression is found."""
    for text, call in calls.items():
        try:
            call()
        except kind as error:
            assert re.search(text, str(error)), f"expected {text!r}, got {error}"
        else:
            raise AssertionError(f"nothing was raised, expected {text!r}")
