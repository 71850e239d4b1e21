"""The demo's two stages: the input, the module, and what the result is compared with.

Both are ordinary modules on NCHW tensors. patchconv_native computes the same module after `convert`, with automatic
splits. Neither stage keeps anything but its result: as for inference, the batch norm is folded into the convolution and
the ReLU works in place. So all memory above the result is the convolution's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from . import filters
from .picture import Photo

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as torchvision's networks expect
BANDS, BAND_ROWS = 8, 16  # compared where stock's whole result does not fit into memory


@dataclass(frozen=True)
class Shapes:
    """Bytes of a stage's tensors."""

    input: int
    weight: int
    result: int

    @property
    def floor(self) -> int:
        return self.input + self.weight + self.result


class GaborBank:
    """The luminance through the Gabor bank.

    The filters are dilated as far as the picture was enlarged. The input is padded beforehand and the convolution pads
    nothing: only then do some CPUs have a fast stock kernel for 31 taps.
    """

    name = "Gabor bank"
    channels = 1

    def __init__(self, photo: Photo) -> None:
        self._photo = photo
        self._dilation = filters.dilation_for(photo.scale)
        self._margin = (filters.TAPS - 1) // 2 * self._dilation

    @property
    def description(self) -> str:
        reach = 2 * self._margin + 1
        return (
            f"{2 * filters.DIRECTIONS} filters, {filters.TAPS} x {filters.TAPS} taps reaching over "
            f"{reach} x {reach} pixels"
        )

    def module(self) -> nn.Module:
        bank = nn.Conv2d(1, 2 * filters.DIRECTIONS, filters.TAPS, dilation=self._dilation, bias=False)
        with torch.no_grad():
            bank.weight.copy_(filters.gabor_bank())
        return bank.eval()

    def input(self, device: str) -> torch.Tensor:
        return nn.functional.pad(self._photo.luminance(device), [self._margin] * 4, mode="replicate")

    def shapes(self) -> Shapes:
        height, width = self._photo.size
        padded = (height + 2 * self._margin) * (width + 2 * self._margin)
        return Shapes(4 * padded, 4 * 2 * filters.DIRECTIONS * filters.TAPS**2, 8 * filters.DIRECTIONS * height * width)


class ResnetStem:
    """The photograph through the first layers of torchvision's resnet18: convolution, batch norm, ReLU."""

    name = "resnet18 stem"
    channels = 3
    description = "7 x 7 convolution with stride 2 to 64 channels, batch norm folded in, ReLU"

    def __init__(self, photo: Photo, seed: int) -> None:
        self._photo, self._seed = photo, seed

    def module(self) -> nn.Module:
        from torchvision.models import resnet18

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            network = resnet18(weights=None).eval()
        return nn.Sequential(fuse_conv_bn_eval(network.conv1, network.bn1), network.relu)

    def input(self, device: str) -> torch.Tensor:
        return self._photo.normalized(MEAN, DEVIATION, device)

    def shapes(self) -> Shapes:
        height, width = self._photo.size
        return Shapes(4 * 3 * height * width, 4 * 64 * (3 * 49 + 1), 4 * 64 * (height // 2) * (width // 2))


Stage = GaborBank | ResnetStem


def stages(photo: Photo, seed: int) -> list[Stage]:
    return [GaborBank(photo), ResnetStem(photo, seed)]


def stock_need(shapes: Shapes) -> int:
    """About the bytes that stock needs: on NCHW input its kernels work on reordered copies of input and result."""
    return 2 * (shapes.input + shapes.result) + shapes.weight


def stock_bands(module: nn.Module, input: torch.Tensor, rows: int) -> list[tuple[int, torch.Tensor]]:
    """Stock's result at BANDS bands of rows inside the result, as (first row, values).

    A band is computed from only the input rows that it depends on, so this needs little memory at any size.
    `module` is a stage's, with stock convolutions; `rows` the height of its whole result.
    """
    layers = list(module) if isinstance(module, nn.Sequential) else [module]
    convolution = layers[0]
    assert isinstance(convolution, nn.Conv2d)
    assert not isinstance(convolution.padding, str)
    stride, (pad_rows, pad_columns) = convolution.stride[0], convolution.padding
    reach = (convolution.kernel_size[0] - 1) * convolution.dilation[0]
    first = -(-pad_rows // stride)  # the first row that does not depend on the padding above
    last = (input.shape[2] - 1 - reach + pad_rows) // stride
    count = min(BAND_ROWS, last - first + 1)
    found = []
    for band in range(BANDS):
        top = first + (last + 1 - count - first) * band // (BANDS - 1)
        begin = top * stride - pad_rows
        part = input[:, :, begin : begin + (count - 1) * stride + reach + 1]
        values = nn.functional.conv2d(
            part,
            convolution.weight,
            convolution.bias,
            convolution.stride,
            (0, pad_columns),
            convolution.dilation,
            convolution.groups,
        )
        for layer in layers[1:]:
            values = layer(values)
        assert top + count <= rows
        found.append((top, values))
    return found
