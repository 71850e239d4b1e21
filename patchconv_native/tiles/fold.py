"""What a recorded graph's convolutions become before it is planned.

A batch norm in eval mode, behind a convolution that nothing else reads, becomes a part of the convolution: its scale
goes into the weight, its shift into the bias. That saves a pass over the convolution's result. And where a device is
faster in channels_last, strips are in channels_last, whatever the image and the result are in. On a CPU they stay in
NCHW around convolutions that add many products: in channels_last oneDNN adds them one after the other, and the error
grows. On a GPU convolutions in channels_last take no memory besides their results.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..memory.cpu_conv_calls import Conv
from ..spatial import SpatialTensor
from ..spatial.convs import conv3d_by_onednn
from ..spatial.layout import in_layout_of, order
from ..spatial.rules import RULES, rule
from ..spatial.windows import listed
from .graph import Call, Graph

_PLACES_A_WEIGHT = 128
"""A weight is scaled anew for each strip. One is left alone that has more than 1/128 of the result's elements."""


def _named(*names: str) -> set[Any]:
    ops = torch.ops.patchconv
    return {f for name in names for f in (getattr(torch, name), getattr(ops, name), getattr(ops, name).default)}


_MOST_PRODUCTS = 576
"""Of those that a convolution in channels_last adds for an element: as 3x3 does over 64 channels, whose error is then
twice that of NCHW. With more the error grows, and channels_last is hardly faster.
"""


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVS = _named("conv1d", "conv2d", "conv3d")
_IN_2D = _named("conv2d", "conv_transpose2d")
_OF_VOLUMES = _named("conv3d")
_NOT_STOCKS: dict[str, Any] = {"padding_mode": "zeros", "splits": None}
"""What this package's convolutions take besides stock's arguments, and what makes it nothing."""
_FASTER_IN_CHANNELS_LAST = {
    "max_pool2d", "avg_pool2d", "max_pool3d", "cat", "add", "add_", "__add__", "__iadd__", "interpolate",
}  # fmt: skip
"""Besides convolutions and what is computed by place. Group norms, and means over the image, are slower there."""
_FASTER_ON_A_GPU = {"batch_norm", "group_norm", "mul", "__mul__"}
"""Besides these on a GPU, where they are no slower."""
_Norm = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]
"""Running mean, running variance, weight, bias and eps."""


def conv_of_strips(
    input: Any, weight: Tensor, bias: Tensor | None, conv: Callable[..., Any], rest: tuple[Any, ...],
    others: dict[str, Any], norm: _Norm | None, format: torch.memory_format | None = None,
) -> Any:  # fmt: skip
    """conv(input, weight, bias, *rest, **others), and a batch norm in eval mode behind it. Input and weight are turned
    into the layout `format` (None: that of the input) here, and not within the convolution, where nobody could count
    the memory of that.
    """
    spatial = isinstance(input, SpatialTensor)
    local = input._local if spatial else input
    if norm is not None:
        planned = isinstance(local, FakeTensor) and not torch.is_grad_enabled()
        weight, bias = (_folded_without_data if planned else _folded)(weight, bias, norm)
    if format is not None and order(local) != format:
        local = local.contiguous(memory_format=format)
        input = SpatialTensor(local, input.axes) if spatial else local
    weight = in_layout_of(local, weight) if format is None else weight.contiguous(memory_format=format)
    after = None
    in_nchw = local.device.type == "cpu" and order(local) == torch.contiguous_format
    if norm is not None and in_nchw and not torch.is_grad_enabled():
        bias, after = None, bias  # oneDNN would add all products to it, and round each sum as coarsely as it is large
    result = (RULES[conv] if spatial else conv)(input, weight, bias, *rest, **others)
    if after is not None:
        (result._local if spatial else result).add_(after.view(-1, *[1] * (weight.dim() - 2)))
    return result


rule(conv_of_strips)(conv_of_strips)


def _folded(weight: Tensor, bias: Tensor | None, norm: _Norm) -> tuple[Tensor, Tensor]:
    """The weight and the bias of a convolution and the norm behind it."""
    mean, variance, gain, shift, eps = norm
    scale = (variance.double() + eps).rsqrt_()  # in float64: what is rounded here is off at every place
    if gain is not None:
        scale.mul_(gain)
    offset = (mean.double() if bias is None else mean.double() - bias) * scale
    bias = (offset.neg_() if shift is None else shift - offset).to(weight.dtype)
    return weight * scale.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1)), bias


def _folded_without_data(weight: Tensor, bias: Tensor | None, norm: _Norm) -> tuple[Tensor, Tensor]:
    """As large, in no less than the memory that `_folded` takes; a plan asks for it thousands of times."""
    meanwhile = torch.empty(4 * weight.size(0), dtype=torch.float64, device=weight.device)
    found = torch.empty_like(weight), torch.empty(weight.size(0), dtype=weight.dtype, device=weight.device)
    del meanwhile
    return found


