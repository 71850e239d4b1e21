"""What a module gets in place of tensors while it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ..spatial import NotServed
from ..spatial.rules import name_of
from ..spatial.tensor import OF_SHAPE
from .graph import is_differentiable
from .views import View


class Recorded(Tensor):
    """A value with a shape and no data, while a module is recorded."""

    _recorder: Any
    _index: int
    _fake: FakeTensor
    _lost: str
    """What has written into it by way of another view, if it was not made again since."""
    _view: View | None

    @staticmethod
    def __new__(cls, recorder: Any, fake: FakeTensor, index: int) -> Recorded:
        self = Tensor._make_wrapper_subclass(
            cls, fake.shape, strides=fake.stride(), dtype=fake.dtype, device=fake.device,
            requires_grad=recorder.gradients and is_differentiable(fake),
        )  # fmt: skip
        self._recorder, self._fake, self._index, self._lost, self._view = recorder, fake, index, "", None
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Recorded(shape={tuple(self._fake.shape)}, dtype={self._fake.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next(leaf for leaf in tree_leaves((tuple(args), kwargs)) if isinstance(leaf, Recorded))
        return first._recorder.call(func, tuple(args), kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotServed(f"{name_of(func)}: not served by tile: C++ code called it, past torch's functions")
