"""The functions of torch.nn.functional that this package serves, with torch's signatures.

Values and gradients are torch's. Convolutions (conv.py) need less memory while they compute; the others save less for
backward than stock PyTorch does, and each docstring says what. "Made again" in them means: if a layer's input can be
computed in backward from what its producer saved, the layer saves a reference to the producer and not the tensor.
batch_norm_relu, group_norm_silu, add_relu and conv2d_fused do the work of several functions at once.

What the functions other than convolutions do not serve (`return_indices`, some dtypes and layouts, tensor subclasses,
torch.compile) goes to the stock function. Code under `pc.lean()` and converted layers call these functions.
"""

# ruff: noqa: F403
from . import activation, combine, norm, pool, resize
from . import conv as _conv  # the functions conv and dropout take their files' names
from . import dropout as _dropout
from .activation import *
from .combine import *
from .conv import *
from .dropout import *
from .norm import *
from .pool import *
from .resize import *

__all__ = [
    name for file in (activation, combine, _conv, _dropout, norm, pool, resize) for name in file.__all__
]  # fmt: skip
