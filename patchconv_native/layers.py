"""The layers that save less for backward: torch.nn's classes, computed by this package's functions.

Constructors, attributes, parameters, state_dict and values are torch's: a layer runs its stock forward inside `lean()`.
TorchScript and torch.compile get the stock layer.
"""

from __future__ import annotations

from torch import nn

from .functional import activation
from .lean import ForwardInLean
from .reuse.in_place import SERVED


class Lean(ForwardInLean):
    """The base of these layers."""

    _stock: type[nn.Module]

    def __prepare_scriptable__(self) -> nn.Module:
        stock = self._stock.__new__(self._stock)
        vars(stock).update(vars(self))
        return stock


# What a layer saves for backward -> the stock classes, besides the activations.
_SAVES: dict[str, tuple[type[nn.Module], ...]] = {
    "its input, if the layer before it cannot make it again": (
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
        nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.Linear, nn.GLU,
    ),
    "the seed of its mask": (
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    ),
    "one byte an output, two for windows of over 256 elements": (
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    ),
    "sizes alone": (
        nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    ),
    "sizes alone; a later layer makes its output again from its input": (
        nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d,
        nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
        nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
        nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
        nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
    ),
}  # fmt: skip


def _layer(stock: type[nn.Module], saved: str) -> type[nn.Module]:
    doc = f"torch.nn.{stock.__name__}, with its arguments and shapes. Saves for backward {saved}."
    body = {"__module__": __name__, "__doc__": doc, "_stock": stock, "_writes_into": stock if stock in SERVED else None}
    return type(stock.__name__, (Lean, stock), body)


# Stock class -> the class of this package.
LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    stock: _layer(stock, saved)
    for saved, stocks in (*activation.STOCK_LAYERS.items(), *_SAVES.items())
    for stock in stocks
}
globals().update({cls.__name__: cls for cls in LAYERS.values()})

# Stock layers that save no more than they must, with the reason that convert_report gives.
NOTHING_TO_GAIN = {
    nn.Bilinear: "stock saves only its inputs",
    nn.Embedding: "stock saves only indices",
    nn.PixelShuffle: "stock saves only sizes",
    nn.PixelUnshuffle: "stock saves only sizes",
    nn.Softmax: "stock saves its output, which is usually needed again",
}
