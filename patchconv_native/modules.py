"""The convolution modules: torch.nn's classes with the same constructors, attributes and state_dict, plus `splits`.

Each class overrides only the call of the operator. `splits` is the number of pieces that the output is cut into: an
int, a tuple with one entry a spatial dimension, or None for automatic. It may be changed at any time.
"""

# No postponed annotations here: TorchScript reads the real types.
import inspect
from typing import Any, Callable, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from . import functional
from .functional.conv import short_repr, to_int

Splits = Union[int, Tuple[int, ...], None]


def checked_splits(owner: str, dims: int, splits: Any) -> Optional[List[int]]:
    """`splits` as the operators take it, or ValueError / TypeError naming the owner."""
    if splits is None:
        return None
    try:
        entries = [to_int(entry) for entry in (splits if isinstance(splits, (list, tuple)) else [splits])]
    except TypeError:
        got = short_repr(splits)
        raise TypeError(f"{owner}: expected splits to be None, an int or a tuple of ints, got {got}") from None
    if len(entries) not in (1, dims) or any(s < 1 for s in entries):
        expected = "1 entry" if dims == 1 else f"1 or {dims} entries"
        raise ValueError(f"{owner}: expected splits to have {expected}, each at least 1, got {splits!r}")
    return entries


def _signature(stock: type, init: Callable[..., None]) -> inspect.Signature:
    """The stock constructor's parameters and `splits`, for help()."""
    parameters = list(inspect.signature(stock.__init__).parameters.values())  # type: ignore[misc]
    return inspect.Signature([*parameters, inspect.signature(init).parameters["splits"]])


class Split(nn.Module):
    """The base of these modules: the attribute `splits`."""

    __jit_unused_properties__ = ["splits"]
    _dims: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and cls.__bases__[0] is Split:
            cls.__init__.__signature__ = _signature(cls.__bases__[1], cls.__init__)  # type: ignore[attr-defined]

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


class Conv1d(Split, nn.Conv1d):
    """torch.nn.Conv1d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.Conv1d, and `splits`. Input (N, C, L) or (C, L); output and errors as
    `patchconv_native.functional.conv1d`.
    """

    _dims = 1
    _splits: Optional[List[int]]

    def __init__(self, *args: Any, splits: Splits = None, **kwargs: Any) -> None:
        entries = checked_splits("Conv1d", 1, splits)
        super().__init__(*args, **kwargs)
        self._splits = entries

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        if isinstance(self.padding, str):
            # torch has (before, after) of the last dimension first, the operator of the first.
            last = self._reversed_padding_repeated_twice
            pads = [last[len(last) - 2 - i + 2 * (i % 2)] for i in range(len(last))]
        else:
            pads = self.padding  # type: ignore[assignment]
        if torch.jit.is_scripting():
            return torch.ops.patchconv.conv1d(
                input, weight, bias, self.stride, pads, self.dilation, self.groups,
                padding_mode=self.padding_mode, splits=self._splits,
            )  # fmt: skip
        return functional.conv(
            1, input, weight, bias, self.stride, pads, self.dilation, self.groups, self.padding_mode, self._splits
        )


class Conv2d(Split, nn.Conv2d):
    """torch.nn.Conv2d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.Conv2d, and `splits`. Input (N, C, H, W) or (C, H, W); output and errors as
    `patchconv_native.functional.conv2d`.
    """

    _dims = 2
    _splits: Optional[List[int]]

    def __init__(self, *args: Any, splits: Splits = None, **kwargs: Any) -> None:
        entries = checked_splits("Conv2d", 2, splits)
        super().__init__(*args, **kwargs)
        self._splits = entries

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        if isinstance(self.padding, str):
            # torch has (before, after) of the last dimension first, the operator of the first.
            last = self._reversed_padding_repeated_twice
            pads = [last[len(last) - 2 - i + 2 * (i % 2)] for i in range(len(last))]
        else:
            pads = self.padding  # type: ignore[assignment]
        if torch.jit.is_scripting():
            return torch.ops.patchconv.conv2d(
                input, weight, bias, self.stride, pads, self.dilation, self.groups,
                padding_mode=self.padding_mode, splits=self._splits,
            )  # fmt: skip
        return functional.conv(
            2, input, weight, bias, self.stride, pads, self.dilation, self.groups, self.padding_mode, self._splits
        )


