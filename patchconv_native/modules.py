"""The convolution modules: torch.nn's classes with the same constructors, attributes and state_dict, plus `splits`.

Only the call of the operator is another. `splits` is the number of pieces that the output is cut into: an
int, a tuple with one entry a spatial dimension, or None for automatic. It may be changed at any time.
"""

# No postponed annotations here: TorchScript reads the real types.
import inspect
from typing import TYPE_CHECKING, Any, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from . import functional
from .functional.conv import int64, short_repr

Splits = Union[int, Tuple[int, ...], None]


def checked_splits(owner: str, dims: int, splits: Any) -> Optional[List[int]]:
    """`splits` as the operators take it, or ValueError / TypeError naming the owner."""
    if splits is None:
        return None
    try:
        given = splits if isinstance(splits, (list, tuple)) else [splits]
        entries = [int64(owner, "splits", entry) for entry in given]
    except TypeError:
        got = short_repr(splits)
        raise TypeError(f"{owner}: expected splits to be None, an int or a tuple of ints, got {got}") from None
    if len(entries) not in (1, dims) or any(s < 1 for s in entries):
        expected = "1 entry" if dims == 1 else f"1 or {dims} entries"
        raise ValueError(f"{owner}: expected splits to have {expected}, each at least 1, got {splits!r}")
    return entries


def _constructor(cls: Any, stock: Any) -> Any:
    """The stock constructor with `splits`. Its signature is the stock one's with that, for help()."""

    def __init__(self: Any, *args: Any, splits: Splits = None, **kwargs: Any) -> None:
        entries = checked_splits(cls.__name__, cls._dims, splits)
        super(cls, self).__init__(*args, **kwargs)
        self._splits = entries

    parameters = [
        *inspect.signature(stock.__init__).parameters.values(),
        inspect.signature(__init__).parameters["splits"],
    ]
    __init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return __init__


class Split(nn.Module):
    """The base of these modules: the attribute `splits`."""

    __jit_unused_properties__ = ["splits"]
    _dims: int

    if TYPE_CHECKING:

        def __init__(self, *args: Any, splits: Splits = None, **kwargs: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_dims" in vars(cls):
            cls.__init__ = _constructor(cls, cls.__bases__[1])  # type: ignore[method-assign]

    @property
    def splits(self) -> Splits:
        entries = self._splits
        if entries is None:
            return None
        return entries[0] if len(entries) == 1 else tuple(entries)

    @splits.setter
    def splits(self, value: Any) -> None:
        # A list, so that TorchScript sees one type.
        self._splits = checked_splits(type(self).__name__, self._dims, value)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self._splits is None else f"{text}, splits={self.splits}"


class _Conv(Split, nn.modules.conv._ConvNd):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        padding = self.padding
        if isinstance(padding, str):
            # torch has (before, after) of the last dimension first, the operator of the first.
            last = self._reversed_padding_repeated_twice
            pads = [last[len(last) - 2 - i + 2 * (i % 2)] for i in range(len(last))]
        else:
            pads = padding  # type: ignore[assignment]
        if torch.jit.is_scripting():
            dims = len(self.kernel_size)
            if dims == 1:
                return torch.ops.patchconv.conv1d(
                    input, weight, bias, self.stride, pads, self.dilation, self.groups,
                    padding_mode=self.padding_mode, splits=self._splits,
                )  # fmt: skip
            elif dims == 2:
                return torch.ops.patchconv.conv2d(
                    input, weight, bias, self.stride, pads, self.dilation, self.groups,
                    padding_mode=self.padding_mode, splits=self._splits,
                )  # fmt: skip
            else:
                return torch.ops.patchconv.conv3d(
                    input, weight, bias, self.stride, pads, self.dilation, self.groups,
                    padding_mode=self.padding_mode, splits=self._splits,
                )  # fmt: skip
        return functional.conv(
            self._dims, input, weight, bias, self.stride, pads, self.dilation, self.groups, self.padding_mode,
            self._splits,
        )  # fmt: skip


class _ConvTranspose(Split, nn.modules.conv._ConvTransposeNd):
    def forward(self, input: Tensor, output_size: Optional[List[int]] = None) -> Tensor:
        stride, padding, dilation, dims = self.stride, self.padding, self.dilation, len(self.kernel_size)
        if self.padding_mode != "zeros":
            name = "ConvTranspose" + str(dims) + "d"
            raise ValueError(name + ": expected padding_mode to be 'zeros', got '" + self.padding_mode + "'")
        assert isinstance(padding, tuple)
        output_padding = self._output_padding(
            input, output_size, stride, padding, self.kernel_size, dims, dilation  # type: ignore[arg-type]
        )  # fmt: skip
        if torch.jit.is_scripting():
            if dims == 1:
                return torch.ops.patchconv.conv_transpose1d(
                    input, self.weight, self.bias, stride, padding, output_padding, self.groups, dilation,
                    splits=self._splits,
                )  # fmt: skip
            elif dims == 2:
                return torch.ops.patchconv.conv_transpose2d(
                    input, self.weight, self.bias, stride, padding, output_padding, self.groups, dilation,
                    splits=self._splits,
                )  # fmt: skip
            else:
                return torch.ops.patchconv.conv_transpose3d(
                    input, self.weight, self.bias, stride, padding, output_padding, self.groups, dilation,
                    splits=self._splits,
                )  # fmt: skip
        return functional.conv_transpose(
            dims, input, self.weight, self.bias, stride, padding, output_padding, self.groups, dilation, self._splits
        )


class Conv1d(_Conv, nn.Conv1d):
    """torch.nn.Conv1d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.Conv1d, and `splits`. Input (N, C, L) or (C, L); output and errors as
    `patchconv_native.functional.conv1d`.
    """

    _dims = 1
    _splits: Optional[List[int]]


class Conv2d(_Conv, nn.Conv2d):
    """torch.nn.Conv2d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.Conv2d, and `splits`. Input (N, C, H, W) or (C, H, W); output and errors as
    `patchconv_native.functional.conv2d`.
    """

    _dims = 2
    _splits: Optional[List[int]]


class Conv3d(_Conv, nn.Conv3d):
    """torch.nn.Conv3d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.Conv3d, and `splits`. Input (N, C, D, H, W) or (C, D, H, W); output and errors as
    `patchconv_native.functional.conv3d`.
    """

    _dims = 3
    _splits: Optional[List[int]]


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.ConvTranspose1d, and `splits`. Input (N, C, L) or (C, L); output and errors as
    `patchconv_native.functional.conv_transpose1d`.
    """

    _dims = 1
    _splits: Optional[List[int]]


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.ConvTranspose2d, and `splits`. Input (N, C, H, W) or (C, H, W); output and errors as
    `patchconv_native.functional.conv_transpose2d`.
    """

    _dims = 2
    _splits: Optional[List[int]]


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.ConvTranspose3d, and `splits`. Input (N, C, D, H, W) or (C, D, H, W); output and errors as
    `patchconv_native.functional.conv_transpose3d`.
    """

    _dims = 3
    _splits: Optional[List[int]]


# Stock class -> the class of this package.
CONVERTED = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
}
