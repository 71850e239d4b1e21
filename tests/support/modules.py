"""Modules made of parts and a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