def fold_norms(graph: Graph) -> None:
    """Folds the batch norms of a recorded module, where that is exact to rounding: not in half precision, whose
    weights are too coarse.
    """
    readers = Counter(v for call in graph.calls for v in call.inputs)
    readers.update(graph.results)
    made = {call.outputs[0]: call for call in graph.calls if call.function in _CONVS}
    gone = set()
    for number, call in enumerate(graph.calls):
        conv = made.get(call.inputs[0]) if len(call.inputs) == 1 else None
        norm = _eval_norm(call)
        if conv is None or norm is None or readers[call.inputs[0]] > 1 or not _is_exact(graph, conv, call, norm):
            continue
        graph.calls[number] = _as_strips(conv, norm, call)
        gone.add(conv)
    graph.calls = [call for call in graph.calls if call not in gone]


def _as_strips(conv: Call, norm: _Norm | None, last: Call) -> Call:
    """A convolution as a call of `conv_of_strips`, with the result of `last`."""
    given = dict(zip(("input", "weight", "bias"), conv.args, strict=False)) | conv.kwargs
    first = [given.pop(name, None) for name in ("input", "weight", "bias")]
    return Call(
        conv_of_strips, (*first, conv.function, conv.args[3:], given, norm), {}, conv.module, conv.autocast,
        last.result, conv.history,
    )  # fmt: skip


def _is_exact(graph: Graph, conv: Call, call: Call, norm: _Norm) -> bool:
    """Whether a norm can go into the weight and the bias, and the weight is small."""
    if conv.autocast[2] or call.autocast[2] or len(conv.inputs) > 1 or conv.history != call.history:
        return False
    result = graph.fakes[call.outputs[0]]
    if result.dim() != conv.constants[0].dim():
        return False  # of one image without a batch: the norm's channels are the rows
    tensors = [*conv.constants, *(t for t in norm if isinstance(t, Tensor))]
    if result.dtype not in (torch.float32, torch.float64) or any(t.dtype != result.dtype for t in tensors):
        return False
    return max(t.numel() for t in conv.constants) * _PLACES_A_WEIGHT <= result.numel()


def keep_onednn(graph: Graph) -> None:
    """Has oneDNN compute parts of those volumes that it computes whole: torch takes a slow library for thin ones."""
    for place, call in enumerate(graph.calls):
        folded = call.function is conv_of_strips
        conv, rest, others = call.args[3:6] if folded else (call.function, call.args[3:], call.kwargs)
        pads = others.get("padding", ())
        if isinstance(pads, (tuple, list)) and len(pads) == 6 and pads[::2] == pads[1::2]:
            others = {**others, "padding": pads[::2]}  # as stock takes it
        if conv not in _OF_VOLUMES or not _is_onednns(graph, call, (*call.args[:3], *rest), others):
            continue
        others = {name: value for name, value in others.items() if name not in _NOT_STOCKS}
        if folded:
            args = (*call.args[:3], conv3d_by_onednn, rest, others, *call.args[6:])
            graph.calls[place] = dataclasses.replace(call, args=args)
        else:
            graph.calls[place] = dataclasses.replace(call, function=conv3d_by_onednn, kwargs=others)


