"""A call with its gradients, to hold one beside another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def graded(call: Callable[..., Tensor], *inputs: Any) -> list[Tensor]:
    """The result, then the gradients of the sum of its squares: of the inputs that need one, and a module's own."""
    own = list(call.parameters()) if isinstance(call, nn.Module) else []
    leaves = [t for t in (*inputs, *own) if isinstance(t, Tensor) and t.requires_grad]
    y = call(*inputs)
    return [y, *(torch.autograd.grad(y.square().sum(), leaves) if leaves else ())]
