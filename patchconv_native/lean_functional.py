"""Deprecated: the functions of this module's name are in `patchconv_native.functional`."""

from __future__ import annotations

import warnings
from typing import Any

from . import functional

__all__ = list(functional.__all__)


def __getattr__(name: str) -> Any:
    if name not in functional.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} is deprecated: use {functional.__name__}.{name}", DeprecationWarning, stacklevel=2
    )
    return getattr(functional, name)


def __dir__() -> list[str]:
    return list(functional.__all__)
