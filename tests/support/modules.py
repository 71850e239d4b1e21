"""Modules made of parts and a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn


class Made(nn.Module):
    """Its forward is `call`, which gets the module and what the module is called with."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def of_torchvision(name: str, part: str = "", **options: Any) -> Any:
    """A model of torchvision with random weights; the test is skipped where torchvision is not installed."""
    models = pytest.importorskip("torchvision").models
    return getattr(getattr(models, part) if part else models, name)(weights=None, **options)