def _is_onednns(graph: Graph, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch has oneDNN compute this convolution of a volume, in float32."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = _NOT_STOCKS | {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "weight": None}
    given |= dict(zip(names, args, strict=False)) | kwargs
    weight, padding = given["weight"], given["padding"]
    if len(call.inputs) > 1 or not isinstance(weight, Tensor) or call.autocast[2]:
        return False
    if isinstance(padding, str) or any(given[name] != value for name, value in _NOT_STOCKS.items()):
        padding = 0 if isinstance(padding, str) else None
    x, y = graph.fakes[call.inputs[0]], graph.fakes[call.outputs[0]]
    if padding is None or x.device.type != "cpu" or x.dtype != torch.float32 or x.dim() != 5:
        return False
    stride, pads, dilation = (listed(one, 3) for one in (given["stride"], padding, given["dilation"]))
    if len(pads) != 3 or (max(stride) > 1 and weight.size(1) == 1):
        return False  # with a stride and one channel oneDNN reads past the end (csrc/cpu/conv.cpp)
    conv = Conv(x.shape, weight.shape, y.shape, stride, pads, dilation, [0] * 3, given["groups"], False, x.dtype, False)
    thin = any(n + 2 * pad < reach for n, pad, reach in zip(x.shape[2:], pads, conv.reach, strict=True))
    return not thin and conv.by_onednn()


def in_channels_last(graph: Graph) -> Graph | None:
    """A graph whose strips are in channels_last, for a network that is faster so: on a CPU, in float32, one of
    convolutions, pools, activations and sums alone, or one with convolutions of volumes by oneDNN; on a GPU one with
    convolutions that tensor cores compute. What its other calls read and give stays as it is. Its results keep their
    layout. None for other networks.
    """
    turned = {place for place, call in enumerate(graph.calls) if _is_conv(call) and _is_faster(graph, call)}
    others = [call for place, call in enumerate(graph.calls) if place not in turned]
    slower = [call for call in others if not _is_faster(graph, call)]
    images = [graph.calls[place] for place in turned if graph.fakes[graph.calls[place].outputs[0]].dim() == 4]
    images = images if _on_cpu(graph) else []
    if not turned or (images and slower):
        return None
    stay = {v for v, fake in enumerate(graph.fakes) if fake.dim() not in _LAST}
    stay |= {v for call in slower for v in (*call.inputs, *call.outputs)}
    stay |= {v for call in images for v in _of_many_products(graph, call)}
    _let_stay(stay, others)
    if len(stay) == len(graph.fakes):
        return None
    formats = [torch.contiguous_format if v in stay else _LAST[fake.dim()] for v, fake in enumerate(graph.fakes)]
    calls = list(graph.calls)
    for place in turned:
        call = calls[place]
        call = call if call.function is conv_of_strips else _as_strips(call, None, call)
        calls[place] = dataclasses.replace(call, kwargs={"format": formats[call.outputs[0]]})
    with graph.mode:
        fakes = [
            fake if v in stay else cast(FakeTensor, fake.contiguous(memory_format=format))
            for v, (fake, format) in enumerate(zip(graph.fakes, formats, strict=True))
        ]
    strides = {v: graph.fakes[v].stride() for v in graph.results}
    return dataclasses.replace(graph, calls=calls, fakes=fakes, strides=strides)


def _on_cpu(graph: Graph) -> bool:
    return graph.device.type == "cpu"


def _of_many_products(graph: Graph, conv: Call) -> list[int]:
    """What a convolution gives, if it adds many products."""
    return conv.outputs if _weight(conv).numel() > _MOST_PRODUCTS * graph.fakes[conv.outputs[0]].size(1) else []


def _weight(conv: Call) -> Any:
    """A Ref, where it is computed of the image."""
    return conv.args[1] if len(conv.args) > 1 else conv.kwargs["weight"]


def _let_stay(stay: set[int], others: list[Call]) -> None:
    """Adds to the values that stay as they are those that calls, other than convolutions, join with them."""
    values = [{*call.inputs, *call.outputs} for call in others]
    before = -1
    while len(stay) > before:
        before = len(stay)
        for some in values:
            if some & stay:
                stay |= some


def copied_weights(graph: Graph) -> int:
    """Bytes of the largest weight of which strips in channels_last need a copy."""
    found = [(call.args[1], call.kwargs["format"]) for call in graph.calls if _is_turned(call)]
    return max((w.nbytes for w, format in found if not w.is_contiguous(memory_format=format)), default=0)


def _is_turned(call: Call) -> bool:
    return call.function is conv_of_strips and "format" in call.kwargs


def _is_conv(call: Call) -> bool:
    conv = call.args[3] if call.function is conv_of_strips else call.function
    return conv in _IN_2D or conv is conv3d_by_onednn


def _is_faster(graph: Graph, call: Call) -> bool:
    """Whether a call is no slower in channels_last."""
    on_cpu = _on_cpu(graph)
    for v in (*call.inputs, *call.outputs):
        fake = graph.fakes[v]
        served = fake.dtype == torch.float32 if on_cpu else fake.dtype in _of_tensor_cores()
        if fake.dim() not in (_LAST if on_cpu else (4,)) or not served or not fake.is_contiguous():
            return False
    of_conv = _is_conv(call)
    if (of_conv or call.name == "cat") and any(graph.fakes[v].size(1) == 1 for v in call.inputs):
        return False  # one channel is in either layout, and what torch makes of it in NCHW
    if of_conv:
        return len(call.inputs) == 1 and isinstance(_weight(call), Tensor)
    return call.by_place or call.name in _FASTER_IN_CHANNELS_LAST or (not on_cpu and call.name in _FASTER_ON_A_GPU)


def _of_tensor_cores() -> set[torch.dtype]:
    """What a GPU's tensor cores multiply, as torch is set."""
    tf32 = torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"
    return {torch.float16, torch.bfloat16, *([torch.float32] if tf32 else [])}


def _eval_norm(call: Call) -> _Norm | None:
    if call.function is not F.batch_norm:
        return None
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given: dict[str, Any] = {"weight": None, "bias": None, "training": False, "eps": 1e-5}
    given |= dict(zip(names, call.args, strict=False)) | call.kwargs
    if given["training"] or given["running_mean"] is None or given["running_var"] is None:
        return None
    return given["running_mean"], given["running_var"], given["weight"], given["bias"], given["eps"]