class Conv3d(Split, nn.Conv3d):
    """torch.nn.Conv3d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.Conv3d, and `splits`. Input (N, C, D, H, W) or (C, D, H, W); output and errors as
    `patchconv_native.functional.conv3d`.
    """

    _dims = 3
    _splits: Optional[List[int]]

    def __init__(self, *args: Any, splits: Splits = None, **kwargs: Any) -> None:
        entries = checked_splits("Conv3d", 3, splits)
        super().__init__(*args, **kwargs)
        self._splits = entries

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        if isinstance(self.padding, str):
            # torch has (before, after) of the last dimension first, the operator of the first.
            last = self._reversed_padding_repeated_twice
            pads = [last[len(last) - 2 - i + 2 * (i % 2)] for i in range(len(last))]
        else:
            pads = self.padding  # type: ignore[assignment]
        if torch.jit.is_scripting():
            return torch.ops.patchconv.conv3d(
                input, weight, bias, self.stride, pads, self.dilation, self.groups,
                padding_mode=self.padding_mode, splits=self._splits,
            )  # fmt: skip
        return functional.conv(
            3, input, weight, bias, self.stride, pads, self.dilation, self.groups, self.padding_mode, self._splits
        )


class ConvTranspose1d(Split, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.ConvTranspose1d, and `splits`. Input (N, C, L) or (C, L); output and errors as
    `patchconv_native.functional.conv_transpose1d`.
    """

    _dims = 1
    _splits: Optional[List[int]]

    def __init__(self, *args: Any, splits: Splits = None, **kwargs: Any) -> None:
        entries = checked_splits("ConvTranspose1d", 1, splits)
        super().__init__(*args, **kwargs)
        self._splits = entries

    def forward(self, input: Tensor, output_size: Optional[List[int]] = None) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError("ConvTranspose1d: expected padding_mode to be 'zeros', got '" + self.padding_mode + "'")
        assert isinstance(self.padding, tuple)
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.kernel_size,  # type: ignore[arg-type]
            1,
            self.dilation,  # type: ignore[arg-type]
        )
        if torch.jit.is_scripting():
            return torch.ops.patchconv.conv_transpose1d(
                input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation,
                splits=self._splits,
            )  # fmt: skip
        return functional.conv_transpose(
            1, input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation,
            self._splits,
        )  # fmt: skip


class ConvTranspose2d(Split, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.ConvTranspose2d, and `splits`. Input (N, C, H, W) or (C, H, W); output and errors as
    `patchconv_native.functional.conv_transpose2d`.
    """

    _dims = 2
    _splits: Optional[List[int]]

    def __init__(self, *args: Any, splits: Splits = None, **kwargs: Any) -> None:
        entries = checked_splits("ConvTranspose2d", 2, splits)
        super().__init__(*args, **kwargs)
        self._splits = entries

    def forward(self, input: Tensor, output_size: Optional[List[int]] = None) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError("ConvTranspose2d: expected padding_mode to be 'zeros', got '" + self.padding_mode + "'")
        assert isinstance(self.padding, tuple)
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.kernel_size,  # type: ignore[arg-type]
            2,
            self.dilation,  # type: ignore[arg-type]
        )
        if torch.jit.is_scripting():
            return torch.ops.patchconv.conv_transpose2d(
                input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation,
                splits=self._splits,
            )  # fmt: skip
        return functional.conv_transpose(
            2, input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation,
            self._splits,
        )  # fmt: skip


class ConvTranspose3d(Split, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d, computed in tiles where one call would need more memory than `workspace_limit()`.

    Args: those of torch.nn.ConvTranspose3d, and `splits`. Input (N, C, D, H, W) or (C, D, H, W); output and errors as
    `patchconv_native.functional.conv_transpose3d`.
    """

    _dims = 3
    _splits: Optional[List[int]]

    def __init__(self, *args: Any, splits: Splits = None, **kwargs: Any) -> None:
        entries = checked_splits("ConvTranspose3d", 3, splits)
        super().__init__(*args, **kwargs)
        self._splits = entries

    def forward(self, input: Tensor, output_size: Optional[List[int]] = None) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError("ConvTranspose3d: expected padding_mode to be 'zeros', got '" + self.padding_mode + "'")
        assert isinstance(self.padding, tuple)
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.kernel_size,  # type: ignore[arg-type]
            3,
            self.dilation,  # type: ignore[arg-type]
        )
        if torch.jit.is_scripting():
            return torch.ops.patchconv.conv_transpose3d(
                input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation,
                splits=self._splits,
            )  # fmt: skip
        return functional.conv_transpose(
            3, input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation,
            self._splits,
        )  # fmt: skip


# Stock class -> the class of this package.
CONVERTED = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
}
